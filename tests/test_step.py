"""One forward: masks at decode steps, positions, and forwards that do not finish."""

from __future__ import annotations

import pytest
import torch
from test_generate import generate
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache, LlamaConfig, LlamaModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import oasis_hf
from oasis_hf import OasisCache, OracleDrafter
from oasis_hf.attach import from_generate
from oasis_hf.config import ConfigError

pytestmark = pytest.mark.core


# -- attention_mask at decode steps ---------------------------------------------------------------------------------


def masked_steps(model, cache, masks, seed=0):
    """A prompt of 2 x 40 without padding, then one step for each mask's columns beyond it; logits of all steps."""
    ids, logits, held = prompt(2, 40), [], 40
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for at, mask in enumerate(masks):
            positions = mask.cumsum(1)[:, held:] - 1
            token = prompt(2, mask.shape[1] - held, seed=at)
            logits.append(model(token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits)
            held = mask.shape[1]
    return logits


def ones(columns, *hidden):
    mask = torch.ones(2, columns, dtype=torch.long)
    for row, columns in hidden:
        mask[row, columns] = 0
    return mask


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        [ones(41), ones(42, (0, slice(10, 20))), ones(43, (0, slice(10, 20)))],
        [ones(41, (0, 40)), ones(42, (0, 40)), ones(43, (0, 40), (1, 42)), ones(44, (0, 40), (1, 42))],
    ],
    ids=["old tokens hidden", "a row pauses"],
)
def test_a_mask_at_decode_steps_is_honoured(family, speculate, masks):
    model = tiny(family)
    wanted = masked_steps(model, DynamicCache(config=model.config), masks)
    got = masked_steps(model, OasisCache(model, speculate=speculate), masks)
    for mask, a, b in zip(masks, wanted, got):
        real = mask[:, -1].bool()  # what a paused row gets is nobody's
        torch.testing.assert_close(a[real], b[real], atol=1e-4, rtol=0)


def test_a_mask_of_another_width_at_a_decode_step():
    model = tiny("llama")
    cache = OasisCache(model)
    model(prompt(2, 40), past_key_values=cache)
    for columns in (7, 40, 42):
        with pytest.raises(ValueError, match=rf"attention_mask has shape \[2, {columns}\], but 2 rows of 40 cached"):
            model(prompt(2, 1), past_key_values=cache, attention_mask=torch.ones(2, columns))
    assert cache.get_seq_length() == 40


def test_a_mask_on_another_device_is_read_unless_generate_grows_it(monkeypatch):
    """A device whose masks cost a synchronisation to read, stood in for by `meta`."""
    model = tiny("llama")
    cache = OasisCache(model)
    read = []
    monkeypatch.setattr(cache, "new_columns", lambda mask, count: read.append(count))
    cache.rows_for(1)
    call = {"attention_mask": torch.ones(1, 1, device="meta")}
    assert cache.stepper._all_real(call, 1) and read == [1]
    call.update(use_cache=True, return_dict=True, position_ids=torch.zeros(1, 1))
    assert cache.stepper._all_real(call, 1) and read == [1]


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_the_steps_of_generate_are_known(monkeypatch, kwargs):
    model = tiny("llama")
    cache = OasisCache(model)
    calls = []
    plain = cache.stepper.run
    monkeypatch.setattr(
        cache.stepper, "run", lambda inner, call, *rest: calls.append(call) or plain(inner, call, *rest)
    )
    generate(model, left_padded([20, 9]), cache, max_new_tokens=5, **kwargs)
    assert len(calls) == 5 and all(from_generate(call) for call in calls)


# -- positions ------------------------------------------------------------------------------------------------------


def test_a_model_that_counts_images_otherwise_places_its_tokens_itself():
    size = dict(
        vocab_size=96, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
        rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=96, patch_size=14,
        fullatt_block_indexes=[0], window_size=56,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=size, vision_config=vision, image_token_id=90, vision_start_token_id=91,
            vision_end_token_id=92, video_token_id=93,
        )
    ).eval()  # fmt: skip
    ids = prompt(1, 60).clamp(max=80)
    ids[0, 9], ids[0, 10:26], ids[0, 26] = 91, 90, 92
    inputs = dict(
        input_ids=ids, pixel_values=torch.randn(64, 3 * 2 * 14 * 14), image_grid_thw=torch.tensor([[1, 8, 8]]),
        attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 90).int(),
    )  # fmt: skip
    results = []
    caches = [DynamicCache(config=model.config.text_config)]
    caches += [OasisCache(model, speculate=speculate) for speculate in (False, True)]
    for cache in caches:
        with torch.no_grad():
            logits = [model(**inputs, past_key_values=cache).logits[:, -1]]
            for _ in range(12):
                token = logits[-1].argmax(-1, keepdim=True)
                logits.append(model(token, past_key_values=cache).logits[:, -1])
        results.append(torch.stack(logits))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], atol=1e-4, rtol=0)


def test_speculation_needs_logits():
    model = LlamaModel(LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).eval()
    with pytest.raises(ConfigError, match="LlamaModel has no language-model head: leave speculate off"):
        OasisCache(model, speculate=True)
    cache = OasisCache(model, budget=32)
    for count in (40, 1, 1):
        model(prompt(1, count).clamp(max=31), past_key_values=cache)
    assert cache.get_seq_length() == 42


# -- forwards that do not finish ------------------------------------------------------------------------------------


