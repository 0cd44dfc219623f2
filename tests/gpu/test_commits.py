"""Accepting drafts by a captured graph is accepting them eagerly."""

from __future__ import annotations

import pytest
import torch
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded

import oasis_hf
from oasis_hf import OasisCache, OracleDrafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "temperature": 0.5}, {"repetition_penalty": 1.1}], ids=str)
@pytest.mark.parametrize("oracle, candidates", [(False, 1), (True, 1), (False, 3)])
def test_it_gives_what_the_eager_commit_gives(model, kwargs, oracle, candidates):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    kwargs = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": [95, 94], "pad_token_id": 0, **kwargs}
    free = model.generate(**inputs, **{**kwargs, "do_sample": False, "eos_token_id": None})
    known = torch.nn.utils.rnn.pad_sequence(
        [row[200 - n :] for row, n in zip(free, (150, 200, 171))], batch_first=True, padding_value=0
    )
    texts, caches = [], []
    for graphs in (False, True):
        torch.manual_seed(1)
        cache = OasisCache(
            model, budget=112, speculate=True, draft_tokens=3, candidates=candidates, graphs=graphs, compile_after=None,
            drafter=OracleDrafter(known) if oracle else "prompt_lookup",
        )  # fmt: skip
        texts.append(oasis_hf.generate(model, **inputs, past_key_values=cache, **kwargs))
        caches.append(cache)
    eager, cache = caches
    assert cache.graphs.refused is None and cache.graphs.unaccepted is None
    assert any(one.accepting for one in cache.graphs.captured.values())
    assert torch.equal(*texts) and cache.state.rows.tokens == eager.state.rows.tokens
    assert cache.stepper.passed == eager.stepper.passed
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name
    rows = cache.state.rows
    assert rows.lengths(cache.device).tolist() == rows.tokens
    for one, two in zip(eager.sparse_layers, cache.sparse_layers):
        for row, n in enumerate(rows.tokens):
            for a, b in zip(one.store.read(one.index, row, 0, n), two.store.read(two.index, row, 0, n)):
                assert torch.equal(a, b)
