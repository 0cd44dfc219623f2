"""The seam with transformers, and the only file that knows its versions.

What is hung on is taken off again when a model's last cache goes: the model's own `forward`, and what generate calls
before it, are wrapped on the instance, and an attention function and a mask function stand registered under the name
"oasis". The wrapper turns the name on for the length of a call that carries an `OasisCache`; every other call never
meets them. The name stands in the config, which threads share: so a wrapped model runs one forward at a time.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import parallel
from .masks import is_causal, window_of
from .placing import autocast_to, in_this_autocast, without_autocast
from .supported import UnsupportedModelError, text_config

if TYPE_CHECKING:
    from .cache import OasisCache

NAME = "oasis"
_active: ContextVar["OasisCache | None"] = ContextVar("oasis_active", default=None)
prefilling: ContextVar[bool] = ContextVar("oasis_prefilling", default=False)
_attachments: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()
_attaching = threading.RLock()
_locks: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # of configs: models may share one
_replaced: dict[int, str] = {}  # config -> the implementation that NAME stands in for, kept for calls that race with it

CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.24 renamed the argument
HANDLE = "_oasis_layer"
"""Attribute of a compiled layer's attention module: its `layer_idx` as a tensor, which graphs are not made anew for."""

OUTPUT_HOOKS = "transformers.utils.output_capturing"
"""Where the hooks come from that stay on a model once a call asked for its hidden states or attentions: they do nothing
unless a call asks."""


def ranks_of(model: Any) -> Any:
    """The process group over which a model's tensors are split, None where they are not. Its mesh has one dimension, or
    several with names."""
    if parallel.size(model) == 1:
        return None
    mesh = model._device_mesh
    return mesh.get_group("tp") if "tp" in (mesh.mesh_dim_names or ()) else mesh.get_group()


def cache_name(model: Any) -> str:
    """What this version of transformers calls the cache argument and the output's field."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


# -- attention and mask functions -----------------------------------------------------------------------------------


def oasis_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, s_aux: torch.Tensor | None = None,
    softcap: float | None = None, position_bias: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """transformers' attention interface. query `[B, Hq, q, D]`, key and value `[B, H, q, D]`, post-RoPE."""
    handle = getattr(module, HANDLE, None)
    if handle is not None and torch.compiler.is_compiling():
        _refuse_extras(module, dropout, softcap, attention_mask, position_bias)
        return torch.ops.oasis_hf.layer(query, key, value, handle, scaling, s_aux), None
    cache = _active.get()
    if cache is None:
        given = {"s_aux": s_aux, "softcap": softcap, "position_bias": position_bias}
        kwargs.update((name, value) for name, value in given.items() if value is not None)
        plain = _own_attention(module)
        return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse_extras(module, dropout, softcap, attention_mask, position_bias)
    window, own = kwargs.get("sliding_window"), cache.layers[module.layer_idx].window
    if window is not None and window != own:
        raise UnsupportedModelError(_windows_differ(cache, own, {window}))
    return attend_layer(cache, module.layer_idx, query, key, value, scaling, s_aux), None


_OTHER = "use DynamicCache for this model."


def _refuse_extras(module: Any, dropout: float, softcap: float | None, mask: Any, bias: Any) -> None:
    if dropout:
        raise RuntimeError("OasisCache does not apply attention dropout: call model.eval() before generating.")
    if softcap is not None:
        raise RuntimeError(f"OasisCache does not support soft-capped attention logits: {_OTHER}")
    if mask is not None or bias is not None:
        raise RuntimeError(f"OasisCache does not apply the mask or bias that {type(module).__name__} makes: {_OTHER}")


