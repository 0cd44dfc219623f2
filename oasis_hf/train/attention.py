"""Attention of packed sequences: every query sees one run of the keys, and says by how much it is normalised.

`plain` is the specification, `flex` a compiled kernel for CUDA that skips what no query of a tile sees. Both have
gradients, through the log-sum-exp too; that is what lets other keys be merged in afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TILE = 128
"""Queries and keys of a tile; what `flex` is given are multiples of it."""


class Reach(NamedTuple):
    """Which keys the queries see: those from `low` to `high`, both `[Nq]` int64, both included, one at least."""

    low: torch.Tensor
    high: torch.Tensor
    mask: Any = None  # for `flex`, of `prepare`


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Reach, float], tuple[torch.Tensor, torch.Tensor]]
"""query `[Nq, heads, D]`, key and value `[Nk, KV heads, D]`, reach, scale -> `[Nq, heads, D]` and the log-sum-exp
`[Nq, heads]` in float32."""


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, scale: float, run: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Attend` says, in float32 and in runs of `run` queries over the keys that these can see."""
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    outs, sums = [], []
    for start in range(0, len(query), run):
        low, high = reach.low[start : start + run], reach.high[start : start + run]
        first, last = int(low.min()), int(high.max()) + 1
        part = query[start : start + run].unflatten(1, (heads, groups)).float()
        scores = torch.einsum("qhgd,khd->qhgk", part, key[first:last].float()) * scale
        at = torch.arange(first, last, device=query.device)
        seen = (at >= low[:, None]) & (at <= high[:, None])
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        total = scores.logsumexp(-1)
        out = torch.einsum("qhgk,khd->qhgd", (scores - total[..., None]).exp(), value[first:last].float())
        outs.append(out.flatten(1, 2).to(query.dtype))
        sums.append(total.flatten(1, 2))
    return torch.cat(outs), torch.cat(sums)


def prepare(reach: Reach, keys: int) -> Reach:
    """The reach with the block mask that `flex` needs, for so many keys. Of a tile of queries all key tiles between
    its lowest and its highest are looked at, so neighbours should see neighbours."""
    from torch.nn.attention.flex_attention import BlockMask

    low, high = reach.low, reach.high
    first = low.view(-1, TILE).amin(1) // TILE
    count = high.view(-1, TILE).amax(1) // TILE - first + 1
    tiles = torch.arange(keys // TILE, device=low.device)
    index = (first[:, None] + tiles).clamp(max=keys // TILE - 1)
    # Only the first `count` of a line are read, but a line may name no tile twice.
    index = torch.where(tiles < count[:, None], index, (first[:, None] + tiles) % len(tiles))

    def seen(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k >= low[q]) & (k <= high[q])

    mask = BlockMask.from_kv_blocks(
        count[None, None].int(), index[None, None].int(), BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(len(low), keys)
    )
    return Reach(low, high, mask)


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Attend` says; the reach is one of `prepare`. Compiled on CUDA only: on a CPU it has no gradient then."""
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))
    attention = _compiled_flex() if query.is_cuda else _flex()
    out, total = attention(q, k, v, block_mask=reach.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1).to(query.dtype), total[0].transpose(0, 1)


@functools.cache
def _flex() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):  # torch before 2.9
        old: Any = functools.partial(module.flex_attention, return_lse=True)
        return old

    def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, more = module.flex_attention(*args, **kwargs, return_aux=module.AuxRequest(lse=True))
        return out, more.lse

    return attention


@functools.cache
def _compiled_flex() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_flex(), dynamic=False)


def chosen(device: torch.device) -> Attend:
    """What serves on a device."""
    return flex if device.type == "cuda" else plain


def merge(
    query: torch.Tensor, out: torch.Tensor, total: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor],
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention over more keys than those of `out` and `total` (of an `Attend`): each query has some of its own.

    Args:
        query: `[Nq, heads, D]`. keys, values: `[Nq, KV heads, D]` each, one a further key of every query.

    Returns:
        `[Nq, heads, D]`, what attention over all of them at once gives.
    """
    groups = query.shape[1] // keys[0].shape[1]
    key, value = (torch.stack(x, 1).repeat_interleave(groups, 2).float() for x in (keys, values))
    scores = (query.float()[:, None] * key).sum(-1) * scale  # no product that autocast would round: [Nq, n, heads]
    weights = torch.cat((total[:, None], scores), 1).softmax(1)[..., None]
    return (out.float() * weights[:, 0] + (weights[:, 1:] * value).sum(1)).to(query.dtype)
