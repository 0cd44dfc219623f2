"""A cache from a prompt that another cache has read: one dense prefill serves as many as are to be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from . import supported
from .cache import OasisCache
from .config import OasisConfig
from .drafters import Drafter
from .drafters.taps import places
from .room import keeps_buffers
from .sliding import SlidingLayer
from .state import Step


@keeps_buffers
def from_dense(
    model: Any, past: DynamicCache, config: OasisConfig | None = None, drafter: Any = None, *,
    input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
    hidden: Mapping[int, torch.Tensor] | None = None, **knobs: Any,
) -> OasisCache:  # fmt: skip
    """An `OasisCache` that holds what a `DynamicCache` does, and goes on as if it had read that prompt itself.

    ```python
    past = model(ids[:, :-8], past_key_values=DynamicCache(config=model.config)).past_key_values
    for mode in MODES:
        cache = from_dense(model, past, mode_config(mode, 1040), input_ids=ids[:, :-8])
        model.generate(ids, past_key_values=cache)
    ```

    The prompt's rest, one token at least, comes next: that forward is a prompt's, however short, since the last tokens'
    queries choose the first working set. As many as `smooth_queries` make it the same as a whole prompt also where
    recent queries are averaged. A `host_dtype` narrower than the model's rounds what the rest reads back, as with any
    chunk. Nothing of `past` is changed or kept.

    Args:
        model: whose prefill filled `past`. past: T tokens of B rows in every layer. Of a sliding-window layer it may
            hold the last ones alone; then `crop` can't go back behind T.
        config, knobs: as `OasisCache` takes them.
        drafter: the same; a `Drafter` is forked and emptied, so that one head serves several caches.
        input_ids: `[B, T]`, for drafters that look at the text; without it they begin with what comes next.
        attention_mask: `[B, T]`, 0 where `past` holds padding; None: nowhere.
        hidden: what `tapped` recorded while the model filled `past`, for an EAGLE-3 head. Without it the head does not
            see these T positions: the next token's draft is as good, later ones lack that context.

    Raises:
        ValueError: `past` is not a `DynamicCache` that such a prefill leaves, or an argument has another shape.
        ConfigError, UnsupportedModelError, DrafterError: as `OasisCache` does.
    """
    if isinstance(drafter, Drafter):
        drafter = drafter.fork()
        drafter.reset()
    cache = OasisCache(model, config, drafter, **knobs)
    held = _held(cache, past)
    rows, length = held[0].keys.shape[0], past.get_seq_length()
    valid = _valid(attention_mask, rows, length)
    if input_ids is not None and tuple(input_ids.shape) != (rows, length):
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, but past holds {rows} rows of {length} tokens.")
    if hidden is not None and (input_ids is None or not set(cache.drafter.taps) <= set(hidden)):
        raise ValueError(
            f"hidden must have layers {list(cache.drafter.taps)}, and input_ids be given too: tapped(model, drafter) "
            "records it."
        )
    state, lengths = cache.state, cache.rows_for(rows)
    step = state.step = Step("prefill", state.number, length, [0] * rows, 0, valid=valid)
    try:
        for layer, own in zip(cache.layers, held):
            layer.lazy_initialization(own.keys, own.values)
            if not isinstance(layer, SlidingLayer):
                layer.keep_prompt(step, own.keys, own.values)
                continue
            layer.keep(own.keys, own.values, length, step.real(layer.device))
            layer.began = length - own.keys.shape[2]
    finally:
        state.step = None
        if state.store is not None:
            state.store.join()
    starts = lengths.lengths(cache.device).clone()
    state.mark_read(step)
    lengths.extend(torch.ones((rows, length), dtype=torch.bool) if valid is None else valid)
    if hidden is not None:
        for tap in cache.drafter.taps:
            cache.drafter.tap(tap, hidden[tap], step)
    cache.drafter.observe(None if input_ids is None else input_ids.to(cache.device), starts, valid)
    return cache


@contextlib.contextmanager
def tapped(model: Any, drafter: Drafter) -> Iterator[dict[int, torch.Tensor]]:
    """What a drafter would have seen of the forwards inside: the inputs `[B, T, H]` of the layers it taps, by layer.
    Chunks of a prompt are joined. Empty for drafters that tap nothing."""
    seen: dict[int, torch.Tensor] = {}

    def note(tap: int, hidden: torch.Tensor) -> None:
        hidden = hidden.detach()
        seen[tap] = torch.cat((seen[tap], hidden), 1) if tap in seen else hidden

    taps = drafter.taps
    found = places(supported.plain_model(model), taps) if taps else []
    hooks = [
        place.register_forward_pre_hook(
            lambda module, args, kwargs, tap=tap: note(tap, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for tap, place in zip(taps, found)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _held(cache: OasisCache, past: Any) -> list[Any]:
    """The layers of `past`, if they hold what the cache's need."""
    if not isinstance(past, DynamicCache) or past.offloading:
        raise ValueError(f"from_dense takes a DynamicCache that is not offloaded, not {type(past).__name__}.")
    layers: list[Any] = list(past.layers)
    length = past.get_seq_length()
    if len(layers) != len(cache.layers) or not length:
        raise ValueError(
            f"past holds {length} tokens in {len(layers)} layers, but the model has {len(cache.layers)}: fill it with "
            "this model's prefill."
        )
    for index, (layer, own) in enumerate(zip(cache.layers, layers)):
        if type(own) not in (DynamicLayer, DynamicSlidingWindowLayer) or own.get_seq_length() != length:
            raise ValueError(
                f"past has a {type(own).__name__} of {own.get_seq_length()} tokens as layer {index}, and layer 0 holds "
                f"{length}: from_dense takes plain layers of one length."
            )
        need = min(length, layer.window - 1) if isinstance(layer, SlidingLayer) else length
        if own.keys.shape[2] < need:
            raise ValueError(
                f"past keeps {own.keys.shape[2]} of {length} tokens in layer {index}, and the model's attention needs "
                f"{need}: make it with DynamicCache(config=model.config)."
            )
    return layers


def _valid(mask: torch.Tensor | None, rows: int, length: int) -> torch.Tensor | None:
    """Which columns are real `[B, T]` bool on the host, None for all."""
    if mask is None:
        return None
    if tuple(mask.shape) != (rows, length):
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, but past holds {rows} rows of {length} tokens.")
    valid = mask.detach().to("cpu", torch.bool)
    return None if bool(valid.all()) else valid
