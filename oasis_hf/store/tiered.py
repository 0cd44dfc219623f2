"""The full KV in a tier beyond host memory, which holds a part of it: the interface of `HostStore` over a `Near`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import ops
from ..config import BLOCK
from ..ops.reference import place_blocks
from .base import Move
from .host import HostStore, blocks_of
from .near import Near


class TieredStore(HostStore):
    """`HostStore` whose table names pages of a `Near`: whatever is touched is brought to host memory first.

    A planned transfer is only begun by `gather`: its blocks are in their slots after `arrive`.

    Args:
        layers, rows, heads, device: as `HostStore` has them. near: the pages, which forks share.
    """

    pool: Near  # type: ignore[assignment]

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device, near: Near) -> None:
        super().__init__(layers, rows, heads, 0, near.pages.dtype, device, pool=near)  # type: ignore[arg-type]
        self.beyond = near.far.name
        self.device_table = None  # the device can't reach what is not there
        self._planned: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # of a layer: see `gather_layers`

    def _settle(self) -> None:
        """What the device wrote to host memory was copied there by the host."""

    def _unshare(self, row: int, block: int) -> None:
        super()._unshare(row, block)
        self.bytes_copied += self.pool.own(self.table[:, row, :, block].flatten()) * self.pool.page_bytes

    def _parts(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of pages `[H, N]`, columns in parts that host memory takes at once."""
        yield from torch.arange(pages.shape[1]).split(self.pool.at_once(pages.shape[0]))

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.arrive(layer)
        first, last = start // BLOCK, blocks_of(start + keys.shape[1])
        table = self.table[layer, row, :, first:last]
        for part in self._parts(table):
            low, high = ((first + int(part[i])) * BLOCK for i in (0, -1))
            low, high = max(low, start), min(high + BLOCK, start + keys.shape[1])
            pages = table[:, part]
            partly = torch.zeros_like(pages, dtype=torch.bool)
            partly[:, 0] = low % BLOCK > 0
            places = self.pool.bring(pages.flatten(), partly.flatten()).view_as(pages)
            mine = slice(low - start, high - start)
            ops.write(self.pool.pages, places, keys[:, mine], values[:, mine], low % BLOCK)
            self.pool.change(places.flatten())

    def append(
        self, layer: int, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, some: bool = False
    ) -> None:  # fmt: skip
        lengths = lengths.cpu()
        takes = lengths >= 0
        at, block = lengths[takes], (lengths[takes] // BLOCK)[:, None]
        pages = self.table[layer][takes].gather(2, block[..., None].expand(-1, self.table.shape[2], 1)).squeeze(2)
        both = torch.stack((keys, values), 2).cpu().to(self.pool.pages.dtype)[takes]  # [n, H, 2, D]
        for some_rows in torch.arange(len(at)).split(self.pool.at_once(self.table.shape[2])):
            mine = pages[some_rows]
            begun = (at[some_rows] % BLOCK > 0)[:, None].expand_as(mine)
            places = self.pool.bring(mine.flatten(), begun.flatten()).view_as(mine)
            self.pool.pages[places, :, (at[some_rows] % BLOCK)[:, None]] = both[some_rows]
            self.pool.change(places.flatten())

    def read(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = start // BLOCK, blocks_of(stop)
        table = self.table[layer, row, :, first:last]
        blocks = self.pool.pages.new_empty((*table.shape, *self.pool.pages.shape[1:]))
        for part in self._parts(table):
            pages = table[:, part]
            blocks[:, part] = self.pool.pages[self.pool.bring(pages.flatten())].unflatten(0, pages.shape)
        both = blocks.transpose(1, 2).flatten(2, 3)[:, :, start - first * BLOCK : stop - first * BLOCK]
        return both[:, 0], both[:, 1]

    def gather_layers(self, moves: list[Move]) -> None:
        for layer, keys, values, plan_block, plan_slot in moves:
            blocks = plan_block.cpu()
            wanted = blocks >= 0
            if wanted.any():
                pages = self.table[layer].gather(2, blocks.clamp(min=0))[wanted]
                own, back = pages.unique(return_inverse=True)
                if len(own) <= self.pool.at_once():
                    self.pool.begin(own)
                self._planned.setdefault(layer, []).append((keys, values, plan_block, plan_slot, own, back))

    def arrive(self, layer: int | None = None) -> None:
        for one in [layer] if layer is not None else list(self._planned):
            for keys, values, plan_block, plan_slot, own, back in self._planned.pop(one, []):
                # What has been sent away meanwhile comes again.
                parts = [self.pool.pages[self.pool.bring(some)] for some in own.split(self.pool.at_once())]
                moved = torch.cat(parts)[back].to(keys.device, keys.dtype)
                fetched = moved.new_zeros((*plan_block.shape, *moved.shape[1:]))
                fetched[plan_block >= 0] = moved
                place_blocks(keys, values, fetched, plan_block, plan_slot)

    def abandon(self) -> None:
        self._planned.clear()

    def device_pages(self, layer: int) -> None:
        return None

    def truncate(self, new: list[int]) -> None:
        self.arrive()
        super().truncate(new)

    def select_rows(self, index: list[int]) -> None:
        self.arrive()
        super().select_rows(index)

    def fork(self) -> "TieredStore":
        self.arrive()
        layers, rows, heads, _ = self.table.shape
        return self.branch(TieredStore(layers, rows, heads, self.device, self.pool))

    @property
    def placement(self) -> str | None:
        return self.pool.pool.placement

    @property
    def near_bytes(self) -> int:
        return self.pool.held * self.pool.page_bytes

    def admit(self, pages: torch.Tensor, shared: bool = False) -> None:
        """The only row holds pages `[layers, KV heads, N]` of the tier already. shared: others refer to them too."""
        self._set_table(pages[:, None].clone())
        self.blocks, self._shared = [pages.shape[2]], shared
