"""What decides between a replay and an eager step; that a replay is the step itself is shown in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from test_generate import generate
from tiny import prompt, tiny

from oasis_hf import OasisCache, graphs


@pytest.fixture
def cache():
    cache = OasisCache(tiny("llama"), budget=64)
    generate(tiny("llama"), prompt(1, 100), cache, max_new_tokens=4)
    return cache


class Played:
    """Stands for a CUDA graph: says how often it was replayed."""

    def __init__(self):
        self.count = 0

    def replay(self):
        self.count += 1


@pytest.fixture
def captures(monkeypatch, cache):
    """Captures without CUDA: the inputs' copies and a marked output."""
    made = []

    def capture(self, cache, forward, call, step, key):
        output = (torch.full((1, 1, 3), float(len(made))),)
        one = graphs.Captured(
            key, Played(), call["input_ids"].clone(), call["position_ids"].clone(), step.weights, call, step, output
        )
        made.append(one)
        self.captures += 1
        return one

    monkeypatch.setattr(graphs.StepGraphs, "_capture", capture)
    monkeypatch.setattr(graphs.StepGraphs, "_refuses", lambda *args: None)
    # Without CUDA a step run as it is rebinds the recent queries: not an address here.
    monkeypatch.setattr(graphs, "_addresses", lambda cache: cache.fake_address)
    cache.fake_address = 1
    return made


def call(token=5, rows=1):
    ids = torch.full((rows, 1), token)
    return {"input_ids": ids, "position_ids": ids + 10, "attention_mask": None}


def step(weights=None, drafts=0):
    return graphs.Step("decode", 1, 1, [3], 3, drafts, weights=weights)


def run(cache, arguments, one):
    eager = []
    out = cache.graphs.run(cache, lambda *args: eager.append(args) or "eager", arguments, one, "past_key_values")
    return out, bool(eager)


def test_a_shape_is_captured_after_it_ran_twice_and_then_replayed_with_new_inputs(cache, captures):
    weights = torch.tensor([[0.0, 1.0]])
    assert [run(cache, call(), step(weights.clone()))[1] for _ in range(2)] == [True, True]
    out, eager = run(cache, call(6), step(weights.clone()))
    assert not eager and len(captures) == 1 and captures[0].graph.count == 1
    out, eager = run(cache, call(7), step(weights * 2))
    assert not eager and len(captures) == 1 and captures[0].graph.count == 2 and cache.graphs.replays == 2
    assert captures[0].ids.tolist() == [[7]] and captures[0].positions.tolist() == [[17]]
    assert captures[0].weights.tolist() == [[0.0, 2.0]]
    # The caller keeps what it was given, whatever the next replay writes.
    captures[0].output[0].fill_(99)
    assert out[0].tolist() == [[[0.0] * 3]]


def test_another_address_or_shape_is_another_graph(cache, captures):
    for _ in range(4):
        run(cache, call(), step())
    cache.fake_address = 2
    run(cache, call(), step())
    assert len(captures) == 2 and len(cache.graphs.captured) == 1
    assert [run(cache, call(rows=2), step())[1] for _ in range(3)] == [True, True, False]
    assert len(captures) == 3 and len(cache.graphs.captured) == 2
    cache.graphs.forget()
    assert run(cache, call(), step())[1]


def test_a_failed_capture_runs_the_step_and_is_not_tried_again(cache, captures, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("operation not permitted\nmore words")

    monkeypatch.setattr(graphs.StepGraphs, "_capture", fail)
    monkeypatch.setattr(graphs.StepGraphs, "_refuses", lambda self, *args: self._broken)
    assert [run(cache, call(), step())[1] for _ in range(4)] == [True] * 4
    assert "could not be captured (operation not permitted)" in caplog.text
    assert cache.graphs.captures == 0


def test_reasons_for_an_eager_step(cache):
    assert cache.graphs.replays == 0 and cache.graphs.refused == "the model is not on a CUDA device"
    quiet = OasisCache(tiny("llama"), budget=64, graphs=False)
    generate(tiny("llama"), prompt(1, 100), quiet, max_new_tokens=3)
    assert quiet.graphs.refused == "graphs=False"


def test_addresses_change_when_something_is_made_anew(cache):
    before = graphs._addresses(cache)
    assert before == graphs._addresses(cache)
    layer = cache.sparse_layers[0]
    layer.summaries.ensure(layer.summaries.vectors.shape[2] + 5)
    after = graphs._addresses(cache)
    assert before != after and len(before) == len(after)
    cache.batch_repeat_interleave(2)
    assert graphs._addresses(cache) != after
