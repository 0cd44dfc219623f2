"""How a target's attention is done here while it generates and while it is read, whatever its family.

A handler is given each layer's q, k and v after RoPE. So generation keeps its own keys and values, packed texts need no
mask, and nothing depends on transformers' caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from .. import supported
from .config import TrainError

NAME = "oasis_train"

Handler = Callable[..., torch.Tensor]
"""(layer, query `[B, Hq, q, D]`, key and value `[B, H, q, D]`, scale, sliding window or None) -> `[B, q, Hq, D]`."""

_handler: list[Handler] = []


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _handler[-1](module.layer_idx, query, key, value, scale, sliding_window), None


AttentionInterface.register(NAME, _attention)


def check(model: Any) -> None:
    """Raises `TrainError` where a head can't be trained for a model."""
    config = supported.text_config(model)
    kind, reasons = type(model).__name__, list(supported.refusals(model, config))
    if reasons:
        raise TrainError(f"No drafter can be trained for {kind}: {reasons[0]}")
    if "gpt_oss" in str(config.model_type) or getattr(config, "final_logit_softcapping", None):
        raise TrainError(f"No drafter can be trained for {kind} yet: it has attention sinks or soft-capped logits.")
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise TrainError(f"No drafter can be trained for {kind} yet: it scales its logits ({name}).")
    if not supported.has_head(model):
        raise TrainError(f"No drafter can be trained for {kind}: it gives no logits.")


@contextlib.contextmanager
def handled(model: Any, handler: Handler) -> Iterator[None]:
    """The model's attention is the handler's while this lasts. One thread at a time."""
    config = supported.text_config(model)
    before = config._attn_implementation_internal
    config._attn_implementation_internal = NAME
    _handler.append(handler)
    try:
        yield
    finally:
        _handler.pop()
        config._attn_implementation_internal = before


def no_mask(device: torch.device) -> torch.Tensor:
    """What is passed as attention_mask: of four dimensions, so that transformers makes none and looks at no ids."""
    return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
