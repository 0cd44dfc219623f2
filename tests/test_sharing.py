"""`fetch_ratio="auto"`: what a step moves never passes its budget, and goes where it promises most."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import generate
from tiny import left_padded, prompt, tiny

from oasis_hf import ConfigError, OasisCache, OasisConfig
from oasis_hf import cache as cache_module
from oasis_hf.config import BLOCK
from oasis_hf.ops import reference
from oasis_hf.pacing import Pace
from oasis_hf.sharing import LEAST_PRICE, PRICES, RATE, Shares, smoothed

INF = math.inf
BYTES = 2 * BLOCK * 16 * 4
"""Of a block of one KV head of the tiny models in float32."""


def shares(gains, blocks):
    made = Shares(*gains.shape, blocks, 2 * gains.shape[-1], torch.device("cpu"))
    made.gains.copy_(gains)
    made.share_out()
    return made.caps


@st.composite
def promises(draw):
    layers, rows, heads, most = draw(st.tuples(*[st.integers(1, 4)] * 4))
    seed, low = draw(st.integers(0, 9999)), draw(st.sampled_from([0.0, 1e-7, 1e-3, 0.5]))
    random = torch.Generator().manual_seed(seed)
    gains = torch.rand((layers, rows, heads, most), generator=random) ** draw(st.integers(1, 12)) * (1 - low) + low
    gains = gains.masked_fill(torch.rand(gains.shape, generator=random) < draw(st.floats(0, 1)), 0)
    gains = gains.masked_fill(torch.rand(gains.shape, generator=random) < 0.1 * draw(st.integers(0, 1)), 1)
    return gains.sort(-1, descending=True).values, draw(st.integers(1, 2 * gains.numel()))


@settings(max_examples=100, deadline=None)
@given(promises())
def test_caps_sum_to_no_more_than_the_budget_and_use_it(case):
    gains, blocks = case
    caps = shares(gains, blocks)
    wanted = (gains >= LEAST_PRICE).sum(-1)
    assert caps.dtype == torch.int32 and caps.shape == gains.shape[:-1] and (caps >= 0).all()
    assert caps.sum() <= blocks and (caps <= gains.shape[-1]).all()
    if wanted.sum() <= blocks:
        assert (caps >= wanted).all(), "enough for all"
    else:
        assert caps.sum() == blocks and (caps <= wanted).all()
        taken = torch.arange(gains.shape[-1]) < caps.unsqueeze(-1)
        # One price for all, but for the steps that prices are told apart by.
        dearest, cheapest = gains.masked_fill(taken, 0).max(), gains.masked_fill(~taken, INF).min()
        assert dearest <= cheapest * LEAST_PRICE ** (-1 / (PRICES - 1)) * 1.001


def test_what_nobody_asks_for_goes_to_all_alike():
    assert shares(torch.zeros(2, 1, 3, 4), 12).tolist() == [[[2, 2, 2]], [[2, 2, 2]]]
    assert shares(torch.zeros(2, 1, 3, 4), 100).tolist() == [[[4, 4, 4]], [[4, 4, 4]]]
    gains = torch.zeros(1, 1, 4, 3)
    gains[0, 0, 2] = torch.tensor([0.5, 0.2, 0.1])
    assert shares(gains, 2).tolist() == [[[0, 0, 2, 0]]] and shares(gains, 3).tolist() == [[[0, 0, 3, 0]]]
    assert shares(gains, 7)[0, 0].tolist() == [1, 1, 3, 1]


def test_averages():
    means = torch.tensor([[[-1.0, 0.2, 0.4, 0.1, 0.3, 7.0]]])
    scores = torch.tensor([[[0.5, 0.6**4, 0.0, INF, -INF]]])
    got = smoothed(scores, means, 0.25)
    torch.testing.assert_close(got, torch.tensor([[[0.5, 0.3**4, 0.3**4, INF, -INF]]]))
    torch.testing.assert_close(means, torch.tensor([[[0.5**0.25, 0.3, 0.3, 0.1, 0.3, 7.0]]]))


def test_what_always_has_a_share_stays_before_what_once_had_a_large_one():
    means = torch.full((1, 1, 2), -1.0)
    first = [0.6] + 8 * [0.0005]
    promised = [smoothed(torch.tensor([[[score, 0.02]]]), means, RATE)[0, 0] for score in first]
    assert promised[0][0] > promised[0][1] and promised[8][1] > 3 * promised[8][0]
    assert promised[8][1] == pytest.approx(0.02), "still a share of attention"


def selected(caps=None, gains=None, means=None, scores=None):
    """One row, two heads, eight blocks, four slots: head 0 holds blocks 0, 1, 2, head 1 nothing."""
    table = torch.tensor([[[0, 1, 2, -1], [-1, -1, -1, -1]]])
    if scores is None:
        scores = torch.tensor([[[0.1, 0.0, 0.0, 0.2, 0.3, 0.0, 0.0, 0.0], [0.0, 0.1, 0.5, 0.2, 0.0, 0.0, 0.0, 0.0]]])
    args = table, torch.zeros_like(table), torch.tensor([8 * BLOCK]), torch.arange(4)
    return *reference.select(scores, *args, 3, torch.tensor(1), caps, gains, means, 0.5), table


def test_each_head_has_its_own_cap():
    plan_block, _, counts, table = selected()
    assert plan_block[0].tolist() == [[4, 3, -1], [2, 3, 1]]
    for caps in ([0, 2], [1, 3], [3, 0]):
        cut, _, told, after = selected(torch.tensor([caps], dtype=torch.int32))
        kept = torch.arange(3) < torch.tensor(caps)[:, None]
        assert torch.equal(cut[0], torch.where(kept, plan_block[0], -1))
        assert told[1].tolist() == (cut[0] >= 0).sum(-1).tolist() and torch.equal(told.sum(0), counts.sum(0))
        assert set(after[0, 1].tolist()) - {-1} == set(cut[0, 1].tolist()) - {-1}
    assert table[0, 0].tolist() != [0, 1, 2, -1]


def test_misses_tell_what_they_promise():
    gains = torch.full((1, 2, 4), 9.0)
    selected(torch.zeros((1, 2), dtype=torch.int32), gains)
    torch.testing.assert_close(gains, torch.tensor([[[0.3, 0.2, 0.0, 0.0], [0.5, 0.2, 0.1, 0.0]]]))
    scores = torch.full((1, 2, 8), -INF)
    scores[0, 1, 5] = INF
    selected(None, gains, None, scores)  # nothing is known of head 0: it keeps its own
    torch.testing.assert_close(gains, torch.tensor([[[0.3, 0.2, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]))


def test_roots_are_the_nearest_floats():
    """As the compiled operator's are; those of a vector library are not, once in some hundred times."""
    scores = torch.rand(1, 1, 100_000, generator=torch.Generator().manual_seed(0)) ** 8
    means = torch.full_like(scores, -1.0)
    smoothed(scores, means, RATE)
    want = scores
    for _ in range(2):
        want = torch.tensor([math.sqrt(x) for x in want.flatten().tolist()], dtype=torch.float64).float()
    assert torch.equal(means.flatten(), want)


