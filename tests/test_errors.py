"""Unsupported things raise one sentence that names the cause and the way out (promise 8); nothing is silently wrong."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from test_generate import generate
from tiny import FAMILIES, left_padded, prompt, tiny
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from oasis_hf import HostMemoryError, OasisCache, UnsupportedModelError
from oasis_hf.config import ConfigError

pytestmark = pytest.mark.core

_SMALL = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def meta(cls, config):
    with torch.device("meta"):
        return cls(config)


UNSUPPORTED = {
    "encoder-decoder": (
        lambda: meta(T5ForConditionalGeneration, T5Config(vocab_size=32, d_model=16, num_layers=1, num_heads=2)),
        "it is an encoder-decoder",
    ),
    "MLA": (
        lambda: meta(DeepseekV3ForCausalLM, DeepseekV3Config(**_SMALL, n_routed_experts=4, n_group=1, topk_group=1)),
        "latent attention (MLA)",
    ),
    "linear layers": (
        lambda: meta(
            Qwen3NextForCausalLM,
            Qwen3NextConfig(**_SMALL, layer_types=["linear_attention", "full_attention"], num_key_value_heads=2),
        ),
        "layers of type linear_attention",
    ),
    "no attention": (
        lambda: meta(MambaForCausalLM, MambaConfig(vocab_size=32, hidden_size=32)),
        "layers of type linear_attention",
    ),
    "soft-capped logits": (
        lambda: meta(Gemma2ForCausalLM, Gemma2Config(**_SMALL, num_key_value_heads=2, head_dim=16)),
        "soft-caps attention logits",
    ),
}  # fmt: skip


def one_sentence(error) -> str:
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    assert len(re.findall(r"[.:;] ", text)) <= 3, text
    return text


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_models_that_cannot_be_served(case):
    make, cause = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=re.escape(cause)) as error:
        OasisCache(make())
    assert "use DynamicCache" in one_sentence(error)


def test_kv_heads_that_do_not_divide_over_tensor_parallel_ranks():
    model = FAMILIES["llama"]()
    model._tp_size = 4
    with pytest.raises(UnsupportedModelError, match="2 KV heads do not divide over tensor-parallel size 4"):
        OasisCache(model)


@pytest.mark.parametrize("what", [None, "a path", LlamaConfig()])
def test_something_that_is_no_model(what):
    with pytest.raises(ConfigError, match="needs the model itself"):
        OasisCache(what)


def test_a_model_without_a_language_model_head_is_fine_but_an_unknown_knob_is_not():
    with pytest.raises(ConfigError, match="no knob 'bugdet': the knobs are block_size, budget,"):
        OasisCache(tiny("llama"), bugdet=100)


def test_use_cache_false():
    model = tiny("llama")
    with pytest.raises(ValueError, match="use_cache=False with an OasisCache") as error:
        generate(model, prompt(1, 10), OasisCache(model), use_cache=False)
    assert "leave use_cache on" in one_sentence(error)


def test_output_attentions():
    model = tiny("llama")
    with pytest.raises(ValueError, match="gives no attention weights") as error:
        model(prompt(1, 10), past_key_values=OasisCache(model), output_attentions=True)
    assert "use DynamicCache" in one_sentence(error)


def test_dropout_in_training():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SMALL, attention_dropout=0.1)).train()
    with pytest.raises(RuntimeError, match="call model.eval()") as error:
        model(torch.ones(1, 4, dtype=torch.long), past_key_values=OasisCache(model))
    one_sentence(error)


def test_a_second_model():
    first, second = FAMILIES["llama"]().eval(), FAMILIES["llama"]().eval()
    cache = OasisCache(first)
    with pytest.raises(RuntimeError, match="pass the cache to the model it was made for"):
        second(prompt(1, 10), past_key_values=cache)  # never attached
    other = OasisCache(second)
    with pytest.raises(ValueError, match="was made for another model") as error:
        second(prompt(1, 10), past_key_values=cache)
    one_sentence(error)
    second(prompt(1, 10), past_key_values=other)


def test_another_batch_size():
    model = tiny("llama")
    cache = OasisCache(model)
    model(prompt(2, 10), past_key_values=cache)
    with pytest.raises(ValueError, match="holds 2 rows, the call has 3") as error:
        model(prompt(3, 10), past_key_values=cache)
    assert "reset()" in one_sentence(error)


@pytest.mark.parametrize("tokens", [1, 20, 35, 40])
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeds"])
def test_a_prompt_with_nothing_behind_what_is_held(tokens, embedded):
    model = tiny("llama")
    cache, ids = OasisCache(model), prompt(1, 30)
    generate(model, ids, cache, max_new_tokens=11)  # 40 columns
    other = prompt(1, tokens, 1)
    given = {"inputs_embeds": model.get_input_embeddings()(other).detach()} if embedded else other
    with pytest.raises(ValueError, match=rf"prompt has {tokens} tokens and this OasisCache holds 40 already") as error:
        generate(model, given, cache)
    assert "\n" not in str(error.value) and cache.get_seq_length() == 40
    # What is new alone is another matter, under a mask of all.
    ids = torch.cat((prompt(1, 40), prompt(1, tokens, 1)), 1)
    generate(model, {"input_ids": ids[:, 40:], "attention_mask": torch.ones_like(ids)}, cache, max_new_tokens=1)
    assert cache.get_seq_length() == 40 + tokens


def test_masks_that_do_not_fit():
    model, inputs = tiny("llama"), left_padded([12, 5])
    cache = OasisCache(model)
    with pytest.raises(ValueError, match="2D attention_mask"):
        model(inputs["input_ids"], attention_mask=torch.ones(2, 1, 12, 12), past_key_values=cache)
    with pytest.raises(ValueError, match=re.escape("attention_mask has shape [2, 11]")) as error:
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, 1:], past_key_values=cache)
    one_sentence(error)
    model(**inputs, past_key_values=cache)
    for mask in (None, torch.ones(2, 16)):  # the padding of the first turn was never stored
        with pytest.raises(ValueError, match="columns that were padding") as error:
            model(prompt(2, 4), attention_mask=mask, past_key_values=cache)
    one_sentence(error)
    model(
        prompt(2, 4), attention_mask=torch.cat((inputs["attention_mask"], torch.ones(2, 4)), 1), past_key_values=cache
    )


def test_packed_sequences():
    model = tiny("llama")
    with pytest.raises(ValueError, match="packed sequences"):
        model(prompt(1, 10), past_key_values=OasisCache(model), cu_seq_lens_q=torch.tensor([0, 4, 10]))


def test_memory_that_cannot_fit_is_refused_before_anything_is_stored(monkeypatch):
    from oasis_hf.store import pages

    model = tiny("llama")
    cache = OasisCache(model)
    monkeypatch.setattr(pages, "available_host_bytes", lambda: 100_000)
    with pytest.raises(HostMemoryError, match=r"78 more pages x 2,048 bytes = 0\.00 GiB"):
        model(prompt(1, 200), past_key_values=cache)
    monkeypatch.undo()
    assert cache.get_seq_length() == 0
    model(prompt(1, 200), past_key_values=cache)  # and the cache still works


def test_a_row_longer_than_the_capacity_asked_for():
    model = tiny("llama")
    cache = OasisCache(model, host_capacity_tokens=100)
    assert cache.get_max_length() == 100
    with pytest.raises(HostMemoryError, match="a row would hold 101 tokens|A row would hold 101 tokens"):
        generate(model, prompt(1, 90), cache, max_new_tokens=30)


def test_pickling():
    model = FAMILIES["llama"]()
    cache = OasisCache(model)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(cache)
    with pytest.raises(TypeError, match="detach"):
        pickle.dumps(model)
    cache.detach()
    assert pickle.loads(pickle.dumps(model)) is not None


def test_update_outside_a_forward():
    cache = OasisCache(tiny("llama"))
    with pytest.raises(RuntimeError, match="outside its model's forward"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)


def test_a_budget_in_bytes_that_holds_no_two_slots():
    model = tiny("llama")
    with pytest.raises(ConfigError, match=r"at least 24,576 bytes: two slots x 3 layers x 1 rows x 2 KV heads"):
        model(prompt(1, 10), past_key_values=OasisCache(model, budget_bytes=1000))


def test_more_rows_than_a_budget_in_bytes_was_shared_out_over():
    model = tiny("llama")
    cache = OasisCache(model, budget_bytes=400_000)
    generate(model, prompt(2, 100), cache, max_new_tokens=4)
    before = cache.memory()
    for grow in (lambda: cache.batch_repeat_interleave(2), lambda: cache.reorder_cache(torch.tensor([0, 1, 1]))):
        with pytest.raises(ConfigError, match="budget_bytes=400,000 gave the first prompt's rows 16 slots") as error:
            grow()
        assert "give budget in tokens" in one_sentence(error)
    assert cache.memory() == before and cache.batch_size == 2
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)  # no more than there were
    assert cache.memory()["working_set"] == before["working_set"]
    cache.reset()
    generate(model, prompt(4, 100), cache, max_new_tokens=4)  # shared out anew
    assert cache.state.slots == 8


def test_float16_pages_for_a_bfloat16_model():
    model = tiny("llama", torch.bfloat16)
    with pytest.raises(ConfigError, match="host_dtype='float16' can't hold a bfloat16 model's keys") as error:
        model(prompt(1, 10), past_key_values=OasisCache(model, host_dtype="float16"))
    assert "use 'model' or 'float32'" in one_sentence(error)
    model(prompt(1, 10), past_key_values=OasisCache(model, host_dtype="float32"))
    model = tiny("llama")
    model(prompt(1, 10), past_key_values=OasisCache(model, host_dtype="float16"))


@pytest.mark.parametrize("config", [64, {"budget": 64}, "host"], ids=str)
def test_a_config_that_is_none(config):
    with pytest.raises(ConfigError, match=f"takes an OasisConfig, not {type(config).__name__}") as error:
        OasisCache(tiny("llama"), config)
    assert "OasisCache(model, budget=2064)" in one_sentence(error)


@pytest.mark.parametrize("mode", ["decode", "verify"])
@pytest.mark.parametrize(
    "emptied", [None, OasisCache.reset, lambda cache: cache.crop(-30)], ids=["new", "reset", "crop"]
)
def test_a_mode_on_an_empty_cache(mode, emptied):
    model = tiny("llama")
    cache = OasisCache(model)
    if emptied is not None:
        model(prompt(1, 30), past_key_values=cache)
        emptied(cache)
    with cache.mode(mode), pytest.raises(ValueError, match="needs a prompt before it") as error:
        model(prompt(1, 1), past_key_values=cache)
    one_sentence(error)
    model(prompt(1, 10), past_key_values=cache)
    model(prompt(1, 1), past_key_values=cache)


def test_commit_on_a_new_cache():
    with pytest.raises(ValueError, match="no drafts to commit") as error:
        OasisCache(tiny("llama")).commit([0])
    one_sentence(error)


def test_no_or_unknown_rows():
    model = tiny("llama")
    cache = OasisCache(model)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))  # new: nothing to do
    model(prompt(2, 10), past_key_values=cache)
    for select in (
        lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda: cache.batch_select_indices(torch.tensor([False, False])),
        lambda: cache.batch_repeat_interleave(0),
    ):
        with pytest.raises(ValueError, match="No rows would be left") as error:
            select()
        one_sentence(error)
    for index in ([0, 2], [-1]):
        with pytest.raises(ValueError, match="has rows 0 to 1") as error:
            cache.batch_select_indices(torch.tensor(index))
        one_sentence(error)
    model(prompt(2, 1), past_key_values=cache)


def test_cropping_behind_a_sliding_window():
    model = tiny("gemma3")
    cache = OasisCache(model, sliding_slack=16)
    model(prompt(1, 200), past_key_values=cache)
    with pytest.raises(ValueError, match="set OasisConfig.sliding_slack above 108"):
        cache.crop(-100)
    assert cache.get_seq_length() == 200
    copy.deepcopy(cache).crop(-8)
