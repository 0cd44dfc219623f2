"""Blocks of prompts by their content: which are held, what goes with them, and which go first."""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..config import BLOCK
from ..store.pages import PageNumbers
from ..summaries import Summaries

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def digests(root: bytes, ids: torch.Tensor) -> list[bytes]:
    """One name a block, which tells its tokens and all before them. ids: `[n]` int64 of whole blocks."""
    names, raw, size = [], ids.contiguous().numpy().tobytes(), BLOCK * ids.element_size()
    for at in range(0, len(raw), size):
        root = hashlib.blake2b(root + raw[at : at + size], digest_size=16).digest()
        names.append(root)
    return names


@dataclass(frozen=True)
class Layout:
    """Of what is kept of one block, over all layers.

    Attributes:
        parts: name to shape and dtype of each part beside its pages.
        layers, heads: of its pages, which are `page_bytes` each.
    """

    layers: int
    heads: int
    page_bytes: int
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, layers: int, sums: Summaries, page_bytes: int, states: int, dtype: torch.dtype) -> "Layout":
        """Of pages, summaries such as `sums`, and so many values a token in `dtype` for the drafter, if any."""
        sums.ensure(1)
        heads = sums.vectors.shape[1]
        parts = {"vectors": ((layers, heads, *sums.vectors.shape[3:]), sums.vectors.dtype)}
        if sums.scales.numel():
            parts["scales"] = ((layers, heads, *sums.scales.shape[3:]), sums.scales.dtype)
        if states:
            parts["states"] = ((BLOCK, states), dtype)
        return cls(layers, heads, page_bytes, parts)

    @property
    def nbytes(self) -> int:
        """Of one block, its tokens and page numbers too."""
        own = sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())
        return self.layers * self.heads * (self.page_bytes + 8) + own + 8 * (BLOCK + 3)


class Index:
    """Entries 0 to `capacity` - 1, one a block; whose memory is taken from the system as they are used.

    Attributes:
        entry: by digest. pages: `[capacity, layers, KV heads]` page numbers. parts: by name, `[capacity, *shape]`.
        ids: `[capacity, 16]`. parent: `[capacity]` entry of the block before, -1 for none.
    """

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.layout, self.capacity = layout, capacity
        self.pages = _lazily((capacity, layout.layers, layout.heads), torch.int64)
        self.parts = {name: _lazily((capacity, *shape), dtype) for name, (shape, dtype) in layout.parts.items()}
        self.ids = _lazily((capacity, BLOCK), torch.int64)
        self.parent = _lazily((capacity,), torch.int64)
        self._used_at, self._depth = _lazily((capacity,), torch.int64), _lazily((capacity,), torch.int64)
        self.entry: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}
        self._free: list[int] = []
        self._clock = 0
        self._lent: Counter[int] = Counter()
        self._given_back: deque[list[int]] = deque()

    def __len__(self) -> int:
        return len(self.entry)

    def tick(self) -> None:
        """A request begins: what it looks up or adds is younger than all else, and stays until the next one begins."""
        self._clock += 1

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Entries of the first blocks, as far as they are held."""
        found = []
        for name in names:
            if (at := self.entry.get(name)) is None:
                break
            found.append(at)
        self._used_at[torch.tensor(found, dtype=torch.int64)] = self._clock
        return found

    def add(self, name: bytes, parent: int, ids: torch.Tensor) -> int | None:
        """A new entry, its pages and parts still to be filled in; None: there is no room, all is in use."""
        if not self._free and len(self.entry) == self.capacity:
            return None
        at = self._free.pop() if self._free else len(self.entry)
        self.entry[name], self._name[at] = at, name
        self.ids[at], self.parent[at] = ids, parent
        self._used_at[at], self._depth[at] = self._clock, 0 if parent < 0 else self._depth[parent] + 1
        return at

    def oldest(self, count: int) -> list[int]:
        """So many entries as may go, those first that were used longest ago; of a prompt its end first."""
        lent = self.lent
        held = torch.tensor([at for at in self._name if not lent[at]], dtype=torch.int64)
        held = held[self._used_at[held] < self._clock]
        order = (-self._depth[held]).argsort(stable=True)
        order = order[self._used_at[held[order]].argsort(stable=True)]
        return held[order][:count].tolist()

    @property
    def lent(self) -> Counter[int]:
        """By entry, how many requests count on it: it stays meanwhile."""
        while self._given_back:
            self._lent -= Counter(self._given_back.popleft())
        return self._lent

    def lend(self, entries: list[int]) -> None:
        """One request more counts on these."""
        self._lent += Counter(entries)

    def give_back(self, entries: list[int]) -> None:
        """One fewer. A collection may call this in the middle of anything: it is only noted here."""
        self._given_back.append(entries)

    def depth(self, at: int) -> int:
        """How many blocks stand before it."""
        return int(self._depth[at])

    def drop(self, at: int) -> None:
        del self.entry[self._name.pop(at)]
        self._free.append(at)


def _lazily(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros for which the system gives memory when they are written."""
    count = prod(shape)
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.zeros(shape, dtype=dtype)


def release(pool: PageNumbers, index: Index) -> None:
    """The store is gone: its references go with it."""
    held = torch.tensor(list(index.entry.values()), dtype=torch.int64)
    pool.release(index.pages[held].flatten())
