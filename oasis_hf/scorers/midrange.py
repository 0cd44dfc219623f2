"""Midpoint and half-range: the min/max bound, shrunk towards the block's middle (lambda 1 is min/max)."""

import torch

from .base import Scorer


class MidrangeScorer(Scorer):
    """q . mid + lambda x |q| . half."""

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        high, low = keys.amax(-2), keys.amin(-2)
        # Halved first: the sum of two fp16 keys may overflow.
        return torch.stack((high * 0.5 + low * 0.5, high * 0.5 - low * 0.5), -2)

    def expand(self, query: torch.Tensor) -> torch.Tensor:
        return torch.stack((query, query.abs() * self.half_range), -2)
