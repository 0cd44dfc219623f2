"""Real texts of different kinds that any installation already has: nothing is downloaded and nothing is shipped.

They come from Python itself and from the packages that this project requires, so another version of those gives
slightly other texts; results name each text's sha256.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata as metadata
import importlib.util
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Source = Callable[[], Iterator[str]]


def reference() -> Iterator[str]:
    """Reference prose: the Python language reference, as `help()` prints it."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def code() -> Iterator[str]:
    """Program text: modules of the standard library."""
    yield from (_source(name) for name in ("argparse", "zipfile", "tarfile", "inspect"))


def licence() -> Iterator[str]:
    """Legal prose: licences that the required packages bundle."""
    for package in ("transformers", "numpy", "torch", "sympy", "networkx", "tqdm"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in sorted(files):
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")) and file.suffix in ("", ".txt", ".md"):
                yield Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")


def table() -> Iterator[str]:
    """Structured data: a CSV of Unicode's own character table."""
    yield "code,name,category,bidirectional,combining,width\n"
    for number in range(0x20, 0x3000):
        char = chr(number)
        name = unicodedata.name(char, "")
        if name:
            fields = (unicodedata.category(char), unicodedata.bidirectional(char), str(unicodedata.combining(char)))
            yield f"U+{number:04X},{name},{','.join(fields)},{unicodedata.east_asian_width(char)}\n"


def tutorial() -> Iterator[str]:
    """Explanations with worked sessions (a question, its answer): docstrings with examples of the standard library."""
    for name in ("_pydecimal", "statistics", "doctest", "difflib", "random", "collections", "string", "pickletools"):
        for node in ast.walk(ast.parse(_source(name))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and ">>>" in text:
                    yield f"{getattr(node, 'name', name)}\n\n{text}\n\n"


def readme() -> Iterator[str]:
    """Marketing and manuals in markdown: the required packages' own front pages."""
    for package in ("torch", "transformers", "huggingface_hub", "rich", "tqdm"):
        try:
            yield str(metadata.metadata(package).get_payload() or metadata.metadata(package)["Description"] or "")
        except metadata.PackageNotFoundError:
            continue


SOURCES: dict[str, Source] = {f.__name__: f for f in (reference, code, licence, table, tutorial, readme)}


def text(name: str, characters: int) -> str:
    """The first `characters` of one source, or a little more."""
    pieces, total = [], 0
    for piece in SOURCES[name]():
        pieces.append(piece)
        total += len(piece)
        if total >= characters:
            break
    return "".join(pieces)


def tokenize(tokenizer: object, name: str, count: int) -> torch.Tensor:
    """`[count]` int64 ids of the first `count` tokens of a source.

    Raises:
        ValueError: this installation's source is shorter than that.
    """
    ids = tokenizer(text(name, 12 * count), return_tensors="pt").input_ids[0]  # type: ignore[operator]
    if len(ids) < count:
        raise ValueError(f"The text {name!r} has {len(ids):,} tokens on this installation, {count:,} are needed.")
    return ids[:count].to(torch.int64)


def asked(tokenizer: Any, name: str, count: int) -> torch.Tensor:
    """`[count]` ids of a chat whose one turn is as much of a text as fits, and a request; the reply comes next."""
    turn = [{"role": "user", "content": "TEXT\n\nSummarize the text above."}]
    around = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split("TEXT")
    before, after = (tokenizer(part, return_tensors="pt").input_ids[0].to(torch.int64) for part in around)
    return torch.cat((before, tokenize(tokenizer, name, count - len(before) - len(after)), after))


def windows(tokenizer: object, count: int, length: int, apart: int) -> list[tuple[str, torch.Tensor]]:
    """`count` names and prompts `[length]`: the first tokens of every text in turn, then those `apart` tokens further
    on, and so on. A text gives as many as it has.

    Raises:
        ValueError: all texts of this installation together give fewer.
    """
    out: list[tuple[str, torch.Tensor]] = []
    part = 0
    while len(out) < count:
        before = len(out)
        for name in SOURCES:
            with contextlib.suppress(ValueError):
                out.append((f"{name} {part}", tokenize(tokenizer, name, part * apart + length)[part * apart :]))
        if len(out) == before:
            raise ValueError(f"The texts of this installation give {len(out)} prompts of {length:,} tokens.")
        part += 1
    return out[:count]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")
