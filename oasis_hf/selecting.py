"""A layer's choice of blocks: scored, selected and fetched behind a step, before it attends, or after a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import ops
from .config import BLOCK
from .lookahead import turned
from .ops import cuda
from .spans import span
from .state import State, Step
from .stats import Counters
from .summaries import Summaries
from .working_set import Sharing, WorkingSet

LEAST_MISSED = 1e-5
"""Of the mass: what is less is rounding, where nothing is missed."""


class Selecting:
    """The part of `OasisLayer` that decides what is in the working set."""

    if TYPE_CHECKING:
        state: State
        index: int
        heads: int
        scaling: float
        device: torch.device
        working_set: WorkingSet
        summaries: Summaries
        counters: Counters
        recent: torch.Tensor | None

        @property
        def store(self) -> Any: ...

    def _fetch_now(self, step: Step, query: torch.Tensor, lengths: torch.Tensor) -> None:
        """What this step's own queries `[B, Hq, count, D]` choose is there before they attend, where it fetches on
        demand or corrects. It waits for nothing but what this layer fetches. `recent` still ends with the token
        before."""
        config, cap, heads = self.state.config, self.working_set.allocated, None
        layers = config.correct_layers
        if not (step.on_demand or (step.corrects and (layers is None or self.index in layers))):
            return
        if step.corrects and config.correction != "off":
            cap = min(cap, config.correct_blocks)
        if step.corrects and config.correct_below is not None:
            assert self.recent is not None
            heads = turned(query[:, :, 0], self.recent[:, :, -1], self.heads, config.correct_below)
        elif step.corrects and config.correction == "always":
            shape = (len(query), self.heads)
            heads = step.once(("all heads", lengths.device), lambda: lengths.new_ones(shape, dtype=torch.bool))
        shape = (len(query), step.count)
        weights = step.once(("now", query.device), lambda: query.new_full(shape, 1 / step.count, dtype=torch.float32))
        why = "on_demand" if step.on_demand else "correction"
        asked = step.once(("asked", lengths.device), lambda: step.where_taking(lengths, 0))
        self._fetch(why, query, weights, asked, cap, heads)
        self.store.arrive(self.index)

    def _fetch(
        self, why: str, queries: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor, cap: int,
        heads: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Score, select and gather (in the pipeline's order), counting what moved under `why`. heads: `[B, H]` bool,
        which a correction is for; what stands in the others keeps its age. None: for those that miss too much."""
        step = self.state.step
        blocks = max(step.ends) // BLOCK if step else self.state.need_rows().most_blocks
        if step is not None and step.pipeline is not None:
            blocks = self.summaries.vectors.shape[2]
        if blocks == 0:
            return
        config, own, corrects = self.state.config, self.working_set, why == "correction"

        def closed_blocks() -> torch.Tensor:
            return lengths // BLOCK

        closed = closed_blocks() if step is None else step.once(("closed", why, lengths.device), closed_blocks)
        with span(f"predict layer {self.index}"):
            # What is missing is a share of attention, whatever blocks are ordered by elsewhere.
            reduction = "softmax-mean" if corrects and heads is None else config.reduction
            scores = self.summaries.score(queries, closed, weights, self.scaling, blocks, reduction)
        clock = age = self.state.clock(self.device)
        if corrects:
            above = max(config.correct_above, LEAST_MISSED)
            ops.correct(
                scores, heads, own.table, closed, above, clock, self.counters.correction,
                self.state.fired_on(self.device),
            )  # fmt: skip
            if config.speculate and step is not None and step.predicts:
                # Older than what this step predicts: were every slot as young as that, a block that an accepted draft
                # opens between two replays would take one whose block is still on its way.
                age = self.state.clock(self.device, 1)
        if why == "first":
            plan_block, plan_slot, counts, _ = own.select(scores, lengths, cap, age)
            self.counters.add(why, counts[1])
        else:
            plan_block, plan_slot = plan = cuda.plan_for(own.table, cap)
            fetched = why == "fetched"
            counts = self.counters.selection if fetched else self.counters.demand
            sharing = self.sharing if fetched else cuda.NO_SHARING
            own.select_into(plan, counts, self.counters.of("wasted"), scores, lengths, age, sharing)
        self.store.gather(self.index, own.keys, own.values, plan_block, plan_slot)

    @property
    def sharing(self) -> Sharing:
        """What `ops.select` is told of `fetch_ratio="auto"`."""
        shares = self.state.shares
        if shares is None:
            return cuda.NO_SHARING
        return shares.caps[self.index], shares.gains[self.index], self.summaries.means, shares.rate

    def _share_out(self) -> None:
        """Behind the last layer's selection: the next step's caps."""
        if self.state.shares is not None and self.index == self.state.sparse_layers - 1:
            self.state.shares.share_out()

    def first_select(self) -> None:
        """The working set after a prefill: the open block, and the last token's own top-K with no cap. Residents that
        are still true stay."""
        rows = self.state.need_rows()
        working_set = self.working_set
        working_set.ensure(rows.most_blocks)
        lengths = rows.lengths(self.device)
        dirty = torch.tensor(self.state.dirty_from, device=self.device)
        working_set.forget_from(dirty)
        self.summaries.forget_from(dirty)
        self._open("first")
        if self.state.dense and not self.state.lacks:
            return  # all closed blocks are there
        assert self.recent is not None
        query, ones = self.recent[:, :, -1:], lengths.new_ones((len(rows), 1), dtype=torch.float32)
        self._fetch("first", query, ones, lengths, working_set.allocated)
        if any(n == working_set.allocated * BLOCK for n in rows.tokens):
            self._fill_last_slot(lengths)

    def condense(self, slots: int) -> None:
        """Of a batch that was dense, leave the open block and what the last token's own query chooses, in so many slots
        at most; nothing crosses the link."""
        rows, own = self.state.need_rows(), self.working_set
        if own.allocated <= slots:
            return
        lengths, heads = rows.lengths(self.device), own.table.shape[1]
        own.forget_from(torch.tensor(self.state.dirty_from, device=self.device))
        if self.recent is None or not rows.most_blocks:  # nothing has been asked of it yet
            return own.keep_blocks(torch.arange(slots, device=self.device).expand(len(rows), heads, slots))
        ones = lengths.new_ones((len(rows), 1), dtype=torch.float32)
        closed = lengths // BLOCK
        scores = self.summaries.score(self.recent[:, :, -1:], closed, ones, self.scaling, rows.most_blocks)
        best = scores.topk(min(slots, scores.shape[2]))
        all_of = best.indices.masked_fill(best.values == -torch.inf, -1)
        chosen = all_of[..., : slots - 1]
        opened = (lengths % BLOCK > 0)[:, None, None]
        none, first = torch.full_like(chosen[..., :1], -1), closed[:, None, None].expand(-1, heads, 1)
        ordered = torch.where(opened, torch.cat((first, chosen), 2), torch.cat((chosen, none), 2))
        if all_of.shape[2] == slots:  # of exactly so many closed blocks none has to go
            ordered = torch.where((lengths == slots * BLOCK)[:, None, None], all_of, ordered)
        own.keep_blocks(ordered)

    def _fill_last_slot(self, lengths: torch.Tensor) -> None:
        """A row of exactly S closed blocks has no open one: its last block takes the slot that K = S - 1 leaves. It is
        the first to go when the next block opens."""
        working_set = self.working_set
        slots = working_set.allocated
        exact = (lengths == slots * BLOCK)[:, None, None]
        block = torch.arange(slots, device=lengths.device)
        resident = (working_set.table.unsqueeze(-1) == block).any(2)
        scores = torch.where(exact & ~resident, 0.0, -torch.inf)
        plan_block, plan_slot, counts, _ = working_set.select(scores, lengths, 1, self.state.clock(self.device, 1))
        self.store.gather(self.index, working_set.keys, working_set.values, plan_block, plan_slot)
        self.counters.add("first", counts[1])

    def _open(self, why: str) -> None:
        lengths = self.state.need_rows().lengths(self.device)
        plan_block, plan_slot = self.working_set.open_plan(lengths, self.state.clock(self.device))
        self.store.gather(self.index, self.working_set.keys, self.working_set.values, plan_block, plan_slot)
        self.counters.add(why, (plan_block >= 0).sum((0, 2)))
