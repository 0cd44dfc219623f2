"""The working set through random lives of prompts, tokens, selections, crops and row choices, step by step as a layer
drives it, against plain lists of tokens."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import cuda
from oasis_hf.stats import Counters
from oasis_hf.store import HostStore
from oasis_hf.working_set import FIRST_SLOTS, WorkingSet

CPU = torch.device("cpu")
DIM = 2
INF = math.inf


def make(slots, rows=1, heads=1, seed=0, ensure=0):
    working_set = WorkingSet(slots, rows, heads, DIM, torch.float32, CPU, seed)
    working_set.ensure(ensure)
    return working_set


def blocks(tokens):
    return -(-tokens // BLOCK)


class Lives(RuleBasedStateMachine):
    """`texts`: per row the ids of its tokens. A token's key at head h is (id, h), its value the negative of that."""

    @initialize(
        slots=st.integers(2, 10), rows=st.integers(1, 3), heads=st.integers(1, 2), seed=st.integers(0, 2),
        sinks=st.integers(0, 1), recent=st.integers(0, 1), cap=st.integers(1, 4),
    )  # fmt: skip
    def start(self, slots, rows, heads, seed, sinks, recent, cap):
        self.heads, self.cap = heads, cap
        self.sinks, self.recent = (sinks, recent) if sinks + recent < slots else (0, 0)
        self.set = make(slots, rows, heads, seed)
        self.store = HostStore(1, rows, heads, DIM, torch.float32, torch.device("cpu"))
        self.texts = [[] for _ in range(rows)]
        self.next, self.step = 1, 0
        self.dirty = [0] * rows  # first block whose slot is out of date
        self.due = False  # no selection since the last prompt

    # -- helpers ------------------------------------------------------------------------------------------------------

    @property
    def lengths(self):
        return torch.tensor([len(text) for text in self.texts])

    def new(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def keys_of(self, ids):
        """`[H, n, D]`."""
        return torch.tensor([[[token, head] for token in ids] for head in range(self.heads)], dtype=torch.float32)

    def gather(self, plan):
        self.store.gather(0, self.set.keys, self.set.values, *plan[:2])

    def scores(self, data):
        """Random scores of closed blocks, ties among them too; sinks and recent blocks above all."""
        closed = [len(text) // BLOCK for text in self.texts]
        out = torch.full((len(self.texts), self.heads, max(closed)), -INF)
        for row, count in enumerate(closed):
            for head in range(self.heads):
                ranks = data.draw(st.permutations(range(count)))
                out[row, head, :count] = torch.tensor(ranks, dtype=torch.float32)
                out[row, head, : min(self.sinks, count)] = INF
                out[row, head, max(0, count - self.recent) : count] = INF
        return out

    def select(self, scores, cap, step):
        """A selection, with everything checked that holds from one table to the next."""
        table, last = self.set.table.clone(), self.set.last_selected.clone()
        plan_block, plan_slot, counts, _ = self.set.select(scores, self.lengths, cap, torch.tensor(step))
        self.gather((plan_block, plan_slot))
        hits = fetched = capped = 0
        for row, head in [(r, h) for r in range(len(self.texts)) for h in range(self.heads)]:
            old, new = table[row, head].tolist(), self.set.table[row, head].tolist()
            ages, after = last[row, head].tolist(), self.set.last_selected[row, head].tolist()
            score = scores[row, head].tolist()
            wanted = sorted((n for n in range(len(score)) if score[n] > -INF), key=lambda n: -score[n])
            wanted = set(wanted[: len(old) - 1])
            plan = zip(plan_block[row, head].tolist(), plan_slot[row, head].tolist())
            pairs = {slot: block for block, slot in plan if block >= 0}
            open_block = len(self.texts[row]) // BLOCK if len(self.texts[row]) % BLOCK else None
            assert len(pairs) <= cap
            assert set(pairs.values()) <= wanted - set(old)
            for slot in range(len(old)):
                if slot in pairs:
                    assert new[slot] == pairs[slot] and after[slot] == step
                    assert old[slot] not in wanted, "a hit stays"
                    assert open_block is None or old[slot] != open_block, "the open block is never a victim"
                else:
                    assert new[slot] == old[slot], "who is no victim stays in place"
                    assert after[slot] == (step if old[slot] in wanted else ages[slot]), "only the predicted grow young"
            # Victims are the oldest of all that could go: nothing that stays is older.
            key = {s: (-1 if old[s] < 0 else ages[s], int(self.set.order[s])) for s in range(len(old))}
            could = [s for s in key if old[s] not in wanted and (open_block is None or old[s] != open_block)]
            assert sorted(pairs) == sorted(sorted(could, key=key.get)[: len(pairs)])
            missing = len(wanted - set(old))
            assert len(pairs) == min(cap, missing), "as many are admitted as the cap allows"
            hits, fetched, capped = hits + len(wanted & set(old)), fetched + len(pairs), capped + missing - len(pairs)
            if missing <= cap:
                assert {n for n in range(len(score)) if score[n] == INF} <= set(new), "sinks and recent are resident"
        assert counts.sum(1).tolist() == [hits, fetched, capped]

    def first_select(self, data):
        """What comes before the first token after a prompt."""
        if not self.due:
            return
        self.due = False
        self.set.ensure(blocks(int(self.lengths.max())))
        self.set.forget_from(torch.tensor(self.dirty))
        self.gather(self.set.open_plan(self.lengths, torch.tensor(self.step)))
        if self.lengths.max() >= BLOCK:
            self.select(self.scores(data), self.set.allocated, self.step)

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def prompt(self, data):
        grows = [data.draw(st.sampled_from([0, 1, 15, 16, 40, 90])) for _ in self.texts]
        starts = self.lengths.tolist()
        self.store.ensure(starts, [n + more for n, more in zip(starts, grows)])
        for row, more in enumerate(grows):
            ids = self.new(more)
            if ids:
                self.store.write(0, row, starts[row], self.keys_of(ids), -self.keys_of(ids))
                self.texts[row] += ids
        self.dirty = [min(old, n // BLOCK) for old, n in zip(self.dirty, starts)]
        self.due = True
        self.step += 1

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 1, 3, 17]))
    def decode(self, data, tokens):
        """Some tokens, one a row and step, each with a selection if the rows are long."""
        if not max(map(len, self.texts)):
            return
        self.first_select(data)
        for _ in range(tokens):
            self.step += 1
            self.append()
            if self.lengths.max() >= BLOCK:
                self.select(self.scores(data), self.cap, self.step)
        self.dirty = [blocks(n) for n in self.lengths.tolist()]

    def append(self):
        lengths = self.lengths
        self.store.ensure(lengths.tolist(), (lengths + 1).tolist())
        self.set.ensure(blocks(int(lengths.max()) + 1))
        ids = self.new(len(self.texts))
        keys = torch.stack([self.keys_of([token]) for token in ids])
        self.set.write_tail(keys, -keys)
        table, last = self.set.table.clone(), self.set.last_selected.clone()
        slot, _ = self.set.append_from_tail(0, lengths, torch.tensor(self.step))
        self.store.append(0, lengths, keys[:, :, 0], -keys[:, :, 0])
        for row, token in enumerate(ids):
            self.texts[row].append(token)
            for head in range(self.heads):
                at = int(slot[row, head])
                assert int(self.set.table[row, head, at]) == int(lengths[row]) // BLOCK
                if lengths[row] % BLOCK == 0:
                    key = torch.where(table[row, head] < 0, -1, last[row, head])
                    assert key[at] == key.min(), "the oldest goes"
                others = [s for s in range(self.set.allocated) if s != at]
                assert torch.equal(self.set.table[row, head, others], table[row, head, others])

    @rule(data=st.data())
    def crop(self, data):
        before = self.lengths.tolist()
        self.texts = [text[: data.draw(st.integers(max(0, len(text) - 40), len(text)))] for text in self.texts]
        lengths = self.lengths
        self.store.truncate(lengths.tolist())
        self.dirty = [min(old, blocks(n)) for old, n in zip(self.dirty, lengths.tolist())]
        self.set.forget_from(torch.tensor([blocks(n) for n in lengths.tolist()]))
        if lengths.tolist() != before and not self.due and self.set.allocated:
            self.gather(self.set.open_plan(lengths, torch.tensor(self.step)))

    @rule(data=st.data())
    def select_rows(self, data):
        index = data.draw(st.lists(st.integers(0, len(self.texts) - 1), min_size=1, max_size=3))
        table = self.set.table.clone()
        self.set.select_rows(torch.tensor(index))
        self.store.select_rows(index)
        self.texts = [list(self.texts[i]) for i in index]
        self.dirty = [self.dirty[i] for i in index]
        assert torch.equal(self.set.table, table[index])

    @rule(keep=st.booleans())
    def fork(self, keep):
        """Either branch goes on; what happens to the other must not matter."""
        branch, store = self.set.fork(), self.store.fork()
        old, (self.set, self.store) = (self.set, self.store), (branch, store) if keep else (self.set, self.store)
        other = old[0] if keep else branch
        other.table.fill_(-1)
        other.keys.fill_(-7)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def slots_hold_true_blocks(self):
        working_set, lengths = self.set, self.lengths.tolist()
        assert working_set.allocated <= working_set.slots
        assert (working_set.last_selected <= self.step).all()
        assert sorted(working_set.order.tolist()) == list(range(working_set.allocated))
        for row, text in enumerate(self.texts):
            for head in range(self.heads):
                table = working_set.table[row, head].tolist()
                resident = [n for n in table if n >= 0]
                assert len(set(resident)) == len(resident), "a block is in one slot at most"
                if not self.due:
                    assert lengths[row] % BLOCK == 0 or lengths[row] // BLOCK in resident, "the open block is resident"
                for slot, block in enumerate(table):
                    if block < 0 or (self.due and block >= self.dirty[row]):
                        continue
                    ids = text[block * BLOCK : (block + 1) * BLOCK]
                    assert ids, "no slot is beyond the row"
                    place = slice(TAIL + slot * BLOCK, TAIL + slot * BLOCK + len(ids))
                    want = self.keys_of(ids)[head]
                    assert torch.equal(working_set.keys[row, head, place], want)
                    assert torch.equal(working_set.values[row, head, place], -want)

    @invariant()
    def the_store_has_it_all(self):
        for row, text in enumerate(self.texts):
            if text:
                assert torch.equal(self.store.read(0, row, 0, len(text))[0], self.keys_of(text))


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=14)


