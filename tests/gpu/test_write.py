"""The CUDA `write` against the reference: every page bit for bit, those of no token included."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK
from oasis_hf.ops import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


def pinned(tensor):
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "token-major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # as a projection gives it
    "fused": lambda x: torch.stack((x + 1, x, x - 1), 1).transpose(0, 2).contiguous().transpose(0, 2)[:, 1],
    "row": lambda x: torch.stack((x + 1, x))[1],
    "longer": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "uneven": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],  # no stride of 16 bytes: copied first
}


class Case:
    """Random tokens, pages and a table of which this is one row of one layer, all on the CPU."""

    def __init__(self, heads, start, count, dim, dtype=torch.bfloat16, layout="contiguous", seed=0):
        random = torch.Generator().manual_seed(seed)
        self.start, self.blocks = start, (start + count) // BLOCK + 1
        pages = heads * self.blocks
        self.pages = torch.randn(pages + 2, 2, BLOCK, dim, generator=random).to(dtype)
        self.table = torch.full((2, 3, heads, self.blocks + 5), -1)  # layers, rows, and room to grow
        self.table[1, 2, :, : self.blocks] = torch.randperm(pages + 2, generator=random)[:pages].view(heads, -1)
        self.keys, self.values = (torch.randn(heads, count, dim, generator=random).to(dtype) for _ in range(2))
        self.layout = layout

    def want(self):
        pages = self.pages.clone()
        reference.write(pages, self.table[1, 2], self.keys, self.values, self.start)
        return pages

    def check(self, pages_on="host", other_layout=None):
        from oasis_hf.ops import cuda  # builds the operators: not at collection

        keys = LAYOUTS[self.layout](self.keys.to(DEVICE))
        values = LAYOUTS[other_layout or self.layout](self.values.to(DEVICE))
        pages = pinned(self.pages) if pages_on == "host" else self.pages.to(DEVICE)
        table = self.table.to(DEVICE)[1, 2]
        assert cuda.reaches(pages, table, keys)
        ops.write(pages, table, keys, values, self.start)
        torch.cuda.synchronize()
        assert torch.equal(pages.cpu(), self.want())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size(dim, dtype, layout):
    Case(3, 37, 101, dim, dtype, layout, seed=dim).check()


@pytest.mark.parametrize("dim, dtype", [(8, torch.bfloat16), (24, torch.float16), (4, torch.float32)], ids=str)
def test_lines_of_few_vectors(dim, dtype):
    Case(5, 3, 90, dim, dtype, "token-major").check()


@pytest.mark.parametrize("pages_on", ["host", "device"])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 160, 1003])
@pytest.mark.parametrize("count", [0, 1, 2, 14, 15, 16, 17, 31, 32, 33, 48, 500])
def test_any_start_and_length(start, count, pages_on):
    Case(2, start, count, 64, layout="token-major", seed=start + count).check(pages_on)


@pytest.mark.parametrize("heads", [1, 7, 8, 64])
def test_any_number_of_heads(heads):
    Case(heads, 5, 300, 128, layout="token-major").check()


@pytest.mark.parametrize("keys, values", [("token-major", "contiguous"), ("longer", "uneven"), ("row", "fused")])
def test_keys_and_values_of_different_strides(keys, values):
    Case(4, 9, 77, 128, layout=keys).check(other_layout=values)


@pytest.mark.parametrize("ctas", [1, 2, 7, 132, 1024])
def test_any_grid(ctas, monkeypatch):
    from oasis_hf.ops import cuda

    monkeypatch.setattr(cuda, "WRITE_CTAS", ctas)
    Case(8, 11, 2000, 128, layout="token-major").check()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "token-major"])
def test_production_size(layout):
    Case(8, 7, 32768, 128, layout=layout).check()


def test_beside_compute_that_is_still_to_give_the_keys():
    """The keys are made by a long chain of products; the write waits for them on a stream of its own."""
    case = Case(8, 5, 3000, 128)
    pages, table = pinned(case.pages), case.table.to(DEVICE)[1, 2]
    keys, values = torch.zeros(2, 8, 3000, 128, device=DEVICE, dtype=torch.bfloat16)
    source = case.keys.to(DEVICE), case.values.to(DEVICE)
    big = torch.randn(4096, 4096, device=DEVICE)
    ops.write(pages, table, keys[:, :1], values[:, :1], 0)  # built and loaded
    pages.copy_(case.pages)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(30):
        big = big @ big * 1e-4
    keys.copy_(source[0])
    values.copy_(source[1])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.write(pages, table, keys, values, case.start)
    for _ in range(30):
        big = big @ big * 1e-4
    torch.cuda.current_stream().wait_stream(side)
    keys.zero_()
    values.zero_()
    torch.cuda.synchronize()
    assert torch.equal(pages, case.want())


def test_captured():
    case = Case(4, 21, 70, 64)
    pages, table = pinned(case.pages), case.table.to(DEVICE)[1, 2]
    keys, values = case.keys.to(DEVICE), case.values.to(DEVICE)
    ops.write(pages, table, keys, values, case.start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.write(pages, table, keys, values, case.start)
    case.keys, case.values = case.values, case.keys
    keys.copy_(case.keys)
    values.copy_(case.values)
    pages.copy_(case.pages)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(pages, case.want())
