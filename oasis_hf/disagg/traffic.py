"""What went over a link and when: counters of one peer."""

from __future__ import annotations

import threading
import time
from collections import deque

REMEMBERED = 65_536
"""Reads of which the times are kept."""


class Traffic:
    """Counters of a peer's reads.

    Attributes:
        reads, runs: begun. payload: bytes of reads that ended well. busy: seconds with at least one read in flight.
        events: (time of the monotonic clock, bytes) of the last reads that ended; 0 bytes where a read failed.
        spans: (begin, end) of the last times in which the link was busy.
    """

    def __init__(self) -> None:
        self.reads = self.runs = self.payload = 0
        self.events: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self.spans: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._in_flight, self._since, self._busy = 0, 0.0, 0.0
        self._lock = threading.Lock()

    def began(self, runs: int) -> None:
        with self._lock:
            self.reads += 1
            self.runs += runs
            if not self._in_flight:
                self._since = time.monotonic()
            self._in_flight += 1

    def ended(self, payload: int) -> None:
        with self._lock:
            now = time.monotonic()
            self.payload += payload
            self._in_flight -= 1
            self.events.append((now, payload))
            if not self._in_flight:
                self._busy += now - self._since
                self.spans.append((self._since, now))

    @property
    def busy(self) -> float:
        with self._lock:
            return self._busy + (time.monotonic() - self._since if self._in_flight else 0.0)

    def idle_share(self, start: float, stop: float) -> float:
        """Share of the time from `start` to `stop` (monotonic clock) in which no read was in flight."""
        with self._lock:
            spans = [*self.spans, *([(self._since, time.monotonic())] if self._in_flight else [])]
        busy = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in spans)
        return 1 - busy / (stop - start)

    def peak(self, window: float) -> float:
        """Most bytes a second over any `window` seconds, by the times at which reads ended."""
        with self._lock:
            events = list(self.events)
        most, held, first = 0, 0, 0
        for now, payload in events:
            held += payload
            while events[first][0] <= now - window:
                held -= events[first][1]
                first += 1
            most = max(most, held)
        return most / window

    def told(self) -> dict[str, float]:
        """The counters as plain numbers."""
        return {"reads": self.reads, "runs": self.runs, "payload_bytes": self.payload, "busy_s": self.busy}
