"""Stores against a plain list of tokens a row, and what the host store promises about memory."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import types

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oasis_hf.config import BLOCK, TAIL
from oasis_hf.store import (
    BlockStore,
    HostMemoryError,
    HostStore,
    PagePool,
    ResidentStore,
    TieredStore,
    file_pages,
    pages,
)
from oasis_hf.store.host import STAGED_BYTES, blocks_of

LAYERS, HEADS, DIM = 2, 2, 2
PAGE = 2 * BLOCK * DIM * 4


def host(rows=1, **kwargs):
    return HostStore(LAYERS, rows, HEADS, DIM, torch.float32, torch.device("cpu"), **kwargs)


def resident(rows=1):
    return ResidentStore(LAYERS, rows, HEADS, DIM, torch.float32, torch.device("cpu"))


def with_table(store):
    """As on a GPU: the operators' copy of the table beside the host's, sent entry by entry."""
    store.device_table, store._settle = store.table.clone(), lambda: None
    return store


def tokens(count, first=0):
    """Keys and values `[L, H, count, D]`, every number another."""
    index = torch.arange(first, first + count, dtype=torch.float32)[:, None] + torch.tensor([0.25, 0.5])
    keys = torch.stack([torch.stack([index + 1000 * (HEADS * la + h) for h in range(HEADS)]) for la in range(LAYERS)])
    return keys, -keys - 0.125


def fill(store, row, count, first=0, rows=1):
    keys, values = tokens(count, first)
    store.ensure([0] * rows, [count if r == row else 0 for r in range(rows)])
    for layer in range(LAYERS):
        store.write(layer, row, 0, keys[layer], values[layer])


def in_file(rows=1, most=6):
    """Host memory of a few pages above a file."""
    near = file_pages(DIM, torch.float32, pin=False, host_bytes=most * PAGE)
    return TieredStore(LAYERS, rows, HEADS, torch.device("cpu"), near)


every = pytest.mark.parametrize("make", [host, resident, in_file], ids=["host", "resident", "file"])


# -- content ----------------------------------------------------------------------------------------------------------


class Branch:
    """A host store, a resident store, one in a file, and the model of all: per row a list of token ids, and how many
    blocks it has room in."""

    def __init__(self, stores, rows, blocks=None):
        self.stores, self.rows = stores, rows
        self.blocks = [0] * len(rows) if blocks is None else list(blocks)

    def lengths(self):
        return [len(row) for row in self.rows]


class Stores(RuleBasedStateMachine):
    """Any order of prompts, appends, crops, row choices and forks."""

    @initialize(rows=st.integers(1, 3))
    def start(self, rows):
        self.branches = [Branch([with_table(host(rows)), resident(rows), in_file(rows)], [[] for _ in range(rows)])]
        self.pool, self.near = (self.branches[0].stores[i].pool for i in (0, 2))
        self.next = 1

    def pick(self, data):
        # By number: hypothesis keeps what it draws, and a dropped store must die.
        return self.branches[data.draw(st.integers(0, len(self.branches) - 1))]

    def new(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def stack(self, ids):
        """Keys and values `[L, H, n, D]` of token ids."""
        parts = [tokens(1, i) for i in ids]
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    def copied(self, branch):
        return branch.stores[0].bytes_copied

    def open_pages_shared(self, branch, grows):
        """How many pages must be copied before `grows` are written: those of open blocks, and of what stands ready."""
        count, seen = 0, {}
        for other in self.branches:
            for page in other.stores[0].table[other.stores[0].table >= 0].tolist():
                seen[page] = seen.get(page, 0) + 1
        for row, grow in enumerate(grows):
            length = len(branch.rows[row])
            for block in range(length // BLOCK, min(branch.blocks[row], blocks_of(length + grow)) if grow else 0):
                for page in branch.stores[0].table[:, row, :, block].flatten().tolist():
                    count += seen[page] > 1
                    seen[page] -= seen[page] > 1
        return count

    def ensure(self, branch, grows):
        old = branch.lengths()
        want = self.open_pages_shared(branch, grows) * PAGE
        before = self.copied(branch)
        for store in branch.stores:
            store.ensure(old, [n + more for n, more in zip(old, grows)])
        assert self.copied(branch) - before == want, "what will be written is copied, nothing else ever"
        branch.blocks = [max(have, blocks_of(n + more)) for have, n, more in zip(branch.blocks, old, grows)]

    @rule(data=st.data())
    def make_room(self, data):
        """Nothing is written yet, and perhaps never."""
        branch = self.pick(data)
        self.ensure(branch, [data.draw(st.sampled_from([0, 1, 2])) for _ in branch.rows])

    @rule(data=st.data())
    def prompt(self, data):
        branch = self.pick(data)
        grows = [data.draw(st.sampled_from([0, 1, 5, 16, 23, 40])) for _ in branch.rows]
        self.ensure(branch, grows)
        for row, grow in enumerate(grows):
            if grow:
                ids = self.new(grow)
                keys, values = self.stack(ids)
                for store in branch.stores:
                    for layer in range(LAYERS):
                        store.write(layer, row, len(branch.rows[row]), keys[layer], values[layer])
                branch.rows[row] += ids

    @rule(data=st.data())
    def append(self, data):
        branch = self.pick(data)
        taking = [data.draw(st.sampled_from([True, True, False])) for _ in branch.rows]
        self.ensure(branch, [int(takes) for takes in taking])
        ids = self.new(len(branch.rows))
        keys, values = self.stack(ids)
        lengths = torch.tensor([n if takes else -1 for n, takes in zip(branch.lengths(), taking)])
        for store in branch.stores:
            for layer in range(LAYERS):
                store.append(
                    layer, lengths, keys[layer].transpose(0, 1), values[layer].transpose(0, 1), not all(taking)
                )
        for row, token, takes in zip(branch.rows, ids, taking):
            row += [token] if takes else []

    @rule(data=st.data())
    def crop(self, data):
        branch = self.pick(data)
        branch.rows = [row[: data.draw(st.integers(0, len(row)))] for row in branch.rows]
        branch.blocks = [min(have, blocks_of(n)) for have, n in zip(branch.blocks, branch.lengths())]
        for store in branch.stores:
            store.truncate(branch.lengths())

    @rule(data=st.data())
    def select_rows(self, data):
        branch = self.pick(data)
        index = data.draw(st.lists(st.integers(0, len(branch.rows) - 1), min_size=1, max_size=4))
        before = self.copied(branch)
        for store in branch.stores:
            store.select_rows(index)
        branch.rows, branch.blocks = [list(branch.rows[i]) for i in index], [branch.blocks[i] for i in index]
        assert self.copied(branch) == before

    @precondition(lambda self: len(self.branches) < 3)
    @rule(data=st.data())
    def fork(self, data):
        branch = self.pick(data)
        stores = [store.fork() for store in branch.stores]
        forked = Branch([with_table(stores[0]), *stores[1:]], [list(row) for row in branch.rows], branch.blocks)
        assert self.copied(forked) == 0
        self.branches.append(forked)

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data())
    def drop(self, data):
        self.branches.remove(self.pick(data))  # its pages must come back

    @rule(data=st.data())
    def reset(self, data):
        branch = self.pick(data)
        for store in branch.stores:
            store.reset()
        branch.rows, branch.blocks = [[] for _ in branch.rows], [0] * len(branch.rows)

    @invariant()
    def holds_the_tokens(self):
        for branch in self.branches:
            for row, ids in enumerate(branch.rows):
                if not ids:
                    continue
                keys, values = self.stack(ids)
                start = len(ids) // 3
                for store in branch.stores:
                    for layer in range(LAYERS):
                        got_keys, got_values = store.read(layer, row, start, len(ids))
                        assert torch.equal(got_keys, keys[layer, :, start:])
                        assert torch.equal(got_values, values[layer, :, start:])

    @invariant()
    def gathers_blocks_into_slots(self):
        branch = self.branches[-1]
        lengths = branch.lengths()
        block = torch.tensor([n // BLOCK - 1 for n in lengths])[:, None, None].expand(-1, HEADS, 1)
        slot = torch.ones_like(block)
        if not max(lengths):
            return
        out = []
        for store in branch.stores:
            keys = torch.zeros(len(lengths), HEADS, TAIL + 2 * BLOCK, DIM)
            values = torch.zeros_like(keys)
            store.gather(1, keys, values, block, slot)
            store.arrive(1)
            out.append((keys, values))
        for other in out[1:]:
            assert torch.equal(out[0][0], other[0]) and torch.equal(out[0][1], other[1])
        for row, ids in enumerate(branch.rows):
            want = torch.zeros(HEADS, BLOCK, DIM)
            if len(ids) >= BLOCK:
                first = (len(ids) // BLOCK - 1) * BLOCK
                want = self.stack(ids[first : first + BLOCK])[0][1]
            assert torch.equal(out[0][0][row, :, TAIL + BLOCK :], want)
            assert not out[0][0][row, :, : TAIL + BLOCK].any()

    @invariant()
    def counts_references(self):
        named: dict[int, int] = {}
        for branch in self.branches:
            store, resident_store, tiered = branch.stores
            table = store.table[store.table >= 0].tolist()
            assert len(table) == LAYERS * HEADS * sum(branch.blocks)
            assert store.nbytes == len(set(table)) * PAGE
            assert resident_store.nbytes <= len(table) * PAGE
            assert tiered.nbytes == store.nbytes and tiered.near_bytes <= 6 * PAGE
            for page in table:
                named[page] = named.get(page, 0) + 1
        references = {page: int(n) for page, n in enumerate(self.pool.references.tolist()) if n}
        assert references == named
        assert self.pool.pages_in_use == self.near.pages_in_use == len(named)
        assert self.near.held == self.near.pool.pages_in_use <= 6
        free = self.pool._free.tolist()
        assert len(set(free)) == len(free) and not set(free) & set(named)

    @invariant()
    def the_device_knows_the_table(self):
        for branch in self.branches:
            store = branch.stores[0]
            assert store.device_table.shape == store.table.shape
            known = store.table >= 0
            assert torch.equal(store.device_table[known], store.table[known])


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=40, stateful_step_count=16)


@every
def test_reading_any_stretch(make):
    store = make()
    fill(store, 0, 50)
    keys, values = tokens(50)
    for start, stop in [(0, 50), (0, 1), (15, 17), (16, 32), (31, 50), (49, 50), (48, 48)]:
        got = store.read(1, 0, start, stop)
        assert torch.equal(got[0], keys[1, :, start:stop]) and torch.equal(got[1], values[1, :, start:stop])


@every
@pytest.mark.parametrize("pieces", [[1] * 18, [15, 1, 1], [16, 16, 3], [3, 40], [20, 5, 20]], ids=str)
def test_writing_in_pieces_is_writing_at_once(make, pieces):
    store = make()
    keys, values = tokens(sum(pieces))
    at = 0
    for count in pieces:
        store.ensure([at], [at + count])
        for layer in range(LAYERS):
            store.write(layer, 0, at, keys[layer, :, at : at + count], values[layer, :, at : at + count])
        at += count
    assert torch.equal(store.read(0, 0, 0, at)[0], keys[0]) and torch.equal(store.read(1, 0, 0, at)[1], values[1])


def test_pages_keep_their_own_dtype():
    store = HostStore(1, 1, 1, DIM, torch.bfloat16, torch.device("cpu"))
    store.ensure([0], [3])
    keys = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    store.write(0, 0, 0, keys, -keys)
    assert store.read(0, 0, 0, 3)[0].dtype == torch.bfloat16
    slots = torch.zeros(1, 1, TAIL + BLOCK, DIM)
    store.gather(0, slots, slots.clone(), torch.tensor([[[0]]]), torch.tensor([[[0]]]))
    assert torch.equal(slots[0, 0, TAIL : TAIL + 3], keys[0])


def test_nothing_can_be_left_out_of_a_store():
    with pytest.raises(TypeError):
        BlockStore()


# -- copy on write ----------------------------------------------------------------------------------------------------


def test_beams_share_closed_pages_and_copy_an_open_one_when_it_is_written():
    store = host(2)
    fill(store, 0, 40, rows=2)
    in_use = store.pool.pages_in_use
    store.select_rows([0, 0])
    assert store.bytes_copied == 0 and store.pool.pages_in_use == in_use
    store.ensure([40, 40], [41, 41])
    assert store.bytes_copied == LAYERS * HEADS * PAGE, "one of the two rows keeps the page"
    assert store.pool.pages_in_use == in_use + LAYERS * HEADS
    store.ensure([41, 41], [42, 42])
    assert store.bytes_copied == LAYERS * HEADS * PAGE


def test_at_a_block_border_nothing_is_copied_at_all():
    store = host(2)
    fill(store, 0, 32, rows=2)
    store.select_rows([0, 0])
    store.ensure([32, 32], [40, 40])
    assert store.bytes_copied == 0


def test_repeating_a_long_row_costs_table_entries_only():
    store = host()
    fill(store, 0, 160)
    held = store.nbytes
    store.select_rows([0] * 8)
    assert store.pool.pages_in_use * PAGE == held == store.nbytes and store.bytes_copied == 0


def test_a_fork_goes_its_own_way_and_so_does_the_original():
    store = host()
    fill(store, 0, 20)
    other = store.fork()
    assert other.pool is store.pool and other.bytes_copied == 0
    for which, value in ((store, 7.0), (other, 8.0)):
        which.ensure([20], [21])
        which.append(0, torch.tensor([20]), torch.full((1, HEADS, DIM), value), torch.full((1, HEADS, DIM), value))
    assert store.bytes_copied + other.bytes_copied == LAYERS * HEADS * PAGE
    assert (store.read(0, 0, 20, 21)[0] == 7).all() and (other.read(0, 0, 20, 21)[0] == 8).all()
    assert torch.equal(store.read(0, 0, 0, 20)[0], other.read(0, 0, 0, 20)[0])


def test_a_crop_into_a_shared_closed_page_copies_it_before_it_is_written_again():
    store = host()
    fill(store, 0, 48)
    other = store.fork()
    other.truncate([20])
    other.ensure([20], [21])
    other.append(0, torch.tensor([20]), torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM))
    assert torch.equal(store.read(0, 0, 0, 48)[0], tokens(48)[0][0])


def test_deepcopy_of_a_pool_is_the_pool():
    pool = PagePool(DIM, torch.float32, False)
    assert copy.deepcopy(pool) is pool


# -- the operators' copy of the table ---------------------------------------------------------------------------------


def test_a_step_changes_only_its_new_entries_of_the_device_s_table_and_it_stays_the_same_tensor():
    """A captured step knows it by its address; rows open blocks at other steps, with other numbers."""
    store = with_table(host(3))
    store.ensure([0, 0, 0], [100, 90, 16])
    store.ensure([100, 90, 16], [113, 90, 16])  # room for 14 blocks now
    table = store.device_table
    table.fill_(-7)
    store.ensure([113, 90, 16], [129, 91, 17])
    new = torch.zeros_like(table, dtype=torch.bool)
    new[:, 0, :, 8] = new[:, 2, :, 1] = True
    assert store.device_table is table
    assert torch.equal(table[new], store.table[new]) and (table[new] >= 0).all() and (table[~new] == -7).all()


def test_what_a_step_adds_to_the_table_goes_by_pinned_memory_and_a_long_prompt_does_not(monkeypatch):
    store, pinned, waited = host(), [], []
    store.device = torch.device("cuda")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.nbytes) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking=False: waited.append(not non_blocking))
    store._sent(torch.zeros(STAGED_BYTES // 8, dtype=torch.int64))
    store._sent(torch.zeros(STAGED_BYTES // 8 + 1, dtype=torch.int64))
    assert pinned == [STAGED_BYTES] and waited == [False, False]


def test_a_table_that_has_no_room_on_the_device_leaves_the_host_s_as_it_was(monkeypatch):
    store = with_table(host())
    fill(store, 0, 16)
    before = store.table
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            store.ensure([16], [40])
    assert store.table is before and store.device_table.shape == before.shape and store.blocks == [1]
    store.ensure([16], [40])
    assert torch.equal(store.device_table[..., :3], store.table[..., :3])


def test_entries_that_could_not_be_sent_are_sent_by_the_next_try(monkeypatch):
    store = with_table(host())
    fill(store, 0, 16)
    store.ensure([16], [40])  # wide enough from here on
    store.truncate([16])
    used = store.pool.pages_in_use

    def fail(entries):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_sent", fail)
        with pytest.raises(torch.OutOfMemoryError):
            store.ensure([16], [40])
    assert store.blocks == [1] and store.pool.pages_in_use == used
    store.ensure([16], [40])
    assert store.blocks == [3] and torch.equal(store.device_table[..., :3], store.table[..., :3])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_growth_keeps_the_base_address_and_copies_nothing():
    store = host()
    fill(store, 0, 5)
    base = store.pool.pages.data_ptr()
    for count in range(5, 1000, 37):
        store.ensure([count], [count + 37])
    assert store.pool.pages.data_ptr() == base and store.bytes_copied == 0
    assert torch.equal(store.read(0, 0, 0, 5)[0], tokens(5)[0][0])


def test_pages_are_given_back_when_a_store_dies():
    store = host()
    fill(store, 0, 40)
    pool, other = store.pool, store.fork()
    other.ensure([40], [60])
    del store
    gc.collect()
    assert pool.pages_in_use == LAYERS * HEADS * 4
    del other
    gc.collect()
    assert pool.pages_in_use == 0 and not pool.references.any()


def test_a_page_whose_last_two_references_go_together_is_free_once():
    pool = PagePool(DIM, torch.float32, False)
    page = pool.allocate(1)
    pool.retain(page)
    pool.release(page.repeat(2))
    assert pool.pages_in_use == 0
    assert len(set(pool.allocate(2).tolist())) == 2


def test_given_back_pages_are_used_again():
    store = host()
    for _ in range(5):
        fill(store, 0, 64)
        store.reset()
    assert store.pool._used == LAYERS * HEADS * 4 and store.pool.pages_in_use == 0


def test_refusal_shows_the_arithmetic_and_allocates_nothing(monkeypatch):
    store = host()
    fill(store, 0, 16)
    in_use = store.pool.pages_in_use
    need = LAYERS * HEADS * 2
    monkeypatch.setattr(pages, "available_host_bytes", lambda: need * PAGE - 1)
    with pytest.raises(HostMemoryError) as error:
        store.ensure([16], [48])
    assert f"{need} more pages x {PAGE} bytes = {need * PAGE / 2**30:.2f} GiB" in str(error.value)
    assert f"{(need * PAGE - 1) / 2**30:.2f} GiB are available (pages in use: {in_use})" in str(error.value)
    assert isinstance(error.value, MemoryError)
    assert store.pool.pages_in_use == in_use and store.blocks == [1]
    monkeypatch.setattr(pages, "available_host_bytes", lambda: need * PAGE)
    store.ensure([16], [48])
    assert torch.equal(store.read(0, 0, 0, 16)[0], tokens(16)[0][0])


def test_pages_already_ours_are_not_counted_as_needed(monkeypatch):
    store = host()
    fill(store, 0, 64)
    store.truncate([0])
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 0)
    store.ensure([0], [64])


@pytest.mark.parametrize("pin", [False, True])
def test_the_system_is_not_asked_at_every_growth_and_refuses_in_time(monkeypatch, runtime, pin):
    asked = []
    monkeypatch.setattr(pages, "available_host_bytes", lambda: asked.append(1) or 1 << 30)
    pool = PagePool(DIM, torch.float32, pin, reserve_bytes=1 << 20)
    pool.allocate(1000)
    for _ in range(200):
        pool.allocate(1)
    assert 2 < len(asked) <= 25
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 0)
    before, most = pool._used, pool._used // 100
    with pytest.raises(HostMemoryError, match=r"needs 1 more pages x 256 .* but 0\.00 GiB are available"):
        for _ in range(most + 1):
            pool.allocate(1)
    assert pool.pages_in_use == pool._used <= before + most
    pool.release(torch.arange(5))
    pool.allocate(5)  # those are there


def test_nothing_is_taken_ahead_that_the_system_does_not_have(monkeypatch, runtime):
    pool = PagePool(1024, torch.float32, True, reserve_bytes=1 << 30)
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 1003 * pool.page_bytes)
    pool.allocate(1000)
    assert pool.pinned_bytes == 1003 * pool.page_bytes


def test_the_address_range_is_a_limit_too():
    pool = PagePool(DIM, torch.float32, False, reserve_bytes=4 * PAGE)
    pool.allocate(4)
    with pytest.raises(HostMemoryError, match="1 more pages"):
        pool.allocate(1)


def test_available_memory_is_between_nothing_and_all_of_it():
    import os

    assert 0 < pages.available_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_host_capacity_tokens_commits_at_once_and_refuses_longer_rows(monkeypatch):
    store = host(2, capacity_tokens=40)
    assert store.pool._used == LAYERS * HEADS * 2 * 3 and store.pool.pages_in_use == 0
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 0)  # nothing more is ever needed
    store.ensure([0, 0], [40, 40])
    with pytest.raises(HostMemoryError, match="A row would hold 41 tokens, but host_capacity_tokens=40"):
        store.ensure([40, 40], [40, 41])


def test_host_capacity_that_does_not_fit_is_refused_before_the_first_prompt(monkeypatch):
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 10 * PAGE)
    with pytest.raises(HostMemoryError, match="12 more pages"):
        host(1, capacity_tokens=48)


# -- pinning ----------------------------------------------------------------------------------------------------------


class Runtime:
    """Stands in for the CUDA runtime."""

    def __init__(self):
        self.touched, self.registered, self.unregistered, self.error = [], [], [], 0

    def cudaHostRegister(self, address, size, flags):
        assert self.touched[len(self.registered) :] == [(address, size)], "touched before it is registered, and once"
        if self.error:
            self.touched.pop()
        else:
            self.registered.append((address, size))
        return self.error

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)


@pytest.fixture
def runtime(monkeypatch):
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 1 << 60)
    fake.touch = pages._touch
    # Only noted: no memory is used.
    monkeypatch.setattr(pages, "_touch", lambda memory: fake.touched.append((memory.data_ptr(), memory.nbytes)))
    yield fake
    gc.collect()  # pools that an exception's frames still hold


def big_pool():
    """128 KiB a page."""
    return PagePool(1024, torch.float32, True, reserve_bytes=8 << 30)


def test_pinned_pieces_are_contiguous_at_most_one_gib_and_hardly_more_than_asked(runtime):
    pool = big_pool()
    assert pool.pinned_bytes == 0
    asked = 0
    for gib in (0.3, 1.5, 0.01, 2.7, 2.9):
        count = int(gib * 2**30) // pool.page_bytes
        pool.allocate(count)
        asked += count * pool.page_bytes
        assert asked <= pool.pinned_bytes <= asked + min(asked // 100, 64 << 20) + mmap.PAGESIZE
    at = pool.pages.data_ptr()
    for address, size in runtime.registered:
        assert address == at and 0 < size <= 1 << 30
        at += size
    assert sum(size for _, size in runtime.registered) == pool.pinned_bytes


def test_a_long_decode_does_not_pin_at_every_page(runtime):
    pool = big_pool()
    pool.allocate(4000)
    before = len(runtime.registered)
    for _ in range(400):
        pool.allocate(1)
    assert len(runtime.registered) - before <= 12


def test_touching_leaves_pages_in_use_alone(monkeypatch, runtime):
    """Sixteen pages of the pool share one of the system's."""
    noted, touch = pages._touch, runtime.touch
    monkeypatch.setattr(pages, "_touch", lambda memory: (noted(memory), touch(memory)))
    pool = PagePool(DIM, torch.float32, True, reserve_bytes=1 << 20)
    got = []
    for count in (1, 3, 14, 40, 1, 500, 900):
        got += pool.allocate(count).tolist()
        pool.pages[got] = 7.0
        assert (pool.pages[got] == 7).all()
    assert sorted(got) == list(range(1459))


