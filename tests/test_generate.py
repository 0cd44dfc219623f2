"""Budget >= context: everything generate can do gives what `DynamicCache` gives (promise 1), for every family."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tiny import FAMILIES, left_padded, prompt, tiny
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from oasis_hf import OasisCache

pytestmark = pytest.mark.core
families = pytest.mark.parametrize("family", FAMILIES)


def generate(model, inputs, cache, **kwargs):
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs}
    kwargs = {"max_new_tokens": 24, "do_sample": False, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            **inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **kwargs
        )


def assert_same(model, inputs, make_cache, seed=None, **kwargs):
    """Same ids, and logits within 1e-4, as a `DynamicCache` gives."""
    outs = []
    for cache in (DynamicCache(config=model.config), make_cache()):
        if seed is not None:
            torch.manual_seed(seed)
        outs.append(generate(model, inputs, cache, **kwargs))
    dense, oasis = outs
    assert torch.equal(dense.sequences, oasis.sequences)
    for a, b in zip(dense.logits, oasis.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@families
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=["plain", "speculate"])
def test_greedy(family, knobs):
    model = tiny(family)
    assert_same(model, prompt(1, 50), lambda: OasisCache(model, **knobs))


@families
def test_seeded_sampling(family):
    model = tiny(family)
    for knobs in ({}, {"speculate": True}):
        assert_same(
            model, prompt(2, 40), lambda: OasisCache(model, **knobs), seed=7, do_sample=True, temperature=0.8, top_k=20
        )


@families
def test_beam_search(family):
    model = tiny(family)
    for knobs in ({}, {"speculate": True}):
        assert_same(model, prompt(2, 37), lambda: OasisCache(model, **knobs), num_beams=3)


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_inside_inference_mode(family, kwargs):
    model = tiny(family)
    with torch.inference_mode():
        assert_same(model, prompt(1, 37).repeat(1, 2), lambda: OasisCache(model), **kwargs)


@families
def test_num_return_sequences(family):
    model = tiny(family)
    for knobs in ({}, {"speculate": True}):
        assert_same(
            model, prompt(1, 37), lambda: OasisCache(model, **knobs), seed=3, do_sample=True, num_return_sequences=3
        )


@families
def test_repetition_penalty_and_a_processor(family):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, input_ids[0, -1:], -torch.inf)

    model = tiny(family)
    assert_same(
        model, prompt(1, 45), lambda: OasisCache(model, speculate=True), repetition_penalty=1.3,
        logits_processor=LogitsProcessorList([Ban()]),
    )  # fmt: skip


@families
def test_left_padded_batch_of_three_lengths(family):
    model = tiny(family)
    for knobs in ({}, {"speculate": True}):
        assert_same(model, left_padded([21, 50, 33]), lambda: OasisCache(model, **knobs))


@families
def test_two_turns_on_one_cache(family):
    model = tiny(family)
    sequences = []
    for cache in (DynamicCache(config=model.config), OasisCache(model)):
        first = generate(model, prompt(1, 30), cache)
        more = torch.cat((first.sequences, prompt(1, 19, seed=5)), 1)
        sequences.append(generate(model, more, cache))
        assert cache.get_seq_length() == more.shape[1] + 23
    assert torch.equal(sequences[0].sequences, sequences[1].sequences)
    torch.testing.assert_close(sequences[0].logits[-1], sequences[1].logits[-1], atol=1e-4, rtol=0)


@families
def test_second_turn_of_one_token_is_a_prompt(family):
    model = tiny(family)
    for cache in (DynamicCache(config=model.config), OasisCache(model, budget=32)):
        first = generate(model, prompt(1, 30), cache, max_new_tokens=1)
        assert cache.get_seq_length() == 30
        second = generate(model, first.sequences, cache, max_new_tokens=1)
        assert cache.get_seq_length() == 31
        if isinstance(cache, DynamicCache):
            wanted = second.logits[0]
    torch.testing.assert_close(wanted, second.logits[0], atol=1e-4, rtol=0)


@families
@pytest.mark.parametrize("rows", ["one", "padded"])
def test_chunked_prefill(family, rows):
    model = tiny(family)
    inputs = prompt(1, 61) if rows == "one" else left_padded([61, 20, 44])
    assert_same(model, inputs, lambda: OasisCache(model), prefill_chunk_size=13)


@families
def test_deepcopy_and_branch(family):
    model = tiny(family)
    ids = prompt(1, 41)
    cache = OasisCache(model)
    dense = DynamicCache(config=model.config)
    for c in (cache, dense):
        generate(model, ids, c, max_new_tokens=1)
    for seed in (1, 2):
        branch = torch.cat((ids, prompt(1, 9, seed=seed)), 1)
        wanted = generate(model, branch, copy.deepcopy(dense))
        got = generate(model, branch, copy.deepcopy(cache))
        assert torch.equal(wanted.sequences, got.sequences)
        torch.testing.assert_close(wanted.logits[-1], got.logits[-1], atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 41  # the trunk is as it was


@families
@pytest.mark.parametrize("tokens", [3, 12])
def test_prompt_lookup_decoding(family, tokens):
    model = tiny(family)
    ids = prompt(1, 12).repeat(1, 4)
    assert_same(model, ids, lambda: OasisCache(model), prompt_lookup_num_tokens=tokens)


@families
def test_assistant_model(family):
    model, assistant = tiny(family), tiny("llama")
    assert_same(model, prompt(1, 40), lambda: OasisCache(model), assistant_model=assistant)


def test_turn_after_a_finished_row_hides_its_padding():
    """A finished row's padding is masked in the next turn: a hole in the middle of the row, not left padding."""
    model = tiny("llama")
    ids = prompt(2, 30)
    turn = prompt(2, 7, seed=4)
    mask = torch.ones(2, 30 + 12 + 7, dtype=torch.long)
    mask[1, 34:42] = 0
    results = []
    for cache in (DynamicCache(config=model.config), OasisCache(model)):
        first = generate(model, ids, cache, max_new_tokens=13)
        more = torch.cat((first.sequences[:, :42], turn), 1)
        results.append(generate(model, {"input_ids": more, "attention_mask": mask}, cache))
        results.append(generate(model, {
            "input_ids": torch.cat((results[-1].sequences, turn), 1),
            "attention_mask": torch.cat((mask, mask.new_ones(2, 24 + 7)), 1),
        }, cache))  # fmt: skip
    for dense, oasis in zip(results[:2], results[2:]):
        assert torch.equal(dense.sequences, oasis.sequences)
        torch.testing.assert_close(dense.logits[-1], oasis.logits[-1], atol=1e-4, rtol=0)


