"""A batch that stays dense is what `DynamicCache` gives; one that has turned is what a sparse one gives from there."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from matrix import dense, feed, read
from test_generate import assert_same, generate
from tiny import FAMILIES, left_padded, prompt, tiny

import oasis_hf
from oasis_hf import ConfigError, OasisCache, PrefixStore, from_dense, gpu_bytes, sparsify, steptimes
from oasis_hf.roofline.hardware import here
from oasis_hf.sparsify import Sparsity
from oasis_hf.steptimes import DENSE, SPARSE, Line

pytestmark = pytest.mark.core
families = pytest.mark.parametrize("family", FAMILIES)
KNOBS = [
    {}, {"lookahead": "previous"}, {"lookahead": "on_demand"}, {"seed": 5, "sink_blocks": 1},
    {"lookahead": "smoothed", "summary_dtype": "model", "tokens_per_summary": 4},
]  # fmt: skip
NEVER = {"sparsify": "never", "budget": 48}


def moved(cache):
    return int(cache.stats()["bytes"].sum())


# -- dense ------------------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=["plain", "speculate"])
def test_a_dense_batch_gives_what_a_dynamic_cache_does(family, knobs):
    model, made = tiny(family), []

    def make():
        made.append(OasisCache(model, **NEVER, **knobs))
        return made[-1]

    assert_same(model, left_padded([121, 60, 133]), make, max_new_tokens=20)
    if made[0].state.sparse_layers:
        assert moved(made[0]) == 0 and made[0].state.dense
        assert all(layer.working_set.allocated >= 9 for layer in made[0].sparse_layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_everything_that_happens_to_a_dense_batch(family):
    """Chunks, turns, crop, branches, beams, new rows."""
    model = tiny(family)
    make = lambda: OasisCache(model, **NEVER)  # noqa: E731
    assert_same(model, left_padded([101, 60, 84]), make, max_new_tokens=4, prefill_chunk_size=23)
    assert_same(model, prompt(2, 117), make, max_new_tokens=6, num_beams=3)
    ids, last = prompt(2, 200), []
    for cache in (OasisCache(model), make()):  # the first has a budget beyond all of it
        read(model, cache, ids[:, :100])
        feed(model, cache, ids[:, 100:120])
        branch = copy.deepcopy(cache)
        cache.crop(-7)
        read(model, cache, ids[:, 113:150])
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        last.append((feed(model, cache, ids[[1, 1, 0, 0], 150:160]), feed(model, branch, ids[:, 120:124])))
    for a, b in zip(*last):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_rows_of_our_own_loop_go_on_at_their_own_length_while_dense():
    model, inputs = tiny("llama"), left_padded([121, 60, 133])
    want = model.generate(**inputs, past_key_values=dense(model), max_new_tokens=20, do_sample=False)
    for more in ({}, {"verify": "full", "full_drafts": 3}):
        cache = OasisCache(model, **NEVER, speculate=not more)
        got = oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=20, do_sample=False, **more)
        assert torch.equal(got, want)


# -- turned -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, knobs",
    [*((name, {}) for name in FAMILIES if name not in ("mistral", "llama")), *(("llama", knobs) for knobs in KNOBS)],
    ids=str,
)
def test_from_its_turn_on_it_is_what_a_sparse_batch_gives(family, knobs):
    """Not only the first selection: ties between equally old victims too."""
    model, ids = tiny(family), prompt(2, 250, seed=3)
    turned, sparse = (OasisCache(model, budget=80, sparsify=how, **knobs) for how in ("never", "always"))
    read(model, turned, ids[:, :150])
    feed(model, turned, ids[:, 150:189])
    sparsify.turn(turned, "asked")
    read(model, sparse, ids[:, :189])
    for at in range(189, 210):
        torch.testing.assert_close(
            feed(model, turned, ids[:, at : at + 1]), feed(model, sparse, ids[:, at : at + 1]), atol=1e-4, rtol=0
        )
    first = int(sparse.stats()["first"].sum())
    assert int(turned.stats()["first"].sum()) == 0, "what stays was on the device already"
    assert first > 0 or knobs.get("lookahead") == "on_demand"
    assert {layer.working_set.allocated for layer in turned.sparse_layers} == {5}
    # Back to where it was dense, and elsewhere.
    for cache in (turned, sparse):
        cache.crop(-25)
        cache.reorder_cache(torch.tensor([1, 0]))
        read(model, cache, ids[:, 60:90])
    a, b = (feed(model, copy.deepcopy(cache), ids[:, :20]) for cache in (turned, sparse))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@contextlib.contextmanager
def turning(monkeypatch, *numbers):
    """Batches turn before those of their forwards."""
    with monkeypatch.context() as patch:
        patch.setattr(sparsify, "fits", lambda *args: True)
        patch.setattr(Sparsity, "turn_for", lambda self, state, *rest: "asked" if state.number in numbers else None)
        yield


@families
@pytest.mark.parametrize(
    "numbers, knobs", [((9,), {}), ((6, 7), {"speculate": True, "draft_tokens": 2})], ids=["turns", "goes back"]
)
def test_a_turn_with_room_for_all_changes_no_token(family, numbers, knobs, monkeypatch):
    model = tiny(family)
    make = lambda: OasisCache(model, budget=400, sparsify="auto", **knobs)  # noqa: E731
    with turning(monkeypatch, *numbers):
        assert_same(model, left_padded([121, 60, 133]), make, max_new_tokens=16)
        if family in ("llama", "gemma3"):
            assert_same(model, prompt(1, 77), make, max_new_tokens=10, num_beams=3)


def test_verified_tokens_are_dense_ones_across_a_turn(monkeypatch):
    model, ids = tiny("llama"), prompt(1, 112)
    want = model.generate(ids, past_key_values=dense(model), max_new_tokens=30, do_sample=False)
    with turning(monkeypatch, 10):
        cache = OasisCache(model, budget=48, sparsify="auto")
        how = dict(max_new_tokens=30, do_sample=False, verify="full", full_drafts=3)
        assert torch.equal(oasis_hf.generate(model, ids, past_key_values=cache, **how), want)
    assert cache.state.sparsity.turns == 1 and not cache.state.dense


def test_going_back_brings_every_block():
    model, ids = tiny("qwen3"), prompt(2, 200)
    cache, never = OasisCache(model, budget=48, sparsify="never"), dense(model)
    for one in (cache, never):
        read(model, one, ids[:, :150])
    sparsify.turn(cache, "asked")
    cache.first_select()
    sparsify.turn(cache, "asked")
    assert cache.state.lacks
    torch.testing.assert_close(feed(model, cache, ids[:, 150:]), feed(model, never, ids[:, 150:]), atol=1e-4, rtol=0)
    assert moved(cache) > 0 and not cache.state.lacks


# -- prompts that were read before ------------------------------------------------------------------------------------


def test_a_batch_begins_dense_from_a_prefix_and_from_a_dynamic_cache():
    model, ids = tiny("llama"), prompt(1, 160)
    want = generate(model, ids, dense(model), max_new_tokens=12).sequences
    prefixes = PrefixStore(model, host_bytes=1 << 24, **NEVER)
    for _ in range(2):
        assert torch.equal(generate(model, ids, prefixes.cache(), max_new_tokens=12).sequences, want)
    assert prefixes.hits > 100
    past = dense(model)
    read(model, past, ids[:, :-8])
    cache = from_dense(model, past, input_ids=ids[:, :-8], **NEVER)
    assert torch.equal(generate(model, ids, cache, max_new_tokens=12).sequences, want)


def test_a_row_that_just_fills_the_slots_keeps_all_blocks_when_it_turns():
    """Also where more slots are there, which a replayed step makes ahead."""
    model, ids = tiny("llama"), prompt(1, 48)
    cache = OasisCache(model, budget=48, sparsify="auto")
    read(model, cache, ids)
    cache.sparse_layers[0].working_set.ensure(8)
    sparsify.turn(cache, "asked")
    cache.first_select()
    assert [layer.working_set.allocated for layer in cache.sparse_layers] == [3, 3, 3] and moved(cache) == 0


def test_reset_begins_anew():
    model, ids = tiny("llama"), prompt(2, 120)
    cache = OasisCache(model, **NEVER)
    want = generate(model, ids, dense(model), max_new_tokens=8).sequences
    generate(model, ids, cache, max_new_tokens=8)
    sparsify.turn(cache, "asked")
    cache.reset()
    assert torch.equal(generate(model, ids, cache, max_new_tokens=8).sequences, want) and cache.state.dense


# -- memory -----------------------------------------------------------------------------------------------------------


def slot_bytes(cache):
    layer = cache.sparse_layers[0].working_set
    return cache.state.sparse_layers * layer.table.shape[0] * layer.table.shape[1] * cache.state.block_bytes


def test_a_batch_turns_before_its_slots_would_not_fit(monkeypatch):
    model, ids, free = tiny("llama"), prompt(2, 120), [1 << 40]
    monkeypatch.setattr(sparsify, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(steptimes.StepTimes, "pays", lambda *args: False)
    cache = OasisCache(model, budget=48, sparsify="auto")
    read(model, cache, ids)
    feed(model, cache, ids[:, :30])
    held = cache.sparse_layers[0].working_set.allocated
    assert cache.state.dense and held >= 10
    free[0] = 10 * slot_bytes(cache)  # less than the next growth, which doubles so few
    feed(model, cache, ids[:, : 16 * held - 150])
    assert cache.state.dense
    feed(model, cache, ids[:, :1])
    assert not cache.state.dense and cache.sparse_layers[0].working_set.allocated == 3
    assert cache.state.sparsity.why == f"the device has no room for all blocks of {2 * (16 * held + 1):,} tokens"
    assert "no room for all blocks" in " ".join(cache.report().split())
    cache.reset()  # a prompt that does not fit is sparse from the start, and one that does is dense again
    read(model, cache, prompt(2, 400))
    assert not cache.state.dense
    free[0] = 1 << 40
    cache.reset()
    read(model, cache, ids)
    assert cache.state.dense
    cache.reset()
    read(model, cache, prompt(2, 1200))
    free[0] = 0
    cache.reset()
    read(model, cache, ids)
    assert cache.state.dense, "the slots that it needs are there"
    read(model, cache, prompt(2, 1200))  # the second turn
    assert not cache.state.dense and cache.sparse_layers[0].working_set.allocated == 3


def test_what_a_replayed_step_makes_ready_for_the_next_leaves_that_room_too(monkeypatch):
    model, free = tiny("llama"), [1 << 40]
    monkeypatch.setattr(sparsify, "free_bytes", lambda device: free[0])
    cache = OasisCache(model, budget=48, sparsify="auto")
    read(model, cache, prompt(1, 128))
    layer = cache.sparse_layers[0]
    assert layer.working_set.allocated == 8
    free[0] = 0
    cache.prepare_ahead(0)
    assert layer.working_set.allocated == 8 and cache.state.ready is None
    free[0] = 1 << 40
    cache.prepare_ahead(0)
    assert layer.working_set.allocated == 16


def test_never_is_refused_by_nothing_but_memory(monkeypatch):
    monkeypatch.setattr(sparsify, "free_bytes", lambda device: 0)
    cache = OasisCache(tiny("llama"), **NEVER)
    read(cache.model, cache, prompt(1, 120))
    feed(cache.model, cache, prompt(1, 30))
    assert cache.state.dense and cache.state.sparsity.turns == 0


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Steps take what `clock[kind]` says of their number of tokens; nothing is known of any model."""
    takes = {}
    monkeypatch.setattr(sparsify, "_times", type(sparsify._times)())

    class Stamp:
        def __init__(self, ms):
            self.ms = ms

        def query(self):
            return True

        def elapsed_time(self, other):
            return other.ms

    @contextlib.contextmanager
    def between(spans, on_gpu):
        yield
        spans.append((Stamp(0), Stamp(takes["now"]())))

    monkeypatch.setattr(sparsify, "between", between)
    return takes


