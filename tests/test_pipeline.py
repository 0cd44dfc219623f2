"""What waits for what in a captured step, by streams that write down their order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import oasis_hf.pipeline
from oasis_hf.pipeline import Pipeline

LOG: list[tuple[str, str]] = []


class Stream:
    def __init__(self, device=None, name=None):
        self.name = name or f"side{sum(entry == ('new', 'stream') for entry in LOG)}"
        if name is None:
            LOG.append(("new", "stream"))

    def wait_stream(self, other):
        LOG.append((self.name, f"waits for {other.name}"))

    def wait_event(self, event):
        LOG.append((self.name, f"waits for {event.what}"))


class Event:
    what = ""

    def record(self, stream):
        self.what = next(what for name, what in reversed(LOG) if name == stream.name)


@pytest.fixture
def pipeline(monkeypatch):
    LOG.clear()
    current = [Stream(name="model")]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    pipeline = Pipeline(torch.device("cpu"))
    pipeline.predict.name, pipeline.transfer.name = "predict", "transfer"
    pipeline.say = lambda what: LOG.append((current[-1].name, what))
    LOG.clear()
    return pipeline


def test_a_step_s_order(pipeline, monkeypatch):
    monkeypatch.setattr(oasis_hf.pipeline, "TOGETHER", 3)
    say = pipeline.say
    late = range(4, 8)  # more than one launch moves, as are those before
    store = SimpleNamespace(gather_layers=lambda moves: say(f"gather {moves}"))
    pipeline.begin(store, [(layer,) for layer in late])
    for layer in range(8):
        pipeline.arrive(layer)
        say(f"attend {layer}")
        with pipeline.beside():
            say(f"select {layer}")
        pipeline.send(None if layer in late else (layer,))
    pipeline.join()
    order = {entry: place for place, entry in enumerate(LOG)}
    launches = [what for stream, what in LOG if stream == "transfer" and what.startswith("gather")]
    assert launches == [f"gather {moves}" for moves in (
        [(4,), (5,), (6,)], [(7,)], [(0,), (1,), (2,)], [(3,)],
    )]  # fmt: skip
    assert LOG[:2] == [("transfer", "waits for model"), ("transfer", launches[0])]
    # A layer whose blocks come late waits for the launch that brings them, and for no later one.
    waits = [order["model", f"waits for {launch}"] for launch in launches[:2]]
    assert waits[0] < order["model", "attend 4"] < order["model", "attend 6"] < waits[1] < order["model", "attend 7"]
    assert all(("model", f"waits for {launch}") not in order for launch in launches[2:])
    for layer in range(8):
        assert LOG[order["predict", f"select {layer}"] - 1] == ("predict", "waits for model")
        assert order["model", f"attend {layer}"] < order["predict", f"select {layer}"]
    for launch, last in ((launches[2], 2), (launches[3], 4)):  # nothing of a step waits for its end
        assert LOG[order["transfer", launch] - 1] == ("transfer", "waits for predict")
        assert order["predict", f"select {last}"] < order["transfer", launch] < order["model", f"attend {last + 1}"]
    assert LOG[-2:] == [("model", "waits for transfer"), ("model", "waits for predict")] or LOG[-2:] == [
        ("model", "waits for predict"), ("model", "waits for transfer"),
    ]  # fmt: skip


def test_lengths_may_change_once_all_is_predicted(pipeline):
    with pipeline.beside():
        pipeline.say("append")
    pipeline.predicted()
    pipeline.say("lengths")
    assert LOG == [
        ("predict", "waits for model"), ("predict", "append"), ("model", "waits for predict"), ("model", "lengths"),
    ]  # fmt: skip


def test_a_step_that_does_nothing_beside_waits_for_nothing(pipeline):
    pipeline.begin(None, [])
    pipeline.arrive(0)
    pipeline.predicted()
    pipeline.join()
    assert LOG == []


def test_what_is_used_beside_is_held_until_the_join(pipeline):
    tensor = torch.zeros(1)
    with pipeline.beside(tensor):
        pass
    assert any(held is tensor for held in pipeline._held)
    pipeline.join()
    assert not pipeline._held


def test_a_failed_capture_sends_nothing_more(pipeline):
    pipeline.begin(SimpleNamespace(gather_layers=lambda moves: pipeline.say("gather")), [])
    with pipeline.beside():
        pipeline.send((0,))
    pipeline.drop()
    pipeline.join()
    assert all(what != "gather" for _, what in LOG)


def test_what_a_failed_capture_left_is_forgotten(pipeline):
    pipeline.begin(SimpleNamespace(gather_layers=lambda moves: None), [(1,)])
    pipeline.send((0,))
    with pipeline.beside(torch.zeros(1)):
        pass
    pipeline.forget()
    LOG.clear()
    pipeline.arrive(1)
    pipeline.join()
    assert LOG == []