def test_averages_choose():
    means = torch.zeros(1, 2, 9)
    means[0, 1, 7] = 1.0
    gains = torch.zeros(1, 2, 3)
    plan_block, *_ = selected(None, gains, means)
    assert plan_block[0, 1].tolist() == [7, 2, 3] and means[0, 1, 7] == 0.5
    torch.testing.assert_close(gains[0, 1], torch.tensor([1, 0.5, 0.2]) / 16)


KNOBS = [
    {"lookahead": "previous"},
    {"lookahead": {"draft": 1, "previous": 1}, "tokens_per_summary": 4},
    {"speculate": True, "draft_tokens": 2, "sink_blocks": 1, "recent_blocks": 1},
]


def steps(cache, inputs, count, most):
    """Greedy steps, each within `most` bytes. Returns what each moved."""
    moved, before = [], 0
    model = cache.model
    with torch.no_grad():
        token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(count):
            token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
            total = int(cache.stats()["fetched"].sum()) * cache.state.block_bytes
            moved.append(total - before)
            assert moved[-1] <= most
            before = total
    return moved


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("blocks", [1, 5, 12])
def test_a_step_never_moves_more_than_its_bytes(knobs, blocks):
    cache = OasisCache(tiny("llama"), budget=80, fetch_ratio="auto", fetch_bytes=blocks * BYTES + BYTES - 1, **knobs)
    moved = steps(cache, left_padded([300, 150, 33]), 30, blocks * BYTES)
    assert sum(moved) > 30 * BYTES / 3
    uneven = cache.stats()["fetched"]
    assert uneven.max() > uneven.double().mean(), "heads differ in what they get"


def test_without_bytes_a_step_moves_what_a_twentieth_would_at_most():
    cache = OasisCache(tiny("llama"), budget=80, fetch_ratio="auto")
    steps(cache, left_padded([300, 150]), 20, 3 * 2 * 2 * BYTES)
    assert "12 blocks in all, at most 2 a KV head, a step" in " ".join(cache.report().split())


