"""A layer's part of a captured step: few launches, everything in place, prediction and transfer beside the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import ops
from .config import BLOCK
from .lookahead import most_rows
from .pipeline import Pipeline
from .state import State, Step
from .stats import Counters
from .store import Move
from .summaries import Summaries
from .working_set import Plan, WorkingSet


class CapturedSteps:
    """What `OasisLayer` does in a step that is captured.

    Attributes:
        queries: `[B, Hq, W + drafts, D]`, the layer's `recent` queries in front, the last step's drafts' behind them.
        plan: what the last step selected; a late layer's is transferred by the next one.
    """

    queries: torch.Tensor | None = None
    plan: Plan | None = None
    _window: torch.Tensor | None = None  # of `queries`: always the same tensor, which is how a graph knows it

    if TYPE_CHECKING:
        state: State
        index: int
        scaling: float
        device: torch.device
        working_set: WorkingSet
        summaries: Summaries
        counters: Counters
        store: Any
        recent: torch.Tensor | None
        draft_queries: torch.Tensor | None
        _fetch_now: Any
        _append: Any
        _share_out: Any
        sharing: Any

    def _decode_captured(
        self, step: Step, pipeline: Pipeline, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        lengths: torch.Tensor, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The same with few launches, in place, and beside the model what the eager step does in its way. One token
        stays."""
        own, window = self.working_set, self.state.window
        assert self.queries is not None and self.plan is not None
        self._fetch_now(step, query[:, :, :1], lengths)  # first: it asks for the last token's query, and what is unread
        ops.enter(query, keys, values, self.queries, 1, window, own.keys, own.values, own.fresh)
        mask = step.tail_mask(keys.device)
        out = ops.attend(query, own.keys, own.values, own.table, lengths, mask, self.scaling, sinks)
        self.draft_queries = self.queries[:, :, window : window + step.drafts]
        age = step.once("age", lambda: self.state.clock(keys.device, 1 if step.predicts else 0))
        before = step.once("before", lambda: step.where_taking(lengths, -1))
        after = step.once("after", lambda: before + 1)
        closed = step.once("closed", lambda: after // BLOCK)
        with pipeline.beside(before, after, closed):
            self._append(0, before, step.starts, age)
            if step.weights is not None:
                self._predict(self.queries[:, :, : window + step.drafts], closed, step.weights, after)
        if step.predicts:
            pipeline.send(None if self.late else self.move)
        return out

    def _predict(
        self, queries: torch.Tensor, closed: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Score and select into the plan, over as many blocks as there may be until the step is captured anew."""
        assert self.plan is not None
        blocks = self.summaries.vectors.shape[2]
        scores = self.summaries.score(queries, closed, weights, self.scaling, blocks)
        clock = self.state.clock(self.device)
        counts, wasted = self.counters.selection, self.counters.of("wasted")
        self.working_set.select_into(self.plan, counts, wasted, scores, lengths, clock, self.sharing)
        self._share_out()

    @property
    def late(self) -> bool:
        """Whether the next step issues this layer's transfer: those of the later half run into it."""
        return 2 * self.index >= self.state.sparse_layers

    @property
    def move(self) -> Move:
        """What brings the plan's blocks into their slots."""
        assert self.plan is not None
        return self.index, self.working_set.keys, self.working_set.values, *self.plan

    def unplan(self) -> None:
        """Nothing is left to the next captured step."""
        if self.plan is not None:
            self.plan[0].fill_(-1)

    def hold_still(self) -> None:
        """Everything that a captured step reads and leaves is where the next one finds it."""
        assert self.recent is not None
        rows, heads, window, dim = self.recent.shape
        if self.queries is None or self.queries.shape[:2] != (rows, heads):
            self.queries = self.recent.new_zeros((rows, heads, window + most_rows(self.state.config), dim))
        if self._window is None or self._window.data_ptr() != self.queries.data_ptr():
            self._window = self.queries[:, :, :window]
        if self.recent is not self._window:
            self._window.copy_(self.recent)
            self.recent = self._window
        table, cap = self.working_set.table, min(self.state.cap, self.working_set.allocated)
        if self.plan is None or self.plan[0].shape != (*table.shape[:2], cap):
            nothing = table.new_full((*table.shape[:2], cap), -1)
            self.plan = nothing, torch.zeros_like(nothing)
