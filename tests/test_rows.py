"""Rows: lengths without padding, on the host and on the device."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_hf.rows import Rows

CPU = torch.device("cpu")


def rows_of(*masks):
    rows = Rows(len(masks))
    rows.extend(torch.tensor([list(map(int, mask)) for mask in masks]).bool())
    return rows


def test_padding_is_counted_in_columns_and_not_in_tokens():
    rows = rows_of("0011", "1111")
    assert (rows.columns, rows.tokens, len(rows)) == (4, [2, 4], 2)
    rows.extend(torch.tensor([[True, False, True], [False, False, False]]))
    assert (rows.columns, rows.tokens) == (7, [4, 4])


def test_blocks_of_the_longest_row_count_the_open_one():
    rows = Rows(2)
    for tokens, blocks in ((0, 0), (1, 1), (16, 1), (17, 2)):
        rows.advance(tokens - rows.tokens[0])
        assert rows.most_blocks == blocks


def test_device_lengths_advance_in_place():
    rows = rows_of("011", "111")
    lengths = rows.lengths(CPU)
    rows.advance(2)
    assert rows.lengths(CPU) is lengths and lengths.tolist() == rows.tokens == [4, 5]
    assert rows.valid.tolist() == [[False, True, True, True, True], [True] * 5]


def test_crop_drops_columns_of_padding_too():
    rows = rows_of("0110", "1111")
    assert rows.lengths(CPU).tolist() == [2, 4]
    rows.shorten(rows.valid[:, :-2])
    assert (rows.columns, rows.tokens, rows.lengths(CPU).tolist()) == (2, [1, 2], [1, 2])
    rows.shorten(rows.valid[:, :0])
    assert (rows.columns, rows.tokens, rows.lengths(CPU).tolist()) == (0, [0, 0], [0, 0])


def test_hide_takes_tokens_out_of_one_row():
    rows = rows_of("0111", "1111")
    rows.hide(1, torch.tensor([True, False, True, False]))
    assert (rows.tokens, rows.columns, rows.lengths(CPU).tolist()) == ([3, 2], 4, [3, 2])


def test_select_reorders_repeats_and_drops():
    rows = rows_of("0001", "0111", "1111")
    rows.lengths(CPU)
    rows.select([2, 0, 0])
    assert rows.tokens == [4, 1, 1] and rows.lengths(CPU).tolist() == [4, 1, 1] and len(rows) == 3


def test_a_fork_goes_its_own_way():
    rows = rows_of("01", "11")
    other = rows.fork()
    rows.hide(1, torch.tensor([False, True]))
    rows.advance(3)
    assert other.tokens == [1, 2] and other.lengths(CPU).tolist() == [1, 2]
    assert other.valid.tolist() == [[False, True], [True, True]]
    other.advance(1)
    assert rows.tokens == [4, 4] and rows.lengths(CPU).tolist() == [4, 4]


@given(st.data())
def test_tokens_lengths_and_validity_always_agree(data):
    batch = data.draw(st.integers(1, 3))
    rows, model = Rows(batch), [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["extend", "advance", "crop", "select"]))
        count = data.draw(st.integers(0, 4))
        if kind == "extend":
            new = [data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for _ in model]
            rows.extend(torch.tensor(new, dtype=torch.bool).view(len(model), count))
            model = [row + more for row, more in zip(model, new)]
        elif kind == "advance":
            rows.advance(count)
            model = [row + [True] * count for row in model]
        elif kind == "crop":
            rows.shorten(rows.valid[:, : max(rows.columns - count, 0)])
            model = [row[: len(row) - min(count, len(row))] for row in model]
        else:
            index = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=4))
            rows.select(index)
            model = [list(model[i]) for i in index]
        assert rows.valid.tolist() == model
        assert rows.tokens == [sum(row) for row in model] == rows.lengths(CPU).tolist()


@given(st.data())
def test_rows_at_their_own_pace_are_packed_at_the_end(data):
    batch = data.draw(st.integers(1, 3))
    rows = Rows(batch)
    first = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch))).view(batch, 2)
    rows.extend(first)
    lengths, want = rows.lengths(CPU), list(rows.tokens)
    with rows.pacing(CPU):
        for _ in range(data.draw(st.integers(0, 5))):
            takes = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
            rows.leave_out(torch.tensor(takes))
            if data.draw(st.booleans()):
                count = data.draw(st.integers(1, 2))
                rows.advance(count)
                more = [count * one for one in takes]
            else:
                more = [one * data.draw(st.integers(0, 3)) for one in takes]
                rows.advance_by(more, torch.tensor(more))
            want = [n + new for n, new in zip(want, more)]
            assert rows.tokens == want == lengths.tolist() == rows.valid.sum(1).tolist()
            assert rows.columns_on(CPU) == rows.columns
    assert rows.tokens == want == rows.lengths(CPU).tolist() and rows.taking is None
    new = [n - old for n, old in zip(want, first.sum(1).tolist())]
    assert rows.columns == 2 + max(new) and rows.columns_on(CPU) == rows.columns
    assert [row.tolist() for row in rows.valid[:, 2:]] == [[True] * n + [False] * (max(new) - n) for n in new]


def test_the_device_is_told_in_the_same_tensors():
    rows = rows_of("011", "111")
    lengths, columns = rows.lengths(CPU), rows.columns_on(CPU)
    rows.extend(torch.tensor([[True, True], [True, False]]))
    rows.shorten(rows.valid[:, :-1])
    with rows.pacing(CPU):
        taking = rows.taking
        rows.advance_by([2, 0], torch.tensor([2, 0]))
    rows.resync()
    assert rows.lengths(CPU) is lengths and lengths.tolist() == rows.tokens == [5, 4]
    assert rows.columns_on(CPU) is columns and columns == rows.columns == 6
    with rows.pacing(CPU):
        assert rows.taking is taking
    rows.select([0, 1, 1])
    assert rows.lengths(CPU) is not lengths and rows.lengths(CPU).tolist() == [5, 4, 4]
