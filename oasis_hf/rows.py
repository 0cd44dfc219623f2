"""The rows of a batch: how long each is without its padding, on the host and on the device."""

from __future__ import annotations

import torch

from .config import BLOCK


class Rows:
    """Lengths and validity of `batch` rows.

    Left padding and holes are squeezed out: a row stores its real tokens only. `columns` is the length that
    transformers knows (padding included); `valid` says which of those columns are real tokens of a row.

    Attributes:
        columns: python int. valid: `[B, columns]` bool on the host. tokens: real tokens a row, python ints.
    """

    def __init__(self, batch: int) -> None:
        self._room = torch.ones((batch, 0), dtype=torch.bool)  # True beyond `columns`
        self.columns = 0
        self.tokens = [0] * batch
        self._device: dict[torch.device, torch.Tensor] = {}
        self._columns: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def valid(self) -> torch.Tensor:
        return self._room[:, : self.columns]

    @property
    def most_blocks(self) -> int:
        return -(-max(self.tokens, default=0) // BLOCK)

    def lengths(self, device: torch.device) -> torch.Tensor:
        """`[B]` int64 of `tokens` on a device; kept there, so that a decode step advances it without a copy."""
        if device not in self._device:
            tokens = torch.tensor(self.tokens, dtype=torch.int64)
            self._device[device] = tokens.to(device, non_blocking=True)
        return self._device[device]

    def columns_on(self, device: torch.device) -> torch.Tensor:
        """`columns` as an int64 scalar on a device; kept and advanced as `lengths` are."""
        if device not in self._columns:
            self._columns[device] = torch.tensor(self.columns, device=device)
        return self._columns[device]

    def _forget_device(self) -> None:
        self._device.clear()
        self._columns.clear()

    def resync(self) -> None:
        """The device's lengths are made anew from the host's."""
        self._forget_device()

    def extend(self, valid: torch.Tensor) -> None:
        """New columns. valid: `[B, q]` bool on the host."""
        self._set_valid(torch.cat((self.valid, valid), 1))
        self.tokens = [n + new for n, new in zip(self.tokens, valid.sum(1).tolist())]
        self._forget_device()

    def advance(self, count: int, on_device: bool = True) -> None:
        """`count` real tokens more in every row; the device's lengths are advanced in place, unless they are
        already."""
        self.columns += count
        if self.columns > self._room.shape[1]:
            self._room = torch.cat((self._room, self._room.new_ones((len(self), max(self.columns, 64)))), 1)
        self.tokens = [n + count for n in self.tokens]
        if on_device:
            for known in (*self._device.values(), *self._columns.values()):
                known.add_(count)

    def crop(self, count: int) -> None:
        """Drop the last `count` columns."""
        keep = self.columns - min(count, self.columns)
        self._set(self.valid[:, :keep])

    def hide(self, row: int, kept: torch.Tensor) -> None:
        """`kept` `[columns]` bool replaces the row's validity."""
        self.valid[row] = kept
        self._set(self.valid)

    def _set_valid(self, valid: torch.Tensor) -> None:
        self._room, self.columns = valid, valid.shape[1]

    def _set(self, valid: torch.Tensor) -> None:
        self._set_valid(valid.clone())
        self.tokens = valid.sum(1).tolist()
        self._forget_device()

    def select(self, index: list[int]) -> None:
        self._set(self.valid[index])

    def fork(self) -> "Rows":
        other = Rows(len(self))
        other._set(self.valid.clone())
        return other
