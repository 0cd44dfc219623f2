"""Drafts that were accepted become the rows' own: in every layer, in the drafter, and in what the host knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from .accepting import entering
from .room import Room, keeps_buffers
from .tail import APART, Entry

if TYPE_CHECKING:
    from .cache import OasisCache


class Committing(Room):
    """The part of `OasisCache` that appends entries of the last forward's tail."""

    if TYPE_CHECKING:
        drafter: Any
        stepper: Any

        @property
        def device(self) -> torch.device: ...

        def settle(self) -> None: ...

    @keeps_buffers
    def commit(self, path: list[int]) -> None:
        """Append accepted drafts of the last forward: their K and V become the rows' own.

        Args:
            path: indices of drafts (0 is the first stacked behind the new token), each following the one before.

        Raises:
            ValueError: there is no such draft, or it does not follow the one committed last.
        """
        tail = self.stepper.tail
        if tail is None:
            raise ValueError("There are no drafts to commit: they are gone once another forward or a crop has run.")
        for draft in path:
            entry = tail.count + draft
            if not draft >= 0 or entry >= len(tail.parents) or tail.parents[entry] != tail.last:
                raise ValueError(
                    f"Draft {draft} does not follow entry {tail.last} of the tail (parents {tail.parents})."
                )
            self.commit_entry(entry)

    @keeps_buffers
    def commit_entry(self, entry: Entry, takes: list[bool] | None = None) -> None:
        """Append one entry of the last forward's tail in every row: the same, or each row's own `[B]` (on the model's
        device). takes: rows that take theirs, before a step that leaves them out (`Rows.in_part`); None: all."""
        tail, rows = self.stepper.tail, self.state.need_rows()
        assert tail is not None
        self.settle()
        self._make_room(1, None if takes is None else [int(one) for one in takes])
        starts = rows.lengths(self.device).clone()
        counts = torch.ones_like(starts) if takes is None else torch.tensor(takes).to(starts)
        self.append_entries([entry], counts, rows.tokens)
        if takes is None:
            rows.advance(1)
        else:
            rows.append_ahead(takes, counts)
        tail.last = entry if isinstance(entry, int) else APART
        self._tell_drafter([entry], starts, None if takes is None else counts)

    @keeps_buffers
    def commit_found(self, entries: list[int], found: torch.Tensor) -> None:
        """`commit_entry` of each row's own, known to the host and `[B]` on the model's device: by a CUDA graph behind a
        replayed step."""
        alike, tail, cache = len(set(entries)) == 1, self.stepper.tail, cast("OasisCache", self)
        behind = entering(cache)
        if behind is None:
            return self.commit_entry(entries[0] if alike else found)
        behind.replay((behind.counts, found))
        rows = self.state.need_rows()
        if behind.notes:
            self.drafter.noted(1)
        else:
            self._tell_drafter([found], rows.lengths(self.device) - 1, None)
        rows.advance(1, on_device=False)
        tail.last = entries[0] if alike else APART

    @keeps_buffers
    def commit_rows(
        self, counts: torch.Tensor, own: list[int] | None = None, first: torch.Tensor | None = None
    ) -> None:
        """Append the first `counts` `[B]` (on the model's device) drafts of the last forward, each row its own number;
        inside `rows.pacing`.

        Args:
            own: the same, if the host knows it; else it waits for the device.
            first: `[B]`, the entry of the tail that stands for a row's first draft (its only one, if that is another
                candidate); None: the chain's in every row.
        """
        own, rows = counts.tolist() if own is None else own, self.state.need_rows()
        if any(own):
            self.settle()
            self._make_room(max(own), own)
            starts, entries = rows.lengths(self.device).clone(), self.draft_entries(max(own), first)
            self.append_entries(entries, counts, rows.tokens)
            rows.advance_by(own, counts)
            self._tell_drafter(entries, starts, counts)
        self.stepper.forget()

    @keeps_buffers
    def committed(self, counts: torch.Tensor, own: list[int], first: torch.Tensor | None, noted: bool) -> None:
        """The host's part of `commit_rows`, where the device has done its own by itself. noted: the drafter's too."""
        rows = self.state.need_rows()
        if noted:
            self.drafter.noted(max(own))
        elif any(own):
            self._tell_drafter(self.draft_entries(max(own), first), rows.lengths(self.device) - counts, counts)
        rows.advance_by(own, None)
        self.stepper.forget()

    def draft_entries(self, count: int, first: torch.Tensor | None = None) -> list[Entry]:
        """The entries of the chain's first `count` drafts, its first one replaced by each row's own `first`."""
        at = self.stepper.tail.count
        return [at if first is None else first, *range(at + 1, at + count)]

    def append_entries(self, entries: list[Entry], counts: torch.Tensor, tokens: list[int] | None) -> None:
        """Of entries that follow each other, each row's first `counts` `[B]` to the layers. tokens: the rows' lengths
        on the host; None: this is the device's work alone, which may be captured."""
        rows = self.state.need_rows()
        starts = rows.lengths(self.device)
        for place, entry in enumerate(entries):
            at = torch.where(counts > place, starts + place, -1)
            known = None if tokens is None else [n + place for n in tokens]
            there = {at.device: at}
            for layer in self.layers:
                if layer.device not in there:
                    there[layer.device] = at.to(layer.device)
                layer.commit(entry, rows.columns + place, there[layer.device], known)
        for layer in self.layers:
            layer.remember_drafts(entries, counts)

    def stacked_at(self, entries: list[Entry], stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries as `[B, q]`, and their tokens of a tail's `stacked` `[B, n]`."""
        columns = [torch.full_like(stacked[:, 0], one) if isinstance(one, int) else one for one in entries]
        index = torch.stack(columns, 1)
        return index, stacked.gather(1, index)

    def _tell_drafter(self, entries: list[Entry], starts: torch.Tensor, counts: torch.Tensor | None) -> None:
        """counts: `[B]`, as in `append_entries`; None: all rows take all."""
        stacked = self.stepper.tail.tokens
        if stacked is None:
            return
        index, tokens = self.stacked_at(entries, stacked)
        place = torch.arange(len(entries), device=starts.device)
        self.drafter.accept(tokens, starts, None if counts is None else place < counts[:, None], index)
