"""Replays without CUDA: a captured step is run again with all that the host knew when it was captured, and only what
stands in its tensors is new. What holds here holds of a graph, but for the order of streams."""

from __future__ import annotations

import pytest
import torch
from test_graphs import Fake, collects, fake_cuda  # noqa: F401
from tiny import left_padded, prompt, tiny

from oasis_hf import OasisCache, OracleDrafter
from oasis_hf.config import BLOCK
from oasis_hf.graphs import StepGraphs
from oasis_hf.layers import OasisLayer


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


@pytest.fixture
def replays(monkeypatch, fake_cuda):  # noqa: F811
    capture, append = StepGraphs._capture, OasisLayer._append

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
        self.store.append(self.index, lengths, own.keys[:, :, entry], own.values[:, :, entry])
        self.counters.add("wasted", wasted.sum(0))
        self.summaries.close(own.slot_keys(slot), lengths // BLOCK, (lengths + 1) % BLOCK == 0)

    monkeypatch.setattr(StepGraphs, "_capture", again)
    monkeypatch.setattr(OasisLayer, "_append", append_by_the_device)


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
     {"lookahead": {"draft": 1.0, "previous": 2.0}, "tokens_per_summary": 4}, {"seed": 3, "smooth_queries": 2},
     {"scorer": "minmax", "reduction": "max", "summary_dtype": "model"}, {"budget": 512}],
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
        logits = [
            model(text[:, at : at + 1], position_ids=torch.full((2, 1), at), past_key_values=cache).logits
            for at in range(100, 180)
        ]
        outs.append(torch.cat(logits, 1))
        caches.append(cache)
    eager, cache = caches
    assert torch.equal(*outs) and cache.stepper.skipped == eager.stepper.skipped > 20
    assert cache.graphs.replays > 15 and cache.graphs.captures <= 3
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())
