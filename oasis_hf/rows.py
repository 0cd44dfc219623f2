"""The rows of a batch: how long each is without its padding, on the host and on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .config import BLOCK


class Rows:
    """Lengths and validity of `batch` rows.

    Left padding and holes are squeezed out: a row stores its real tokens only. `columns` is the length that
    transformers knows (padding included); `valid` says which of those columns are real tokens of a row.

    A step may leave rows out (`leave_out`), and rows may take several tokens each of their own number
    (`advance_by`), as when drafts are verified: then columns of which a row has none are invalid in it.

    Attributes:
        columns: python int. valid: `[B, columns]` bool on the host. tokens: real tokens a row, python ints.
        takes: whether each row takes tokens in a step, python bools; taking: the same `[B]` bool on the model's device
        while some may not, else None.
    """

    def __init__(self, batch: int) -> None:
        self._room = torch.ones((batch, 0), dtype=torch.bool)  # True beyond `columns`
        self.columns = 0
        self.tokens = [0] * batch
        self.takes = [True] * batch
        self.taking: torch.Tensor | None = None
        self._pace: torch.Tensor | None = None  # `taking`, the same tensor whenever it is there
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
            with torch.inference_mode(False):  # it outlives the call
                tokens = torch.tensor(self.tokens, dtype=torch.int64)
                self._device[device] = tokens.to(device, non_blocking=True)
        return self._device[device]

    def columns_on(self, device: torch.device) -> torch.Tensor:
        """`columns` as an int64 scalar on a device; kept and advanced as `lengths` are."""
        if device not in self._columns:
            with torch.inference_mode(False):
                self._columns[device] = torch.full((), self.columns, device=device)  # no copy to wait for
        return self._columns[device]

    def resync(self) -> None:
        """The devices are told what the host knows; in the same tensors while the rows are as many, since captured
        steps know them by their addresses."""
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        self._device = {at: known for at, known in self._device.items() if len(known) == len(tokens)}
        for known in self._device.values():
            known.copy_(tokens, non_blocking=True)  # staged before it returns, and no step waits for it
        for columns in self._columns.values():
            columns.fill_(self.columns)

    def extend(self, valid: torch.Tensor) -> None:
        """New columns. valid: `[B, q]` bool on the host."""
        self._set_valid(torch.cat((self.valid, valid), 1))
        self.tokens = [n + new for n, new in zip(self.tokens, valid.sum(1).tolist())]
        self.resync()

    @contextlib.contextmanager
    def pacing(self, device: torch.device) -> Iterator[None]:
        """Inside, steps may leave rows out, and rows may take several tokens each of their own number. The columns
        that come are then packed: every row's real ones first."""
        first, before = self.columns, list(self.tokens)
        self.taking = self._pacer(device).fill_(True)
        try:
            yield
        finally:
            self.taking, self.takes = None, [True] * len(self)
            new = [n - old for n, old in zip(self.tokens, before)]
            packed = torch.arange(max(new)) < torch.tensor(new)[:, None]
            self._set_valid(torch.cat((self.valid[:, :first], packed), 1))
            self.resync()

    @contextlib.contextmanager
    def in_part(self, known: list[bool], device: torch.device) -> Iterator[None]:
        """Inside one step, of one token, leaves rows out that are `known`: they are given theirs by `append_ahead`. All
        rows have one column more behind it."""
        first = self.columns
        self.taking, self.takes = self._pacer(device), [not one for one in known]
        self.taking.copy_(torch.tensor(self.takes))
        try:
            yield
        finally:
            self.taking, self.takes = None, [True] * len(self)
            if self.columns > first:
                self._room[:, first] = True

    def append_ahead(self, takes: list[bool], on_device: torch.Tensor) -> None:
        """A token more where a row `takes` one, and no column: that is the step's. on_device: `[B]` int64, the same."""
        self.tokens = [n + new for n, new in zip(self.tokens, takes)]
        for known in self._device.values():
            known.add_(on_device.to(known.device))

    def _pacer(self, device: torch.device) -> torch.Tensor:
        """`taking`: the same tensor, which captured steps know by its address, while rows and device are the same."""
        if self._pace is None or self._pace.shape != (len(self),) or self._pace.device != device:
            with torch.inference_mode(False):
                self._pace = torch.ones(len(self), dtype=torch.bool, device=device)
        return self._pace

    def leave_out(self, takes: torch.Tensor, known: list[bool] | None = None) -> None:
        """From here on only rows where `takes` `[B]` (on the device) take tokens; in `pacing`. known: the same, if the
        host knows it; else it waits for the device."""
        assert self.taking is not None
        self.taking.copy_(takes)
        self.takes = takes.tolist() if known is None else list(known)

    def advance_by(self, counts: list[int], on_device: torch.Tensor | None) -> None:
        """Real tokens more, each row its own number. on_device: the same `[B]`; None: the device has advanced."""
        first, most = self.columns, max(counts)
        self._widen(most)
        self._room[:, first : first + most] = torch.arange(most) < torch.tensor(counts)[:, None]
        self.tokens = [n + new for n, new in zip(self.tokens, counts)]
        if on_device is not None:
            for known in self._device.values():
                known.add_(on_device.to(known.device))
            for columns in self._columns.values():
                columns.add_(most)

    def _widen(self, count: int) -> None:
        self.columns += count
        if self.columns > self._room.shape[1]:
            self._room = torch.cat((self._room, self._room.new_ones((len(self), max(self.columns, 64)))), 1)

    def advance(self, count: int, on_device: bool = True) -> None:
        """`count` real tokens more in every row that takes any; the device's lengths are advanced in place, unless
        they are already."""
        if self.taking is not None:
            return self.advance_by([count * takes for takes in self.takes], count * self.taking if on_device else None)
        self._widen(count)
        self.tokens = [n + count for n in self.tokens]
        if on_device:
            for known in (*self._device.values(), *self._columns.values()):
                known.add_(count)

    def shorten(self, valid: torch.Tensor) -> None:
        """`valid` `[B, columns]` replaces the rows' validity, and their number of columns."""
        self._set(valid)

    def hide(self, row: int, kept: torch.Tensor) -> None:
        """`kept` `[columns]` bool replaces the row's validity."""
        self.valid[row] = kept
        self._set(self.valid)

    def _set_valid(self, valid: torch.Tensor) -> None:
        self._room, self.columns = valid, valid.shape[1]

    def _set(self, valid: torch.Tensor) -> None:
        self._set_valid(valid.clone())
        self.tokens = valid.sum(1).tolist()
        if len(self.takes) != len(self.tokens):
            self.takes = [True] * len(self.tokens)
        self.resync()

    def select(self, index: list[int]) -> None:
        self._set(self.valid[index])

    def fork(self) -> "Rows":
        other = Rows(len(self))
        other._set(self.valid.clone())
        return other
