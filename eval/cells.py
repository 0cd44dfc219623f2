"""Kept attention mass of every setting, from a recording: no further forward of the model.

A cell is a lookahead x a score x a budget. Its kept mass at step t is the share of the true softmax attention of step
t's query that falls on the blocks selected for that step, the open block and the token itself, averaged over the query
heads of a group. With speculation off the forward of the step before selects; with it on (`Recording.speculating`) the
steps of a pass share what the pass before selected, by several drafts' queries. The selection is what the package would
select: `ops.reference.summarize` makes the summaries, `lookahead.query_weights` weighs the queries, and `block_scores`
is `ops.reference.score` for all layers and steps at once (tests/test_agreement.py holds the two together). There is no
fetch cap here: `capped.py` adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from recording import Recording

from oasis_hf import OasisConfig
from oasis_hf.config import BLOCK
from oasis_hf.lookahead import query_weights, recent_window, row_weights
from oasis_hf.ops import reference
from oasis_hf.scorers import SCORERS


@dataclass(frozen=True)
class Lookahead:
    """knob: `OasisConfig.lookahead`. smooth: `smooth_queries`. draft: whose draft, "lookup" (prompt lookup as it is),
    "true" (a draft that is always right: an upper bound) or None. smoothed_share: of a mix of draft and smoothed
    queries, which the package does not offer. candidates: whether the drafter's others for the first position count
    too, each by its share."""

    knob: Any
    smooth: int = 4
    draft: str | None = None
    smoothed_share: float = 0.0
    candidates: bool = False

    @property
    def real(self) -> bool:
        """Whether it can be had without knowing the future."""
        return self.draft != "true"

    @property
    def offered(self) -> bool:
        """Whether the package can run it."""
        return self.smoothed_share == 0


LOOKAHEADS: dict[str, Lookahead] = {
    "previous": Lookahead("previous"),
    "smoothed 2": Lookahead("smoothed", 2),
    "smoothed 4": Lookahead("smoothed", 4),
    "smoothed 8": Lookahead("smoothed", 8),
    "smoothed 16": Lookahead("smoothed", 16),
    "lookup draft": Lookahead("draft", 4, "lookup"),
    "lookup draft, else smoothed 8": Lookahead("draft", 8, "lookup"),
    "lookup .7 + previous .3": Lookahead({"draft": 0.7, "previous": 0.3}, 4, "lookup"),
    "lookup .5 + previous .5": Lookahead({"draft": 0.5, "previous": 0.5}, 4, "lookup"),
    "lookup .5 + smoothed 4 .5 (not offered)": Lookahead("draft", 4, "lookup", 0.5),
    "true draft": Lookahead("draft", 4, "true"),
    "true .5 + previous .5": Lookahead({"draft": 0.5, "previous": 0.5}, 4, "true"),
    "true .5 + smoothed 4 .5 (not offered)": Lookahead("draft", 4, "true", 0.5),
}
"""On-demand selection uses the step's own query: the same blocks as "true draft"."""

ON_DEMAND = "on demand"
"""Of the model's runs only: the ceiling of a score, fetched on the critical path with no cap."""


HEAD = "head's draft"
"""Of the model's runs only, where there is a head."""


CANDIDATES = "several candidates"
"""Of recordings with a head only."""


def lookahead_named(name: str) -> Lookahead:
    others = {
        ON_DEMAND: Lookahead("on_demand"), HEAD: Lookahead("draft", 4, "head"),
        CANDIDATES: Lookahead("draft", 4, "head", candidates=True),
    }  # fmt: skip
    return others[name] if name in others else LOOKAHEADS[name]


WINDOW = max(one.smooth for one in LOOKAHEADS.values())


