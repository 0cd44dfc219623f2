"""Whose queries count how much."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generate import generate
from tiny import prompt, tiny

from oasis_hf import Eagle3Drafter, OasisCache, OasisConfig, OracleDrafter, PromptLookupDrafter
from oasis_hf.forced import Injected
from oasis_hf.lookahead import (
    draft_rows,
    next_input_probabilities,
    predicts_blocks,
    query_weights,
    recent_window,
    row_weights,
    settled,
    wants_drafts,
)

MIX = {"draft": 3.0, "previous": 1.0}


def weights(kind, drafts=0, found=None, acceptance=0.5, rows=2, count=1, chances=None, shed=False, **knobs):
    config = OasisConfig(lookahead=kind, **knobs)
    found = None if found is None else torch.tensor(found)
    chances, window = None if chances is None else torch.tensor(chances), recent_window(config)
    others = 0 if chances is None else chances.shape[1] - 1
    pair = torch.tensor(query_weights(config, window, drafts, acceptance, count, others, shed))
    return row_weights(pair, found, rows, chances, window).tolist()


@given(st.integers(1, 7), st.floats(0, 1))
def test_probabilities_sum_to_one(drafts, acceptance):
    got = next_input_probabilities(drafts, acceptance)
    assert len(got) == drafts and all(p >= 0 for p in got)
    assert sum(got) == pytest.approx(1)


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_probabilities_are_those_of_every_outcome_counted(drafts):
    acceptance = 0.7
    want = [0.0] * drafts
    # All but the last draft are verified, each accepted or not; the first rejection stops the chain.
    for outcome in itertools.product([True, False], repeat=drafts - 1):
        chance = 1.0
        for accepted in outcome:
            chance *= acceptance if accepted else 1 - acceptance
        want[outcome.index(False) if False in outcome else drafts - 1] += chance
    assert next_input_probabilities(drafts, acceptance) == pytest.approx(want)


@pytest.mark.parametrize("kind", ["none", "on_demand"])
def test_nothing_is_predicted(kind):
    assert not predicts_blocks(OasisConfig(lookahead=kind)) and predicts_blocks(OasisConfig())


def test_previous_is_the_newest_query_alone():
    assert weights("previous") == [[1.0], [1.0]]


def test_smoothed_is_the_mean_of_the_recent_ones():
    assert weights("smoothed", smooth_queries=5) == [pytest.approx([0.2] * 5)] * 2


@pytest.mark.parametrize("kind", ["draft", "oracle"])
def test_rows_with_a_draft_use_it_and_the_others_recent_queries(kind):
    got = weights(kind, drafts=2, found=[True, False], acceptance=0.25, smooth_queries=2)
    assert got == [[0, 0, 0.75, 0.25], [0.5, 0.5, 0, 0]]


def test_one_unverified_draft_counts_whole():
    assert weights("draft", drafts=1, found=[True, True], smooth_queries=2) == [[0, 0, 1]] * 2


@pytest.mark.parametrize("kind", ["draft", "oracle"])
def test_a_drafter_that_proposes_nothing_leaves_the_current_query(kind):
    assert weights(kind, drafts=0, smooth_queries=3) == [[0, 0, 1]] * 2


def test_a_mix_is_shared_out_in_its_proportion():
    assert weights(MIX, drafts=2, found=[True, False], acceptance=0.5) == [[0.25, 0.375, 0.375], [1, 0, 0]]
    assert weights(MIX) == [[1], [1]]


def test_candidates_share_by_their_probabilities():
    """One draft that is not verified: the next input stands there, whichever of them it is."""
    chances = [[0.6, 0.2, 0.2], [0.5, 0.1, 0.0]]
    got = weights("draft", drafts=1, found=[True, True], chances=chances, smooth_queries=2)
    assert got == [pytest.approx([0, 0, 0.6, 0.2, 0.2]), pytest.approx([0, 0, 5 / 6, 1 / 6, 0])]
    mixed = weights(MIX, drafts=1, found=[True, False], chances=chances)
    assert mixed == [pytest.approx([0.25, 0.45, 0.15, 0.15]), [1, 0, 0, 0]]


def test_a_first_candidate_that_is_accepted_leaves_its_place_to_the_others():
    """Verified at a rate of 0.5: of its 0.6 only 0.1 stand at the first place."""
    chances = [[0.6, 0.3, 0.1], [0.4, 0.3, 0.1]]
    got = weights("draft", drafts=3, found=[True, True], chances=chances, acceptance=0.5, smooth_queries=1)
    assert got[0] == pytest.approx([0, 0.1, 0.25, 0.25, 0.3, 0.1])
    assert got[1] == pytest.approx([0, 0, 0.25, 0.25, 0.375, 0.125])
    nothing = weights("draft", drafts=2, found=[True] * 2, chances=[[1.0, 0.0]] * 2, acceptance=1.0, smooth_queries=1)
    assert nothing == [[0, 0, 1, 0]] * 2
    assert weights("previous", drafts=2, found=[True] * 2, chances=chances) == [[1, 0, 0, 0, 0]] * 2


def test_too_many_rows_for_drafts_leave_recent_queries():
    assert weights("draft", shed=True, smooth_queries=4, draft_up_to=2) == [[0.25] * 4] * 2
    assert weights(MIX, shed=True, smooth_queries=4, draft_up_to=2) == [[0.25] * 4] * 2
    for kind in ("draft", MIX):
        config = OasisConfig(lookahead=kind, draft_up_to=8, smooth_queries=3)
        assert recent_window(config, drafted=True) == 3, "a head that always drafts may not be asked"
    assert draft_rows(OasisConfig(speculate=True, draft_tokens=3), verifies=False) == 1


def test_auto_is_what_the_drafter_says():
    """Half of the current query beside a head's draft; n-gram matches alone, which are rare and then mostly right."""
    head = settled(OasisConfig(budget=64), Eagle3Drafter)
    assert head.lookahead == {"draft": 0.5, "previous": 0.5} and head.budget == 64
    assert recent_window(head, drafted=True) == 1
    assert settled(OasisConfig(), PromptLookupDrafter).lookahead == "draft"
    assert settled(OasisConfig(), OracleDrafter).lookahead == "draft"
    assert settled(OasisConfig(lookahead="smoothed"), Eagle3Drafter).lookahead == "smoothed"
    assert wants_drafts(OasisConfig())