def live(model, takes, tokens=120, rows=2, cache=None, new=60):
    cache = cache or OasisCache(model, budget=48, sparsify="auto")
    takes["now"] = lambda: takes[DENSE if cache.state.dense else SPARSE](sum(cache.state.rows.tokens))
    read(model, cache, prompt(rows, tokens))
    feed(model, cache, prompt(rows, new))
    return cache


def test_a_batch_stays_dense_while_that_is_the_faster(clock):
    """By a CPU's bandwidths a tiny model's attention takes next to nothing: what a step took is all weights."""
    clock.update({DENSE: lambda tokens: 10.0, SPARSE: lambda tokens: 12.0})
    cache = live(tiny("llama"), clock)
    assert cache.state.dense and cache.state.sparsity.turns == 0


def test_a_batch_turns_when_attention_takes_long_and_the_next_one_knows(clock):
    model = tiny("llama")
    slope = OasisCache(model, budget=48, sparsify="auto").state.sparsity.times.expected.slope(DENSE)
    clock.update({DENSE: lambda tokens: slope * tokens + 1e-4, SPARSE: lambda tokens: 50 * slope + 1e-4})
    cache = live(model, clock)
    assert not cache.state.dense and cache.state.sparsity.turns == 1
    assert "ms a step against" in cache.state.sparsity.why
    other = live(model, clock, new=3)
    assert not other.state.dense and other.state.sparsity.turns == 0, "it is sparse from its prompt on"
    assert live(model, clock, tokens=30, new=3).state.dense, "where a context is short nothing is lost"


