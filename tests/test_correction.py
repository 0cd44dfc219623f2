"""The correction lane: which KV heads select again before they attend, and what that moves."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import generate
from test_graphs import fake_cuda  # noqa: F401
from test_modes import LENGTHS, decode
from test_replays import both, inputs_of, replays  # noqa: F401
from test_replays import decode as greedy
from tiny import left_padded, prompt, tiny
from transformers import LlamaConfig, LlamaForCausalLM

import oasis_hf
from oasis_hf import ConfigError, OasisCache, mode_config
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.layers import OasisLayer
from oasis_hf.ops import correct, correction
from oasis_hf.pipeline import Pipeline
from oasis_hf.store import HostStore
from oasis_hf.working_set import WorkingSet

INF = float("inf")
LOOKAHEADS = [
    {"lookahead": "draft"}, {"lookahead": "previous"}, {"lookahead": "smoothed"},
    {"lookahead": {"draft": 1.0, "previous": 2.0}}, {"candidates": 3}, {"draft_up_to": 1},
]  # fmt: skip


def cache_of(family="llama", budget=80, **knobs):
    return OasisCache(tiny(family), budget=budget, **knobs)


# -- the operator -----------------------------------------------------------------------------------------------------


@st.composite
def working_sets(draw):
    """Scores as shares, closed blocks a row, and a table that holds any of them, an open block and empty slots."""
    rows, heads, blocks, slots = (draw(st.integers(1, most)) for most in (3, 3, 9, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    closed = torch.randint(blocks + 1, (rows,), generator=random)
    exists = torch.arange(blocks) < closed[:, None, None]
    scores = torch.randn(rows, heads, blocks, generator=random).mul(draw(st.sampled_from([0, 1, 4])))
    scores = scores.masked_fill(~exists, -INF).softmax(-1).nan_to_num().masked_fill(~exists, -INF)
    if draw(st.booleans()):
        scores = scores.masked_fill(exists & (torch.rand(scores.shape, generator=random) < 0.2), INF)
    places = torch.rand(rows, heads, blocks + 1, generator=random).argsort(-1)[..., : slots + 1]
    table = torch.nn.functional.pad(places, (0, slots), value=-1)[..., :slots].contiguous()
    table = table.masked_fill((table > closed[:, None, None]) | (torch.rand(table.shape, generator=random) < 0.2), -1)
    return scores, table, closed


def straight(scores, table, closed):
    """One row and head, by Python's numbers."""
    scores, blocks = scores.tolist(), range(int(closed))
    best = sorted(blocks, key=lambda block: -scores[block])[: len(table) - 1]
    mass = {block: 0.0 if scores[block] == INF else scores[block] for block in blocks}
    return max(0.0, sum(mass[block] for block in best) - sum(mass.get(block, 0.0) for block in table.tolist()))


@settings(max_examples=60, deadline=None)
@given(working_sets(), st.sampled_from([0.0, 0.1, 0.5]), st.booleans())
def test_what_is_missed_and_who_is_corrected(case, above, told):
    scores, table, closed = case
    rows, heads, _ = scores.shape
    missed = [[straight(scores[b, h], table[b, h], closed[b]) for h in range(heads)] for b in range(rows)]
    torch.testing.assert_close(correction.missed(scores, table, closed), torch.tensor(missed), atol=1e-6, rtol=0)
    mask = torch.rand(rows, heads) < 0.5 if told else None
    wanted = [
        [bool(closed[b] > 0 and (mask[b, h] if told else missed[b][h] > above)) for h in range(heads)]
        for b in range(rows)
    ]
    if not told and any(abs(one - above) < 1e-5 and one > 0 for row in missed for one in row):
        return  # rounding says
    got, before = scores.clone(), table.clone()
    counts, fired = torch.full((2, heads), 5), torch.tensor([7, *[3] * rows])
    correct(got, mask, table, closed, above, torch.tensor(4), counts, fired)
    for b in range(rows):
        for h in range(heads):
            assert torch.equal(got[b, h], scores[b, h]) if wanted[b][h] else (got[b, h] == -INF).all()
    assert torch.equal(table, before) and (counts[0] == 5 + (closed > 0).sum()).all()
    assert counts[1].tolist() == [5 + sum(row[h] for row in wanted) for h in range(heads)]
    assert fired.tolist() == [7 + sum(map(any, wanted)), *(4 if any(row) else 3 for row in wanted)]
    # Another layer of the same step does not count its rows again.
    correct(scores.clone(), mask, table, closed, above, torch.tensor(4), counts, fired)
    assert fired[0] == 7 + sum(map(any, wanted))


