"""Weights that are not plain, and models that something else has wrapped or changed, beyond the cells of
`tests/test_support.py`."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from heads import V, noted, plain_config, target, weights, write
from matrix import dense
from tiny import FAMILIES, prompt, tiny
from weights import IDS, Packed, made, packed

import oasis_hf
from oasis_hf import OasisCache, fused, placing
from oasis_hf.drafters import Eagle3Drafter

pytestmark = pytest.mark.core


def unpacked(model):
    """The same model with ordinary weights of the values that its packed ones stand for."""
    plain = copy.deepcopy(target())
    for name, module in model.named_modules():
        if isinstance(module, Packed):
            plain.get_submodule(name).weight.data = module.whole()
    return plain


def test_a_head_drafts_from_packed_weights_what_it_drafts_from_plain_ones():
    model, seen = packed(copy.deepcopy(target())), []
    for one in (model, unpacked(model)):
        with tempfile.TemporaryDirectory() as folder:
            files = write(Path(folder) / "head", plain_config(draft_vocab_size=V), weights(draft=V, lm_head=False))
            drafter = Eagle3Drafter.from_pretrained(files, one)
        told = noted(drafter)
        out = one.generate(IDS[:, :30], past_key_values=OasisCache(one, drafter=drafter, budget=32), max_new_tokens=12)
        seen.append((out.tolist(), told))
    assert seen[0] == seen[1] and len(seen[0][1]) > 5


@pytest.mark.parametrize("kind", ["4 bits packed, embeddings too", "offloaded to disk (accelerate)"])
def test_where_and_in_what_it_computes(kind):
    assert placing.placed(made(kind)) == (torch.device("cpu"), torch.float32)
    if "disk" in kind:
        assert made(kind).get_input_embeddings().weight.device.type == "meta"
        assert placing.plain_weight(made(kind).get_input_embeddings()) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4 bits packed, embeddings too", "LoRA (PEFT)", "float32"])
def test_layers_are_compiled_whatever_their_projections_are(kind):
    """Only plain ones are joined."""
    torch._dynamo.reset()
    model = made(kind)
    inner = oasis_hf.supported.plain_model(model)
    layers, cache = fused.FusedLayers(inner), OasisCache(model)
    assert bool(layers._slices) == (kind != "4 bits packed, embeddings too")
    with torch.no_grad():
        inner(IDS[:, :20], past_key_values=cache)
        want = inner(IDS[:, :1], past_key_values=copy.deepcopy(cache)).logits
        with layers.tried():
            inner(IDS[:, :1], past_key_values=copy.deepcopy(cache))
        assert layers.failed is None
        with layers.placed():
            got = inner(IDS[:, :1], past_key_values=cache).logits
    layers.split()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


CHANGES = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.double(),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("count", [1, 5])
def test_a_model_that_was_cast_since_is_refused(family, change, count):
    model = FAMILIES[family]().eval()
    cache = OasisCache(model)
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache)
        CHANGES[change](model)
        with pytest.raises(
            ValueError, match="holds keys in float32 on cpu, and the call gives .* make a new OasisCache"
        ):
            model(prompt(1, count), past_key_values=cache)
        assert cache.get_seq_length() == 20
        model(prompt(1, 20), past_key_values=OasisCache(model))


def test_autocast_that_ends_is_refused_and_never_captured():
    model = tiny("llama")
    cache = OasisCache(model)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(prompt(1, 20), past_key_values=cache)
            assert cache.graphs.autocast and cache.sparse_layers[0].working_set.keys.dtype == torch.bfloat16
            model(prompt(1, 1), past_key_values=cache)
        with pytest.raises(ValueError, match="holds keys in bfloat16"):
            model(prompt(1, 1), past_key_values=cache)
        assert not cache.graphs.autocast


@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}, {"ours": "sparse"}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_else_works_under_autocast(family, asked):
    """Over a small budget, where blocks are scored, chosen and moved: the same wherever they live."""
    model, kwargs = tiny(family), {"max_new_tokens": 10, "do_sample": False, **asked}
    ours, outs = kwargs.pop("ours", None), []
    for store in ("host", "resident"):
        cache = OasisCache(model, budget=48, speculate=bool(ours), store=store)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call = (lambda *a, **k: oasis_hf.generate(model, *a, **k)) if ours else model.generate
            outs.append(call(prompt(1, 100), past_key_values=cache, **kwargs))
    assert torch.equal(*outs)


def test_our_generate_takes_an_adapted_model():
    pytest.importorskip("peft")
    model = made("LoRA (PEFT)")
    want = model.generate(input_ids=IDS[:, :30], past_key_values=dense(model), max_new_tokens=12, do_sample=False)
    cache = OasisCache(model, speculate=True, draft_tokens=2)
    got = oasis_hf.generate(model, IDS[:, :30], past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want)
    inner = OasisCache(model.get_base_model())  # the same model
    assert inner.model is cache.model