# -- single promises --------------------------------------------------------------------------------------------------


def test_slots_grow_by_doubling_up_to_the_budget_and_keep_their_content():
    working_set = make(20, ensure=1)
    assert working_set.allocated == FIRST_SLOTS
    working_set.table[0, 0, 3] = 5
    working_set.keys[0, 0, TAIL + 3 * BLOCK] = 9
    for want, allocated in ((8, 8), (9, 16), (17, 20), (500, 20)):
        working_set.ensure(want)
        assert working_set.allocated == allocated
        assert working_set.keys.shape[2] == TAIL + allocated * BLOCK == working_set.values.shape[2]
        assert working_set.table[0, 0].tolist() == [-1, -1, -1, 5] + [-1] * (allocated - 4)
    assert working_set.keys[0, 0, TAIL + 3 * BLOCK, 0] == 9


def test_a_budget_below_the_first_slots_is_kept():
    assert make(3, ensure=1).allocated == 3


@pytest.mark.parametrize("seed", [0, 5])
def test_the_seed_orders_equally_old_victims(seed):
    working_set = make(12, seed=seed, ensure=12)
    assert (working_set.order.tolist() == list(range(12))) is (seed == 0)
    assert torch.equal(working_set.order, make(12, seed=seed, ensure=12).order)


