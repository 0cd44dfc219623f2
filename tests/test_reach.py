"""How far drafts may be stacked."""

from __future__ import annotations

import pytest
import torch
from test_generate import assert_same, generate
from tiny import prompt, tiny
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from oasis_hf import OasisCache

pytestmark = pytest.mark.core

_SIZE = dict(
    vocab_size=96, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2,
)  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}

LIMITED = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=96, n_embd=96, n_layer=2, n_head=6, n_positions=90, initializer_range=0.2, bos_token_id=1,
            eos_token_id=None, pad_token_id=0,
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=96, hidden_size=96, num_hidden_layers=2, ffn_dim=96, num_attention_heads=6, init_std=0.2,
            max_position_embeddings=90, word_embed_proj_dim=96, eos_token_id=None,
        )
    ),
}  # fmt: skip


def longrope():
    return Phi3ForCausalLM(
        Phi3Config(
            **_SIZE, max_position_embeddings=512, original_max_position_embeddings=64, sliding_window=None,
            rope_scaling=dict(_LONGROPE),
        )
    )  # fmt: skip


def dynamic():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**_SIZE, max_position_embeddings=64, rope_scaling=scaling))


def by_hand(model, cache, count, ids):
    """Logits `[count, V]` of a greedy loop (generate drops a Phi-3's cache at the length where its RoPE changes)."""
    model(prompt(1, 5))  # dynamic RoPE remembers the longest sequence it saw: start anew
    logits = []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(ids, past_key_values=cache).logits[0, -1])
            ids = logits[-1].argmax().view(1, 1)
    return torch.stack(logits)


@pytest.mark.parametrize("family", LIMITED)
def test_drafts_end_where_learned_positions_end(family):
    torch.manual_seed(0)
    model = LIMITED[family]().eval()
    assert_same(model, prompt(1, 50), lambda: OasisCache(model, speculate=True, draft_tokens=4), max_new_tokens=40)
    cache = OasisCache(model, budget=32)
    assert generate(model, prompt(1, 50), cache, max_new_tokens=40).sequences.shape[1] == 90


def test_longrope_is_not_scaled_by_a_draft():
    torch.manual_seed(0)
    model = longrope().eval()
    ids = prompt(1, 6).repeat(1, 7)[:, :40]
    wanted = by_hand(model, DynamicCache(config=model.config), 60, ids)
    cache = OasisCache(model, speculate=True, draft_tokens=6)
    torch.testing.assert_close(by_hand(model, cache, 60, ids), wanted, atol=1e-4, rtol=0)
    reach = cache.stepper.reach
    assert reach.most == 64
    assert [reach.holds(n, n, 7) for n in (57, 58, 64, 65)] == [True, False, False, True]
    assert not reach.holds(70, 60, 7)  # padding: its last position is 59 or 69


def test_dynamic_rope_has_no_drafts_beyond_its_length():
    torch.manual_seed(0)
    model = dynamic().eval()
    wanted = by_hand(model, DynamicCache(config=model.config), 60, prompt(1, 40))
    cache = OasisCache(model, speculate=True, draft_tokens=4)
    with pytest.warns(UserWarning, match="Beyond 64 positions .* stacks no drafts there") as told:
        got = by_hand(model, cache, 60, prompt(1, 40))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert len([w for w in told if "stacks no drafts" in str(w.message)]) == 1


def test_positions_that_do_not_begin_at_zero_are_left_to_the_model():
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=96, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96,
        is_decoder=True, pad_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = RobertaForCausalLM(config).eval()
    ids = prompt(1, 6).repeat(1, 7)
    wanted = by_hand(model, DynamicCache(config=config), 20, ids)
    for speculate in (False, True):
        got = by_hand(model, OasisCache(model, speculate=speculate), 20, ids)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_usual_rope_has_no_limit():
    reach = OasisCache(tiny("llama")).stepper.reach
    assert reach.most is None and reach.holds(10**6, 10**6, 7) and not reach.own
