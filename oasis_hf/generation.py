"""`generate` that takes several verified tokens a row and step, each row its own number."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .attach import CACHE_NAMES, cache_name
from .choice import Choice
from .lossless import dense, forward, verified
from .text import Text

if TYPE_CHECKING:
    from .cache import OasisCache

logger = logging.getLogger(__name__)

_OWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHE_NAMES}
"""What a decode step is told anew; another argument of the model would have to be told for each row's place."""

_ASKED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any, inputs: torch.Tensor | None = None, *, verify: str = "sparse", full_drafts: int = 8, **kwargs: Any
) -> Any:
    """`model.generate` over an `OasisCache` with `speculate=True`, but every row takes all its accepted drafts at once
    and goes on at its own length, where transformers' loop takes one token a row and call.

    Greedy tokens are those of `model.generate` wherever the working sets are the same, and sampled ones have the same
    distribution; but a row that has ended is always padded, where generate lets it go on if it has no end id.
    Streamers, logits processors and stopping criteria work as there.

    Args:
        verify: "sparse": the drafter's tokens are verified over the working set, in the step that they ride in.
            "full", lossless: the working set itself drafts `full_drafts` tokens, and one dense pass over the full KV,
            streamed from host memory, verifies them: what comes out is what dense attention gives. Any `OasisCache`
            will do.
        inputs, **kwargs: as `model.generate` takes them. past_key_values: an `OasisCache` made with `speculate=True`;
            one with the defaults is made where none is given.

    Returns:
        What `model.generate` returns: `[B, n]` ids, or a `GenerateDecoderOnlyOutput` with `sequences` and the cache,
        which holds what it would after `model.generate`, but no padding behind a row's end.

    Raises:
        ValueError: the cache is no `OasisCache`, or was not made with `speculate=True`; `verify` or `full_drafts` is
            not allowed, or "full" can't be had: several rows with sliding-window layers, RoPE that scales by the
            furthest position; beams or scores, logits, attentions or hidden states of each step are asked for.
    """
    from .cache import OasisCache

    if verify not in ("sparse", "full") or not isinstance(full_drafts, int) or full_drafts < 1:
        raise ValueError(
            f"oasis_hf.generate takes verify='sparse' or 'full' and full_drafts of 1 or more, not verify={verify!r}, "
            f"full_drafts={full_drafts!r}."
        )
    full = full_drafts if verify == "full" else 0
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
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
    # generate gives a loop that is not its own neither of these.
    loop = functools.partial(
        _decode, full=full, streamer=kwargs.get("streamer"), synced_gpus=bool(kwargs.get("synced_gpus"))
    )
    return model.generate(inputs, custom_generate=loop, **kwargs)


@torch.no_grad()
def _decode(
    model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, *,
    full: int, streamer: Any, synced_gpus: bool, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """The loop that `model.generate` runs as its `custom_generate`. full: drafts a dense pass verifies, or 0."""
    cache: OasisCache = next(model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None)
    _refuse(generation_config, model_kwargs, synced_gpus)
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
    _tell(chain, text.add(chain, count), streamer)
    rows = cache.state.need_rows()
    with rows.pacing(cache.device):
        while not text.done.all():
            chain, kept = verified(model, cache, choose, text, full) if full else _round(model, cache, choose, text)
            _tell(chain, kept, streamer)
            cache.stepper.passes += int((kept > 0).sum())
            cache.stepper.passed += int(kept.sum())
        # The last token of all is not in the cache, as in transformers' loop; that of a row that ended sooner is.
        sooner = text.lengths < text.lengths.max()
        if sooner.any():
            if full:
                dense(model, cache, text.last()[:, None], sooner)
            else:
                rows.leave_out(sooner.to(cache.device))
                _step(model, cache, text)
                cache.stepper.forget()
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text.sequences()
    out: Any = GenerateDecoderOnlyOutput
    return out(sequences=text.sequences(), **{cache_name(model): cache})


def _round(model: Any, cache: "OasisCache", choose: Choice, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """One step. Returns chain `[B, k + 1]` and how many of it follow in each row `[B]`; the cache holds all but the
    last of them."""
    cache.state.need_rows().leave_out(~text.done.to(cache.device))
    logits, drafts = _step(model, cache, text)
    chain, count = choose(text, drafts, logits)
    kept = text.add(chain, count)
    cache.commit_rows((kept - 1).clamp(min=0).to(cache.device))
    _remember_rate(cache, count - 1, kept, drafts.shape[1])
    return chain, kept


def _step(model: Any, cache: "OasisCache", text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward over every row's last token and its drafts. Returns logits `[B, 1 + k, V]` and the drafts `[B, k]`."""
    device = text.ids.device
    out = forward(model, cache, text.last()[:, None])
    memo, logits = cache.stepper.memo, out.logits[:, -1:].to(device, torch.float32)
    if memo is None:
        return logits, text.ids[:, :0]
    return torch.cat([logits, *(one.to(device, torch.float32) for one in memo.logits)], 1), memo.tokens.to(device)


def _tell(chain: torch.Tensor, kept: torch.Tensor, streamer: Any) -> None:
    if streamer is not None:
        for place in range(int(kept.max())):
            streamer.put(chain[:, place].cpu())


def _remember_rate(cache: "OasisCache", accepted: torch.Tensor, kept: torch.Tensor, drafts: int) -> None:
    """How often a verified draft was the next input, of rows that took a step: it weighs the drafts' queries."""
    took = kept > 0
    tried = int(((accepted + 1).clamp(max=drafts) * took).sum())
    if tried:
        cache.stepper.note_accepted(int((accepted * took).sum()), tried)


def _refuse(config: Any, model_kwargs: dict[str, Any], synced_gpus: bool) -> None:
    asked = [name for name in _ASKED if config.return_dict_in_generate and getattr(config, name, False)]
    asked += ["num_beams"] * (config.num_beams > 1) + ["synced_gpus"] * synced_gpus
    asked += [name for name, value in model_kwargs.items() if name not in _OWN and value is not None]
    if asked:
        raise ValueError(
            f"oasis_hf.generate takes several tokens a row and step and can't give or use {', '.join(asked)}: use "
            "model.generate."
        )
