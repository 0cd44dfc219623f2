"""What dense and sparse steps take: expected from bytes and bandwidths, learnt from steps that were timed."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from .config import BLOCK
from .roofline.formulas import SUMMARIES
from .roofline.hardware import Hardware
from .roofline.shape import ModelShape

DENSE, SPARSE = "dense", "sparse"

KEPT = 32
"""Times that are kept of a kind of step."""

GAIN = 0.03
"""Of a dense step, how much shorter sparse ones must be to pay."""

PREDICTION = 1.12
"""What prediction adds to a step over the working set, as long as none was timed (`eval/decode.py`)."""


class Line:
    """Milliseconds of a step as a line over the tokens that its rows hold.

    Args:
        slope: milliseconds a token that are expected; a fit to few or alike times keeps near it.
    """

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.points: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def learn(self, tokens: float, ms: float) -> None:
        self.points.append((tokens, ms))

    @property
    def centre(self) -> tuple[float, float]:
        """Means of tokens and milliseconds."""
        xs, ys = zip(*self.points)
        return statistics.fmean(xs), statistics.fmean(ys)

    def at(self, tokens: float) -> float:
        x, y = self.centre
        doubt = len(self.points) * (x / 16) ** 2  # as if as many times lay so far to each side on the expected slope
        spread = sum((one - x) ** 2 for one, _ in self.points)
        shared = sum((one - x) * (ms - y) for one, ms in self.points)
        slope = (shared + doubt * self.slope) / (spread + doubt) if doubt else self.slope
        return y + max(slope, 0.0) * (tokens - x)


@dataclass(frozen=True)
class Expected:
    """What steps take by bytes and bandwidths, before any was timed. Milliseconds.

    Args:
        shape, hardware: of the model and the device. active: tokens that a KV head attends to in a sparse step.
        cap: blocks it fetches at most. queries: tokens that a row runs in either kind of step, drafts included.
    """

    shape: ModelShape
    hardware: Hardware
    active: int
    cap: int
    queries: dict[str, int]

    def fixed(self, kind: str, rows: int) -> float:
        """What does not depend on the tokens that the rows hold: the weights."""
        return self.shape.weights_read(rows * self.queries[kind]) / self.hardware.hbm * 1e3

    def slope(self, kind: str) -> float:
        """A token of a row more: its keys and values, or their summaries."""
        read = self.shape.kv_token() * (1 if kind == DENSE else SUMMARIES)
        return read / self.hardware.hbm * 1e3

    def link(self, rows: int) -> float:
        return rows * self.cap * BLOCK * self.shape.kv_token() / self.hardware.link * 1e3

    def ms(self, kind: str, rows: int, tokens: float) -> float:
        """A step whose rows hold so many tokens together."""
        if kind == DENSE:
            return self.fixed(DENSE, rows) + tokens * self.slope(DENSE)
        over = self.fixed(SPARSE, rows) + min(tokens, rows * self.active) * self.slope(DENSE)
        return max(PREDICTION * over + tokens * self.slope(SPARSE), self.link(rows))


class StepTimes:
    """What dense and sparse steps of a model take, as far as they were timed; the rest is scaled or expected."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._lines: dict[tuple[str, int], Line] = {}

    def learn(self, kind: str, rows: int, tokens: float, ms: float) -> None:
        self._lines.setdefault((kind, rows), Line(self.expected.slope(kind))).learn(tokens, ms)

    def timed(self, kind: str, rows: int) -> bool:
        """Whether steps of so many rows were."""
        return (kind, rows) in self._lines

    def ms(self, kind: str, rows: int, tokens: float) -> float:
        """Milliseconds of a step whose rows hold so many tokens together."""
        if self.timed(kind, rows):
            return self._lines[kind, rows].at(tokens)
        near = min((n for of, n in self._lines if of == kind), key=lambda n: abs(n - rows), default=None)
        if near is not None:
            seen, ms = self._lines[kind, near].centre
            return self.expected.ms(kind, rows, tokens) * ms / self.expected.ms(kind, near, seen)
        if kind == SPARSE and any(of == DENSE for of, _ in self._lines):
            # What a dense step takes beyond its bytes, a sparse one does too.
            more = self.expected.ms(SPARSE, rows, tokens) - self.expected.ms(DENSE, rows, tokens)
            return max(self.ms(DENSE, rows, tokens) + more, self.expected.link(rows))
        return self.expected.ms(kind, rows, tokens)

    def pays(self, rows: int, tokens: float) -> bool:
        """Whether sparse steps are the faster, by more than times scatter; never before dense ones were timed."""
        if not any(of == DENSE for of, _ in self._lines):
            return False
        return self.ms(SPARSE, rows, tokens) < (1 - GAIN) * self.ms(DENSE, rows, tokens)
