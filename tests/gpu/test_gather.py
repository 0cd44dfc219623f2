"""The CUDA `gather` against the reference: pages stand in pinned host memory."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import cuda, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


def pinned(tensor):
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor)


class Case:
    """Random pages, buffers and plan, all on the CPU. share: of the plan's pairs that move, by row, head or pair."""

    def __init__(self, rows, heads, slots, cap, dim, dtype=torch.bfloat16, share=0.5, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.blocks = slots + 3
        count = rows * heads * self.blocks
        self.pages = torch.randn(count + 2, 2, BLOCK, dim, generator=random).to(dtype)
        wide = torch.full((2, rows, heads, self.blocks + 5), -1)  # two layers, and room to grow
        wide[1, :, :, : self.blocks] = torch.randperm(count + 2, generator=random)[:count].view(rows, heads, -1)
        self.wide = wide
        self.keys, self.values = (
            torch.randn(rows, heads, TAIL + slots * BLOCK, dim, generator=random).to(dtype) for _ in range(2)
        )
        self.plan(cap, share, random)

    def plan(self, cap, share, random):
        rows, heads = self.keys.shape[:2]
        slots = (self.keys.shape[2] - TAIL) // BLOCK
        block = torch.rand(rows, heads, self.blocks, generator=random).argsort(-1)[..., :cap]
        moves = torch.rand(rows, heads, cap, generator=random) < torch.as_tensor(share)
        self.plan_block = torch.where(moves, block, -1)
        self.plan_slot = torch.rand(rows, heads, slots, generator=random).argsort(-1)[..., :cap].contiguous()

    def table(self, wide):
        return wide[1, :, :, : self.blocks]

    def want(self):
        keys, values = self.keys.clone(), self.values.clone()
        reference.gather(self.pages, self.table(self.wide), keys, values, self.plan_block, self.plan_slot)
        return keys, values

    def check(self, table_on="host"):
        keys, values = self.keys.to(DEVICE), self.values.to(DEVICE)
        wide = pinned(self.wide) if table_on == "host" else self.wide.to(DEVICE)
        plan = self.plan_block.to(DEVICE), self.plan_slot.to(DEVICE)
        arguments = pinned(self.pages), self.table(wide), keys, values, *plan
        if keys.shape[-1] in cuda.HEAD_DIMS:
            ops.gather(*arguments)
        else:
            cuda.extension().gather(*arguments, 0, torch.cuda.current_stream().cuda_stream)
        want_keys, want_values = self.want()
        assert torch.equal(keys.cpu(), want_keys) and torch.equal(values.cpu(), want_values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size(dim, dtype):
    Case(3, 2, 9, 4, dim, dtype, seed=dim).check()


@pytest.mark.parametrize("dim, dtype", [(8, torch.bfloat16), (24, torch.float16), (4, torch.float32)], ids=str)
def test_lines_of_few_vectors(dim, dtype):
    """An odd number of 16-byte vectors a line: K ends in the middle of a warp's read."""
    Case(2, 3, 7, 7, dim, dtype).check()


@pytest.mark.parametrize("table_on", ["host", "device"])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("rows, heads, slots, cap", [(1, 1, 1, 1), (1, 8, 129, 129), (7, 5, 33, 6), (16, 2, 12, 12)])
def test_shapes_and_shares(rows, heads, slots, cap, share, table_on):
    Case(rows, heads, slots, cap, 64, share=share, seed=rows).check(table_on)


@pytest.mark.parametrize("which", ["row", "head", "candidate"])
def test_all_that_moves_is_in_one_place(which):
    rows, heads, cap = 8, 8, 16
    share = torch.zeros(rows, heads, cap)
    {"row": share[3], "head": share[:, 5], "candidate": share[:, :, 2]}[which].fill_(1.0)
    Case(rows, heads, 20, cap, 128, share=share).check()


def test_an_empty_plan():
    Case(2, 2, 4, 0, 64).check()


def test_more_pairs_than_the_warps_take_at_once():
    Case(16, 8, 160, 160, 64, share=0.7).check()


@pytest.mark.parametrize("ctas", [1, 2, 4, 7, 8, 132])
def test_any_grid(ctas, monkeypatch):
    """Those of four and of eight are clusters."""
    monkeypatch.setattr(cuda, "GATHER_CTAS", ctas)
    Case(5, 3, 40, 33, 128, share=0.7, seed=ctas).check()


@pytest.mark.parametrize("count", [2, 3, cuda.GATHER_LAYERS])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_layers_in_one_launch(count, share):
    """Each has its own table, plan and slots; the pages are shared."""
    cases = [Case(3, 2, 11, 5, 128, share=share, seed=7 * i) for i in range(count)]
    pages, wants = cases[0].pages, []
    for case in cases:
        case.pages = pages
        wants.append(case.want())
    keys, values = ([getattr(case, name).to(DEVICE) for case in cases] for name in ("keys", "values"))
    plans = ([getattr(case, name).to(DEVICE) for case in cases] for name in ("plan_block", "plan_slot"))
    cuda.gather_layers(pinned(pages), [case.table(pinned(case.wide)) for case in cases], keys, values, *plans)
    for at, (want_keys, want_values) in enumerate(wants):
        assert torch.equal(keys[at].cpu(), want_keys) and torch.equal(values[at].cpu(), want_values), at


def test_layers_of_different_shapes_are_refused():
    small, large = Case(2, 2, 4, 2, 64), Case(2, 2, 5, 2, 64)
    lists = [
        [getattr(case, name).to(DEVICE) for case in (small, large)]
        for name in ("keys", "values", "plan_block", "plan_slot")
    ]
    tables = [case.table(pinned(case.wide)) for case in (small, large)]
    with pytest.raises(ValueError, match=r"oasis_hf\.gather: `keys` must be"):
        cuda.gather_layers(pinned(small.pages), tables, *lists)
    with pytest.raises(ValueError, match="the same 1 to 8 layers, not 9 in `keys`"):
        cuda.gather_layers(pinned(small.pages), tables[:1] * 9, *(one[:1] * 9 for one in lists))


@pytest.mark.slow
def test_production_size():
    Case(64, 8, 129, 6, 128, share=0.5).check("device")


def test_a_captured_gather_sees_new_pages_tables_and_plans():
    case = Case(4, 4, 17, 8, 128)
    pages, wide = pinned(case.pages), pinned(case.wide)
    keys, values = case.keys.to(DEVICE), case.values.to(DEVICE)
    plan_block, plan_slot = case.plan_block.to(DEVICE), case.plan_slot.to(DEVICE)
    args = pages, case.table(wide), keys, values, plan_block, plan_slot
    ops.gather(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather(*args)
    random = torch.Generator().manual_seed(5)
    for _ in range(4):
        case.keys, case.values = keys.cpu(), values.cpu()
        case.pages = torch.randn(case.pages.shape, generator=random).to(case.pages.dtype)
        case.table(case.wide).copy_(case.table(case.wide).flip(0))
        case.plan(8, 0.6, random)
        for mine, new in ((pages, case.pages), (wide, case.wide), (plan_block, case.plan_block)):
            mine.copy_(new)
        plan_slot.copy_(case.plan_slot)
        graph.replay()
        torch.cuda.synchronize()
        want_keys, want_values = case.want()
        assert torch.equal(keys.cpu(), want_keys) and torch.equal(values.cpu(), want_values)
