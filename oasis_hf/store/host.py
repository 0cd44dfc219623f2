"""The host tier: pages in (pinned) CPU memory behind a table [layer, row, kv_head, block] -> page."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from .. import ops
from ..config import BLOCK, TAIL
from ..ops import cuda
from .base import BlockStore, Move
from .outbound import Outbound
from .pages import HostMemoryError, PagePool

STAGED_BYTES = 1 << 20
"""Most entries of a table sent by pinned memory at once: torch never gives it back. A prompt's may be more."""


def blocks_of(tokens: int) -> int:
    """Blocks that hold `tokens` tokens, the open one included."""
    return -(-tokens // BLOCK)


class HostStore(BlockStore):
    """Pages of a shared `PagePool`, named by a table; branching copies the table and shares the pages.

    Args:
        layers, rows, heads: extent of the table (sparse layers, rows, local KV heads).
        head_dim: D. dtype: of the pages.
        device: the model's; on CUDA the memory is registered with it, and the table is kept there too.
        capacity_tokens: most tokens a row; committed at once unless a pool is given. None: grows as needed.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
        capacity_tokens: int | None = None, pool: PagePool | None = None,
    ) -> None:  # fmt: skip
        self.capacity_tokens = capacity_tokens
        self.pool = pool if pool is not None else PagePool(head_dim, dtype, device.type == "cuda")
        if device.type == "cuda" and device not in self.pool.devices:
            self.pool.devices.append(device)
        if capacity_tokens is not None and pool is None:
            self.pool.commit(layers * rows * heads * blocks_of(capacity_tokens))
        self.table = torch.full((layers, rows, heads, 0), -1, dtype=torch.int64)
        self.device = device
        # The operators' copy. It changes in the stream's order, so steps under way still see what they were given;
        # entries that rows gave back stay in it, unread.
        self.device_table = self.table.to(device) if device.type == "cuda" else None
        self.blocks = [0] * rows
        self._shared = False
        self._outbound: Outbound | None = None
        self._watch()

    def _watch(self) -> None:
        """Give the pages back when the last reference to this store goes."""
        holder = self._holder = [self.table]
        self._finalizer = weakref.finalize(self, _release, self.pool, holder)

    def _set_table(self, table: torch.Tensor) -> None:
        if self.device_table is not None:  # first: where there is no memory for it, nothing has changed
            self.device_table = table.to(self.device, copy=True)
        self.table = self._holder[0] = table

    def _settle(self) -> None:
        """The device may still be writing pages, or reading those that a row gave back: wait for it before the host
        touches any."""
        if self.device_table is not None:
            torch.cuda.synchronize(self.device)

    def ensure(self, old: list[int], new: list[int]) -> None:
        if self.capacity_tokens is not None and max(new) > self.capacity_tokens:
            raise HostMemoryError(
                f"A row would hold {max(new):,} tokens, but host_capacity_tokens={self.capacity_tokens:,}: raise it, "
                "or leave it None to grow as needed."
            )
        want = [blocks_of(n) for n in new]
        fresh = [(row, have, blocks) for row, (have, blocks) in enumerate(zip(self.blocks, want)) if blocks > have]
        held = list(self.blocks)
        if fresh:
            self._add(fresh)
        if self._shared:
            for row, (before, after) in enumerate(zip(old, new)):
                if after > before:
                    for block in range(before // BLOCK, min(held[row], blocks_of(after))):
                        self._unshare(row, block)

    def _add(self, fresh: list[tuple[int, int, int]]) -> None:
        """New pages. fresh: rows, how many blocks each has, and how many it is to have."""
        layers, _, heads, capacity = self.table.shape
        self._widen(max(blocks for _, _, blocks in fresh), capacity)
        rows = torch.cat([torch.full((blocks - have,), row) for row, have, blocks in fresh])
        at = torch.cat([torch.arange(have, blocks) for _, have, blocks in fresh])
        pages = self.pool.allocate(layers * heads * len(at)).view(layers, heads, -1).permute(2, 0, 1)
        if self.device_table is not None:  # first: where that fails, the host's table must not be ahead of it
            try:
                new = self._sent(torch.cat((rows[:, None], at[:, None], pages.flatten(1)), 1))
                self.device_table[:, new[:, 0], :, new[:, 1]] = new[:, 2:].unflatten(1, (layers, heads))
            except BaseException:
                self.pool.release(pages.flatten())
                raise
        self.table[:, rows, :, at] = pages
        for row, _, blocks in fresh:
            self.blocks[row] = blocks

    def _sent(self, entries: torch.Tensor) -> torch.Tensor:
        """A table's entries on the device. What a decode step adds is little and goes by pinned memory, which torch
        keeps until it has been read: the host does not wait."""
        if self.device.type == "cuda" and entries.nbytes <= STAGED_BYTES:
            with contextlib.suppress(RuntimeError):  # nothing more can be pinned: then the host waits
                entries = entries.pin_memory()
        return entries.to(self.device, non_blocking=True)

    def _widen(self, blocks: int, capacity: int) -> None:
        if blocks > capacity:
            room = torch.full((*self.table.shape[:3], max(blocks, 2 * capacity) - capacity), -1, dtype=torch.int64)
            self._set_table(torch.cat((self.table, room), -1))

    def _unshare(self, row: int, block: int) -> None:
        """Copy-on-write of a block's pages: an open one's, or one's that stood ready when the row was branched."""
        pages = self.table[:, row, :, block]
        shared = self.pool.references[pages] > 1
        if shared.any():
            self._settle()
            old = pages[shared]
            new = self.pool.allocate(len(old))
            self.pool.copy(old, new)
            self.table[:, row, :, block][shared] = new
            if self.device_table is not None:
                self.device_table[:, row, :, block] = self.table[:, row, :, block].to(self.device)
            self.pool.release(old)
            self.bytes_copied += len(old) * self.pool.page_bytes

    def _table_for(self, layer: int, row: int, like: torch.Tensor) -> torch.Tensor | None:
        """A row's pages `[H, N]` where the device of keys like these moves them itself; else the host has to."""
        table = None if self.device_table is None else self.device_table[layer, row]
        return table if table is not None and cuda.reaches(self.pool.pages, table, like) else None

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        table = self._table_for(layer, row, keys)
        if table is None:
            self._settle()
            ops.write(self.pool.pages, self.table[layer, row], keys, values, start)
            return
        if self._outbound is None:
            self._outbound = Outbound(self.device)
        with self._outbound.beside(layer, keys, values, table):
            ops.write(self.pool.pages, table, keys, values, start)

    def join(self) -> None:
        if self._outbound is not None:
            self._outbound.join()

    def append(
        self, layer: int, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, some: bool = False
    ) -> None:  # fmt: skip
        self._settle()
        pages, table = self.pool.pages, self.table[layer]
        lengths = lengths.to(table.device)
        if some:
            takes = lengths >= 0
            lengths, table = lengths[takes], table[takes]
            keys, values = (x.to(table.device)[takes] for x in (keys, values))
        block = (lengths // BLOCK)[:, None, None].expand(-1, table.shape[1], 1)
        page = table.gather(2, block).squeeze(2)
        both = torch.stack((keys, values), 2).to(pages.device, pages.dtype)  # [B, H, 2, D]
        pages[page, :, (lengths % BLOCK)[:, None]] = both

    def read(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._settle()
        first, last = start // BLOCK, blocks_of(stop)
        blocks = self.pool.pages[self.table[layer, row, :, first:last]]  # [H, n, 2, 16, D]
        both = blocks.transpose(1, 2).flatten(2, 3)[:, :, start - first * BLOCK : stop - first * BLOCK]
        return both[:, 0], both[:, 1]

    def load(
        self, layer: int, row: int, start: int, stop: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._table_for(layer, row, like)
        if table is None:
            return super().load(layer, row, start, stop, like)
        self.join()
        first, last = start // BLOCK, blocks_of(stop)
        heads, _, dim = like.shape
        plan = torch.arange(last - first, device=like.device).expand(1, heads, -1).contiguous()
        keys, values = (like.new_empty((1, heads, TAIL + (last - first) * BLOCK, dim)) for _ in range(2))
        ops.gather(self.pool.pages, table[None, :, first:last], keys, values, plan, plan)
        part = slice(TAIL + start - first * BLOCK, TAIL + stop - first * BLOCK)
        return keys[0, :, part], values[0, :, part]

    def gather(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, plan_block: torch.Tensor, plan_slot: torch.Tensor
    ) -> None:
        self.gather_layers([(layer, keys, values, plan_block, plan_slot)])

    def gather_layers(self, moves: list[Move]) -> None:
        table = self.table if self.device_table is None else self.device_table
        layers, *rest = zip(*moves)
        cuda.gather_layers(self.pool.pages, [table[layer] for layer in layers], *map(list, rest))

    def device_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.device_table is None else (self.pool.pages, self.device_table[layer])

    @property
    def table_on_device(self) -> torch.Tensor | None:
        return self.device_table

    def truncate(self, new: list[int]) -> None:
        self.join()  # nothing may still be on its way to a page when it is given back
        for row, tokens in enumerate(new):
            keep = blocks_of(tokens)
            if keep < self.blocks[row]:
                gone = self.table[:, row, :, keep : self.blocks[row]]
                self.pool.release(gone.flatten())
                gone.fill_(-1)
                self.blocks[row] = keep

    def select_rows(self, index: list[int]) -> None:
        self.join()
        table = self.table[:, index].contiguous()
        self.pool.retain(table[table >= 0])
        self.pool.release(self.table[self.table >= 0])
        self._set_table(table)
        self.blocks = [self.blocks[i] for i in index]
        self._shared = self._shared or len(set(index)) < len(index)

    def fork(self) -> "HostStore":
        self.join()  # the fork knows nothing of what is on its way
        layers, rows, heads, _ = self.table.shape
        other = HostStore(
            layers, rows, heads, 0, self.pool.pages.dtype, self.device, self.capacity_tokens, self.pool
        )  # fmt: skip
        return self.branch(other)

    def branch(self, other: Any) -> Any:
        """`other`, which is empty, with the content of this store; the pages are shared."""
        other._set_table(self.table.clone())
        other.blocks = list(self.blocks)
        self.pool.retain(self.table[self.table >= 0])
        self._shared = other._shared = True
        return other

    def adopt(self, pages: list[torch.Tensor]) -> None:
        """Rows, empty so far, hold pages `[layers, KV heads, n]` of the pool that others hold too."""
        self.reset()  # of an attempt that came to nothing
        layers, rows, heads, _ = self.table.shape
        table = torch.full((layers, rows, heads, max(own.shape[2] for own in pages)), -1, dtype=torch.int64)
        for row, own in enumerate(pages):
            table[:, row, :, : own.shape[2]] = own
        self._set_table(table)
        self.pool.retain(table[table >= 0])
        self.blocks, self._shared = [own.shape[2] for own in pages], True

    def share(self, row: int, blocks: slice) -> torch.Tensor:
        """Pages `[layers, KV heads, n]` of a row's blocks, with one more reference each, which is the caller's."""
        pages = self.table[:, row, :, blocks].clone()
        self.pool.retain(pages.flatten())
        self._shared = True
        return pages

    def reset(self) -> None:
        self.truncate([0] * len(self.blocks))

    @property
    def placement(self) -> str | None:
        return self.pool.placement

    @property
    def nbytes(self) -> int:
        return len(self.table[self.table >= 0].unique()) * self.pool.page_bytes


def _release(pool: PagePool, holder: list[torch.Tensor]) -> None:
    pool.release(holder[0][holder[0] >= 0])