def test_bytes_are_those_of_its_buffers():
    working_set = make(8, rows=2, heads=3, ensure=8)
    assert working_set.nbytes == 2 * 3 * ((TAIL + 8 * BLOCK) * DIM * 4 * 2 + 8 * 8 * 2)


def grown(slots, closed):
    """One row of `closed` blocks, the last `slots` of them resident, the newest in slot 0."""
    working_set = make(slots, ensure=slots)
    working_set.table[0, 0] = torch.arange(closed - 1, closed - 1 - slots, -1)
    return working_set


def test_wasted_are_the_blocks_moved_in_and_evicted_before_anybody_attended():
    working_set, lengths = grown(3, 9), torch.tensor([9 * BLOCK])
    want = {0: 2.0, 1: 1.0}

    def scores(wanted):
        out = torch.full((1, 1, 9), -INF)
        for block, score in wanted.items():
            out[0, 0, block] = score
        return out

    assert working_set.select(scores(want), lengths, 9, torch.tensor(1))[3].tolist() == [0]
    assert working_set.select(scores({2: 2.0, 3: 1.0}), lengths, 9, torch.tensor(2))[3].tolist() == [1]
    # Slots now hold 2, 3 and one of 0 and 1, all unread; reading makes them used.
    working_set.attend(torch.zeros(1, 1, 1, DIM), lengths, torch.ones(1, TAIL, dtype=torch.bool), 1.0, None)
    assert working_set.select(scores({4: 2.0, 5: 1.0}), lengths, 9, torch.tensor(3))[3].tolist() == [0]


