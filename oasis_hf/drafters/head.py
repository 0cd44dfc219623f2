"""Checks of an EAGLE-3 head's files against the target model, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .base import DrafterError


def check_head(path: Any, model: Any) -> None:
    """Read a head's config and tensor headers (not its weights).

    Args:
        path: folder with `config.json` and safetensors in the plain EAGLE-3 layout.
        model: the target.

    Raises:
        DrafterError: no such folder, a truncated or missing file, or another hidden size or vocabulary.
    """
    from safetensors import safe_open

    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise DrafterError(
            f"drafter={str(path)!r} is neither the name of a drafter nor a folder with a config.json: use "
            "'auto', 'previous' or 'prompt_lookup'."
        )
    config = json.loads((folder / "config.json").read_text())
    shapes: dict[str, list[int]] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in list(tensors.keys()):  # not a mapping: it has no iterator
                    shapes[name] = tensors.get_slice(name).get_shape()
        except Exception as error:
            raise DrafterError(f"The drafter's file {file.name!r} is truncated or not safetensors: {error}.") from error
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, file_name in json.loads(index.read_text())["weight_map"].items():
            if name not in shapes:
                raise DrafterError(f"The drafter is truncated: {name!r} should be in {file_name!r} and is not.")
    if "fc.weight" not in shapes:
        raise DrafterError(f"The folder {str(path)!r} holds no EAGLE-3 head: it has no tensor 'fc.weight'.")
    target = model.config.get_text_config(decoder=True)
    wide = shapes["fc.weight"][1]
    if wide % target.hidden_size:
        raise DrafterError(
            f"The drafter was made for another model: it taps hidden states {wide} wide together, which is no "
            f"multiple of this model's hidden size {target.hidden_size}."
        )
    if config.get("vocab_size") != target.vocab_size:
        raise DrafterError(
            f"The drafter was made for another vocabulary: {config.get('vocab_size')} ids, this model has "
            f"{target.vocab_size}."
        )
