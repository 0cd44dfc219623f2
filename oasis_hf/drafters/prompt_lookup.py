"""What followed the last time these tokens stood together: n-gram look-up, training-free, for any model."""

from __future__ import annotations

import torch

from .base import Draft, Drafter


class PromptLookupDrafter(Drafter):
    """Proposes the continuation of the latest earlier match of the last `ngram` tokens, longest match first.

    Args:
        ngram: longest match tried; then shorter ones down to `shortest`.
    """

    name = "prompt_lookup"
    several = True

    def __init__(self, ngram: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= ngram:
            raise ValueError(
                f"PromptLookupDrafter needs 1 <= shortest <= ngram, not shortest={shortest}, ngram={ngram}."
            )
        self.ngram, self.shortest = ngram, shortest
        self.history: torch.Tensor | None = None  # [B, capacity], -1 where there is nothing (yet)
        self._filled = 0  # tokens a row may hold; padding counts until the next crop
        self._blind = False  # embeddings came since: only the device knows how many

    def observe(self, tokens: torch.Tensor | None, starts: torch.Tensor, valid: torch.Tensor | None) -> None:
        if tokens is None:
            self._blind = True
            return
        rows, count = tokens.shape
        if self.history is None:
            self.history = tokens.new_full((rows, 0), -1)
        self._look(starts)
        self._filled += count
        self._room()
        self._write(tokens, starts, valid)

    def _write(self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None) -> None:
        assert self.history is not None
        order = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        if valid is not None:
            valid = valid.to(tokens.device, non_blocking=True)
            # Squeezed: a real token goes where the real ones before it end; the others go to the last, unused column.
            order = torch.where(valid, valid.cumsum(1) - 1, 0)
            tokens = torch.where(valid, tokens, -1)
        at = starts[:, None] + order
        if valid is not None:
            at = torch.where(valid, at, self.history.shape[1] - 1)
        self.history.scatter_(1, at, tokens)

    def hold(self, lengths: torch.Tensor, count: int) -> list[torch.Tensor] | None:
        if type(self) is not PromptLookupDrafter:
            return None  # whose `propose` and `observe` may be others
        if self.history is None:
            self.history = lengths.new_full((len(lengths), 0), -1)
        self._look(lengths)
        self._room(count)
        return [self.history]

    def note(
        self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None = None,
        entries: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._write(tokens, starts, valid)

    def noted(self, count: int) -> None:
        self._filled += count

    def _look(self, lengths: torch.Tensor) -> None:
        """After embeddings: how long the rows are now, read from the device once."""
        if self._blind:
            self._filled, self._blind = max(self._filled, int(lengths.max())), False
            self._room()

    def _room(self, more: int = 0) -> None:
        """Columns for all tokens and `more`, and spare ones for matches that run off the end."""
        assert self.history is not None
        need, have = self._filled + more + 16, self.history.shape[1]
        if need > have:
            room = self.history.new_full((self.history.shape[0], max(need, 2 * have) - have), -1)
            self.history = torch.cat((self.history, room), 1)

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> Draft:
        if self.history is None:
            nothing = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            return Draft(tokens[:, None].expand(-1, count), nothing)
        self._look(lengths)
        history = self.history
        columns = history.shape[1]
        best = self._matches(history, tokens, lengths)[0]
        # What followed ends with the new token itself; a longer draft goes round again, as a repeating text does.
        period = (lengths - best)[:, None]
        at = best[:, None] + 1 + torch.arange(count, device=tokens.device) % period
        known = torch.where(at == lengths[:, None], tokens[:, None], history.gather(1, at.clamp(0, columns - 1)))
        found = (best >= 0) & (known >= 0).all(1)
        return Draft(torch.where(found[:, None], known, tokens[:, None]), found)

    def propose_several(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int, others: int) -> Draft:
        """Others are what else followed the same n-gram, later ones first; probabilities are how often each did."""
        draft, history = self.propose(tokens, lengths, count), self.history
        first = draft.tokens[:, :1]
        if history is None:
            alone = torch.zeros((len(tokens), 1 + others), device=tokens.device)
            return draft._replace(others=first.expand(-1, others), probabilities=alone)
        _, match = self._matches(history, tokens, lengths)
        index = torch.arange(history.shape[1], device=tokens.device)
        follows = torch.where(index + 1 == lengths[:, None], tokens[:, None], history.roll(-1, 1))
        left, chosen, shares = match & (follows >= 0), [first], []
        total = left.sum(1).clamp(min=1)
        for rank in range(1 + others):
            if rank:
                latest = torch.where(left, index, -1).amax(1, keepdim=True)
                chosen.append(torch.where(latest >= 0, follows.gather(1, latest.clamp(min=0)), first))
            same = left & (follows == chosen[-1])
            shares.append(same.sum(1) / total)
            left = left & ~same
        return draft._replace(others=torch.cat(chosen[1:], 1), probabilities=torch.stack(shares, 1))

    def _matches(
        self, history: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in the history the longest n-gram ended before: the latest place `[B]`, -1 for none, and all of them
        `[B, columns]` bool."""
        columns = history.shape[1]
        index = torch.arange(columns, device=tokens.device)
        # The last token of a match must stand before the new token, which is at `lengths`.
        match = (history == tokens[:, None]) & (index < lengths[:, None])
        best, longest, rows = torch.full_like(lengths, -1), torch.zeros_like(match), len(tokens)
        for length in range(1, self.ngram + 1):
            if length > 1:
                back = length - 1
                wanted = history.gather(1, (lengths - back).clamp(min=0)[:, None])
                shifted = torch.cat((history.new_full((rows, back), -2), history[:, : columns - back]), 1)
                match = match & (shifted == wanted) & (wanted >= 0) & (lengths >= back)[:, None]
            if length >= self.shortest:
                latest = torch.where(match, index, -1).amax(1)
                best = torch.where(latest >= 0, latest, best)
                longest = torch.where((latest >= 0)[:, None], match, longest)
        return best, longest

    def crop(self, lengths: list[int]) -> None:
        self._filled, self._blind = max(lengths, default=0), False
        if self.history is not None:
            self._room()
            index = torch.arange(self.history.shape[1], device=self.history.device)
            gone = index >= torch.tensor(lengths, device=self.history.device)[:, None]
            self.history.masked_fill_(gone, -1)  # where it is: a captured step finds it by its address

    def hide(self, row: int, first: int, stays: torch.Tensor) -> None:
        if self.history is not None:
            self._filled = max(self._filled, first + len(stays))
            self._room()
            kept = self.history[row, first : first + len(stays)][stays.to(self.history.device)]
            self.history[row, first:] = -1
            self.history[row, first : first + len(kept)] = kept

    def select_rows(self, index: list[int]) -> None:
        if self.history is not None:
            self.history = self.history[index]

    def reset(self) -> None:
        self.history, self._filled, self._blind = None, 0, False

    def fork(self) -> "PromptLookupDrafter":
        other = PromptLookupDrafter(self.ngram, self.shortest)
        other.history = None if self.history is None else self.history.clone()
        other._filled, other._blind = self._filled, self._blind
        return other
