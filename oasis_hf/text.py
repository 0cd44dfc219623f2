"""The rows' ids while they are generated, each row at its own length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria


class Text:
    """Prompts and what follows them.

    Args:
        prompts: `[B, P]` ids. criteria: generate's stopping criteria. pad: the id behind a row's end.

    Attributes:
        lengths: `[B]` ids a row, its prompt's padding included. done: `[B]` bool.
    """

    def __init__(self, prompts: torch.Tensor, criteria: Any, pad: int) -> None:
        self.ids, self.pad, self.criteria = prompts, pad, criteria
        self.lengths = prompts.new_full((len(prompts),), prompts.shape[1])
        self.done = torch.zeros_like(self.lengths, dtype=torch.bool)
        self.most = min((one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None)
        self.ends = [one.eos_token_id.to(prompts.device) for one in criteria if isinstance(one, EosTokenCriteria)]
        self.others = any(not isinstance(one, (EosTokenCriteria, MaxLengthCriteria)) for one in criteria)

    def with_drafts(self, drafts: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Every beginning of what rows that are not done hold with their drafts `[B, k]`, from none of these to all, by
        its length.

        Yields:
            rows `[n]` that have one of this length, how many drafts it holds of each row `[B]` (of these only), and
            all rows' ids up to there `[B, length]`.
        """
        self._room(drafts.shape[1])
        at = self.lengths[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        ids = self.ids.scatter(1, at, drafts)
        going = self.lengths[~self.done].unique()
        for length in sorted({n + k for n in going.tolist() for k in range(drafts.shape[1] + 1)}):
            places = length - self.lengths
            rows = (~self.done & (places >= 0) & (places <= drafts.shape[1])).nonzero().squeeze(1)
            yield rows, places, ids[:, :length]

    def add(self, chain: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """A row's first `count` `[B]` of `chain` `[B, n]` follow, up to the first that ends it; none where it is done.
        Returns how many did `[B]`."""
        width = chain.shape[1]
        at = torch.arange(width, device=chain.device)
        follows = (at < count[:, None]) & ~self.done[:, None]
        ends = torch.zeros_like(follows)
        for ids in self.ends:
            ends |= torch.isin(chain, ids)
        if self.most is not None:
            ends |= self.lengths[:, None] + at + 1 >= self.most
        self._room(width)
        place = self.lengths[:, None] + at
        self.ids.scatter_(1, place, torch.where(follows, chain, self.ids.gather(1, place)))
        if self.others:
            ends = self._asked(follows, ends)
        ends &= follows
        ended = ends.any(1)
        kept = torch.where(ended, ends.long().argmax(1) + 1, follows.sum(1))
        self.lengths = self.lengths + kept
        self.done = self.done | ended
        return kept

    def _asked(self, follows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What all criteria say of every beginning, shorter ones first."""
        places = self.lengths[:, None] + 1 + torch.arange(follows.shape[1], device=follows.device)
        for length in places[follows].unique().tolist():
            asked = follows & (places == length)
            ends = torch.where(asked, self.criteria(self.ids[:, :length], None)[:, None], ends)
        return ends

    def _room(self, count: int) -> None:
        need = int(self.lengths.max()) + count
        if need > self.ids.shape[1]:
            more = self.ids.new_full((len(self.ids), max(need, 2 * self.ids.shape[1]) - self.ids.shape[1]), self.pad)
            self.ids = torch.cat((self.ids, more), 1)

    def last(self) -> torch.Tensor:
        """`[B]`, each row's last id."""
        return self.ids.gather(1, self.lengths[:, None] - 1).squeeze(1)

    def sequences(self) -> torch.Tensor:
        """`[B, n]`, as generate returns them."""
        ids = self.ids[:, : int(self.lengths.max())]
        return torch.where(torch.arange(ids.shape[1], device=ids.device) < self.lengths[:, None], ids, self.pad)
