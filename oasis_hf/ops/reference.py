"""The operators' specification, in plain torch: read it first, change it first.

Sizes: `B` rows, `Hq` / `H` query / KV heads, `G = Hq // H`, `q` query tokens (1 to `TAIL`), `D` head_dim, `S` slots,
`N` blocks, `P` parts (summaries) a block, `T = TAIL`. Indices are int64, -1 means none. Nothing here reads a value
back to the host, so each operator can stand in a captured graph.

A layer's working set is one buffer each for keys and values, `[B, H, T + S*16, D]`: the tail first, then the slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..config import BLOCK, TAIL
from ..scorers import SCORERS
from ..sharing import smoothed
from .correction import correct as correct


def summarize(keys: torch.Tensor, scorer: str, parts: int, int8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Summaries of closed blocks (OasisKV section 4: compressed keys).

    Args:
        keys: `[..., 16, D]`, post-RoPE keys of whole blocks.
        scorer: a name in `SCORERS`; it says what the two vectors are.
        parts: runs of `16 / parts` tokens, one summary each.
        int8: quantize each vector to int8, symmetric, with one scale.

    Returns:
        summaries `[..., P, 2, D]` in the keys' dtype or int8, and scales `[..., P, 2]` float16 (empty unless int8).
    """
    runs = keys.unflatten(-2, (parts, BLOCK // parts))
    vectors = SCORERS[scorer]().summarize(runs)
    if not int8:
        return vectors, vectors.new_empty((0,), dtype=torch.float16)
    vectors = vectors.float()
    # The scale is rounded to fp16 before it divides, so that what is stored is what was used.
    scales = (vectors.abs().amax(-1) / 127.0).to(torch.float16).clamp(min=torch.finfo(torch.float16).tiny)
    quantized = (vectors / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return quantized.to(torch.int8), scales


def score(
    query: torch.Tensor,
    summaries: torch.Tensor,
    scales: torch.Tensor,
    closed: torch.Tensor,
    weights: torch.Tensor,
    scorer: str,
    half_range: float,
    reduction: str,
    scaling: float,
    sink_blocks: int,
    recent_blocks: int,
) -> torch.Tensor:
    """One number a block and KV head: how much the next step wants it (OasisKV section 4, Quest eq. 2).

    Each query token scores every part of every closed block; parts and the group's query heads are reduced; query
    tokens are then summed with `weights`. With `"softmax-mean"` a query head's scores become attention weights over
    all parts, which are summed in a block and averaged over the group. With `"max"` and `"mean"` a block takes its
    best part's raw score, and each token's scores are standardised over the row's blocks before they are weighted,
    since raw scores of different queries have no common unit. A single token is neither standardised nor weighted: the
    order is the same.

    Args:
        query: `[B, Hq, q, D]`, post-RoPE; q is any number of query tokens here.
        summaries: `[B, H, N, P, 2, D]`, model dtype or int8. scales: `[B, H, N, P, 2]` float16, or empty.
        closed: `[B]`, closed blocks a row; later blocks score -inf.
        weights: `[B, q]` float32, e.g. P(the next input stands where this token stands).
        scorer, half_range: see `scorers`. reduction: `"max"`, `"mean"` or `"softmax-mean"`.
        scaling: the attention's own factor on q.k.
        sink_blocks, recent_blocks: that many first and last closed blocks score +inf.

    Returns:
        `[B, H, N]` float32.
    """
    rows, heads, blocks, parts, _, dim = summaries.shape
    tokens = query.shape[2]
    wide = SCORERS[scorer](half_range).expand(query.float() * scaling).flatten(-2)
    vectors = summaries.float()
    if scales.numel():
        vectors = vectors.mul_(scales.float().unsqueeze(-1))
    wide = wide.reshape(rows, heads, -1, 2 * dim)
    raw = wide @ vectors.reshape(rows, heads, blocks * parts, 2 * dim).transpose(-1, -2)
    raw = raw.view(rows, heads, -1, tokens, blocks, parts)

    index = torch.arange(blocks, device=query.device)
    exists = index < closed.unsqueeze(-1)
    gone = ~exists[:, None, None, None, :, None]
    if reduction == "softmax-mean":
        # Added, not filled, and weighted before parts are summed: fewer passes over the widest tensor.
        off = torch.where(gone, torch.finfo(torch.float32).min / 2, 0.0).expand(*gone.shape[:-1], parts).flatten(-2)
        share = raw.flatten(-2).add_(off).softmax(-1).flatten(2, 3)
        group = share.shape[2] // tokens
        share = ((weights if tokens > 1 else torch.ones_like(weights)) / group).repeat(1, group)[:, None, None] @ share
        total = share.view(rows, heads, blocks, parts).sum(-1)
    else:
        per_part = raw.amax(-1)
        per_token = per_part.amax(2) if reduction == "max" else per_part.mean(2)
        if tokens > 1:
            keep = exists[:, None, None].float()
            count = keep.sum(-1, keepdim=True).clamp(min=1)
            mean = (per_token * keep).sum(-1, keepdim=True) / count
            var = ((per_token - mean).square() * keep).sum(-1, keepdim=True) / count
            per_token = (per_token - mean) * (var + 1e-12).rsqrt()
        total = per_token[:, :, 0] if tokens == 1 else torch.einsum("bhtn,bt->bhn", per_token, weights)
    if sink_blocks or recent_blocks:
        kept = (index < sink_blocks) | (index >= closed.unsqueeze(-1) - recent_blocks)
        total = total.masked_fill(kept.unsqueeze(1), torch.inf)
    return total.masked_fill(~exists.unsqueeze(1), -torch.inf)


def evict_key(table: torch.Tensor, last_selected: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Eviction order of slots, smallest first: empty slots, then least recently selected, ties by `order`."""
    return torch.where(table < 0, -1, last_selected) * order.numel() + order


def select(
    scores: torch.Tensor, table: torch.Tensor, last_selected: torch.Tensor, lengths: torch.Tensor,
    order: torch.Tensor, cap: int, step: torch.Tensor, caps: torch.Tensor | None = None,
    gains: torch.Tensor | None = None, means: torch.Tensor | None = None, rate: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Top-K, difference against the residents, victims, capped admission (OasisKV section 4, KV selection).

    The top `K = S - 1` blocks with a score above -inf are predicted. Residents among them stay where they are. The
    others, best score first, are paired one to one with the least recently selected slots that hold neither a
    predicted block nor the open block; at most `cap` pairs are admitted, and the rest are capped: not moved now, and
    their victims keep their age. `last_selected` becomes `step` for every predicted block that is resident after it.

    Args:
        scores: `[B, H, N]`. table: `[B, H, S]` slot -> block, changed in place.
        last_selected: `[B, H, S]`, the step each slot's block was last predicted, changed in place.
        lengths: `[B]` tokens, which name the open block. order: `[S]`, a permutation that breaks ties.
        cap: C. step: this step's number, above all earlier ones; an int64 scalar on the device, since a captured graph
            is replayed with the next one.
        caps: `[B, H]` int32, each row's and head's own cap, C at most (`fetch_ratio="auto"`); None: C.
        gains: `[B, H, C]` float32 or None, written: scores of the misses, best first, certain ones as 1, then zeros. A
            row and head without a score keeps its own. means, rate: of `smoothed`, by whose result blocks are chosen.

    Returns:
        plan_block and plan_slot `[B, H, min(C, S)]`: the admitted pairs, block -1 where there is none (its slot is
        then any other); and counts `[3, H]`: hits, fetched, capped, summed over rows.
    """
    blocks, slots = scores.shape[2], table.shape[2]
    cap = min(cap, slots)
    if means is not None:
        scores = smoothed(scores, means, rate)
    top, block = scores.topk(min(slots - 1, blocks), -1)
    real = top > -torch.inf
    slot_index = torch.arange(slots, device=table.device).expand_as(table)
    # One column more than there are blocks takes the writes of empty slots.
    slot_of = torch.full((*scores.shape[:2], blocks + 1), -1, dtype=torch.int64, device=table.device)
    slot_of.scatter_(2, torch.where(table < 0, blocks, table.clamp(max=blocks)), slot_index)
    slot = slot_of.gather(2, block)
    hit = real & (slot >= 0)
    miss = real & (slot < 0)

    predicted = torch.zeros((*table.shape[:2], slots + 1), dtype=torch.bool, device=table.device)
    predicted.scatter_(2, torch.where(hit, slot, slots), True)
    predicted = predicted[..., :slots]
    last_selected.copy_(torch.where(predicted, step, last_selected))

    rank = torch.where(miss, miss.cumsum(-1) - 1, cap).clamp(max=cap)
    plan_block = torch.full((*table.shape[:2], cap + 1), -1, dtype=torch.int64, device=table.device)
    plan_block.scatter_(2, rank, block)
    plan_block = plan_block[..., :cap]
    if gains is not None:
        promised = gains.new_zeros((*table.shape[:2], cap + 1)).scatter_(2, rank, top)[..., :cap].clamp(max=1)
        gains.copy_(torch.where(real.any(-1, True), F.pad(promised, (0, gains.shape[2] - cap)), gains))
    if caps is not None:
        plan_block = torch.where(slot_index[..., :cap] < caps.unsqueeze(-1), plan_block, -1)

    never = torch.iinfo(torch.int64).max
    is_open = (table == (lengths // BLOCK)[:, None, None]) & (lengths % BLOCK > 0)[:, None, None]
    key = evict_key(table, last_selected, order).masked_fill(predicted | is_open, never)
    age, victim = key.topk(cap, -1, largest=False)
    admitted = (plan_block >= 0) & (age < never)
    # rank `cap` is the bin of the misses over the cap and of hits: sliced off above.
    plan_block = torch.where(admitted, plan_block, -1)
    table.scatter_(2, victim, torch.where(admitted, plan_block, table.gather(2, victim)))
    last_selected.scatter_(2, victim, torch.where(admitted, step, last_selected.gather(2, victim)))

    hits, fetched = hit.sum((0, 2)), admitted.sum((0, 2))
    return plan_block, victim, torch.stack((hits, fetched, miss.sum((0, 2)) - fetched))


def enter(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    queries: torch.Tensor,
    count: int,
    window: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    fresh: torch.Tensor,
) -> None:
    """A step's new tokens, before they attend: to the tail, and behind the recent queries.

    Args:
        query: `[B, Hq, q, D]`, drafts last. new_keys, new_values: `[B, H, q, D]`.
        queries: `[B, Hq, W + room, D]`, changed in place: the W recent queries move `count` on, drafts' follow.
        count: tokens that stay. window: W.
        keys, values: `[B, H, T + S*16, D]`, whose first q entries are written.
        fresh: `[B, H, S]` bool, cleared: what is in a slot now is read by this step.
    """
    recent = torch.cat((queries[:, :, count:window], query[:, :, max(count - window, 0) :]), 2)
    queries[:, :, : recent.shape[2]] = recent
    keys[:, :, : query.shape[2]] = new_keys
    values[:, :, : query.shape[2]] = new_values
    fresh.zero_()


def gather(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan_block: torch.Tensor,
    plan_slot: torch.Tensor,
) -> None:
    """Copy planned blocks from the store into their slots (OasisKV section 4, KV transfer).

    Args:
        pages: `[pages, 2, 16, D]`, K then V, in the store's memory.
        page_table: `[B, H, N]` block -> page, on the store's device.
        keys, values: `[B, H, T + S*16, D]`, changed in place.
        plan_block: `[B, H, C]`, -1 skips the pair. plan_slot: `[B, H, C]`, slots of a row and head all different.
    """
    rows, heads, count = plan_block.shape
    dim = keys.shape[-1]
    # A skipped pair of an empty row has no page at all: any other is read, and nothing is done with it.
    page = page_table.gather(2, plan_block.clamp(min=0).to(page_table.device)).clamp(min=0).flatten()
    fetched = pages.index_select(0, page).to(keys.device, keys.dtype).view(rows, heads, count, 2, BLOCK, dim)
    place_blocks(keys, values, fetched, plan_block, plan_slot)


def place_blocks(
    keys: torch.Tensor, values: torch.Tensor, fetched: torch.Tensor, plan_block: torch.Tensor, plan_slot: torch.Tensor
) -> None:
    """The writing half of `gather`: blocks `[B, H, C, 2, 16, D]` into their slots, skipped pairs untouched."""
    move = (plan_block >= 0)[..., None, None]
    offset = torch.arange(BLOCK, device=keys.device)
    index = _flat(keys, (TAIL + plan_slot.unsqueeze(-1) * BLOCK + offset).flatten(2))
    for which, buffer in enumerate((keys, values)):
        lines = buffer.flatten(0, 2)
        # A skipped pair writes its slot's own content back: no host decision, nothing changes.
        own = lines.index_select(0, index).view(fetched.shape[:3] + fetched.shape[4:])
        lines.index_copy_(0, index, torch.where(move, fetched[..., which, :, :], own).flatten(0, 3))


def write(
    pages: torch.Tensor, page_table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> None:  # fmt: skip
    """Tokens `start` and on of one row to their pages, whose other tokens stay as they are (a prompt's way to the
    store).

    Args:
        pages: `[pages, 2, 16, D]`, K then V, in the store's memory, changed in place.
        page_table: `[H, N]` block -> page, on the pages' device; each block of the tokens has a page of its own.
        keys, values: `[H, n, D]`.
        start: tokens of the row before them.
    """
    both = torch.stack((keys, values), 1).to(pages.device, pages.dtype)  # [H, 2, n, D]
    count = both.shape[2]
    head = min(-start % BLOCK, count)
    whole = (count - head) // BLOCK
    if whole:
        first = (start + head) // BLOCK
        body = both[:, :, head : head + whole * BLOCK].unflatten(2, (whole, BLOCK)).transpose(1, 2)
        pages[page_table[:, first : first + whole]] = body
    for low, high in ((0, head), (head + whole * BLOCK, count)):
        if high > low:
            block, offset = divmod(start + low, BLOCK)
            pages[page_table[:, block], :, offset : offset + high - low] = both[:, :, low:high]


def _flat(buffer: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Places `[B, H, ...]` along dimension 2 of a contiguous `[B, H, n, D]` as lines of its `[B*H*n, D]` view."""
    rows, heads, length, _ = buffer.shape
    first = torch.arange(rows * heads, device=buffer.device).view(rows, heads) * length
    return (place + first.view(rows, heads, *[1] * (place.ndim - 2))).flatten()


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    last_selected: torch.Tensor,
    lengths: torch.Tensor,
    order: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    step: torch.Tensor,
    may_open: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row to its open block; a full one rolls: the next block opens in the oldest slot (architecture,
    dense to sparse). The store's page is written by the caller from the same K and V (`BlockStore.append`).

    Args:
        keys, values: `[B, H, T + S*16, D]`, changed in place.
        table, last_selected: `[B, H, S]`, changed in place when a block opens.
        lengths: `[B]`, tokens before this one; negative: the row takes no token, and nothing of it changes.
        order: `[S]`, breaks ties among victims.
        new_keys, new_values: `[B, H, D]`. step: int64 scalar, becomes `last_selected` of the open block.
        may_open: False where the caller knows that no row opens a block here: no victim is looked for.

    Returns:
        slot `[B, H]` the token went to (0 where there is none), and evicted `[B, H]` bool, whether that slot's
        block was given up for it.
    """
    takes, block = (lengths >= 0)[:, None], (lengths // BLOCK)[:, None]
    slot = (takes.unsqueeze(-1) & (table == block.unsqueeze(-1))).to(torch.uint8).argmax(-1)
    evicted = torch.zeros_like(slot, dtype=torch.bool)
    if may_open:
        opens = (takes & (lengths % BLOCK == 0)[:, None]).expand(table.shape[:2])
        slot = torch.where(opens, evict_key(table, last_selected, order).argmin(-1), slot)
        held = table.gather(2, slot.unsqueeze(-1)).squeeze(-1)
        evicted = opens & (held >= 0)
        table.scatter_(2, slot.unsqueeze(-1), torch.where(takes, block, held).unsqueeze(-1))
    at = slot.unsqueeze(-1)
    last_selected.scatter_(2, at, torch.where(takes.unsqueeze(-1), step, last_selected.gather(2, at)))
    line = _flat(keys, TAIL + slot * BLOCK + (lengths % BLOCK)[:, None])
    for buffer, new in ((keys, new_keys), (values, new_values)):
        lines = buffer.flatten(0, 2)
        # A row without a token writes its own line back. Made anew: what comes from the tail is a view of the buffer
        # it goes to, which index_copy_ refuses where it can tell.
        old = lines.index_select(0, line).view_as(new)
        lines.index_copy_(0, line, torch.where(takes.unsqueeze(-1), new, old).flatten(0, 1))
    return slot, evicted


def visible(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Which slot tokens exist: `[B, H, S*16]` bool, from table `[B, H, S]` and lengths `[B]`."""
    position = table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=table.device)
    return ((position < lengths[:, None, None, None]) & (table >= 0).unsqueeze(-1)).flatten(2)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    tail_mask: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of 1 to 8 query tokens over the working set and the tail.

    The G query heads of a group and the q tokens are packed as rows of one head, so the KV is read once.

    Args:
        query: `[B, Hq, q, D]`. keys, values: `[B, H, T + S*16, D]`.
        table: `[B, H, S]`. lengths: `[B]`, tokens in the slots; what lies beyond is not seen.
        tail_mask: `[q, T]` bool, tail entries a query sees: itself and its ancestors.
        scaling: factor on q.k. sinks: `[Hq]` logits that take part in the softmax with no value (gpt-oss), or None.

    Returns:
        `[B, Hq, q, D]`.
    """
    rows, heads = table.shape[:2]
    tokens = query.shape[2]
    group = query.shape[1] // heads
    packed = query.reshape(rows, heads, group * tokens, -1)
    slots = visible(table, lengths).unsqueeze(2)
    allowed = torch.cat((tail_mask.expand(rows, heads, -1, -1), slots.expand(-1, -1, tokens, -1)), -1)
    if tokens > 1:
        allowed = allowed.repeat(1, 1, group, 1)
    if sinks is not None:
        sinks = sinks.view(heads, group, 1).expand(-1, -1, tokens).reshape(1, heads, -1, 1)
    # Contiguous whatever the kernel chose: compiled code relies on the strides its fake implementation promised.
    return masked_attention(packed, keys, values, allowed, scaling, sinks).reshape(query.shape).contiguous()


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention under a mask. query `[B, H, q, D]`, keys and values `[B, H, k, D]`, allowed broadcastable to
    `[B, H, q, k]` bool, sinks broadcastable to `[B, H, q, 1]` or None; a query that sees nothing gives zeros or the
    mean of values, never NaN."""
    if sinks is None:
        bias = allowed.to(query.dtype).sub_(1).mul_(torch.finfo(query.dtype).max)
        bias = bias.expand(*query.shape[:3], keys.shape[2])
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    logits = (query @ keys.transpose(-1, -2)).float() * scaling
    logits = logits.masked_fill(~allowed, torch.finfo(torch.float32).min)
    sinks = sinks.float().expand(*logits.shape[:-1], 1)
    weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return weights.to(query.dtype) @ values
