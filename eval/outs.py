"""What `--out` may be: types for `add_argument`, so that a wrong place is refused before anything is measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def json_file(text: str) -> Path:
    """A result's JSON; what belongs to it goes beside it.

    Raises:
        argparse.ArgumentTypeError: a folder, or a name that does not end in .json.
    """
    path = Path(text)
    if path.is_dir():
        named = path / f"{Path(sys.argv[0]).stem}.json"
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name the file, for example {str(named)!r}.")
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a file whose name ends in .json.")
    return path


def folder(text: str) -> Path:
    """Where a result's files go, by names of their own; made when there is something to write.

    Raises:
        argparse.ArgumentTypeError: a file, or a name that ends in .json.
    """
    path = Path(text)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a folder, in which the files have their names.")
    return path
