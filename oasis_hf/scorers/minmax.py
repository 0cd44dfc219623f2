"""Quest's upper bound, the paper's score (OasisKV section 4; Quest, arXiv 2406.10774, eq. 2)."""

import torch

from .base import Scorer


class MinMaxScorer(Scorer):
    """q+ . max + q- . min: no key of the block can score higher."""

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack((keys.amax(-2), keys.amin(-2)), -2)

    def expand(self, query: torch.Tensor) -> torch.Tensor:
        return torch.stack((query.clamp(min=0), query.clamp(max=0)), -2)
