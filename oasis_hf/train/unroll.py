"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): a head runs over whole texts as it will when it drafts.

Row t of a text is made of the target's hidden states of position t and the token behind it. In step k of the unroll it
stands where the k-th token of its chain would: its token is the text's own, its hidden input what the row gave in the
step before, and it sees, as the drafter does, the rows up to t as the target's states made them and of its own chain
the steps so far, within the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..drafters.eagle3.head import Eagle3Head

DECAY = 0.8
"""What a step's loss counts of the one before it, as in every public recipe."""

IGNORED = -1
"""Stands in `texts` for padding."""


def unroll(
    head: Eagle3Head, embeddings: torch.Tensor | None, tokens: torch.Tensor, fused: torch.Tensor, texts: torch.Tensor,
    steps: int, window: int, attend: Callable[..., torch.Tensor] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The head's outputs in `steps` steps.

    Args:
        embeddings: the target's `[V, H]`, where the head has none.
        tokens: `[B, T]` ids. fused: `[B, T, H]`, of the target's states of each.
        texts: `[B, T]`, which text a token belongs to; several may stand in a row, one behind the other.
        window: positions that a row sees, itself included.
        attend: `attention` or something equal to it.

    Returns:
        outputs `[B, T, H]` of each step k, before the final norm: of row t, the guess of token t + 2 + k. What looks
        beyond its text is for the caller to leave out (`counts`).
    """
    attend = attend or attention
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden, keys, values, outputs = fused, [], [], []
    for step in range(steps):
        ahead = F.pad(tokens[:, 1 + step :], (0, 1 + step))
        query, key, value, residual = head.project(head.embed(ahead, embeddings), hidden, positions + step)
        keys.append(key)
        values.append(value)
        attended = attend(query, torch.cat(keys, 1), torch.cat(values, 1), texts, step, window)
        output = head.finish(attended.flatten(2), residual)
        outputs.append(output)
        hidden = head.state(output)
    return outputs


def counts(texts: torch.Tensor, answers: torch.Tensor, step: int) -> torch.Tensor:
    """`[B, T]` bool: rows whose guess in a step is of a token of their own text that `answers` `[B, T]` marks."""
    ahead = 2 + step
    same = F.pad(texts[:, ahead:], (0, ahead), value=IGNORED) == texts
    return same & (texts != IGNORED) & F.pad(answers[:, ahead:], (0, ahead), value=False)


def visible(step: int, window: int, length: int, texts: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The mask of `attention` as a function of a place `(batch, head, query, key)`. Keys are those of step 0, then of
    step 1, ...; a row sees step 0 up to itself, as far as the window of its place goes, and its own of later steps."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        of_step, row = key // length, key % length
        same = texts[batch, query] == texts[batch, row]
        first = (of_step == 0) & (row <= query) & (row > query + step - window) & same
        return first | ((of_step > 0) & (row == query) & (of_step > step - window))

    return mask


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, texts: torch.Tensor, step: int, window: int
) -> torch.Tensor:
    """The specification, in plain PyTorch. query `[B, T, heads, D]`, keys and values
    `[B, (step + 1) * T, KV heads, D]`. Returns `[B, T, heads, D]`."""
    length = query.shape[1]
    at = torch.arange(length, device=query.device)
    mask = visible(step, window, length, texts)(
        torch.arange(len(query), device=query.device)[:, None, None], 0, at[:, None],
        torch.arange(keys.shape[1], device=query.device),
    )  # fmt: skip
    blind = ~mask.any(-1, keepdim=True)  # none where the window is no shorter than the chain; it sees itself: no nan
    mask = mask | (blind & (torch.arange(keys.shape[1], device=query.device) == at[:, None]))
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


def flex_attention() -> Callable[..., torch.Tensor]:
    """`attention` by compiled FlexAttention: blocks that no row of theirs sees are skipped, so a later step costs
    hardly more than the first. CUDA."""
    from torch.nn.attention import flex_attention as flex

    kernel = torch.compile(flex.flex_attention, dynamic=False)

    @functools.cache
    def plan(key: tuple[int, int, int, int]) -> list[Any]:
        return []

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, texts: torch.Tensor, step: int, window: int
    ) -> torch.Tensor:
        length = query.shape[1]
        # One plan a step and batch: all layers of a step ask for the same, and so does the backward pass.
        held = plan((step, window, length, len(query)))
        if not held or held[0] is not texts:
            mask = visible(step, window, length, texts)
            held[:] = [texts, flex.create_block_mask(mask, len(query), None, length, keys.shape[1], query.device)]
        out = kernel(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), block_mask=held[1], enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend


def loss(
    logits: torch.Tensor, teacher: torch.Tensor, best: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's loss and accuracy.

    Args:
        logits: `[n, Vd]` of the head. teacher: `[n, Vd]` logits of the target there, of the draft vocabulary's tokens.
        best: `[n]`, the target's first choice as an id of the draft vocabulary, -1 where that does not hold it.
        counted: `[n]` bool.

    Returns:
        cross entropy against the target's softmax over the draft vocabulary, mean over counted rows whose first choice
        the draft vocabulary holds; and how many of the counted rows have that choice on top.
    """
    learned = counted & (best >= 0)
    each = -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    mean = (each * learned).sum() / learned.sum().clamp(min=1)
    right = ((logits.argmax(-1) == best) & counted).sum()
    return mean, right
