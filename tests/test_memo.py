"""Verified rows: several candidates side by side, and whose token is among them."""

from __future__ import annotations

import pytest
import torch
from test_cache import assert_residents_match
from test_generate import assert_same, generate
from test_generation import truth
from test_replays import fake_cuda, feed, replays  # noqa: F401
from tiny import VOCAB, left_padded, prompt, tiny
from transformers import DynamicCache

import oasis_hf
from oasis_hf import OasisCache, OracleDrafter
from oasis_hf.memo import Memo
from oasis_hf.tail import Tail

pytestmark = pytest.mark.core


class Several(OracleDrafter):
    """The truth is the chain's first at some places, at others another candidate, or none of them."""

    several = True

    def propose(self, tokens, lengths, count):
        return self.propose_several(tokens, lengths, count, 0)

    def propose_several(self, tokens, lengths, count, others):
        draft = super().propose(tokens, lengths, count)
        turn = (lengths * lengths + 3 * torch.arange(len(lengths))) % 7 % 3
        true = draft.tokens[:, :1]
        wrong = (true + 1 + torch.arange(1 + others)) % VOCAB
        chain = torch.cat((torch.where(turn[:, None] == 0, true, wrong[:, :1]), draft.tokens[:, 1:]), 1)
        if not others:
            return draft._replace(tokens=chain)
        rivals = wrong[:, 1:].clone()
        rivals[:, -1:] = torch.where(turn[:, None] == 1, true, rivals[:, -1:])
        chances = torch.full((len(tokens), 1 + others), 1 / (1 + others))
        return draft._replace(tokens=chain, others=rivals, probabilities=chances)


def memo_of(tokens, drafts, others, rows=1):
    stacked = torch.tensor([tokens] * rows)
    tail = Tail.chain(stacked, None, 1, drafts + 1, others)
    logits = torch.arange(rows * (1 + drafts + others) * 5.0).view(rows, -1, 5)
    return Memo(tail, drafts, others, logits, dict)


def test_each_row_goes_its_own_way():
    memo = memo_of([3, 10, 11, 12, 20, 21], drafts=2, others=2, rows=3)
    assert memo.tokens.tolist() == [[10, 11]] * 3 and memo.rivals[0].tolist() == [[20, 21]] * 3 and memo.rivals[2] == 4
    assert memo.next_entries() == [1, 4, 5]
    found = memo.find(torch.tensor([10, 21, 12]))
    assert found.tolist() == [1, 5, -1], "the lookahead row is not verified"
    got = memo.logits_of(torch.tensor([1, 5, 4]))
    assert torch.equal(got[:, 0], torch.stack([memo.rows[0, 1], memo.rows[1, 4], memo.rows[2, 3]]))
    memo.stand([1, 5, 4], torch.tensor([1, 5, 4]))
    assert memo.next_entries() == [2], "behind the others nothing was stacked"
    assert memo.find(torch.tensor([11, 11, 11])).tolist() == [2, -1, -1]
    memo.stand([2, 2, 2], torch.tensor([2, 2, 2]))
    assert memo.next_entries() == [] and memo.at is None
    memo.stand([-1, 0, 0], torch.tensor([-1, 0, 0]))
    assert memo.find(torch.tensor([3, 3, 20])).tolist() == [0, -1, 4], "a row may wait for the step's own token"


