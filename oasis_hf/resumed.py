"""A prompt that was read elsewhere: its last token's logits came with it, so that nothing is computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from .room import keeps_buffers

if TYPE_CHECKING:
    from .cache import OasisCache


@dataclass(frozen=True)
class Resumed:
    """What the first call of a cache is answered with that has taken a prompt over.

    The cache holds all of the prompt but counts a token less, as if the last one were to come: generation begins with
    the tokens that a cache has not seen, and needs one at least.

    Attributes:
        token: that last token. logits: `[V]`, behind it.
    """

    token: int
    logits: torch.Tensor

    @keeps_buffers
    def answer(self, cache: "OasisCache", call: dict[str, Any], name: str) -> Any:
        """The output of a call that gives just that token in every row; None: it gives others, and what was known of
        the last token is forgotten."""
        rows, ids = cache.state.need_rows(), call.get("input_ids")
        if ids is None or ids.shape[1] != 1 or not bool((ids == self.token).all()):
            cache.drafter.crop(list(rows.tokens))
            return None
        rows.extend(torch.ones((len(rows), 1), dtype=torch.bool))
        logits = self.logits.to(ids.device).expand(len(rows), 1, -1).clone()
        if call.get("return_dict") is False:
            return logits, cache
        out: Any = CausalLMOutputWithPast
        return out(**{"logits": logits, name: cache})
