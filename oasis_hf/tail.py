"""The tail: tokens of one decode forward beyond the committed length."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import TAIL

APART = -2
"""In place of the entry appended last: rows have gone different ways."""

Entry = int | torch.Tensor
"""A tail entry: the same in every row, or each row's own, `[B]` on the layer's device."""


@dataclass
class Tail:
    """Up to `TAIL` entries, the new token first, then its drafts: a chain, and other candidates for the chain's first
    place. Their K and V stand in front of every working set (and in a sliding layer's ring); they are not in the store,
    not summarised and not counted in the length.

    Attributes:
        tokens: `[B, n]` ids, or None when the caller gave embeddings.
        positions: `[B, n]` position ids.
        parents: n entries; the entry each one follows, -1 for the committed past.
        count: how many entries the forward itself appends; the drafts stand behind them.
        last: the entry appended last, which the next accepted one must follow; `APART` once rows took different ones.
    """

    tokens: torch.Tensor | None
    positions: torch.Tensor | None
    parents: tuple[int, ...]
    count: int = 1
    last: int = 0

    def __post_init__(self) -> None:
        if len(self.parents) > TAIL:
            raise ValueError(f"A tail holds at most {TAIL} entries, not {len(self.parents)}.")
        if any(parent >= entry for entry, parent in enumerate(self.parents)):
            raise ValueError(f"Tail entries must come after their parents: parents={self.parents}.")

    @classmethod
    def chain(
        cls, tokens: torch.Tensor | None, positions: torch.Tensor | None, count: int, drafts: int, others: int = 0
    ) -> "Tail":
        """`count` new tokens and `drafts` behind them, each following the one before it; then `others` that stand where
        the first draft does, and follow the last new token too."""
        parents = (*range(-1, count + drafts - 1), *(count - 1 for _ in range(others)))
        return cls(tokens, positions, parents, count, count - 1)

    def mask(self, device: torch.device) -> torch.Tensor:
        """`[n, TAIL]` bool: an entry sees itself and its ancestors."""
        rows = []
        for entry in range(len(self.parents)):
            row, at = [False] * TAIL, entry
            while at >= 0:
                row[at] = True
                at = self.parents[at]
            rows.append(row)
        return torch.tensor(rows, device=device)


def at_entry(stacked: torch.Tensor, entry: Entry) -> torch.Tensor:
    """`[B, H, D]` of `[B, H, n, D]`."""
    if isinstance(entry, int):
        return stacked[:, :, entry]
    index = entry[:, None, None, None].expand(-1, stacked.shape[1], 1, stacked.shape[3])
    return stacked.gather(2, index).squeeze(2)
