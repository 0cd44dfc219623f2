"""The first forward of a cache from prefill, answered without the model: what one process gives, or a sentence."""

from __future__ import annotations

import copy

import pytest
import torch
from test_disagg_decode import Node
from test_disagg_decode import generate as generated
from tiny import prompt, tiny

from oasis_hf import OasisCache
from oasis_hf.attach import cache_name

KNOBS = {"budget": 64}
LENGTH = 150


@pytest.fixture(scope="module")
def llama():
    with Node(tiny("llama"), **KNOBS) as one:
        yield one


@pytest.fixture(scope="module")
def gemma3():
    with Node(tiny("gemma3"), **KNOBS) as one:
        yield one


@pytest.fixture(params=["llama", "gemma3"])
def node(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def ids():
    return prompt(1, LENGTH)


def generate(model, ids, cache, count=20, **how):
    return generated(model, ids, cache, count, **how)


def own(model, ids=None, **knobs):
    """A cache of one process, that has read ids `[1, n]`."""
    cache = OasisCache(model, **KNOBS, **knobs)
    if ids is not None:
        with torch.no_grad():
            model(ids, **{cache_name(model): cache})
    return cache


# -- what is asked for beside logits ----------------------------------------------------------------------------------


def test_scores_and_logits_of_each_step_are_those_of_one_process(node, ids):
    how = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want = generate(node.model, ids, own(node.model), **how)
    got = generate(node.model, ids, node.cache(ids), **how)
    assert want.keys() == got.keys() and torch.equal(want.sequences, got.sequences)
    for name in ("scores", "logits"):
        assert all(torch.equal(a, b) for a, b in zip(want[name], got[name], strict=True))


def test_what_did_not_come_with_the_logits_is_refused_and_the_cache_goes_on(llama, ids):
    model, cache = llama.model, llama.cache(ids)
    for name in ("output_hidden_states", "output_router_logits", "labels", "output_attentions"):
        value = ids[:, -1:] if name == "labels" else True
        with pytest.raises(ValueError, match="attention weights" if name == "output_attentions" else f"give {name}:"):
            model(ids[:, -1:], **{cache_name(model): cache, name: value})
    with pytest.raises(ValueError, match="give output_hidden_states:"):
        generate(model, ids, cache, return_dict_in_generate=True, output_hidden_states=True)
    model.config.output_hidden_states = True
    try:
        with pytest.raises(ValueError, match="give output_hidden_states:"):
            model(ids[:, -1:], **{cache_name(model): cache})
    finally:
        model.config.output_hidden_states = False
    assert torch.equal(generate(model, ids, cache), generate(model, ids, own(model)))


@torch.no_grad()
def test_a_direct_call_gives_the_logits_that_are_kept(node, ids):
    model = node.model
    want = model(ids, **{cache_name(model): own(model)}, logits_to_keep=1).logits
    for kept, count in ((0, 1), (7, 1), (torch.tensor([0]), 1), (torch.tensor([0, 0]), 2)):
        got = model(ids[:, -1:], **{cache_name(model): node.cache(ids)}, logits_to_keep=kept).logits
        torch.testing.assert_close(got, want.expand(-1, count, -1), atol=2e-5, rtol=1e-5)
    logits, cache = model(ids[:, -1:], **{cache_name(model): node.cache(ids)}, return_dict=False)
    assert isinstance(cache, OasisCache) and torch.equal(logits, got[:, :1])


def test_a_mask_that_hides_is_honoured_and_a_wrong_one_refused(llama, ids):
    model, hides = llama.model, torch.ones_like(ids)
    hides[:, :40] = 0
    how = {"return_dict_in_generate": True, "output_logits": True, "attention_mask": hides, "max_new_tokens": 20}
    want = model.generate(ids, **{cache_name(model): own(model, ids[:, :-1])}, **how, do_sample=False)
    got = model.generate(ids, **{cache_name(model): llama.cache(ids)}, **how, do_sample=False)
    assert torch.equal(want.sequences, got.sequences) and torch.equal(want.logits[0], got.logits[0])
    cache = llama.cache(ids)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 17\]"):
        model(ids[:, -1:], **{cache_name(model): cache}, attention_mask=torch.ones((1, 17)))
    assert torch.equal(generate(model, ids, cache), generate(model, ids, own(model)))


