"""What a prefill publishes of a request: a cache's whole state but its pages, which are read when they are selected."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from .. import __version__, parallel, supported
from ..cache import OasisCache
from ..config import BLOCK, OasisConfig
from ..fingerprint import fingerprint
from ..placing import needs_one_device, placed
from ..sliding import SlidingLayer
from .control import Terms
from .errors import Corrupt, Refused

_OWN = ("ids", "logits", "pages", "selected", "ahead", "sums")

_DTYPE = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


SUMMARISED_BY = ("scorer", "summary_dtype", "tokens_per_summary")
"""Knobs that say what a block's summaries are."""


def terms(model: Any, config: OasisConfig) -> Terms:
    """What both sides of a model must have alike: pages, and summaries that one makes and the other reads.

    Raises:
        UnsupportedModelError: a cache can't serve it.
    """
    if parallel.size(model) > 1:
        raise supported.UnsupportedModelError(
            f"A prompt is prefilled and decoded elsewhere by one process a model, but this {type(model).__name__} is "
            f"split over {parallel.size(model)} ranks: load it without tp_plan, or use OasisCache(model) in each rank."
        )
    needs_one_device(model, "Prefill or decode elsewhere")
    heads, dim = supported.kv_shape(supported.text_config(model))
    dtype = placed(model).dtype
    layout = {
        "block": BLOCK, "layers": sum(window is None for window in supported.layer_windows(model)),
        "kv_heads": heads, "head_dim": dim, "dtype": _DTYPE[dtype],
        **{knob: getattr(config, knob) for knob in SUMMARISED_BY},
    }  # fmt: skip
    return Terms(__version__, fingerprint(model), layout)


def head_dim(model: Any) -> int:
    return supported.kv_shape(supported.text_config(model))[1]


@dataclass(frozen=True)
class Handle:
    """A prefilled request.

    Attributes:
        ids: `[n]` int64, its tokens. logits: `[V]` behind the last, in the model's dtype.
        pages: `[layers, KV heads, blocks]` int32, where its KV stands in the staging pool, the open block's too. The
            reader may have the first blocks (`first`): those are left out here, in `sums` and among the summaries.
        selected: `[layers, KV heads, K]` int32, blocks that the first step attends to, -1 for none. ahead: likewise,
            what that step's query selects for the next one.
        sums: CRC-32 of the pages, `[layers, KV heads, blocks]` int64, or empty: not to be checked.
        state: tensors of the layers and of the drafter, by name. told: the drafter's name; where the blocks are of the
            kind that the reader keeps, `first` too.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    pages: torch.Tensor
    selected: torch.Tensor
    ahead: torch.Tensor
    sums: torch.Tensor
    state: dict[str, torch.Tensor]
    told: dict[str, str]

    @property
    def first(self) -> int:
        """Blocks that are left out."""
        return int(self.told.get("first", 0))

    def to_bytes(self) -> bytes:
        tensors = {**{f"own.{name}": getattr(self, name) for name in _OWN}, **self.state}
        return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"handle": json.dumps(self.told)})

    @classmethod
    def parse(cls, data: bytes) -> "Handle":
        """Raises Corrupt where it is none."""
        try:
            length = int.from_bytes(data[:8], "little")
            told = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["handle"])
            tensors = load(data)
            own = {name: tensors.pop(f"own.{name}") for name in _OWN}
        except Exception as error:  # whatever a damaged file makes of its reader
            raise Corrupt(f"A request's handle can't be read: {error}") from error
        return cls(**own, state=tensors, told=told)


@torch.no_grad()
def pack(cache: OasisCache, first: int = 0) -> dict[str, torch.Tensor]:
    """The state of a cache of one row without padding behind its prompt, on the host, without the summaries of its
    first blocks."""
    rows = cache.state.need_rows()
    closed, state = rows.tokens[0] // BLOCK, {}
    layers: list[Any] = list(cache.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer, SlidingLayer):
            keys, values = layer.last(rows.columns)
            state[f"{index}.keys"], state[f"{index}.values"] = keys[0], values[0]
            continue
        state[f"{index}.vectors"] = layer.summaries.vectors[0, :, first:closed]
        if layer.summaries.scales.numel():
            state[f"{index}.scales"] = layer.summaries.scales[0, :, first:closed]
        state[f"{index}.scaling"] = torch.tensor(layer.scaling, dtype=torch.float64)
        state[f"{index}.recent"] = layer.recent[0]
    state |= {f"drafter.{name}": tensor for name, tensor in cache.drafter.shipped().items()}
    return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


@torch.no_grad()
def unpack(cache: OasisCache, handle: Handle) -> None:
    """The other side: `cache`, empty and with its store's maker set, holds the request, its last token set aside.

    Raises:
        Refused: the state is of another kind of cache.
    """
    state, count = cache.state, len(handle.ids)
    rows, model = cache.rows_for(1), supported.plain_model(cache.model)
    device, dtype = placed(model)
    layers: list[Any] = list(cache.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer, SlidingLayer):
            keys, values = (_of(handle, index, name).to(device, dtype)[None] for name in ("keys", "values"))
            layer.lazy_initialization(keys, values)
            layer.keep(keys, values, count, None)
            layer.began = count - keys.shape[2]
            continue
        vectors, recent = _of(handle, index, "vectors"), _of(handle, index, "recent")
        nothing = torch.empty((1, vectors.shape[0], 0, vectors.shape[-1]), device=device, dtype=dtype)
        layer.lazy_initialization(nothing, nothing)
        layer.scaling = float(_of(handle, index, "scaling"))
        layer.summaries.ensure(count // BLOCK)
        own = layer.summaries.vectors
        if vectors.shape[2:] != own.shape[3:] or vectors.dtype != own.dtype:
            raise Refused("layout", f"Summaries came as {list(vectors.shape)} {vectors.dtype}, not as {own.dtype}.")
        own[0, :, : vectors.shape[1]] = vectors.to(own.device)
        if layer.summaries.scales.numel():
            layer.summaries.scales[0, :, : vectors.shape[1]] = _of(handle, index, "scales").to(own.device)
        layer.recent = recent.to(device, dtype)[None, :, -state.window :]
        if layer.recent.shape[2] < state.window:  # the other side keeps fewer: the oldest stands for those before it
            oldest = layer.recent[:, :, :1].expand(-1, -1, state.window - layer.recent.shape[2], -1)
            layer.recent = torch.cat((oldest, layer.recent), 2)
    state.tick()  # as the forward that read the prompt: what is selected is younger than what was never
    rows.extend(torch.ones((1, count - 1), dtype=torch.bool))
    state.mark_dirty([0])
    shipped = {name.removeprefix("drafter."): tensor for name, tensor in handle.state.items() if name[:8] == "drafter."}
    cache.drafter.admit(handle.ids[None].to(device), shipped)


def _of(handle: Handle, layer: int, name: str) -> torch.Tensor:
    try:
        return handle.state[f"{layer}.{name}"]
    except KeyError:
        raise Refused("layout", f"The handle has no {name!r} of layer {layer}: it is of another model.") from None
