"""What a model's decoding takes, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import supported
from ..config import ConfigError
from ..models import weightless
from .hardware import check_number


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its time and memory depend on.

    Args:
        layers: with full attention, whose keys and values grow with the context.
        windows: the sliding windows of the other layers, in tokens.
        heads, kv_heads, head_dim: of one layer.
        kv_itemsize: bytes of one element of a key or value.
        weights: bytes of all weights.
        streamed: bytes of weights that every step reads: all but experts and, where it is not the output head too,
            the embedding, of which it looks up single rows.
        expert_weights: bytes of all experts.
        expert_share: experts that a token goes through, as a share of them; 1 without experts.
        flops_token: operations a token, attention aside: two for each weight that it meets.
    """

    layers: int
    windows: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    kv_itemsize: int
    weights: float
    streamed: float
    expert_weights: float
    expert_share: float
    flops_token: float

    @classmethod
    def of(cls, config: Any, weight_bits: float | None = None) -> ModelShape:
        """Read a `transformers` configuration; the model is made without memory (device "meta").

        Args:
            config: of any causal model that `OasisCache` serves; its dtype counts, bfloat16 where it names none.
            weight_bits: bits of a weight where they are stored in fewer than the dtype has.

        Raises:
            ConfigError: no model can be made of it, `OasisCache` can't serve it, or its weights are quantized and
                `weight_bits` is not given.
        """
        if weight_bits is not None:
            check_number("weight_bits", weight_bits, 0, 64)
        elif getattr(config, "quantization_config", None):
            raise ConfigError("The configuration has quantized weights: say their size with weight_bits.")
        try:
            model = weightless(config)
        except Exception as error:  # any model class may fail in any way without its weights
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"Can't make a model of this {type(config).__name__}: {reason}") from error
        text = supported.text_config(model)
        dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.bfloat16
        return cls.of_model(model, dtype, weight_bits)

    @classmethod
    def of_model(cls, model: Any, dtype: torch.dtype, weight_bits: float | None = None) -> ModelShape:
        """The same of a model that is there, which computes in `dtype`."""
        windows = supported.layer_windows(model)
        if None not in windows:
            raise ConfigError("All layers of this model have a sliding window: no cache grows, nothing to plan.")
        text = supported.text_config(model)
        size = dtype.itemsize if weight_bits is None else weight_bits / 8
        dense, experts = _parameters(model)
        used = getattr(text, "num_experts_per_tok", None)
        share = used / _experts(text) if experts and used else 1.0
        kv_heads, head_dim = supported.kv_shape(text)
        return cls(
            layers=sum(window is None for window in windows),
            windows=tuple(window for window in windows if window is not None),
            heads=text.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kv_itemsize=dtype.itemsize,
            weights=sum(weight.numel() for weight in model.parameters()) * size,
            streamed=dense * size,
            expert_weights=experts * size,
            expert_share=share,
            flops_token=2 * (dense + experts * share),
        )

    def held_heads(self, devices: int = 1) -> int:
        """KV heads that so many GPUs hold together. More GPUs than heads hold each head several times.

        Raises:
            ConfigError: neither number divides the other.
        """
        if self.kv_heads % devices and devices % self.kv_heads:
            raise ConfigError(
                f"devices={devices} is not allowed: use a divisor or a multiple of the {self.kv_heads} KV heads."
            )
        return max(self.kv_heads, devices)

    def kv_token(self, devices: int = 1) -> int:
        """Bytes of one token's K and V in the layers with full attention: `N_layer * 2 * N_kv * d_h * s` (paper,
        equation 1)."""
        return self.layers * self._layer_token(devices)

    def resident(self, context: int, devices: int = 1) -> int:
        """Bytes of one row's K and V in the sliding-window layers, which stay on the GPU whatever is done."""
        return sum(min(context, window) for window in self.windows) * self._layer_token(devices)

    def cache(self, context: int, devices: int = 1) -> int:
        """Bytes of one row's full K and V (paper, equation 1, with B = 1)."""
        return context * self.kv_token(devices) + self.resident(context, devices)

    def weights_read(self, rows: int) -> float:
        """Bytes of weights that a step of so many rows reads. Of experts those that any row chose, as if all were
        equally likely: a share of `1 - (1 - expert_share) ** rows`."""
        return self.streamed + self.expert_weights * (1 - (1 - self.expert_share) ** rows)

    def prefill_flops(self, new: int, context: int) -> float:
        """Operations of a prompt's last `new` tokens of `context`: the weights', and two products of `head_dim` for
        each query head, layer and pair of tokens that attend."""
        pairs = self.layers * _pairs(new, context, context)
        pairs += sum(_pairs(new, context, window) for window in self.windows)
        return new * self.flops_token + 4 * self.heads * self.head_dim * pairs

    def _layer_token(self, devices: int) -> int:
        return 2 * self.held_heads(devices) * self.head_dim * self.kv_itemsize


def _pairs(new: int, context: int, window: int) -> float:
    """Pairs (query, key) of a causal layer, for the last `new` of `context` tokens."""
    first = context - new
    ramp = max(0, min(context, window) - first)  # queries that see less than a window
    return ramp * (first + ramp / 2) + (new - ramp) * window


def _experts(text: Any) -> int:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(text, name, None):
            return getattr(text, name)
    raise ConfigError(f"Can't read the number of experts of this {type(text).__name__}: it names none.")


def _parameters(model: Any) -> tuple[int, int]:
    """Weights that each step of the decoder reads, and those of its routed experts."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    named = {id(weight): (name, weight) for name, weight in decoder.named_parameters() if weight is not embedding}
    if head is not None:
        named |= {id(weight): ("head", weight) for weight in head.parameters()}
    experts = sum(weight.numel() for name, weight in named.values() if ".experts." in name)
    return sum(weight.numel() for _, weight in named.values()) - experts, experts
