"""The interface of a tier that holds the full KV of every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch

Move: TypeAlias = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The arguments of `BlockStore.gather`."""


class BlockStore(ABC):
    """The full KV of a cache, all sparse layers, by block.

    Row lengths in tokens are python integers kept by the caller, so nothing here waits for the device. `layer` is the
    index among the sparse layers. `H` KV heads, `D` head_dim.

    Attributes:
        bytes_copied: bytes of pages copied from page to page so far (copy-on-write of open blocks).
        beyond: what the tier is called that holds what the store's own memory does not; None: there is none.
    """

    bytes_copied: int = 0
    beyond: str | None = None

    @abstractmethod
    def ensure(self, old: list[int], new: list[int]) -> None:
        """Make room for rows to grow from `old` to `new` tokens; a page that would be written and is shared is copied.

        Raises:
            HostMemoryError: the memory does not hold it; the message has the arithmetic.
        """

    @abstractmethod
    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tokens `start` and on of a row. keys, values: `[H, n, D]`. They may still be on their way when this returns:
        until `join`, only `load`, `read` and further writes know of them."""

    def join(self) -> None:
        """What was written comes before all that the current stream gets from now on; the host does not wait."""
        return None

    @abstractmethod
    def append(
        self, layer: int, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, some: bool = False
    ) -> None:  # fmt: skip
        """One token a row at `lengths` `[B]` (on the device). keys, values: `[B, H, D]`. some: there may be rows that
        take none, whose length is negative."""

    @abstractmethod
    def read(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[H, stop - start, D]` of a row, in the store's memory."""

    def load(
        self, layer: int, row: int, start: int, stop: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[H, stop - start, D]` of a row, on the device and in the dtype of `like` `[H, *, D]`."""
        keys, values = self.read(layer, row, start, stop)
        return keys.to(like.device, like.dtype), values.to(like.device, like.dtype)

    @abstractmethod
    def gather(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, plan_block: torch.Tensor, plan_slot: torch.Tensor
    ) -> None:
        """Planned blocks into their slots: see `ops.reference.gather`."""

    def gather_layers(self, moves: list[Move]) -> None:
        """`gather` for a few layers of one shape, `ops.cuda.GATHER_LAYERS` at most."""
        for move in moves:
            self.gather(*move)

    def arrive(self, layer: int | None = None) -> None:
        """What `gather` moves is in its slots for the current stream to see, of a layer, or of all: a tier beyond host
        memory only begins there what is done here. Raises what the tier raises."""
        return None

    def abandon(self) -> None:
        """What `gather` has begun and `arrive` has not finished is void: its slots will be filled anew."""
        return None

    def device_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Pages `[pages, 2, 16, D]` and their table `[B, H, N]`, where the device itself can reach both; else None."""
        return None

    @property
    def table_on_device(self) -> torch.Tensor | None:
        """The table `[layers, B, H, N]` that the device reads, if it does."""
        return None

    @abstractmethod
    def truncate(self, new: list[int]) -> None:
        """Rows now have `new` tokens: give back what lies beyond."""

    @abstractmethod
    def select_rows(self, index: list[int]) -> None:
        """Row i becomes the old row `index[i]`; closed blocks are shared, not copied."""

    @abstractmethod
    def fork(self) -> "BlockStore":
        """A store with the same content that goes its own way from here."""

    @abstractmethod
    def reset(self) -> None:
        """No rows hold anything."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of blocks held now (shared ones once)."""

    @property
    def placement(self) -> str | None:
        """On which NUMA node pinned memory lies, as a report says it; None: none is pinned."""
        return None

    @property
    def near_bytes(self) -> int:
        """Of these, what is not in a tier beyond the store's own memory."""
        return self.nbytes