def test_a_batch_that_lost_by_its_turn_goes_back_once_and_the_next_one_stays(clock):
    model = tiny("llama")
    slope = OasisCache(model, budget=48, sparsify="auto").state.sparsity.times.expected.slope(DENSE)
    clock.update({DENSE: lambda tokens: slope * tokens, SPARSE: lambda tokens: 3 * slope * tokens})
    cache = live(model, clock, new=80)
    assert cache.state.dense and cache.state.sparsity.turns == 2
    assert live(model, clock, new=80).state.sparsity.turns == 0


def test_what_going_back_costs_must_come_in_again(clock, monkeypatch):
    """Over a link so slow that no request lasts as long."""
    model = tiny("llama")
    times = OasisCache(model, budget=48, sparsify="auto").state.sparsity.times
    slope, hardware = times.expected.slope(DENSE), times.expected.hardware
    times.expected = dataclasses.replace(times.expected, hardware=dataclasses.replace(hardware, link=1.0))
    monkeypatch.setattr(steptimes.StepTimes, "pays", lambda self, rows, tokens: self.timed(DENSE, rows))
    clock.update({DENSE: lambda tokens: slope * tokens, SPARSE: lambda tokens: 3 * slope * tokens})
    cache = live(model, clock, new=80)
    assert not cache.state.dense and cache.state.sparsity.turns == 1


