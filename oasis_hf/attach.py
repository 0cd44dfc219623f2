"""The seam with transformers, and the only file that knows its versions.

Three things are hung on, and taken off again when a model's last cache goes: the model's own `forward` is wrapped on
the instance, and an attention function and a mask function stand registered under the name "oasis". The wrapper turns
the name on for the length of a call that carries an `OasisCache`; every other call never meets them.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .config import ConfigError

if TYPE_CHECKING:
    from .cache import OasisCache

NAME = "oasis"
_active: ContextVar["OasisCache | None"] = ContextVar("oasis_active", default=None)
_prefilling: ContextVar[bool] = ContextVar("oasis_prefilling", default=False)
_attachments: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()

_CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.24 renamed the argument


class UnsupportedModelError(ConfigError):
    """This model can't run on an `OasisCache`; the message names the cause and the way out."""


def cache_name(model: Any) -> str:
    """What this version of transformers calls the cache argument and the output's field."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def text_config(model: Any) -> Any:
    """The decoder's own config, which its attention modules read."""
    return model.config.get_text_config(decoder=True)


# -- which models ---------------------------------------------------------------------------------------------------


def layer_windows(model: Any) -> list[int | None]:
    """The sliding window of each decoder layer in tokens, None for full attention.

    Raises:
        UnsupportedModelError: for anything a working set can't serve.
    """
    config = text_config(model)
    for refusal in refusals(model, config):
        raise UnsupportedModelError(f"OasisCache does not support {type(model).__name__}: {refusal}")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def refusals(model: Any, config: Any) -> Iterator[str]:
    """Reasons not to serve a model, each with the way out."""
    other = "use DynamicCache for it."
    if getattr(model.config, "is_encoder_decoder", False):
        yield f"it is an encoder-decoder and its cross-attention has no next block to predict; {other}"
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None):
        yield f"its latent attention (MLA) caches no per-head keys; {other}"
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        yield f"it has layers of type {', '.join(sorted(odd))}, only full and sliding attention work; {other}"
    if getattr(config, "num_kv_shared_layers", 0):
        yield f"its layers share keys and values; {other}"
    if getattr(config, "attention_chunk_size", None):
        yield f"it attends in chunks; {other}"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"it soft-caps attention logits; {other}"
    if getattr(config, "is_causal", True) is False:
        yield f"its attention is not causal; {other}"
    if not getattr(model, "_supports_attention_backend", False):
        yield f"its code does not take attention functions from outside; {other}"
    size = getattr(model, "_tp_size", None) or 1
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if size > 1 and heads % size:
        yield f"{heads} KV heads do not divide over tensor-parallel size {size}; choose a size that divides {heads}."


# -- attention and mask functions -----------------------------------------------------------------------------------


def oasis_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface. query `[B, Hq, q, D]`, key and value `[B, H, q, D]`, post-RoPE."""
    cache = _active.get()
    if cache is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        raise RuntimeError("OasisCache does not apply attention dropout: call model.eval() before generating.")
    if softcap is not None:
        raise RuntimeError("OasisCache does not support soft-capped attention logits: use DynamicCache for this model.")
    layer: Any = cache.layers[module.layer_idx]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(query, key, value, scaling, s_aux)
    if cache.state.step is not None and cache.state.step.tick is not None:
        cache.state.step.tick()
    return out.transpose(1, 2).contiguous(), None


def oasis_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask where an `OasisCache` is at work: it knows the padding and builds what it needs."""
    if _active.get() is None:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return None


AttentionInterface.register(NAME, oasis_attention)
AttentionMaskInterface.register(NAME, oasis_mask)


# -- the forward wrapper --------------------------------------------------------------------------------------------


class _Forward:
    """Stands in for `model.forward`. A copy of the model gets its own plain forward, not one bound to the original."""

    def __init__(self, model: Any, inner: Any) -> None:
        functools.update_wrapper(self, inner)
        self.model, self.inner = weakref.ref(model), inner
        self.signature = inspect.signature(inner)
        self.name = cache_name(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .cache import OasisCache

        cache = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        if cache is None and args:
            bound = self.signature.bind_partial(*args).arguments
            cache = next((bound[name] for name in _CACHE_NAMES if bound.get(name) is not None), None)
        if not isinstance(cache, OasisCache):
            return self.inner(*args, **kwargs)
        model = self.model()
        if cache.model is not model:
            raise ValueError(
                "This OasisCache was made for another model: its blocks mean nothing here. Make one with "
                "OasisCache(this_model)."
            )
        call = _flatten(self.signature.bind_partial(*args, **kwargs))
        for name in _CACHE_NAMES:
            call.pop(name, None)
        call[self.name] = cache
        config = text_config(model)
        token, implementation = _active.set(cache), config._attn_implementation_internal
        config._attn_implementation_internal = NAME
        try:
            return cache.run(self.inner, call, self.name, "logits_to_keep" in self.signature.parameters)
        finally:
            config._attn_implementation_internal = implementation
            _active.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.model()))
        return types.MethodType(type(copy).forward, copy) if copy is not None else self.inner

    def __reduce__(self) -> Any:
        raise TypeError("A model with a live OasisCache can't be pickled: call oasis_hf.detach(model) first.")


class _Prefill:
    """Stands in for `model._prefill`, generate's own prefill stage: what runs inside it is a prompt or a chunk of one,
    however short. It also tells the cache which ids end a row in this call."""

    def __init__(self, inner: Any) -> None:
        functools.update_wrapper(self, inner)
        self.inner = inner

    def __call__(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        from .cache import OasisCache

        cache = next((model_kwargs[name] for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
        if isinstance(cache, OasisCache):
            ends = getattr(generation_config, "eos_token_id", None)
            pad = getattr(generation_config, "_pad_token_tensor", None)
            cache.stepper.ends = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,) if ends is not None else ()
            cache.stepper.pad = int(pad) if pad is not None else None
        token = _prefilling.set(True)
        try:
            return self.inner(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            _prefilling.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.inner.__self__))
        return types.MethodType(self.inner.__func__, copy) if copy is not None else self.inner


def _flatten(bound: inspect.BoundArguments) -> dict[str, Any]:
    call = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call


def in_prefill() -> bool:
    """Whether generate's own prefill stage is running."""
    return _prefilling.get()


class Attachment:
    """What hangs on one model, and how many caches need it."""

    def __init__(self, model: Any) -> None:
        self.caches: "weakref.WeakSet[OasisCache]" = weakref.WeakSet()
        self.own = {name: model.__dict__[name] for name in ("forward", "_prefill") if name in model.__dict__}
        self.placed = {"forward": _Forward(model, model.forward)}
        if hasattr(model, "_prefill"):
            self.placed["_prefill"] = _Prefill(model._prefill)  # type: ignore[assignment]
        for name, wrapper in self.placed.items():
            model.__dict__[name] = wrapper

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
    attachment = _attachments.get(model)
    if attachment is None or model.__dict__.get("forward") is not attachment.placed["forward"]:
        if attachment is not None:
            attachment.remove(model)
        attachment = _attachments[model] = Attachment(model)
    attachment.caches.add(cache)
    weakref.finalize(cache, _release, weakref.ref(model))


def _release(model: "weakref.ref[Any]") -> None:
    target = model()
    attachment = _attachments.get(target) if target is not None else None
    # Iterating skips caches that are already gone; the length may still count them.
    if attachment is not None and not list(attachment.caches):
        detach(target)


def detach(model: Any) -> None:
    """Take the seam off: the model is exactly as it was. Caches made for it stop working."""
    attachment = _attachments.pop(model, None)
    if attachment is not None:
        attachment.remove(model)
