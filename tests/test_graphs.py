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


REFUSES = graphs.StepGraphs._refuses


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

    def capture(self, cache, forward, call, step, place, layers, name):
        output = {0: torch.full((1, 1, 3), float(len(made))), 1: graphs._CACHE}
        inputs = call["input_ids"].clone(), call["position_ids"].clone(), step.weights
        one = graphs.Captured(place, layers is not None, Played(), *inputs, tuple, output, [], step.tail, (step,))
        made.append(one)
        self.captures += 1
        return one

    monkeypatch.setattr(graphs.StepGraphs, "_capture", capture)
    monkeypatch.setattr(graphs.StepGraphs, "_refuses", lambda *args: None)
    # Without CUDA a step run as it is rebinds the recent queries: not an address here.
    monkeypatch.setattr(graphs, "_place", lambda cache: [cache.fake_address])
    monkeypatch.setattr(graphs, "cannot_hold", lambda cache: None)
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
    assert out[0].tolist() == [[[0.0] * 3]] and out[1] is cache


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


def test_a_cache_that_is_rearranged_at_every_step_is_left_alone(cache, captures, monkeypatch):
    monkeypatch.setattr(graphs.StepGraphs, "_refuses", REFUSES)
    monkeypatch.setattr(type(cache), "device", torch.device("cuda"))
    for address in range(20):
        cache.fake_address = address
        run(cache, call(), step())
    assert len(captures) == graphs.MOST_IDLE and "rearranged" in cache.graphs.refused
    cache.graphs.forget()  # other rows may be used in another way
    for _ in range(4):
        run(cache, call(), step())
    assert len(captures) == graphs.MOST_IDLE + 1 and cache.graphs.refused is None


def test_graphs_that_pay_are_made_again_and_again(cache, captures):
    for address in range(6):
        cache.fake_address = address
        for _ in range(graphs.FEW + 3):
            run(cache, call(), step())
    assert len(captures) == 6 and cache.graphs.refused is None


def test_a_hook_makes_steps_eager_and_its_end_lets_them_be_captured(cache, captures, monkeypatch):
    model = cache.model
    handle = model.model.layers[1].register_forward_hook(lambda *args: None)
    try:
        assert [run(cache, call(), step())[1] for _ in range(4)] == [True] * 4
        assert cache.graphs.refused == "model.layers.1 has a forward hook"
    finally:
        handle.remove()
    assert not run(cache, call(), step())[1] and cache.graphs.refused is None


def test_the_hooks_that_transformers_leaves_behind_do_not_count(cache, captures):
    cache.model(prompt(1, 5), output_hidden_states=True)
    assert graphs.hooked(cache.model) is None
    assert [run(cache, call(), step())[1] for _ in range(3)] == [True, True, False]


def test_a_hook_that_comes_later_is_another_address(cache):
    before = graphs._place(cache)
    handle = cache.model.register_forward_hook(lambda *args: None)
    handle.remove()
    assert not graphs._same(graphs._place(cache), before)


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


def test_the_place_changes_when_something_is_made_anew(cache):
    before = graphs._place(cache)
    assert graphs._same(before, graphs._place(cache))
    layer = cache.sparse_layers[0]
    layer.summaries.ensure(layer.summaries.vectors.shape[2] + 5)
    after = graphs._place(cache)
    assert not graphs._same(before, after) and len(before) == len(after)
    cache.batch_repeat_interleave(2)
    assert not graphs._same(graphs._place(cache), after)


class Fake:
    """CUDA's streams and graphs as far as a capture needs them; what is captured simply runs."""

    def __init__(self, device=None, priority=0):
        self.device, self.cuda_stream, self.calls = torch.device("cpu"), 7, []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name)


@pytest.fixture(autouse=True)
def collects():
    import gc

    yield
    gc.enable()


@pytest.fixture
def fake_cuda(monkeypatch):
    import contextlib

    for name in ("Stream", "CUDAGraph", "Event"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Fake)
    monkeypatch.setattr(graphs, "cannot_hold", lambda cache: None)
    real = graphs.StepGraphs._refuses

    def refuses(self, cache, *args):
        why = real(self, cache, *args)
        return None if why == "the model is not on a CUDA device" else why

    monkeypatch.setattr(graphs.StepGraphs, "_refuses", refuses)


def decode(cache, ids, count, **kwargs):
    """Logits of `count` steps fed by hand."""
    out = []
    with torch.no_grad():
        cache.model(ids, past_key_values=cache)
        for token in range(5, 5 + count):
            at = torch.full((len(ids), 1), cache.get_seq_length())
            out.append(cache.model(ids[:, :1] * 0 + token, past_key_values=cache, position_ids=at, **kwargs))
    return out