def test_given_memory_is_used_and_pinned_whole_without_asking_the_system(monkeypatch, runtime):
    asked = []
    monkeypatch.setattr(pages, "available_host_bytes", lambda: asked.append(1) or 0)
    memory = mmap.mmap(-1, 65 * PAGE)
    pool = PagePool(DIM, torch.float32, True, 64 * PAGE, memory=memory)
    assert pool.capacity == 64
    pool.pages[pool.allocate(64)] = 2.0
    assert memory[: 64 * PAGE] == b"\0\0\0\x40" * (16 * PAGE) and memory[64 * PAGE :] == bytes(PAGE)
    assert runtime.registered[0][0] == pool.pages.data_ptr() and pool.pinned_bytes == 64 * PAGE and not asked
    with pytest.raises(HostMemoryError, match="1 more pages .* may take 64 in all"):
        pool.allocate(1)
    assert PagePool(DIM, torch.float32, False, memory=memory).capacity == 65


def test_a_staging_pool_is_pinned_when_it_is_made(runtime):
    from oasis_hf.disagg import StagingPool

    pool = StagingPool(64, DIM, torch.float32, pin=True)
    assert pool.pool.pinned_bytes >= 64 * PAGE and pool.free == 64
    registered = len(runtime.registered)
    pool.reserve("r", 64)
    assert len(runtime.registered) == registered
    assert pool.pages_of("r").pinned_bytes == pool.pool.pinned_bytes
    runtime.error = 2  # nothing more
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostMemoryError, match="could not pin"):
        StagingPool(64, DIM, torch.float32, pin=True)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_what_is_pinned_is_touched():
    touched = torch.full((100,), 7.0)
    pages._touch(touched)
    assert not touched.any()


