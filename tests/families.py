"""Tiny random models of the families that people bring, as close to the real ones as their size allows: what
`tests/test_support.py` puts through the equality matrix, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCAB = 96
# Gaussian weights ten times the usual: attention and next tokens then differ sharply from position to position.
SIZE = dict(
    vocab_size=VOCAB, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip
WINDOW = dict(sliding_window=24)
HYBRID = dict(**WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SMALL_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)


def causal(kind: str, *drop: str, **knobs: Any) -> Callable[[], Any]:
    """Makes a causal model of a `model_type`: the sizes above without `drop`, and its own knobs."""

    def make() -> Any:
        sizes = {name: value for name, value in SIZE.items() if name not in drop}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **knobs}))

    return make


def rope(kind: str, **knobs: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **knobs}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip
LONGROPE = rope(
    "longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=8.0, original_max_position_embeddings=64,
    partial_rotary_factor=1.0,
)  # fmt: skip

SERVED: dict[str, Callable[[], Any]] = {
    "Llama 3.1 to 3.3 (scaled RoPE)": causal("llama", **LLAMA3),
    "Llama with YaRN": causal("llama", **rope("yarn", factor=4.0, original_max_position_embeddings=512)),
    "Llama with dynamic RoPE": causal("llama", **rope("dynamic", factor=4.0)),
    "Qwen2, Qwen2.5 (biases, groups of 7)": causal(
        "qwen2", hidden_size=224, num_attention_heads=14, num_key_value_heads=2
    ),
    "Qwen2 with windows": causal("qwen2", **HYBRID, use_sliding_window=True, max_window_layers=1),
    "Qwen2-MoE": causal("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "Qwen3": causal("qwen3", head_dim=32),
    "Qwen3-MoE": causal("qwen3_moe", **EXPERTS, head_dim=16),
    "Mistral": causal("mistral", sliding_window=None),
    "Mistral 7B v0.1 (all layers slide)": causal("mistral", **WINDOW),
    "Ministral (hybrid)": causal("ministral", **HYBRID, head_dim=16),
    "Mixtral": causal("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Phi-3, Phi-4": causal("phi3", sliding_window=None),
    "Phi-3 128K (long RoPE)": causal("phi3", sliding_window=None, **LONGROPE, original_max_position_embeddings=64),
    "Phi-3.5-MoE": causal("phimoe", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Phi-1, Phi-2": causal("phi"),
    "Gemma": causal("gemma", head_dim=32),
    "Gemma 2 without soft-capping": causal(
        "gemma2", **HYBRID, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=None
    ),
    "Gemma 3 (hybrid)": causal("gemma3_text", **HYBRID, head_dim=16),
    "Gemma 4 (head sizes differ)": causal(
        "gemma4_text", **HYBRID, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB, tie_word_embeddings=False,
    ),
    "gpt-oss (sinks, hybrid)": lambda: tiny("gpt_oss"),
    "OLMo, OLMo 2": causal("olmo2"),
    "OLMo 3 (hybrid)": causal("olmo3", **HYBRID),
    "OLMoE": causal("olmoe", num_experts=4, num_experts_per_tok=2),
    "SmolLM3 (layers without RoPE)": causal("smollm3", no_rope_layers=[1, 0]),
    "GLM-4": causal("glm4", head_dim=16),
    "GLM-4.5": causal(
        "glm4_moe", head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    ),
    "Granite 3": causal("granite", attention_multiplier=0.1, residual_multiplier=0.5, logits_scaling=2.0),
    "Granite-MoE": causal("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "Command R": causal("cohere", logit_scale=1.0),
    "Command R7B, Command A (hybrid)": causal("cohere2", **HYBRID, logit_scale=1.0),
    "StarCoder2 (all layers slide)": causal("starcoder2", **WINDOW),
    "StarCoder2 without windows": causal("starcoder2", sliding_window=None),
    "Seed-OSS": causal("seed_oss", head_dim=16),
    "ERNIE 4.5": causal("ernie4_5", head_dim=16),
    "EXAONE 4 (hybrid)": causal("exaone4", **HYBRID, head_dim=16),
    "Hunyuan": causal("hunyuan_v1_dense", head_dim=16),
    "MiniMax-M2": causal("minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "Nemotron": causal("nemotron"),
    "Apertus": causal("apertus"),
    "GPT-2": causal("gpt2", "num_key_value_heads", "intermediate_size"),
    "GPT-J": causal("gptj", "num_key_value_heads", "intermediate_size", rotary_dim=8),
    "CodeGen": causal("codegen", "num_key_value_heads", "intermediate_size", rotary_dim=8, num_attention_heads=4),
    "GPT-NeoX, Pythia": causal("gpt_neox", "num_key_value_heads"),
    "OPT": causal("opt", "num_key_value_heads", "intermediate_size", word_embed_proj_dim=96, ffn_dim=96),
}  # fmt: skip


def seq2seq(kind: str, *drop: str, **knobs: Any) -> Callable[[], Any]:
    """As `causal`, of an encoder-decoder."""

    def make() -> Any:
        return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, vocab_size=32, **knobs))

    return make


_MLA = dict(n_routed_experts=4, n_group=1, topk_group=1, kv_lora_rank=16, qk_rope_head_dim=8)
_LINEAR = dict(layer_types=["linear_attention", "full_attention"])

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "T5, FLAN-T5": (seq2seq("t5", d_model=16, num_layers=1, num_heads=2), "encoder-decoder"),
    "BART, mBART, Pegasus": (seq2seq("bart", d_model=16, encoder_layers=1, decoder_layers=1), "encoder-decoder"),
    "BERT, RoBERTa and other encoders": (causal("bert", "num_key_value_heads"), "not causal"),
    "DeepSeek-V2": (causal("deepseek_v2", **_MLA), "latent attention (MLA)"),
    "DeepSeek-V3, R1, Kimi K2": (causal("deepseek_v3", **_MLA), "latent attention (MLA)"),
    "MiniCPM3": (causal("minicpm3", kv_lora_rank=16, qk_rope_head_dim=8), "latent attention (MLA)"),
    "Llama 4": (causal("llama4_text", layer_types=["chunked_attention"] * 2), "chunked_attention"),
    "Gemma 2": (causal("gemma2", head_dim=16), "soft-caps attention logits"),
    "Gemma 3n": (
        causal("gemma3n_text", **{**HYBRID, "layer_types": HYBRID["layer_types"] * 2}, num_hidden_layers=4,
               num_kv_shared_layers=2, head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
               intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4, laurel_rank=8),
        "share keys and values",
    ),
    "Gemma 4 E2B, E4B": (
        causal("gemma4_text", **{**HYBRID, "layer_types": HYBRID["layer_types"] * 2}, num_hidden_layers=4,
               num_kv_shared_layers=2, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=8,
               vocab_size_per_layer_input=VOCAB),
        "share keys and values",
    ),
    "MiMo-V2-Flash": (
        causal("mimo_v2_flash", head_dim=32, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
               topk_group=1, moe_intermediate_size=32),
        "its values",
    ),
    "Mamba, Falcon-Mamba": (causal("mamba", "num_attention_heads", "num_key_value_heads"), "linear_attention"),
    "Jamba": (causal("jamba"), "linear_attention"),
    "Falcon-H1": (causal("falcon_h1", mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16), "hybrid"),
    "Granite 4 (hybrid)": (
        causal("granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=12, mamba_d_head=16),
        "linear_attention",
    ),
    "Nemotron-H": (causal("nemotron_h"), "linear_attention"),
    "Qwen3-Next": (causal("qwen3_next", **_LINEAR), "linear_attention"),
    "Qwen3.5": (causal("qwen3_5_text", **_LINEAR), "linear_attention"),
    "MiniMax-01": (causal("minimax", **_LINEAR), "linear_attention"),
    "LFM2": (causal("lfm2", layer_types=["conv", "full_attention"]), "conv"),
    "RecurrentGemma": (causal("recurrent_gemma"), "has layers of type"),
    "RWKV": (causal("rwkv", "num_attention_heads", "num_key_value_heads"), "takes no cache"),
    "BLOOM": (causal("bloom", "num_key_value_heads"), "attention functions from outside"),
    "MPT": (causal("mpt", "num_key_value_heads"), "attention functions from outside"),
    "Falcon 1, 2": (causal("falcon", "num_key_value_heads"), "attention functions from outside"),
    "StableLM": (causal("stablelm"), "attention functions from outside"),
    "DiffLlama": (causal("diffllama"), "attends twice a layer"),
    "Doge": (causal("doge"), "masks of its own"),
    "JetMoE": (
        causal("jetmoe", "num_attention_heads", kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
        "more KV heads",
    ),
}  # fmt: skip
"""Each with a part of the reason."""


def refused(family: str) -> torch.nn.Module:
    """A model of the family, of no memory."""
    with torch.device("meta"):
        return REFUSED[family][0]()


@functools.cache
def served(family: str) -> torch.nn.Module:
    """A model of the family with fixed random weights, shared by all tests: do not change it."""
    torch.manual_seed(20)
    model = SERVED[family]().float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
