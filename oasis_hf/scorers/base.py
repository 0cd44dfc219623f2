"""The interface of a scorer: two vectors a summary, one dot product a score."""

from __future__ import annotations

import torch


class Scorer:
    """A block score that is linear in its summary: `score = expand(query) . summary`.

    Args:
        half_range: lambda, for scorers that shrink the bound.
    """

    def __init__(self, half_range: float = 1.0) -> None:
        self.half_range = half_range

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Two vectors of a run of keys. keys: `[..., tokens, D]` -> `[..., 2, D]`, same dtype."""
        raise NotImplementedError

    def expand(self, query: torch.Tensor) -> torch.Tensor:
        """The query's side of the dot product. query: `[..., D]` -> `[..., 2, D]`."""
        raise NotImplementedError
