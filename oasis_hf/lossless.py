"""`oasis_hf.generate(..., verify="full")`: the working set drafts, one pass over the full KV verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .attach import cache_name
from .choice import Choice
from .text import Text, Told

if TYPE_CHECKING:
    from .cache import OasisCache


def verified(model: Any, cache: "OasisCache", choose: Choice, text: Text, drafts: int) -> Told:
    """One round. Every row that goes on decodes `drafts` tokens over its working set, or fewer where fewer could
    follow; they are taken back, and one dense pass over the full KV, streamed from the store, runs over its last token
    and them. What a row keeps is what that pass chooses, with the keys and values that it gave.

    Returns:
        What follows; the cache holds all but the last of it.
    """
    rows, own = cache.state.need_rows(), text.ahead(drafts)
    before = list(rows.tokens)
    try:
        drafted, drawn_from = _draft(model, cache, choose, text, own)
    finally:  # interrupted or not: nothing unverified stays
        cache.crop_rows(before)
    ids = torch.cat((text.last()[:, None], drafted), 1)
    out = dense(model, cache, ids, [(1 + n) * going for n, going in zip(own, text.going)])
    chain, count = choose(text, drafted, out.logits.to(ids.device, torch.float32), drawn_from)
    told = text.put(text.cut(chain, count))
    cache.crop_rows([n + new for n, new in zip(before, told.kept)])
    return told


def dense(model: Any, cache: "OasisCache", ids: torch.Tensor, takes: list[int]) -> Any:
    """A forward of `ids` `[B, n]` over the full KV, of which rows take so many of theirs."""
    with cache.mode("prefill"):
        mask = torch.arange(ids.shape[1]) < torch.tensor(takes)[:, None]
        return forward(model, cache, ids, attention_mask=mask.long())


def _draft(
    model: Any, cache: "OasisCache", choose: Choice, text: Text, own: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Tokens `[B, n]` decoded over the working set, `own` of each row (behind them anything), and the probabilities
    `[B, n, V]` they were drawn from, None where they were certain."""
    rows, token, drafts, probabilities = cache.state.need_rows(), text.last(), text.ids[:, :0], []
    could = (text.left - 1) * ~text.done
    for place in range(max(own)):
        rows.leave_out((could > place).to(cache.device), [n > place for n in own])
        out = forward(model, cache, token[:, None])
        logits = out.logits[:, -1].to(token.device, torch.float32)
        cache.stepper.forget()  # no other verification goes on inside this one
        token, probability = choose.draw(text, drafts, logits)
        drafts = torch.cat((drafts, token[:, None]), 1)
        if probability is not None:
            probabilities.append(probability)
    return drafts, torch.stack(probabilities, 1) if probabilities else None


def forward(model: Any, cache: "OasisCache", ids: torch.Tensor, **more: Any) -> Any:
    """A forward of `ids` `[B, n]`, in each row behind what the cache holds of it."""
    first = cache.state.need_rows().lengths(ids.device)[:, None]
    positions = first + torch.arange(ids.shape[1], device=ids.device)
    return model(
        input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **{cache_name(model): cache}, **more
    )
