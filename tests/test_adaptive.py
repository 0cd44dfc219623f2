"""`eval/adaptive.py` and `eval/tail_estimate.py`: what they walk, estimate and call met."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import adaptive  # noqa: E402
import tail_estimate  # noqa: E402
from tail_estimate import BY_BLOCK, NONE, TRUE, Attends  # noqa: E402


def walks(steps=40, blocks=40):
    """Two heads of two layers: one's attention goes to other blocks at every tenth step, the others' stays."""
    random = torch.Generator().manual_seed(3)
    mass = torch.rand((2, 2, 1, blocks), generator=random).expand(-1, -1, steps, -1).clone()
    for step in range(steps):
        turn = torch.Generator().manual_seed(step // 10)
        mass[0, 0, step] = 9 * torch.rand((blocks,), generator=turn) ** 4
    mass = mass / mass.sum(-1, keepdim=True)
    lasting = torch.cat((mass, torch.zeros(2, 2, steps, 4)), -1)
    return adaptive.Walks(SimpleNamespace(mass=lasting), mass, mass[:, :, 0], blocks * 16, 160)


def test_a_shared_budget_goes_where_attention_turns():
    own = walks()
    one, shared = own.one_cap(0.1), own.auto(1.0, averages=False)  # a block a head, four a step
    assert shared.missed[0] < one.missed[0] - 0.005
    row = adaptive.measure(own, "made", 0.1)
    assert 0 < row["auto"]["fetched"] <= row["one cap"]["fetched"] == one.fetched
    assert [each[0] for each in row["curve"]] == sorted((each[0] for each in row["curve"]), reverse=True)


def test_averages_alone_change_which_blocks_are_chosen():
    own = walks()
    assert own.one_cap(0.1, averages=True) != own.one_cap(0.1)
    assert own.auto(2.0) != own.auto(2.0, averages=False)


def test_what_is_saved():
    curve = [(4.0, 0.10), (2.0, 0.12), (1.0, 0.20)]
    assert adaptive.saved(curve, 0.12, 5.0) == pytest.approx(0.6)
    assert adaptive.saved(curve, 0.16, 5.0) == pytest.approx(0.7)  # half way
    assert adaptive.saved(curve, 0.5, 5.0) == pytest.approx(0.8)  # further down than was measured
    assert adaptive.saved(curve, 0.08, 5.0) == pytest.approx(-0.25)


def row(text="a", budget=96, ratio=0.05, one=(0.2, 3.0), auto=(0.1, 2.0), saved=0.5):
    way = dict(zip(("missed", "fetched"), one)), dict(zip(("missed", "fetched"), auto))
    return {"text": text, "budget": budget, "fetch_ratio": ratio, "one cap": way[0], "auto": way[1], "saved": saved}


def test_bars_can_be_missed():
    good, other = row(), row(ratio=0.1, budget=48, auto=(0.9, 9.0))  # the last: no part of the bars
    assert [bar["met"] for bar in adaptive.bars([good, good, other])] == [True, True]
    for bad in (row(auto=(0.3, 2.0)), row(auto=(0.1, 3.1)), row(ratio=0.1, auto=(0.2, 1.0))):
        assert not adaptive.bars([good, bad, other])[0]["met"]
    assert not adaptive.bars([good, row(saved=-0.1)])[1]["met"]


@pytest.fixture(scope="module")
def text():
    """Queries `[1, 4, 9, 64]` behind 7 blocks, keys and values `[1, 2, 121, 64]`."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random) for shape in ((1, 4, 9, 64), (1, 2, 121, 64), (1, 2, 121, 64))]


def dense(query, keys, values):
    seen = torch.arange(121) <= (112 + torch.arange(9))[:, None]
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


def test_with_room_for_all_nothing_is_estimated(text):
    for estimate in tail_estimate.ESTIMATES:
        attends = Attends(112, 8, estimate)
        torch.testing.assert_close(attends(None, *text)[0], dense(*text), atol=1e-4, rtol=1e-4)
        assert max(attends.mass, default=0) < 1e-6


def alike(tensor, length):
    """The same in all tokens of a run."""
    whole = tensor[:, :, :112].unflatten(2, (-1, length))
    return torch.cat((whole[:, :, :, :1].expand_as(whole).flatten(2, 3), tensor[:, :, 112:]), 2)


@pytest.mark.parametrize(
    "estimate, keys_alike, values_alike",
    [(TRUE, 1, 8), ("mean", 8, 8), ("midpoint", 8, 8), ("midpoint" + BY_BLOCK, 8, 16), ("mean, variance", 8, 8)],
)
def test_an_estimate_is_exact_where_runs_are_what_it_takes_them_for(text, estimate, keys_alike, values_alike):
    query, keys, values = text
    keys, values = alike(keys, keys_alike), alike(values, values_alike)
    want = dense(query, keys, values)
    none = Attends(112, 3, NONE)(None, query, keys, values)[0]
    attends = Attends(112, 3, estimate)
    got = attends(None, query, keys, values)[0]
    assert (none - want).abs().max() > 0.1 and attends.mass[0] > 0.2
    torch.testing.assert_close(got, want, atol=0.02, rtol=0)  # int8 midpoints


def test_slots_pay_for_values():
    assert tail_estimate.paid(129, 440, 64) == 129 - 8 and tail_estimate.paid(33, 880, 64) == 33 - 15
    rows = [{"estimate": "midpoint", "at": "equal budget", "kl": kl, "kl_without": 0.2} for kl in (0.1, 0.3)]
    (bar,) = tail_estimate.bars(rows)
    assert (bar["measured"], bar["bar"], bar["met"]) == (1, 2, False)