@pytest.mark.parametrize("knobs", [{}, {"lookahead": "previous"}, {"lookahead": "on_demand"}], ids=str)
@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_captured_step_does_what_the_eager_one_does(fake_cuda, knobs, as_tuple):
    import gc
    import weakref

    model, ids = tiny("llama"), prompt(2, 100)
    count = graphs.WARM + 1  # only this one is captured; what stands for its replay does nothing
    gc.disable()
    kwargs = {"return_dict": False} if as_tuple else {}
    eager = OasisCache(model, budget=64, graphs=False, **knobs)
    cache = OasisCache(model, budget=64, **knobs)
    wanted, got = decode(eager, ids, count, **kwargs), decode(cache, ids, count, **kwargs)
    assert cache.graphs.captures == cache.graphs.replays == 1 and cache.graphs.refused is None
    for a, b in zip(wanted, got):
        assert type(a) is type(b)
        if as_tuple:
            assert torch.equal(a[0], b[0]) and b[1] is cache
        else:
            assert torch.equal(a.logits, b.logits) and b.past_key_values is cache
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())
    assert cache.graphs.unfused is None
    del got, b
    gone = weakref.ref(cache)
    del cache
    assert gone() is None  # at once: nothing the graph keeps leads back to the cache


def steps(cache, ids, tokens):
    """Logits of eager steps fed by hand."""
    cache.graphs._broken = "told so"
    with torch.no_grad():
        return [
            cache.model(
                ids[:, :1] * 0 + token, past_key_values=cache,
                position_ids=torch.full((len(ids), 1), cache.get_seq_length()),
            ).logits
            for token in tokens
        ]  # fmt: skip


LATER = {
    "an eager step": lambda cache, ids: None,
    "crop": lambda cache, ids: cache.crop(-3),
    "other rows": lambda cache, ids: cache.reorder_cache(torch.tensor([1, 0])),
    "a turn": lambda cache, ids: cache.model(ids[:, :20], past_key_values=cache),
    "a reset": lambda cache, ids: (cache.reset(), cache.model(ids, past_key_values=cache)),
}


@pytest.mark.parametrize("what", LATER)
def test_what_a_step_left_to_the_next_is_there_for_whatever_comes(fake_cuda, what):
    """A captured step issues the later layers' transfers in the next one; anything else that comes makes up for it."""
    model, ids = tiny("llama"), prompt(2, 100)
    eager, cache = (OasisCache(model, budget=64, graphs=graphs) for graphs in (False, True))
    for each in (eager, cache):
        decode(each, ids, graphs.WARM + 1)
    late = [layer for layer in cache.sparse_layers if layer.late]
    assert late and len(late) < len(cache.sparse_layers)
    assert all((layer.plan[0] >= 0).any() for layer in late)
    outs = []
    for each in (eager, cache):
        with torch.no_grad():
            LATER[what](each, ids)
        outs.append(steps(each, ids, range(40, 44)))
    assert all(torch.equal(a, b) for a, b in zip(*outs))
    assert all((layer.plan is None or (layer.plan[0] < 0).all()) for layer in late)
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())


def test_a_branch_has_what_the_step_left(fake_cuda):
    import copy

    model, ids = tiny("llama"), prompt(2, 100)
    cache = OasisCache(model, budget=64)
    decode(cache, ids, graphs.WARM + 1)
    branch = copy.deepcopy(cache)
    for one, two in zip(steps(cache, ids, range(40, 43)), steps(branch, ids, range(40, 43))):
        assert torch.equal(one, two)


