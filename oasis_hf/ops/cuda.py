"""The compiled operators under the reference's signatures, and where they cannot serve, the reference.

Layouts and sizes are those of `csrc/oasis.h`. Results are allocated here; scratch memory is kept, one piece an
operator, device and stream, so that a captured graph finds it where it was.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..config import BLOCK
from . import reference
from .build import BuildError, load_extension

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
GATHER_CTAS = WRITE_CTAS = 0
"""Sizes of the grids of what goes over the link; 0 is the operator's own default."""
GATHER_LAYERS = 8
"""Layers that one launch gathers for at most."""

_extension: Any = None
_refused: str | None = None
_scratch: dict[tuple[str, torch.device, int, int], torch.Tensor] = {}
_retired: list[torch.Tensor] = []


def extension() -> Any:
    """The module of the compiled operators, built on first use.

    Raises:
        BuildError: it can't be had; the message says why.
    """
    global _extension
    if _extension is None:
        _extension = load_extension()
    return _extension


def available() -> bool:
    """Whether the compiled operators are here; says why not once, as a warning."""
    global _refused
    if _extension is None and _refused is None:
        try:
            extension()
        except BuildError as error:
            _refused = str(error)
            warnings.warn(f"{_refused} The reference operators serve instead: right, but slow.", stacklevel=2)
    return _extension is not None


NO_SHARING = (None, None, None, 1.0)
"""Caps, gains, means and rate of a `select` whose rows and heads all have one cap."""

MAX_SLOTS = 1 << 12
"""Most slots that the compiled `select` sorts: a budget of 65,536 tokens."""


def serves(tensor: torch.Tensor) -> bool:
    """Whether the compiled operators take keys or queries like this: dtype and head_dim."""
    return tensor.is_cuda and tensor.dtype in DTYPES and tensor.shape[-1] in HEAD_DIMS and available()


