"""What generate calls before a model's forward: wrapped on the instance, as the forward is (attach.py)."""

from __future__ import annotations

import functools
import types
from typing import Any

from . import parallel
from .attach import CACHE_NAMES, cache_name, prefilling, ranks_of
from .cache import OasisCache


def _ours(call: dict[str, Any]) -> OasisCache | None:
    """The cache of a call, if it is one of ours."""
    cache = next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)
    return cache if isinstance(cache, OasisCache) else None


class _Method:
    """Stands in for a method of the model. A copy of the model gets its own plain one, not the original's."""

    def __init__(self, inner: Any) -> None:
        functools.update_wrapper(self, inner)  # type: ignore[arg-type]
        self.inner = inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(getattr(self.inner, "__self__", None)))
        return types.MethodType(self.inner.__func__, copy) if copy is not None else self.inner


def _check_prompt(cache: OasisCache, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError where a whole text is given that has nothing behind what the cache holds: generate would slice
    it by a length of 0 or less, and read all of it again, another piece of it, or none."""
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    given, held = input_ids if embeds is None else embeds, cache.get_seq_length()
    width = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    whole = embeds is not None or width == given.shape[1]  # else only what is new is given, under a mask of all
    if whole and 0 < held >= given.shape[1] and len(given) == cache.batch_size:
        raise ValueError(
            f"The prompt has {given.shape[1]:,} tokens and this OasisCache holds {held:,} already: give the whole text "
            "with something new behind it, or make a new cache (or reset() this one) for another prompt."
        )


class _Prefill(_Method):
    """Stands in for `model._prefill`, generate's own prefill stage: what runs inside it is a prompt or a chunk of one,
    however short. It also tells the cache which ids end a row in this call."""

    def __call__(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        cache, keeps = _ours(model_kwargs), False
        if cache is not None:
            _check_prompt(cache, input_ids, generation_config, model_kwargs)
            chunk = getattr(generation_config, "prefill_chunk_size", None)
            cache.stepper.reach.check_chunks(chunk, input_ids.shape[1])
            ends = getattr(generation_config, "eos_token_id", None)
            pad = getattr(generation_config, "_pad_token_tensor", None)
            cache.stepper.ends = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,) if ends is not None else ()
            cache.stepper.pad = int(pad) if pad is not None else None
            ranks = ranks_of(cache.model)
            if ranks is not None and getattr(generation_config, "do_sample", False):
                parallel.same_draws(ranks, cache.device)
            if cache.prefixes is not None:
                keeps = cache.prefixes.before(cache, input_ids, model_kwargs, whole=chunk is None)
        token = prefilling.set(True)
        try:
            out = self.inner(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            prefilling.reset(token)
        if cache is not None and cache.prefixes is not None and keeps:
            cache.prefixes.after(cache, input_ids)
        return out


class _Prepare(_Method):
    """Stands in for `model.prepare_inputs_for_generation`. A model whose RoPE takes other factors for a longer text
    (Phi-3) leaves the cache out where the text grows over that length, or begins beyond it, and gives all ids anew:
    they are ours to read again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.inner(*args, **kwargs)
        cache = _ours(kwargs)
        if cache is not None and not any(inputs.get(name) is not None for name in CACHE_NAMES):
            if kwargs.get("next_sequence_length") is not None:  # transformers 5.17 left the old tokens out all the same
                inputs = self.inner(*args, **{**kwargs, "next_sequence_length": None})
            cache.crop(-cache.get_seq_length())
            inputs[cache_name(cache.model)] = cache
        return inputs


class _Batch(_Method):
    """Stands in for `model.generate_batch`, where generate goes too with `cache_implementation="paged"`: continuous
    batching keeps a cache of its own and would leave ours unused without a word."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _ours(kwargs) is not None:
            raise ValueError(
                "Continuous batching (generate_batch, cache_implementation='paged') keeps a paged cache of its own and "
                "can't use an OasisCache: leave one of the two out."
            )
        return self.inner(*args, **kwargs)


METHODS = {"_prefill": _Prefill, "prepare_inputs_for_generation": _Prepare, "generate_batch": _Batch}
