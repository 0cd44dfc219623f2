"""Which models a working set can serve, told from their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import parallel
from .config import ConfigError


class UnsupportedModelError(ConfigError):
    """This model can't run on an `OasisCache`; the message names the cause and the way out."""


def text_config(model: Any) -> Any:
    """The decoder's own config, which its attention modules read."""
    return model.config.get_text_config(decoder=True)


def kv_shape(config: Any) -> tuple[int, int]:
    """KV heads and head_dim of one layer, by a decoder's own config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def plain_model(model: Any) -> Any:
    """The model inside `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


def has_head(model: Any) -> bool:
    """Whether a model gives logits."""
    return model.get_output_embeddings() is not None


def layer_windows(model: Any) -> list[int | None]:
    """The sliding window of each decoder layer in tokens, None for full attention.

    Raises:
        UnsupportedModelError: for anything a working set can't serve.
    """
    config = text_config(model)
    for refusal in refusals(model, config):
        raise UnsupportedModelError(f"OasisCache does not support {type(model).__name__}: {refusal}")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def refusals(model: Any, config: Any) -> Iterator[str]:
    """Reasons not to serve a model, each with the way out."""
    other = "use DynamicCache for it."
    if getattr(model.config, "is_encoder_decoder", False):
        yield f"it is an encoder-decoder and its cross-attention has no next block to predict; {other}"
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None):
        yield f"its latent attention (MLA) caches no per-head keys; {other}"
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        yield f"it has layers of type {', '.join(sorted(odd))}, only full and sliding attention work; {other}"
    if getattr(config, "num_kv_shared_layers", 0):
        yield f"its layers share keys and values; {other}"
    if getattr(config, "attention_chunk_size", None):
        yield f"it attends in chunks; {other}"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"it soft-caps attention logits; {other}"
    whole = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if whole or getattr(config, "is_causal", True) is False:
        yield f"its attention is not causal; {other}"
    if not getattr(model, "_supports_attention_backend", False):
        yield f"its code does not take attention functions from outside; {other}"
    yield from parallel.refusals(model, kv_shape(config)[0])
