"""What `tests/test_support.py`'s cells don't show of the seam: errors that would go unseen, and their way out."""

from __future__ import annotations

import copy

import pytest
import torch
from families import LONGROPE, WINDOW, causal, served
from matrix import close, dense, feed, read
from test_generate import assert_same, generate
from tiny import FAMILIES, left_padded, prompt, tiny

import oasis_hf
from oasis_hf import OasisCache, UnsupportedModelError
from oasis_hf.attach import cache_name

pytestmark = pytest.mark.core


def quiet(model):
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


# -- windows that the configuration names and the model does not have -------------------------------------------------


def test_a_window_that_the_model_does_not_use():
    """Keys would be forgotten that it attends to, by DynamicCache too."""
    torch.manual_seed(0)
    model, ids = quiet(causal("llama", sliding_window=24)()), prompt(1, 60)
    with pytest.raises(UnsupportedModelError, match="names a sliding window of 24.*sliding_window = None first[.]$"):
        generate(model, ids, OasisCache(model))
    model.config.sliding_window = None
    out = generate(model, ids, OasisCache(model), max_new_tokens=6)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], use_cache=False).logits[:, 59:]
    for step, wanted in zip(out.logits, whole.unbind(1), strict=True):
        close(step, wanted)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_that_only_the_model_has(family, monkeypatch):
    model = FAMILIES[family]().eval()
    monkeypatch.setattr(oasis_hf.supported, "layer_windows", lambda model: [None] * 4)
    cache = OasisCache(model)
    with pytest.raises(UnsupportedModelError, match="a sliding window of 24 in a layer whose configuration says None"):
        generate(model, prompt(1, 40), cache)


# -- RoPE with other factors for a long text: Phi-3 leaves the cache out where it would have to be read anew -----------


@pytest.fixture(scope="module", params=["full", "windows"])
def longrope(request):
    if request.param == "full":
        return served("Phi-3 128K (long RoPE)")
    torch.manual_seed(20)
    return quiet(causal("phi3", **WINDOW, **LONGROPE, original_max_position_embeddings=64)())


@pytest.mark.parametrize("length", [60, 64, 65, 100])
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=["plain", "speculate"])
def test_a_text_that_grows_over_the_length_of_longrope(longrope, length, knobs):
    cache = OasisCache(longrope, **knobs)
    as_read_anew(longrope, generate(longrope, prompt(1, length), cache, max_new_tokens=9), length)
    assert cache.get_seq_length() == length + 8  # it is used, and not left aside for one of the model's own
    if AFTER_5_17:
        assert_same(longrope, left_padded([length, 30]), lambda: OasisCache(longrope, **knobs), max_new_tokens=9)


AFTER_5_17 = cache_name(tiny("llama")) == "cache"  # which forgets the text there with a DynamicCache


@torch.no_grad()
def as_read_anew(model, out, length):
    """Each step's logits are those of the text so far, read at once."""
    for at, logits in enumerate(out.logits):
        close(logits, model(out.sequences[:, : length + at], use_cache=False).logits[:, -1])


def test_the_next_turn_after_that(longrope):
    cache = OasisCache(longrope)
    first = generate(longrope, prompt(1, 60), cache, max_new_tokens=9).sequences
    text = torch.cat((first, prompt(1, 9, seed=3)), 1)
    as_read_anew(longrope, generate(longrope, text, cache, max_new_tokens=4), text.shape[1])


def test_chunks_that_longrope_would_rotate_in_two_ways(longrope):
    for chunk in (20, 64):
        with pytest.raises(ValueError, match=f"prefill_chunk_size={chunk} .*: use chunks above 64, or none[.]$"):
            generate(longrope, prompt(1, 100), OasisCache(longrope), prefill_chunk_size=chunk)
    generate(longrope, prompt(1, 50), OasisCache(longrope), prefill_chunk_size=20, max_new_tokens=2)
    assert_same(longrope, prompt(1, 100), lambda: OasisCache(longrope), prefill_chunk_size=70, max_new_tokens=3)


def test_crop_to_nothing_however_far_a_window_was_written():
    model = tiny("gemma3")
    cache = OasisCache(model, sliding_slack=16)
    read(model, cache, prompt(1, 200))
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    ids, never = prompt(1, 60, seed=5), dense(model)
    for one in (cache, never):
        read(model, one, ids[:, :40])
    close(feed(model, cache, ids[:, 40:45]), feed(model, never, ids[:, 40:45]))


# -- generate ---------------------------------------------------------------------------------------------------------


def test_continuous_batching_goes_on_without_our_cache(monkeypatch):
    model = FAMILIES["llama"]().eval()
    seen = []
    monkeypatch.setattr(type(model), "generate_batch", lambda self, inputs, **kwargs: seen.append(inputs))
    cache = OasisCache(model)
    model.generate_batch([[3, 4]], max_new_tokens=2)
    assert seen == [[[3, 4]]]
    for call in (model.generate_batch, lambda ids, **more: model.generate(ids, cache_implementation="paged", **more)):
        with pytest.raises(ValueError, match="leave one of the two out"):
            call(torch.tensor([[3, 4]]), past_key_values=cache)
    twin = copy.deepcopy(model)
    assert twin.generate_batch.__self__ is twin and twin.prepare_inputs_for_generation.__self__ is twin
    cache.detach()
    assert "generate_batch" not in model.__dict__


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_more_left_padding_changes_nothing(family):
    """As transformers' own tests of its caches have it."""
    model, inputs = tiny(family), left_padded([21, 50])
    wide = {name: torch.nn.functional.pad(value, (14, 0)) for name, value in inputs.items()}
    tight, loose = (generate(model, one, OasisCache(model)) for one in (inputs, wide))
    assert torch.equal(tight.sequences, loose.sequences[:, 14:])
    for a, b in zip(tight.logits, loose.logits, strict=True):
        close(a, b)


def test_a_loop_of_ones_own_is_no_part_of_our_generate():
    model = tiny("llama")
    with pytest.raises(ValueError, match="takes no custom_generate"):
        oasis_hf.generate(model, prompt(1, 5), custom_generate=lambda *args, **kwargs: None)
