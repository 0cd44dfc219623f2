"""Acceptance and commit behind replayed steps, without CUDA: as in test_replays, what a graph would repeat is run again
with all that the host knew when it was captured."""

from __future__ import annotations

import pytest
import torch
from test_eagle3_cache import folder, target  # noqa: F401
from test_generation import Sometimes, truth
from test_graphs import collects, fake_cuda  # noqa: F401
from test_memo import Several
from test_replays import inputs_of, replays  # noqa: F401
from tiny import prompt, tiny

import oasis_hf
from oasis_hf import HostMemoryError, OasisCache, OracleDrafter
from oasis_hf.accepting import Accepting
from oasis_hf.layers import OasisLayer


@pytest.fixture
def accepts(monkeypatch, replays):  # noqa: F811
    """The graphs that accept, as they are made."""
    made, capture = [], Accepting.capture
    monkeypatch.setattr(Accepting, "capture", lambda self, *args: (capture(self, *args), made.append(self)))
    return made


def same(eager, cache):
    """Counters, tables, queries and pages of both; what stands in the drafter's memory too."""
    rows = cache.state.rows
    assert rows.tokens == eager.state.rows.tokens and rows.columns == eager.state.rows.columns
    assert torch.equal(rows.valid, eager.state.rows.valid)
    assert rows.lengths(cache.device).tolist() == rows.tokens and int(rows.columns_on(cache.device)) == rows.columns
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name
    for one, two in zip(eager.sparse_layers, cache.sparse_layers):
        assert torch.equal(one.working_set.table, two.working_set.table)
        for row, tokens in enumerate(rows.tokens):
            for a, b in zip(one.store.read(one.index, row, 0, tokens), two.store.read(two.index, row, 0, tokens)):
                torch.testing.assert_close(a, b)  # slots grow at other times, and sums round
            blocks = tokens // 16
            assert torch.equal(one.summaries.vectors[row, :, :blocks], two.summaries.vectors[row, :, :blocks])


