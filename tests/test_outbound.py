"""Writes on a side stream, by a device that puts everything there off for as long as it may.

What a prompt's layers write lies in a queue until the current stream waits for the side stream (or the host for the
device), and fails if its tensors are gone or changed by then. So whatever looks at pages too early finds them empty.
"""

from __future__ import annotations

import contextlib
import copy
import weakref

import pytest
import torch
from test_generate import generate
from tiny import left_padded, prompt, tiny

from oasis_hf import OasisCache, ops
from oasis_hf.config import BLOCK
from oasis_hf.layers import OasisLayer
from oasis_hf.ops import cuda, reference
from oasis_hf.store import HostStore
from oasis_hf.store.outbound import Outbound


class Stream:
    """The current stream, or a side stream, whose operations wait in `late`."""

    def __init__(self, device=None, priority=0):
        self.device, self.late = torch.device("cpu"), []

    def wait_stream(self, other):
        while other.late:
            other.late.pop(0)()


class Device:
    """Stands for CUDA. syncs: how often the host waited for it."""

    def __init__(self):
        self.main = self.current = Stream()
        self.sides, self.syncs = [], 0

    def new_stream(self, device=None, priority=0):
        self.sides.append(Stream())
        return self.sides[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device=None):
        self.syncs += 1
        for side in self.sides:
            self.main.wait_stream(side)

    def write(self, pages, table, keys, values, start):
        if self.current is self.main:
            return reference.write(pages, table, keys, values, start)
        given = [weakref.ref(tensor) for tensor in (table, keys, values)]
        was = [tensor.clone() for tensor in (table, keys, values)]

        def run():
            there = [ref() for ref in given]
            assert all(tensor is not None for tensor in there), "its memory is another's"
            assert all(torch.equal(tensor, old) for tensor, old in zip(there, was)), "its memory was written over"
            reference.write(pages, *there, start)

        self.current.late.append(run)

    @property
    def late(self):
        return sum(len(side.late) for side in self.sides)


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(cuda, "reaches", lambda pages, table, tensor: pages.dtype == tensor.dtype)
    monkeypatch.setattr(ops, "write", fake.write)
    init = HostStore.__init__

    def with_device_table(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.device_table = self.table.clone()

    monkeypatch.setattr(HostStore, "__init__", with_device_table)
    return fake


# -- a store ----------------------------------------------------------------------------------------------------------

LAYERS, HEADS, DIM = 3, 2, 4


def store_of(rows=1):
    store = HostStore(LAYERS, rows, HEADS, DIM, torch.float32, torch.device("cpu"))
    store.ensure([0] * rows, [40] * rows)
    return store


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, count, DIM, generator=generator).unbind(0)


def holds(store, layer, row, keys, values):
    got = store.read(layer, row, 0, keys.shape[1])
    return torch.equal(got[0], keys) and torch.equal(got[1], values)


def test_a_layer_leaves_while_the_next_computes_and_is_let_go_when_that_one_leaves(device):
    store, alive = store_of(2), []
    for layer in range(LAYERS):
        made = [tokens(40, layer), tokens(40, layer + 10)]  # of two rows
        alive.append([weakref.ref(tensor) for row in made for tensor in row])
        assert sum(ref() is not None for layer_refs in alive for ref in layer_refs) <= 8, "two layers' at most"
        for row, (keys, values) in enumerate(made):
            store.write(layer, row, 0, keys, values)
        del made, keys, values
        assert device.late == 2, "both rows of this layer, nothing of the one before"
        assert [any(ref() is not None for ref in refs) for refs in alive] == [False] * layer + [True]
    store.join()
    assert device.late == device.syncs == 0 and not any(ref() is not None for ref in alive[-1])
    assert all(holds(store, layer, row, *tokens(40, layer + 10 * row)) for layer in range(LAYERS) for row in range(2))
    assert len(device.sides) == 1


def test_joining_twice_or_nothing_waits_for_nothing(device, monkeypatch):
    outbound, waits = Outbound(torch.device("cpu")), []
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waits.append((self, other)))
    outbound.join()
    assert waits == []
    with outbound.beside(0, torch.zeros(1)):
        assert device.current is outbound.stream
    assert waits == [(outbound.stream, device.main)]
    outbound.join()
    outbound.join()
    assert waits[1:] == [(device.main, outbound.stream)]


def test_what_is_loaded_or_read_is_what_was_written(device):
    keys, values = tokens(40)
    for how in ("load", "read"):
        store = store_of()
        store.write(1, 0, 0, keys, values)
        got = store.read(1, 0, 5, 38) if how == "read" else store.load(1, 0, 5, 38, keys)
        assert torch.equal(got[0], keys[:, 5:38]) and torch.equal(got[1], values[:, 5:38])
        assert device.syncs == (how == "read")


def test_pages_are_not_given_back_while_a_write_is_on_its_way(device):
    keys, values = tokens(40)
    changes = {
        "truncate": lambda store: store.truncate([3, 3]),
        "reset": lambda store: store.reset(),
        "select_rows": lambda store: store.select_rows([1, 1]),
        "fork": lambda store: store.fork(),
    }
    for change in changes.values():
        store = store_of(2)
        store.write(2, 0, 0, keys, values)
        assert device.late == 1
        change(store)
        assert device.late == 0


