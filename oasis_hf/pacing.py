"""What a step may move where nobody says (`fetch_ratio="auto"`): as much as the link carries while steps compute."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .sharing import Shares

OCCUPANCY = 0.8
"""Share of a step's time that the link may be busy. Below 1, so that a step which waits for the link makes the next
budget smaller, until it waits no more."""

STEPS = 8
"""Steps whose shortest counts: in the others the device may have waited for the host."""

PROBE = 1 << 26
"""Bytes that are copied to measure the link."""


@functools.cache
def link_rate(device: torch.device) -> float:
    """Bytes a second from pinned host memory to a CUDA device, measured once a process."""
    with torch.inference_mode(False):
        here = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        there.copy_(here, non_blocking=True)  # pages and clocks are warm behind it
        begin.record()
        there.copy_(here, non_blocking=True)
        end.record()
        end.synchronize()
    return PROBE / (begin.elapsed_time(end) / 1e3)


class Pace:
    """The budget of `Shares` by the time that steps take. Times are read when they are there: nothing waits.

    Args:
        rate: of the link, bytes a second. block_bytes: of one block of one KV head. event: makes an event with a time.
    """

    def __init__(self, rate: float, block_bytes: int, event: Callable[[], Any] | None = None) -> None:
        self.rate, self.block_bytes = rate, block_bytes
        self._event = event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._begun: deque[Any] = deque()
        self._seconds: deque[float] = deque(maxlen=STEPS)

    def begin(self, shares: Shares) -> None:
        """A decode step begins on the current stream."""
        event = self._event()
        event.record()
        self._begun.append(event)
        while len(self._begun) > 1 and self._begun[1].query():
            first = self._begun.popleft()
            self._seconds.append(first.elapsed_time(self._begun[0]) / 1e3)
        if self._seconds:
            shares.allow(int(OCCUPANCY * self.rate * min(self._seconds) / self.block_bytes))

    def again(self) -> "Pace":
        """Of a copy of the cache."""
        return Pace(self.rate, self.block_bytes, self._event)
