"""Whose keys and values these are: a model's weights, and the adapters at work in it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from . import supported

_SAMPLE = 64
"""Values of each weight that a fingerprint reads."""

_ELSEWHERE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation_internal")
"""Of a configuration: what says nothing about the model."""


def fingerprint(model: Any) -> str:
    """Of a model's configuration and weights: what two processes must agree on before one's KV serves the other."""
    told = {name: value for name, value in supported.text_config(model).to_dict().items() if name not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps([type(model).__name__, told], sort_keys=True, default=str).encode())
    for name, weight in sorted(supported.plain_model(model).named_parameters()):
        own = weight.to_local() if hasattr(weight, "to_local") else weight  # a rank's part
        few = own.detach().flatten()[:: max(1, own.numel() // _SAMPLE)][:_SAMPLE]
        digest.update(f"{name}{list(weight.shape)}{weight.dtype}".encode())
        digest.update(few.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def adapters(model: Any) -> tuple[str, ...]:
    """Which peft adapters are at work in a model, sorted."""
    tuners = [
        part for part in model.modules() if hasattr(part, "active_adapters") and hasattr(part, "disable_adapters")
    ]
    return tuple(sorted({name for part in tuners if part.disable_adapters is False for name in part.active_adapters}))
