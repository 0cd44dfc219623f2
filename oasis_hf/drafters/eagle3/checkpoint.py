"""Every public layout of EAGLE-3 heads to one `HeadConfig` and one set of names.

SafeAILab (`LlamaForCausalLM`), SpecForge and lmsys (`LlamaForCausalLMEagle3`) and AngelSlim (`Eagle3LlamaForCausalLM`)
write the plain layout; speculators (`Eagle3DraftModel`, formerly `Eagle3Speculator`) nest the layer's configuration and
call the layer `layers.0`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..base import DrafterError
from .head import THETA, Eagle3Head, HeadConfig, rope

TAPS = 3
"""Layers that a head taps unless its config lists them."""

_IGNORED = re.compile(r"verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")


def parse(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Any, taps: tuple[int, ...] | None = None
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head's files, checked against themselves and against the target.

    Args:
        config, tensors: as `files.read` gives them. target: the target's text config.
        taps: layers whose input is tapped, instead of those that the config means.

    Returns:
        The configuration, and the state dict of an `Eagle3Head` made from it.

    Raises:
        DrafterError: no such head, one that contradicts itself, or one made for another model.
    """
    tensors = _plain_names(tensors)
    nested = config.get("transformer_layer_config")
    layer: dict[str, Any] = nested or config
    more = [1 + int(name.split(".")[1]) for name in tensors if name.startswith("layers.")]
    layers = max(layer.get("num_hidden_layers") or 1, *more, 1)
    if layers > 1:
        raise DrafterError(f"The drafter has {layers} decoder layers, but only heads of one can be run.")
    if "fc.weight" not in tensors:
        raise DrafterError("The drafter is no EAGLE-3 head: it has no tensor 'fc.weight'.")
    taps = _taps(config, target.num_hidden_layers, taps)
    wide, vocabulary = tensors["fc.weight"].shape[1], layer.get("vocab_size")
    if wide != len(taps) * target.hidden_size:
        raise DrafterError(
            f"The drafter was made for another model: it taps {len(taps)} hidden states {wide:,} wide together, but "
            f"this model's are {target.hidden_size:,} wide each."
        )
    if vocabulary != target.vocab_size:
        raise DrafterError(
            f"The drafter was made for another vocabulary: {vocabulary} ids, this model has {target.vocab_size}."
        )
    wanted = config.get("target_hidden_size") or target.hidden_size
    if wanted != target.hidden_size:
        raise DrafterError(
            f"The drafter was made for another model: its target_hidden_size is {wanted:,}, this model's hidden size "
            f"is {target.hidden_size:,}."
        )
    head = _head_config(config, layer, tensors, taps, wanted)
    own = "embed_tokens.weight" in tensors
    if not own and head.hidden_size != target.hidden_size:
        raise DrafterError(
            f"The drafter ships no embeddings, and this model's are {target.hidden_size:,} wide where it needs "
            f"{head.hidden_size:,}."
        )
    return head, _checked(head, _vocabulary(head, tensors))


def build(config: HeadConfig, tensors: Mapping[str, torch.Tensor]) -> Eagle3Head:
    """The head itself, its tensors as they were read (their dtypes too)."""
    head = Eagle3Head(config, device="meta")
    head.load_state_dict(dict(tensors), strict=True, assign=True)
    return head.requires_grad_(False).eval()


def _plain_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(draft_model\.)?(model\.)?", "", name)
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
        if not _IGNORED.fullmatch(name):
            plain[name] = tensor
    return plain


