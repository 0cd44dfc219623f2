"""The verified rows of the last forward: whose next token is among them gets its logits without a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .tail import Tail


@dataclass
class Memo:
    """Verified entries of a tail, and how far each row has gone along them.

    Attributes:
        tail: whose entries they are. drafts: k, verified ones of the chain. others: candidates beside its first, all
            verified. The chain's last draft is lookahead only, and no entry here.
        rows: `[B, 1 + k + others, V]` logits, of the new token, the k drafts and the others.
        output: the type that the model returned.
        behind: the entry that each row stands behind, on the host; at: the same `[B]` on the device.
    """

    tail: Tail
    drafts: int
    others: int
    rows: torch.Tensor
    output: Callable[..., Any]
    behind: list[int] = field(default_factory=list)
    at: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tail.tokens is not None
        self.stacked = self.tail.tokens
        self.behind = self.behind or [self.tail.last] * len(self.rows)

    @property
    def tokens(self) -> torch.Tensor:
        """`[B, k]`, the chain."""
        return self.stacked[:, 1 : 1 + self.drafts]

    @property
    def rivals(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The others: `[B, others]` ids, `[B, others, V]` logits behind them, and the first one's entry."""
        first = 2 + self.drafts
        return self.stacked[:, first:], self.rows[:, 1 + self.drafts :], first

    def next_entries(self) -> list[int]:
        """Entries that some row may take next."""
        stands = set(self.behind)
        verified = [*range(1 + self.drafts), *range(2 + self.drafts, 2 + self.drafts + self.others)]
        return [entry for entry in verified if self.tail.parents[entry] in stands]

    def find(self, token: torch.Tensor) -> torch.Tensor:
        """The entry `[B]` that follows a row's own and holds its token `[B]`; -1 where there is none."""
        found = torch.full_like(token, -1)
        for entry in reversed(self.next_entries()):
            hit = self.stacked[:, entry] == token
            if self.at is not None:
                hit = hit & (self.at == self.tail.parents[entry])
            found = torch.where(hit, entry, found)
        return found

    def stand(self, entries: list[int], at: torch.Tensor) -> None:
        """Rows stand behind these entries now, `at` `[B]` on the device."""
        self.behind, self.at = entries, at if len(set(entries)) > 1 else None

    def logits_of(self, entries: torch.Tensor) -> torch.Tensor:
        """`[B, 1, V]`, behind each row's entry `[B]`; anything where that is -1."""
        place = (entries - (entries > self.drafts).long()).clamp(min=0)  # the lookahead row has none
        return self.rows.gather(1, place[:, None, None].expand(-1, 1, self.rows.shape[2]))