def test_a_branch_and_its_trunk_write_apart(device):
    keys, values = tokens(40)
    trunk = store_of()
    for layer in range(LAYERS):
        trunk.write(layer, 0, 0, keys, values)
    branch = trunk.fork()
    more = {store: tokens(20, seed) for seed, store in enumerate((trunk, branch), 5)}
    for store, (new_keys, new_values) in more.items():
        store.ensure([40], [60])
        store.write(0, 0, 40, new_keys, new_values)
    assert device.late == 2 and len(device.sides) == 2
    for store, (new_keys, new_values) in more.items():
        store.join()
        assert holds(store, 0, 0, torch.cat((keys, new_keys), 1), torch.cat((values, new_values), 1))


def test_the_table_may_be_replaced_under_a_write(device):
    store = store_of()
    keys, values = tokens(40)
    store.write(0, 0, 0, keys, values)
    store.ensure([40], [40 + 20 * BLOCK])
    store.join()
    assert holds(store, 0, 0, keys, values)


def test_pages_of_another_dtype_are_written_by_the_host(device):
    store = HostStore(LAYERS, 1, HEADS, DIM, torch.bfloat16, torch.device("cpu"))
    store.ensure([0], [40])
    keys, values = tokens(40)
    store.write(0, 0, 0, keys, values)
    assert device.late == 0 and device.syncs == 1
    assert holds(store, 0, 0, keys.bfloat16(), values.bfloat16())
    assert store.load(0, 0, 0, 40, keys)[0].dtype == torch.float32


# -- a model ----------------------------------------------------------------------------------------------------------


def plain(family, run):
    """What `run(make_cache)` gives without any of this: called before the fixture `device` is."""
    return run(tiny(family), lambda **knobs: OasisCache(tiny(family), **knobs))


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


RUNS = {
    "prompt": lambda model, new: [generate(model, prompt(2, 100), new(budget=64))],
    "padded": lambda model, new: [generate(model, left_padded([100, 31, 64]), new(budget=64))],
    "chunks": lambda model, new: [generate(model, left_padded([61, 20, 44]), new(budget=64), prefill_chunk_size=13)],
    "turns": lambda model, new: turns(model, new(budget=64)),
    "branches": lambda model, new: branches(model, new(budget=64)),
}


def turns(model, cache):
    out = [generate(model, prompt(2, 50), cache, max_new_tokens=9)]
    mask = torch.ones(2, 49 + 9 + 30, dtype=torch.long)
    mask[1, 52:57] = 0  # a finished row's padding: what follows it moves up
    more = torch.cat((out[0].sequences[:, :58], prompt(2, 30, 3)), 1)
    return [*out, generate(model, {"input_ids": more, "attention_mask": mask}, cache)]


def branches(model, cache):
    out = [generate(model, prompt(2, 70), cache, max_new_tokens=3)]
    more = torch.cat((out[0].sequences, prompt(2, 41, 3)), 1)
    return [*out, *(generate(model, more, copy.deepcopy(cache)) for _ in range(2)), generate(model, more, cache)]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("run", RUNS)
def test_a_model_gives_what_it_gives_without_a_side_stream(family, run, request, monkeypatch):
    wanted = plain(family, RUNS[run])
    device = request.getfixturevalue("device")
    forward, waiting = OasisLayer.attend, []

    def attend(self, *args):
        waiting.append(device.late)
        return forward(self, *args)

    monkeypatch.setattr(OasisLayer, "attend", attend)
    for a, b in zip(wanted, plain(family, RUNS[run]), strict=True):
        same(a, b)
    assert max(waiting) > 0 and device.late == 0


def test_a_decode_step_that_hides_old_tokens_finds_them_moved(request):
    @torch.no_grad()
    def run(model, new):
        cache, ids, mask = new(budget=64), prompt(2, 100), torch.ones(2, 101, dtype=torch.long)
        model(ids, past_key_values=cache)
        mask[1, 30:35] = 0
        return model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits

    wanted = plain("llama", run)
    request.getfixturevalue("device")
    assert torch.equal(wanted, plain("llama", run))


@pytest.mark.parametrize("inputs", [{"input_ids": prompt(2, 100)}, left_padded([100, 31])], ids=["all", "padded"])
def test_the_host_waits_for_nothing_in_a_first_prompt_and_nothing_is_left_behind(device, inputs):
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    assert device.syncs == device.late == 0 and len(device.sides) == 1
    assert cache.state.store._outbound._held == []


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_interrupted_prompt_leaves_nothing_behind(where, request, monkeypatch):
    run = RUNS["prompt"]
    (wanted,) = plain("llama", run)
    device = request.getfixturevalue("device")
    model, fails = tiny("llama"), [True]
    dense = OasisLayer._store_row

    def store_row(self, row, *args):
        dense(self, row, *args)
        if self.index == where and row == 1 and fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(OasisLayer, "_store_row", store_row)
    cache = OasisCache(model, budget=64)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(prompt(2, 100, 9), past_key_values=cache)
    assert device.late == 0 and cache.state.store._outbound._held == [] and cache.state.store.pool.pages_in_use == 0
    fails.clear()
    same(wanted, generate(model, prompt(2, 100), cache))