# -- the lane ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", LOOKAHEADS, ids=str)
def test_always_and_without_a_cap_it_attends_to_what_on_demand_does(knobs):
    """Whatever was predicted, where no block closes meanwhile."""
    lengths, steps = [145, 65, 97], 15
    cache = cache_of(correction="always", correct_blocks=5, **knobs)
    on_demand = OasisCache(tiny("llama"), mode_config("on_demand", 80))
    torch.testing.assert_close(decode(cache, lengths, steps), decode(on_demand, lengths, steps), atol=1e-4, rtol=1e-4)
    done = cache.corrections()
    assert done["heads"] == done["compared"] == 3 * 2 * 3 * steps and done["steps"] == done["of_steps"] == 3 * steps
    assert done["blocks"] == cache.stats()["on_demand"].sum() > 0
    # Prediction goes on as it did; where it asks the same query, nothing is left to fetch.
    assert bool(cache.stats()["fetched"].any()) == (knobs.get("lookahead") != "previous")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_misses_nothing_is_left_as_it_is(family):
    never, off = cache_of(family, correction="auto", correct_above=1.0), cache_of(family)
    assert torch.equal(decode(never), decode(off))
    for name, value in off.stats().items():
        assert torch.equal(value, never.stats()[name]) or name == "compared", name
    done = never.corrections()
    assert done["compared"] > 0 == done["heads"] == done["steps"] == done["bytes"] and done["of_steps"] == 120
    assert off.corrections() == dict.fromkeys(done, 0)


@pytest.mark.parametrize("knobs", [{}, {"reduction": "max"}, {"lookahead": "previous", "recent_blocks": 1}], ids=str)
def test_heads_that_miss_more_get_the_best_blocks_up_to_the_cap(knobs, monkeypatch):
    """Against the working set before, the summaries and a straight computation, head by head."""
    above, most, steps, told = 0.15, 2, 30, []
    fetch_now = OasisLayer._fetch_now

    def look(self, step, query, lengths):
        own = self.working_set
        table, age, moved = own.table.clone(), own.last_selected.clone(), self.counters.of("on_demand").clone()
        closed = lengths // BLOCK
        shares = self.summaries.score(
            query, closed, torch.ones(len(query), 1), self.scaling, max(step.ends) // BLOCK, "softmax-mean"
        )
        fetch_now(self, step, query, lengths)
        fetched = torch.zeros_like(moved)
        for row in range(len(query)):
            for head in range(self.heads):
                missed = straight(shares[row, head], table[row, head], closed[row])
                before, after = ({*one[row, head].tolist()} - {-1} for one in (table, own.table))
                if missed <= above:
                    assert torch.equal(own.table[row, head], table[row, head])
                    assert torch.equal(own.last_selected[row, head], age[row, head])
                else:
                    best = shares[row, head].topk(min(own.allocated - 1, int(closed[row]))).indices.tolist()
                    new = [block for block in best if block not in before][:most]
                    assert after - before == set(new) and before - after <= before - set(best)
                    assert int(lengths[row]) // BLOCK in after or not int(lengths[row]) % BLOCK
                    fetched[head] += len(new)
                told.append((self.index, head, missed > above))
        assert torch.equal(self.counters.of("on_demand") - moved, fetched)

    monkeypatch.setattr(OasisLayer, "_fetch_now", look)
    cache = cache_of(correction="auto", correct_above=above, correct_blocks=most, **knobs)
    decode(cache, LENGTHS, steps)
    stats, done = cache.stats(), cache.corrections()
    for layer in range(3):
        for head in range(2):
            assert stats["corrected"][layer, head] == sum(one == (layer, head, True) for one in told)
    share = float(cache.correction_rate().mean())
    assert 0.05 < share < 0.95 and share == pytest.approx(done["heads"] / len(told))
    assert 0 < done["steps"] < done["of_steps"] == steps * len(LENGTHS)
    assert done["bytes"] == done["blocks"] * cache.state.block_bytes > 0
    assert torch.equal(
        stats["bytes"], (stats["fetched"] + stats["first"] + stats["on_demand"]) * cache.state.block_bytes
    )
    assert f"{done['steps']} of {done['of_steps']} steps of a row corrected" in " ".join(cache.report(200).split())