@pytest.mark.parametrize("works", [True, False])
def test_pools_that_are_pinned_ask_for_huge_pages_and_do_without(monkeypatch, works):
    advice = []

    class Mapped(mmap.mmap):
        def madvise(self, *args):
            advice.append(args)
            if not works:
                raise OSError("no huge pages here")

    monkeypatch.setattr(mmap, "mmap", Mapped)
    PagePool(DIM, torch.float32, False)
    assert advice == []
    PagePool(DIM, torch.float32, True)
    assert advice == [(mmap.MADV_HUGEPAGE,)]


def test_pinning_stops_at_the_end_of_the_reserved_range(runtime):
    pool = PagePool(1024, torch.float32, True, reserve_bytes=10 * (128 << 10))
    pool.allocate(10)
    assert pool.pinned_bytes == 10 * pool.page_bytes


def test_what_is_ahead_is_done_without_where_it_cannot_be_pinned(monkeypatch, runtime):
    pool = big_pool()
    register, most = runtime.cudaHostRegister, 4001 * pool.page_bytes

    def limited(address, size, flags):
        runtime.error = 2 if address + size > pool.pages.data_ptr() + most else 0
        return register(address, size, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", limited)
    pool.allocate(4000)
    assert pool.pinned_bytes == 4000 * pool.page_bytes
    pool.allocate(1)
    with pytest.raises(HostMemoryError, match="could not pin"):
        pool.allocate(1)


def test_pages_used_again_are_not_pinned_again(runtime):
    pool = big_pool()
    got = pool.allocate(100)
    before = list(runtime.registered)
    pool.release(got)
    pool.allocate(100)
    assert runtime.registered == before


def test_everything_pinned_is_unregistered_once_when_the_pool_dies(runtime):
    pool = big_pool()
    pool.allocate(9000)
    pool.allocate(9000)
    addresses = [address for address, _ in runtime.registered]
    del pool
    gc.collect()
    assert runtime.unregistered == addresses and len(addresses) >= 3


def test_a_fork_keeps_the_pinned_memory_alive(runtime):
    cpu = torch.device("cpu")
    store = HostStore(1, 1, 1, DIM, torch.float32, cpu, pool=PagePool(DIM, torch.float32, True))
    store.ensure([0], [16])
    other = store.fork()
    del store
    gc.collect()
    assert not runtime.unregistered
    del other
    gc.collect()
    assert len(runtime.unregistered) == 1


def test_a_failed_pin_says_so_and_allocates_nothing(runtime):
    pool = big_pool()
    pool.allocate(8)
    runtime.error = 2
    with pytest.raises(HostMemoryError, match=r"could not pin 0.12 GiB more .*error 2; 0.00 GiB are pinned"):
        pool.allocate(1000)
    assert pool.pages_in_use == 8 and len(pool._free) == 0
    runtime.error = 0
    assert pool.allocate(2).tolist() == [8, 9]


def test_unpinned_pools_never_call_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", types.SimpleNamespace)
    pool = PagePool(DIM, torch.float32, False)
    pool.allocate(4)
    assert pool.pinned_bytes == 0
