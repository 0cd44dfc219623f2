"""How long the device takes for what is launched: by events that nobody waits for, on a CPU by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostStamp:
    """What an event is on a GPU: a time, here the host's own."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "HostStamp") -> float:
        return (other.at - self.at) * 1e3


Span = tuple[Any, Any]
"""Stamps of a beginning and an end."""


@contextmanager
def between(times: list[Span], on_gpu: bool = True) -> Iterator[None]:
    """When what runs inside begins and ends is added to `times`."""
    begin, end = (torch.cuda.Event(enable_timing=True) if on_gpu else HostStamp() for _ in range(2))
    begin.record()
    yield
    end.record()
    times.append((begin, end))


def median(times: list[Span]) -> float:
    """Milliseconds."""
    if times and not isinstance(times[0][0], HostStamp):
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)