def test_the_cosine_decides_with_any_lookahead():
    """1.0 is every head, -1.0 none; between them fewer heads, with the cap of the lane."""
    knobs, steps = dict(lookahead="smoothed", correction="auto", correct_blocks=1), 12
    outs, rates = [], []
    for below in (1.0, 0.3, -1.0):
        cache = cache_of(correct_below=below, **knobs)
        outs.append(decode(cache, steps=steps))
        rates.append(float(cache.correction_rate().mean()))
        stats = cache.stats()
        assert (stats["on_demand"] <= stats["corrected"]).all()
    assert rates[0] == 1 > rates[1] > rates[2] == 0
    assert torch.equal(outs[0], decode(cache_of(**{**knobs, "correction": "always"}), steps=steps))
    assert torch.equal(outs[2], decode(cache_of(lookahead="smoothed"), steps=steps))


def test_what_it_brings_is_better_to_attend_to():
    """The predicted mass that heads miss, right before they attend: less, the earlier the lane begins."""
    missed = []
    for above in (1.0, 0.3, 0.0):
        cache = cache_of(lookahead="previous", fetch_ratio=0.01, correction="auto", correct_above=above)
        seen, attend = [], WorkingSet.attend

        def look(self, query, lengths, *rest, cache=cache, seen=seen, attend=attend):
            (layer,) = [one for one in cache.sparse_layers if one.working_set is self]
            closed = lengths // BLOCK
            shares = layer.summaries.score(query, closed, torch.ones(3, 1), layer.scaling, int(closed.max()))
            seen.append(correction.missed(shares, self.table, closed).mean())
            return attend(self, query, lengths, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WorkingSet, "attend", look)
            decode(cache, steps=20)
        missed.append(float(torch.stack(seen).mean()))
    assert missed[2] < 0.5 * missed[1] and missed[1] < 0.9 * missed[0]


def test_rows_that_take_no_token_are_not_asked():
    model, inputs = tiny("llama"), left_padded(LENGTHS)
    cache = cache_of(correction="auto", correct_above=0.05, speculate=True, draft_tokens=2, drafter="prompt_lookup")
    oasis_hf.generate(
        model, **inputs, **{cache_name(model): cache}, max_new_tokens=60, do_sample=False, eos_token_id=None
    )
    stats, done = cache.stats(), cache.corrections()
    assert 0 < done["heads"] < done["compared"] and cache.stepper.passes
    assert (stats["compared"] <= cache.stepper.passes).all() and 0 < done["steps"] <= done["of_steps"]


@torch.no_grad()
def test_a_callers_own_candidates_choose_together():
    model, text, out = tiny("llama"), prompt(2, 140), []
    for knobs in ({"correction": "always", "correct_blocks": 5}, {"lookahead": "on_demand"}):
        cache = cache_of(recent_blocks=1, **knobs)
        model(text[:, :100], **{cache_name(model): cache})
        with cache.mode("verify"):
            out.append(
                torch.cat([model(text[:, at : at + 3], **{cache_name(model): cache}).logits for at in (100, 103)])
            )
    torch.testing.assert_close(*out, atol=1e-4, rtol=1e-4)


