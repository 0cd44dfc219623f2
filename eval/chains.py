"""What a drafter drafts along a text, and how far a decoder that accepts right drafts comes with it in each pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oasis_hf import Eagle3Drafter, PromptLookupDrafter
from oasis_hf.state import Step


@dataclass
class Chains:
    """Row t was drafted by the forward whose input is token `prompt + t - 1`, from the true tokens up to it.

    Attributes:
        tokens: `[S, n]`, drafts for positions `prompt + t` and on; any valid ids where nothing was found.
        found: `[S]` bool.
        others: `[S, m - 1]`, what else the drafter thinks of for the first position. shares: `[S, m]`, their
            probabilities and, before them, the first draft's, as shares of their sum. None: it names no others.
    """

    tokens: torch.Tensor
    found: torch.Tensor
    others: torch.Tensor | None = None
    shares: torch.Tensor | None = None


@torch.no_grad()
def continued(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """`[B, T]` ids, and the `steps` that the model says next, greedily: a text of its own, as drafters meet it."""
    with endless(model):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False)


@contextmanager
def endless(model: Any) -> Iterator[None]:
    """generate knows no end id, so that every row gets all its tokens: `min_new_tokens` would be a processor of every
    row's logits."""
    config = model.generation_config
    kept = config.eos_token_id, config.pad_token_id
    config.eos_token_id, config.pad_token_id = None, kept[1] or 0
    try:
        yield
    finally:
        config.eos_token_id, config.pad_token_id = kept


def lookup_chains(tokens: torch.Tensor, prompt: int, count: int = 1) -> Chains:
    """`PromptLookupDrafter`'s. tokens: `[T]`, the first step's position is `prompt`. count: n."""
    drafter = PromptLookupDrafter()
    row = tokens[None]
    zero = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    drafter.observe(row[:, : prompt - 1], zero, None)
    drafts, found = [], []
    for at in range(prompt - 1, len(tokens) - 1):
        draft = drafter.propose(row[:, at], zero + at, count)
        drafts.append(draft.tokens[0])
        found.append(draft.found[0])
        drafter.observe(row[:, at : at + 1], zero + at, None)
    return Chains(torch.stack(drafts), torch.stack(found))


@torch.no_grad()
def head_chains(
    model: Any, drafter: Eagle3Drafter, tokens: torch.Tensor, prompt: int, count: int = 1, candidates: int = 1
) -> Chains:
    """An EAGLE-3 head's, from the dense model's hidden states. As `lookup_chains`. candidates: m."""
    hidden = model(tokens[None], output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
    row, zero = tokens[None], torch.zeros(1, dtype=torch.int64, device=tokens.device)
    drafter.reset()
    _tap(drafter, hidden, slice(0, prompt - 1), "prefill")
    drafter.observe(row[:, : prompt - 1], zero, None)
    drafts, found, best = [], [], []
    for at in range(prompt - 1, len(tokens) - 1):
        drafter.hold(zero + at, 1)
        with _logits(drafter) as logits:
            draft = drafter.propose(row[:, at], zero + at, count)
        drafts.append(draft.tokens[0])
        found.append(draft.found[0])
        best.append(logits[0].flatten().float().softmax(-1).topk(candidates))
        _tap(drafter, hidden, slice(at, at + 1), "decode")
        drafter.note(row[:, at : at + 1], zero + at)
        drafter.noted(1)
    chains = Chains(torch.stack(drafts), torch.stack(found))
    if candidates > 1:
        shares = torch.stack([one.values for one in best])
        chains.others = drafter.head.target_ids(torch.stack([one.indices for one in best]))[:, 1:]
        chains.shares = shares / shares.sum(1, keepdim=True)
    return chains


@contextmanager
def _logits(drafter: Eagle3Drafter) -> Iterator[list[torch.Tensor]]:
    """What the head's logits were, proposal by proposal."""
    kept: list[torch.Tensor] = []
    inner = drafter._finish

    def keep(attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, state = inner(attended, residual)
        kept.append(logits)
        return logits, state

    drafter._finish = keep  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del drafter._finish  # the class's again


def _tap(drafter: Eagle3Drafter, hidden: tuple[torch.Tensor, ...], part: slice, mode: str) -> None:
    step = Step(mode, 0, part.stop - part.start, [part.start], part.start)
    for layer in drafter.taps:
        drafter.tap(layer, hidden[layer][:, part], step)


@dataclass
class Passes:
    """A decoder over a text that it would say itself, with `verified` drafts a pass.

    Attributes:
        origin: `[S]`, the step whose forward predicted the working set that step t attends to; -1: the prompt's last
            token's. A pass's own token and the drafts that it accepts share one.
        count: passes. acceptance: how often a verified draft was the next input, as the cache counts it.
    """

    origin: torch.Tensor
    count: int
    acceptance: float


def passes(chains: Chains, tokens: torch.Tensor, prompt: int, verified: int) -> Passes:
    """tokens: `[T]`. verified: at most n; 0: speculation off, a pass a token."""
    steps = len(tokens) - prompt
    said, drafts = tokens[prompt:].tolist(), chains.tokens.tolist()
    origin, before, start, count, right, tried = [], -1, 0, 0, 0, 0
    while start < steps:
        accepted = 0
        row = start + 1
        while accepted < verified and row + accepted < steps:  # what was not found is verified too, as in the cache
            if drafts[row][accepted] != said[row + accepted]:
                break
            accepted += 1
        origin += [before] * (accepted + 1)
        right, tried = right + accepted, tried + min(accepted + 1, verified)
        before, start, count = start, start + accepted + 1, count + 1
    acceptance = right / tried if tried else 0.0
    return Passes(torch.tensor(origin, device=tokens.device), count, acceptance)
