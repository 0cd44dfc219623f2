"""Hooks on the target's decoder layers that hand their inputs to the drafter of the cache whose forward is running.

They hang on a model while one of its caches lives, one a tapped layer for all caches and drafters: they know none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import attach
from ..fused import FusionError, decoder_layers
from .base import DrafterError

if TYPE_CHECKING:
    from ..cache import OasisCache

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class Tap:
    """A forward pre-hook. index: the layer whose input it reads."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # a plain call: what runs under a cache is not compiled around the layers
        cache = attach.active_cache()
        if cache is not None and self.index in cache.drafter.taps:
            hidden = args[0] if args else kwargs["hidden_states"]
            cache.drafter.tap(self.index, hidden, cache.state.need_step())


def places(model: Any, taps: tuple[int, ...]) -> list[torch.nn.Module]:
    """The modules whose inputs are those of layers `taps`; the number of layers stands for the final norm.

    Raises:
        DrafterError: the model's layers, or its final norm, were not found.
    """
    try:
        layers = decoder_layers(model)
    except FusionError as error:
        raise DrafterError(f"The drafter has nothing to tap: {error}.") from error
    found = list(layers)
    if len(layers) in taps:
        owners = (module for module in model.modules() if any(child is layers[0] for child in _listed(module)))
        owner = next(owners, None)
        norm = next((getattr(owner, name) for name in _FINAL_NORMS if hasattr(owner, name)), None)
        if norm is None:
            kind = type(model).__name__
            raise DrafterError(f"The drafter taps the final norm's input, and none was found in {kind}.")
        found.append(norm)
    return [found[i] for i in taps]


def _listed(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for part in module.children() if isinstance(part, torch.nn.ModuleList) for child in part]


def hang(model: Any, cache: "OasisCache") -> None:
    """What the cache's drafter taps has its hooks, once."""
    taps = cache.drafter.taps
    for index, place in zip(taps, places(model, taps) if taps else ()):
        hooks = place._forward_pre_hooks.values()
        if not any(isinstance(hook, Tap) and hook.index == index for hook in hooks):
            place.register_forward_pre_hook(Tap(index), with_kwargs=True)


def remove(model: Any) -> None:
    """The model has none of these hooks any more."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Tap):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


attach.at_attach.append(hang)
attach.at_detach.append(remove)
