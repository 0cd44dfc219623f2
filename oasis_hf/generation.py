"""`generate` that takes several verified tokens a row and step, each row its own number."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .accepting import accepting
from .attach import CACHE_NAMES, cache_name
from .choice import STATEFUL, Choice
from .lossless import dense, forward, verified
from .text import Text, Told

if TYPE_CHECKING:
    from .cache import OasisCache
    from .prefixes import PrefixStore

logger = logging.getLogger(__name__)

_OWN = {
    "attention_mask", "position_ids", "inputs_embeds", "use_cache", "logits_to_keep", "cache_position", *CACHE_NAMES,
}  # fmt: skip
"""What only the prompt needs or a decode step is told anew; another argument of the model would have to be told for
each row's place."""

_ASKED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    verify: str = "sparse",
    full_drafts: int = 8,
    prefixes: "PrefixStore | None" = None,
    **kwargs: Any,
) -> Any:
    """`model.generate` over an `OasisCache` with `speculate=True`, but every row takes all its accepted drafts at once
    and goes on at its own length, where transformers' loop takes one token a row and call.

    Greedy tokens are those of `model.generate` wherever the working sets are the same, and sampled ones have the same
    distribution; but a row that has ended is always padded, where generate lets it go on if it has no end id.
    Logits processors, stopping criteria, `stop_strings` with their `tokenizer`, and for one row a streamer, work as
    there. A processor that keeps state of its own from call to call is one of transformers' that are refused, or would
    be wrong: it is asked at several positions, some of which are rejected.

    Args:
        verify: "sparse": the drafter's tokens are verified over the working set, in the step that they ride in.
            "full", lossless: the working set itself drafts `full_drafts` tokens, and one dense pass over the full KV,
            streamed from host memory, verifies them: what comes out is what dense attention gives. Any `OasisCache`
            will do.
        prefixes: what prompts begin with, so that it is not read again: the cache is one of this store's then.
        inputs, **kwargs: as `model.generate` takes them. past_key_values: an `OasisCache` made with `speculate=True`;
            one with the defaults is made where none is given.

    Returns:
        What `model.generate` returns: `[B, n]` ids, or a `GenerateDecoderOnlyOutput` with `sequences` and the cache,
        which holds what it would after `model.generate`, but no padding behind a row's end.

    Raises:
        ValueError: the cache is no `OasisCache`, or was not made with `speculate=True`; `verify` or `full_drafts` is
            not allowed, or "full" can't be had: several rows with sliding-window layers, RoPE that scales by the
            furthest position; beams, an assistant or scores, logits, attentions or hidden states of each step are asked
            for, a processor that keeps state (classifier-free guidance, SynthID), or a streamer for several rows; stop
            strings without a tokenizer.
    """
    from .cache import OasisCache

    if verify not in ("sparse", "full") or type(full_drafts) is not int or full_drafts < 1:
        raise ValueError(
            f"oasis_hf.generate takes verify='sparse' or 'full' and full_drafts of 1 or more, not verify={verify!r}, "
            f"full_drafts={full_drafts!r}."
        )
    if kwargs.get("custom_generate") is not None:
        raise ValueError("oasis_hf.generate is a loop of its own and takes no custom_generate: use model.generate.")
    full = full_drafts if verify == "full" else 0
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if prefixes is not None:
        if cache is not None:
            raise ValueError("oasis_hf.generate takes prefixes= or a cache: prefixes.cache() makes one of the store's.")
        kwargs[cache_name(model)] = cache = prefixes.cache()
    if cache is None:
        kwargs[cache_name(model)] = cache = OasisCache(model, speculate=not full)
    if not isinstance(cache, OasisCache) or not (full or cache.state.config.speculate):
        raise ValueError(
            "oasis_hf.generate verifies drafts: pass past_key_values=OasisCache(model, speculate=True), or use "
            "model.generate."
        )
    windows = len(cache.sparse_layers) < len(cache.layers)
    reach = cache.stepper.reach
    scales = reach.dynamic or reach.longrope
    if full and (reach.own or scales):
        raise ValueError(
            f"oasis_hf.generate(verify='full') does not take {type(model).__name__}, whose positions depend on how far "
            "the text goes or are its own: use a dense cache where nothing may be lost."
        )
    if not full and (windows or reach.own or scales):
        why = "keeps rows at one length" if windows or scales else "places its own tokens"
        logger.warning("oasis_hf.generate runs transformers' own loop: %s %s.", type(model).__name__, why)
        return model.generate(inputs, **kwargs)
    _one_row_to_stream(model, inputs, kwargs)
    # generate gives a loop that is not its own none of these.
    own = model._extract_generation_mode_kwargs(None, {}, kwargs.get("synced_gpus"), None, None)
    loop = functools.partial(
        _decode, full=full, streamer=kwargs.get("streamer"), assistant=kwargs.get("assistant_model"),
        synced_gpus=own["synced_gpus"],
    )  # fmt: skip
    return model.generate(inputs, custom_generate=loop, **_with_stop_strings(model, kwargs))