def test_the_chain_comes_first_where_a_candidate_is_there_twice():
    memo = memo_of([3, 10, 11, 10, 12], drafts=1, others=2)
    assert memo.find(torch.tensor([10])).tolist() == [1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("inputs", [[50], [21, 50, 33]], ids=str)
@pytest.mark.parametrize("drafts, candidates", [(1, 2), (2, 4)])
def test_tokens_and_logits_are_those_of_a_dense_cache(family, inputs, drafts, candidates):
    model, inputs = tiny(family), left_padded(inputs)
    _, known = truth(model, inputs, max_new_tokens=24)
    caches = []

    def cache():
        knobs = dict(speculate=True, draft_tokens=drafts, candidates=candidates)
        caches.append(OasisCache(model, drafter=Several(known), **knobs))
        return caches[-1]

    assert_same(model, inputs, cache)
    assert caches[0].stepper.skipped > (7 if len(known) == 1 else 0)


def test_rows_that_take_different_candidates_at_once():
    model, inputs = tiny("llama"), left_padded([40, 41])  # a row's turn is that of its length and its place
    _, known = truth(model, inputs)

    class Either(Several):
        def propose_several(self, tokens, lengths, count, others):
            draft = super().propose_several(tokens, lengths, count, others)
            true = OracleDrafter.propose(self, tokens, lengths, 1).tokens
            first = torch.tensor([[True], [False]])
            chain = torch.cat((torch.where(first, true, (true + 1) % VOCAB), draft.tokens[:, 1:]), 1)
            rivals = torch.where(first, (true + 2) % VOCAB, true)
            return draft._replace(tokens=chain, others=rivals)

    cache = OasisCache(model, drafter=Either(known), speculate=True, candidates=2)
    want = generate(model, inputs, OasisCache(model))
    got = generate(model, inputs, cache)
    assert torch.equal(got.sequences, want.sequences) and cache.stepper.skipped == 11
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_what_the_rows_of_a_step_weigh():
    """Three candidates that are equally likely and a lookahead row; an acceptance of 0.25."""
    model, ids = tiny("llama"), prompt(1, 150)
    cache = OasisCache(model, budget=64, drafter=Several(ids), speculate=True, candidates=3)
    cache.stepper.acceptance, seen, plain = 0.25, [], cache.stepper._stack

    def stack(call, step, **kwargs):
        call = plain(call, step, **kwargs)
        seen.append((step.tail.parents, step.weights[0, cache.state.window :].tolist(), call["position_ids"].tolist()))
        return call

    cache.stepper._stack = stack
    fed(model, cache, ids, 100, 101)
    first = 1 / 3 - 0.25
    share = 0.75 / (first + 2 / 3)
    weighs = pytest.approx([share * first, 0.25, share / 3, share / 3], abs=1e-6)
    assert seen == [((-1, 0, 1, 0, 0), weighs, [[100, 101, 102, 101, 101]])]


@pytest.mark.newest
@pytest.mark.parametrize("lookahead", ["draft", {"draft": 0.7, "previous": 0.3}, "previous"], ids=str)
def test_a_working_set_that_is_too_small(lookahead):
    """What is in the pages and in the slots is what was said, whichever candidate was taken."""
    model, ids = tiny("llama"), prompt(1, 150)
    cache = OasisCache(model, budget=64, drafter=Several(ids), speculate=True, candidates=3, lookahead=lookahead)
    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        for at in range(60, 140):
            model(ids[:, at : at + 1], past_key_values=cache)
    assert cache.get_seq_length() == 140 and cache.stepper.skipped >= 30
    assert cache.stats()["fetched"].sum() > 0
    assert_residents_match(cache)


@pytest.mark.newest
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=str)
def test_replayed_steps_give_what_eager_ones_give(replays, knobs):  # noqa: F811
    model, ids = tiny("llama"), prompt(2, 200)
    outs, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(
            model, graphs=graphs, budget=64, compile_after=None, candidates=3, drafter=Several(ids), **knobs
        )
        with torch.no_grad():
            model(ids[:, :100], past_key_values=cache)
        outs.append(feed(cache, ids[:, 100:180]))
        caches.append(cache)
    assert torch.equal(*outs) and caches[1].graphs.replays > 20
    assert caches[0].stepper.skipped == caches[1].stepper.skipped
    assert all(torch.equal(value, caches[1].stats()[name]) for name, value in caches[0].stats().items())


@pytest.mark.newest
@pytest.mark.parametrize("drafts, candidates", [(1, 2), (3, 3)])
@pytest.mark.parametrize("inputs", [[50], [21, 50, 33]], ids=str)
def test_every_row_takes_any_of_them_at_its_own_pace(inputs, drafts, candidates):
    model, inputs = tiny("llama"), left_padded(inputs)
    want, known = truth(model, inputs)
    forwards = []
    for m in (1, candidates):
        cache = OasisCache(model, speculate=True, draft_tokens=drafts, candidates=m, drafter=Several(known))
        got = oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
        assert torch.equal(got, want)
        forwards.append(cache.stepper.forwards)
    assert forwards[1] < forwards[0]


