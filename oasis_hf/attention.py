"""Dense attention of a prompt, a chunk or a turn over what came before: the prefill path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .ops.reference import masked_attention

CHUNK_BYTES = 256 << 20
"""Most bytes of mask or logits at once; longer prompts are done in runs of queries."""


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor] | None,
    past_seen: torch.Tensor | None,
    valid: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of `q` new tokens over themselves and `P` earlier ones.

    Args:
        query: `[B, Hq, q, D]`. keys, values: `[B, H, q, D]`, the new tokens'.
        past: keys and values `[B, H, P, D]` of earlier tokens, or None.
        past_seen: `[B, P]` bool, which of them exist; with a window they end just before the first new token.
        valid: `[B, q]` bool, which new tokens are real; None: all.
        scaling: factor on q.k. sinks: `[Hq]` logits or None. window: sliding window in tokens, or None.

    Returns:
        `[B, Hq, q, D]`; padding queries give finite numbers.
    """
    rows, heads, count, dim = keys.shape
    group = query.shape[1] // heads
    if past is None and valid is None and sinks is None and (window is None or count <= window):
        return F.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, scale=scaling, enable_gqa=True)
    if past is not None:
        assert past_seen is not None
        keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)
    before = keys.shape[2] - count
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    if sinks is not None:
        sinks = sinks.view(1, -1, 1, 1)
    position = torch.arange(-before, count, device=query.device)
    exists = torch.ones((rows, before + count), dtype=torch.bool, device=query.device)
    if past_seen is not None:
        exists[:, :before] = past_seen
    if valid is not None:
        exists[:, before:] = valid
    per_query = rows * (before + count) * (4 * query.shape[1] if sinks is not None else 5)
    run = max(1, CHUNK_BYTES // per_query)
    pieces = []
    for start in range(0, count, run):
        at = torch.arange(start, min(start + run, count), device=query.device)[:, None]
        allowed = (position <= at) & (exists[:, None] | (position == at))
        if window is not None:
            allowed &= position > at - window
        piece = query[:, :, start : start + run]
        pieces.append(masked_attention(piece, keys, values, allowed[:, None], scaling, sinks))
    return torch.cat(pieces, 2)
