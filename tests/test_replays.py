"""Replays without CUDA: a captured step is run again with all that the host knew when it was captured, and only what
stands in its tensors is new. What holds here holds of a graph, but for the order of streams."""

from __future__ import annotations

import copy

import pytest
import torch
from test_graphs import Fake, collects, fake_cuda  # noqa: F401
from tiny import left_padded, prompt, tiny

import oasis_hf
from oasis_hf import HostMemoryError, OasisCache, OracleDrafter
from oasis_hf.accepting import Accepting
from oasis_hf.config import BLOCK
from oasis_hf.graphs import StepGraphs, _place, _same
from oasis_hf.layers import OasisLayer
from oasis_hf.store import HostStore, pages
from oasis_hf.summaries import Summaries
from oasis_hf.text import Chosen


class Again:
    """Stands for a CUDA graph."""

    def __init__(self, graphs, cache, forward, one, name):
        self.parts = graphs, cache, forward, one, name
        self.captured = True  # the stand-in for a capture has run the step already

    def replay(self):
        graphs, cache, forward, one, name = self.parts
        if self.captured:
            self.captured = False
            return
        call, step, _ = one.held
        step._shared.clear()
        late = [layer.move for layer in cache.sparse_layers if layer.late and step.predicts]
        graphs._pipeline.begin(cache.state.store, late)
        output = forward({**call, name: cache}, step)
        graphs._pipeline.join()
        for key, value in output.items():
            if isinstance(value, torch.Tensor):
                one.output[key].copy_(value)


class Accepts:
    """Stands for the graph behind it: it commits, counts and tells in the tensors that it was captured with."""

    def __init__(self, have, cache, step, drafts):
        self.parts, self.count = (have, cache, step, drafts), 0

    def replay(self):
        have, cache, step, drafts = self.parts
        place = _place(cache)  # a graph would write where it was captured
        assert _same(step.place[: len(place)], place)
        chosen = have.run(cache, step, drafts)
        self.count += 1
        if chosen is not None:
            for name, value in vars(chosen).items():
                getattr(have.chosen, name).copy_(value)


@pytest.fixture
def replays(monkeypatch, fake_cuda):  # noqa: F811
    capture, append, capture_acceptance = StepGraphs._capture, OasisLayer._append, Accepting.capture

    def again(self, cache, forward, call, step, place, layers, name):
        one = capture(self, cache, forward, call, step, place, layers, name)
        one.graph = Again(self, cache, forward, one, name)
        return one

    def append_by_the_device(self, entry, lengths, tokens, age):
        """As the compiled operator does it: what opens or closes is told by lengths alone."""
        if self.state.step is None or self.state.step.pipeline is None:
            return append(self, entry, lengths, tokens, age)
        own = self.working_set
        slot, wasted = own.append_from_tail(entry, lengths, age, True)
        some = self.state.need_rows().taking is not None
        self.store.append(self.index, lengths, own.keys[:, :, entry], own.values[:, :, entry], some)
        self.counters.add("wasted", wasted.sum(0))
        closing = (lengths >= 0) & ((lengths + 1) % BLOCK == 0)
        self.summaries.close(own.slot_keys(slot), lengths // BLOCK, closing)

    def accept(self, cache, step, drafts):
        """What the real one runs before it captures."""
        with monkeypatch.context() as patch:
            patch.setattr(StepGraphs, "capture", lambda *args: (None, None))
            capture_acceptance(self, cache, step, drafts)
        if self.left is not None:
            self.chosen = Chosen(
                *(torch.zeros_like(one) for one in vars(self.verified(step, drafts, self.left > 0)).values())
            )
        self.graph = Accepts(self, cache, step, drafts)

    monkeypatch.setattr(Accepting, "capture", accept)
    monkeypatch.setattr(StepGraphs, "_capture", again)
    monkeypatch.setattr(OasisLayer, "_append", append_by_the_device)


@torch.no_grad()
def feed(cache, tokens):
    """Logits of steps fed by hand: tokens `[B, n]`."""
    out = []
    for at in range(tokens.shape[1]):
        position = torch.full((len(tokens), 1), cache.get_seq_length())
        out.append(cache.model(tokens[:, at : at + 1], position_ids=position, past_key_values=cache).logits)
    return torch.cat(out, 1)


@torch.no_grad()
def decode(cache, inputs, count):
    """Logits of `count` greedy steps."""
    model, mask = cache.model, inputs["attention_mask"]
    position = mask.cumsum(1) - 1
    out = [model(**inputs, position_ids=position.clamp(min=0), past_key_values=cache).logits[:, -1:]]
    at = position[:, -1:]
    for _ in range(count):
        at = at + 1
        out.append(model(out[-1].argmax(-1), position_ids=at, past_key_values=cache).logits)
    return torch.cat(out, 1)


def both(model, inputs, count=50, **knobs):
    eager, cache = (
        OasisCache(model, graphs=graphs, **{"budget": 64, "compile_after": None, **knobs}) for graphs in (False, True)
    )
    wanted, got = decode(eager, inputs, count), decode(cache, inputs, count)
    assert cache.graphs.refused is None and cache.graphs.replays > count // 3, cache.graphs.refused
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name
    return eager, cache


def inputs_of(lengths):
    inputs = left_padded(lengths)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    return inputs


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "mistral"])
def test_a_replay_is_the_eager_step(replays, family):
    both(tiny(family), inputs_of([100, 90, 61]))