# -- calls in which some rows are remembered ---------------------------------------------------------------------------


class Often(OracleDrafter):
    """The truth, but wrong at a fifth of the places, which differ from row to row."""

    def propose(self, tokens, lengths, count):
        draft = super().propose(tokens, lengths, count)
        chance = torch.rand((8, 512), generator=torch.Generator().manual_seed(1))[: len(lengths)]
        wrong = chance.gather(1, lengths[:, None] + torch.arange(count)) < 0.2
        return draft._replace(tokens=torch.where(wrong, (draft.tokens + 1) % VOCAB, draft.tokens))


def never_mixed(cache):
    cache.stepper._may_part = lambda *args: False
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("inputs", [[50, 50], [21, 50, 33], [30] * 6], ids=str)
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_mixed_call_gives_what_a_dense_cache_gives_in_fewer_forwards(family, inputs, drafts):
    model, inputs = tiny(family), left_padded(inputs)
    want, known = truth(model, inputs)
    forwards = []
    for change in (lambda cache: cache, never_mixed):
        cache = change(OasisCache(model, drafter=Often(known), speculate=True, draft_tokens=drafts))
        got = generate(model, inputs, cache, max_new_tokens=40)
        assert torch.equal(got.sequences, want)
        forwards.append(cache.stepper.forwards)
        assert cache.get_seq_length() == want.shape[1] - 1 and cache.state.rows.taking is None
        assert (cache.stepper.left_out > 0) == (len(forwards) == 1)
        rows = cache.state.rows
        assert rows.valid[:, -39:].all() and rows.lengths(cache.device).tolist() == rows.tokens
    assert forwards[0] < forwards[1] or len(want) == 2


def test_logits_of_a_mixed_call():
    model, inputs = tiny("llama"), left_padded([21, 50, 33])
    _, known = truth(model, inputs, max_new_tokens=24)
    for dict_or_tuple in (True, False):
        outs = []
        for cache in (DynamicCache(config=model.config), OasisCache(model, drafter=Often(known), speculate=True)):
            mask = inputs["attention_mask"]
            with torch.no_grad():
                model(**inputs, past_key_values=cache)
                logits = []
                for at in range(20):
                    token = torch.stack([row[int(n) + at] for row, n in zip(known, mask.sum(1))])[:, None]
                    mask_now = torch.cat((mask, torch.ones(3, at + 1, dtype=torch.long)), 1)
                    position = mask_now.cumsum(1)[:, -1:] - 1
                    out = model(
                        token, attention_mask=mask_now, position_ids=position, past_key_values=cache,
                        return_dict=dict_or_tuple,
                    )  # fmt: skip
                    logits.append(out[0] if isinstance(out, tuple) else out.logits)
            outs.append(torch.cat(logits, 1))
        assert cache.stepper.left_out > 5
        torch.testing.assert_close(*outs, atol=1e-4, rtol=0)


def greedy(model, rows):
    """100 random tokens a row and 120 that a dense cache gives behind them."""
    return model.generate(prompt(rows, 100), max_new_tokens=120, do_sample=False)


@torch.no_grad()
def fed(model, cache, text, first, last):
    """Logits of a text's columns, one call each."""
    model(text[:, :first], past_key_values=cache)
    return torch.cat([
        model(text[:, at : at + 1], position_ids=torch.full((len(text), 1), at), past_key_values=cache).logits
        for at in range(first, last)
    ], 1)  # fmt: skip


@pytest.mark.newest
@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "temperature": 0.3}], ids=["greedy", "sampled"])
def test_repeating_texts_take_no_more_forwards_and_rows_that_select_take_turns(kwargs):
    """What is guessed for a row that waits is its likeliest token, so sampled texts gain too."""
    model, ids = tiny("qwen3"), prompt(4, 100).clamp(max=30)
    forwards = []
    for change in (lambda cache: cache, never_mixed):
        cache = change(OasisCache(model, budget=64, speculate=True, draft_tokens=2, drafter="prompt_lookup"))
        waited, plain = [], cache.stepper._step

        def step(inner, call, plain=plain, cache=cache, waited=waited, **kwargs):
            waited.append([not takes for takes in cache.state.rows.takes])
            return plain(inner, call, **kwargs)

        cache.stepper._step = step
        torch.manual_seed(0)
        generate(model, ids, cache, max_new_tokens=150, **kwargs)
        forwards.append(len(waited))
        assert all(not (a and b) for one, two in zip(waited, waited[1:]) for a, b in zip(one, two))
        assert any(map(any, waited)) == (len(forwards) == 1) and cache.stats()["fetched"].sum() > 0
        assert_residents_match(cache)
    assert forwards[0] <= forwards[1] < 150