# -- other tokens than the one that is answered -----------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"lookahead": "smoothed"}, {"lookahead": "on_demand"}], ids=str)
def test_another_last_token_is_that_of_a_cache_cropped_by_one(llama, ids, knobs):
    model, other, mine = llama.model, ids.clone(), own(llama.model, ids, **knobs)
    other[:, -1] = 3 + (ids[:, -1] - 2) % 90
    mine.crop(-1)
    assert torch.equal(generate(model, other, llama.cache(ids, **knobs), 40), generate(model, other, mine, 40))


def test_embeddings_instead_of_ids(llama, ids):
    model, how = llama.model, {"max_new_tokens": 20, "do_sample": False}
    embeds, want = model.get_input_embeddings()(ids), generate(model, ids, own(model))[:, LENGTH:]
    assert torch.equal(model.generate(inputs_embeds=embeds, **{cache_name(model): llama.cache(ids)}, **how), want)


def test_assisted_decoding_is_refused(llama, ids):
    """transformers gives the whole prompt in its first call, whatever a cache holds: it would be there twice."""
    model, cache = llama.model, llama.cache(ids)
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model}):
        for one in (cache, llama.cache(ids[:, :1]), own(model, ids[:, :20])):
            with pytest.raises(ValueError, match="needs an empty cache, but this OasisCache holds"):
                generate(model, ids, one, 4, **how)
        assert generate(model, ids, own(model), 4, **how).shape == (1, LENGTH + 4)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, own(model)))


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}], ids=str)
def test_rows_are_repeated_before_several_sequences(node, ids, how):
    outs = []
    for cache in (own(node.model), node.cache(ids)):
        if cache.batch_size == 1:
            cache.batch_repeat_interleave(3)
        torch.manual_seed(5)
        outs.append(generate(node.model, ids, cache, **how))
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match="holds 1 rows, the call has 3: use .* batch_repeat_interleave"):
        generate(node.model, ids, node.cache(ids), **how)


# -- crops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [1, 60, LENGTH - 2])
def test_a_crop_far_behind_the_prompts_end(llama, ids, gone):
    mine, cache, left = own(llama.model, ids), llama.cache(ids), LENGTH - 1 - gone
    mine.crop(-gone - 1)
    cache.crop(-gone)
    assert cache.get_seq_length() == mine.get_seq_length() == left
    more = ids[:, : left + 5]
    assert torch.equal(generate(llama.model, more, cache, 40), generate(llama.model, more, mine, 40))


def test_a_crop_behind_what_sliding_windows_have_is_refused_and_changes_nothing(gemma3, ids):
    model, cache = gemma3.model, gemma3.cache(ids)
    for gone in (1, 100):
        with pytest.raises(ValueError, match=rf"crop to {LENGTH - 1 - gone} tokens .* those from 126 on\. Crop less"):
            cache.crop(-gone)
    with pytest.raises(ValueError, match="Crop less"):
        copy.deepcopy(cache).crop(-9)
    outs = []
    for one in (cache, own(model)):
        first = generate(model, ids, one)
        one.crop(LENGTH - 1)
        outs.append(torch.cat((first, generate(model, ids, one))))
    assert torch.equal(*outs), "back to the prompt's end"
    short = gemma3.cache(ids[:, :20])
    short.crop(-9)
    assert short.get_seq_length() == 10
    cache.reset()
    assert torch.equal(generate(model, ids, cache), outs[0][:1])
    cache.crop(-9)


# -- a request is taken once ------------------------------------------------------------------------------------------


def test_a_request_is_taken_once(llama, ids):
    model, prefilled = llama.model, llama.client.fetch(llama.worker.prefill(ids))
    with pytest.raises(ValueError, match="budget"):
        OasisCache.from_prefill(prefilled, model, budget=7)
    cache = OasisCache.from_prefill(prefilled, model)
    with pytest.raises(ValueError, match="holds the request .* already, and it can be taken once: branch that cache"):
        OasisCache.from_prefill(prefilled, model)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, own(model)))