def retried(model, cache, fail_at, ids, count=40, turn_at=None):
    """Greedy tokens of a hand-written loop in which forward `fail_at` is interrupted before its last layers and run
    again. turn_at: the token behind which a turn of 9 more is fed."""
    seen = []

    def interrupt(*_):
        seen.append(0)
        if len(seen) == fail_at:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    tokens = []
    try:
        with torch.no_grad():
            while len(tokens) < count:
                try:
                    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
                except KeyboardInterrupt:
                    continue
                tokens.append(token)
                ids = token if len(tokens) != turn_at else torch.cat((token, prompt(len(token), 9, seed=3)), 1)
    finally:
        hook.remove()
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize(
    "fail_at", [1, 2, 3, 18, 22], ids=["prompt", "a block opens", "inside", "another opens", "turn"]
)
def test_an_interrupted_forward_can_be_run_again(family, speculate, fail_at):
    model, ids = tiny(family), prompt(1, 48)
    wanted = retried(model, DynamicCache(config=model.config), None, ids, turn_at=21)
    cache = OasisCache(model, speculate=speculate, draft_tokens=2)
    assert torch.equal(retried(model, cache, fail_at, ids, turn_at=21), wanted)
    for layer in cache.sparse_layers:
        for row in layer.working_set.table.flatten(0, 1).tolist():
            held = [block for block in row if block >= 0]
            assert len(set(held)) == len(held)


def test_an_interrupted_forward_leaves_no_pages_and_no_queries():
    model = tiny("llama")
    cache = OasisCache(model)
    ids = prompt(2, 48)
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        model(token, past_key_values=cache)
    pages = cache.state.store.pool.pages_in_use
    queries = [layer.recent.clone() for layer in cache.sparse_layers]
    for more in (prompt(2, 1), prompt(2, 90)):
        hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(more, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 49 and cache.state.store.pool.pages_in_use == pages
        for layer, before in zip(cache.sparse_layers, queries):
            assert torch.equal(layer.recent, before)


# -- too many rows for drafts ---------------------------------------------------------------------------------------


def stacked(cache):
    """How many rows each forward behind the prompt stacks, noted as they run."""
    seen, plain = [], cache.stepper._forward

    def forward(inner, call, step):
        if step.mode == "decode":
            seen.append(step.drafts)
        return plain(inner, call, step)

    cache.stepper._forward = forward
    return seen


LIMITS = {
    "neither": ({}, 3),
    "at the limit": ({"verify_up_to": 4, "draft_up_to": 4}, 3),
    "not verified": ({"verify_up_to": 3}, 1),
    "not drafted": ({"draft_up_to": 3}, 0),
    "both": ({"verify_up_to": 2, "draft_up_to": 3}, 0),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_two_switches_by_load(limits):
    knobs, rows = LIMITS[limits]
    model, ids = tiny("llama"), prompt(4, 150)
    cache = OasisCache(
        model, budget=64, speculate=True, draft_tokens=2, smooth_queries=3, drafter="prompt_lookup", **knobs
    )
    seen, weighed = stacked(cache), []
    plain = cache.stepper._stack

    def stack(call, step, **kwargs):
        call = plain(call, step, **kwargs)
        weighed.append(step.weights[0].tolist())
        return call

    cache.stepper._stack = stack
    generate(model, ids, cache, max_new_tokens=12)
    assert set(seen) == {rows} and cache.stats()["fetched"].sum() > 0
    assert (cache.stepper.unverified, cache.stepper.undrafted) == (11 * (rows == 1), 11 * (rows == 0))
    if rows == 0:
        assert all(one == pytest.approx([1 / 3] * 3) for one in weighed)
    assert ("too many rows to verify" in cache.report(200)) == (rows == 1)
    assert ("too many rows to stack" in cache.report(200)) == (rows == 0)


def test_drafts_that_are_not_verified_are_not_stacked_where_nothing_is_predicted():
    model = tiny("llama")
    cache = OasisCache(model, speculate=True, verify_up_to=1)
    seen = stacked(cache)
    generate(model, prompt(2, 40), cache, max_new_tokens=6)
    assert set(seen) == {0}


@pytest.mark.parametrize("how", ["transformers", "own"])
def test_rows_that_have_ended_are_no_load(how):
    model, ids = tiny("llama"), prompt(3, 50)
    free = model.generate(ids, max_new_tokens=40, do_sample=False)
    end = int(free[1, 60])
    kwargs = dict(max_new_tokens=40, do_sample=False, eos_token_id=end, pad_token_id=0)
    want = model.generate(ids, **kwargs)
    lasts = sorted(int((row[50:] == end).nonzero()[0]) if (row[50:] == end).any() else 40 for row in want)
    assert lasts[0] + 3 < lasts[2]
    cache = OasisCache(
        model, speculate=True, draft_tokens=2, verify_up_to=2, draft_up_to=2, drafter=OracleDrafter(free)
    )
    seen = stacked(cache)
    run = oasis_hf.generate if how.startswith("own") else type(model).generate
    assert torch.equal(run(model, ids, past_key_values=cache, **kwargs), want)
    alone = seen.index(3)
    assert set(seen[:alone]) == {0} and set(seen[alone:]) == {3} and abs(alone - lasts[0]) <= 2
    assert cache.stepper.undrafted == alone and len(seen) < 39


@pytest.mark.parametrize("knobs", [{"speculate": True}, {"speculate": True, "candidates": 2}], ids=str)
@torch.no_grad()
def test_several_tokens_decoded_at_once_carry_no_drafts(knobs):
    """All their logits come back; drafts stand behind one new token only."""
    model, ids = tiny("llama"), prompt(1, 60)
    cache = OasisCache(model, drafter="prompt_lookup", **knobs)
    model(ids[:, :40], past_key_values=cache)
    with cache.mode("decode"):
        got = model(ids[:, 40:43], past_key_values=cache).logits
    more = model(ids[:, 43:44], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat((got, more), 1), model(ids[:, :44]).logits[:, 40:], atol=1e-3, rtol=1e-3)