@pytest.mark.newest
@pytest.mark.parametrize("knobs", [{"budget": 64, "draft_tokens": 2}, {"candidates": 2}], ids=str)
def test_mixed_calls_replayed(replays, knobs):  # noqa: F811
    model = tiny("llama")
    text = greedy(model, 3)
    drafter = Several if "candidates" in knobs else Often
    outs, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(model, graphs=graphs, compile_after=None, speculate=True, drafter=drafter(text), **knobs)
        outs.append(fed(model, cache, text, 100, 210))
        caches.append(cache)
    assert torch.equal(*outs) and caches[1].graphs.replays > 20
    assert caches[0].stepper.left_out == caches[1].stepper.left_out > 10
    assert all(torch.equal(value, caches[1].stats()[name]) for name, value in caches[0].stats().items())


def test_an_interrupted_mixed_call_can_be_run_again():
    model = tiny("llama")
    text = greedy(model, 3)
    cache = OasisCache(model, speculate=True, draft_tokens=2, drafter=Often(text))
    plain, failed = cache.stepper._step, []

    def step(inner, call, **kwargs):
        if cache.state.rows.taking is not None and len(failed) < 3:
            failed.append(cache.get_seq_length())
            handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                plain(inner, call, **kwargs)
            finally:
                handle.remove()
        return plain(inner, call, **kwargs)

    cache.stepper._step = step
    with torch.no_grad():
        model(text[:, :100], past_key_values=cache)
        out, at = [], 100
        while at < 160:
            position = torch.full((3, 1), at)
            try:
                out.append(model(text[:, at : at + 1], position_ids=position, past_key_values=cache).logits)
                at += 1
            except ZeroDivisionError:
                assert cache.get_seq_length() == at and cache.state.rows.tokens == [at] * 3
    assert len(failed) == 3 and cache.stepper.left_out > 5
    want = fed(model, DynamicCache(config=model.config), text, 100, 160)
    torch.testing.assert_close(torch.cat(out, 1), want, atol=1e-4, rtol=0)


def test_rows_that_have_ended_and_the_next_turn():
    model, inputs = tiny("llama"), left_padded([21, 50, 33])
    free, _ = truth(model, inputs)
    end = int(free[1, 58])
    kwargs = dict(max_new_tokens=40, eos_token_id=end, pad_token_id=0)
    want, known = truth(model, inputs, **kwargs)
    cache = OasisCache(model, speculate=True, draft_tokens=2, drafter=Often(known))
    assert torch.equal(generate(model, inputs, cache, **kwargs).sequences, want)
    assert cache.stepper.left_out > 0
    mask = torch.cat((inputs["attention_mask"], (want[:, 50:] != 0).long(), torch.ones(3, 9, dtype=torch.long)), 1)
    ids = torch.cat((want, prompt(3, 9, seed=7)), 1)
    dense = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    got = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert torch.equal(got, dense)


@pytest.mark.newest
def test_queries_of_rows_that_were_left_out():
    """Of a waiting row's next token the query is kept once, though it ran before the token was known."""
    model = tiny("llama")
    text, kept = greedy(model, 3), []
    for change in (lambda cache: cache, never_mixed):
        cache = change(OasisCache(model, lookahead="smoothed", smooth_queries=6, speculate=True, drafter=Often(text)))
        fed(model, cache, text, 100, 190)
        ahead = [behind == -1 for behind in cache.stepper.memo.behind]
        last = [5 - one for one in ahead]  # the token that waits is the newest
        kept.append([layer.recent[row, :, last[row] - 4 : last[row] + 1] for row in range(3) for layer in cache.layers])
        assert (cache.stepper.left_out > 5) == (len(kept) == 1)
    for a, b in zip(*kept):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
