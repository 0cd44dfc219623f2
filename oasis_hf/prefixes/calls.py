"""What a call says of its ids: a text that a store may know, or more than that."""

from __future__ import annotations

from typing import Any

import torch

_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "past_key_values", "cache"}
"""Arguments of a prompt's forward beside its ids. With any other, the same ids may mean another text."""


def are_text(ids: torch.Tensor, call: dict[str, Any]) -> bool:
    """Whether a call's ids are all there is to its tokens: nothing stands beside them, and each counts as one."""
    if any(call[name] is not None for name in call.keys() - _KNOWN):
        return False
    at, mask = call.get("position_ids"), call.get("attention_mask")
    if at is None:
        return True
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.detach().to("cpu", torch.bool)
    if at.shape[-1] != ids.shape[1] or real.shape != ids.shape:
        return False
    return bool(((at.cpu() == real.cumsum(1) - 1) | ~real).all())