def reaches(pages: torch.Tensor, page_table: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the device that holds keys or values like `tensor` can move them to these pages itself (`write`)."""
    return (
        tensor.is_cuda
        and page_table.device == tensor.device
        and pages.dtype == tensor.dtype
        and tensor.dtype in (*DTYPES, torch.float32)
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        and (pages.is_cuda or pages.is_pinned())
        and available()
    )


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _buffer(op: str, like: torch.Tensor, size: int, counters: int) -> torch.Tensor:
    """At least `size` bytes, zero at first. What a graph may hold is never given back.

    Args:
        counters: bytes at the front that every call leaves zero; calls that differ in it don't share a buffer, since
            one's counters would lie in the other's results.
    """
    key = (op, like.device, _stream(like), counters)
    have = _scratch.get(key)
    if have is None or have.numel() < size:
        if have is not None:
            _retired.append(have)
            size = max(size, 2 * have.numel())
        have = _scratch[key] = torch.zeros(max(size, 256), dtype=torch.uint8, device=like.device)
    return have


def reserve(stream: torch.cuda.Stream) -> None:
    """Scratch for a stream on which steps will be captured, as large as the current stream's and some more: what is
    made inside a capture is zeroed by that graph's replays only."""
    device, current = stream.device, torch.cuda.current_stream(stream.device).cuda_stream
    for (op, where, owner, counters), have in list(_scratch.items()):
        key = (op, where, stream.cuda_stream, counters)
        size = have.numel() + max(have.numel() // 4, 1 << 20)
        if where == device and owner == current:
            _scratch[key] = torch.zeros(size, dtype=torch.uint8, device=device)


def take(stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """A stream's scratch, which is its taker's from here on: who has captured with it keeps it as long as the graph."""
    keys = [key for key in _scratch if key[1] == stream.device and key[2] == stream.cuda_stream]
    return [_scratch.pop(key) for key in keys]


def _lines(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its strides suit the operators, else a contiguous copy."""
    unit = 16 // tensor.element_size()
    suits = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    return tensor if suits and all(stride % unit == 0 for stride in tensor.stride()[:-1]) else tensor.contiguous()


def summarize(keys: torch.Tensor, scorer: str, parts: int, int8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not serves(keys):
        return reference.summarize(keys, scorer, parts, int8)
    vectors = keys.new_empty((*keys.shape[:-2], parts, 2, keys.shape[-1]), dtype=torch.int8 if int8 else keys.dtype)
    scales = keys.new_empty(vectors.shape[:-1] if int8 else (0,), dtype=torch.float16)
    if keys.numel():
        # A row's keys as the model made them: tokens are one stride apart, within a block and from block to block.
        even = keys.ndim == 4 and keys.stride(1) == BLOCK * keys.stride(2) and _lines(keys) is keys
        blocks = keys if even else keys.contiguous().view(1, -1, *keys.shape[-2:])
        shape = blocks.shape[:2]
        with torch.cuda.device(keys.device):
            extension().summarize(
                blocks, scorer, parts, vectors.view(*shape, *vectors.shape[-3:]),
                scales.view(*shape, parts, 2) if int8 else None, _stream(keys),
            )  # fmt: skip
    return vectors, scales


def score(
    query: torch.Tensor, summaries: torch.Tensor, scales: torch.Tensor, closed: torch.Tensor, weights: torch.Tensor,
    scorer: str, half_range: float, reduction: str, scaling: float, sink_blocks: int, recent_blocks: int,
) -> torch.Tensor:  # fmt: skip
    if not serves(query) or query.shape[2] > 16 or not summaries.shape[2]:
        return reference.score(
            query, summaries, scales, closed, weights, scorer, half_range, reduction, scaling, sink_blocks,
            recent_blocks,
        )  # fmt: skip
    rows, heads, blocks, parts = summaries.shape[:4]
    out = query.new_empty((rows, heads, blocks), dtype=torch.float32)
    module = extension()
    counters = module.score_counters(rows, heads)
    size = module.score_scratch(rows, heads, query.shape[1] // heads, query.shape[2], blocks, parts)
    with torch.cuda.device(query.device):
        module.score(
            _lines(query), summaries, scales if scales.numel() else None, closed.contiguous(), weights.contiguous(),
            scorer, half_range, reduction, scaling, sink_blocks, recent_blocks, out,
            _buffer("score", query, size, counters), _stream(query),
        )  # fmt: skip
    return out


def select(
    scores: torch.Tensor, table: torch.Tensor, last_selected: torch.Tensor, lengths: torch.Tensor,
    order: torch.Tensor, cap: int, step: torch.Tensor, caps: torch.Tensor | None = None,
    gains: torch.Tensor | None = None, means: torch.Tensor | None = None, rate: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if not available():
        return reference.select(
            scores, table, last_selected, lengths, order, cap, step, caps, gains, means, rate
        )  # fmt: skip
    counts = table.new_zeros((3, table.shape[1]))
    plan = plan_for(table, cap)
    select_step(
        scores, table, last_selected, lengths, order, step, None, *plan, counts, None, (caps, gains, means, rate)
    )
    return *plan, counts


def plan_for(table: torch.Tensor, cap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a plan over a table `[B, H, S]`: blocks and slots `[B, H, min(cap, S)]`, unwritten."""
    plan_block = table.new_empty((*table.shape[:2], min(cap, table.shape[2])))
    return plan_block, torch.empty_like(plan_block)


def select_step(
    scores: torch.Tensor, table: torch.Tensor, last_selected: torch.Tensor, lengths: torch.Tensor,
    order: torch.Tensor, step: torch.Tensor, fresh: torch.Tensor | None, plan_block: torch.Tensor,
    plan_slot: torch.Tensor, counts: torch.Tensor, wasted: torch.Tensor | None, sharing: tuple[Any, ...] = NO_SHARING,
) -> None:  # fmt: skip
    """`select`, and in the same launch what the working set does around it.

    Args:
        fresh: `[B, H, S]` bool, set where a block is admitted; None: nothing is wasted.
        plan_block, plan_slot: `[B, H, C]`, written. counts: `[3, H]` int64, added to: hits, fetched, capped.
        wasted: `[H]` int64 or None, added to: admitted over blocks that were still fresh.
        sharing: caps, gains, means and rate of `select`.
    """
    with torch.cuda.device(table.device):
        extension().select(
            scores.contiguous(), table, last_selected, lengths, order, step, fresh, plan_block, plan_slot, counts,
            wasted, *sharing, _stream(table),
        )  # fmt: skip


def correct(
    scores: torch.Tensor, heads: torch.Tensor | None, table: torch.Tensor, closed: torch.Tensor, above: float,
    step: torch.Tensor, counts: torch.Tensor, fired: torch.Tensor,
) -> None:  # fmt: skip
    if not available() or not scores.shape[2] or not scores.is_contiguous():
        return reference.correct(scores, heads, table, closed, above, step, counts, fired)
    with torch.cuda.device(table.device):
        extension().correct(scores, heads, table, closed, above, step, counts, fired, _stream(table))


def enter(
    query: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, queries: torch.Tensor, count: int,
    window: int, keys: torch.Tensor, values: torch.Tensor, fresh: torch.Tensor,
) -> None:  # fmt: skip
    if not serves(query):
        return reference.enter(query, new_keys, new_values, queries, count, window, keys, values, fresh)
    with torch.cuda.device(query.device):
        extension().enter(
            _lines(query), _lines(new_keys), _lines(new_values), queries, count, window, keys, values, fresh,
            _stream(query),
        )  # fmt: skip


def gather(
    pages: torch.Tensor, page_table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    plan_block: torch.Tensor, plan_slot: torch.Tensor,
) -> None:  # fmt: skip
    gather_layers(pages, [page_table], [keys], [values], [plan_block], [plan_slot])


def gather_layers(
    pages: torch.Tensor, page_table: list[torch.Tensor], keys: list[torch.Tensor], values: list[torch.Tensor],
    plan_block: list[torch.Tensor], plan_slot: list[torch.Tensor],
) -> None:  # fmt: skip
    """`gather` for some layers of the same shapes, GATHER_LAYERS at most, in one launch."""
    first, table = keys[0], page_table[0]
    reachable = pages.dtype == first.dtype and (pages.is_cuda or pages.is_pinned()) and first.shape[-1] in HEAD_DIMS
    if not (reachable and (table.is_cuda or table.is_pinned()) and available()):
        for table, *rest in zip(page_table, keys, values, plan_block, plan_slot):
            reference.gather(pages, table.to(pages.device), *rest)
        return
    with torch.cuda.device(first.device):
        extension().gather_layers(
            pages, page_table, keys, values, plan_block, plan_slot, GATHER_CTAS, _stream(first)
        )  # fmt: skip


def write(
    pages: torch.Tensor, page_table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> None:  # fmt: skip
    if not reaches(pages, page_table, keys):
        return reference.write(pages, page_table.to(pages.device), keys, values, start)
    with torch.cuda.device(keys.device):
        extension().write(
            pages, page_table, _lines(keys), _lines(values), start, WRITE_CTAS, _stream(keys)
        )  # fmt: skip


def append(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, last_selected: torch.Tensor, lengths: torch.Tensor,
    order: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, step: torch.Tensor, may_open: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not serves(keys):
        return reference.append(
            keys, values, table, last_selected, lengths, order, new_keys, new_values, step, may_open
        )
    return append_step(
        keys, values, table, last_selected, lengths, order, new_keys, new_values, step, None, None, None, None, None,
        None, "minmax", False,
    )  # fmt: skip


def append_step(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, last_selected: torch.Tensor, lengths: torch.Tensor,
    order: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, step: torch.Tensor,
    fresh: torch.Tensor | None, wasted: torch.Tensor | None, pages: torch.Tensor | None,
    page_table: torch.Tensor | None, summaries: torch.Tensor | None, scales: torch.Tensor | None, scorer: str,
    int8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`append`, and in the same launch what the reference path does around it.

    Args:
        fresh: `[B, H, S]` bool, cleared where the token went. wasted: `[H]`, added to: evicted blocks still fresh.
        pages, page_table: as in `gather`; the token is written to its page too.
        summaries, scales: `[B, H, N, P, 2, D]` and `[B, H, N, P, 2]`; a block that the token fills is summarised.
    """
    slot = table.new_empty(table.shape[:2])
    evicted = torch.empty_like(slot, dtype=torch.bool)
    new_keys, new_values = _lines(new_keys), _lines(new_values)
    if new_keys.stride() != new_values.stride():
        new_keys, new_values = new_keys.contiguous(), new_values.contiguous()
    with torch.cuda.device(keys.device):
        extension().append(
            keys, values, table, last_selected, lengths, order, new_keys, new_values, step, fresh, slot, evicted,
            wasted, pages, page_table, summaries, scales if int8 else None, scorer, _stream(keys),
        )  # fmt: skip
    return slot, evicted


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
    tail_mask: torch.Tensor, scaling: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if not serves(query):
        return reference.attend(query, keys, values, table, lengths, tail_mask, scaling, sinks)
    # By token, as the next projection reads it; handed back in the reference's order.
    out = query.new_empty([query.shape[i] for i in (0, 2, 1, 3)])
    rows, heads, slots = table.shape
    module = extension()
    sizes = rows, heads, query.shape[1] // heads, query.shape[2], slots, query.shape[3]
    with torch.cuda.device(query.device):  # whose multiprocessors the shares are made for
        scratch = _buffer("attend", query, module.attend_scratch(*sizes), module.attend_counters(*sizes))
        module.attend(
            _lines(query), keys, values, table, lengths, tail_mask, scaling, None if sinks is None else sinks.float(),
            out, scratch, _stream(query),
        )  # fmt: skip
    return out.transpose(1, 2)
