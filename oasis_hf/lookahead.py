"""Whose queries count how much in the prediction of the next step's blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .config import OasisConfig


def recent_window(config: OasisConfig) -> int:
    """W, how many committed tokens' queries a layer keeps: what is averaged, or fallen back on without a draft."""
    return config.smooth_queries if config.lookahead in ("smoothed", "draft", "oracle") else 1


def wants_drafts(config: OasisConfig) -> bool:
    """Whether draft rows are stacked at all."""
    return config.speculate or isinstance(config.lookahead, Mapping) or config.lookahead in ("draft", "oracle")


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
    config: OasisConfig, window: int, drafts: int, found: torch.Tensor | None, acceptance: float, rows: int,
    device: torch.device,
) -> torch.Tensor | None:  # fmt: skip
    """Weights `[rows, window + drafts]` of the recent queries (oldest first) and the drafts' in the block score.

    Args:
        found: `[rows]` bool, rows that have a draft; the others fall back on recent queries.
        acceptance: running rate at which verified drafts are the next input.

    Returns:
        None where nothing is predicted ("none", "on_demand").
    """
    kind = config.lookahead
    if kind in ("none", "on_demand"):
        return None
    smoothed = torch.full((window,), 1 / window)
    latest = torch.zeros(window)
    latest[-1] = 1
    ahead = torch.tensor(next_input_probabilities(drafts, acceptance)) if drafts else torch.zeros(0)
    nothing = torch.zeros(drafts)
    if isinstance(kind, Mapping):
        total = kind["draft"] + kind["previous"]
        with_draft = torch.cat((latest * kind["previous"] / total, ahead * kind["draft"] / total))
        without = torch.cat((latest, nothing))
    elif kind in ("draft", "oracle"):
        with_draft = torch.cat((latest * 0, ahead))
        without = torch.cat((smoothed, nothing))
    else:
        with_draft = without = torch.cat((smoothed, nothing))
    if drafts == 0 and kind in ("draft", "oracle"):
        without = latest  # a drafter that proposes nothing: the current query predicts
    if found is None or not drafts:
        return without.to(device).expand(rows, -1)
    return torch.where(found[:, None], with_draft.to(device), without.to(device))
