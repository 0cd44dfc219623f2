"""Where a model takes its input and what it computes in, whatever its weights are: plain, quantized, or elsewhere until
they are needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Placed(NamedTuple):
    """Of a model: the device that its ids go to, and the dtype of its hidden states."""

    device: torch.device
    dtype: torch.dtype


def placed(model: Any) -> Placed:
    """Told from the input embedding. One that accelerate keeps elsewhere until it runs names no device of its own, a
    quantized one no floating dtype."""
    module = model.get_input_embeddings()
    weight: Any = getattr(module, "weight", None)
    if weight is None:
        weight = next((one for one in (*module.parameters(), *module.buffers())), next(model.parameters()))
    device: torch.device = weight.device
    hook: Any = getattr(module, "_hf_hook", None)
    if device.type == "meta" and getattr(hook, "execution_device", None) is not None:
        device = torch.device(hook.execution_device)
    return Placed(device, weight.dtype if weight.is_floating_point() else model.dtype)


def layer_devices(model: Any) -> list[torch.device] | None:
    """Where each decoder layer computes, if accelerate has laid them on several devices (`device_map`); else None."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
        return None
    from .fused import FusionError, decoder_layers

    try:
        devices = [_computes_on(layer, next(layer.parameters())) for layer in decoder_layers(model)]
    except FusionError:
        return None
    return devices if len(set(devices)) > 1 else None


def needs_one_device(model: Any, what: str) -> None:
    """Raise UnsupportedModelError where a model's layers lie on several devices, for what keeps all they share on
    one."""
    from .supported import UnsupportedModelError

    devices = layer_devices(model)
    if devices is not None:
        told = ", ".join(dict.fromkeys(map(str, devices)))
        raise UnsupportedModelError(
            f"{what} does not support {type(model).__name__} on several devices ({told}): load it on one, or use "
            "OasisCache(model)."
        )


def _computes_on(module: nn.Module, weight: torch.Tensor) -> torch.device:
    """Weights that are elsewhere until they are needed name no device of their own: a module's hook does."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if weight.device.type in ("meta", "cpu") and device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return weight.device


def plain_weight(module: Any) -> torch.Tensor | None:
    """A module's weight `[V, H]`, if it may be read past the module: an ordinary tensor that is there."""
    weight: Any = getattr(module, "weight", None)
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.is_floating_point() and weight.device.type != "meta"
    return weight if plain else None


# -- autocast -------------------------------------------------------------------------------------------------------


def autocast_to(device: torch.device) -> torch.dtype | None:
    """What `torch.autocast` makes of attention's operands here; None where it is off."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Our own arithmetic is as it is written, whatever the caller's context."""
    return contextlib.nullcontext() if autocast_to(device) is None else torch.autocast(device.type, enabled=False)


def in_this_autocast(call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A call that runs under the autocast that is on now, wherever it is made from."""
    dtype = autocast_to(device)
    if dtype is None:
        return call

    @functools.wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return call(*args, **kwargs)

    return inside
