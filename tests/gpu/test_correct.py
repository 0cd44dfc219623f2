"""The CUDA `correct` against the reference, and a captured step with the correction lane against the eager one."""

from __future__ import annotations

import math

import pytest
import torch
from test_captured import same
from test_generate import generate
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded

import oasis_hf
from oasis_hf import OasisCache, ops
from oasis_hf.ops import correction

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def case(rows, heads, blocks, slots, kind, seed=0):
    """Scores as shares `[B, H, N]`, table `[B, H, S]` and closed blocks `[B]`, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    closed = torch.randint(blocks // 2, blocks + 1, (rows,), generator=random)
    closed[0] = blocks
    if rows > 2:
        closed[1] = 0
    exists = torch.arange(blocks) < closed[:, None, None]
    scores = torch.randn(rows, heads, blocks, generator=random).mul(0 if kind == "equal" else 3)
    scores = scores.masked_fill(~exists, -math.inf).softmax(-1).nan_to_num().masked_fill(~exists, -math.inf)
    if kind == "kept":
        scores = scores.masked_fill(exists & (torch.rand(scores.shape, generator=random) < 0.1), math.inf)
    if kind == "few":  # most of the mass is nowhere
        scores = torch.where(exists & (torch.rand(scores.shape, generator=random) < 0.9), 0.0, scores)
    best = scores.clone().nan_to_num(posinf=1.0)
    best += torch.rand(best.shape, generator=random) * best.clamp(min=0)  # near the best, and not all of them
    place = torch.nn.functional.pad(best.topk(min(blocks, slots), -1).indices, (0, slots))[..., :slots]
    table = torch.where(torch.arange(slots) < blocks, place, -1)
    table = table.masked_fill(torch.rand(table.shape, generator=random) < 0.2, -1)
    return scores, table.masked_fill(table >= closed[:, None, None] + 1, -1).contiguous(), closed


@pytest.mark.parametrize("kind", ["softmax", "equal", "kept", "few"])
@pytest.mark.parametrize(
    "rows, heads, blocks, slots", [(1, 8, 1024, 129), (5, 3, 200, 33), (3, 32, 77, 9), (2, 1, 4, 9)]
)
def test_equal_to_the_reference(rows, heads, blocks, slots, kind):
    scores, table, closed = (one.cuda() for one in case(rows, heads, blocks, slots, kind))
    missed = correction.missed(scores, table, closed)
    for above in (0.0, 0.02, float(missed.flatten().median()) * 1.01, 1.0):
        for told in (False, True):
            mask = torch.rand(rows, heads, device="cuda") < 0.5 if told else None
            got, wanted = scores.clone(), scores.clone()
            outs = [
                (one, torch.full((2, heads), 5, device="cuda"), torch.full((1 + rows,), 3, device="cuda"))
                for one in (got, wanted)
            ]
            for which, (one, counts, fired) in zip((ops.correct, correction.correct), outs):
                for step in (4, 4, 5):  # two layers of a step, and another step
                    which(one, mask, table, closed, above, torch.tensor(step, device="cuda"), counts, fired)
            near = (missed - above).abs() < 1e-5  # sums round in another order
            if told or not near.any():
                assert torch.equal(got, wanted)
                assert all(torch.equal(a, b) for a, b in zip(outs[0][1:], outs[1][1:]))
            else:
                assert torch.equal(got[~near], wanted[~near])


KNOBS = [
    {"correct_above": 0.02}, {"correct_above": 0.02, "lookahead": "smoothed", "correct_blocks": 2},
    {"correct_above": 0.02, "lookahead": "previous", "reduction": "max", "recent_blocks": 1},
    {"correct_below": 0.9}, {"correction": "always"}, {"correct_above": 0.02, "candidates": 2},
    {"correct_above": 0.02, "speculate": True, "draft_tokens": 2}, {"correction": "always", "speculate": True},
    {"correct_above": 0.02, "correct_layers": (0, 2)},
]  # fmt: skip


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_captured_is_eager(model, knobs):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = {"budget": 112, "compile_after": None, "correction": "auto", **knobs}
    captured, eager = (OasisCache(model, graphs=graphs, **knobs) for graphs in (True, False))
    same(*(generate(model, inputs, cache, max_new_tokens=80) for cache in (captured, eager)))
    assert captured.graphs.refused is None and captured.graphs.replays > 20
    assert captured.corrections() == eager.corrections() and captured.corrections()["blocks"] > 0
    for name, value in captured.stats().items():
        assert torch.equal(value, eager.stats()[name]), name


def test_captured_is_eager_with_drafts_accepted_in_a_graph(model):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = dict(budget=112, compile_after=None, speculate=True, draft_tokens=2, correction="auto", correct_above=0.02)
    texts, caches = [], [OasisCache(model, graphs=graphs, **knobs) for graphs in (True, False)]
    for cache in caches:
        texts.append(oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=80, do_sample=False))
    assert torch.equal(*texts) and caches[0].graphs.replays > 10
    assert caches[0].corrections() == caches[1].corrections() and caches[0].corrections()["blocks"] > 0


def test_always_is_on_demand_to_attention(model):  # noqa: F811
    """What prediction left to the next step arrives before a correction gives its slots away."""
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = dict(budget=112, compile_after=None, recent_blocks=1)
    lane = OasisCache(model, correction="always", correct_blocks=7, **knobs)
    on_demand = OasisCache(model, lookahead="on_demand", **knobs)
    a, b = (generate(model, inputs, cache, max_new_tokens=60) for cache in (lane, on_demand))
    for step, (mine, theirs) in enumerate(zip(a.logits, b.logits, strict=True)):
        if not torch.equal(a.sequences[:, : 200 + step], b.sequences[:, : 200 + step]):
            assert step > 10
            break
        assert (mine.float() - theirs.float()).abs().mean() < 0.05
    assert lane.graphs.replays > 20
