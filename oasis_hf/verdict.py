"""What an `OasisCache` makes of a model, from its configuration alone: the part of `oasis-hf doctor MODEL` that knows
models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import supported
from .config import BLOCK, ConfigError, OasisConfig
from .drafters.known import known_source
from .models import load_config, weightless
from .modes import gpu_bytes
from .ops import cuda
from .reach import Reach

CONTEXT = 32768
"""Tokens a row where none are asked for; fewer where the model's positions end before."""


class Finding(NamedTuple):
    """One line. ok: False is a fault, None only information."""

    what: str
    value: str
    ok: bool | None = None


def check_model(model: str, context: int | None = None, rows: int = 1) -> Iterator[Finding]:
    """Family, layers, whether it is supported and why not, and what a cache of it takes. No weights are read.

    Args:
        model: a hub id, a folder, a `config.json`, a GGUF file; or the bundled model's name.
        context: tokens a row; None: `CONTEXT`, or as far as the model's positions go. rows: sequences.

    Raises:
        ModelError: there is no such model. ConfigError: context or rows is not allowed.
    """
    for name, value in (("context", context), ("rows", rows)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} is not allowed: use an integer >= 1.")
    config = load_config(model)
    yield Finding("family", str(getattr(config, "model_type", "unknown")))
    try:
        shell = weightless(config)
    except Exception as error:  # any model class may fail in any way without its weights
        yield Finding("supported", f"no: {_first_line(error)}", False)
        return
    text = supported.text_config(shell)
    yield Finding("class", type(shell).__name__)
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        yield Finding("weights", f"quantized ({getattr(method, 'value', method)}); keys and values are not")
    yield Finding("layers", _kinds(text))
    reasons = list(supported.refusals(shell, text))
    for reason in reasons:
        yield Finding("supported", f"no: {reason}", False)
    if reasons:
        return
    windows = supported.layer_windows(shell)
    sparse = sum(window is None for window in windows)
    if sparse == 0:
        yield Finding("supported", "yes, but all layers have a sliding window and stay resident: nothing to gain")
        return
    yield Finding("supported", "yes", True)
    yield Finding("sparse", f"{sparse} layers with a working set")
    yield Finding("stays dense", f"{len(windows) - sparse} layers with a sliding window (resident), and every prompt")
    known = isinstance(text.dtype, torch.dtype)
    dtype = text.dtype if known else torch.bfloat16
    yield from _sizes(text, sparse, dtype, known)
    yield from _memory(shell, text, sparse, dtype, context, rows)
    yield from _speed(model, config, text, dtype)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _kinds(text: Any) -> str:
    """Its layers by kind, as "12 full_attention, 36 sliding_attention (1,024 tokens)"."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    count = getattr(text, "num_hidden_layers", 0)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * count
    told = [f"{number} {kind}" for kind, number in Counter(kinds).most_common()]
    of = f" (a window of {window:,} tokens)" if window and "sliding_attention" in kinds else ""
    return ", ".join(told) + of


def _sizes(text: Any, sparse: int, dtype: torch.dtype, known: bool) -> Iterator[Finding]:
    heads, dim = supported.kv_shape(text)
    block = 2 * BLOCK * dim * dtype.itemsize
    told = f"{heads} x {dim}, {str(dtype).removeprefix('torch.')}{'' if known else ' (assumed)'}"
    yield Finding("KV heads x head_dim", told)
    yield Finding("group", f"{text.num_attention_heads // heads} query heads a KV head")
    yield Finding("one block of one KV head", f"{block:,} bytes")
    yield Finding("full KV", f"{sparse * heads * block // BLOCK:,} bytes a token, in host memory")


def _memory(
    shell: Any, text: Any, sparse: int, dtype: torch.dtype, context: int | None, rows: int
) -> Iterator[Finding]:  # fmt: skip
    most = getattr(text, "max_position_embeddings", None)
    tokens = context or min(CONTEXT, most or CONTEXT)
    heads, dim = supported.kv_shape(text)
    full = sparse * heads * 2 * dim * dtype.itemsize * tokens * rows
    budget = OasisConfig().slots * BLOCK
    # Without a drafter: a head's weights count once they are there.
    need = gpu_bytes(shell.to(dtype), "oasis", budget, tokens, drafter="previous", rows=rows)
    what = f"{rows:,} x {tokens:,} tokens"
    beyond = f"; its positions end at {most:,}" if most and tokens > most else ""
    yield Finding(f"host memory for {what}", f"{gib(full)}{beyond}")
    parts = ", ".join(f"{gib(need[part])} {part.replace('_', ' ')}" for part in ("working_set", "summaries", "sliding"))
    yield Finding(f"GPU memory for it at a budget of {budget:,} (the default)", f"{gib(need['total'])}: {parts}")
    yield Finding("GPU memory of a dense cache", gib(full + need["sliding"]))


def _speed(model: str, config: Any, text: Any, dtype: torch.dtype) -> Iterator[Finding]:
    source = known_source(getattr(config, "_name_or_path", "") or "") or known_source(str(model).rstrip("/"))
    known = "none: n-gram matches draft, or give a head with drafter=" if source is None else source
    yield Finding("known EAGLE-3 head", known.replace("./heads/", "in this package, "))
    dim, reach = supported.kv_shape(text)[1], Reach(None, text)
    if dtype not in cuda.DTYPES:
        why = f"no: the compiled operators serve bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    elif dim not in cuda.HEAD_DIMS:
        why = f"no: the compiled operators serve a head_dim of {', '.join(map(str, cuda.HEAD_DIMS))}, not {dim}"
    elif reach.dynamic or reach.longrope:
        why = "no: its RoPE scales by the furthest position, which it asks the device for"
    else:
        why = "yes"
    yield Finding("captured steps on a GPU", why)


def gib(size: float) -> str:
    """Bytes, as people read them."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
