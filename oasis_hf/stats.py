"""Counters, kept on the device and read once."""

from __future__ import annotations

import torch

COUNTERS = (
    "hits", "fetched", "capped", "late", "wasted", "first", "reopened", "demand_hits", "on_demand", "demand_capped",
    "compared", "corrected",
)  # fmt: skip
"""Blocks, summed over rows and steps. hits: predicted and resident; fetched: moved in by a decode step under the
cap; capped: predicted but over the cap; late: not there when attention started; wasted: moved in and evicted unread;
first: moved by a first selection; reopened: moved because `crop` reopened their block; demand_hits, on_demand and
demand_capped: hits, fetched and capped of what a layer selects before it attends, on the critical path. Two count rows
and steps instead: compared: in which it was asked whether a head is to be corrected (`correction`, `correct_below`);
corrected: in which it was, so that the head selected before attention."""


class Counters:
    """`[len(COUNTERS), H]` int64 for one layer."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.values = torch.zeros((len(COUNTERS), heads), dtype=torch.int64, device=device)

    def of(self, name: str) -> torch.Tensor:
        """`[H]` int64, a view."""
        return self.values[COUNTERS.index(name)]

    @property
    def correction(self) -> torch.Tensor:
        """`[2, H]` int64, a view: compared, corrected."""
        return self.values[COUNTERS.index("compared") :][:2]

    def add(self, name: str, amount: torch.Tensor) -> None:
        """amount: `[H]`."""
        self.values[COUNTERS.index(name)] += amount

    @property
    def selection(self) -> torch.Tensor:
        """`[3, H]` int64, a view: hits, fetched, capped."""
        return self.values[:3]

    @property
    def demand(self) -> torch.Tensor:
        """`[3, H]` int64, a view: demand_hits, on_demand, demand_capped."""
        return self.values[COUNTERS.index("demand_hits") :][:3]

    def fork(self) -> "Counters":
        other = Counters(self.values.shape[1], self.values.device)
        other.values.copy_(self.values)
        return other