def test_only_the_layers_that_are_named_are_asked():
    """Few layers do most of it, and which is told."""
    knobs = dict(correction="auto", correct_above=0.02)
    every, some = (cache_of(**knobs, **more) for more in ({}, {"correct_layers": [2, 0]}))
    for cache in (every, some):
        decode(cache)
    assert some.state.config.correct_layers == (0, 2)
    assert some.stats()["compared"].sum(1).ne(0).tolist() == [True, False, True, False][: len(some.layers)]
    assert not some.stats()["on_demand"][1].any() and some.stats()["on_demand"][0].any()
    assert 0 < some.corrections()["heads"] < every.corrections()["heads"]
    assert some.corrections()["of_steps"] == every.corrections()["of_steps"]
    done = every.stats()["corrected"].sum(1)
    for share in (0.3, 0.8, 1.0):
        layers = every.layers_corrected(share)
        assert done[list(layers)].sum() >= share * done.sum() and list(layers) == sorted(layers)
        assert len(layers) == 1 or done[list(layers)].sum() - done[list(layers)].min() < share * done.sum()
    with pytest.raises(ValueError, match="share=0 is not allowed"):
        every.layers_corrected(0)
    with pytest.raises(ValueError, match="No layer was corrected yet"):
        cache_of(correction="auto").layers_corrected()


@pytest.mark.parametrize(
    "knobs, told",
    [
        ({"correct_layers": (0, 0), "correction": "auto"}, "a tuple of different integers >= 0, or None"),
        ({"correct_layers": (), "correction": "auto"}, "a tuple of different integers"),
        ({"correct_layers": (True,), "correction": "auto"}, "a tuple of different integers"),
        ({"correct_layers": 3, "correction": "auto"}, "a tuple of different integers"),
        ({"correct_layers": (1,)}, "None with correction='off'"),
        ({"correct_layers": (1, 9), "correction": "auto"}, r"\(1, 9\) is not allowed: use numbers below"),
    ],
)  # fmt: skip
def test_layers_that_are_not_there(knobs, told):
    with pytest.raises(ConfigError, match=told):
        cache_of(**knobs)


def test_counts_follow_branches_and_end_with_a_reset():
    cache = cache_of(correction="auto", correct_above=0.05)
    decode(cache)
    before = cache.corrections()
    branch = copy.deepcopy(cache)
    assert before["steps"] > 0 and branch.corrections() == before
    with torch.no_grad():
        branch.model(prompt(3, 1), position_ids=torch.full((3, 1), 250), **{cache_name(branch.model): branch})
    assert cache.corrections() == before and branch.corrections()["of_steps"] == before["of_steps"] + 3
    cache.batch_select_indices(torch.tensor([2, 0]))
    with torch.no_grad():
        cache.model(prompt(2, 1), position_ids=torch.full((2, 1), 250), **{cache_name(cache.model): cache})
    assert cache.corrections()["of_steps"] == before["of_steps"] + 2
    assert cache.corrections()["steps"] in range(before["steps"], before["steps"] + 3)
    cache.reset()
    assert not any(cache.corrections().values())


@pytest.mark.parametrize("store", ["resident", "file"])
def test_where_the_full_kv_lives_changes_nothing(store):
    knobs = dict(correction="auto", correct_above=0.1, correct_blocks=2)
    one, other = cache_of(**knobs), cache_of(store=store, **knobs)
    assert torch.equal(decode(one), decode(other))
    assert all(torch.equal(value, other.stats()[name]) for name, value in one.stats().items())


# -- in a captured step -----------------------------------------------------------------------------------------------

REPLAYED = [(knobs, {"correct_above": 0.1}) for knobs in LOOKAHEADS]
REPLAYED += [({}, {"correct_above": 0.02, "correct_layers": (1,)})]
REPLAYED += [
    (knobs, more) for knobs in LOOKAHEADS[2:5:2] for more in ({"correct_below": 0.3}, {"correction": "always"})
]


