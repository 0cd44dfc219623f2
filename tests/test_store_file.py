"""Pages in a file under little host memory: the same results, and errors that say what is wrong (issue E, part 5)."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
import time

import pytest
import torch
from test_generate import generate
from tiny import left_padded, prompt, tiny

from oasis_hf import ConfigError, HostMemoryError, OasisCache
from oasis_hf.config import BLOCK
from oasis_hf.store import Near, PageFile, PagePool, StoreFileError, file, file_pages

PAGE = 2 * BLOCK * 16 * 4  # of the tiny models, float32
DIM = 16


def full_kv(tokens, rows=1, layers=3, heads=2):
    return layers * heads * rows * -(-tokens // BLOCK) * PAGE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"lookahead": "previous"},
        {"lookahead": "on_demand"},
        {"speculate": True, "draft_tokens": 3},
        {"sink_blocks": 1, "recent_blocks": 1, "seed": 5},
    ],
    ids=str,
)
def test_a_quarter_of_the_memory_gives_bit_identical_logits(family, knobs):
    model = tiny(family)
    for inputs, rows in ((prompt(1, 120), 1), (left_padded([120, 30, 77]), 3)):
        most = full_kv(160, rows) // 4
        host = generate(model, inputs, OasisCache(model, budget=80, **knobs), max_new_tokens=40)
        cache = OasisCache(model, budget=80, store="file", host_bytes=most, **knobs)
        filed = generate(model, inputs, cache, max_new_tokens=40)
        assert torch.equal(host.sequences, filed.sequences)
        assert all(torch.equal(a, b) for a, b in zip(host.logits, filed.logits, strict=True))
        memory = cache.memory()
        assert 0 < memory["host"] <= most < memory["file"] == cache.state.store.nbytes
        assert cache.state.store.pool.read > 0 and cache.state.store.pool.written > 0
        assert "in the tier 'file'" in cache.report().replace("\n", " ")


@torch.no_grad()
def test_turns_branches_and_crops_are_the_same():
    """A second prompt streams the first back; a branch shares its pages; a crop reopens blocks that are in the file."""
    model, text = tiny("llama"), prompt(1, 220)
    outs = []
    for knobs in ({}, {"store": "file", "host_bytes": full_kv(200) // 5}):
        cache = OasisCache(model, budget=64, **knobs)
        out = [model(text[:, :90], past_key_values=cache).logits[:, -1:]]
        out += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(90, 110)]
        out.append(model(text[:, 110:150], past_key_values=cache).logits[:, -1:])
        branch = copy.deepcopy(cache)
        cache.crop(-23)
        out += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(127, 160)]
        out += [model(text[:, i : i + 1], past_key_values=branch).logits for i in range(150, 190)]
        cache.reset()
        out.append(model(text[:, :50], past_key_values=cache).logits[:, -1:])
        out += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(50, 80)]
        outs.append(torch.cat(out, 1))
    assert torch.equal(*outs)


@torch.no_grad()
def test_a_transfer_is_waited_for_by_its_own_layer_in_the_next_step(monkeypatch):
    model, text = tiny("llama"), prompt(1, 260)
    cache = OasisCache(model, budget=64, store="file", host_bytes=full_kv(64), fetch_ratio=1.0)
    model(text[:, :200], past_key_values=cache)
    store = cache.state.store
    seen, plain = [], type(store).arrive

    def watched(self, layer=None):
        seen.append((layer, sorted(self._planned)))
        plain(self, layer)

    monkeypatch.setattr(type(store), "arrive", watched)
    left = []
    for at in range(200, 220):
        seen.clear()
        model(text[:, at : at + 1], past_key_values=cache)
        left.append(set(store._planned))
        assert [layer for layer, _ in seen if layer is not None][:3] == [0, 1, 2]
        assert not any(layer is None for layer, _ in seen[1:]), "nothing waits for all layers within a step"
    assert any(len(one) > 1 for one in left), "steps leave transfers to the next one"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_pages_go_first_and_unchanged_ones_are_not_written():
    near = file_pages(DIM, torch.float32, pin=False, host_bytes=3 * PAGE)
    pages = near.allocate(5)
    for page in pages[:3]:
        near.change(near.bring(page[None], torch.tensor([False])))
    near.bring(pages[:1])
    near.change(near.bring(pages[3:4], torch.tensor([False])))  # page 1 goes
    assert (near.written, near.read) == (1, 0)
    near.bring(pages[[0, 2, 3]])
    assert near.read == 0
    near.bring(pages[1:2])  # page 0, changed and used before 2 and 3, goes
    assert (near.written, near.read) == (2, 1)
    near.bring(pages[0:1])
    assert (near.written, near.read) == (3, 2), "page 1 came from the file and is no other: only page 2 is written"


def test_what_is_given_back_is_neither_written_nor_held():
    near = file_pages(DIM, torch.float32, pin=False, host_bytes=4 * PAGE)
    pages = near.allocate(4)
    near.change(near.bring(pages, torch.zeros(4, dtype=torch.bool)))
    near.release(pages)
    assert near.held == near.pool.pages_in_use == near.pages_in_use == 0
    near.bring(near.allocate(4), torch.zeros(4, dtype=torch.bool))
    assert (near.written, near.read) == (0, 0)


def test_too_little_memory_says_how_much_there_is():
    near = file_pages(DIM, torch.float32, pin=False, host_bytes=2 * PAGE)
    with pytest.raises(HostMemoryError, match=r"3 pages of 2,048 bytes .* may hold 2: raise host_bytes"):
        near.bring(near.allocate(3))
    near.bring(near.allocate(2))
    with pytest.raises(HostMemoryError, match=r"9 pages of 2,048 bytes .* may hold 2: raise host_bytes"):
        near.bring(near.allocate(9))
    near, settled = file_pages(DIM, torch.float32, pin=False, host_bytes=2 * PAGE), []
    near.pool.release_later(near.pool.allocate(1), lambda: bool(settled))
    with pytest.raises(HostMemoryError, match=r"2 pages .* may hold 2, 1 of which a late read may"):
        near.bring(near.allocate(2))
    settled.append(True)
    assert near.pool.pages_in_use == near.pool.late == 0
    near.bring(near.allocate(2))
    with pytest.raises(ConfigError, match=r"host_bytes=100 is not allowed: use at least 2,048"):
        file_pages(DIM, torch.float32, pin=False, host_bytes=100)
    model = tiny("llama")
    with pytest.raises(HostMemoryError, match="raise host_bytes"), torch.no_grad():
        model(prompt(1, 40), past_key_values=OasisCache(model, budget=64, store="file", host_bytes=PAGE))


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"host_bytes": 5}, "host_bytes=5 is not allowed: use None with store='host', or store='file'"),
        ({"file_dir": "/tmp"}, "file_dir='/tmp' is not allowed: use None with store='host'"),
        ({"store": "file", "host_bytes": 0}, "host_bytes=0 is not allowed: use an integer >= 1"),
        ({"store": "file", "file_dir": 3}, "file_dir=3 is not allowed: use a folder"),
        ({"store": "file", "host_capacity_tokens": 64}, "host_capacity_tokens=64 is not allowed"),
    ],
)
def test_wrong_knobs(knobs, said):
    with pytest.raises(ConfigError, match=said):
        OasisCache(tiny("llama"), **knobs)


# -- the file ---------------------------------------------------------------------------------------------------------


def filled(tmp_path, pages=8, page_bytes=4096):
    """A file, memory `[pages, 2, 16, D]` of other bytes a page, and the numbers."""
    pool = PagePool(page_bytes // (2 * BLOCK * 2), torch.bfloat16, pin=False)
    where = PageFile(page_bytes, str(tmp_path))
    where.make_room(pages)
    memory = pool.pages[:pages]
    memory.copy_(torch.randn(memory.shape))
    return where, memory, torch.arange(pages)


@pytest.mark.parametrize("page_bytes", [4096, 8192, 2048])
def test_pages_come_back_as_they_went(tmp_path, page_bytes):
    where, memory, numbers = filled(tmp_path, 40, page_bytes)
    there = torch.randperm(40)
    where.write(there, memory, numbers)
    back = torch.zeros_like(memory)
    if where.direct:
        pool = PagePool(memory.shape[-1], memory.dtype, pin=False)  # O_DIRECT wants aligned memory
        back = pool.pages[:40]
    some = torch.randperm(40)[:17]
    where.begin(there[some], back, numbers[some]).wait()
    assert torch.equal(back[some], memory[some]) and not back[[i for i in range(40) if i not in some]].any()


def test_neighbours_are_one_transfer(tmp_path, monkeypatch):
    where, memory, numbers = filled(tmp_path)
    calls, plain = [], os.pwritev

    def counted(file, parts, offset):
        calls.append((offset, len(parts)))
        return plain(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    where.write(torch.tensor([5, 1, 0, 7, 2, 6, 3]), memory, numbers[:7])
    assert sorted(calls) == [(0, 4), (5 * 4096, 3)]
    assert [len(run) for run in file.neighbours([(i, i) for i in range(2 * file._SEGMENTS + 5)])] == [
        file._SEGMENTS, file._SEGMENTS, 5,
    ]  # fmt: skip


def test_an_interrupted_transfer_goes_on(tmp_path, monkeypatch):
    where, memory, numbers = filled(tmp_path, page_bytes=2048)  # parts of a sector need the system's own memory
    plain = os.pwritev

    def little(f, parts, offset):
        whole = b"".join(bytes(part) for part in parts)
        return os.pwrite(f, whole[:1000], offset) if len(whole) > 1000 else plain(f, parts, offset)

    monkeypatch.setattr(os, "pwritev", little)
    where.write(numbers, memory, numbers)
    back = torch.zeros_like(memory)
    where.begin(numbers, back, numbers).wait()
    assert torch.equal(back, memory)


def test_a_file_that_was_cut_is_an_error(tmp_path):
    where, memory, numbers = filled(tmp_path)
    where.write(numbers, memory, numbers)
    os.ftruncate(where.file, 3 * 4096)
    where.begin(numbers[:3], memory, numbers[:3]).wait()
    with pytest.raises(StoreFileError, match=r"ended at byte 12,288, where 20,480 bytes more are to be"):
        where.begin(numbers, memory, numbers).wait()


def test_what_did_not_come_counts_as_not_there(tmp_path, monkeypatch):
    near = Near(PagePool(DIM, torch.float32, pin=False), PageFile(PAGE, str(tmp_path)), 4)
    pages = near.allocate(8)
    for some in pages.split(4):
        places = near.bring(some, torch.zeros(4, dtype=torch.bool))
        near.pages[places] = 5.0
        near.change(places)
    near.pages[near.bring(pages[:4])] = 7.0
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: 0)
        for _ in range(2):
            with pytest.raises(StoreFileError):
                near.bring(pages[4:6])
    assert near.held == near.pool.pages_in_use <= 4
    assert near.pages[near.bring(pages[4:6])].eq(5.0).all(), "what was sent away before is in the file"


def test_what_could_not_be_asked_for_is_not_there():
    near = file_pages(DIM, torch.float32, pin=False, host_bytes=4 * PAGE)
    pages = near.allocate(6)
    for some in pages.split(3):
        places = near.bring(some, torch.zeros(3, dtype=torch.bool))
        near.pages[places] = some[:, None, None, None].float()
        near.change(places)
    far = near.far.begin

    def refused(*args):
        raise StoreFileError("no")

    near.far.begin = refused
    missing = pages[near._place[pages] < 0]
    with pytest.raises(StoreFileError):
        near.bring(missing)
    near.far.begin = far
    assert near.held == near.pool.pages_in_use <= 4
    assert near.pages[near.bring(missing)][:, 0, 0, 0].tolist() == missing.tolist(), "it is asked for again, and read"


def test_a_full_disk_is_told_with_its_numbers(tmp_path, monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = tiny("llama")
    cache = OasisCache(model, budget=64, store="file", host_bytes=1 << 20, file_dir=str(tmp_path))
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
        room = cache.state.store.pool.far
        monkeypatch.setattr(file, "GROWTH_BYTES", 0)
        room._bytes = 3 * 6 * PAGE  # as if it had not grown ahead
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(HostMemoryError, match=r"GiB in a file in .* can't grow: No space left on device"):
            model(prompt(1, 200), past_key_values=cache)
        monkeypatch.undo()
        assert cache.get_seq_length() == 40
        model(prompt(1, 200), past_key_values=cache)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(StoreFileError, match=r"No file can be made in '.*nowhere': No such file or directory"):
        PageFile(4096, str(tmp_path / "nowhere"))


def test_nothing_is_left_behind(tmp_path):
    gc.collect()  # what other tests left open would be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    where, *_ = filled(tmp_path)
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before + 1
    del where
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_transfer_that_outlives_its_file_ends_without_a_word(monkeypatch, capfd):
    """The last to hold the file is then a thread of its own, which can't wait for itself."""
    pages = PageFile(PAGE)
    file, held, going = pages.file, threading.Event(), threading.Event()
    pages.make_room(4)

    def slow(*args):
        going.set()
        held.wait(60)
        return os.preadv(*args)

    memory, at = torch.zeros(4, 2, BLOCK, DIM), torch.arange(4)
    transfers = pages._transfer(slow, at, memory, at)
    assert going.wait(60)
    del pages
    held.set()
    transfers.wait()
    for _ in range(6000):
        try:
            os.fstat(file)
        except OSError as error:
            assert error.errno == errno.EBADF
            break
        time.sleep(0.01)
    else:
        pytest.fail("the file is still open")
    assert "Exception ignored" not in capfd.readouterr().err
