"""What only a GPU can show: pinned pages, equality with the CPU's semantics, no growth of device memory."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generate import generate
from tiny import FAMILIES, left_padded, prompt, tiny
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.store import PagePool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(family):
    return copy.deepcopy(tiny(family)).cuda()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=str)
def test_equal_to_a_dense_cache(family, knobs):
    model = on_gpu(family)
    for inputs in ({"input_ids": prompt(1, 50)}, left_padded([21, 50, 33])):
        inputs = {name: value.cuda() for name, value in inputs.items()}
        dense = generate(model, inputs, DynamicCache(config=model.config))
        oasis = generate(model, inputs, OasisCache(model, **knobs))
        assert torch.equal(dense.sequences, oasis.sequences)
        for a, b in zip(dense.logits, oasis.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral"])
def test_host_and_resident_stores_are_bit_identical(family):
    model = on_gpu(family)
    host, resident = (
        generate(model, prompt(2, 150).cuda(), OasisCache(model, budget=80, store=store), max_new_tokens=40)
        for store in ("host", "resident")
    )
    assert all(torch.equal(a, b) for a, b in zip(host.logits, resident.logits, strict=True))


def test_pinned_bytes_stay_within_two_percent_of_what_was_asked():
    pool = PagePool(128, torch.bfloat16, pin=True)
    asked = 0
    for pages in (1, 1000, 130_000, 250_000):  # 3 GiB, which torch's allocator would round up to 4
        pool.allocate(pages)
        asked += pages * pool.page_bytes
        assert asked <= pool.pinned_bytes <= max(1.02 * asked, asked + 4096)
    assert max(size for _, size in pool._pieces) <= 1 << 30
    # One DMA copy may not span two registrations ("invalid argument"): a piece at a time.
    start = 0
    for _, size in pool._pieces:
        whole = -(-start // pool.page_bytes), (start + size) // pool.page_bytes
        moved = pool.pages[slice(*whole)].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert moved.shape[0] == whole[1] - whole[0]
        start += size


def test_device_memory_does_not_grow_with_the_context():
    model = on_gpu("llama")
    held = []
    for length in (400, 1600):
        cache = OasisCache(model, budget=128)
        generate(model, prompt(1, length).cuda(), cache, max_new_tokens=4)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        sizes = cache.memory()
        del cache
        held.append(before - torch.cuda.memory_allocated())
        assert held[-1] < 1.3 * (sizes["working_set"] + sizes["summaries"]) + (64 << 10)
    assert held[1] < 2 * held[0]
