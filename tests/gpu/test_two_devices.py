"""Layers on two GPUs (accelerate's `device_map`): what one GPU gives, by the compiled operators of both, eagerly."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generate import generate
from test_model import KNOBS, model, on_gpu  # noqa: F401
from tiny import left_padded, prompt
from transformers import AutoModelForCausalLM

import oasis_hf
from oasis_hf import OasisCache
from oasis_hf.ops import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("spread")
    model.save_pretrained(folder)
    return folder, model.dtype


@pytest.fixture(scope="module")
def whole(saved):
    """On one device, loaded like the other: `model` has its RoPE frequencies in its own dtype."""
    return AutoModelForCausalLM.from_pretrained(saved[0], dtype=saved[1]).eval().to("cuda:0")


@pytest.fixture(scope="module")
def spread(saved):
    """The same weights, its layers on both devices by turns, loaded as users load them."""
    places = {f"model.layers.{i}": i % 2 for i in range(3)}
    places |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    return AutoModelForCausalLM.from_pretrained(saved[0], device_map=places, dtype=saved[1]).eval()


@pytest.fixture(autouse=True)
def all_logits(monkeypatch):
    """One device asks for the logits of drafts too, as two do: products of other sizes may round otherwise."""
    run = OasisCache.run
    monkeypatch.setattr(OasisCache, "run", lambda cache, inner, call, name, keeps: run(cache, inner, call, name, False))


def same(one, other):
    """Both run the same kernels in the same order, each on its device."""
    assert torch.equal(one.sequences.cpu(), other.sequences.cpu())
    for a, b in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=0.0, rtol=0.0)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("store", ["host", "resident"])
def test_two_devices_give_what_one_gives(whole, spread, knobs, store):
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = {"budget": 112, "store": store, **knobs}
    one, two = OasisCache(whole, graphs=False, **knobs), OasisCache(spread, **knobs)
    same(generate(whole, inputs, one, max_new_tokens=60), generate(spread, inputs, two, max_new_tokens=60))
    assert two.graphs.refused == "layers are on several devices"
    for name, value in one.stats().items():
        assert torch.equal(value, two.stats()[name]), name
    assert [layer.working_set.keys.device.index for layer in two.layers] == [0, 1, 0]


def test_each_device_reads_and_writes_the_pages_itself(spread):
    cache = OasisCache(spread, budget=112)
    generate(spread, prompt(2, 200).cuda(), cache, max_new_tokens=20)
    parts = cache.state.store.parts
    assert [device.index for device in parts] == [0, 1] and len({id(part.pool) for part in parts.values()}) == 1
    for device, part in parts.items():
        known = part.table >= 0
        assert part.device_table.device == device and torch.equal(part.device_table.cpu()[known], part.table[known])
        assert cuda.reaches(part.pool.pages, part.device_table, torch.empty(1, 64, dtype=spread.dtype, device=device))
    assert all(cache.state.store.device_pages(layer.index)[1].device == layer.device for layer in cache.layers)


def test_what_happens_to_a_cache_reaches_both_devices(whole, spread):
    """Branch, second turn, crop, new order, a loop that accepts drafts."""

    def live(which):
        cache = OasisCache(which, budget=112, graphs=False)
        out = [generate(which, prompt(2, 200).cuda(), cache, max_new_tokens=30)]
        branch = copy.deepcopy(cache)
        more = torch.cat((out[0].sequences, prompt(2, 40, 5).cuda()), 1)
        out.append(generate(which, more, cache, max_new_tokens=30))
        out.append(generate(which, more, branch, max_new_tokens=30))
        cache.crop(-20)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = out[1].sequences[[1, 0], : cache.get_seq_length() + 1]
        out.append(generate(which, again, cache, max_new_tokens=30))
        return out

    for a, b in zip(live(whole), live(spread), strict=True):
        same(a, b)
    texts = [
        oasis_hf.generate(
            which, prompt(2, 200).cuda(), max_new_tokens=40, do_sample=False,
            past_key_values=OasisCache(which, budget=112, graphs=False, speculate=True, drafter="prompt_lookup"),
        )
        for which in (whole, spread)
    ]  # fmt: skip
    assert torch.equal(*texts)
