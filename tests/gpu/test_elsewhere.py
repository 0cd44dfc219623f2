"""What was read elsewhere, on a GPU: a prompt's blocks that come over a connection, and a prefix that a store holds."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generate import generate
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded, prompt

from oasis_hf import ConfigError, OasisCache, PrefixStore
from oasis_hf.disagg import PoolServer, PrefillClient, PrefillWorker, StagingPool
from oasis_hf.disagg.increment import Held

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def same(one, other):
    """The same logits but for rounding, as long as the tokens before are the same, which the first ones are."""
    for step, (a, b) in enumerate(zip(one.logits, other.logits, strict=True)):
        torch.testing.assert_close(a.float(), b.float(), atol=0.06, rtol=0)
        width = one.sequences.shape[1] - len(one.logits) + step + 1
        if not torch.equal(one.sequences[:, :width], other.sequences[:, :width]):
            return
    assert torch.equal(one.sequences, other.sequences)


SECRET, KNOBS = b"a secret of the tests", {"budget": 112}


def test_a_prompt_that_was_read_elsewhere(model):  # noqa: F811
    ids = on_gpu({"input_ids": prompt(1, 300), "attention_mask": torch.ones((1, 300), dtype=torch.long)})
    with pytest.raises(ConfigError, match="pin=True"):
        PrefillWorker(model, StagingPool(40, model.config.head_dim, model.dtype), **KNOBS)
    staging = StagingPool(4000, model.config.head_dim, model.dtype, pin=True)
    worker = PrefillWorker(model, staging, **KNOBS)
    with PoolServer(staging, SECRET, worker.terms) as server:
        client = PrefillClient(model, server.address, SECRET, **KNOBS)
        cache = OasisCache.from_prefill(client.fetch(worker.prefill(ids["input_ids"].cpu())), model)
        here = OasisCache(model, graphs=False, **KNOBS)
        want = generate(model, ids, here, max_new_tokens=40)
        out = generate(model, ids, cache, max_new_tokens=40)
        assert cache.memory()["host"] < cache.memory()["remote"]
        same(out, want)
        client.close()
    staging.close()


def test_a_prompt_whose_beginning_both_sides_hold(model):  # noqa: F811
    """The second prompt: its node reads 60 tokens, and sends what this side does not hold."""
    staging = StagingPool(4000, model.config.head_dim, model.dtype, pin=True)
    there, here = (PrefixStore(model, 1 << 28, **KNOBS) for _ in range(2))
    worker = PrefillWorker(model, staging, prefixes=there)
    with PoolServer(staging, SECRET, worker.terms) as server:
        client = PrefillClient(model, server.address, SECRET, prefixes=here)
        for seed in (1, 2):
            ids = torch.cat((prompt(1, 240), prompt(1, 60, seed)), 1)
            inputs = on_gpu({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            want = generate(model, inputs, OasisCache(model, graphs=False, **KNOBS), max_new_tokens=40)
            borrowed = client.borrow(ids[0])
            prefilled = client.fetch(worker.prefill(ids, held=Held.of(borrowed)), borrowed)
            assert prefilled.handle.first == (15 if seed == 2 else 0)
            cache = OasisCache.from_prefill(prefilled, model)
            same(generate(model, inputs, cache, max_new_tokens=40), want)
            assert prefilled.keep() == (3 if seed == 2 else 18)
            prefilled.close()
            # What came is what a cache of the store's own goes on from.
            same(generate(model, inputs, here.cache(), max_new_tokens=40), want)
        assert there.hits == 240 and not here.index.lent
        client.close()
    staging.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_prefix_that_a_store_holds(model, graphs):  # noqa: F811
    inputs = on_gpu(left_padded([210, 160, 181]))
    prefixes = PrefixStore(model, 1 << 28, graphs=graphs, **KNOBS)
    first = generate(model, inputs, prefixes.cache(), max_new_tokens=60)
    assert len(prefixes) > 20
    held = list(prefixes.index.entry.values())
    pages = prefixes.pool.pages[prefixes.index.pages[held]].clone()
    again = prefixes.cache()
    out = generate(model, inputs, again, max_new_tokens=60)
    assert prefixes.hits > 400
    same(out, first)
    if graphs:
        assert again.graphs.replays > 40, again.graphs.refused
    # What goes on behind the prefix, and branches of it, leave the shared pages as they are.
    branch = copy.deepcopy(again)
    ids = torch.cat((out.sequences, inputs["input_ids"]), 1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
    generate(model, {"input_ids": ids, "attention_mask": mask}, branch, max_new_tokens=20)
    torch.cuda.synchronize()
    assert torch.equal(prefixes.pool.pages[prefixes.index.pages[held]], pages)