@families
def test_bf16_differs_only_where_dense_is_undecided(family):
    """Rounding may tip a near-tie; then the texts part, so only the first difference counts."""
    model = tiny(family, torch.bfloat16)
    dense = generate(model, prompt(2, 50), DynamicCache(config=model.config))
    oasis = generate(model, prompt(2, 50), OasisCache(model))
    differing = 0
    for row in range(2):
        apart = (dense.sequences[row] != oasis.sequences[row]).nonzero()
        if len(apart):
            logits = dense.logits[int(apart[0]) - 50][row].float()
            top = logits.topk(2).values
            assert top[0] - top[1] < 0.05
            differing += 1
    assert differing <= 1


def test_streamer_and_pipeline():
    from transformers import TextGenerationPipeline
    from transformers.generation.streamers import BaseStreamer

    class Collect(BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    model = tiny("llama")
    collect = Collect()
    out = generate(model, prompt(1, 20), OasisCache(model, speculate=True), streamer=collect)
    assert collect.seen == out.sequences[0].tolist() and collect.ended
    assert TextGenerationPipeline  # the pipeline itself needs a tokenizer: tests/test_smollm2.py runs it


def test_model_and_cache_leave_no_trace():
    import gc

    from tiny import FAMILIES as make

    model = make["llama"]().eval()
    ids = prompt(1, 20)
    before, plain = dict(model.__dict__), model(ids).logits
    cache = OasisCache(model)
    assert "forward" in model.__dict__
    torch.testing.assert_close(model(ids).logits, plain)  # calls without a cache pass through
    second = copy.deepcopy(cache)
    del cache
    gc.collect()
    assert "forward" in model.__dict__  # one cache still lives
    del second
    gc.collect()
    assert model.__dict__ == before


def test_detach_and_deepcopied_models():
    model = FAMILIES["llama"]().eval()
    before = dict(model.__dict__)
    cache = OasisCache(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert twin(prompt(1, 5)).logits.abs().max() == 0  # its own forward, not the original's
        assert model(prompt(1, 5)).logits.abs().max() > 0
    cache.detach()
    assert model.__dict__ == before
