"""Where rows end while they are generated, and what the host is told of it."""

from __future__ import annotations

import torch
from transformers import StoppingCriteria
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from oasis_hf.text import Text


def text_of(*criteria, rows=3):
    return Text(torch.arange(1, 1 + 2 * rows).view(rows, 2), StoppingCriteriaList(criteria), 0)


def added(text, chain, count):
    return text.put(text.cut(torch.tensor(chain), torch.tensor(count)))


CHAIN = [[50, 51, 52], [60, 9, 62], [70, 71, 72]]


def test_rows_end_at_an_id_or_at_the_longest_and_get_nothing_more():
    text = text_of(EosTokenCriteria(9), MaxLengthCriteria(6))
    told = added(text, CHAIN, [1, 3, 2])
    assert told.kept == [1, 2, 2] and told.right == [0, 2, 1] and told.chain == CHAIN
    assert text.going == [True, False, True] and text.tokens == [3, 4, 4]
    assert text.ahead(8) == [2, 0, 1] and text.ahead(1) == [1, 0, 1]
    told = added(text, CHAIN, [3, 3, 3])
    assert told.kept == [3, 0, 2] and text.going == [False] * 3
    assert text.tokens == text.lengths.tolist() == [6, 4, 6] and text.done.all()
    assert text.sequences().tolist() == [[1, 2, 50, 50, 51, 52], [3, 4, 60, 9, 0, 0], [5, 6, 70, 71, 70, 71]]
    assert text.last().tolist() == [52, 9, 71]


def test_several_end_ids_and_none():
    text = text_of(EosTokenCriteria([51, 72]))
    assert added(text, CHAIN, [3, 3, 3]).kept == [2, 3, 3] and text.going == [False, True, False]
    text = text_of()
    assert added(text, CHAIN, [3, 1, 2]).kept == [3, 1, 2] and text.going == [True] * 3
    assert text.ahead(7) == [7, 7, 7]


class Asks(StoppingCriteria):
    """Ends where the last two ids are the row's own; says what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return input_ids[:, -1] == torch.tensor([51, 61, 72])


def test_other_criteria_are_asked_of_every_beginning_that_is_chosen_and_of_no_other():
    asks = Asks()
    text = text_of(asks, MaxLengthCriteria(6))
    told = added(text, CHAIN, [3, 1, 2])
    assert told.kept == [2, 1, 2] and text.going == [False, True, True] and asks.asked == [3, 4, 5]
    asks.asked.clear()
    assert added(text, CHAIN, [1, 2, 3]).kept == [0, 2, 2] and asks.asked == [4, 5, 6, 7]
    assert text.sequences().tolist() == [[1, 2, 50, 51, 0, 0], [3, 4, 60, 60, 9, 0], [5, 6, 70, 71, 70, 71]]


def test_beginnings_with_drafts_are_those_of_rows_that_go_on():
    text = text_of(MaxLengthCriteria(5))
    added(text, CHAIN, [3, 1, 2])
    drafts = torch.tensor([[80, 81], [82, 83], [84, 85]])
    seen = {before.shape[1]: (places.tolist(), before.tolist()) for places, before in text.with_drafts(drafts)}
    assert sorted(seen) == [3, 4, 5, 6]
    assert seen[3][0] == [-2, 0, -1] and seen[5][0] == [0, 2, 1]
    assert seen[5][1][1:] == [[3, 4, 60, 82, 83], [5, 6, 70, 71, 84]]