@dataclass(frozen=True)
class Score:
    """How a query becomes a number a block: the scorer's four knobs and lambda."""

    scorer: str
    half_range: float
    reduction: str
    summary_dtype: str
    tokens_per_summary: int

    def config(self, lookahead: str, **knobs: Any) -> OasisConfig:
        one = lookahead_named(lookahead)
        return OasisConfig(
            scorer=self.scorer, half_range=self.half_range, reduction=self.reduction,
            summary_dtype=self.summary_dtype, tokens_per_summary=self.tokens_per_summary,
            lookahead=one.knob, smooth_queries=one.smooth, **knobs,
        )  # fmt: skip

    def block_bytes(self, dim: int, element: int = 2) -> tuple[int, int]:
        """Bytes a block and KV head: of the vectors, and of their fp16 scales."""
        parts = BLOCK // self.tokens_per_summary
        if self.summary_dtype == "int8":
            return 2 * parts * dim, 2 * parts * 2
        return 2 * parts * dim * element, 0

    def replace(self, **knobs: Any) -> "Score":
        return Score(**{**self.__dict__, **knobs})


PAPER = Score("minmax", 1.0, "max", "model", 16)


def all_scores(half_ranges: tuple[float, ...], parts: tuple[int, ...] = (16, 8, 4)) -> list[Score]:
    """Every score; lambda means nothing to minmax."""
    rows = []
    for tokens in parts:
        for dtype in ("model", "int8"):
            for scorer, lambdas in (("minmax", (1.0,)), ("midrange", half_ranges)):
                for half_range in lambdas:
                    for reduction in ("max", "mean", "softmax-mean"):
                        rows.append(Score(scorer, half_range, reduction, dtype, tokens))
    return rows


# -- the recording, seen by blocks ------------------------------------------------------------------------------------


@dataclass
class Truth:
    """mass: `[L, H, S, N + 1]` float32, true attention on each block, mean over the group. closed: `[S]`, blocks closed
    when step t's selection was made; those from there on are the open block's or newer, and always kept."""

    mass: torch.Tensor
    closed: torch.Tensor

    @property
    def open(self) -> torch.Tensor:
        """`[L, H, S]`: mass that is always kept."""
        return self.mass.masked_fill(_exists(self.closed, self.mass.shape[3]), 0).sum(-1)

    @property
    def closed_mass(self) -> torch.Tensor:
        """`[L, H, S, N]`, -inf where a block is not closed yet."""
        blocks = self.mass.shape[3] - 1
        return self.mass[..., :blocks].masked_fill(~_exists(self.closed, blocks), -torch.inf)


