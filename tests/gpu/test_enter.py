"""The CUDA `enter` against the reference, bit for bit: it only moves lines."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import ops
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens, count, window", [(1, 1, 1), (2, 1, 4), (8, 1, 16), (3, 3, 1), (8, 5, 4), (2, 2, 40)])
def test_equal_to_the_reference(dim, dtype, tokens, count, window):
    torch.manual_seed(dim + tokens)
    for rows, heads, group, slots in ((3, 2, 4, 7), (1, 1, 7, 129), (5, 3, 1, 2)):
        new = [
            torch.randn(rows, tokens, heads * many, dim, device="cuda").to(dtype).transpose(1, 2)
            for many in (group, 1, 1)
        ]
        queries = torch.randn(rows, heads * group, window + TAIL, dim, device="cuda").to(dtype)
        keys, values = (torch.randn(rows, heads, TAIL + slots * BLOCK, dim, device="cuda").to(dtype) for _ in "kv")
        fresh = torch.rand(rows, heads, slots, device="cuda") < 0.5
        mine, wanted = ([x.clone() for x in (queries, keys, values, fresh)] for _ in range(2))
        ops.enter(*new, mine[0], count, window, *mine[1:])
        reference.enter(*new, wanted[0], count, window, *wanted[1:])
        for got, want in zip(mine, wanted):
            assert torch.equal(got, want)
