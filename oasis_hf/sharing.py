"""`fetch_ratio="auto"`: what a step may move, shared out over layers, rows and KV heads by the mass it is to bring.

A block that is predicted but not resident promises its smoothed score (`ops.select`), a share of attention. Every
select leaves the best of these promises of each row and KV head; behind the last layer's the next step's caps are made
of them: as many as lie above one price everywhere, the lowest at which the budget suffices. A step's caps never sum to
more than the budget, whatever the scores are. All of it stays on the device, in tensors that keep their place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

RATE = 0.2
"""How much of a block's average the latest step makes. The share of a working set that a step may move comes on top:
the more that is, the sooner what came gives way (eval/adaptive.py)."""

PRICES, LEAST_PRICE = 32, 1e-5
"""Prices tried, from the least, a share of attention, up to all of it."""


class Shares:
    """What all sparse layers of a cache share of a step's transfer.

    Args:
        layers, rows, heads: L, B, H. most: C, most blocks a KV head, row and layer gets. blocks: a step's budget.
        selectable: K.

    Attributes:
        caps: `[L, B, H]` int32, of the step to come. gains: `[L, B, H, C]` float32, what the last step's misses
            promised, best first, 0 where there is none. budget: int64 scalar, blocks a step. rate: see `smoothed`.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, most: int, blocks: int, selectable: int, device: torch.device
    ) -> None:
        self.rate = RATE + min(blocks / (layers * rows * heads * selectable), 1 - RATE)
        with torch.inference_mode(False):  # they outlive the call
            self.gains = torch.zeros((layers, rows, heads, most), device=device)
            self.caps = torch.zeros((layers, rows, heads), dtype=torch.int32, device=device)
            self.budget = torch.full((), blocks, dtype=torch.int64, device=device)
            prices = torch.logspace(0, 1, PRICES, base=LEAST_PRICE, device=device)
            self._negated = F.pad(prices.neg(), (1, 0), value=-torch.inf)  # first one that nothing is worth
        self.share_out()

    def share_out(self) -> None:
        """The next step's caps, from this step's gains."""
        self.caps.copy_(shared_out(self.gains, self.budget, self._negated))

    def allow(self, blocks: int) -> None:
        """Another budget, at least one block, from the next sharing out on; the host waits for nothing."""
        self.budget.fill_(max(blocks, 1))

    def clear(self) -> None:
        """As new."""
        self.gains.zero_()
        self.share_out()

    def select_rows(self, index: torch.Tensor) -> None:
        self.gains = self.gains.index_select(1, index)
        self.caps = self.caps.index_select(1, index)
        self.share_out()  # rows that are there twice would take twice as much

    def fork(self) -> "Shares":
        other = object.__new__(Shares)
        for name, value in self.__dict__.items():
            setattr(other, name, value.clone() if isinstance(value, torch.Tensor) else value)
        return other

    def place(self) -> list[torch.Tensor]:
        """What a captured step touches."""
        return [self.gains, self.caps, self.budget]


def smoothed(scores: torch.Tensor, means: torch.Tensor, rate: float) -> torch.Tensor:
    """Scores `[B, H, N]` averaged over steps, and the averages brought up to date: what a block promises for the time
    that it stays, not for one step alone.

    What is averaged is the fourth root. Of scores as they are, a block that had one high score long ago passes one that
    always has some: a prompt's first blocks, whose attention is underrated by their summaries, then stay away
    (eval/adaptive.py). Roots and squares are rounded as IEEE says, so that the compiled operator gives the same bits.

    Args:
        scores: not negative where they are finite. means: `[B, H, >= N]` float32, averaged roots, changed in place;
            negative where a block was never scored: it begins with its score. Blocks that score infinitely keep their
            average, and their score. rate: what the latest one counts.

    Returns:
        `[B, H, N]`, shares of attention as the scores are: fourth powers of the averages.
    """
    mean = means[..., : scores.shape[2]]
    root = _root(_root(scores))
    new = torch.where(mean < 0, root, mean + (root - mean) * rate)
    finite = scores.isfinite()
    mean.copy_(torch.where(finite, new, mean))
    return torch.where(finite, mean.square().square(), scores)


def _root(x: torch.Tensor) -> torch.Tensor:
    """The float nearest to the square root, which `torch.sqrt` of floats misses now and then where MKL computes it."""
    return x.double().sqrt().float()


def shared_out(gains: torch.Tensor, budget: torch.Tensor, negated: torch.Tensor) -> torch.Tensor:
    """Caps `[L, B, H]` int32 that sum to `budget` at most; no value is read back.

    Args:
        gains: `[L, B, H, C]`, not negative, best first. budget: an int64 scalar. negated: `[1 + n]`, prices below 0,
            the highest price first, which is infinite.
    """
    ordered, last = gains.flatten(0, 2).neg(), len(negated) - 1
    prices = negated.expand(len(ordered), -1).contiguous()
    counts = torch.searchsorted(ordered, prices, right=True)  # of gains that are not below, [L*B*H, 1 + n]
    at = (counts.sum(0) <= budget).sum() - 1  # the lowest price at which it suffices; at all higher ones it does too
    caps = counts.gather(1, at.expand(len(counts), 1)).squeeze(1)
    below = counts.gather(1, (at + 1).clamp(max=last).expand(len(counts), 1)).squeeze(1) - caps
    # The rest to what the next lower price asks for, or to all alike where nothing more is asked for.
    below = torch.where(at == last, torch.ones_like(below), below)
    upto = below.cumsum(0)
    upto = upto * (budget - caps.sum()) // upto[-1:].clamp(min=1)  # rounded together: whole blocks, none too many
    caps = caps + torch.cat((upto[:1], upto.diff()))
    return caps.clamp(max=gains.shape[-1]).view(gains.shape[:-1]).to(torch.int32)
