"""Which models a working set can serve, told from their configuration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from . import parallel
from .config import ConfigError


class UnsupportedModelError(ConfigError):
    """This model can't run on an `OasisCache`; the message names the cause and the way out."""


def text_config(model: Any) -> Any:
    """The decoder's own config, which its attention modules read."""
    return model.config.get_text_config(decoder=True)


def layer_config(config: Any, index: int) -> Any:
    """One layer's own config: where layers differ (Gemma 4) the common one does not tell."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[index]


def kv_shape(config: Any, index: int | None = None) -> tuple[int, int]:
    """KV heads and head_dim, by a decoder's own config: of one layer, or of those with full attention (None)."""
    if index is None:
        kinds = getattr(config, "layer_types", None) or []
        index = kinds.index("full_attention") if "full_attention" in kinds else 0
    own = layer_config(config, index)
    heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    return heads, getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads


def plain_model(model: Any) -> Any:
    """The model inside `torch.compile(model)`, or under an adapter (PEFT), whose layers it has.

    Raises:
        UnsupportedModelError: the adapter is a prompt, not layers.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"OasisCache does not support {type(model).__name__}: its adapter puts a prompt of its own before every "
            "text; use DynamicCache for it."
        )
    return plain_model(model.get_base_model())


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
    kinds, off = getattr(config, "layer_types", None), getattr(config, "use_sliding_window", True) is False
    windows: list[int | None] = []
    for index in range(config.num_hidden_layers if kinds is None else len(kinds)):
        window = None if off else getattr(layer_config(config, index), "sliding_window", None)
        windows.append((window or None) if kinds is None or kinds[index] == "sliding_attention" else None)
    return windows


CACHE_NAMES = {"cache", "past_key_values"}  # transformers 5.24 renamed the argument

ODD = {
    "diffllama": "it attends twice a layer",
    "dory": "it attends twice a layer",
    "hrm_text": "it runs its layers several times a token",
    "doge": "its attention makes masks of its own",
    "jetmoe": "its experts attend with more KV heads than its configuration names",
}
"""Model types that take attention functions from outside but use them in other ways; `attach` refuses the like of them
when it meets it."""


def refusals(model: Any, config: Any) -> Iterator[str]:
    """Reasons not to serve a model, each with the way out."""
    other = "use DynamicCache for it."
    if getattr(model.config, "is_encoder_decoder", False):
        yield f"it is an encoder-decoder and its cross-attention has no next block to predict; {other}"
    latent = getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None)
    if latent:
        yield f"its latent attention (MLA) caches no per-head keys; {other}"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    odd = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if odd:
        yield f"it has layers of type {', '.join(sorted(odd))}, only full and sliding attention work; {other}"
    if getattr(config, "num_kv_shared_layers", 0):
        yield f"its layers share keys and values; {other}"
    if getattr(config, "attention_chunk_size", None):
        yield f"it attends in chunks; {other}"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"it soft-caps attention logits; {other}"
    if getattr(config, "alibi", False) is True:
        yield f"its attention adds a bias by distance (ALiBi); {other}"
    if getattr(config, "model_type", None) in ODD:
        yield f"{ODD[config.model_type]}; {other}"
    if not odd and not latent:
        yield from _unlike(config, other)
    whole = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if whole or _encodes(model, config) or getattr(config, "is_causal", True) is False:
        yield f"its attention is not causal; {other}"
    if not CACHE_NAMES & set(inspect.signature(type(model).forward).parameters):
        yield f"its forward takes no cache of keys and values; {other}"
    if not getattr(model, "_supports_attention_backend", False):
        yield f"its code does not take attention functions from outside; {other}"
    yield from parallel.refusals(model, kv_shape(config)[0])


def _encodes(model: Any, config: Any) -> bool:
    """Whether it is an encoder that could be a decoder (BERT and its like)."""
    if getattr(config, "is_decoder", True) is not False or getattr(model.config, "is_encoder_decoder", False):
        return False
    return hasattr(sys.modules[type(model).__module__], "create_bidirectional_mask")


def _unlike(config: Any, other: str) -> Iterator[str]:
    """Layers with full attention whose keys and values could not stand in one pool of blocks."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
    if not hasattr(config, "num_attention_heads"):
        return
    shapes = sorted({kv_shape(config, index) for index, kind in enumerate(kinds) if kind == "full_attention"})
    if len(shapes) > 1:
        told = " and ".join(f"{heads} x {dim}" for heads, dim in shapes)
        yield f"its full-attention layers differ in KV heads x head_dim ({told}); {other}"
    values = getattr(config, "v_head_dim", None)
    if values and shapes and values != shapes[0][1]:
        yield f"its keys have head_dim {shapes[0][1]} and its values {values}; {other}"