def test_a_block_evicted_unread_by_an_opening_one_is_wasted_once():
    working_set, lengths = grown(2, 9), torch.tensor([9 * BLOCK])
    scores = torch.full((1, 1, 9), -INF)
    scores[0, 0, 4] = 1.0
    working_set.select(scores, lengths, 1, torch.tensor(1))
    working_set.last_selected[working_set.table != 4] = 7
    _, wasted = working_set.append_from_tail(0, lengths, torch.tensor(8))
    assert wasted.tolist() == [[True]]
    working_set.last_selected[working_set.table != 9] = 9
    working_set.last_selected[working_set.table == 9] = 1
    _, wasted = working_set.append_from_tail(0, torch.tensor([10 * BLOCK]), torch.tensor(10))
    assert wasted.tolist() == [[False]], "an open block was not fetched"


def test_slot_keys_are_those_of_the_named_slot():
    working_set = make(3, rows=2, heads=2, ensure=3)
    working_set.keys.copy_(torch.arange(working_set.keys.numel()).view_as(working_set.keys))
    slot = torch.tensor([[0, 2], [1, 0]])
    for row in range(2):
        for head in range(2):
            first = TAIL + int(slot[row, head]) * BLOCK
            assert torch.equal(
                working_set.slot_keys(slot)[row, head], working_set.keys[row, head, first : first + BLOCK]
            )


def test_open_plan_fetches_a_missing_open_block_into_the_oldest_slot_only_where_it_is_missing():
    working_set = make(3, rows=3, ensure=3)
    working_set.table[:, 0] = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    working_set.last_selected[:, 0] = torch.tensor([[4, 2, 3]] * 3)
    plan_block, plan_slot = working_set.open_plan(
        torch.tensor([5 * BLOCK + 3, 2 * BLOCK + 1, 3 * BLOCK]), torch.tensor(6)
    )
    assert plan_block.flatten().tolist() == [5, -1, -1] and int(plan_slot[0]) == 1
    assert working_set.table[:, 0].tolist() == [[0, 5, 2], [0, 1, 2], [0, 1, 2]]
    assert working_set.last_selected[:, 0].tolist() == [[4, 6, 3], [4, 2, 6], [4, 2, 3]]


@pytest.mark.parametrize("last", range(6))
def test_where_memory_runs_out_nothing_has_grown(monkeypatch, last):
    """Then the same may be asked for again."""
    working_set, made, cat = make(40, ensure=3), [], torch.cat

    def runs_out(*args):
        made.append(1)
        if len(made) > last:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cat(*args)

    before = dict(vars(working_set))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", runs_out)
        patch.setattr(WorkingSet, "_order", lambda self, slots: runs_out([torch.zeros(slots)]))
        with pytest.raises(torch.OutOfMemoryError):
            working_set.ensure(20)
    assert all(vars(working_set)[name] is value for name, value in before.items())
    working_set.ensure(20)
    assert working_set.allocated == len(working_set.order) == (working_set.keys.shape[2] - TAIL) // BLOCK == 20


def test_more_slots_than_the_compiled_select_takes_are_the_references(monkeypatch):
    source = (Path(__file__).parents[1] / "csrc" / "select.cu").read_text()
    bits = int(re.search(r"SLOT_BITS = (\d+);", source)[1])
    assert "MAX_SLOTS = 1 << SLOT_BITS;" in source and 1 << bits == cuda.MAX_SLOTS
    compiled = []
    monkeypatch.setattr(cuda, "serves", lambda keys: True)
    monkeypatch.setattr(WorkingSet, "_select_step", lambda self, *args: compiled.append(self.allocated))
    for slots in (cuda.MAX_SLOTS, cuda.MAX_SLOTS + 1):
        working_set = make(slots, ensure=slots)
        scores, length = torch.zeros((1, 1, slots)), torch.tensor([slots * BLOCK])
        plan_block, *_ = working_set.select(scores, length, 2, torch.tensor(1))
        plan, counters = (torch.full((1, 1, 2), -1), torch.zeros((1, 1, 2), dtype=torch.int64)), Counters(1, CPU)
        working_set.select_into(plan, counters.selection, counters.of("wasted"), scores, length, torch.tensor(1))
    assert compiled == [cuda.MAX_SLOTS] * 2
    assert plan_block.tolist() != [[[-1, -1]]] and counters.of("hits").item() == 2
