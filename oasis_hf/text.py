"""The rows' ids while they are generated, each row at its own length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

_ENDLESS = 1 << 40
"""Tokens left where nothing limits them."""


@dataclass
class Chosen:
    """What follows in each row, on the device.

    Attributes:
        chain: `[B, n]` ids. right: `[B]`, how many drafts of the drafter's chain were right.
        kept: `[B]`, how many follow: none where the row has ended, and none behind what ends it. ended: `[B]` bool, one
            of those does.
    """

    chain: torch.Tensor
    right: torch.Tensor
    kept: torch.Tensor
    ended: torch.Tensor


@dataclass
class Told:
    """The same, as the host knows it."""

    chain: list[list[int]]
    right: list[int]
    kept: list[int]


def cut(
    chain: torch.Tensor, count: torch.Tensor, left: torch.Tensor, going: torch.Tensor, ends: torch.Tensor,
    right: torch.Tensor | None = None,
) -> Chosen:  # fmt: skip
    """A row's first `count` `[B]` of `chain` `[B, n]`, up to the first that ends it; work of the device alone.

    Args:
        left: `[B]`, how many tokens a row may still get. going: `[B]` bool, rows that have not ended. ends: `[E]` ids.
        right: as `Chosen` has it; None: all but the last of what is chosen.
    """
    place = torch.arange(chain.shape[1], device=chain.device)
    stops = (chain[..., None] == ends).any(2) | (place + 1 >= left[:, None])
    return _cut(chain, count - 1 if right is None else right, stops, (place < count[:, None]) & going[:, None])


def _cut(chain: torch.Tensor, right: torch.Tensor, stops: torch.Tensor, follows: torch.Tensor) -> Chosen:
    """stops: `[B, n]` bool, tokens that end a row. follows: `[B, n]` bool, the chosen ones of rows that go on."""
    stops = stops & follows
    ended = stops.any(1)
    return Chosen(chain, right, torch.where(ended, stops.long().argmax(1) + 1, follows.sum(1)), ended)


class Text:
    """Prompts and what follows them.

    Args:
        prompts: `[B, P]` ids. criteria: generate's stopping criteria. pad: the id behind a row's end.

    Attributes:
        lengths: `[B]` ids a row, its prompt's padding included. done: `[B]` bool. ends: `[E]` ids that end a row.
        tokens, going: python ints and bools, `lengths` and not `done` as the host knows them.
        plain: whether `left` and `ends` say all about where a row ends.
    """

    def __init__(self, prompts: torch.Tensor, criteria: Any, pad: int) -> None:
        self.ids, self.pad, self.criteria = prompts, pad, criteria
        self.lengths = prompts.new_full((len(prompts),), prompts.shape[1])
        self.done = torch.zeros_like(self.lengths, dtype=torch.bool)
        self.tokens, self.going = [prompts.shape[1]] * len(prompts), [True] * len(prompts)
        most = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        self.most = min(most, default=_ENDLESS)
        ends = [one.eos_token_id.to(prompts) for one in criteria if isinstance(one, EosTokenCriteria)]
        self.ends = torch.cat([*ends, prompts.new_empty(0)])
        self.plain = all(isinstance(one, (EosTokenCriteria, MaxLengthCriteria)) for one in criteria)

    @property
    def left(self) -> torch.Tensor:
        """`[B]`, how many tokens a row may still get."""
        return self.most - self.lengths

    def ahead(self, drafts: int) -> list[int]:
        """How many of `drafts` a row could accept: behind them stands one more token."""
        return [min(drafts, self.most - n - 1) if going else 0 for n, going in zip(self.tokens, self.going)]

    def with_drafts(self, drafts: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every beginning of what rows that go on hold with their drafts `[B, k]`, from none of these to all, by its
        length.

        Yields:
            how many drafts it holds of each row `[B]` (below 0 or above k: the row has none of this length), and all
            rows' ids up to there `[B, length]`.
        """
        self._room(drafts.shape[1])
        at = self.lengths[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        ids = self.ids.scatter(1, at, drafts)
        known = {n for n, going in zip(self.tokens, self.going) if going}
        for length in sorted({n + k for n in known for k in range(drafts.shape[1] + 1)}):
            yield length - self.lengths, ids[:, :length]

    def cut(self, chain: torch.Tensor, count: torch.Tensor, right: torch.Tensor | None = None) -> Chosen:
        """A row's first `count` `[B]` of `chain` `[B, n]`, up to the first that ends it. right: as `Chosen` has it."""
        right = count - 1 if right is None else right
        if self.plain:
            return cut(chain, count, self.left, ~self.done, self.ends, right)
        place = torch.arange(chain.shape[1], device=chain.device)
        follows = (place < count[:, None]) & ~self.done[:, None]
        self._write(chain, follows)
        return _cut(chain, right, self._asked(count.tolist(), follows), follows)

    def put(self, chosen: Chosen) -> Told:
        """What is chosen follows. This is where the host waits for the device, once a round: `Told` came in one
        copy."""
        chain, kept = chosen.chain, chosen.kept
        self._write(chain, torch.arange(chain.shape[1], device=chain.device) < kept[:, None])
        self.lengths, self.done = self.lengths + kept, self.done | chosen.ended
        told = torch.cat((torch.stack((chosen.right, kept, chosen.ended.long()), 1), chain), 1).tolist()
        self.tokens = [n + row[1] for n, row in zip(self.tokens, told)]
        self.going = [going and not row[2] for going, row in zip(self.going, told)]
        return Told([row[3:] for row in told], [row[0] for row in told], [row[1] for row in told])

    def _write(self, chain: torch.Tensor, follows: torch.Tensor) -> None:
        """`chain` `[B, n]` behind the rows' ids, where `follows` `[B, n]`."""
        self._room(chain.shape[1])
        place = self.lengths[:, None] + torch.arange(chain.shape[1], device=chain.device)
        self.ids.scatter_(1, place, torch.where(follows, chain, self.ids.gather(1, place)))

    def _asked(self, count: list[int], follows: torch.Tensor) -> torch.Tensor:
        """What all criteria say of every beginning that ends in one of the chosen tokens, shorter ones first: `[B, n]`
        bool. count: how many are chosen in each row."""
        stops = torch.zeros_like(follows)
        places = self.lengths[:, None] + 1 + torch.arange(follows.shape[1], device=follows.device)
        known = [(n, chosen) for n, chosen, going in zip(self.tokens, count, self.going) if going]
        for length in sorted({n + 1 + place for n, chosen in known for place in range(chosen)}):
            stops = torch.where(places == length, self.criteria(self.ids[:, :length], None)[:, None], stops)
        return stops

    def _room(self, count: int) -> None:
        need = max(self.tokens) + count
        if need > self.ids.shape[1]:
            more = self.ids.new_full((len(self.ids), max(need, 2 * self.ids.shape[1]) - self.ids.shape[1]), self.pad)
            self.ids = torch.cat((self.ids, more), 1)

    def last(self) -> torch.Tensor:
        """`[B]`, each row's last id."""
        return self.ids.gather(1, self.lengths[:, None] - 1).squeeze(1)

    def sequences(self) -> torch.Tensor:
        """`[B, n]`, as generate returns them."""
        ids = self.ids[:, : max(self.tokens)]
        return torch.where(torch.arange(ids.shape[1], device=ids.device) < self.lengths[:, None], ids, self.pad)
