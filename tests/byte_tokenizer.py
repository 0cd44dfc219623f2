"""A real tokenizer of a token a byte, with a chat template, and a small model that reads it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    vocab = {name: i for i, name in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    inner = Tokenizer(BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    out = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[2], additional_special_tokens=list(SPECIAL[:2])
    )
    out.chat_template = TEMPLATE
    return out


def model(seed: int = 0, layers: int = 2) -> Any:
    """A new Llama of 259 tokens with random weights, in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