def _setting(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """What generate will take for a field of its configuration."""
    if name in kwargs:
        return kwargs[name]
    given = getattr(kwargs.get("generation_config"), name, None)
    return given if given is not None else getattr(model.generation_config, name, None)


def _with_stop_strings(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """generate's arguments with `stop_strings` as the criterion that generate would make of them, had it kept the
    tokenizer for a loop that is not its own."""
    strings = _setting(model, kwargs, "stop_strings")
    if strings is None:
        return kwargs
    if kwargs.get("tokenizer") is None:
        raise ValueError(f"oasis_hf.generate(stop_strings={strings!r}) needs tokenizer=, the model's own.")
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(kwargs["tokenizer"], strings)]
    return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def _one_row_to_stream(model: Any, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if there is a streamer and more than one row: what stands behind a row's end, or was rejected in
    one row and not in another, is no text."""
    if kwargs.get("streamer") is None:
        return
    given = next(
        (one for one in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if one is not None), [0]
    )
    rows = len(given) * (_setting(model, kwargs, "num_return_sequences") or 1)
    if rows > 1:
        raise ValueError(f"oasis_hf.generate streams one row, not {rows}: leave streamer out, or give one prompt.")


@torch.no_grad()
def _decode(
    model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, *,
    full: int, streamer: Any, assistant: Any, synced_gpus: bool, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """The loop that `model.generate` runs as its `custom_generate`. full: drafts a dense pass verifies, or 0."""
    cache: OasisCache = next(model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None)
    _refuse(generation_config, logits_processor, model_kwargs, assistant, synced_gpus)
    if full and len(input_ids) > 1 and len(cache.sparse_layers) < len(cache.layers):
        raise ValueError(
            "oasis_hf.generate(verify='full') takes one row at a time where a model has sliding-window layers, which "
            f"keep all rows at one length; {len(input_ids)} were given."
        )
    choose = Choice(logits_processor, generation_config.do_sample)
    pad = generation_config._pad_token_tensor
    text = Text(input_ids, stopping_criteria, 0 if pad is None else int(pad))

    logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1:]
    chain, count = choose(text, text.ids[:, :0], logits.to(input_ids.device, torch.float32))
    _stream(text.put(text.cut(chain, count)), streamer)
    rows, stepper = cache.state.need_rows(), cache.stepper
    stepper.ends = ()  # no forward of this loop is skipped, so none has to know which rows have ended
    with model._optimize_model_for_decode(), rows.pacing(cache.device):
        while any(text.going):
            told = verified(model, cache, choose, text, full) if full else _round(model, cache, choose, text)
            _stream(told, streamer)
            stepper.passes += sum(kept > 0 for kept in told.kept)
            stepper.passed += sum(told.kept)
        # The last token of all is not in the cache, as in transformers' loop; that of a row that ended sooner is.
        sooner = [n < max(text.tokens) for n in text.tokens]
        if any(sooner):
            if full:
                dense(model, cache, text.last()[:, None], [int(takes) for takes in sooner])
            else:
                rows.leave_out((text.lengths < max(text.tokens)).to(cache.device), sooner)
                forward(model, cache, text.last()[:, None])
                stepper.forget()
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text.sequences()
    out: Any = GenerateDecoderOnlyOutput
    return out(sequences=text.sequences(), **{cache_name(model): cache})


def _round(model: Any, cache: "OasisCache", choose: Choice, text: Text) -> Told:
    """One step. The cache then holds all that follows but the last of each row."""
    cache.state.need_rows().leave_out(~text.done.to(cache.device), text.going)
    out = forward(model, cache, text.last()[:, None])
    memo, device = cache.stepper.memo, text.ids.device
    drafts = text.ids[:, :0] if memo is None else memo.tokens.to(device)
    behind, eagerly = accepting(cache, text, choose.greedily), None
    chosen = None if behind is None else behind.chosen
    if chosen is None:
        logits = out.logits[:, -1:] if memo is None else memo.rows[:, : 1 + memo.drafts]
        scores = logits.to(device, torch.float32)
        chain, count = choose(text, drafts, scores)
        right, first = count - 1, None
        if memo is not None and memo.others:
            others, after, entry = memo.rivals
            others, after = others.to(device), after.to(device, torch.float32)
            chain, count, which = choose.beside(text, chain, count, others, after)
            first = torch.where(which < 0, 1, entry + which).to(cache.device)
        chosen = text.cut(chain, count, right)
        eagerly = (chosen.kept - 1).clamp(min=0).to(cache.device), first
    if behind is not None:
        behind.replay(eagerly)
    told = text.put(chosen)
    own = [max(kept - 1, 0) for kept in told.kept]
    if behind is not None:
        cache.committed(behind.counts, own, behind.first, behind.notes)
    elif eagerly is not None:
        cache.commit_rows(eagerly[0], own, eagerly[1])
    _remember_rate(cache, told, drafts.shape[1])
    return told


def _stream(told: Told, streamer: Any) -> None:
    """The one row's new tokens."""
    if streamer is not None:
        for token in told.chain[0][: told.kept[0]]:
            streamer.put(torch.tensor([token]))


def _remember_rate(cache: "OasisCache", told: Told, drafts: int) -> None:
    """How often a verified draft was the next input, of rows that took a step: it weighs the drafts' queries."""
    right = [right for right, kept in zip(told.right, told.kept) if kept]
    tried = sum(min(one + 1, drafts) for one in right)
    if tried:
        cache.stepper.note_accepted(sum(right), tried)


def _refuse(config: Any, processors: Any, model_kwargs: dict[str, Any], assistant: Any, synced_gpus: bool) -> None:
    asked = [name for name in _ASKED if config.return_dict_in_generate and getattr(config, name, False)]
    asked += ["num_beams"] * (config.num_beams > 1) + ["synced_gpus"] * synced_gpus
    asked += ["assistant_model"] * (assistant is not None)
    asked += ["prompt_lookup_num_tokens"] * (getattr(config, "prompt_lookup_num_tokens", None) is not None)
    mode = config.get_generation_mode(assistant)
    if not asked and mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked.append(mode.value)
    asked += [type(one).__name__ for one in processors if isinstance(one, STATEFUL)]
    asked += [name for name, value in model_kwargs.items() if name not in _OWN and value is not None]
    asked = list(dict.fromkeys(asked))
    if asked:
        raise ValueError(
            f"oasis_hf.generate takes several tokens a row and step and can't give or use {', '.join(asked)}: use "
            "model.generate."
        )