def test_a_line_learns_its_slope_where_there_is_one_to_see():
    near, far = Line(1.0), Line(1.0)
    for at in range(8):
        near.learn(1000 + at, 500.0 + at * 30)  # noise over a narrow range
        far.learn(1000 + 1000 * at, 500.0 + 0.25 * 1000 * at)
    assert near.at(2000) - near.at(1000) == pytest.approx(1000, rel=0.05)
    assert far.at(8000) == pytest.approx(500 + 0.25 * 7000, rel=0.08)
    flat = Line(-5.0)
    flat.learn(10, 3.0)
    assert flat.at(1000) == 3.0


def test_rows_that_were_never_timed_are_scaled_from_those_that_were():
    times = OasisCache(tiny("qwen3_moe"), budget=48, sparsify="auto").state.sparsity.times
    times = steptimes.StepTimes(times.expected)
    assert not times.pays(4, 10**9), "nothing was timed"
    for tokens in (4000, 4100):
        times.learn(DENSE, 4, tokens, 2 * times.expected.ms(DENSE, 4, tokens))
    assert times.ms(DENSE, 8, 9000) == pytest.approx(2 * times.expected.ms(DENSE, 8, 9000), rel=0.01)
    assert times.ms(SPARSE, 4, 10**7) < times.ms(DENSE, 4, 10**7) and times.pays(4, 10**7)
    times.learn(SPARSE, 4, 4000, 1.0)
    assert times.ms(SPARSE, 2, 4000) < 1.0 < times.ms(SPARSE, 8, 4000)


@pytest.mark.parametrize(
    "name, known",
    [("NVIDIA H200", "h200-measured"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA A100-SXM4-80GB", "a100"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA T4", "NVIDIA T4")],
)  # fmt: skip
def test_a_card_is_known_by_its_name_or_by_its_memory(name, known, monkeypatch):
    card = SimpleNamespace(name=name, total_memory=1 << 34, memory_clock_rate=5_001_000, memory_bus_width=256)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = here(torch.device("cuda"))
    assert found.name == known and (known != name or found.hbm == pytest.approx(320e9, rel=0.01))
    assert here(torch.device("cpu")).name == "cpu"


def test_steps_that_set_themselves_up_are_not_learnt_from(clock):
    clock.update({DENSE: lambda tokens: 1.0, SPARSE: lambda tokens: 1.0})
    cache = live(tiny("llama"), clock, new=sparsify.SETTLE + sparsify.GROUP)
    sparsity = cache.state.sparsity
    sparsity.collect()
    assert sparsity.times.timed(DENSE, 2) and not sparsity._group


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{"budget_bytes": 1 << 20}, {"store": "resident"}], ids=str)
def test_knobs_that_do_not_go_together(knobs):
    with pytest.raises(ConfigError, match=r"sparsify='auto' is not allowed: use 'always' with budget_bytes or store="):
        OasisCache(tiny("llama"), sparsify="auto", **knobs)


def test_a_batch_that_may_be_either_has_no_one_size():
    with pytest.raises(ConfigError, match="sparsify='auto' takes as much memory as there is: leave it out"):
        gpu_bytes(tiny("llama"), "oasis", 48, 100, sparsify="auto")


def test_ranks_do_not_decide_each_for_itself(monkeypatch):
    monkeypatch.setattr(sparsify.parallel, "size", lambda model: 2)
    with pytest.raises(ConfigError, match="sparsify='auto' decides by times, which 2 tensor-parallel ranks measure"):
        Sparsity.of(tiny("llama"), OasisCache(tiny("llama")).state.config.replace(sparsify="auto"), None)


def test_auto_needs_one_device(monkeypatch):
    monkeypatch.setattr(sparsify, "layer_devices", lambda model: [torch.device("cuda", n) for n in (0, 1, 1)])
    with pytest.raises(ConfigError, match="one device's memory and times, and this model's layers are on several"):
        OasisCache(tiny("llama"), sparsify="auto")
    OasisCache(tiny("llama"), sparsify="never")
