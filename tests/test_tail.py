"""The tail: who follows whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_hf.config import TAIL
from oasis_hf.tail import Tail, at_entry

CPU = torch.device("cpu")


def seen(tail):
    return [[i for i in range(TAIL) if row[i]] for row in tail.mask(CPU).tolist()]


def test_a_chain_sees_everything_before_it():
    tail = Tail.chain(None, None, 1, 3)
    assert tail.parents == (-1, 0, 1, 2) and (tail.count, tail.last) == (1, 0)
    assert seen(tail) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_several_new_tokens_stand_before_the_drafts():
    tail = Tail.chain(None, None, 3, 2)
    assert tail.parents == (-1, 0, 1, 2, 3) and (tail.count, tail.last) == (3, 2)


def test_branches_of_a_tree_do_not_see_each_other():
    tail = Tail(None, None, (-1, 0, 0, 1, 2, 4, -1))
    assert seen(tail) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5], [6]]


def test_other_candidates_stand_where_the_first_draft_does():
    tail = Tail.chain(None, None, 1, 2, 3)
    assert tail.parents == (-1, 0, 1, 0, 0, 0)
    assert seen(tail) == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 4], [0, 5]]
    assert Tail.chain(None, None, 2, 1, 1).parents == (-1, 0, 1, 1)


def test_an_entry_of_every_row_or_each_its_own():
    stacked = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(at_entry(stacked, 2), stacked[:, :, 2])
    assert torch.equal(at_entry(stacked, torch.tensor([3, 0])), torch.stack((stacked[0, :, 3], stacked[1, :, 0])))


def test_at_most_eight_entries():
    assert Tail.chain(None, None, 1, TAIL - 1).mask(CPU).shape == (TAIL, TAIL)
    with pytest.raises(ValueError, match="at most 8 entries, not 9"):
        Tail.chain(None, None, 1, TAIL)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, 2, 0)])
def test_a_parent_comes_before_its_entry(parents):
    with pytest.raises(ValueError, match="must come after their parents"):
        Tail(None, None, parents)


@given(st.lists(st.integers(0, TAIL), max_size=TAIL, min_size=1))
def test_an_entry_sees_itself_and_what_its_parent_sees(draws):
    parents = tuple(draw % (i + 1) - 1 for i, draw in enumerate(draws))
    mask = Tail(None, None, parents).mask(CPU)
    assert mask.shape == (len(parents), TAIL) and mask.dtype == torch.bool
    for entry, parent in enumerate(parents):
        want = mask[parent].clone() if parent >= 0 else torch.zeros(TAIL, dtype=torch.bool)
        want[entry] = True
        assert torch.equal(mask[entry], want)
