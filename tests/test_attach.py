"""The seam: threads, compiled models, and what reaches the attention and mask functions."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from test_generate import assert_same, generate
from tiny import FAMILIES, prompt, tiny
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    JetMoeConfig,
    JetMoeForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
)

from oasis_hf import OasisCache, UnsupportedModelError, supported
from oasis_hf.attach import NAME

pytestmark = pytest.mark.core

_SIZE = dict(
    vocab_size=96, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip
_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)


# -- threads --------------------------------------------------------------------------------------------------------


def interleaved(model, first, second):
    """Run two calls in threads; the second gets to the middle of its forward before the first may leave its own, and
    leaves only after it, if nothing keeps them apart. Returns both results."""
    inside, left = threading.Event(), threading.Event()
    results = {}

    def pause(*_):
        if threading.current_thread().name == "first":
            begun.set()
            inside.wait(0.3)
        elif threading.current_thread().name == "second":
            inside.set()
            left.wait(0.3)

    def work(call):
        name = threading.current_thread().name
        try:
            with torch.no_grad():
                results[name] = call()
        finally:
            if name == "first":
                left.set()

    begun = threading.Event()
    hook = model.model.layers[1].register_forward_pre_hook(pause)
    try:
        threads = [threading.Thread(target=work, args=(c,), name=n) for n, c in (("first", first), ("second", second))]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
    finally:
        hook.remove()
    return results["first"], results["second"]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("other", ["oasis", "dense", "base"])
def test_two_threads_and_one_model(family, other):
    model, ids, more = tiny(family), prompt(1, 40), prompt(1, 33, seed=1)
    implementation = model.config._attn_implementation
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        wanted_more = (model(more, use_cache=False).logits, model.model(more, use_cache=False).last_hidden_state)
    cache = OasisCache(model)
    second = {
        "oasis": lambda: model(more, past_key_values=OasisCache(model)).logits,
        "dense": lambda: model(more, past_key_values=DynamicCache(config=model.config)).logits,
        # Past the wrapper, so past its lock: it meets our name in the config.
        "base": lambda: model.model(more, use_cache=False).last_hidden_state,
    }[other]
    got, got_more = interleaved(model, lambda: model(ids, past_key_values=cache).logits, second)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(got_more, wanted_more[other == "base"], atol=1e-4, rtol=0)
    assert model.config._attn_implementation == implementation != NAME


def test_caches_that_come_and_go_while_others_live():
    model = FAMILIES["llama"]().eval()
    before = dict(model.__dict__)
    first = OasisCache(model)
    wrapper = model.forward
    model.forward = lambda *args, **kwargs: wrapper(*args, **kwargs)  # someone wraps it again
    mine = model.forward
    second = OasisCache(model)
    generate(model, prompt(1, 20), first, max_new_tokens=4)  # through both wrappers
    assert first.get_seq_length() == 23 and first.stepper.forwards == 4
    del second
    gc.collect()
    assert model.forward is not mine  # the first cache still needs it
    del first
    gc.collect()
    assert model.forward is mine
    del model.forward
    assert model.__dict__.keys() == before.keys()


# -- torch.compile --------------------------------------------------------------------------------------------------


def _whole(model):
    model.compile(backend="eager")
    return model, OasisCache(model)


def _object(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, OasisCache(compiled)


def _before(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model, OasisCache(model)


def _after(model):
    cache = OasisCache(model)
    model.forward = torch.compile(model.forward, backend="eager")
    return model, cache


def _layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model, OasisCache(model)


@pytest.mark.parametrize("compiled", [_whole, _object, _before, _after, _layers])
def test_a_compiled_model(compiled):
    torch._dynamo.reset()
    ids = prompt(1, 40)
    wanted = generate(tiny("llama"), ids, DynamicCache(config=tiny("llama").config), max_new_tokens=20)
    model, cache = compiled(copy.deepcopy(tiny("llama")))
    got = generate(model, ids, cache, max_new_tokens=20)
    assert torch.equal(wanted.sequences, got.sequences) and cache.get_seq_length() == 59
    with torch.no_grad():  # and without a cache of ours
        torch.testing.assert_close(model(ids).logits, tiny("llama")(ids).logits, atol=1e-4, rtol=0)


# -- masks that are not causal --------------------------------------------------------------------------------------


def gemma3_with_images():
    text = Gemma3TextConfig(**_SIZE, sliding_window=24, sliding_window_pattern=2)
    config = Gemma3Config(
        text_config=text.to_dict(), vision_config=SiglipVisionConfig(**_VISION, patch_size=7).to_dict(),
        mm_tokens_per_image=4, image_token_index=90, image_token_id=90,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config).eval()


def with_image(start=10, fill=90):
    ids = prompt(1, 40).clamp(max=80)
    ids[0, start : start + 4] = fill
    kind = (ids == 90).long()
    return {"input_ids": ids, "token_type_ids": kind, "pixel_values": torch.randn(1, 3, 28, 28)}


def test_image_tokens_that_see_each_other():
    model = gemma3_with_images()
    with pytest.raises(UnsupportedModelError, match="attends causally only.*use DynamicCache"):
        model(**with_image(), past_key_values=OasisCache(model))


def test_a_model_that_could_take_images_takes_text():
    model = gemma3_with_images()
    model.generation_config.eos_token_id = None
    text = with_image(fill=5)
    del text["pixel_values"]
    assert text["token_type_ids"].sum() == 0  # as a processor marks it
    assert_same(model, text, lambda: OasisCache(model))


def test_a_prefix_that_sees_itself_whole():
    config = PaliGemmaConfig(
        text_config=dict(model_type="gemma", **_SIZE), projection_dim=96, image_token_index=90, image_token_id=90,
        vision_config=dict(model_type="siglip_vision_model", **_VISION, patch_size=14, projection_dim=96),
    )  # fmt: skip
    model = PaliGemmaForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedModelError, match="causal"):
        model(**with_image(start=0), past_key_values=OasisCache(model))


def test_a_decoder_configured_to_look_both_ways():
    config = Gemma3TextConfig(**_SIZE, sliding_window=24, sliding_window_pattern=2, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match="its attention is not causal; use DynamicCache"):
        OasisCache(Gemma3ForCausalLM(config))


def test_an_encoder_with_a_language_model_head():
    size = {name: value for name, value in _SIZE.items() if name not in ("num_key_value_heads", "head_dim")}
    model = BertLMHeadModel(BertConfig(**size)).eval()
    with pytest.raises(UnsupportedModelError, match="its attention is not causal; use DynamicCache"):
        OasisCache(model)
    decoder = BertLMHeadModel(BertConfig(**size, is_decoder=True)).eval()
    with torch.no_grad():
        got, wanted = (decoder(prompt(1, 20), past_key_values=c).logits for c in (OasisCache(decoder), None))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


# -- attention that is not the usual one ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, cause",
    [
        (lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**_SIZE)), "attends twice a layer"),
        (lambda: DogeForCausalLM(DogeConfig(**_SIZE)), "does not apply the mask or bias that DogeAttention makes"),
        (
            lambda: JetMoeForCausalLM(JetMoeConfig(
                vocab_size=96, hidden_size=96, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16,
                intermediate_size=96, num_local_experts=4, num_experts_per_tok=2,
            )),
            "given 2 KV heads to keep, but JetMoeForCausalLM attends with 4",
        ),
    ],
    ids=["diffllama", "doge", "jetmoe"],
)  # fmt: skip
def test_attention_that_would_be_wrong(make, cause, monkeypatch):
    """Each is known by name and refused at once; here they stand for those that are not known."""
    model = make().eval()
    with pytest.raises(UnsupportedModelError, match="does not support .*; use DynamicCache for it[.]$"):
        OasisCache(model)
    monkeypatch.setattr(supported, "ODD", {})
    with pytest.raises(RuntimeError, match=f"{cause}.*: use DynamicCache for this model[.]$"):
        model(prompt(1, 20), past_key_values=OasisCache(model))