@torch.compiler.disable
def attend_layer(
    cache: "OasisCache", index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One layer's attention of the forward under way: arguments as `oasis_attention` has them. Returns
    `[B, q, Hq, D]`."""
    step, layer = cache.state.need_step(), cache.layers[index]
    if layer.heads != key.shape[1]:
        raise RuntimeError(
            f"OasisCache was given {layer.heads} KV heads to keep, but {type(cache.model).__name__} attends with "
            f"{key.shape[1]}: {_OTHER}"
        )
    if index in step.attended:
        raise RuntimeError(
            f"{type(cache.model).__name__} attends twice a layer, and OasisCache would store each token twice: {_OTHER}"
        )
    if step.windows and layer.window not in step.windows:
        raise UnsupportedModelError(_windows_differ(cache, layer.window, step.windows))
    step.attended.add(index)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with without_autocast(query.device):
        out = layer.attend(query.to(key.dtype), key, value, scaling, sinks)
    if step.tick is not None:
        step.tick()
    return out.transpose(1, 2).contiguous()


def _windows_differ(cache: "OasisCache", window: int | None, asked: set[int | None]) -> str:
    name = type(cache.model).__name__
    if window is not None and asked == {None}:
        return (
            f"{name} attends to everything, but its configuration names a sliding window of {window}, by which every "
            "cache would forget what it needs: set model.config.sliding_window = None first."
        )
    told = " or ".join("none" if one is None else str(one) for one in sorted(asked, key=lambda one: one or 0))
    return f"{name} asks for a sliding window of {told} in a layer whose configuration says {window}: {_OTHER}"


def oasis_mask(*args: Any, **kwargs: Any) -> Any:
    """No mask where an `OasisCache` is at work: it knows the padding and builds what it needs."""
    cache = _active.get()
    if cache is None:
        name = _own_implementation(kwargs["config"])
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs) if name in ALL_MASK_ATTENTION_FUNCTIONS else None
    step = cache.state.need_step()
    step.windows.add(window_of(kwargs["mask_function"]))
    if not is_causal(kwargs["mask_function"], step.mode == "prefill"):
        raise UnsupportedModelError(
            f"OasisCache attends causally only, but {type(cache.model).__name__} asks for another mask in this call "
            "(an image or a prefix that sees itself whole, or an encoder): use DynamicCache for it."
        )
    return None


def _own_implementation(config: Any) -> str:
    """What a call without an `OasisCache` would have met, had another thread not just put our name in the config."""
    name = config._attn_implementation
    return _replaced.get(id(config), "sdpa") if name == NAME else name


def _own_attention(module: Any) -> Callable[..., Any]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", ALL_ATTENTION_FUNCTIONS["sdpa"])
    return ALL_ATTENTION_FUNCTIONS.get_interface(_own_implementation(module.config), eager)


AttentionInterface.register(NAME, oasis_attention)
AttentionMaskInterface.register(NAME, oasis_mask)


# -- the forward wrapper --------------------------------------------------------------------------------------------


class _Forward:
    """Stands in for `model.forward`. A copy of the model gets its own plain forward, not one bound to the original."""

    def __init__(self, model: Any, inner: Any) -> None:
        functools.update_wrapper(self, inner, updated=())  # what torch.compile hangs on `inner` is not ours
        self.model, self.inner = weakref.ref(model), inner
        self.signature = inspect.signature(inner)
        self.name = cache_name(model)
        self.lock = _locks.setdefault(id(text_config(model)), threading.RLock())

    @torch.compiler.disable(recursive=False)  # plain calls stay compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .cache import OasisCache

        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        if cache is None and args:
            bound = self.signature.bind_partial(*args).arguments
            cache = next((bound[name] for name in CACHE_NAMES if bound.get(name) is not None), None)
        with self.lock:
            # An older wrapper may stand inside someone else's: the outer one has the call in hand.
            if isinstance(cache, OasisCache) and _active.get() is not cache:
                return self._run(cache, args, kwargs)
            return self.inner(*args, **kwargs)

    @torch.compiler.disable
    def _run(self, cache: "OasisCache", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.model()
        if cache.model is not model:
            raise ValueError(
                "This OasisCache was made for another model: its blocks mean nothing here. Make one with "
                "OasisCache(this_model)."
            )
        device = cache.device
        if device.type == "meta":
            raise ValueError(
                f"{type(model).__name__} is on the device 'meta' and has no weights to run with: load it with "
                "from_pretrained first."
            )
        # By their names, as most calls have them anyway.
        call = _flatten(self.signature.bind_partial(*args, **kwargs)) if args else kwargs
        for name in CACHE_NAMES:
            call.pop(name, None)
        call[self.name] = cache
        config = text_config(model)
        token, implementation = _active.set(cache), config._attn_implementation_internal
        if implementation != NAME:
            _replaced[id(config)] = implementation
        config._attn_implementation_internal = NAME
        try:
            inner = getattr(self.inner, "_torchdynamo_orig_callable", self.inner)
            cache.graphs.autocast = autocast_to(device) is not None
            inner = in_this_autocast(inner, device)
            with without_autocast(device):
                # On several devices accelerate moves such indices to the first, and the head's states are on the last.
                keeps = cache.state.devices is None and "logits_to_keep" in self.signature.parameters
                return cache.run(inner, call, self.name, keeps)
        finally:
            config._attn_implementation_internal = implementation
            _active.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.model()))
        return types.MethodType(type(copy).forward, copy) if copy is not None else self.inner

    def __reduce__(self) -> Any:
        raise TypeError("A model with a live OasisCache can't be pickled: call oasis_hf.detach(model) first.")


def _flatten(bound: inspect.BoundArguments) -> dict[str, Any]:
    call = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call


def from_generate(call: dict[str, Any]) -> bool:
    """Whether a forward's arguments are those of generate's own loop, whose mask grows by ones at every step."""
    return call.get("return_dict") is True and call.get("use_cache") is True and call.get("position_ids") is not None


def active_cache() -> "OasisCache | None":
    """Whose forward is running."""
    return _active.get()


def in_prefill() -> bool:
    """Whether generate's own prefill stage is running."""
    return prefilling.get()


class Attachment:
    """What hangs on one model, and the caches that need it."""

    def __init__(self) -> None:
        self.caches: "weakref.WeakSet[OasisCache]" = weakref.WeakSet()
        self.own: dict[str, Any] = {}
        self.placed: dict[str, Any] = {}

    def place(self, model: Any) -> None:
        """Hang it on, unless it hangs there outermost."""
        from .generating import METHODS

        if self.placed and model.__dict__.get("forward") is self.placed["forward"]:
            return
        self.remove(model)
        self.own = {name: model.__dict__[name] for name in ("forward", *METHODS) if name in model.__dict__}
        self.placed = {"forward": _Forward(model, model.forward)}
        for name, wrapper in METHODS.items():
            if hasattr(model, name):
                self.placed[name] = wrapper(getattr(model, name))
        model.__dict__.update(self.placed)

    def remove(self, model: Any) -> None:
        for name, wrapper in self.placed.items():
            if model.__dict__.get(name) is not wrapper:
                continue  # someone wrapped it again: ours stays inside and lets everything through
            if name in self.own:
                model.__dict__[name] = self.own[name]
            else:
                del model.__dict__[name]


def attach(model: Any, cache: "OasisCache") -> None:
    """Hang the seam on a model for the life of a cache. Idempotent."""
    with _attaching:
        attachment = _attachments.get(model) or Attachment()
        attachment.caches.add(cache)
        _attachments[model] = attachment  # again: a collection in between may have released it
        attachment.place(model)
        for also in at_attach:
            also(model, cache)
    weakref.finalize(cache, _release, weakref.ref(model))


def _release(model: "weakref.ref[Any]") -> None:
    with _attaching:
        target = model()
        attachment = _attachments.get(target) if target is not None else None
        # Iterating skips caches that are already gone; the length may still count them.
        if attachment is not None and not list(attachment.caches):
            detach(target)


at_attach: list[Callable[[Any, "OasisCache"], None]] = []
"""Called with a model and a cache that is attached to it."""

at_detach: list[Callable[[Any], None]] = []
"""Called with a model that is detached: what else was done to it is undone."""


def detach(model: Any) -> None:
    """Take the seam off: the model is exactly as it was. Caches made for it stop working."""
    with _attaching:
        attachment = _attachments.pop(model, None)
        if attachment is not None:
            attachment.remove(model)
            for undo in at_detach:
                undo(model)
