"""A cache from a dense prefill on a GPU: its pages are written there by the compiled operators."""

from __future__ import annotations

import pytest
import torch
from test_generate import generate
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded
from transformers import DynamicCache

from oasis_hf import MODES, from_dense, mode_config
from oasis_hf.attach import cache_name

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("mode", MODES)
def test_pages_and_summaries_are_those_of_the_dense_cache(model, mode):  # noqa: F811
    inputs = on_gpu(left_padded([210, 160, 181]))
    ids, mask = (inputs[name][:, :-10] for name in ("input_ids", "attention_mask"))
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        position = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=position, **{cache_name(model): past})
    before = [layer.keys.clone() for layer in past.layers]
    cache = from_dense(model, past, mode_config(mode, 112), input_ids=ids, attention_mask=mask)
    torch.cuda.synchronize()
    for layer, own in zip(cache.sparse_layers, past.layers):
        for row, length in enumerate(cache.state.rows.tokens):
            for have, wanted in zip(cache.state.store.read(layer.index, row, 0, length), (own.keys, own.values)):
                assert torch.equal(have.to(wanted.device), wanted[row, :, -length:])
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(past.layers, before))
    out = generate(model, inputs, cache, max_new_tokens=60)
    assert out.sequences.shape == (3, 270) and all(logits.isfinite().all() for logits in out.logits)
    again = from_dense(model, past, mode_config(mode, 112), input_ids=ids, attention_mask=mask)
    assert torch.equal(generate(model, inputs, again, max_new_tokens=60).sequences, out.sequences)
