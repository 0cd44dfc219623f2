"""Whose keys and values these are: a model's weights, and the adapters at work in it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from . import supported

_SAMPLE = 64
"""Values of each weight that a fingerprint reads."""

_ELSEWHERE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation_internal")
"""Of a configuration: what says nothing about the model."""


def fingerprint(model: Any) -> str:
    """Of a model's configuration and weights: what two processes must agree on before one's KV serves the other."""
    told = {name: value for name, value in supported.text_config(model).to_dict().items() if name not in _ELSEWHERE}
    kind = json.dumps([type(model).__name__, told], sort_keys=True, default=str)
    return weights(supported.plain_model(model), kind)


def weights(module: torch.nn.Module, kind: str = "") -> str:
    """Of a module's weights, by a sample of each, and of its `kind`."""
    digest = hashlib.sha256(kind.encode())
    saved = module.state_dict().keys()  # packed weights are buffers
    held = [*module.named_parameters(), *((name, own) for name, own in module.named_buffers() if name in saved)]
    for name, weight in sorted(held, key=lambda one: one[0]):
        own = weight.to_local() if hasattr(weight, "to_local") else weight  # a rank's part
        if own.device.type == "meta":
            own = _elsewhere(module, name, own)
        few = own.detach().flatten()[:: max(1, own.numel() // _SAMPLE)][:_SAMPLE]
        digest.update(f"{name}{list(weight.shape)}{weight.dtype}".encode())
        digest.update(few.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _elsewhere(module: torch.nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight that accelerate keeps elsewhere until its module runs, from there."""
    owner, _, own = name.rpartition(".")
    hook: Any = getattr(module.get_submodule(owner), "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    kept = next((one.weights_map for one in hooks if getattr(one, "weights_map", None) is not None), {own: weight})
    return kept[own]


def adapters(model: Any) -> tuple[str, ...]:
    """Which peft adapters are at work in a model, sorted."""
    tuners = _tuners(model)
    return tuple(sorted({name for part in tuners if part.disable_adapters is False for name in part.active_adapters}))


def mixed(model: Any) -> bool:
    """Whether the call under way gives each row an adapter of its own (peft's `adapter_names`, which it hooks in)."""
    hooks = (hook for part in _tuners(model) for hook in part._forward_pre_hooks.values())
    return any("adapter_names" in (getattr(hook, "keywords", None) or {}) for hook in hooks)


def _tuners(model: Any) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "active_adapters") and hasattr(part, "disable_adapters")]
