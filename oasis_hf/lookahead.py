"""Whose queries count how much in the prediction of the next step's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config import OasisConfig


def settled(config: OasisConfig, drafter: Any) -> OasisConfig:
    """The config whose `lookahead` is no longer `"auto"`, but what that means with this drafter."""
    return config.replace(lookahead=drafter.lookahead) if config.lookahead == "auto" else config


def recent_window(config: OasisConfig, drafted: bool = False) -> int:
    """W, how many committed tokens' queries a layer keeps: what is averaged, or fallen back on without a draft.
    drafted: there is always one in every row; the latest query is kept for steps that may not stack it."""
    shed = config.draft_up_to is not None
    falls_back = shed if isinstance(config.lookahead, Mapping) else config.lookahead in ("draft", "oracle")
    kept = config.lookahead == "smoothed" or (falls_back and (shed or not drafted))
    return config.smooth_queries if kept else 1


def wants_drafts(config: OasisConfig) -> bool:
    """Whether draft rows are stacked at all."""
    return config.speculate or isinstance(config.lookahead, Mapping) or config.lookahead in ("auto", "draft", "oracle")


def predicts_blocks(config: OasisConfig) -> bool:
    """Whether the next step's blocks are predicted at all."""
    return config.lookahead not in ("none", "on_demand")


def draft_rows(config: OasisConfig, verifies: bool = True) -> int:
    """Rows of the chain behind the new token: verified drafts, and one more that is lookahead only. verifies: False
    where `speculate` is off for now."""
    return config.draft_tokens + 1 if config.speculate and verifies else 1


def most_rows(config: OasisConfig) -> int:
    """Rows that a step stacks behind its new token at most."""
    return draft_rows(config) + config.candidates - 1


def next_input_probabilities(drafts: int, acceptance: float) -> list[float]:
    """P(the next forward's input stands where draft i stands), for a chain of which all but the last are verified.

    It stands at draft i if the drafts before it were accepted and it was not (then its query is the nearest we have),
    and at the last one if all verified ones were.
    """
    return [acceptance**i * (1 - acceptance) for i in range(drafts - 1)] + [acceptance ** (drafts - 1)]


def query_weights(
    config: OasisConfig,
    window: int,
    drafts: int,
    acceptance: float,
    count: int = 1,
    others: int = 0,
    shed: bool = False,
) -> list[list[float]]:
    """Two lists of weights of the recent queries (oldest first) and the drafts' in the block score, `window + drafts +
    others` each: for rows that have a draft, and for those that fall back on recent queries.

    Args:
        drafts: rows of the chain. others: further candidates for its first place: `row_weights` gives them their share.
        acceptance: running rate at which verified drafts are the next input.
        shed: there are no drafts because there are too many rows (`draft_up_to`).
        count: tokens that the step commits; where they are several, the caller's own candidates, which of them stays
            is not known yet, so all of them (the latest W) count alike.
    """
    kind = config.lookahead
    nothing = [0.0] * (drafts + others)
    latest = [0.0] * (window - 1) + [1.0]
    smoothed = [1 / window] * window
    ahead = [*next_input_probabilities(drafts, acceptance), *[0.0] * others] if drafts else []
    if count > 1:
        new = min(count, window)
        with_draft = without = [0.0] * (window - new) + [1 / new] * new + nothing
    elif isinstance(kind, Mapping):
        total = kind["draft"] + kind["previous"]
        with_draft = [w * kind["previous"] / total for w in latest] + [p * kind["draft"] / total for p in ahead]
        without = (smoothed if shed else latest) + nothing
    elif kind in ("draft", "oracle"):
        with_draft = [0.0] * window + ahead
        # A drafter that proposes nothing: the current query predicts.
        without = smoothed + nothing if drafts or shed else latest
    else:
        with_draft = without = smoothed + nothing
    return [with_draft if drafts else without, without]


def turned(query: torch.Tensor, before: torch.Tensor, heads: int, below: float) -> torch.Tensor:
    """Which of `heads` KV heads `[B, H]` bool a token's query has turned away in: its cosine with the last token's is
    `below` that, the mean over the group's query heads, since a group selects as one (FreeKV, arXiv 2505.13109, whose
    code takes the mean or the largest). query, before: `[B, Hq, D]`, post-RoPE, as they are scored."""
    cosine = torch.cosine_similarity(query.float(), before.float(), dim=-1)
    return cosine.unflatten(1, (heads, -1)).mean(-1) < below


def row_weights(
    pair: torch.Tensor, found: torch.Tensor | None, rows: int, probabilities: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Each row's weights `[rows, W + drafts + others]`; all on the device.

    Args:
        pair: `query_weights` as a tensor. found: `[rows]` bool, rows that have a draft, None: no row.
        probabilities: `[rows, 1 + others]` of the chain's first draft and of the others, which share what the first
            place weighs. window: W.
    """
    without = pair[1].expand(rows, -1)
    if found is None:
        return without.contiguous()
    drafted = pair[0] if probabilities is None else _shared(pair[0], probabilities, window)
    return torch.where(found[:, None], drafted, without)


def _shared(weights: torch.Tensor, probabilities: torch.Tensor, window: int) -> torch.Tensor:
    """`weights` `[W + drafts + others]` for each row, the first place's shared out among its candidates. Where the
    first of them is accepted the next input lies further on, which the places behind it weigh: so its own share is what
    its probability exceeds that rate by."""
    ahead = weights[window:]
    chain = ahead.shape[0] - probabilities.shape[1] + 1
    least = torch.finfo(torch.float32).tiny
    accepted = 1 - ahead[0] / ahead.sum().clamp(min=least)
    first = (probabilities[:, :1] - accepted).clamp(min=least)  # something is left to divide by
    own = torch.cat((first, probabilities[:, 1:]), 1)
    share = ahead[0] * own / own.sum(1, keepdim=True)
    kept, behind = (part.expand(len(share), -1) for part in (weights[:window], ahead[1:chain]))
    return torch.cat((kept, share[:, :1], behind, share[:, 1:]), 1)
