"""Checks of an EAGLE-3 head's files against the target model, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .base import DrafterError

TAPS = 3
"""Layers that an EAGLE-3 head taps unless its config lists them."""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise DrafterError(f"The drafter's file {file.name!r} is truncated or not JSON: {error}.") from error


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
    config = _read_json(folder / "config.json")
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
        for name, file_name in _read_json(index).get("weight_map", {}).items():
            if name not in shapes:
                raise DrafterError(f"The drafter is truncated: {name!r} should be in {file_name!r} and is not.")
    if "fc.weight" not in shapes:
        raise DrafterError(f"The folder {str(path)!r} holds no EAGLE-3 head: it has no tensor 'fc.weight'.")
    target = model.config.get_text_config(decoder=True)
    wide = shapes["fc.weight"][1]
    tapped = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or range(TAPS)
    if wide != len(tapped) * target.hidden_size:
        raise DrafterError(
            f"The drafter was made for another model: it taps {len(tapped)} hidden states {wide:,} wide together, but "
            f"this model's are {target.hidden_size:,} wide each."
        )
    if config.get("vocab_size") != target.vocab_size:
        raise DrafterError(
            f"The drafter was made for another vocabulary: {config.get('vocab_size')} ids, this model has "
            f"{target.vocab_size}."
        )
