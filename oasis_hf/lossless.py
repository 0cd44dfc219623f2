"""`oasis_hf.generate(..., verify="full")`: the working set drafts, one pass over the full KV verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .attach import cache_name
from .choice import Choice
from .text import Text

if TYPE_CHECKING:
    from .cache import OasisCache


def verified(model: Any, cache: "OasisCache", choose: Choice, text: Text, drafts: int) -> tuple[torch.Tensor, Any]:
    """One round. Every row that is not done decodes `drafts` tokens over its working set; they are taken back, and one
    dense pass over the full KV, streamed from the store, runs over its last token and them. What a row keeps is what
    that pass chooses, with the keys and values that it gave.

    Returns:
        chain `[B, drafts + 1]` and how many of it follow in each row `[B]`; the cache holds all but the last of them.
    """
    rows = cache.state.need_rows()
    before, going = list(rows.tokens), ~text.done
    rows.leave_out(going.to(cache.device))
    try:
        drafted, drawn_from = _draft(model, cache, choose, text, drafts)
    finally:  # interrupted or not: nothing unverified stays
        cache.crop_rows(before)
    ids = torch.cat((text.last()[:, None], drafted), 1)
    out = dense(model, cache, ids, going)
    chain, count = choose(text, drafted, out.logits.to(ids.device, torch.float32), drawn_from)
    kept = text.add(chain, count)
    cache.crop_rows([n + new for n, new in zip(before, kept.tolist())])
    return chain, kept


def dense(model: Any, cache: "OasisCache", ids: torch.Tensor, takes: torch.Tensor) -> Any:
    """A forward of `ids` `[B, n]` over the full KV, for rows where `takes` `[B]`."""
    with cache.mode("prefill"):
        mask = takes[:, None].expand_as(ids).long()
        return forward(model, cache, ids, attention_mask=mask)


def _draft(
    model: Any, cache: "OasisCache", choose: Choice, text: Text, count: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`[B, count]` tokens decoded over the working set, and the probabilities `[B, count, V]` they were drawn from."""
    token, drafts, probabilities = text.last(), text.ids[:, :0], []
    for _ in range(count):
        out = forward(model, cache, token[:, None])
        logits = out.logits[:, -1].to(token.device, torch.float32)
        cache.stepper.forget()  # no other verification goes on inside this one
        token, probability = choose.draw(text, drafts, logits)
        drafts = torch.cat((drafts, token[:, None]), 1)
        probabilities.append(probability)
    return drafts, torch.stack(probabilities, 1)


def forward(model: Any, cache: "OasisCache", ids: torch.Tensor, **more: Any) -> Any:
    """A forward of `ids` `[B, n]`, in each row behind what the cache holds of it."""
    first = cache.state.need_rows().lengths(ids.device)[:, None]
    positions = first + torch.arange(ids.shape[1], device=ids.device)
    return model(
        input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **{cache_name(model): cache}, **more
    )
