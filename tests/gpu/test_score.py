"""The CUDA `score` against the reference in float32; what lies behind a row's closed blocks is poison."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK, REDUCTIONS
from oasis_hf.ops import reference
from oasis_hf.scorers import SCORERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, F16 = torch.bfloat16, torch.float16


def row_weights(kind, tokens):
    weights = torch.zeros(tokens)
    if kind == "draft":
        weights[-1] = 1
    elif kind == "recent":
        weights[: max(1, tokens - 1)] = 1 / max(1, tokens - 1)
    elif kind == "all":
        weights = torch.rand(tokens) + 0.1
    return weights


class Case:
    """Arguments on the GPU. kinds: of the rows' weights, in turn; the first row is full, another has no closed block.

    Args:
        spare: blocks of the summaries beyond those that are looked at.
    """

    def __init__(
        self, rows, heads, group, tokens, blocks, parts, dim=128, dtype=BF16, int8=True, scorer="midrange",
        kinds=("draft", "recent", "all", "none"), spare=3, seed=0,
    ):  # fmt: skip
        torch.manual_seed(seed)
        self.scorer, self.blocks, self.parts = scorer, blocks, parts
        self.query = torch.randn(rows, tokens, heads * group, dim, device="cuda").to(dtype).transpose(1, 2)
        if seed % 2:
            self.query = self.query.contiguous()
        cap = blocks + spare
        keys = torch.randn(rows, heads, cap, BLOCK, dim, device="cuda", dtype=dtype) * 1.5
        self.vectors, self.scales = reference.summarize(keys, scorer, parts, int8)
        closed = torch.randint(blocks // 2, blocks + 1, (rows,))
        closed[0] = blocks
        if rows > 2:
            closed[2] = 0
        self.closed = closed.cuda()
        self.weights = torch.stack([row_weights(kinds[b % len(kinds)], tokens) for b in range(rows)]).cuda()
        self.dead = torch.arange(cap, device="cuda") >= self.closed.view(-1, 1, 1)
        for poisoned in (self.scales,) if int8 else (self.vectors,):
            poisoned.masked_fill_(self.dead.view(rows, 1, cap, *[1] * (poisoned.ndim - 3)), math.nan)

    def run(self, reduction="softmax-mean", half_range=0.6, sinks=0, recent=0):
        scales = self.scales[:, :, : self.blocks] if self.scales.numel() else self.scales
        return ops.score(
            self.query, self.vectors[:, :, : self.blocks], scales, self.closed, self.weights, self.scorer, half_range,
            reduction, self.query.shape[-1] ** -0.5, sinks, recent,
        )  # fmt: skip

    def want(self, reduction="softmax-mean", half_range=0.6, sinks=0, recent=0, device="cpu"):
        vectors = self.vectors[:, :, : self.blocks].to(device)
        vectors = vectors if vectors.dtype == torch.int8 else vectors.float().nan_to_num(0)
        scales = self.scales[:, :, : self.blocks].to(device).nan_to_num(0) if self.scales.numel() else self.scales
        return reference.score(
            self.query.to(device).float(), vectors, scales.to(device), self.closed.to(device), self.weights.to(device),
            self.scorer, half_range, reduction, self.query.shape[-1] ** -0.5, sinks, recent,
        )  # fmt: skip

    def check(self, reduction="softmax-mean", half_range=0.6, sinks=0, recent=0, device="cpu"):
        out = self.run(reduction, half_range, sinks, recent)
        assert out.shape == (*self.vectors.shape[:2], self.blocks) and out.dtype == torch.float32
        want = self.want(reduction, half_range, sinks, recent, device).to(out.device)
        # Shares of a softmax are as exact as their size; standardised scores of one block or two are rounding noise.
        exact = {"rtol": 3e-4, "atol": 1e-9} if reduction == "softmax-mean" else {"rtol": 1e-3, "atol": 1e-3}
        some = (self.closed > 2) if reduction != "softmax-mean" else self.closed >= 0
        torch.testing.assert_close(out[some], want[some], **exact)
        assert torch.equal(out.isinf(), want.isinf())
        # The same bits again, which also shows that the counters are zero again.
        assert torch.equal(out, self.run(reduction, half_range, sinks, recent))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_equal_to_the_reference(dim, dtype):
    every = itertools.product((1, 2, 4), (True, False), SCORERS, REDUCTIONS)
    for seed, (parts, int8, scorer, reduction) in enumerate(every):
        group, tokens, blocks = [1, 3, 4, 7, 8][seed % 5], [1, 5, 2][seed % 3], [37, 1, 130, 16][seed % 4]
        case = Case(4, 2, group, tokens, blocks, parts, dim, dtype, int8, scorer, seed=seed)
        case.check(reduction, [0.6, 1.0, 0.0][seed % 3])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("group, tokens", [(1, 16), (4, 16), (8, 5), (16, 5), (5, 8), (40, 1)])
def test_many_query_rows(group, tokens, reduction):
    for kinds in (("all",), ("recent", "draft")):
        Case(3, 2, group, tokens, 75, 2, kinds=kinds, seed=group).check(reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sinks, recent", [(1, 0), (0, 2), (3, 4), (1000, 0)])
def test_sinks_and_recent_blocks_are_infinite(sinks, recent, reduction):
    Case(5, 2, 4, 5, 40, 2, seed=1).check(reduction, sinks=sinks, recent=recent)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("blocks, parts", [(1, 1), (5, 4), (8192, 2), (4099, 1)])
def test_one_row_is_split_over_the_device(blocks, parts, reduction):
    Case(1, 8, 4, 5, blocks, parts, kinds=("recent",)).check(reduction, device="cuda")
    Case(1, 8, 4, 5, blocks, parts, int8=False, kinds=("draft",)).check(reduction, device="cuda")


@pytest.mark.parametrize("rows", [7, 16, 33, 64])
@pytest.mark.parametrize("reduction", ["softmax-mean", "mean"])
def test_production_sizes(rows, reduction):
    # Values of all query rows beyond what shared memory keeps, of some, of none.
    case = Case(rows, 8, 4, 5, 1024, 2, kinds=("draft", "recent", "all"), spare=0, seed=rows)
    case.check(reduction, device="cuda")


@pytest.mark.parametrize("rows, tokens", [(1, 1), (40, 5)])
def test_later_blocks_score_far_higher(rows, tokens):
    # Each block past what its warp took for its scale so far: what is already there is brought to the new one.
    for parts, int8 in ((1, False), (2, True), (4, False)):
        case = Case(rows, 8, 4, tokens, 700, parts, int8=int8, kinds=("all", "recent"))
        growth = torch.arange(1, 704, device="cuda").view(1, 1, -1, 1, 1) / 100
        if int8:
            case.scales = (case.scales * growth).to(case.scales.dtype)
        else:
            case.vectors = (case.vectors * growth.unsqueeze(-1)).to(case.vectors.dtype)
        case.check(device="cuda")


def test_large_scores_do_not_overflow():
    case = Case(2, 2, 4, 2, 50, 2, int8=False)
    case.query *= 60
    case.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_captured(reduction):
    # Few rows, so that each is split over CTAs. What a replay leaves unwritten is a 7. One row has no closed block.
    case = Case(3, 2, 4, 5, 300, 2, kinds=("all", "recent", "all"), spare=0)
    case.scales.nan_to_num_(0.01)  # closed grows again below
    case.run(reduction)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(reduction)
    for closed in ([300, 290, 0], [200, 0, 0], [1, 37, 0], [0, 0, 0], [299, 5, 300], [300, 300, 0]):
        case.query.normal_()
        case.closed.copy_(torch.tensor(closed))
        out.fill_(7)
        graph.replay()
        got, want = out.cpu(), case.want(reduction)
        assert not (got == 7).all(-1).any(), f"unwritten: {(got == 7).all(-1).nonzero().tolist()} at {closed}"
        exact = {"rtol": 3e-4, "atol": 1e-9} if reduction == "softmax-mean" else {"rtol": 1e-3, "atol": 1e-3}
        some = (case.closed.cpu() > 2) | (case.closed.cpu() == 0) | (reduction == "softmax-mean")
        torch.testing.assert_close(got[some], want[some], **exact)
