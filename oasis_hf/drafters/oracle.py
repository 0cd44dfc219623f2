"""The true next tokens, as if a drafter were always right: the upper bound in evaluations."""

from __future__ import annotations

from typing import Any

import torch

from .. import supported
from .base import Draft, Drafter, DrafterError


class OracleDrafter(Drafter):
    """Told every row's tokens beforehand.

    Args:
        tokens: `[B, n]` ids by a row's own position (prompt included, padding left out); rows that are shorter are
            filled with -1.
    """

    name = "oracle"

    def __init__(self, tokens: torch.Tensor) -> None:
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise DrafterError("OracleDrafter needs tokens of shape [rows, length] and dtype int64.")
        if not tokens.numel():
            raise DrafterError(f"OracleDrafter was given no tokens: their shape is {list(tokens.shape)}.")
        self.tokens = self._told = tokens

    def check(self, model: Any) -> None:
        vocabulary = supported.text_config(model).vocab_size
        if int(self.tokens.max()) >= vocabulary:
            raise DrafterError(
                f"OracleDrafter's tokens go up to {int(self.tokens.max())}, but the model has {vocabulary} ids: they "
                "come from another tokenizer."
            )

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> Draft:
        if len(self.tokens) != len(tokens):
            raise DrafterError(f"OracleDrafter knows {len(self.tokens)} rows, but the batch has {len(tokens)}.")
        known = self.tokens.to(tokens.device)
        at = lengths[:, None] + 1 + torch.arange(count, device=tokens.device)
        token = known.gather(1, at.clamp(max=known.shape[1] - 1))
        found = (at < known.shape[1]).all(1) & (token >= 0).all(1)
        return Draft(token.clamp(min=0), found)

    def select_rows(self, index: list[int]) -> None:
        self.tokens = self.tokens[index]

    def reset(self) -> None:
        self.tokens = self._told

    def fork(self) -> "OracleDrafter":
        other = OracleDrafter(self.tokens)
        other._told = self._told
        return other