def truth(recording: Recording) -> Truth:
    """The true attention by block. Step t at position p = prompt + t sees positions 0 to p."""
    layers, heads, total, _ = recording.keys.shape
    steps = recording.steps
    position = torch.arange(recording.prompt, total, device=recording.keys.device)
    hidden = torch.arange(total, device=position.device) > position[:, None]
    blocks = (total - 1) // BLOCK
    out = []
    for layer in range(layers):
        query = recording.query[layer, :, -steps:].float().unflatten(0, (heads, -1))
        logits = query @ recording.keys[layer].float()[:, None].transpose(-1, -2) * recording.scaling
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)  # [H, S, T]
        weights = torch.nn.functional.pad(weights, (0, (blocks + 1) * BLOCK - total))
        out.append(weights.unflatten(-1, (-1, BLOCK)).sum(-1))
    return Truth(torch.stack(out), (recording.prompt + recording.passes.origin + 1) // BLOCK)


class Scorings:
    """Scores of one recording's queries under one `Score`, for all layers and steps; each source of queries is scored
    once, whatever lookahead asks for it.

    Args:
        closed: `[S]`, see `Truth`.
    """

    def __init__(self, recording: Recording, score: Score, closed: torch.Tensor) -> None:
        self.recording, self.score, self.closed = recording, score, closed
        keys = recording.keys
        layers, heads, total, dim = keys.shape
        self.blocks = (total - 1) // BLOCK
        parts = BLOCK // score.tokens_per_summary
        runs = keys[:, :, : self.blocks * BLOCK].unflatten(2, (-1, BLOCK))
        summaries, scales = reference.summarize(runs, score.scorer, parts, score.summary_dtype == "int8")
        vectors = summaries.float()
        if scales.numel():
            vectors = vectors * scales.float().unsqueeze(-1)
        self.vectors = vectors.flatten(-2).flatten(2, 3).transpose(-1, -2)  # [L, H, 2D, N * P]
        self.drafts = recording.verified + 1
        self.raw_recent = self._raw(recording.query)
        ahead, columns = recording.chains.tokens.shape[1], recording.draft_query.shape[3]
        self.raw_draft = [self._raw(recording.draft_query[:, :, :, i]) for i in range(self.drafts)]
        self.raw_other = [self._raw(recording.draft_query[:, :, :, i]) for i in range(ahead, columns)]
        self.kept: dict[tuple[str, int, str, bool], torch.Tensor] = {}

    def _raw(self, query: torch.Tensor) -> torch.Tensor:
        """`[L, Hq, R, D]` -> `[L, H, G, R, N, P]`."""
        layers, heads = self.vectors.shape[:2]
        wide = SCORERS[self.score.scorer](self.score.half_range).expand(query.float() * self.recording.scaling)
        wide = wide.flatten(-2).reshape(layers, heads, -1, self.vectors.shape[2])
        raw = wide @ self.vectors
        return raw.view(layers, heads, -1, query.shape[2], self.blocks, self.vectors.shape[3] // self.blocks)

    def use(self, reduction: str) -> None:
        """Change the reduction; what was computed under another one is dropped."""
        self.score = self.score.replace(reduction=reduction)
        self.kept.clear()

    def query_scores(self, source: str, shift: int, standardise: bool) -> torch.Tensor:
        """Scores `[L, H, S, N]` of one query a step.

        Args:
            source: "own", the step's own query; "recent", the true query `shift` positions behind the token of the
                forward that selects (0: that token's, -1: the one's before it); "draft", of its drafts the one there;
                "other", of the other candidates for the first draft the one of that number.
        """
        key = (source, shift, self.score.reduction, standardise)
        if key not in self.kept:
            origin, steps, window = self.recording.passes.origin, self.recording.steps, self.recording.window
            if source == "own":
                raw = self.raw_recent[:, :, :, window:]
            elif source == "recent":
                raw = self.raw_recent[:, :, :, (window + origin + shift).clamp(max=window + steps - 1)]
            else:
                raws = self.raw_draft if source == "draft" else self.raw_other
                raw = raws[shift - 1][:, :, :, origin + 1]
            self.kept[key] = _reduce(raw, self.closed, self.score.reduction, standardise)
        return self.kept[key]

    def own_scores(self) -> torch.Tensor:
        """`[L, H, S, N]`: what a step would choose by its own query."""
        return self.query_scores("own", 0, False).masked_fill(~_exists(self.closed, self.blocks), -torch.inf)

    def block_scores(self, lookahead: str) -> torch.Tensor:
        """`[L, H, S, N]`, -inf where a block is not closed: what step t's blocks are chosen by."""
        one = lookahead_named(lookahead)
        config = self.score.config(lookahead)
        passes = self.recording.passes
        window, found = recent_window(config), self.recording.found[passes.origin + 1]
        drafts = self.drafts if one.draft else 0
        if one.draft == "true":
            found = torch.ones_like(found)
        pair = torch.tensor(query_weights(config, window, drafts, passes.acceptance), device=self.closed.device)
        weights = row_weights(pair, found if drafts else None, len(found))
        if one.smoothed_share:
            share = found[:, None] * one.smoothed_share
            both = torch.full_like(weights, 1 / window)
            both[:, window:] = 0
            weights = torch.where(found[:, None], weights * (1 - share) + both * share, weights)
        standardise = weights.shape[1] > 1
        total = None
        for column in range(weights.shape[1]):
            weight = weights[:, column]
            if not bool((weight != 0).any()):
                continue
            source = "draft" if column >= window and one.draft != "true" else "recent"
            scores = self.query_scores(source, column - window + 1, standardise)
            if one.candidates and column == window:
                scores = self._shared(scores, standardise)
            part = scores * weight[:, None]
            total = part if total is None else total + part
        assert total is not None
        return total.masked_fill(~_exists(self.closed, self.blocks), -torch.inf)

    def _shared(self, first: torch.Tensor, standardise: bool) -> torch.Tensor:
        """`[L, H, S, N]`: scores of the first draft and of the other candidates, each by its share."""
        shares = self.recording.chains.shares
        assert shares is not None
        shares = shares[self.recording.passes.origin + 1, :, None]
        total = first * shares[:, 0]
        for number in range(1, shares.shape[1]):
            total = total + self.query_scores("other", number, standardise) * shares[:, number]
        return total


def _exists(closed: torch.Tensor, blocks: int) -> torch.Tensor:
    return torch.arange(blocks, device=closed.device) < closed[:, None]


def _reduce(raw: torch.Tensor, closed: torch.Tensor, reduction: str, standardise: bool) -> torch.Tensor:
    """`[L, H, G, S, N, P]` -> `[L, H, S, N]`: the second half of `ops.reference.score`, for one query a step."""
    exists = _exists(closed, raw.shape[4])
    if reduction == "softmax-mean":
        raw = raw.masked_fill(~exists[..., None], torch.finfo(torch.float32).min)
        return raw.flatten(-2).softmax(-1).view_as(raw).sum(-1).mean(2)
    per_part = raw.amax(-1)
    scores = per_part.amax(2) if reduction == "max" else per_part.mean(2)
    if standardise:
        keep = exists.float()
        count = keep.sum(-1, keepdim=True).clamp(min=1)
        mean = (scores * keep).sum(-1, keepdim=True) / count
        var = ((scores - mean).square() * keep).sum(-1, keepdim=True) / count
        scores = (scores - mean) * (var + 1e-12).rsqrt()
    return scores


# -- cells ------------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One text's reading. missed: mean over layers, KV heads and steps of 1 - kept mass. worst: the same of the worst
    layer. entering: blocks that a step's selection has and the one before it had not, as a share of K: what would have
    to move without a cap. same: overlap with the selection of the true next query under the same score."""

    missed: float
    worst: float
    entering: float
    same: float


def selections(scores: torch.Tensor, budgets: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """`[L, H, S, N]` bool a budget: the top K blocks, fewer where fewer are closed. budgets: tokens -> K."""
    most = min(max(budgets.values()), scores.shape[-1])
    top, index = scores.topk(most, -1)
    out = {}
    for budget, count in budgets.items():
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(-1, index[..., :count], top[..., :count] > -torch.inf)
        out[budget] = chosen
    return out


def read(truth: Truth, chosen: torch.Tensor, reference_set: torch.Tensor, count: int) -> Cell:
    """chosen, reference_set: `[L, H, S, N]` bool. count: K."""
    kept = truth.mass[..., :-1].masked_fill(~chosen, 0).sum(-1) + truth.open  # [L, H, S]
    missed = 1 - kept.double().mean((1, 2))
    entering = (chosen[:, :, 1:] & ~chosen[:, :, :-1]).sum(-1).double().mean() / count
    same = (chosen & reference_set).sum(-1).double() / reference_set.sum(-1).clamp(min=1)
    one = torch.stack((missed.mean(), missed.max(), entering, same.mean())).tolist()
    return Cell(*one)


def cells(
    recording: Recording, scores: list[Score], lookaheads: tuple[str, ...], budgets: Mapping[int, int],
    more: Mapping[Score, set[str]] | None = None,
) -> Iterator[tuple[Score | None, str, int, Cell]]:  # fmt: skip
    """Every cell of one text; the ideal (top K by true mass) comes first, with score None. lookaheads: of all scores;
    more: further ones of some."""
    true = truth(recording)
    for budget, chosen in selections(true.closed_mass, budgets).items():
        yield None, "ideal", budget, read(true, chosen, chosen, budgets[budget])
    scorings: Scorings | None = None
    for score in scores:
        if scorings is None or scorings.score.replace(reduction=score.reduction) != score:
            scorings = None  # freed before the next is made
            scorings = Scorings(recording, score, true.closed)
        scorings.use(score.reduction)
        own = selections(scorings.own_scores(), budgets)
        for lookahead in dict.fromkeys((*lookaheads, *(more or {}).get(score, ()))):
            chosen_by = selections(scorings.block_scores(lookahead), budgets)
            for budget, chosen in chosen_by.items():
                yield score, lookahead, budget, read(true, chosen, own[budget], budgets[budget])
