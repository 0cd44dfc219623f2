"""The working set of one layer: slots, block table, ages, and the tail in front of them."""

from __future__ import annotations

import torch

from . import ops
from .config import BLOCK, TAIL
from .ops import cuda
from .ops.reference import evict_key
from .summaries import GROWTH
from .tail import Entry, at_entry

Plan = tuple[torch.Tensor, torch.Tensor]
"""Blocks, -1 for none, and the slots they go to: `[B, H, C]` each."""

Sharing = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float]
"""Caps, gains, means and rate of `ops.select`."""

FIRST_SLOTS = 8
"""Slots allocated at first; doubled while rows are short, so that a large budget costs nothing until it is used."""

FEW_SLOTS = 64
"""So many are doubled no longer: more are added by an eighth, and at least so many."""


def grown(have: int, want: int) -> int:
    """How many slots there are once there were `have` and `want` are needed."""
    return have if want <= have else max(want, have + min(have, max(FEW_SLOTS, have // GROWTH)), FIRST_SLOTS)


class WorkingSet:
    """Up to `slots` block-sized slots for each of B rows and H KV heads.

    Attributes:
        keys, values: `[B, H, TAIL + A*16, D]`: the tail, then the A slots allocated so far (A <= slots).
        table: `[B, H, A]` slot -> block or -1. last_selected: `[B, H, A]` step. fresh: `[B, H, A]` bool, admitted
            and not attended to yet. order: `[A]` breaks ties among equally old victims.
    """

    def __init__(
        self, slots: int, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.slots, self.seed = slots, seed
        self.keys = torch.zeros((rows, heads, TAIL, dim), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.table = torch.full((rows, heads, 0), -1, dtype=torch.int64, device=device)
        self.last_selected = torch.zeros_like(self.table)
        self.fresh = torch.zeros_like(self.table, dtype=torch.bool)
        self.order = self._order(0)

    def _order(self, slots: int) -> torch.Tensor:
        if self.seed == 0:
            return torch.arange(slots, device=self.table.device)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(slots, generator=generator).to(self.table.device)

    @property
    def allocated(self) -> int:
        return self.table.shape[2]

    def ensure(self, blocks: int) -> None:
        """At least `min(blocks, slots)` slots."""
        have = self.allocated
        more = min(grown(have, min(blocks, self.slots)), self.slots) - have
        if more > 0:
            rows, heads, _, dim = self.keys.shape
            room = self.keys.new_zeros((rows, heads, more * BLOCK, dim))
            empty = self.table.new_full((rows, heads, more), -1)
            nothing = torch.zeros_like(empty)
            new = [
                torch.cat((self.keys, room), 2), torch.cat((self.values, room), 2), torch.cat((self.table, empty), 2),
                torch.cat((self.last_selected, nothing), 2), torch.cat((self.fresh, nothing.bool()), 2),
                self._order(have + more),
            ]  # fmt: skip
            # All or none: it may be tried again after there was no memory for one of them.
            self.keys, self.values, self.table, self.last_selected, self.fresh, self.order = new

    def place(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """All that a row holds, `[H, n, D]` each: block i goes to slot i. There must be room."""
        tokens = keys.shape[1]
        blocks = -(-tokens // BLOCK)
        self.keys[row, :, TAIL : TAIL + tokens] = keys
        self.values[row, :, TAIL : TAIL + tokens] = values
        self.table[row] = -1
        self.table[row, :, :blocks] = torch.arange(blocks, device=keys.device)
        self.last_selected[row] = 0
        self.fresh[row] = False

    def keep_blocks(self, blocks: torch.Tensor) -> None:
        """These `[B, H, k]` (-1 for none) stay where they are resident, all others go: k slots are left, as if they had
        come to empty ones in this order."""
        self.order = self._order(blocks.shape[2])
        blocks = blocks[..., self.order]
        known = torch.where(blocks >= 0, blocks, -2).unsqueeze(-1) == self.table.unsqueeze(2)  # [B, H, k, A]
        resident, slot = known.any(-1), known.to(torch.uint8).argmax(-1)
        at = (TAIL + slot.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=slot.device)).flatten(2)
        tail = torch.arange(TAIL, device=slot.device).expand(*slot.shape[:2], TAIL)
        at = torch.cat((tail, at), 2).unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(2, at), self.values.gather(2, at)
        self.last_selected = self.last_selected.gather(2, slot)
        self.fresh = self.fresh.gather(2, slot) & resident
        self.table = torch.where(resident, blocks, -1)

    def write_tail(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tail entries 0 and on. keys, values: `[B, H, q, D]`."""
        count = keys.shape[2]
        self.keys[:, :, :count] = keys
        self.values[:, :, :count] = values

    def attend(
        self, query: torch.Tensor, lengths: torch.Tensor, tail_mask: torch.Tensor, scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        self.fresh.zero_()
        return ops.attend(query, self.keys, self.values, self.table, lengths, tail_mask, scaling, sinks)

    def append_from_tail(
        self, entry: Entry, lengths: torch.Tensor, step: torch.Tensor, may_open: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tail entry -> open block, where `lengths` is not negative. Returns slot `[B, H]` and wasted `[B, H]`: an
        evicted block nobody attended to."""
        slot, evicted = ops.append(
            self.keys, self.values, self.table, self.last_selected, lengths, self.order,
            at_entry(self.keys, entry), at_entry(self.values, entry), step, may_open,
        )  # fmt: skip
        if not may_open:
            return slot, evicted
        at = slot.unsqueeze(-1)
        wasted = evicted & self.fresh.gather(2, at).squeeze(-1)
        self.fresh.scatter_(2, at, self.fresh.gather(2, at) & (lengths < 0)[:, None, None])
        return slot, wasted

    def slot_keys(self, slot: torch.Tensor) -> torch.Tensor:
        """Keys `[B, H, 16, D]` of one slot `[B, H]` a row and head."""
        index = TAIL + slot.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=slot.device)
        return self.keys.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[-1]))

    @property
    def _select_fused(self) -> bool:
        return cuda.serves(self.keys) and self.allocated <= cuda.MAX_SLOTS

    def select(
        self, scores: torch.Tensor, lengths: torch.Tensor, cap: int, step: torch.Tensor,
        sharing: Sharing = cuda.NO_SHARING,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """`ops.select` on this set. Returns plan_block, plan_slot, counts and wasted `[H]`."""
        if self._select_fused:
            plan, counts = cuda.plan_for(self.table, cap), self.table.new_zeros((4, self.table.shape[1]))
            self._select_step(scores, lengths, step, plan, counts[:3], counts[3], sharing)
            return *plan, counts[:3], counts[3]
        plan_block, plan_slot, counts = ops.select(
            scores, self.table, self.last_selected, lengths, self.order, cap, step, *sharing
        )
        admitted = plan_block >= 0
        old = self.fresh.gather(2, plan_slot)
        self.fresh.scatter_(2, plan_slot, old | admitted)
        return plan_block, plan_slot, counts, (old & admitted).sum((0, 2))

    def _select_step(
        self, scores: torch.Tensor, lengths: torch.Tensor, step: torch.Tensor, plan: Plan, counts: torch.Tensor,
        wasted: torch.Tensor, sharing: Sharing,
    ) -> None:  # fmt: skip
        cuda.select_step(
            scores, self.table, self.last_selected, lengths, self.order, step, self.fresh, *plan, counts, wasted,
            sharing,
        )  # fmt: skip

    def select_into(
        self, plan: Plan, counts: torch.Tensor, wasted: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor,
        step: torch.Tensor, sharing: Sharing = cuda.NO_SHARING,
    ) -> None:  # fmt: skip
        """`select` with what it returns written to `plan` `[B, H, C]` and added to counts `[3, H]` and wasted `[H]`."""
        if self._select_fused:
            return self._select_step(scores, lengths, step, plan, counts, wasted, sharing)
        found = self.select(scores, lengths, plan[0].shape[2], step, sharing)
        for have, new in zip((*plan, counts, wasted), (*found[:2], counts + found[2], wasted + found[3])):
            have.copy_(new)

    def keep(self, first: int, from_block: torch.Tensor, step: torch.Tensor) -> None:
        """Blocks before `first` and at or beyond `from_block` `[B]` count as selected at `step`."""
        kept = (self.table < first) | (self.table >= from_block[:, None, None])
        self.last_selected.masked_fill_(kept & (self.table >= 0), step)

    def forget_from(self, block: torch.Tensor) -> None:
        """Empty the slots of blocks at or beyond `block` `[B]`: their content is no longer the row's."""
        self.table.masked_fill_(self.table >= block[:, None, None], -1)
        self.fresh &= self.table >= 0

    def open_plan(self, lengths: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make each row's open block resident: the plan `[B, H, 1]` that fetches it where it is not."""
        block = (lengths // BLOCK)[:, None, None].expand(*self.table.shape[:2], 1)
        needed = (lengths % BLOCK > 0)[:, None, None]
        resident = (self.table == block).any(-1, keepdim=True)
        slot = evict_key(self.table, self.last_selected, self.order).argmin(-1, keepdim=True)
        missing = needed & ~resident
        self.table.scatter_(2, slot, torch.where(missing, block, self.table.gather(2, slot)))
        self.last_selected.masked_fill_((self.table == block) & needed, step)
        self.fresh.scatter_(2, slot, self.fresh.gather(2, slot) & ~missing)
        return torch.where(missing, block, -1), slot

    def select_rows(self, index: torch.Tensor) -> None:
        for name in ("keys", "values", "table", "last_selected", "fresh"):
            setattr(self, name, getattr(self, name).index_select(0, index))

    def fork(self) -> "WorkingSet":
        rows, heads, _, dim = self.keys.shape
        other = WorkingSet(self.slots, rows, heads, dim, self.keys.dtype, self.keys.device, self.seed)
        for name in ("keys", "values", "table", "last_selected", "fresh", "order"):
            setattr(other, name, getattr(self, name).clone())
        return other

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.table.nbytes + self.last_selected.nbytes