@torch.no_grad()
def test_rows_that_are_repeated_share_the_same_bytes():
    model, most = tiny("llama"), 4 * BYTES
    cache = OasisCache(model, budget=80, fetch_ratio="auto", fetch_bytes=most)
    steps(cache, left_padded([200, 150]), 10, most)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([5, 0, 0, 1, 2, 3]))
    branch, ids = copy.deepcopy(cache), prompt(6, 20, seed=3)
    for each in (cache, branch):
        before = int(each.stats()["fetched"].sum())
        for at in range(20):
            each.model(input_ids=ids[:, at : at + 1], past_key_values=each)
            now = int(each.stats()["fetched"].sum())
            assert (now - before) * BYTES <= most
            before = now
    assert torch.equal(cache.stats()["fetched"], branch.stats()["fetched"])
    cache.crop(-30)  # beyond what was decoded since the copy: its blocks close anew
    assert all((layer.summaries.means[:, :, min(cache.state.rows.tokens) // BLOCK + 3 :] < 0).all()
               for layer in cache.sparse_layers)  # fmt: skip
    cache.reset()
    steps(cache, left_padded([100] * 6), 10, most)


def test_where_a_block_lives_changes_nothing_and_all_of_it_is_dense():
    from transformers import DynamicCache

    model, inputs = tiny("qwen3"), left_padded([120, 30])
    knobs = {"fetch_ratio": "auto", "fetch_bytes": 6 * BYTES}
    host, resident = (
        generate(model, inputs, OasisCache(model, budget=80, store=store, **knobs), max_new_tokens=20)
        for store in ("host", "resident")
    )
    assert all(torch.equal(a, b) for a, b in zip(host.logits, resident.logits, strict=True))
    dense = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=20)
    whole = generate(model, inputs, OasisCache(model, budget=160, **knobs), max_new_tokens=20)
    assert torch.equal(dense.sequences, whole.sequences)


def test_a_row_that_is_left_out_finds_its_promises_again():
    cache = OasisCache(tiny("llama"), budget=80, fetch_ratio="auto", fetch_bytes=6 * BYTES)
    steps(cache, left_padded([300, 200]), 10, 6 * BYTES)
    rows, before = cache.state.rows, cache.state.shares.gains[:, 1].clone()
    with torch.no_grad(), rows.pacing(cache.device):
        rows.leave_out(torch.tensor([True, False]))
        cache.model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache)
    assert torch.equal(cache.state.shares.gains[:, 1], before) and before.max() > 0


def test_wrong_budgets():
    with pytest.raises(ConfigError, match="fetch_ratio='auto' is not allowed: use a number, or reduction='softmax-me"):
        OasisConfig(fetch_ratio="auto", reduction="max")
    with pytest.raises(ConfigError, match="fetch_bytes=4096 is not allowed: use None, or fetch_ratio='auto'"):
        OasisConfig(fetch_bytes=4096)
    cache = OasisCache(tiny("llama"), fetch_ratio="auto", fetch_bytes=BYTES - 1)
    with pytest.raises(ConfigError, match="fetch_bytes=2047 is not allowed: use at least 2,048 bytes, one block"):
        cache.model(input_ids=prompt(1, 9), past_key_values=cache)


class Clock:
    """A device that is done with each step `seconds` after it began, and events that tell when they were reached."""

    now = 0.0

    def __init__(self):
        self.at = None

    def record(self):
        self.at = Clock.now

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_the_pace_settles_below_what_the_link_carries():
    """However long a step waits for what it moves, and whatever the host does between two steps."""
    rate, compute = 1e6, 0.01
    made = Shares(2, 1, 2, 64, 4, 100, torch.device("cpu"))
    pace = Pace(rate, 100, Clock)
    for first in (1, 100_000):  # far too little, far too much
        made.allow(first)
        for step in range(60):
            pace.begin(made)
            waits = max(compute, int(made.budget) * 100 / rate)
            Clock.now += waits + (5.0 if step % 6 == 0 else 0.0)
        assert int(made.budget) == pytest.approx(0.8 * rate * compute / 100, abs=1)
    pace.again().begin(made)  # knows nothing yet, and leaves what there is
    assert int(made.budget) == pytest.approx(80, abs=1)


def test_layers_on_several_devices_are_refused_when_the_cache_is_made(monkeypatch):
    places = [torch.device("cuda", n) for n in (0, 1, 1, 1)]
    monkeypatch.setattr(cache_module, "layer_devices", lambda model: places[: len(model.model.layers)])
    with pytest.raises(ConfigError, match=r"fetch_ratio='auto' .* on several \(cuda:0, cuda:1\): use a number"):
        OasisCache(tiny("llama"), fetch_ratio="auto")
    OasisCache(tiny("llama"), fetch_ratio=0.1)
    OasisCache(tiny("gemma3"), fetch_ratio="auto")  # the layers that fetch are on one
