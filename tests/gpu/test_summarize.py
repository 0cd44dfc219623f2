"""The CUDA `summarize`: bit for bit the reference on the CPU, scales and roundings included."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK
from oasis_hf.ops import reference
from oasis_hf.scorers import SCORERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = (torch.bfloat16, torch.float16)


def check(keys, scorer, parts, int8):
    """keys: on the GPU, strided as they come."""
    out, scales = ops.summarize(keys, scorer, parts, int8)
    want, want_scales = reference.summarize(keys.cpu(), scorer, parts, int8)
    assert out.dtype == want.dtype and out.shape == want.shape
    assert torch.equal(out.cpu(), want)
    assert torch.equal(scales.cpu(), want_scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_equal_to_the_reference(dim, dtype):
    for seed, (scorer, parts, int8) in enumerate(
        (scorer, parts, int8) for scorer in SCORERS for parts in (1, 2, 4) for int8 in (True, False)
    ):
        random = torch.Generator("cuda").manual_seed(seed)
        keys = torch.randn(3, 2, 7, BLOCK, dim, generator=random, device="cuda")
        check((keys * [1e-5, 0.02, 1, 40, 300][seed % 5]).to(dtype), scorer, parts, int8)


@pytest.mark.parametrize("blocks", [1, 2, 3, 31, 257])
def test_any_number_of_blocks(blocks):
    for dim in (64, 96, 256):
        check(torch.randn(blocks, BLOCK, dim, device="cuda").bfloat16(), "midrange", 2, True)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_at_the_edges(scorer, dtype):
    big = torch.finfo(dtype).max if dtype == torch.float16 else 1e6
    for fill in (0.0, big, -big, torch.finfo(dtype).tiny, 7.8125e-3):
        keys = torch.full((2, BLOCK, 128), fill, device="cuda", dtype=dtype)
        keys[1, ::3, ::5] *= -1
        for int8 in (True, False):
            check(keys, scorer, 4, int8)
    # Channels of very different size share a scale; halves stand between two steps of it.
    steps = torch.arange(-254, 254, device="cuda").float() / 2
    keys = steps[torch.randint(0, len(steps), (64, BLOCK, 128), device="cuda")]
    keys[..., 0] = 127
    check(keys.to(dtype), scorer, 4, True)
    check((keys * torch.logspace(-6, 0, 128, device="cuda")).to(dtype), scorer, 2, True)


def test_keys_of_a_wider_buffer():
    buffer = torch.randn(2, 3, 9 * BLOCK, 128, device="cuda").bfloat16()
    check(buffer[:, :, 2 * BLOCK : 7 * BLOCK].unflatten(2, (-1, BLOCK)), "minmax", 2, True)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_keys_as_a_model_makes_them(dim):
    """A row of a batch, token-major or head-major, with tokens behind its last whole block."""
    made = torch.randn(2, 7 * BLOCK + 5, 3, dim, device="cuda").bfloat16().transpose(1, 2)
    for keys in (made[1], made.contiguous()[1]):
        for whole in (1, 7):
            blocks = keys[:, : whole * BLOCK].unflatten(1, (-1, BLOCK))
            check(blocks, "midrange", 2, True)
            check(blocks, "minmax", 1, False)


@pytest.mark.parametrize("parts, int8", [(2, True), (1, False)])
def test_production_size(parts, int8):
    check(torch.randn(64, 8, 64, BLOCK, 128, device="cuda").bfloat16(), "midrange", parts, int8)


def test_captured():
    keys = torch.randn(4, 2, BLOCK, 128, device="cuda").bfloat16()
    ops.summarize(keys, "midrange", 2, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, scales = ops.summarize(keys, "midrange", 2, True)
    keys.normal_()
    graph.replay()
    want, want_scales = reference.summarize(keys.cpu(), "midrange", 2, True)
    assert torch.equal(out.cpu(), want) and torch.equal(scales.cpu(), want_scales)
