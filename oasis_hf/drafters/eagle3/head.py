"""An EAGLE-3 head: one decoder layer that guesses the next token from three of the target's hidden states.

The pieces are apart, so that a drafter and a trainer put their own attention between `project` and `finish`. Formats
and the forward follow SafeAILab/EAGLE, SpecForge and vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

THETA = 10000.0
"""RoPE base of a head whose config has none; never the target's."""


@dataclass(frozen=True)
class HeadConfig:
    """What an EAGLE-3 head looks like.

    Attributes:
        hidden_size: H, the head's own. target_hidden_size: Ht, of each tapped state.
        vocab_size: V, the target's. draft_vocab_size: Vd, ids that the head can propose.
        max_position_embeddings: the length it was trained for.
        rope_parameters: as transformers 5 writes them, `rope_type` and `rope_theta` included.
        taps: layers whose input it reads, ascending; the number of layers means the final norm's input.
        attention_bias: q, k and v have one. output_bias: o has one.
        qk_norm: RMSNorm of each query and key head. norm_before_residual: the residual is the normalised hidden half.
        norm_before_fc: one norm over all taps together. fc_norm: one a tap.
        norm_output: a chain goes on from the normalised output, not from the output itself.
        own_embeddings, own_lm_head: the head's, not the target's.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": THETA})
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    own_lm_head: bool = True


class RMSNorm(nn.Module):
    """RMSNorm in float32, as Llama's."""

    def __init__(self, size: int, eps: float, device: Any = None) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, device=device)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Attention(nn.Module):
    """The projections of the one layer; its input is twice as wide."""

    def __init__(self, config: HeadConfig, device: Any = None) -> None:
        super().__init__()
        size, dim, bias, eps = config.hidden_size, config.head_dim, config.attention_bias, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, heads * dim, bias=bias, device=device)
        self.k_proj = nn.Linear(2 * size, kv_heads * dim, bias=bias, device=device)
        self.v_proj = nn.Linear(2 * size, kv_heads * dim, bias=bias, device=device)
        self.o_proj = nn.Linear(heads * dim, size, bias=config.output_bias, device=device)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(dim, eps, device), RMSNorm(dim, eps, device)


class _MLP(nn.Module):
    def __init__(self, config: HeadConfig, device: Any = None) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias, device=device)
        self.up_proj = nn.Linear(size, inner, bias=bias, device=device)
        self.down_proj = nn.Linear(inner, size, bias=bias, device=device)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig, device: Any = None) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, device), _MLP(config, device)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.input_layernorm = RMSNorm(size, eps, device), RMSNorm(size, eps, device)
        self.post_attention_layernorm = RMSNorm(size, eps, device)


class Eagle3Head(nn.Module):
    """The weights under the names of the plain layout, and the steps between them.

    Shapes: any leading dimensions `...` (a trainer's `[B, T]`, a drafter's `[B, 1]`). Everything has gradients.
    `inv_freq` stays in float32 whatever the module is cast to.

    Args:
        config: a `HeadConfig`. device: where its weights are made; "meta" for nowhere, until they are loaded with
            `assign=True`.
    """

    inv_freq: torch.Tensor
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: HeadConfig, device: Any = None) -> None:
        super().__init__()
        self.config = config
        size, eps, wide = config.hidden_size, config.rms_norm_eps, len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(wide, size, bias=config.fc_bias, device=device)
        self.midlayer = _Layer(config, device)
        self.norm = RMSNorm(size, eps, device)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, eps, device)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps, device) for _ in config.taps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False, device=device)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size, device=device)
        reduced = config.draft_vocab_size != config.vocab_size
        member = torch.arange(config.vocab_size, device=device) < config.draft_vocab_size
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("d2t", offsets if reduced else None)
        self.register_buffer("t2d", member if reduced else None)
        self._exact, self.rope_scale = rope(config)
        self.register_buffer("inv_freq", self._exact.clone(), persistent=False)
        if device not in (None, "meta"):
            self.inv_freq = self._exact.to(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Eagle3Head":
        super()._apply(fn, recurse)
        self.inv_freq = self._exact.to(self.inv_freq.device)  # a cast rounds every buffer, and positions are large
        return self

    def fuse(self, taps: list[torch.Tensor]) -> torch.Tensor:
        """Tapped states, one `[..., Ht]` a tap in their order, to the hidden input `[..., H]` of a first draft."""
        if self.config.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps)]
        joined = torch.cat(taps, -1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def embed(self, tokens: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """ids `[...]` to embeddings `[..., H]`. weight: the target's, where the head has none of its own."""
        own = self.embed_tokens.weight if self.config.own_embeddings else weight
        assert own is not None
        return F.embedding(tokens.to(own.device), own).to(self.fc.weight)

    def project(
        self, token_embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What attention needs of rows whose token embeddings and hidden inputs are `[..., H]`, at `positions` `[...]`.

        Returns:
            q `[..., heads, D]` and k `[..., KV heads, D]`, both rotated, v like k, and the residual `[..., H]`.
        """
        layer, attention, dim = self.midlayer, self.midlayer.self_attn, self.config.head_dim
        normed = layer.hidden_norm(hidden)
        both = torch.cat((layer.input_layernorm(token_embeddings), normed), -1)
        q, k, v = (
            part(both).unflatten(-1, (-1, dim)) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.config.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        angle = positions.unsqueeze(-1).float() * self.inv_freq
        angle = torch.cat((angle, angle), -1).unsqueeze(-2)
        cos, sin = angle.cos() * self.rope_scale, angle.sin() * self.rope_scale
        residual = normed if self.config.norm_before_residual else hidden
        return rotate(q, cos, sin), rotate(k, cos, sin), v, residual

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Attention's output `[..., heads * D]` and the residual to the layer's output `[..., H]`."""
        layer = self.midlayer
        x = residual + layer.self_attn.o_proj(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, output: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output to logits `[..., Vd]`. weight: the target's head `[V, H]`, where there is no own one."""
        normed = self.norm(output)
        if self.config.own_lm_head:
            return self.lm_head(normed)
        assert weight is not None
        return F.linear(normed, weight.to(normed))

    def state(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output to the hidden input of the next token of a chain, both `[..., H]`."""
        return self.norm(output) if self.config.norm_output else output

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft vocabulary to the target's (the table holds offsets)."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def rope(config: HeadConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 and what scales cos and sin, by transformers' own functions. Raises ValueError for a
    kind of RoPE that has none, or whose frequencies depend on the length of the text."""
    parameters = {"rope_type": "default", "rope_theta": THETA, **config.rope_parameters}
    kind, dim = parameters["rope_type"], int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        raise ValueError(f"RoPE of type {kind!r} is not supported in a draft head.")
    like = LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=parameters,
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](like, torch.device("cpu"))
    return frequencies.float(), float(scale)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of `[..., heads, D]` in float32, by the halves convention; what lies beyond cos's width stays."""
    turned, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned.to(x.dtype), rest), -1)
