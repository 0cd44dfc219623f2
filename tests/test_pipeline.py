"""What waits for what in a captured step, by streams that write down their order."""

from __future__ import annotations

import contextlib

import pytest
import torch

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


def test_a_step_s_order(pipeline):
    say = pipeline.say
    pipeline.begin({2: lambda: say("late 2"), 3: lambda: say("late 3")})
    for layer in range(4):
        pipeline.arrive(layer)
        say(f"attend {layer}")
        with pipeline.beside():
            say(f"select {layer}")
        if layer < 2:
            pipeline.send(lambda layer=layer: say(f"gather {layer}"))
    pipeline.join()
    order = {entry: place for place, entry in enumerate(LOG)}
    assert LOG[0] == ("transfer", "waits for model") and LOG[1] == ("transfer", "late 2")
    # A layer whose blocks come late waits for its own transfer only.
    assert order["model", "waits for late 2"] < order["model", "attend 2"] < order["model", "waits for late 3"]
    assert ("model", "waits for late 0") not in order
    for layer in range(4):
        assert LOG[order["predict", f"select {layer}"] - 1] == ("predict", "waits for model")
        assert order["model", f"attend {layer}"] < order["predict", f"select {layer}"]
    for layer in range(2):
        before = LOG[order["transfer", f"gather {layer}"] - 1]
        assert before == ("transfer", "waits for predict")
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
    pipeline.begin({})
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


def test_what_a_failed_capture_left_is_forgotten(pipeline):
    pipeline.begin({1: lambda: None})
    with pipeline.beside(torch.zeros(1)):
        pass
    pipeline.forget()
    LOG.clear()
    pipeline.arrive(1)
    pipeline.join()
    assert LOG == []
