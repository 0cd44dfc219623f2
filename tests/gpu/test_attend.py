"""`attend` on the GPU against the reference in float32; what is not visible is always poison."""

from __future__ import annotations

import math

import pytest
import torch

from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import attend, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, F16 = torch.bfloat16, torch.float16


def make(rows, heads, group, tokens, slots, dim, dtype, seed, lengths=None, poison=math.nan, device="cuda"):
    """Arguments of `attend` up to `tail_mask`. Invisible keys and values are `poison`; random tables with holes, in
    random order, and random lengths unless they are given."""
    random = torch.Generator(device).manual_seed(seed)
    host = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(0, slots * BLOCK * 3 // 2 + 2, (rows,), generator=host)
    table = torch.full((rows, heads, slots), -1)
    for row in range(rows):
        blocks = -(-int(lengths[row]) // BLOCK)
        for head in range(heads):
            held = torch.randperm(blocks, generator=host)[: slots - slots // 8]
            table[row, head, torch.randperm(slots, generator=host)[: len(held)]] = held
    tail_mask = torch.eye(tokens, TAIL, dtype=torch.bool) | (torch.rand(tokens, TAIL, generator=host) < 0.4)
    tail_mask[:, TAIL - 1] = False
    table, lengths, tail_mask = table.to(device), lengths.to(device), tail_mask.to(device)

    query = torch.randn(rows, heads * group, tokens, dim, device=device, dtype=dtype, generator=random)
    shape = rows, heads, TAIL + slots * BLOCK, dim
    keys, values = (torch.randn(shape, device=device, dtype=dtype, generator=random) for _ in range(2))
    tail = tail_mask.any(0).expand(rows, heads, -1)
    unseen = ~torch.cat((tail, reference.visible(table, lengths)), -1).unsqueeze(-1)
    return query, keys.masked_fill_(unseen, poison), values.masked_fill_(unseen, poison), table, lengths, tail_mask


def expected(query, keys, values, table, lengths, tail_mask, scaling, sinks):
    """The reference in float32 on the CPU, with zeros for poison and for queries that see nothing."""
    query, keys, values = (x.cpu().float() for x in (query, keys, values))
    table, lengths, tail_mask = table.cpu(), lengths.cpu(), tail_mask.cpu()
    keys, values = (x.masked_fill(~(x.abs() < 1e4), 0) for x in (keys, values))
    out = reference.attend(
        query, keys, values, table, lengths, tail_mask, scaling, None if sinks is None else sinks.cpu()
    )
    sees = reference.visible(table, lengths).any(-1)[:, :, None] | tail_mask.any(-1)
    return out.masked_fill(~sees.repeat_interleave(query.shape[1] // table.shape[1], 1).unsqueeze(-1), 0)


def check(arguments, scaling=None, sinks=None, rows=None):
    query = arguments[0]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(*arguments, scaling, sinks)
    assert out.shape == query.shape and out.dtype == query.dtype
    assert out.transpose(1, 2).is_contiguous()  # by token, as the next projection reads it
    if rows is not None:
        *of_rows, tail_mask = arguments
        arguments, out = (*(x[rows] for x in of_rows), tail_mask), out[rows]
    want = expected(*arguments, scaling, sinks)
    got = out.cpu().float()
    assert got.isfinite().all()
    assert (got - want).abs().max() < 2e-2 * max(1, want.abs().max())
    assert (got - want).norm() <= (1e-2 if query.dtype == BF16 else 2e-3) * want.norm()


# Query rows a KV head (group * tokens): 1 to 8 take one tile, to 16 two, more a team of warps, over 64 (32 with
# D = 256) several chunks. Shares of CTAs end anywhere in a (row, head)'s tiles.
SHAPES = [  # rows, heads, group, tokens, slots, dim, dtype
    (1, 8, 4, 2, 129, 128, BF16),
    (2, 3, 1, 1, 33, 64, F16),
    (3, 1, 3, 5, 40, 80, BF16),
    (2, 2, 7, 3, 70, 96, F16),
    (1, 1, 8, 8, 129, 256, BF16),
    (5, 2, 8, 8, 65, 64, BF16),
    (2, 2, 8, 4, 31, 128, F16),
    (1, 1, 71, 2, 50, 64, BF16),
    (4, 2, 4, 2, 7, 256, F16),
    (3, 2, 2, 6, 17, 256, BF16),
    (2, 1, 8, 7, 1, 96, BF16),
    (9, 4, 7, 1, 12, 80, F16),
    (40, 8, 4, 1, 20, 128, BF16),
    (1, 1, 4, 2, 2100, 128, F16),
    (40, 8, 8, 8, 20, 256, BF16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_equals_the_reference(shape, with_sinks):
    sinks = None
    if with_sinks:
        sinks = 3 * torch.randn(shape[1] * shape[2], device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    check(make(*shape, seed=sum(shape[:6])), sinks=sinks)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_head_size_and_number_of_query_rows(dim, dtype):
    for seed, (group, tokens) in enumerate([(1, 1), (4, 2), (3, 3), (8, 2), (5, 4), (7, 7)]):
        check(make(3, 2, group, tokens, 11 + 9 * seed, dim, dtype, seed))


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_production_size_and_the_same_bits_each_time(tokens):
    lengths = torch.randint(20_000, 32_000, (64,), generator=torch.Generator().manual_seed(0))
    lengths[3], lengths[40] = 2064, 17
    arguments = make(64, 8, 4, tokens, 129, 128, BF16, 0, lengths)
    check(arguments, rows=[0, 3, 40, 63])
    first = attend(*arguments, 0.1, None)
    for _ in range(20):
        assert torch.equal(attend(*arguments, 0.1, None), first)


def test_one_row_split_over_all_multiprocessors_gives_the_same_bits_each_time():
    many = [make(1, heads, group, 2, 129, 128, BF16, heads, torch.tensor([9000])) for heads, group in [(8, 4), (2, 20)]]
    first = [attend(*arguments, 0.1, None) for arguments in many]
    for _ in range(200):
        for arguments, out in zip(many, first, strict=True):
            assert torch.equal(attend(*arguments, 0.1, None), out)
    for arguments in many:
        check(arguments)


@pytest.mark.parametrize("poison", [math.inf, 3e38])
def test_no_poison_matters(poison):
    check(make(3, 2, 4, 2, 21, 128, BF16, 5, poison=poison))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("slots", [3, 129])
def test_queries_that_see_nothing_give_zeros(slots, with_sinks):
    sinks = torch.randn(8, device="cuda") if with_sinks else None
    lengths = torch.tensor([0, 30, 0])
    query, keys, values, table, lengths, tail_mask = make(3, 2, 4, 3, slots, 64, BF16, 2, lengths)
    tail_mask[1:] = False
    out = attend(query, keys, values, table, lengths, tail_mask, 0.125, sinks)
    assert out.isfinite().all() and out[:, :, 0].any() and out[1].any()
    assert not out[0, :, 1:].any() and not out[2, :, 1:].any()
    if sinks is not None:  # an infinitely strong one takes everything
        strong = torch.full_like(sinks, 1e4)
        assert not attend(query, keys, values, table, lengths, tail_mask, 0.125, strong).any()


def test_scores_that_rise_along_the_stream_and_large_ones():
    """The running maximum moves again and again, by little and by much."""
    query, keys, *rest = make(2, 2, 4, 2, 65, 128, BF16, 3, torch.tensor([1040, 1033]))
    query = query.abs()
    rise = torch.linspace(-1, 1, keys.shape[2], device="cuda")[:, None]
    for factor in (0.5, 4, 40):
        check((query, (keys * 0.1 + factor * rise).to(BF16), *rest))
    check((query * 30, keys, *rest))


def test_queries_need_not_be_contiguous():
    query, *rest = make(3, 2, 4, 5, 21, 128, F16, 4)
    strided = torch.randn(3, 5, 12, 128, device="cuda", dtype=F16)[:, :, 2:10].transpose(1, 2)
    strided.copy_(query)
    assert torch.equal(attend(strided, *rest, 0.1, None), attend(query, *rest, 0.1, None))


def test_captured_and_replayed_with_other_contents():
    arguments = make(1, 4, 4, 2, 129, 128, BF16, 6, torch.tensor([3000]))
    attend(*arguments, 0.1, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments, 0.1, None)
    for seed, length in ((7, 1999), (8, 5), (9, 9001)):
        other = make(1, 4, 4, 2, 129, 128, BF16, seed, torch.tensor([length]))
        for mine, its in zip(arguments, other, strict=True):
            mine.copy_(its)
        graph.replay()
        assert torch.equal(out, attend(*other, 0.1, None))
