"""Tiny models that take images beside text, their language model one of the families: with text alone and with an
image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from families import SIZE
from matrix import close, dense
from tiny import prompt
from transformers import AutoConfig, AutoModelForImageTextToText

from oasis_hf import OasisCache

IMAGE = 90
_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
_SQUARE = dict(image_size=28, patch_size=14)
_TEXT = {**SIZE, "head_dim": 16}


def _model(kind: str, text: dict[str, Any], vision: dict[str, Any], **knobs: Any) -> Any:
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, image_token_id=IMAGE, pad_token_id=0, **knobs
    )
    return AutoModelForImageTextToText.from_config(config)


def _qwen(kind: str, **vision: Any) -> Callable[[], Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower = dict(
        depth=1, hidden_size=32, num_heads=2, out_hidden_size=96, intermediate_size=32, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    ids = dict(video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    return lambda: _model(kind, {**_TEXT, "rope_parameters": rope}, {**tower, **vision}, **ids)


VISION: dict[str, Callable[[], Any]] = {
    "Qwen2-VL": _qwen("qwen2_vl", embed_dim=32, hidden_size=96, mlp_ratio=1),
    "Qwen2.5-VL": _qwen("qwen2_5_vl"),
    "Qwen3-VL": _qwen("qwen3_vl", deepstack_visual_indexes=[0], num_position_embeddings=16),
    "LLaVA": lambda: _model(
        "llava", {**_TEXT, "model_type": "llama"},
        {**_VISION, **_SQUARE, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=IMAGE, vision_feature_layer=-1,
    ),
    "InternVL": lambda: _model(
        "internvl", {**_TEXT, "model_type": "qwen2"},
        {**_VISION, "model_type": "internvl_vision", "image_size": (28, 28), "patch_size": (14, 14)},
        downsample_ratio=0.5,
    ),
    "SmolVLM": lambda: _model(
        "smolvlm", {**_TEXT, "model_type": "llama"}, {**_VISION, **_SQUARE, "model_type": "smolvlm_vision"},
        scale_factor=1,
    ),
    "Gemma 3": lambda: _model(
        "gemma3", {**_TEXT, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        {**_VISION, "image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4, image_token_index=IMAGE,
    ),
    "PaliGemma": lambda: _model(
        "paligemma", {**_TEXT, "model_type": "gemma"},
        {**_VISION, **_SQUARE, "model_type": "siglip_vision_model", "projection_dim": 96},
        projection_dim=96, image_token_index=IMAGE,
    ),
}  # fmt: skip


@functools.cache
def vision(family: str) -> Any:
    """A model of the family with fixed random weights, shared by all tests: do not change it."""
    torch.manual_seed(20)
    model = VISION[family]().float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _text(family: str) -> dict[str, Any]:
    ids = prompt(1, 40).clamp(max=80)
    return {"input_ids": ids, **_marked(family, ids)}


def _marked(family: str, ids: torch.Tensor) -> dict[str, Any]:
    kind = {"Gemma 3": "token_type_ids", "PaliGemma": "token_type_ids"}.get(family, "mm_token_type_ids")
    return {kind: (ids == IMAGE).int()} if "Qwen" in family or "Gemma" in family else {}


def _image(family: str) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = prompt(1, 40).clamp(max=80)
    ids[0, 6 : 6 + (1 if family == "InternVL" else 4)] = IMAGE
    pixels = torch.randn(1, 3, 28, 28)
    if "Qwen" in family:
        ids[0, 5], ids[0, 10] = 92, 93
        given = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    else:
        given = {"pixel_values": pixels[None] if family == "SmolVLM" else pixels}
    return {"input_ids": ids, **given, **_marked(family, ids)}


def _same(family: str, inputs: dict[str, Any], **knobs: Any) -> None:
    model, outs = vision(family), []
    for cache in (OasisCache(model, **knobs), dense(model)):
        outs.append(
            model.generate(
                **inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )
        )  # fmt: skip
    assert torch.equal(*(out.sequences for out in outs))
    for a, b in zip(*(out.logits for out in outs), strict=True):
        close(a, b)


def text_alone(family: str) -> None:
    _same(family, _text(family))


def image(family: str) -> None:
    _same(family, _image(family))


def image_with_drafts(family: str) -> None:
    _same(family, _image(family), speculate=True, draft_tokens=2)


SEEN: dict[str, Callable[[str], None]] = {
    "text": text_alone, "an image": image, "an image, drafts accepted": image_with_drafts,
}  # fmt: skip
