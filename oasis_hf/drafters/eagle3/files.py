"""The files of an EAGLE-3 head: a folder or a repository of the hub to its configuration and tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..base import DrafterError

PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json"]
"""What is fetched of a repository."""


def find(source: Any, revision: str | None = None) -> Path:
    """The folder of a head.

    Args:
        source: a folder with a `config.json`, or a repository's id (`owner/name`), which is downloaded unless the hub's
            local cache has it.
        revision: branch, tag or commit of the repository; None: its main branch.

    Raises:
        DrafterError: it is neither, or can't be downloaded.
    """
    folder = Path(source)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or not isinstance(source, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise DrafterError(
            f"drafter={str(source)!r} is neither the name of a drafter nor a folder with a config.json: use "
            "'auto', 'previous' or 'prompt_lookup'."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    except Exception as error:  # what a network and its servers raise has many types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DrafterError(
            f"drafter={source!r} is no folder here, and can't be had from the hub either: {reason}"
        ) from error


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head's `config.json`, and its tensors by the names that the files give them, from safetensors (one or several)
    or `pytorch_model.bin`s.

    Raises:
        DrafterError: a file is truncated, missing or of another kind.
    """
    if not (folder / "config.json").is_file():
        raise DrafterError(f"The drafter {folder.name!r} has no config.json.")
    config = _read_json(folder / "config.json")
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files or sorted(folder.glob("pytorch_model*.bin")):
        tensors.update(_read_safetensors(file) if files else _read_bin(file))
    index = folder / ("model.safetensors.index.json" if files else "pytorch_model.bin.index.json")
    if index.is_file():
        for name, file_name in _read_json(index).get("weight_map", {}).items():
            if name not in tensors:
                raise DrafterError(f"The drafter is truncated: {name!r} should be in {file_name!r} and is not.")
    return config, tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DrafterError(f"The drafter's file {file.name!r} is truncated or not JSON: {error}.") from error


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_tensor(name) for name in list(tensors.keys())}  # not a mapping: no iterator
    except Exception as error:
        raise DrafterError(f"The drafter's file {file.name!r} is truncated or not safetensors: {error}.") from error


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DrafterError(
            f"The drafter's file {file.name!r} is truncated or not a PyTorch file of tensors: {reason}."
        ) from error
