"""Memoised acceptance in a loop that feeds one token a row and call, as transformers' own does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .lookahead import predicts_blocks
from .memo import Memo
from .tail import APART

if TYPE_CHECKING:
    from .cache import OasisCache

_RATE = 0.05  # weight of the newest outcome in the running acceptance rate
_ENDED = -2  # in place of an entry: the row is fed padding


class Recall:
    """The half of `Stepper` that answers from its memo.

    A call whose every unfinished row is remembered needs no forward. In a mixed call rows that are remembered commit
    their entry and are left out of the others' forward: nothing of them is appended, selected or fetched. The place
    that they leave in it is their next token's, as their kept logits tell it: a token ahead of the others they wait for
    them, which makes calls without a forward more frequent. Left empty it would make them rarer, since a row that runs
    gets new drafts. Where blocks are selected a row is left out once and then takes part: they must not grow old.

    Attributes:
        waits: rows that were left out of the last forward; None: none was.
    """

    memo: Memo | None
    waits: list[bool] | None
    ended: torch.Tensor | None
    ends: tuple[int, ...]
    pad: int | None
    acceptance: float
    skipped: int
    left_out: int
    over: int

    if TYPE_CHECKING:
        cache: Any
        _positions: Any
        _may_draft: Any

    def note_accepted(self, accepted: int, tried: int) -> None:
        """Of `tried` verified drafts so many were the next input."""
        self.acceptance += _RATE * (accepted / tried - self.acceptance)

    def _recall(
        self, ids: torch.Tensor, ended: torch.Tensor | None, call: dict[str, Any], name: str,
        step: Callable[[dict[str, Any]], Any] | None,
    ) -> Any:  # fmt: skip
        """The call's output, if some rows are remembered and that helps; else None. Reads what each row's token is
        among its drafts, `[B]`. ended: as `_note_ended` has it. step: runs a forward for those that are not
        remembered; None: there is no such."""
        memo, token = self.memo, ids[:, 0]
        possible = [] if memo is None else memo.next_entries()
        if memo is None or not possible or call.get("output_hidden_states"):
            return None
        found = memo.find(token)
        if ended is not None:
            found = torch.where(ended, _ENDED, found)
        entries = found.tolist()
        going = [entry for entry in entries if entry != _ENDED]
        self.over = len(entries) - len(going)
        hit = min(going, default=0) >= 0
        self.note_accepted(int(hit and max(going, default=0) <= memo.drafts), 1)
        if hit:
            return self._remembered(memo, entries, found, going[0] if going else possible[0], name)
        state = self.cache.state
        selects = state.grows_sparse and predicts_blocks(state.config)
        before = (self.waits if selects else None) or [False] * len(entries)
        known = [entry >= 0 and not waited for entry, waited in zip(entries, before)]
        positions = self._positions(call, 1)
        if step is None or not any(known) or not self._may_part(positions, call):
            return None
        return self._mixed(memo, known, found, dict(call, position_ids=positions), step)

    def _remembered(self, memo: Memo, entries: list[int], found: torch.Tensor, fill: int, name: str) -> Any:
        """No forward: every unfinished row's entry is committed; rows that have ended take any, `fill`."""
        if _ENDED in entries:
            entries = [fill if entry == _ENDED else entry for entry in entries]
            found = torch.where(found == _ENDED, fill, found)
        self.cache.commit_found(entries, found)
        memo.stand(entries, found)
        self.skipped += 1
        logits = memo.logits_of(found)
        if memo.output is tuple:
            return (logits, self.cache)
        return memo.output(**{"logits": logits, name: self.cache})

    def _may_part(self, positions: torch.Tensor | None, call: dict[str, Any]) -> bool:
        """Whether rows may be left out of a forward: sliding layers keep all at one length."""
        cache: OasisCache = self.cache
        whole = len(cache.sparse_layers) == len(cache.layers) and cache.state.need_rows().taking is None
        return whole and self._may_draft("decode", positions, call, ahead=1)

    def _mixed(
        self, memo: Memo, known: list[bool], found: torch.Tensor, call: dict[str, Any], step: Callable[..., Any]
    ) -> Any:
        """A forward for the rows that are not `known`; of the others it is given the token that comes next."""
        cache: OasisCache = self.cache
        rows, ids, positions = cache.state.need_rows(), call["input_ids"], call["position_ids"]
        before, kept = list(rows.tokens), memo.logits_of(found)
        try:
            with rows.in_part(known, cache.device):
                assert rows.taking is not None
                left = ~rows.taking[:, None]
                cache.commit_entry(found.clamp(min=0), known)
                ahead = torch.where(left, kept[:, 0].argmax(-1, keepdim=True), ids)
                call = dict(call, input_ids=ahead, position_ids=positions + left.long())
                out = step(call)
        except BaseException:
            cache.crop_rows(before)
            raise
        self.left_out += sum(known)
        new: Memo | None = self.memo
        if new is not None:
            new.stand([-1 if one else 0 for one in known], torch.where(left[:, 0], -1, 0))
            new.tail.last = APART
        self.waits = known
        if isinstance(out, tuple):
            return (torch.where(left[..., None], kept.to(out[0].dtype), out[0]), *out[1:])
        out["logits"] = torch.where(left[..., None], kept.to(out["logits"].dtype), out["logits"])
        return out

    def _note_ended(self, token: torch.Tensor) -> torch.Tensor | None:
        """Rows that generate feeds padding after their end `[B]` bool; None where that can't be told (a hand-written
        loop, no end id, one row)."""
        if not self.ends or self.pad is None or len(token) == 1:
            return None
        is_end = torch.zeros_like(token, dtype=torch.bool)
        for end in self.ends:
            is_end = is_end | (token == end)
        fed_padding = torch.zeros_like(is_end) if self.ended is None else self.ended & (token == self.pad)
        self.ended = is_end | fed_padding
        return fed_padding
