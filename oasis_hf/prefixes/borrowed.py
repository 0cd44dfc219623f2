"""Blocks that a request counts on while others read the rest of its prompt."""

from __future__ import annotations

import weakref

import torch

from ..store.pages import PagePool
from .index import Index


class Borrowed:
    """A prompt's first blocks, which stay in their store until they are given back: by `close`, or with this.

    Attributes:
        root: identity of whose blocks they are. count: blocks. name: the content hash of the last one, which tells all
            before it too; without any the root. pages: `[count, layers, KV heads]` page numbers in the store's pool.
    """

    def __init__(self, pool: PagePool, index: Index, root: bytes, entries: list[int], names: list[bytes]) -> None:
        self.root, self.count = root, len(entries)
        self.name = [root, *names][self.count]
        self.pages = index.pages[entries]
        self._pool, self._index, self._entries = pool, index, entries
        index.lend(entries)
        pool.retain(self.pages.flatten())
        self.close = weakref.finalize(self, _give_back, pool, index, entries, self.pages)

    def lasts_in(self, pool: PagePool) -> bool:
        """Whether the pages are in this pool, and were not given back."""
        return pool is self._pool and self.close.alive

    def part(self, name: str) -> torch.Tensor:
        """A part of these blocks, `[count, *shape]` on the host."""
        return self._index.parts[name][self._entries]


def _give_back(pool: PagePool, index: Index, entries: list[int], pages: torch.Tensor) -> None:
    index.give_back(entries)
    pool.release(pages.flatten())
