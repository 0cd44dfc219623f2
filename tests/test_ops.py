"""Each operator against loops written from its description."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_hf import ops
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.scorers import SCORERS

INF = math.inf


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- enter -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, count, window", [(1, 1, 1), (2, 1, 4), (5, 1, 2), (3, 3, 2), (4, 2, 3)])
def test_enter_moves_tokens_to_the_tail_and_queries_behind_the_recent_ones(tokens, count, window):
    query, keys, values = (randn(2, heads, tokens, 4, seed=i) for i, heads in enumerate((6, 2, 2)))
    queries, buffer = randn(2, 6, window + TAIL, 4, seed=3), randn(2, 2, TAIL + 3 * BLOCK, 4, seed=4)
    before, slots, other = queries.clone(), buffer.clone(), buffer.clone() + 1
    fresh = torch.ones(2, 2, 3, dtype=torch.bool)
    ops.enter(query, keys, values, queries, count, window, buffer, other, fresh)
    line = [*before[:, :, :window].unbind(2), *query.unbind(2)][count:]
    for at, wanted in enumerate(line):
        assert torch.equal(queries[:, :, at], wanted), at
    assert torch.equal(queries[:, :, len(line) :], before[:, :, len(line) :])
    assert torch.equal(buffer[:, :, :tokens], keys) and torch.equal(other[:, :, :tokens], values)
    assert torch.equal(buffer[:, :, tokens:], slots[:, :, tokens:]) and not fresh.any()


# -- summarize ---------------------------------------------------------------------------------------------------------


def two_vectors(run: np.ndarray, scorer: str) -> list[list[float]]:
    """run: `[tokens, D]`."""
    high = [max(run[t][d] for t in range(len(run))) for d in range(run.shape[1])]
    low = [min(run[t][d] for t in range(len(run))) for d in range(run.shape[1])]
    if scorer == "minmax":
        return [high, low]
    return [[(h + lo) / 2 for h, lo in zip(high, low)], [(h - lo) / 2 for h, lo in zip(high, low)]]


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_summarize_gives_two_vectors_a_run_of_tokens(scorer, parts):
    keys = randn(2, 3, BLOCK, 5)
    out, scales = ops.summarize(keys, scorer, parts, False)
    assert out.shape == (2, 3, parts, 2, 5) and out.dtype == keys.dtype and scales.numel() == 0
    run = BLOCK // parts
    for b in range(2):
        for h in range(3):
            for p in range(parts):
                want = two_vectors(keys[b, h, p * run : (p + 1) * run].numpy(), scorer)
                np.testing.assert_allclose(out[b, h, p].numpy(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_summarize_int8_is_within_half_a_scale_and_uses_the_whole_range(scorer, size):
    keys = randn(2, 2, BLOCK, 8) * size
    plain, _ = ops.summarize(keys, scorer, 2, False)
    out, scales = ops.summarize(keys, scorer, 2, True)
    assert out.dtype == torch.int8 and scales.dtype == torch.float16 and scales.shape == out.shape[:-1]
    for place in np.ndindex(*scales.shape):
        scale, vector = float(scales[place]), plain[place].tolist()
        assert scale > 0
        # What does not fit in 127 steps of the rounded scale is cut: less than a tenth of a step.
        assert all(abs(int(q) * scale - v) <= 0.6 * scale for q, v in zip(out[place].tolist(), vector))
        assert max(abs(int(q)) for q in out[place].tolist()) <= 127
        if size >= 1:
            assert max(abs(int(q)) for q in out[place].tolist()) in (126, 127)
            assert scale == pytest.approx(max(map(abs, vector)) / 127, rel=2**-10)


def test_summarize_int8_of_zeros_is_zeros():
    out, scales = ops.summarize(torch.zeros(1, 1, BLOCK, 4), "midrange", 1, True)
    assert not out.any() and (scales > 0).all()


# -- score -------------------------------------------------------------------------------------------------------------


def score_by_hand(query, summaries, scales, closed, weights, scorer, half_range, reduction, scaling, sinks, recent):
    rows, heads, blocks, parts, _, dim = summaries.shape
    group, tokens = query.shape[1] // heads, query.shape[2]
    out = np.full((rows, heads, blocks), -INF)
    for b in range(rows):
        count = int(closed[b])
        if not count:
            continue
        for h in range(heads):
            raw = np.zeros((group, tokens, count, parts))
            for g, t, n, p in np.ndindex(*raw.shape):
                q = query[b, h * group + g, t].double().numpy()
                first, second = summaries[b, h, n, p].double().numpy()
                if scales.numel():
                    first, second = first * float(scales[b, h, n, p, 0]), second * float(scales[b, h, n, p, 1])
                for d in range(dim):
                    if scorer == "minmax":
                        raw[g, t, n, p] += scaling * (q[d] * first[d] if q[d] > 0 else q[d] * second[d])
                    else:
                        raw[g, t, n, p] += scaling * (q[d] * first[d] + half_range * abs(q[d]) * second[d])
            per_token = np.zeros((tokens, count))
            for t in range(tokens):
                if reduction == "softmax-mean":
                    for g in range(group):
                        weight = np.exp(raw[g, t] - raw[g, t].max())
                        per_token[t] += (weight / weight.sum()).sum(-1) / group
                else:
                    best = raw[:, t].max(-1)
                    per_token[t] = best.max(0) if reduction == "max" else best.mean(0)
                    if tokens > 1:
                        spread = per_token[t].std()
                        per_token[t] = (per_token[t] - per_token[t].mean()) / (spread if spread > 0 else 1)
            for n in range(count):
                out[b, h, n] = (
                    per_token[0, n]
                    if tokens == 1
                    else sum(float(weights[b, t]) * per_token[t, n] for t in range(tokens))
                )
                if n < sinks or n >= count - recent:
                    out[b, h, n] = INF
    return out


def score_case(tokens, group=3, parts=2, int8=False, scorer="midrange", seed=0):
    keys = randn(2, 2, 5, BLOCK, 4, seed=seed)
    summaries, scales = ops.summarize(keys, scorer, parts, int8)
    query = randn(2, 2 * group, tokens, 4, seed=seed + 1) * 3
    weights = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed))
    return query, summaries, scales, weights


@pytest.mark.parametrize("reduction", ["max", "mean", "softmax-mean"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scorer, int8", [("minmax", False), ("midrange", True)])
@pytest.mark.parametrize("closed", [[5, 3], [0, 1]], ids=str)
def test_score(reduction, tokens, scorer, int8, closed):
    query, summaries, scales, weights = score_case(tokens, int8=int8, scorer=scorer)
    args = (query, summaries, scales, torch.tensor(closed), weights, scorer, 0.6, reduction, 0.5, 0, 0)
    np.testing.assert_allclose(ops.score(*args).numpy(), score_by_hand(*args), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("group, parts", [(1, 1), (7, 4)])
def test_score_of_any_group_and_parts(group, parts):
    query, summaries, scales, weights = score_case(2, group=group, parts=parts)
    args = (query, summaries, scales, torch.tensor([5, 4]), weights, "midrange", 0.5, "softmax-mean", 0.5, 0, 0)
    np.testing.assert_allclose(ops.score(*args).numpy(), score_by_hand(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sinks, recent", [(1, 0), (0, 2), (2, 2), (9, 0)])
def test_sink_and_recent_blocks_score_infinity_and_missing_ones_never_do(sinks, recent):
    query, summaries, scales, weights = score_case(2)
    args = (query, summaries, scales, torch.tensor([5, 1]), weights, "midrange", 0.5, "max", 0.5, sinks, recent)
    out = ops.score(*args)
    np.testing.assert_allclose(out.numpy(), score_by_hand(*args), rtol=1e-4, atol=2e-5)
    assert (out[1, :, 1:] == -INF).all()


def test_what_stands_behind_the_closed_blocks_changes_nothing():
    query, summaries, scales, weights = score_case(2)
    args = (scales, torch.tensor([3, 2]), weights, "midrange", 0.5, "softmax-mean", 0.5, 0, 1)
    before = ops.score(query, summaries, *args)
    summaries = summaries.clone()
    summaries[0, :, 3:] = 1e4
    summaries[1, :, 2:] = -1e4
    assert torch.equal(before, ops.score(query, summaries, *args))


def test_a_token_of_weight_zero_does_not_count():
    query, summaries, scales, _ = score_case(3)
    rest = ("midrange", 0.5, "softmax-mean", 0.5, 0, 0)
    closed = torch.tensor([5, 5])
    both = ops.score(query, summaries, scales, closed, torch.tensor([[0.0, 1.0, 0.0]] * 2), *rest)
    alone = ops.score(query[:, :, 1:2], summaries, scales, closed, torch.ones(2, 1), *rest)
    torch.testing.assert_close(both, alone)


def test_a_single_token_is_not_weighted():
    query, summaries, scales, _ = score_case(1)
    rest = ("midrange", 0.5, "softmax-mean", 0.5, 0, 0)
    one, two = (
        ops.score(query, summaries, scales, torch.tensor([5, 5]), torch.full((2, 1), w), *rest) for w in (1.0, 0.3)
    )
    assert torch.equal(one, two)


# -- select ------------------------------------------------------------------------------------------------------------


def select_by_hand(scores, table, last, open_block, order, cap, step):
    """One row and head, lists throughout. Returns the pairs, the counts, and the table and ages after it."""
    slots, table, last = len(table), list(table), list(last)
    ranked = sorted((n for n in range(len(scores)) if scores[n] > -INF), key=lambda n: -scores[n])[: slots - 1]
    hits = [n for n in ranked if n in table]
    misses = [n for n in ranked if n not in table]
    victims = [s for s in range(slots) if table[s] not in ranked and (open_block is None or table[s] != open_block)]
    victims.sort(key=lambda s: (-1 if table[s] < 0 else last[s], order[s]))
    pairs = list(zip(misses, victims))[:cap]
    for n in hits:
        last[table.index(n)] = step
    for n, s in pairs:
        table[s], last[s] = n, step
    return pairs, (len(hits), len(pairs), len(misses) - len(pairs)), table, last


@st.composite
def selections(draw):
    rows, heads, slots = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(2, 6))
    blocks = draw(st.integers(1, 9))
    step = draw(st.integers(1, 9))
    lengths, tables, lasts, scores = [], [], [], []
    for _ in range(rows):
        closed = draw(st.integers(0, blocks))
        into = draw(st.integers(0, BLOCK - 1))
        lengths.append(closed * BLOCK + into)
        for _ in range(heads):
            resident = draw(st.permutations(range(closed)))[: draw(st.integers(0, slots - 1))]
            resident = [*resident, closed] if into else list(resident)
            row = resident + [-1] * (slots - len(resident))
            tables.append(draw(st.permutations(row)))
            lasts.append(draw(st.lists(st.integers(0, step - 1), min_size=slots, max_size=slots)))
            ranks = draw(st.permutations(range(blocks)))
            scores.append([float(r) - 3 if n < closed and draw(st.booleans()) else -INF for n, r in enumerate(ranks)])
    order = draw(st.permutations(range(slots)))
    cap = draw(st.integers(1, slots + 2))
    return rows, heads, slots, blocks, step, lengths, tables, lasts, scores, order, cap


@settings(max_examples=200)
@given(selections())
def test_select(case):
    rows, heads, slots, blocks, step, lengths, tables, lasts, scores, order, cap = case
    table = torch.tensor(tables).view(rows, heads, slots)
    last = torch.tensor(lasts).view(rows, heads, slots)
    plan_block, plan_slot, counts = ops.select(
        torch.tensor(scores).view(rows, heads, blocks),
        table,
        last,
        torch.tensor(lengths),
        torch.tensor(order),
        cap,
        torch.tensor(step),
    )
    assert plan_block.shape == plan_slot.shape == (rows, heads, min(cap, slots)) and counts.shape == (3, heads)
    total = np.zeros((3, heads), dtype=int)
    for b in range(rows):
        open_block = lengths[b] // BLOCK if lengths[b] % BLOCK else None
        for h in range(heads):
            at = b * heads + h
            pairs, seen, want_table, want_last = select_by_hand(
                scores[at], tables[at], lasts[at], open_block, order, cap, step
            )
            got = [(n, s) for n, s in zip(plan_block[b, h].tolist(), plan_slot[b, h].tolist()) if n >= 0]
            assert got == pairs
            assert table[b, h].tolist() == want_table
            assert last[b, h].tolist() == want_last
            assert len(set(plan_slot[b, h].tolist())) == min(cap, slots), "gather needs different slots"
            total[:, h] += seen
    assert counts.tolist() == total.tolist()


def test_equally_old_victims_go_in_the_given_order():
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        table = torch.tensor([[[0, 1, 2, 3]]])
        last = torch.ones(1, 1, 4, dtype=torch.int64)
        scores = torch.tensor([[[-INF] * 4 + [3.0, 2.0]]])
        _, slot, _ = ops.select(scores, table, last, torch.tensor([6 * BLOCK]), torch.tensor(order), 2, torch.tensor(2))
        assert slot[0, 0].tolist() == sorted(range(4), key=lambda s: order[s])[:2]


def test_blocks_that_score_infinity_are_always_predicted():
    table = torch.tensor([[[5, 4, 3, 0]]])
    last = torch.zeros(1, 1, 4, dtype=torch.int64)
    scores = torch.tensor([[[INF, 9.0, 8.0, 7.0, 6.0, INF]]])
    ops.select(scores, table, last, torch.tensor([6 * BLOCK]), torch.arange(4), 3, torch.tensor(1))
    assert {0, 5} <= set(table[0, 0].tolist()) and table[0, 0, 0] == 5 and table[0, 0, 3] == 0


# -- gather ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_copies_planned_blocks_and_touches_nothing_else(dtype):
    pages = randn(12, 2, BLOCK, 4, dtype=dtype)
    page_table = torch.tensor([[[3, 1, 7], [0, 11, 2]], [[5, -1, -1], [-1, -1, -1]]])
    keys, values = randn(2, 2, TAIL + 3 * BLOCK, 4, seed=1), randn(2, 2, TAIL + 3 * BLOCK, 4, seed=2)
    plan_block = torch.tensor([[[2, -1], [0, 1]], [[-1, 0], [-1, -1]]])
    plan_slot = torch.tensor([[[1, 0], [2, 0]], [[2, 1], [0, 1]]])
    want_keys, want_values = keys.clone(), values.clone()
    for b, h, c in np.ndindex(2, 2, 2):
        block, slot = int(plan_block[b, h, c]), int(plan_slot[b, h, c])
        if block >= 0:
            page = pages[int(page_table[b, h, block])]
            for token in range(BLOCK):
                want_keys[b, h, TAIL + slot * BLOCK + token] = page[0, token].float()
                want_values[b, h, TAIL + slot * BLOCK + token] = page[1, token].float()
    ops.gather(pages, page_table, keys, values, plan_block, plan_slot)
    assert torch.equal(keys, want_keys) and torch.equal(values, want_values)


# -- write -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(0, 40), st.integers(0, 70), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_write_puts_tokens_into_their_pages_and_touches_nothing_else(start, count, token_major, dtype):
    heads, blocks = 2, (start + count) // BLOCK + 2
    order = torch.randperm(heads * blocks, generator=torch.Generator().manual_seed(start))
    page_table = torch.full((heads, blocks + 3), -1)  # as the store's: room beyond, each head's blocks anywhere
    page_table[:, :blocks] = order.view(heads, blocks)
    keys, values = (randn(count, heads, 3, seed=i).transpose(0, 1) for i in range(2))
    if not token_major:
        keys, values = keys.contiguous(), values.contiguous()
    pages = randn(heads * blocks + 2, 2, BLOCK, 3, seed=3, dtype=dtype)
    want = pages.clone()
    for h, i in np.ndindex(heads, count):
        block, into = divmod(start + i, BLOCK)
        want[page_table[h, block], 0, into] = keys[h, i].to(dtype)
        want[page_table[h, block], 1, into] = values[h, i].to(dtype)
    ops.write(pages, page_table, keys, values, start)
    assert torch.equal(pages, want)


# -- append ------------------------------------------------------------------------------------------------------------


@st.composite
def appends(draw):
    rows, heads, slots = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 5))
    lengths, tables = [], []
    for _ in range(rows):
        closed, into = draw(st.integers(0, 7)), draw(st.sampled_from([0, 0, 1, 7, 15]))
        lengths.append(closed * BLOCK + into)
        for _ in range(heads):
            resident = draw(st.permutations(range(closed)))[: slots - 1]
            resident = [*resident, closed] if into else list(resident)
            tables.append(draw(st.permutations(resident + [-1] * (slots - len(resident)))))
    lasts = draw(st.lists(st.integers(0, 4), min_size=rows * heads * slots, max_size=rows * heads * slots))
    taking = draw(st.lists(st.sampled_from([True, True, False]), min_size=rows, max_size=rows))
    return rows, heads, slots, lengths, tables, lasts, draw(st.permutations(range(slots))), taking


@settings(max_examples=100)
@given(appends())
def test_append(case):
    rows, heads, slots, lengths, tables, lasts, order, taking = case
    table, last = torch.tensor(tables).view(rows, heads, slots), torch.tensor(lasts).view(rows, heads, slots)
    keys, values = randn(rows, heads, TAIL + slots * BLOCK, 2), randn(rows, heads, TAIL + slots * BLOCK, 2, seed=1)
    want = [x.clone() for x in (keys, values, table, last)]
    may_open = any(n % BLOCK == 0 for n in lengths)
    lengths = [n if takes else -1 for n, takes in zip(lengths, taking)]
    slot, evicted = ops.append(
        keys, values, table, last, torch.tensor(lengths), torch.tensor(order), keys[:, :, 3], values[:, :, 3],
        torch.tensor(9), may_open,
    )  # fmt: skip
    for b, h in np.ndindex(rows, heads):
        if not taking[b]:
            assert (int(slot[b, h]), bool(evicted[b, h])) == (0, False)
            continue
        block, into = divmod(lengths[b], BLOCK)
        row = want[2][b, h].tolist()
        if into:
            at, gone = row.index(block), False
        else:
            at = min(range(slots), key=lambda s: (-1 if row[s] < 0 else int(want[3][b, h, s]), order[s]))
            gone = row[at] >= 0
        assert (int(slot[b, h]), bool(evicted[b, h])) == (at, gone)
        want[2][b, h, at], want[3][b, h, at] = block, 9
        want[0][b, h, TAIL + at * BLOCK + into] = want[0][b, h, 3]
        want[1][b, h, TAIL + at * BLOCK + into] = want[1][b, h, 3]
    for got, wanted in zip((keys, values, table, last), want):
        assert torch.equal(got, wanted)


# -- attend ------------------------------------------------------------------------------------------------------------


def attend_by_hand(query, keys, values, table, lengths, tail_mask, scaling, sinks):
    rows, heads, slots = table.shape
    group = query.shape[1] // heads
    out = np.zeros(query.shape)
    for b, hq, t in np.ndindex(*query.shape[:3]):
        h, q = hq // group, query[b, hq, t].double().numpy()
        places = [i for i in range(TAIL) if tail_mask[t, i]]
        for s in range(slots):
            block = int(table[b, h, s])
            real = min(BLOCK, int(lengths[b]) - block * BLOCK) if block >= 0 else 0
            places += [TAIL + s * BLOCK + i for i in range(real)]
        logits = [scaling * float(q @ keys[b, h, i].double().numpy()) for i in places]
        extra = [] if sinks is None else [float(sinks[hq])]
        top = max(logits + extra)
        total = sum(math.exp(x - top) for x in logits + extra)
        for i, x in zip(places, logits):
            out[b, hq, t] += math.exp(x - top) / total * values[b, h, i].double().numpy()
    return out


TREE = [[0], [0, 1], [0, 2], [0, 1, 3]]


def attend_case(group=3, heads=2, dim=8, tokens=4, dtype=torch.float32):
    query = randn(2, heads * group, tokens, dim, dtype=dtype)
    keys = randn(2, heads, TAIL + 4 * BLOCK, dim, seed=1, dtype=dtype)
    values = randn(2, heads, TAIL + 4 * BLOCK, dim, seed=2, dtype=dtype)
    table = torch.tensor([[[4, -1, 0, 2], [4, 1, 0, 3]], [[1, 0, -1, -1], [0, -1, -1, 1]]])[:, :heads]
    lengths = torch.tensor([4 * BLOCK + 5, 2 * BLOCK])
    mask = torch.zeros(tokens, TAIL, dtype=torch.bool)
    for t in range(tokens):
        mask[t, TREE[t]] = True
    return query, keys, values, table, lengths, mask


@pytest.mark.parametrize("group, dim", [(1, 8), (3, 5), (7, 16)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attend(group, dim, with_sinks):
    case = attend_case(group, dim=dim)
    sinks = randn(2 * group, seed=5) if with_sinks else None
    out = ops.attend(*case, dim**-0.5, sinks)
    np.testing.assert_allclose(out.numpy(), attend_by_hand(*case, dim**-0.5, sinks), rtol=1e-4, atol=1e-5)


def test_attend_one_token_in_half_precision():
    case = attend_case(tokens=1, dtype=torch.bfloat16)
    out = ops.attend(*case, 0.3, None)
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.float().numpy(), attend_by_hand(*case, 0.3, None), atol=0.03)


def test_attend_does_not_see_past_the_length_empty_slots_or_other_branches():
    query, keys, values, table, lengths, mask = attend_case()
    before = ops.attend(query, keys, values, table, lengths, mask, 0.3, None)
    for buffer in (keys, values):
        buffer[0, :, TAIL + 5 : TAIL + BLOCK] = 1e3  # the open block's unfilled part (slot 0)
        buffer[0, 0, TAIL + BLOCK : TAIL + 2 * BLOCK] = 1e3  # an empty slot
        buffer[:, :, 4:TAIL] = 1e3  # tail entries that nobody follows
    assert torch.equal(before, ops.attend(query, keys, values, table, lengths, mask, 0.3, None))


# -- torch.compile -----------------------------------------------------------------------------------------------------


def op_calls():
    query, keys, values, table, lengths, mask = attend_case()
    scores = randn(2, 2, 4)
    ages = torch.zeros_like(table)
    q, summaries, scales, weights = score_case(2, int8=True)
    plan = torch.tensor([[[1, -1]] * 2] * 2)
    slot = torch.tensor([[[1, 3]] * 2] * 2)
    yield "summarize", (randn(2, 3, BLOCK, 4), "midrange", 2, True)
    yield "summarize", (randn(2, 3, BLOCK, 4), "minmax", 1, False)
    yield "score", (q, summaries, scales, torch.tensor([5, 3]), weights, "midrange", 0.5, "mean", 0.5, 1, 0)
    yield "score", (q, summaries, scales, torch.tensor([5, 3]), weights, "midrange", 0.5, "softmax-mean", 0.5, 0, 0)
    yield "select", (scores, table.clone(), ages, lengths, torch.arange(4), 2, torch.tensor(1))
    yield "select", (scores, table.clone(), ages, lengths, torch.arange(4), 9, torch.tensor(1))
    yield "gather", (randn(9, 2, BLOCK, 8), torch.arange(8).view(2, 2, 2), keys, values, plan, slot)
    yield "write", (randn(9, 2, BLOCK, 8), torch.arange(8).view(2, 4), randn(2, 21, 8), randn(2, 21, 8), 13)
    yield (
        "append",
        (keys, values, table.clone(), ages, lengths, torch.arange(4), randn(2, 2, 8), randn(2, 2, 8), torch.tensor(1)),
    )
    fresh = torch.ones(2, 2, 4, dtype=torch.bool)
    yield "enter", (query, randn(2, 2, 4, 8), randn(2, 2, 4, 8), randn(2, 6, 7, 8), 1, 4, keys, values, fresh)
    yield "attend", (query, keys, values, table, lengths, mask, 0.3, None)
    yield "attend", (query, keys, values, table, lengths, mask, 0.3, randn(6))
    # As a model hands it over: [B, q, Hq, D], transposed. Compiled code relies on the strides that were promised.
    yield "attend", (randn(2, 4, 6, 8).transpose(1, 2), keys, values, table, lengths, mask, 0.3, None)
    yield "attend", (randn(2, 4, 2, 8).transpose(1, 2), keys, values, table, lengths, mask, 0.3, None)


@pytest.mark.parametrize("name, args", [pytest.param(*call, id=f"{i}-{call[0]}") for i, call in enumerate(op_calls())])
def test_schema_and_fake_implementation_tell_the_truth(name, args):
    torch.library.opcheck(
        getattr(torch.ops.oasis_hf, name).default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_a_step_traces_into_one_graph():
    query, keys, values, table, lengths, mask = attend_case()
    q, summaries, scales, weights = score_case(2, int8=True)
    order, ages = torch.arange(4), torch.zeros_like(table)

    def step(keys, values, table, ages):
        out = ops.attend(query, keys, values, table, lengths, mask, 0.3, None)
        ops.append(keys, values, table, ages, lengths, order, keys[:, :, 0], values[:, :, 0], torch.tensor(1))
        closed = lengths // BLOCK
        scores = ops.score(q, summaries, scales, closed, weights, "midrange", 0.5, "softmax-mean", 0.5, 0, 0)
        plan_block, plan_slot, counts = ops.select(scores, table, ages, lengths + 1, order, 2, torch.tensor(2))
        return out, plan_block, plan_slot, counts

    plain, compiled = ([x.clone() for x in (keys, values, table, ages)] for _ in range(2))
    want = step(*plain)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    for a, b in zip((*want, *plain), (*got, *compiled)):
        assert torch.equal(a, b)
