"""What an attention mask says of a cache's columns: which new ones are real, and which old ones are to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .layers import OasisLayer
from .sliding import SlidingLayer
from .state import State


class Padding:
    """The part of `OasisCache` that reads masks."""

    if TYPE_CHECKING:
        state: State
        layers: list[Any]
        stepper: Any
        drafter: Any

        def settle(self) -> None: ...

    def new_columns(self, mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Which of `count` new columns are real `[B, count]`, None for all; reads the mask (prefill only).

        A mask that hides tokens already held (a finished row's padding, before the next turn) removes them.

        Raises:
            ValueError: the mask has another length, or shows columns that were padding when they came.
        """
        rows = self.state.need_rows()
        old = rows.columns
        if mask is None:
            mask = torch.ones((len(rows), old + count), dtype=torch.bool)
        self.check_mask(mask, count)
        mask = mask.detach().to("cpu", torch.bool)
        if mask.shape[1] == count:
            mask = torch.cat((rows.valid, mask), 1)
        if (mask[:, :old] & ~rows.valid).any():
            raise ValueError(
                "attention_mask shows columns that were padding when this OasisCache saw them, so it never stored "
                "them: pass the same padding as before (without a mask every column counts as real)."
            )
        hidden = rows.valid & ~mask[:, :old]
        for row in hidden.any(1).nonzero().flatten().tolist():
            self._hide(row, mask[row, :old])
        new = mask[:, old:]
        return None if bool(new.all()) else new

    def check_mask(self, mask: torch.Tensor, count: int) -> None:
        """Raise ValueError unless a mask has one column for each token held and each of `count` new ones, or for the
        new ones only."""
        rows = self.state.need_rows()
        if tuple(mask.shape) not in ((len(rows), rows.columns + count), (len(rows), count)):
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, but {len(rows)} rows of {rows.columns} cached + {count} "
                "new tokens were passed: give it one column for each."
            )

    def _hide(self, row: int, kept: torch.Tensor) -> None:
        """Take tokens out of the middle of a row: what follows them moves up."""
        self.stepper.forget()
        self.stepper.decoded = True  # what follows has seen what goes
        self.settle()
        state, rows = self.state, self.state.need_rows()
        stays = kept[rows.valid[row]]  # by the row's own token
        first = int((~stays).nonzero()[0])
        before = rows.tokens[row]
        later = stays[first:]
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sparse = [layer for layer in self.layers if isinstance(layer, OasisLayer)]
        for layer in sparse:
            keys, values = layer.store.read(layer.index, row, first, before)
            moved[layer.index] = keys[:, later].clone(), values[:, later].clone()
        rows.hide(row, kept)
        if state.store is not None:
            shorter = list(rows.tokens)
            shorter[row] = first
            state.store.truncate(shorter)
            state.store.ensure(shorter, rows.tokens)
        for layer in sparse:
            keys, values = (x.to(layer.device, layer.working_set.keys.dtype) for x in moved[layer.index])
            if keys.shape[1]:
                layer._store_row(row, first, keys, values)
        if state.store is not None:
            state.store.join()
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.hide(row, kept)
        state.mark_dirty([first if i == row else n for i, n in enumerate(rows.tokens)])
        self.drafter.hide(row, first, later)
