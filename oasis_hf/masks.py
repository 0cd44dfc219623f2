"""What mask a model asks for: transformers builds mask functions as closures, which are taken apart here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

_AND, _OR, _WINDOW, _GROUPS = (
    function.__code__
    for function in (
        masking_utils.and_masks(masking_utils.causal_mask_function),
        masking_utils.or_masks(masking_utils.causal_mask_function),
        masking_utils.sliding_window_overlay(1),
        masking_utils.blockwise_overlay(torch.zeros(0)),
    )
)


def is_causal(mask: Callable[..., Any], may_read: bool) -> bool:
    """Whether a mask function is the causal one, with or without a window. transformers builds them as closures, so
    they are taken apart. may_read: look for tokens that see each other both ways (a processor marks "none" too)."""
    if mask is masking_utils.causal_mask_function:
        return True
    code = getattr(mask, "__code__", None)
    if code is _AND:
        parts = [part for part in _enclosed(mask, "mask_functions") if getattr(part, "__code__", None) is not _WINDOW]
        return len(parts) == 1 and is_causal(parts[0], may_read)
    if code is not _OR or not may_read:
        return False
    first, *others = _enclosed(mask, "mask_functions")
    return is_causal(first, may_read) and all(
        getattr(other, "__code__", None) is _GROUPS and not bool((_enclosed(other, "block_sequence_ids") >= 0).any())
        for other in others
    )


def window_of(mask: Callable[..., Any]) -> int | None:
    """The window of a causal mask function, None where it has none."""
    code = getattr(mask, "__code__", None)
    if code is _WINDOW:
        return int(_enclosed(mask, "sliding_window"))
    if code is not _AND and code is not _OR:
        return None
    windows = [window_of(part) for part in _enclosed(mask, "mask_functions")]
    return next((window for window in windows if window is not None), None)


def _enclosed(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
