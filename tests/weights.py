"""Models whose weights are not plain ones, or that something else has wrapped: what a user hands to `OasisCache`."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import V, plain_config, target, weights, write
from matrix import dense
from torch import nn
from transformers import AutoModelForCausalLM

from oasis_hf import OasisCache
from oasis_hf.drafters import Eagle3Drafter


class Packed(nn.Module):
    """A linear layer of 4-bit weights, two a byte, with a scale and a zero an output: it has no `weight` to read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole = linear.weight.detach()
        low, high = whole.amin(1, keepdim=True), whole.amax(1, keepdim=True)
        self.register_buffer("low", low)
        self.register_buffer("scale", (high - low) / 15)
        steps = ((whole - low) / self.scale).round().to(torch.uint8)
        self.register_buffer("packed", steps[:, ::2] | steps[:, 1::2] << 4)
        self.bias = linear.bias

    def whole(self) -> torch.Tensor:
        steps = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)
        return steps * self.scale + self.low

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.whole().to(x.dtype), self.bias)


class PackedEmbedding(Packed):
    def __init__(self, embedding: nn.Embedding) -> None:
        linear = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        linear.weight = embedding.weight
        super().__init__(linear)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.whole())


def packed(model: Any, embeddings: bool = True) -> Any:
    """Every linear layer packed, the head too, and the embedding."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Packed(child))
    if embeddings:
        model.set_input_embeddings(PackedEmbedding(model.get_input_embeddings()))
    return model


def torchao(bits: int) -> Callable[[Any], Any]:
    def quantized(model: Any) -> Any:
        quantization = pytest.importorskip("torchao.quantization")
        kinds = {
            8: lambda: quantization.Int8WeightOnlyConfig(),
            4: lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantization.quantize_(model, kinds[bits]())
        return model

    return quantized


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def prompt_tuned(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model, config).eval()


def tied(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def offloaded(places: str) -> Callable[[Any], Any]:
    """By accelerate: parts on the CPU, and where `places` is "disk" most of it in files until it is needed."""

    def placed(model: Any) -> Any:
        pytest.importorskip("accelerate")
        folder = tempfile.TemporaryDirectory()
        model.save_pretrained(folder.name)
        names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(len(model.model.layers))), "lm_head"]
        split: Any = dict.fromkeys(names, places) | {"model.norm": "cpu", "model.rotary_emb": "cpu"}
        split["model.layers.0"] = "cpu"
        made = AutoModelForCausalLM.from_pretrained(folder.name, device_map=split, offload_folder=folder.name).eval()
        made.generation_config = model.generation_config
        made.kept = folder  # its files go with it
        return made

    return placed


def compiled(how: str) -> Callable[[Any], Any]:
    def made(model: Any) -> Any:
        torch._dynamo.reset()
        if how == "object":
            return torch.compile(model, backend="eager")
        if how == "forward":
            model.forward = torch.compile(model.forward, backend="eager")
        else:
            model.compile(backend="eager")
        return model

    return made


def cast(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda model: model.to(dtype)


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda model: model,
    "bfloat16": cast(torch.bfloat16),
    "float16": cast(torch.float16),
    "tied embeddings": tied,
    "int8, torchao": torchao(8),
    "int4, torchao": torchao(4),
    "4 bits packed (as GPTQ and AWQ layers are)": lambda model: packed(model, embeddings=False),
    "4 bits packed, embeddings too": packed,
    "LoRA (PEFT)": lora,
    "prompt tuning (PEFT)": prompt_tuned,
    '`device_map="cpu"` (accelerate)': offloaded("cpu"),
    "offloaded to disk (accelerate)": offloaded("disk"),
    "`torch.compile(model)`": compiled("object"),
    "`model.forward = torch.compile(...)`": compiled("forward"),
    "`model.compile()`": compiled("whole"),
    "autocast to bfloat16": lambda model: model,
    "weights not loaded (meta)": lambda model: model.to("meta"),
}

IDS = torch.randint(3, V, (1, 40), generator=torch.Generator().manual_seed(4)).repeat(1, 2)


@functools.cache
def made(kind: str) -> Any:
    """A model of that kind, shared by all tests: do not change it."""
    return WEIGHTS[kind](copy.deepcopy(target()))


@contextlib.contextmanager
def around(kind: str) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in kind else contextlib.nullcontext():
        yield


ROUNDED = ("bfloat16", "float16", "autocast to bfloat16")
"""Where sums that round in another order may tip two logits that are nearly equal: only a first difference that is none
of these counts."""


def alike(kind: str, want: Any, got: Any) -> bool:
    apart = (want.sequences[0] != got.sequences[0]).nonzero()
    if kind not in ROUNDED or not len(apart):
        return not len(apart)
    top = want.logits[int(apart[0]) - IDS.shape[1]][0].float().topk(2).values
    return bool(top[0] - top[1] < 0.05)


def same_tokens(kind: str, drafter: Callable[[Any], Any] = lambda model: None) -> OasisCache:
    """The model's own greedy text with either cache; drafts are accepted on the way. Returns ours."""
    model, kwargs = made(kind), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    kwargs |= dict(return_dict_in_generate=True, output_logits=True)
    with around(kind):
        cache = OasisCache(model, speculate=True, draft_tokens=2, drafter=drafter(model))
        got = model.generate(input_ids=IDS, past_key_values=cache, **kwargs)
        # A compiled model would be traced for it, which takes a while: it has the weights of the plain one.
        plain = target() if "compile" in kind else model
        assert alike(kind, plain.generate(input_ids=IDS, past_key_values=dense(model), **kwargs), got)
    assert cache.get_seq_length() == IDS.shape[1] + 11 and cache.memory()["host"] > 0
    return cache


def with_a_head(kind: str) -> None:
    """An EAGLE-3 head that reads the model's own embedding and head."""

    def drafter(model: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            tensors = weights(draft=V, lm_head=False)
            files = write(Path(folder) / "head", plain_config(draft_vocab_size=V), tensors)
            return Eagle3Drafter.from_pretrained(files, model)

    cache = same_tokens(kind, drafter)
    assert cache.drafter.past is not None, "it has seen nothing"
