"""Tiny random models of each family, all of them with real attention structure (GQA, windows, sinks, experts)."""

from __future__ import annotations

import functools

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 96
_SIZE = dict(
    vocab_size=VOCAB, hidden_size=96, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Gaussian weights ten times the usual: attention and next tokens then differ sharply from position to position.
_SHARP = dict(initializer_range=0.2)

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZE, **_SHARP)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZE, **_SHARP)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_SIZE, **_SHARP, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**{**_SIZE, "num_hidden_layers": 4}, **_SHARP, sliding_window=24, sliding_window_pattern=2,
            tie_word_embeddings=False)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZE, **_SHARP, sliding_window=24)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SIZE, **_SHARP, sliding_window=None)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **{**_SIZE, "num_hidden_layers": 4}, **_SHARP, sliding_window=24, num_local_experts=3,
            # All experts: rounding would tip the routing of sharp random weights, and dense bf16 itself would then be
            # off by 5 in a logit from float32. Qwen3-MoE's routing stays stable and covers it.
            num_experts_per_tok=3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
}  # fmt: skip


@functools.cache
def tiny(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model of the family with fixed random weights, shared by all tests: do not change it."""
    torch.manual_seed(20)
    model = FAMILIES[family]().to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids `[rows, length]`, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch of rows of these lengths."""
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