KNOBS = {
    "lookup": {},
    "no drafter": {"drafter": "previous", "lookahead": "smoothed"},
    "minmax, 4 tokens": {"scorer": "minmax", "tokens_per_summary": 4, "draft_tokens": 4},
    "on demand": {"lookahead": "on_demand"},
    "dense": {"budget": 2064},
    "candidates": {"candidates": 3},
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("knobs", KNOBS)
def test_a_replayed_acceptance_is_the_eager_one(accepts, knobs, sample):
    model, inputs = tiny("llama"), inputs_of([100, 90, 61])
    free = model.generate(**inputs, max_new_tokens=60, do_sample=False, eos_token_id=None)
    ends = [int(free[2, 100 + 40]), 1]
    knobs = {"budget": 64, "draft_tokens": 2, **KNOBS[knobs]}
    caches, texts = [], []
    for graphs in (False, True):
        torch.manual_seed(3)
        cache = OasisCache(model, graphs=graphs, compile_after=None, speculate=True, **knobs)
        texts.append(oasis_hf.generate(
            model, **inputs, past_key_values=cache, max_new_tokens=100, do_sample=sample, temperature=0.3,
            eos_token_id=ends, pad_token_id=0,
        ))  # fmt: skip
        caches.append(cache)
    assert torch.equal(*texts)
    same(*caches)
    if knobs.get("drafter") is None:  # without drafts there is nothing to accept
        assert sum(one.graph.count for one in accepts) > 20 and (accepts[0].chosen is None) == sample


def test_a_drafter_outside_the_graph_is_told_of_what_is_accepted(accepts):
    model, inputs = tiny("llama"), inputs_of([50, 21, 33])
    want, known = truth(model, inputs)
    caches = []
    for graphs in (False, True):
        drafter, told = Sometimes(known), []
        drafter.observe = lambda tokens, starts, valid, told=told: told.append((tokens, starts.clone(), valid))
        cache = OasisCache(model, graphs=graphs, compile_after=None, speculate=True, draft_tokens=3, drafter=drafter)
        got = oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
        assert torch.equal(got, want)
        caches.append((cache, told))
    same(caches[0][0], caches[1][0])
    assert sum(one.graph.count for one in accepts) > 8
    for one, two in zip(caches[0][1], caches[1][1], strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_head_is_told_inside(accepts, folder, candidates):  # noqa: F811
    """Its notes of accepted drafts, which an oracle puts in place of its own; where the chain is wrong another
    candidate is right."""
    ids, caches = prompt(3, 40) % 60, []
    free = target().generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None)
    for graphs in (False, True):
        cache = OasisCache(
            target(), drafter=folder, graphs=graphs, compile_after=None, speculate=True, draft_tokens=2,
            candidates=candidates,
        )  # fmt: skip
        own, truth, oracle = cache.drafter.propose_several, Sometimes(free), OracleDrafter(free)

        def propose(*args, own=own, truth=truth, oracle=oracle):
            draft = own(*args)._replace(tokens=truth.propose(*args[:3]).tokens)
            if draft.others is not None:
                draft.others[:, 1:] = oracle.propose(*args[:3]).tokens[:, :1]
            return draft

        cache.drafter.propose_several = propose
        text = oasis_hf.generate(
            target(), ids, past_key_values=cache, max_new_tokens=60, do_sample=False, eos_token_id=None
        )
        assert torch.equal(text, free) and cache.stepper.forwards < (50 if candidates == 1 else 40)
        caches.append(cache)
    assert sum(one.graph.count for one in accepts) > 10 and all(one.notes for one in accepts)
    same(*caches)
    eager, past = (cache.drafter.past for cache in caches)
    ring = past.ring
    assert torch.equal(past.at[:, :ring], eager.at[:, :ring]) and torch.equal(
        past.state_at[:, :-1], eager.state_at[:, :-1]
    )
    known = (past.at[:, :ring] >= 0)[:, None, :, None]
    torch.testing.assert_close(past.keys[:, :, :ring] * known, eager.keys[:, :, :ring] * known)
    torch.testing.assert_close(past.states[:, :-1], eager.states[:, :-1])


@pytest.mark.parametrize("graphs", [False, True])
def test_accepted_drafts_leave_their_queries(accepts, graphs):
    """After a round the latest queries are those of the latest tokens, as if they had come one by one."""
    model, inputs = tiny("llama"), inputs_of([50])
    want, known = truth(model, inputs)
    cache = OasisCache(
        model, speculate=True, draft_tokens=3, drafter=Sometimes(known), graphs=graphs, compile_after=None
    )
    oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    plain = OasisCache(model, speculate=True, drafter=Sometimes(known), graphs=False)  # keeps as many
    with torch.no_grad():
        model(want[:, :-1], past_key_values=plain)
    assert cache.stepper.forwards < 30
    for one, two in zip(cache.sparse_layers, plain.sparse_layers):
        torch.testing.assert_close(one.recent, two.recent, atol=1e-4, rtol=1e-4)


def test_what_stands_still_needs_no_new_graph(accepts):
    """A round moves nothing that a captured step knows by its address: one graph serves until summaries grow."""
    cache, inputs = OasisCache(tiny("llama"), budget=64, speculate=True, draft_tokens=2), inputs_of([100, 90])
    oasis_hf.generate(tiny("llama"), **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert cache.graphs.captures <= 2 and cache.graphs.replays > 10
    assert len(accepts) <= cache.graphs.captures


def test_full_rounds_move_nothing_either(accepts):
    """The drafts' steps of `verify="full"` are replayed from round to round, though each of them is taken back."""
    model, inputs = tiny("llama"), inputs_of([100, 90])
    want, _ = truth(model, inputs)
    cache = OasisCache(model, budget=64, compile_after=None)
    got = oasis_hf.generate(
        model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, verify="full", full_drafts=4
    )
    assert torch.equal(got, want) and cache.graphs.captures <= 2 and cache.graphs.replays > 20


def test_late_transfers_stay_late(accepts, monkeypatch):
    """Nothing settles between a step and its acceptance, and no slot that waits for its block is taken meanwhile."""
    cache = OasisCache(
        tiny("llama"), budget=64, speculate=True, draft_tokens=4, fetch_ratio=1.0, compile_after=None, seed=3
    )
    commit, waited, opened = OasisLayer.commit, [], []

    def watched(self, entry, position, lengths, tokens):
        planned = self.plan is not None and tokens is None and self.late
        if planned:
            blocks, slots = self.plan
            waiting = (self.working_set.table.gather(2, slots) == blocks) & (blocks >= 0)
            waited.append(bool(waiting.any()))
            opened.append(bool((waiting.any(2).any(1) & (lengths > 0) & (lengths % 16 == 0)).any()))
        commit(self, entry, position, lengths, tokens)
        if planned:
            own = self.working_set
            assert ((own.table.gather(2, slots) == blocks) | ~waiting).all()
            # Nor could it be: what is appended is older than all that waits, so it makes place itself.
            appended = (own.table == (lengths // 16)[:, None, None]) & (lengths >= 0)[:, None, None]
            assert (own.last_selected[appended] < self.state.number).all()
            assert (own.last_selected.gather(2, slots)[waiting] == self.state.number).all()

    monkeypatch.setattr(OasisLayer, "commit", watched)
    oasis_hf.generate(
        tiny("llama"), **inputs_of([100, 90, 61]), past_key_values=cache, max_new_tokens=150, do_sample=False
    )
    assert sum(waited) > 50 and sum(opened) > 0 and cache.graphs._left


def test_the_device_knows_what_the_host_does(accepts, monkeypatch):
    """Lengths and columns, after every round, in the tensors that they were in."""
    from oasis_hf import generation

    model, inputs, seen, plain = tiny("llama"), inputs_of([50, 21, 33]), set(), generation._round

    def checked(model, cache, *args):
        told, rows = plain(model, cache, *args), cache.state.rows
        lengths, columns = rows.lengths(cache.device), rows.columns_on(cache.device)
        assert lengths.tolist() == rows.tokens and columns == rows.columns
        seen.add((id(lengths), id(columns)))
        return told

    monkeypatch.setattr(generation, "_round", checked)
    _, known = truth(model, inputs)
    cache = OasisCache(model, speculate=True, draft_tokens=3, drafter=Sometimes(known), compile_after=None)
    oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert len(seen) == 1 and accepts


@pytest.mark.parametrize("verify", ["sparse", "full"])
def test_exactly_the_capacity_is_enough(accepts, verify):
    """Neither drafts nor the room made for them go beyond what the rows can hold."""
    model, inputs = tiny("llama"), inputs_of([50, 50])
    want, known = truth(model, inputs)
    for capacity, graphs in ((89, True), (89, False), (88, True)):
        cache = OasisCache(
            model, host_capacity_tokens=capacity, speculate=True, draft_tokens=3, drafter=Sometimes(known),
            graphs=graphs, compile_after=None,
        )  # fmt: skip
        kwargs = dict(past_key_values=cache, max_new_tokens=40, do_sample=False, verify=verify, full_drafts=6)
        if capacity == 89:  # the last token of all is not in the cache
            assert torch.equal(oasis_hf.generate(model, **inputs, **kwargs), want)
            assert cache.state.rows.tokens == [89, 89]
        else:
            with pytest.raises(HostMemoryError, match="host_capacity_tokens=88"):
                oasis_hf.generate(model, **inputs, **kwargs)


def test_where_it_cannot_be_captured_it_runs_eagerly(accepts, monkeypatch, caplog):
    def fails(self, cache, step, drafts):
        raise RuntimeError("operation not permitted\nmore words")

    monkeypatch.setattr(Accepting, "capture", fails)
    model, inputs = tiny("llama"), inputs_of([50, 21])
    want, known = truth(model, inputs)
    cache = OasisCache(model, speculate=True, draft_tokens=3, drafter=Sometimes(known), compile_after=None)
    got = oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert torch.equal(got, want) and cache.graphs.replays > 5
    assert cache.graphs.unaccepted == "operation not permitted" and caplog.text.count("could not be captured") == 1


def test_criteria_of_the_callers_own_choose_outside_the_graph(accepts):
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Sum(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -3:].sum(1) % 23 == 0

    model, inputs = tiny("llama"), inputs_of([50, 21])
    kwargs = dict(stopping_criteria=StoppingCriteriaList([Sum()]), pad_token_id=0, eos_token_id=95)
    want, known = truth(model, inputs, **kwargs)
    assert want.shape[1] < 90
    cache = OasisCache(model, speculate=True, draft_tokens=3, drafter=Sometimes(known), compile_after=None)
    got = oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, **kwargs)
    assert torch.equal(got, want) and all(one.chosen is None for one in accepts)


@pytest.mark.parametrize("verify", ["sparse", "full"])
def test_captured_inside_inference_mode_and_replayed_outside(accepts, verify):
    model, inputs = tiny("llama"), inputs_of([50, 21, 33])
    want, known = truth(model, inputs)
    cache = OasisCache(model, speculate=True, draft_tokens=2, drafter=Sometimes(known), compile_after=None)
    kwargs = dict(past_key_values=cache, do_sample=False, verify=verify)
    with torch.inference_mode():
        first = oasis_hf.generate(model, **inputs, max_new_tokens=20, **kwargs)
    first = first.clone()
    mask = torch.cat((inputs["attention_mask"], torch.ones(3, 20, dtype=torch.long)), 1)
    assert torch.equal(oasis_hf.generate(model, first, attention_mask=mask, max_new_tokens=20, **kwargs), want)
    assert cache.graphs.replays > 8


@pytest.mark.core
@pytest.mark.parametrize("rows", [[100], [100, 90, 61], [64, 64]], ids=str)
@pytest.mark.parametrize("drafter, budget, candidates", [(Sometimes, 2064, 1), (Several, 2064, 3), (Sometimes, 112, 1)])
def test_one_token_a_call_is_committed_by_a_graph_too(accepts, rows, drafter, budget, candidates):
    """transformers' own loop: what was drafted comes in calls without a forward."""
    model, inputs, knobs = tiny("llama"), inputs_of(rows), {"budget": budget, "lookahead": "on_demand"}
    call = {**inputs, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    free = model.generate(**call, past_key_values=OasisCache(model, graphs=False, **knobs))
    known = torch.nn.utils.rnn.pad_sequence(
        [one[max(rows) - n :] for one, n in zip(free, rows)], batch_first=True, padding_value=-1
    )
    texts, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(
            model, graphs=graphs, compile_after=None, speculate=True, draft_tokens=3, candidates=candidates,
            drafter=drafter(known), **knobs,
        )  # fmt: skip
        texts.append(model.generate(**call, past_key_values=cache))
        caches.append(cache)
    assert torch.equal(*texts) and caches[0].stepper.skipped == caches[1].stepper.skipped
    same(*caches)
    count = sum(one.graph.count for one in accepts)
    if budget < 160:  # the union of several tokens' blocks is another working set, and so another text
        assert count > 1
    else:
        assert torch.equal(texts[0], free) and count > 0.6 * caches[1].stepper.skipped > 9