def _taps(config: dict[str, Any], layers: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers whose input is tapped. Ids at the top level are that; those in `eagle_config` are layers whose output
    is meant if the first is 1 (SpecForge), else inputs too; without any it is as EAGLE has it."""
    key, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    if given is not None:
        taps = list(given)
    elif config.get(key):
        taps = list(config[key])
    elif nested.get(key):
        taps = [i + 1 for i in nested[key]] if nested[key][0] == 1 else list(nested[key])
    else:
        taps = [2, layers // 2, layers - 3]
    if not taps or not all(type(i) is int and 0 <= i <= layers for i in taps) or len(set(taps)) < len(taps):
        raise DrafterError(
            f"The drafter taps the inputs of layers {taps}, but this model has {layers} layers: they must be different "
            f"and lie from 0 to {layers}."
        )
    return tuple(sorted(taps))


def _head_config(
    config: dict[str, Any], layer: dict[str, Any], tensors: dict[str, torch.Tensor], taps: tuple[int, ...], wide: int
) -> HeadConfig:
    needed = ["hidden_size", "num_attention_heads"]
    missing = [key for key in needed if not layer.get(key)]
    if missing:
        raise DrafterError(f"The drafter's config.json lacks {', '.join(missing)}.")
    nested, eagle = layer is not config, config.get("eagle_config") or {}

    def told(flag: str) -> bool | None:
        return next((bool(part[flag]) for part in (config, eagle, layer) if part.get(flag) is not None), None)

    def flag(name: str, tensor: str, told: bool | None) -> bool:
        if told is not None and told != (tensor in tensors):
            raise DrafterError(
                f"The drafter contradicts itself: its config says {name} is {told}, and {tensor!r} is "
                f"{'among' if tensor in tensors else 'not among'} its tensors."
            )
        return tensor in tensors

    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    size, heads = layer["hidden_size"], layer["num_attention_heads"]
    # vLLM's default for speculators' heads, whose older ones do not write it; EAGLE's own is the other way.
    before = told("norm_before_residual")
    output = bool(told("norm_output"))
    if output and not nested:
        warnings.warn(
            "The drafter's norm_output is read as SpecForge means it: drafts after the first go on from what is not "
            "normalised.",
            stacklevel=2,
        )
        output = False
    lm_head, qwen = tensors.get("lm_head.weight"), layer.get("model_type") == "qwen3"
    ids = config.get("draft_vocab_size") or (lm_head.shape[0] if lm_head is not None else layer["vocab_size"])
    made = HeadConfig(
        hidden_size=size,
        target_hidden_size=wide,
        intermediate_size=layer.get("intermediate_size") or _rows(tensors, mlp + "gate_proj.weight"),
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or size // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=ids,
        taps=taps,
        max_position_embeddings=layer.get("max_position_embeddings") or 2048,
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        hidden_act=layer.get("hidden_act") or "silu",
        rope_parameters=_rope(layer),
        attention_bias=flag("attention_bias", attention + "q_proj.bias", told("attention_bias")),
        output_bias=attention + "o_proj.bias" in tensors,
        mlp_bias=flag("mlp_bias", mlp + "gate_proj.bias", told("mlp_bias")),
        fc_bias="fc.bias" in tensors,
        qk_norm=flag("qk_norm (a qwen3 layer)", attention + "q_norm.weight", True if qwen else None),
        norm_before_residual=nested if before is None else before,
        norm_before_fc=flag("norm_before_fc", "input_norm.weight", told("norm_before_fc")),
        fc_norm=flag("fc_norm", "fc_norm.0.weight", told("fc_norm")),
        norm_output=output,
        own_embeddings="embed_tokens.weight" in tensors,
        own_lm_head=lm_head is not None,
    )
    if not made.own_lm_head and ids != made.vocab_size:
        raise DrafterError(
            f"The drafter has no 'lm_head.weight', and this model's gives {made.vocab_size} ids, not the {ids} of its "
            "draft vocabulary."
        )
    try:
        rope(made)
    except (ValueError, KeyError) as error:
        raise DrafterError(f"The drafter's RoPE {dict(made.rope_parameters)} can't be made: {error}") from error
    return made


def _rows(tensors: dict[str, torch.Tensor], name: str) -> int:
    return tensors[name].shape[0] if name in tensors else 1


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it, from its keys or the old ones. No base means 10000, never the target's."""
    told = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    kind = told.pop("type", None)
    told["rope_type"] = told.get("rope_type") or kind or "default"
    told["rope_theta"] = float(told.get("rope_theta") or layer.get("rope_theta") or THETA)
    if told["rope_type"] in ("llama3", "yarn"):
        told.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings") or 2048)
    return told


def _vocabulary(config: HeadConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tables of the draft vocabulary checked against each other; one that is missing is made from the other."""
    tensors = dict(tensors)
    offsets, members = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids, vocabulary = config.draft_vocab_size, config.vocab_size
    sizes = (("d2t", offsets, ids), ("t2d", members, vocabulary))
    for name, table, size in sizes:
        if table is not None and list(table.shape) != [size]:
            raise DrafterError(f"The drafter's table {name!r} has shape {list(table.shape)}, not [{size}].")
    if members is not None and int(members.bool().sum()) != ids:
        raise DrafterError(
            f"The drafter's table 't2d' marks {int(members.bool().sum())} ids, but its draft vocabulary has {ids}."
        )
    if offsets is None and members is None:
        if ids != vocabulary:
            raise DrafterError(
                f"The drafter proposes {ids} ids of this model's {vocabulary}, and has no table 'd2t' that says which."
            )
        return tensors
    own = torch.arange(ids)
    marked = None if members is None else members.bool().nonzero().flatten()
    if offsets is None:
        assert marked is not None
        offsets = marked - own
    meant = offsets.long() + own
    listed = int(meant[0]) >= 0 and int(meant[-1]) < vocabulary and bool((meant.diff() > 0).all())
    # Alone, a table of which every entry is larger than the one before is far likelier one of ids.
    absolute = (
        torch.equal(offsets.long(), marked) if marked is not None else ids > 1 and bool((offsets.diff() > 0).all())
    )
    if marked is None and listed and not absolute:
        marked = meant
    if marked is None or not torch.equal(marked, meant):
        raise DrafterError(
            "The drafter's table 'd2t' holds the ids themselves, where offsets to them are needed."
            if absolute
            else f"The drafter's table 'd2t' does not give {ids} of {vocabulary} ids in ascending order, those that "
            "its table 't2d' marks."
        )
    if ids != vocabulary:
        member = torch.zeros(vocabulary, dtype=torch.bool)
        tensors.update(d2t=offsets.long(), t2d=member.index_fill(0, marked, True))
    return tensors


def _checked(config: HeadConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, if they are those of such a head, each in its shape."""
    expected = {name: list(tensor.shape) for name, tensor in Eagle3Head(config, device="meta").state_dict().items()}
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise DrafterError(f"The drafter is truncated: it lacks {_some(missing)}.")
    if unknown:
        raise DrafterError(f"The drafter has tensors that an EAGLE-3 head of its config has not: {_some(unknown)}.")
    for name, shape in expected.items():
        if list(tensors[name].shape) != shape:
            raise DrafterError(
                f"The drafter's tensor {name!r} has shape {list(tensors[name].shape)}, but its config means {shape}."
            )
    return tensors


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