@pytest.mark.parametrize(
    "knobs",
    [{"lookahead": "previous", "sink_blocks": 1}, {"lookahead": "on_demand"}, {"lookahead": "none"},
     {"lookahead": "previous", "correct_below": 0.1},
     {"lookahead": "previous", "correct_below": 1.0, "recent_blocks": 1},
     {"lookahead": {"draft": 1.0, "previous": 2.0}, "tokens_per_summary": 4}, {"seed": 3, "smooth_queries": 2},
     {"scorer": "minmax", "reduction": "max", "summary_dtype": "model"}, {"budget": 512},
     {"fetch_ratio": "auto", "fetch_bytes": 1 << 14}],
    ids=str,
)  # fmt: skip
def test_a_replay_is_the_eager_step_whatever_is_predicted(replays, knobs):
    both(tiny("llama"), inputs_of([100, 71]), **knobs)


def test_rows_grow_from_dense_to_sparse_through_replays(replays):
    both(tiny("llama"), inputs_of([50, 12]), count=120, budget=96)


def test_a_drafter_outside_the_graph(replays):
    ids = prompt(2, 200)
    model, inputs = tiny("llama"), {"input_ids": ids[:, :100], "attention_mask": torch.ones(2, 100, dtype=torch.int64)}
    outs = []
    for graphs in (False, True):
        cache = OasisCache(model, budget=64, graphs=graphs, drafter=OracleDrafter(ids))
        outs.append(decode(cache, inputs, 40))
    assert cache.graphs.replays > 10 and torch.equal(*outs)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_crop_and_go_on(replays, family):
    model = tiny(family)
    eager, cache = (OasisCache(model, budget=64, graphs=graphs) for graphs in (False, True))
    outs = []
    for each in (eager, cache):
        first = decode(each, inputs_of([100, 90]), 30)
        each.crop(-5)
        at = torch.full((2, 1), each.get_seq_length()) - torch.tensor([[0], [10]])
        with torch.no_grad():
            more = []
            for step in range(30):
                more.append(
                    model(first[:, step : step + 1].argmax(-1), position_ids=at + step, past_key_values=each).logits
                )
        outs.append(torch.cat(more, 1))
    assert cache.graphs.replays > 30 and torch.equal(*outs)
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_accepted_drafts_between_replays(replays, family):
    """Committed drafts change what the next replay finds."""
    model, text = tiny(family), prompt(2, 200)
    guess = text.clone()
    guess[:, 110::7] = (guess[:, 110::7] + 1) % 90 + 3  # drafts that are wrong
    outs, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(
            model, graphs=graphs, budget=64, speculate=True, draft_tokens=2, drafter=OracleDrafter(guess)
        )
        model(text[:, :100], past_key_values=cache)
        outs.append(feed(cache, text[:, 100:180]))
        caches.append(cache)
    eager, cache = caches
    assert torch.equal(*outs) and cache.stepper.skipped == eager.stepper.skipped > 20
    assert cache.graphs.replays > 15 and cache.graphs.captures <= 3
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())