@pytest.mark.parametrize("knobs, correction", REPLAYED, ids=str)
def test_a_replay_is_the_eager_step(replays, knobs, correction):  # noqa: F811
    knobs = {**knobs, "correction": "auto", "correct_blocks": 2, **correction}
    eager, cache = both(tiny("llama"), inputs_of([100, 71]), count=30, **knobs)
    assert eager.corrections() == cache.corrections() and cache.corrections()["blocks"] > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_rounding_is_nothing_missed(replays, family):  # noqa: F811
    """A replay scores over more columns than the eager step, so that sums round otherwise."""
    eager, cache = both(tiny(family), inputs_of([100, 71]), 30, budget=80, correction="auto", correct_above=0.0)
    assert eager.corrections() == cache.corrections()
    assert 0 < cache.corrections()["heads"] < cache.corrections()["compared"]


def test_a_replay_is_the_eager_step_with_accepted_drafts(replays):  # noqa: F811
    model, inputs, caches, texts = tiny("llama"), inputs_of([100, 90, 61]), [], []
    for graphs in (False, True):
        cache = OasisCache(
            model, graphs=graphs, budget=64, compile_after=None, speculate=True, draft_tokens=2, correction="auto",
            correct_above=0.1,
        )  # fmt: skip
        texts.append(oasis_hf.generate(model, **inputs, past_key_values=cache, max_new_tokens=60, do_sample=False))
        caches.append(cache)
    assert torch.equal(*texts) and caches[1].graphs.replays > 10
    assert caches[0].corrections() == caches[1].corrections() and caches[1].corrections()["blocks"] > 0


@pytest.mark.parametrize("more", [{}, {"draft_tokens": 2}], ids=str)
def test_a_block_that_opens_takes_no_place_of_one_under_way(replays, more):  # noqa: F811
    """An accepted draft opens it between two replays, while what the first predicted is still to be moved. What a
    correction selects and what the step predicts can together be in every slot."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=384, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    model, inputs, outs = LlamaForCausalLM(config).eval(), left_padded([150, 200, 171]), []
    for graphs in (False, True):
        cache = OasisCache(
            model, graphs=graphs, budget=112, compile_after=None, speculate=True, correction="always", **more
        )  # fmt: skip
        outs.append((generate(model, inputs, cache, max_new_tokens=40), cache))
    (wanted, eager), (got, cache) = outs
    assert cache.graphs.replays > 5 and cache.graphs.refused is None
    for one, other in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert all(torch.equal(value, cache.stats()[name]) for name, value in eager.stats().items())


def test_it_comes_before_its_layers_attention_and_waits_for_no_other_layer(replays, monkeypatch):  # noqa: F811
    """On the model's own stream, behind the wait for the blocks that this layer was sent late, and for nothing else."""
    log, beside, gather, arrive = [], Pipeline.beside, HostStore.gather, Pipeline.arrive
    attend = oasis_hf.ops.attend

    def noted(self, *tensors):
        log.append(("beside",))
        return beside(self, *tensors)

    monkeypatch.setattr(HostStore, "gather", lambda self, *move: log.append(("gather", move[0])) or gather(self, *move))
    monkeypatch.setattr(Pipeline, "arrive", lambda self, at: log.append(("arrive", at)) or arrive(self, at))
    monkeypatch.setattr(Pipeline, "send", lambda self, move: log.append(("send",)))
    monkeypatch.setattr(Pipeline, "beside", noted)
    monkeypatch.setattr(oasis_hf.ops, "attend", lambda *args: log.append(("attend",)) or attend(*args))
    cache = OasisCache(tiny("llama"), budget=64, compile_after=None, correction="always")
    greedy(cache, inputs_of([100, 71]), 8)
    assert cache.graphs.replays > 2
    steps = [one for one in log if one[0] != "send"]
    assert steps[-12:] == [one for at in range(3) for one in (("arrive", at), ("gather", at), ("attend",), ("beside",))]
