"""A new head for a target, and a head as files in the plain (SpecForge) layout."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors

from .. import supported
from ..drafters.eagle3 import checkpoint, files
from ..drafters.eagle3.head import Eagle3Head, HeadConfig, rope
from ..fused import decoder_layers
from .config import TrainConfig

LIKE_LLAMA = "LlamaForCausalLMEagle3"


def head_config(model: Any, config: TrainConfig, longest: int) -> HeadConfig:
    """A head of the target's own size."""
    target = supported.text_config(model)
    layers, heads = target.num_hidden_layers, target.num_attention_heads
    small = target.vocab_size <= 1 << 16
    ids = min(config.draft_vocab or (8192 if small else 32000), target.vocab_size)
    told = dict(getattr(target, "rope_parameters", None) or {})
    told = dict(told.get("full_attention", told))
    made = HeadConfig(
        hidden_size=target.hidden_size, target_hidden_size=target.hidden_size,
        intermediate_size=config.intermediate or target.intermediate_size, num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size, draft_vocab_size=ids,
        taps=tuple(sorted(config.taps or default_taps(layers))), max_position_embeddings=longest,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **told},
    )  # fmt: skip
    try:
        rope(made)
    except (ValueError, KeyError):  # one that depends on the text's length
        plain = {"rope_type": "default", "rope_theta": float(told.get("rope_theta", 10000.0))}
        made = replace(made, rope_parameters=plain)
    return made


def default_taps(layers: int) -> tuple[int, ...]:
    """As EAGLE has them; of models with few layers those that there are."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, layers // 2 + 1)}))


def new_head(model: Any, config: HeadConfig, ids: torch.Tensor, seed: int) -> Eagle3Head:
    """A head in float32 on the model's device that starts as the target's last layer over its highest tap, with the
    target's final norm and head; what that does not give is random."""
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0, 0.02, generator=generator)
    if head.d2t is not None and head.t2d is not None:
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d.zero_().index_fill_(0, ids, True)
    size, last = config.hidden_size, list(decoder_layers(model))[-1]
    with torch.no_grad():
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[ids.to(device)])
        head.fc.weight.zero_()[:, -size:] = torch.eye(size)
        try:
            _copy_layer(head, last, size)
        except (AttributeError, RuntimeError) as error:
            warnings.warn(f"The head's layer starts random, not from the target's last: {error}", stacklevel=2)
        norm = getattr(getattr(model, "model", None), "norm", None)
        if norm is not None and norm.weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(norm.weight)
    return head.to(device)


def _copy_layer(head: Eagle3Head, last: Any, size: int) -> None:
    layer = head.midlayer
    theirs, own = last.self_attn, layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own, name).weight[:, size:].copy_(getattr(theirs, name).weight)
    own.o_proj.weight.copy_(theirs.o_proj.weight)
    inner = last.mlp.down_proj.weight.shape[1]
    width = min(inner, layer.mlp.down_proj.weight.shape[1])
    layer.mlp.gate_proj.weight[:width].copy_(last.mlp.gate_proj.weight[:width])
    layer.mlp.up_proj.weight[:width].copy_(last.mlp.up_proj.weight[:width])
    layer.mlp.down_proj.weight[:, width:].zero_()
    layer.mlp.down_proj.weight[:, :width].copy_(last.mlp.down_proj.weight[:, :width])
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)


def draft_ids(head: Eagle3Head) -> torch.Tensor:
    """Ids of the target's vocabulary that the head can propose, `[Vd]` ascending."""
    own = torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)
    return head.target_ids(own)


def save(head: Eagle3Head, folder: Path, model: Any) -> None:
    """`config.json` and `model.safetensors` (bfloat16), as other engines read them; no embeddings."""
    config, target = head.config, supported.text_config(model)
    told = dict(config.rope_parameters)
    base, kind = told.pop("rope_theta"), told.get("rope_type", "default")
    entries: dict[str, Any] = {
        "architectures": [LIKE_LLAMA], "model_type": "llama", "hidden_act": config.hidden_act,
        "attention_bias": False, "mlp_bias": False, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim, "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": base, "rope_scaling": None if kind == "default" else told,
        "max_position_embeddings": config.max_position_embeddings, "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "initializer_range": 0.02, "use_cache": True,
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }  # fmt: skip
    layers = target.num_hidden_layers
    if config.taps != tuple(sorted((2, layers // 2, layers - 3))):
        entries["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    (folder / "config.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    unfinished = folder / "model.safetensors.part"
    # Not by its own name for a file, which would be one that only its owner may read.
    unfinished.write_bytes(safetensors.save(tensors, metadata={"format": "pt"}))
    unfinished.replace(folder / "model.safetensors")


def load(folder: Path, model: Any, dtype: torch.dtype) -> Eagle3Head:
    """A head in any public layout. Raises `DrafterError` as the drafter does."""
    config, tensors = checkpoint.parse(*files.read(folder), supported.text_config(model))
    head = checkpoint.build(config, tensors)
    return head.to(device=model.get_input_embeddings().weight.device, dtype=dtype)
