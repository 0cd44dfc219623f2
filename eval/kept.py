"""Kept mass of a running cache: how much of each query's attention over the whole context is on what is resident."""

from __future__ import annotations

from typing import Any

import torch

from oasis_hf.config import BLOCK
from oasis_hf.layers import OasisLayer
from oasis_hf.working_set import WorkingSet


class Kept:
    """While it is on (`with`), every step of caches of one row is looked at, its own token alone.

    The true keys are read back from the store, so this is for measurements and slow. Queries are those of the run
    itself: what earlier misses did to them is in them.

    Attributes:
        rows: `[H]` a layer and step, in the order in which they ran: the mean over a group's query heads.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self._layers: dict[int, OasisLayer] = {}

    def watch(self, cache: Any) -> None:
        self._layers = {id(layer): layer for layer in cache.sparse_layers}

    def by_step(self, layers: int) -> torch.Tensor:
        """`[S, L, H]`."""
        return torch.stack(self.rows).view(-1, layers, self.rows[0].shape[0])

    def __enter__(self) -> "Kept":
        self._attend = attend = WorkingSet.attend

        def look(own: WorkingSet, query: torch.Tensor, lengths: torch.Tensor, *rest: Any) -> torch.Tensor:
            for layer in self._layers.values():
                if layer.working_set is own:
                    self.rows.append(_kept(layer, query[0, :, 0], int(lengths[0])))
            return attend(own, query, lengths, *rest)

        WorkingSet.attend = look  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        WorkingSet.attend = self._attend  # type: ignore[method-assign]


def _kept(layer: OasisLayer, query: torch.Tensor, length: int) -> torch.Tensor:
    """`[H]` of a query `[Hq, D]` whose own key stands first in the tail."""
    own = layer.working_set
    keys = layer.store.read(layer.index, 0, 0, length)[0].to(query.device, query.dtype)
    keys = torch.cat((keys, own.keys[0, :, :1]), 1)
    grouped = query.unflatten(0, (keys.shape[0], -1)).float()
    share = (grouped @ keys.float().transpose(1, 2) * layer.scaling).softmax(-1).mean(1)
    blocks = -(-length // BLOCK)
    by_block = (
        torch.nn.functional.pad(share[:, :length], (0, blocks * BLOCK - length)).unflatten(1, (-1, BLOCK)).sum(-1)
    )
    table = own.table[0]
    # An empty slot reads a column of zeros.
    held = torch.nn.functional.pad(by_block, (0, 1)).gather(1, torch.where(table < 0, blocks, table.clamp(max=blocks)))
    return held.sum(-1) + share[:, length]
