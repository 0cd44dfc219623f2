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
        """The output of a call that gives just that token in every row, all before it in sight; None: it gives
        others, and what was known of the last token is forgotten.

        Raises:
            ValueError: more than logits is asked for.
        """
        rows = cache.state.need_rows()
        if not self._asked(cache, call):
            self.forget(cache)
            return None
        _refuse(call, cache.model.config)
        rows.extend(torch.ones((len(rows), 1), dtype=torch.bool))
        logits = self.logits.to(call["input_ids"].device).expand(len(rows), 1, -1).clone()
        if isinstance(call.get("logits_to_keep"), torch.Tensor):
            logits = logits[:, call["logits_to_keep"]]
        if call.get("return_dict") is False:
            return logits, cache
        out: Any = CausalLMOutputWithPast
        return out(**{"logits": logits, name: cache})

    def forget(self, cache: "OasisCache") -> None:
        """What is known of the last token beyond what the cache counts goes: its query, and the drafter's part."""
        rows = cache.state.need_rows()
        cache.drafter.crop(list(rows.tokens))
        for layer in cache.sparse_layers:
            layer.rewind([1] * len(rows), reopened=False)

    def _asked(self, cache: "OasisCache", call: dict[str, Any]) -> bool:
        """Whether a call gives that token, where it stood, and hides nothing."""
        ids, mask, at = call.get("input_ids"), call.get("attention_mask"), call.get("position_ids")
        if ids is None or ids.shape[1] != 1 or not bool((ids == self.token).all()):
            return False
        if mask is not None:
            cache.check_mask(mask, 1)
            if not bool(mask.all()):
                return False
        return at is None or bool((at == cache.get_seq_length()).all())


def _refuse(call: dict[str, Any], config: Any) -> None:
    """Outputs that did not come with the logits."""
    asked = ["labels"] * (call.get("labels") is not None)
    for name in ("output_hidden_states", "output_router_logits"):
        if getattr(config, name, False) if call.get(name) is None else call[name]:
            asked.append(name)
    if asked:
        raise ValueError(
            "The first forward of a cache from prefill is answered with the logits that came with it, which can't give "
            f"{', '.join(asked)}: leave that out, or read the prompt in this process."
        )
