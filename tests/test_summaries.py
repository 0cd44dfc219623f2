"""Summaries: every closed block's, growing, and read back through the score."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import OasisConfig, ops
from oasis_hf.config import BLOCK
from oasis_hf.summaries import Summaries

HEADS, DIM = 2, 6


def make(rows=2, **knobs):
    return Summaries(OasisConfig(**knobs), rows, HEADS, DIM, torch.float32, torch.device("cpu"))


def blocks(count, seed=0):
    return torch.randn(HEADS, count, BLOCK, DIM, generator=torch.Generator().manual_seed(seed))


def expected(summaries, keys):
    config = summaries.config
    return ops.summarize(keys, config.scorer, config.parts, config.summary_dtype == "int8")


def assert_holds(summaries, row, block, keys):
    """keys: `[H, n, 16, D]`."""
    vectors, scales = expected(summaries, keys)
    assert torch.equal(summaries.vectors[row, :, block : block + keys.shape[1]], vectors)
    if scales.numel():
        assert torch.equal(summaries.scales[row, :, block : block + keys.shape[1]], scales)


int8 = pytest.mark.parametrize("dtype", ["int8", "model"])


@int8
@pytest.mark.parametrize("tokens", [16, 8, 4])
def test_shapes_and_dtypes(dtype, tokens):
    summaries = make(summary_dtype=dtype, tokens_per_summary=tokens)
    summaries.ensure(3)
    assert summaries.vectors.shape[3:] == (16 // tokens, 2, DIM)
    assert summaries.vectors.dtype == (torch.int8 if dtype == "int8" else torch.float32)
    size = 2 * summaries.vectors.shape[2] * HEADS * (16 // tokens) * 2
    assert summaries.nbytes == size * (DIM + 2 if dtype == "int8" else 4 * DIM)


@int8
def test_written_blocks_stay_while_it_grows(dtype):
    summaries = make(summary_dtype=dtype)
    summaries.ensure(3)
    summaries.write(0, 0, blocks(3, 1))
    summaries.write(1, 1, blocks(2, 2))
    for count in (4, 9, 40):
        summaries.ensure(count)
        assert summaries.vectors.shape[2] > count, "one spare"
    assert_holds(summaries, 0, 0, blocks(3, 1))
    assert_holds(summaries, 1, 1, blocks(2, 2))


def test_growth_is_by_an_eighth():
    summaries, sizes = make(), set()
    for count in range(1, 200):
        summaries.ensure(count)
        sizes.add(summaries.vectors.shape[2])
        assert sizes and summaries.vectors.shape[2] <= max(count + 8, 1.125 * count + 1)
    assert len(sizes) <= 20  # not a copy for every block


@int8
def test_close_writes_the_closing_rows_and_no_other(dtype):
    summaries = make(summary_dtype=dtype)
    summaries.ensure(3)
    for row in range(2):
        summaries.write(row, 0, blocks(3, row))
    keys = torch.stack((blocks(1, 8)[:, 0], blocks(1, 9)[:, 0]))
    summaries.close(keys, torch.tensor([1, 2]), torch.tensor([True, False]))
    changed = blocks(3, 0)
    changed[:, 1] = blocks(1, 8)[:, 0]
    assert_holds(summaries, 0, 0, changed)
    assert_holds(summaries, 1, 0, blocks(3, 1))


def test_close_of_the_last_block_there_is_room_for():
    summaries = make()
    summaries.ensure(3)
    keys = torch.stack((blocks(1, 8)[:, 0], blocks(1, 9)[:, 0]))
    summaries.close(keys, torch.tensor([2, 2]), torch.tensor([True, False]))
    summaries.ensure(20)
    assert_holds(summaries, 0, 2, blocks(1, 8))
    assert not summaries.vectors[1, :, 2].any()


@int8
def test_score_is_the_operators_with_the_configs_knobs(dtype):
    summaries = make(summary_dtype=dtype, scorer="midrange", half_range=0.7, reduction="max", sink_blocks=1)
    summaries.ensure(4)
    for row in range(2):
        summaries.write(row, 0, blocks(4, row))
    query = torch.randn(2, 4, 2, DIM, generator=torch.Generator().manual_seed(3))
    closed, weights = torch.tensor([4, 2]), torch.tensor([[0.4, 0.6], [1.0, 0.0]])
    got = summaries.score(query, closed, weights, 0.5, 3)
    stacked = [expected(summaries, blocks(4, row)) for row in range(2)]
    vectors = torch.stack([v for v, _ in stacked])[:, :, :3]
    scales = torch.stack([s for _, s in stacked])[:, :, :3] if dtype == "int8" else stacked[0][1]
    want = ops.score(query, vectors, scales, closed, weights, "midrange", 0.7, "max", 0.5, 1, 0)
    assert torch.equal(got, want) and got.shape == (2, HEADS, 3)


@int8
def test_select_rows_and_fork(dtype):
    summaries = make(summary_dtype=dtype)
    summaries.ensure(2)
    for row in range(2):
        summaries.write(row, 0, blocks(2, row))
    other = summaries.fork()
    other.write(0, 0, blocks(2, 7))
    assert_holds(summaries, 0, 0, blocks(2, 0))
    summaries.select_rows(torch.tensor([1, 1, 0]))
    for row, source in enumerate((1, 1, 0)):
        assert_holds(summaries, row, 0, blocks(2, source))
    other.ensure(30)
    assert_holds(other, 0, 0, blocks(2, 7))
    assert_holds(other, 1, 0, blocks(2, 1))


@int8
def test_rows_can_be_chosen_before_anything_is_written(dtype):
    summaries = make(summary_dtype=dtype)
    summaries.select_rows(torch.tensor([0, 0, 1]))
    summaries.ensure(2)
    summaries.write(2, 0, blocks(2, 4))
    assert_holds(summaries, 2, 0, blocks(2, 4))


def test_where_memory_runs_out_nothing_has_grown(monkeypatch):
    sums = make()
    sums.ensure(3)
    before, made, cat = (sums.vectors, sums.scales), [], torch.cat

    def runs_out(*args):
        made.append(1)
        if len(made) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cat(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            sums.ensure(30)
    assert sums.vectors is before[0] and sums.scales is before[1]