@given(
    st.sampled_from(["draft", "previous", "smoothed", "oracle", {"draft": 0.2, "previous": 5}]),
    st.integers(0, 6),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(1, 9),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_weights_of_a_row_sum_to_one_and_are_never_negative(kind, drafts, found, acceptance, smooth, chances):
    config = OasisConfig(lookahead=kind, smooth_queries=smooth)
    window, others = recent_window(config), len(chances) - 1 if drafts else 0
    pair = torch.tensor(query_weights(config, window, drafts, acceptance, 1, others))
    probabilities = torch.tensor(chances).expand(len(found), -1) if others else None
    out = row_weights(pair, torch.tensor(found), len(found), probabilities, window)
    assert out.shape == (len(found), window + drafts + others) and out.dtype == torch.float32
    assert (out >= 0).all()
    torch.testing.assert_close(out.sum(1), torch.ones(len(found)))


@pytest.mark.parametrize(
    "kind, kept, drafted", [("draft", 4, 1), ("oracle", 4, 1), ("smoothed", 4, 4), ("previous", 1, 1), (MIX, 1, 1)],
    ids=str,
)  # fmt: skip
def test_recent_queries_that_are_never_asked_for_are_not_kept(kind, kept, drafted):
    config = OasisConfig(lookahead=kind, smooth_queries=4)
    assert recent_window(config) == kept and recent_window(config, drafted=True) == drafted


@pytest.mark.parametrize("share, kept", [(1, 1), (0.5, 4)])
def test_a_drafter_that_always_drafts_needs_the_latest_query_alone(share, kept):
    model, ids = tiny("llama"), prompt(4, 300)
    cache = OasisCache(model, budget=64, smooth_queries=4, drafter=Injected(share))
    generate(model, ids, cache, max_new_tokens=6)
    assert all(layer.recent.shape[2] == kept for layer in cache.sparse_layers)
    found = cache.drafter.propose(ids[:, 0], torch.zeros(4, dtype=torch.int64), 2).found
    assert found.tolist() == [row < 4 * share for row in range(4)]


def test_a_caller_s_own_candidates_count_alike():
    assert weights("draft", count=3, smooth_queries=4) == [pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])] * 2
    assert weights("previous", count=8) == [[1]] * 2


def test_how_many_rows_are_stacked():
    assert draft_rows(OasisConfig()) == 1
    assert draft_rows(OasisConfig(speculate=True, draft_tokens=3)) == 4


@pytest.mark.parametrize(
    "knobs, wanted",
    [
        ({}, True),
        ({"lookahead": "oracle"}, True),
        ({"lookahead": MIX}, True),
        ({"lookahead": "previous"}, False),
        ({"lookahead": "smoothed"}, False),
        ({"lookahead": "none"}, False),
        ({"lookahead": "on_demand", "speculate": True}, True),
    ],
)
def test_when_drafts_are_wanted(knobs, wanted):
    assert wants_drafts(OasisConfig(**knobs)) is wanted