def test_an_interrupted_step_leaves_nothing_to_the_next(fake_cuda, monkeypatch):
    model, ids = tiny("llama"), prompt(2, 100)
    eager, cache = (OasisCache(model, budget=64, graphs=graphs) for graphs in (False, True))
    for each in (eager, cache):
        decode(each, ids, graphs.WARM + 1)
        with monkeypatch.context() as patch:
            patch.setattr(type(each), "prepare", lambda self, count: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                steps(each, ids, [7])
    assert all((layer.plan[0] < 0).all() for layer in cache.sparse_layers)
    lengths = cache.state.need_rows().lengths(torch.device("cpu"))
    assert lengths.tolist() == cache.state.need_rows().tokens
    assert all(torch.equal(a, b) for a, b in zip(steps(eager, ids, range(40, 44)), steps(cache, ids, range(40, 44))))


def test_queries_that_were_made_anew_need_no_new_graph(fake_cuda):
    cache, ids = OasisCache(tiny("llama"), budget=64), prompt(2, 100)
    decode(cache, ids, graphs.WARM + 1)
    wanted = [layer.recent.clone() for layer in cache.sparse_layers]
    for layer in cache.sparse_layers:
        layer.recent = layer.recent.clone()  # as an eager step or a commit leaves them
    at = torch.full((2, 1), cache.get_seq_length())
    with torch.no_grad():
        cache.model(ids[:, :1], past_key_values=cache, position_ids=at)
    assert cache.graphs.captures == 1 and cache.graphs.replays == 2
    assert all(
        torch.equal(layer.queries[:, :, : layer.state.window], w) for layer, w in zip(cache.sparse_layers, wanted)
    )


def test_rows_that_go_take_their_buffers_with_them(fake_cuda):
    import weakref

    cache, ids = OasisCache(tiny("llama"), budget=64), prompt(2, 100)
    decode(cache, ids, graphs.WARM + 1)
    old = weakref.ref(cache.sparse_layers[0].working_set.keys)
    cache.batch_select_indices(torch.tensor([0]))
    assert old() is None and not cache.graphs.captured


def test_drafts_of_a_drafter_that_stays_outside_are_the_step_s_own(fake_cuda):
    from oasis_hf import OracleDrafter

    ids = prompt(2, 120)
    cache = OasisCache(tiny("llama"), budget=64, drafter=OracleDrafter(ids))
    with torch.no_grad():
        cache.model(ids[:, :100], past_key_values=cache)
        for at in range(100, 100 + graphs.WARM + 4):
            position = torch.full((2, 1), at)
            cache.model(ids[:, at : at + 1], past_key_values=cache, position_ids=position)
            assert torch.equal(cache.stepper.tail.tokens, ids[:, at : at + 2])
    assert cache.graphs.replays == 4


def test_joined_weights_are_part_of_the_place(cache):
    import copy

    from oasis_hf.fused import fused_layers

    cache = OasisCache(copy.deepcopy(tiny("qwen3")), budget=64)
    generate(cache.model, prompt(1, 100), cache, max_new_tokens=4)
    before = graphs._place(cache)
    fused_layers(cache.model)
    assert not graphs._same(before, graphs._place(cache))


def test_nothing_is_prepared_twice_until_a_block_opens(cache, monkeypatch):
    prepared = []
    plain = type(cache.sparse_layers[0]).prepare
    monkeypatch.setattr(
        type(cache.sparse_layers[0]), "prepare", lambda self, count: prepared.append(self.index) or plain(self, count)
    )
    layers, ids, length = len(cache.sparse_layers), prompt(1, 100), cache.get_seq_length()
    steps(cache, ids, range(32 - length % 16))
    assert len(prepared) <= 3 * layers  # the first step, and the blocks that opened
    before = len(prepared)
    cache.crop(-1)
    steps(cache, ids, [3])
    assert len(prepared) == before + layers


def test_an_error_inside_a_capture_is_told_and_the_step_still_runs(fake_cuda, monkeypatch, caplog):
    from oasis_hf.layers import OasisLayer

    plain = OasisLayer._decode

    def refuses_capture(self, step, *args):
        if step.pipeline is not None and self.index == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(self, step, *args)

    monkeypatch.setattr(OasisLayer, "_decode", refuses_capture)
    model, ids = tiny("llama"), prompt(2, 100)
    cache = OasisCache(model, budget=64)
    decode(cache, ids, graphs.WARM + 2)
    assert cache.graphs.captures == 0 and "operation not permitted" in cache.graphs.refused
    assert "operation not permitted" in caplog.text and cache.get_seq_length() == 100 + graphs.WARM + 2


@pytest.mark.parametrize("knobs", [{"lookahead": "on_demand"}, {"correction": "always"}], ids=str)
def test_what_a_failed_capture_made_is_not_used(fake_cuda, monkeypatch, knobs):
    """Nothing of a capture has run: what its layers made for each other holds anything."""
    from oasis_hf.layers import OasisLayer

    plain, made = OasisLayer._decode, {}

    def refuses_capture(self, step, *args):
        if step.pipeline is not None:
            assert ("now", self.device) in made and len(made) > 2
            step._shared.update(made)
            raise RuntimeError("operation not permitted when stream is capturing")
        out = plain(self, step, *args)
        made.update({key: torch.zeros_like(own) for key, own in step._shared.items() if key[0] != "tail"})
        return out

    monkeypatch.setattr(OasisLayer, "_decode", refuses_capture)
    model, ids = tiny("llama"), prompt(2, 100)
    eager = decode(OasisCache(model, budget=64, graphs=False, **knobs), ids, graphs.WARM + 2)
    cache = OasisCache(model, budget=64, **knobs)
    tried = decode(cache, ids, graphs.WARM + 2)
    assert cache.graphs.captures == 0 and "operation not permitted" in cache.graphs.refused
    for one, other in zip(tried, eager):
        torch.testing.assert_close(one.logits, other.logits, atol=0, rtol=0)
