"""The CUDA `append`, alone and with pages and summaries, bit for bit against the reference and plain indexing."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
STATE = ("keys", "values", "table", "last_selected", "fresh", "wasted", "pages", "summaries", "scales")


def append_step(*args):
    from oasis_hf.ops import cuda  # builds the operators: not at collection

    return cuda.append_step(*args)


def pinned(tensor):
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor)


class Case:
    """A state between two tokens, on the CPU. Lengths open, close and continue blocks; ages have many ties."""

    def __init__(
        self, rows, heads, slots, dim, dtype=torch.bfloat16, parts=2, int8=False, scorer="midrange", scale=1.0, seed=0
    ):
        random = torch.Generator().manual_seed(seed)
        self.random, self.scorer, self.int8, self.scale = random, scorer, int8, scale
        most = 2 * slots + 2
        into = torch.tensor([0, 0, BLOCK - 1, BLOCK - 1, 5, 1])[torch.randint(6, (rows,), generator=random)]
        block = torch.randint(most, (rows,), generator=random)
        block[0], into[0] = 0, 0  # a row with nothing yet
        self.lengths = block * BLOCK + into
        if rows > 2:
            self.lengths[2] = -1  # a row that takes no token

        # Closed blocks in random slots, some slots empty; the open block somewhere.
        self.table = torch.full((rows, heads, slots), -1)
        for b in range(rows):
            for h in range(heads):
                held = torch.randperm(int(block[b]), generator=random)[: slots - (1 if rows > 1 and b % 2 else 0)]
                self.table[b, h, torch.randperm(slots, generator=random)[: len(held)]] = held
                if into[b]:
                    self.table[b, h, int(torch.randint(slots, (1,), generator=random))] = block[b]
        self.last_selected = torch.randint(3, 6, (rows, heads, slots), generator=random)
        self.order = torch.randperm(slots, generator=random)
        self.step = torch.tensor(7)
        self.fresh = torch.rand(rows, heads, slots, generator=random) < 0.5
        self.wasted = torch.randint(9, (heads,), generator=random)
        length = TAIL + slots * BLOCK
        self.keys, self.values = (self.randn(rows, heads, length, dim).to(dtype) for _ in range(2))
        self.pages = self.randn(rows * heads * most, 2, BLOCK, dim).to(dtype)
        self.page_table = torch.full((2, rows, heads, most + 3), -1)
        self.page_table[1, :, :, :most] = torch.randperm(len(self.pages), generator=random).view(rows, heads, most)
        self.summaries = torch.full((rows, heads, most, parts, 2, dim), 3).to(torch.int8 if int8 else dtype)
        self.scales = torch.full(self.summaries.shape[:-1], 3.0, dtype=torch.float16) if int8 else None

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.random) * self.scale

    def want(self, new_keys, new_values):
        """The state after one token, in place."""
        slot, evicted = reference.append(
            self.keys, self.values, self.table, self.last_selected, self.lengths, self.order, new_keys, new_values,
            self.step,
        )  # fmt: skip
        at = slot.unsqueeze(-1)
        self.wasted += (evicted & self.fresh.gather(2, at).squeeze(-1)).sum(0)
        self.fresh.scatter_(2, at, self.fresh.gather(2, at) & (self.lengths < 0)[:, None, None])
        parts = self.summaries.shape[3]
        for b, length in enumerate(self.lengths.tolist()):
            if length < 0:
                continue
            block, into = divmod(length, BLOCK)
            for h in range(self.keys.shape[1]):
                page, start = self.page_table[1, b, h, block], TAIL + int(slot[b, h]) * BLOCK
                self.pages[page, 0, into] = self.keys[b, h, start + into]
                self.pages[page, 1, into] = self.values[b, h, start + into]
                if into == BLOCK - 1:
                    keys = self.keys[b, h, start : start + BLOCK]
                    vectors, scales = reference.summarize(keys, self.scorer, parts, self.int8)
                    self.summaries[b, h, block] = vectors
                    if self.int8:
                        self.scales[b, h, block] = scales
        return slot, evicted

    def on_device(self):
        on = {name: value.to(DEVICE) for name in STATE if (value := getattr(self, name)) is not None}
        on["pages"] = pinned(self.pages)
        return on

    def call(self, on, lengths, step, new_keys, new_values, page_table):
        return append_step(
            on["keys"], on["values"], on["table"], on["last_selected"], lengths, self.order.to(DEVICE), new_keys,
            new_values, step, on["fresh"], on["wasted"], on["pages"], page_table, on["summaries"], on.get("scales"),
            self.scorer, self.int8,
        )  # fmt: skip

    def equal(self, on):
        torch.cuda.synchronize()
        for name, got in on.items():
            assert torch.equal(got.cpu(), getattr(self, name)), name

    def check(self, table_on="host"):
        on = self.on_device()
        table = pinned(self.page_table) if table_on == "host" else self.page_table.to(DEVICE)
        new = self.keys[:, :, 3], self.values[:, :, 3]  # tail entries, which the slots lie behind
        got = self.call(
            on, self.lengths.to(DEVICE), self.step.to(DEVICE), on["keys"][:, :, 3], on["values"][:, :, 3], table[1]
        )
        want = self.want(*new)
        assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
        self.equal(on)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("int8", [False, True])
def test_every_head_size(dim, dtype, int8):
    Case(9, 3, 5, dim, dtype, int8=int8, seed=dim).check()


@pytest.mark.parametrize("scorer", ["minmax", "midrange"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("int8", [False, True])
def test_summaries(scorer, parts, int8):
    Case(12, 2, 6, 128, parts=parts, int8=int8, scorer=scorer, seed=parts).check("device")


@pytest.mark.parametrize("scale", [0.0, 1e-6, 3e-3, 300.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_and_large_keys(scale, dtype):
    for int8 in (False, True):
        Case(12, 2, 6, 64, dtype, int8=int8, scale=scale, seed=3).check()


@pytest.mark.parametrize(
    "rows, heads, slots", [(1, 1, 1), (1, 8, 129), (5, 3, 2), (7, 5, 32), (6, 2, 257), (5, 1, 600)]
)
def test_shapes(rows, heads, slots):
    for seed in range(3):
        Case(rows, heads, slots, 64, seed=seed).check()


@pytest.mark.slow
def test_production_size():
    Case(64, 8, 129, 128).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_operator_alone(dtype):
    """No pages, summaries or flags; new keys from anywhere."""
    case = Case(11, 3, 7, 80, dtype)
    on = {name: getattr(case, name).to(DEVICE) for name in ("keys", "values", "table", "last_selected")}
    qkv = case.randn(11, 3, 3, 80).to(dtype)
    there = qkv.to(DEVICE)
    new = there[:, :, 1], there[:, :, 2]
    got = ops.append(*on.values(), case.lengths.to(DEVICE), case.order.to(DEVICE), *new, case.step.to(DEVICE))
    want = case.want(qkv[:, :, 1], qkv[:, :, 2])
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
    case.equal(on)


@pytest.mark.parametrize("left_out", [("fresh", "wasted"), ("wasted",), ("pages",), ("summaries", "scales")], ids=str)
def test_parts_that_are_not_asked_for(left_out):
    case = Case(8, 2, 6, 64, int8=True)
    on = case.on_device()
    new = on["keys"][:, :, 0], on["values"][:, :, 0]
    given = {name: None if name in left_out else value for name, value in on.items()}
    table = None if "pages" in left_out else case.page_table.to(DEVICE)[1]
    case.call(given, case.lengths.to(DEVICE), case.step.to(DEVICE), *new, table)
    untouched = {name: getattr(case, name).clone() for name in left_out}
    case.want(case.keys[:, :, 0], case.values[:, :, 0])
    for name, value in untouched.items():
        setattr(case, name, value)
    case.equal(on)


@pytest.mark.parametrize("int8", [False, True])
def test_forty_replays_of_a_captured_step(int8):
    case = Case(6, 2, 4, 64, int8=int8, parts=4)
    case.lengths %= 5 * BLOCK  # room in the page table for what comes
    case.table[case.table >= (case.lengths // BLOCK)[:, None, None]] = -1
    open_block = (case.lengths // BLOCK)[:, None].expand(6, 2)
    case.table[:, :, 1] = torch.where((case.lengths % BLOCK > 0)[:, None], open_block, case.table[:, :, 1])
    on, table = case.on_device(), pinned(case.page_table)
    before = {name: value.cpu().clone() for name, value in on.items()}
    lengths, step = case.lengths.to(DEVICE), case.step.to(DEVICE)
    order = case.order.to(DEVICE)

    def call():
        append_step(
            on["keys"], on["values"], on["table"], on["last_selected"], lengths, order, on["keys"][:, :, 0],
            on["values"][:, :, 0], step, on["fresh"], on["wasted"], on["pages"], table[1], on["summaries"],
            on.get("scales"), case.scorer, int8,
        )  # fmt: skip

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for name, value in before.items():
        on[name].copy_(value)
    for _ in range(40):
        new = case.randn(2, 6, 2, 64).to(case.keys.dtype)
        case.keys[:, :, 0], case.values[:, :, 0] = new[0], new[1]
        on["keys"][:, :, 0], on["values"][:, :, 0] = new[0].to(DEVICE), new[1].to(DEVICE)
        graph.replay()
        torch.cuda.synchronize()
        case.want(case.keys[:, :, 0], case.values[:, :, 0])
        case.lengths += 1
        case.step += 1
        lengths += 1
        step += 1
    case.equal(on)
