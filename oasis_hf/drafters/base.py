"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ..state import Step


class DrafterError(ValueError):
    """A drafter that can't work with this model; the message says what doesn't fit."""


class Draft(NamedTuple):
    """Proposed tokens. tokens: `[B, n]` ids, a chain. found: `[B]` bool, False where a row has no proposal (its tokens
    are then any valid ids, and its prediction falls back to recent queries). others: `[B, m - 1]` ids, further
    candidates for the chain's first place; where a row has fewer, any valid ids with probability 0. probabilities:
    `[B, m]` float32 of the chain's first and of them, at most 1 in all."""

    tokens: torch.Tensor
    found: torch.Tensor
    others: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None


class Drafter:
    """Proposes the tokens that follow, a chain a row, without waiting for the host.

    Token positions are a row's own (padding squeezed out). The cache calls `observe` with everything it commits and
    `crop` / `select_rows` / `reset` with everything it undoes, so a drafter may keep state of its own.

    Attributes:
        proposes: False for a drafter that never has a draft; no rows are stacked then.
        always: True for one that has a draft in every row at every step, as a head has.
        several: True for one that has more than one candidate for the next token: see `propose_several`.
        lookahead: what `OasisConfig.lookahead="auto"` means with it.
        taps: indices of decoder layers whose input hidden states it wants, ascending; the number of layers means the
            final norm's input. `tap` is called with them.
        state_width: values a token that `reread` needs, 0 for none. recorded: where it puts them while a prompt is
            read, as `[B, q, state_width]` on the host and which of its columns are real (`[B, q]` bool, None: all);
            None: nowhere.
        nbytes: what it holds on the device, where that is worth telling.
    """

    name = "drafter"
    proposes = True
    always = False
    several = False
    lookahead: str | Mapping[str, float] = "draft"
    taps: tuple[int, ...] = ()
    recorded: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    @property
    def state_width(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0

    def bytes_for(self, rows: int) -> tuple[int, int]:
        """What `nbytes` will be with so many rows: weights, which caches may share, and what it keeps of the rows."""
        return 0, 0

    def check(self, model: Any) -> None:
        """Raise `DrafterError` if it does not fit the model. Called once, when the cache is made."""

    def tap(self, layer: int, hidden: torch.Tensor, step: "Step") -> None:
        """In a forward of its cache: the input `[B, q, H]` of a layer of `taps`, drafts last. Work of the device alone
        in a decode step: a captured one repeats that, and does not call this again."""

    def observe(self, tokens: torch.Tensor | None, starts: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Committed tokens. tokens: `[B, q]` ids (None: the caller gave embeddings), starts: `[B]` position of each
        row's first, valid: `[B, q]` bool which are real, None: all."""

    def reread(self, tokens: torch.Tensor, valid: torch.Tensor | None, states: torch.Tensor | None) -> None:
        """`observe` of a prompt's first tokens that the model does not read again. tokens: `[B, q]`. states:
        `[B, q, state_width]` on the host, what was recorded when it did."""
        self.observe(tokens, torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device), valid)

    def states_of(self) -> str:
        """What `reread`'s states are made by, beside the model: equal for those that may serve each other."""
        return ""

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> Draft:
        """`count` tokens that may follow. tokens: `[B]`, each row's new token, at position `lengths` `[B]`; not yet
        observed."""
        raise NotImplementedError

    def propose_several(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int, others: int) -> Draft:
        """`propose`, and `others` (1 or more) further candidates for the first of the chain, with probabilities: of
        drafters that are `several`."""
        raise NotImplementedError

    def accept(
        self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None, entries: torch.Tensor
    ) -> None:
        """Drafts of the last step are committed: as `observe` has it. entries: `[B, q]`, where in the tail each stood
        (0 is the step's own token)."""
        self.observe(tokens, starts, valid)

    def hold(self, lengths: torch.Tensor, count: int) -> list[torch.Tensor] | None:
        """Before a decode step: what the host has to do, so that `propose` and `note` are work of the device alone,
        which a captured graph may repeat. lengths: `[B]` before the step; count: tokens that it commits.

        Returns:
            The tensors that both use, the same ones until one must grow; None: they can't be captured, and the cache
            calls `propose` before and `observe` after the step.
        """
        return None

    def note(
        self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None = None,
        entries: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The device's part of `observe`, where `hold` gave tensors; with entries, that of `accept`."""

    def compiled(self) -> AbstractContextManager[None]:
        """Its work on the device runs compiled inside: while a step with compiled layers is tried, and captured."""
        return nullcontext()

    def noted(self, count: int) -> None:
        """The host's part, after the step, and once more after the commit of `count` drafts at most."""

    def crop(self, lengths: list[int]) -> None:
        """Rows now have these lengths."""

    def hide(self, row: int, first: int, stays: torch.Tensor) -> None:
        """Of a row's tokens from `first` on only those where `stays` (bool, on the host) remain, moved up."""

    def select_rows(self, index: list[int]) -> None:
        """Row i becomes the old row `index[i]`."""

    def reset(self) -> None:
        """No rows hold anything."""

    def shipped(self) -> dict[str, torch.Tensor]:
        """Its state of the only row, beyond the row's tokens, for another process: see `admit`."""
        return {}

    def admit(self, tokens: torch.Tensor, shipped: dict[str, torch.Tensor]) -> None:
        """It goes on where another process's drafter stood behind a row. tokens: `[1, n]` ids, on the model's device.
        shipped: what that one gave."""
        self.observe(tokens, torch.zeros(1, dtype=torch.int64, device=tokens.device), None)

    def fork(self) -> "Drafter":
        """A drafter with the same state that goes its own way."""
        return self