# -- what a replayed step makes ready for the next ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [{}, {"drafter": "previous", "lookahead": "smoothed"}, {"candidates": 3},
     {"lookahead": "previous", "correct_below": 0.1, "reduction": "max"}],
    ids=str,
)  # fmt: skip
def test_rows_at_their_own_pace(replays, knobs):
    """`oasis_hf.generate`: rows that take no part, and a number of accepted drafts for each, between and in replays."""
    model, inputs = tiny("llama"), inputs_of([100, 90, 61])
    free = model.generate(**inputs, max_new_tokens=60, do_sample=False, eos_token_id=None)
    end = int(free[2, 100 + 40])
    caches, texts = [], []
    for graphs in (False, True):
        cache = OasisCache(model, graphs=graphs, budget=64, compile_after=None, speculate=True, draft_tokens=2, **knobs)
        texts.append(oasis_hf.generate(
            model, **inputs, past_key_values=cache, max_new_tokens=120, do_sample=False, eos_token_id=end,
            pad_token_id=0,
        ))  # fmt: skip
        caches.append(cache)
    eager, cache = caches
    assert cache.graphs.replays > 30 and cache.graphs.refused is None
    assert torch.equal(*texts) and len(set(cache.state.rows.tokens)) == 3
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name


def test_rows_that_open_blocks_at_a_replay_found_them_ready(replays, monkeypatch):
    """What is done before a replay is launched, the device waits for."""
    happened, ensure, replay = [], HostStore.ensure, Again.replay
    monkeypatch.setattr(HostStore, "ensure", lambda self, *args: happened.append("pages") or ensure(self, *args))
    monkeypatch.setattr(Again, "replay", lambda self: happened.append("replay") or replay(self))
    cache = OasisCache(tiny("llama"), budget=64, compile_after=None)
    decode(cache, inputs_of([100, 90, 61]), 10)
    happened.clear()
    blocks = list(cache.state.store.blocks)
    feed(cache, prompt(3, 40, 1))
    assert all(now >= before + 2 for now, before in zip(cache.state.store.blocks, blocks))
    assert happened.count("replay") == 40 and happened[0] == "replay" and 6 <= happened.count("pages") <= 9
    assert all(cache.state.store.blocks[row] == -(-(n + 1) // BLOCK) for row, n in enumerate(cache.state.rows.tokens))


AHEAD = {
    "nothing": lambda cache: cache,
    "crop": lambda cache: cache.crop(-1),
    "crop to a border": lambda cache: (feed(cache, prompt(2, 1, 7)), cache.crop(-1)),
    "crop over a border": lambda cache: cache.crop(-20),
    "other rows": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "one row twice": lambda cache: cache.reorder_cache(torch.tensor([0, 0])),
    "fewer and more rows": lambda cache: (
        cache.batch_select_indices(torch.tensor([1])),
        cache.batch_repeat_interleave(2),
    ),
    "a turn": lambda cache: cache.model(prompt(2, 20, 5), past_key_values=cache),
    "a turn of one row": lambda cache: cache.model(
        prompt(2, 20, 5), attention_mask=torch.tensor([[1], [0]]).expand(2, 20), past_key_values=cache
    ),
    "hidden tokens": lambda cache: cache.model(
        prompt(2, 1, 5), past_key_values=cache,
        attention_mask=torch.cat((torch.ones(2, 106), torch.zeros(2, 6), torch.ones(2, 1)), 1).long(),
    ),
    "a reset": lambda cache: (cache.reset(), cache.model(prompt(2, 90, 5), past_key_values=cache)),
    "a branch": lambda cache: copy.deepcopy(cache),
}  # fmt: skip


@pytest.mark.parametrize("what", AHEAD)
@torch.no_grad()
def test_whatever_comes_after_a_block_was_opened_ahead(replays, what):
    """Both rows stand at a border, and have a block more already."""
    model, ids = tiny("llama"), prompt(2, 100)
    outs, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(model, budget=64, graphs=graphs, compile_after=None)
        model(ids, past_key_values=cache)
        out = [feed(cache, prompt(2, 12, 1))]
        assert not graphs or cache.state.store.blocks == [8, 8]
        AHEAD[what](cache)
        out.append(feed(cache, prompt(2, 1, 2)))
        store, rows = cache.state.store, cache.state.rows.tokens
        assert all(have >= -(-n // BLOCK) for have, n in zip(store.blocks, rows))
        out.append(feed(cache, prompt(2, 36, 3)))
        outs.append(torch.cat(out, 1))
        caches.append(cache)
    assert torch.equal(*outs) and caches[1].graphs.replays > 24
    assert all(torch.equal(value, caches[1].stats()[name]) for name, value in caches[0].stats().items())


@torch.no_grad()
def test_branches_made_when_a_block_was_opened_ahead_go_their_own_ways(replays):
    model, ids = tiny("llama"), prompt(2, 100)
    outs = []
    for graphs in (False, True):
        cache = OasisCache(model, budget=64, graphs=graphs, compile_after=None)
        model(ids, past_key_values=cache)
        feed(cache, prompt(2, 12, 1))
        branch = copy.deepcopy(cache)
        out = []
        for first in range(0, 80, 8):  # in turns: each writes its own pages under the other's eyes
            out += [feed(each, prompt(2, 80, seed)[:, first : first + 8]) for each, seed in ((cache, 2), (branch, 3))]
        outs.append(torch.cat(out, 1))
        tables = [each.state.store.table for each in (cache, branch)]
        shared = set(tables[0][tables[0] >= 0].tolist()) & set(tables[1][tables[1] >= 0].tolist())
        assert len(shared) == 2 * 2 * 3 * 7
    assert torch.equal(*outs)


@torch.no_grad()
def test_rows_grow_to_exactly_the_capacity(replays):
    model, ids, tokens = tiny("llama"), prompt(2, 100), prompt(2, 12, 1)
    for capacity in (112, 110):  # at a border and within a block
        outs = []
        for graphs in (False, True):
            cache = OasisCache(model, budget=64, graphs=graphs, compile_after=None, host_capacity_tokens=capacity)
            model(ids, past_key_values=cache)
            outs.append(feed(cache, tokens[:, : capacity - 100]))
            with pytest.raises(HostMemoryError, match=f"A row would hold {capacity + 1} tokens"):
                feed(cache, tokens[:, :1])
            assert cache.get_seq_length() == capacity
            cache.crop(-3)
            outs[-1] = torch.cat((outs[-1], feed(cache, tokens[:, :3])), 1)
        assert cache.graphs.replays == capacity - 100 - 2 + 3 and torch.equal(*outs)


def out_of_host_memory(patch):
    patch.setattr(pages, "available_host_bytes", lambda: 0)
    return HostMemoryError


def out_of_device_memory(patch):
    ensure = Summaries.ensure

    def fails(self, blocks):
        if blocks > 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ensure(self, blocks)

    patch.setattr(Summaries, "ensure", fails)
    return torch.OutOfMemoryError


@pytest.mark.parametrize("lacks", [out_of_host_memory, out_of_device_memory])
@torch.no_grad()
def test_memory_that_is_lacking_is_told_by_the_step_that_needs_it(replays, monkeypatch, lacks):
    model, ids, tokens = tiny("llama"), prompt(2, 100), prompt(2, 60, 1)
    outs = []
    for graphs in (False, True):
        cache = OasisCache(model, budget=64, graphs=graphs, compile_after=None)
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch:
            error = lacks(patch)
            out = [feed(cache, tokens[:, :12])]
            assert cache.get_seq_length() == 112 and cache.state.store.blocks == [7, 7]
            with pytest.raises(error):
                feed(cache, tokens[:, 12:13])
        assert cache.get_seq_length() == 112
        out.append(feed(cache, tokens[:, 12:]))
        outs.append(torch.cat(out, 1))
    assert cache.graphs.replays > 40 and torch.equal(*outs)


@torch.no_grad()
def test_memory_that_is_there_again_when_a_step_needs_it_is_enough(replays, monkeypatch):
    model, ids, tokens = tiny("llama"), prompt(2, 100), prompt(2, 60, 1)
    outs = []
    for lacks in (None, out_of_host_memory, out_of_device_memory):
        cache = OasisCache(model, budget=64, graphs=lacks is not None, compile_after=None)
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch:
            if lacks is not None:
                lacks(patch)
            out = [feed(cache, tokens[:, :12])]
        outs.append(torch.cat((*out, feed(cache, tokens[:, 12:])), 1))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@torch.no_grad()
def test_an_interrupted_preparation_leaves_the_rows_as_they_were(replays, monkeypatch):
    model, ids, tokens = tiny("llama"), prompt(2, 100), prompt(2, 60, 1)
    cache = OasisCache(model, budget=64, compile_after=None)
    model(ids, past_key_values=cache)
    feed(cache, tokens[:, :11])
    with monkeypatch.context() as patch:
        patch.setattr(OasisLayer, "prepare", lambda self, count: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            feed(cache, tokens[:, 11:12])
    assert cache.get_seq_length() == 111 and cache.state.store.blocks == [7, 7] and cache.state.first_due
    assert feed(cache, tokens[:, 11:]).isfinite().all() and cache.graphs.replays > 40
