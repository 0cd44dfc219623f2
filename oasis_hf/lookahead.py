"""Whose queries count how much in the prediction of the next step's blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .config import OasisConfig


def recent_window(config: OasisConfig, drafted: bool = False) -> int:
    """W, how many committed tokens' queries a layer keeps: what is averaged, or fallen back on without a draft.
    drafted: there is always one in every row; the latest query is kept for steps that may not stack it."""
    kept = config.lookahead == "smoothed" or (config.lookahead in ("draft", "oracle") and not drafted)
    return config.smooth_queries if kept else 1


def wants_drafts(config: OasisConfig) -> bool:
    """Whether draft rows are stacked at all."""
    return config.speculate or isinstance(config.lookahead, Mapping) or config.lookahead in ("draft", "oracle")


def predicts_blocks(config: OasisConfig) -> bool:
    """Whether the next step's blocks are predicted at all."""
    return config.lookahead not in ("none", "on_demand")


def draft_rows(config: OasisConfig) -> int:
    """Rows stacked behind the new token: verified drafts, and one more that is lookahead only."""
    return config.draft_tokens + 1 if config.speculate else 1


def next_input_probabilities(drafts: int, acceptance: float) -> list[float]:
    """P(the next forward's input stands where draft i stands), for a chain of which all but the last are verified.

    It stands at draft i if the drafts before it were accepted and it was not (then its query is the nearest we have),
    and at the last one if all verified ones were.
    """
    return [acceptance**i * (1 - acceptance) for i in range(drafts - 1)] + [acceptance ** (drafts - 1)]


def query_weights(
    config: OasisConfig, window: int, drafts: int, acceptance: float, count: int = 1
) -> list[list[float]]:
    """Two lists of weights of the recent queries (oldest first) and the drafts' in the block score, `window + drafts`
    each: for rows that have a draft, and for those that fall back on recent queries.

    Args:
        acceptance: running rate at which verified drafts are the next input.
        count: tokens that the step commits; where they are several, the caller's own candidates, which of them stays
            is not known yet, so all of them (the latest W) count alike.
    """
    kind = config.lookahead
    nothing = [0.0] * drafts
    latest = [0.0] * (window - 1) + [1.0]
    smoothed = [1 / window] * window
    ahead = next_input_probabilities(drafts, acceptance) if drafts else []
    if count > 1:
        new = min(count, window)
        with_draft = without = [0.0] * (window - new) + [1 / new] * new + nothing
    elif isinstance(kind, Mapping):
        total = kind["draft"] + kind["previous"]
        with_draft = [w * kind["previous"] / total for w in latest] + [p * kind["draft"] / total for p in ahead]
        without = latest + nothing
    elif kind in ("draft", "oracle"):
        with_draft = [0.0] * window + ahead
        # A drafter that proposes nothing: the current query predicts.
        without = smoothed + nothing if drafts else latest
    else:
        with_draft = without = smoothed + nothing
    return [with_draft if drafts else without, without]


def row_weights(pair: torch.Tensor, found: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Each row's weights `[rows, W + drafts]`. pair: `query_weights` as a tensor; found: `[rows]` bool, rows that have
    a draft, None: no row."""
    without = pair[1].expand(rows, -1)
    return without.contiguous() if found is None else torch.where(found[:, None], pair[0], without)
