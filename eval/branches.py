"""Prompts read once by the model itself, and answers from branches of that: dense, and over an `OasisCache`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from oasis_hf import Drafter, OasisConfig
from oasis_hf.attach import cache_name
from oasis_hf.branching import from_dense, tapped
from oasis_hf.lookahead import wants_drafts

REST = 8
"""Last tokens of a prompt that every branch reads itself: at least as many queries as any lookahead averages."""


@dataclass
class Prompts:
    """B prompts, read but for their last `REST` tokens; `P` columns, shorter prompts padded on the left.

    Attributes:
        keys, values: `[L]` of `[B, H, P, D]`. ids: `[B, P]`. rest: `[B, REST]`. lengths: `[B]` tokens of each prompt.
        valid: `[B, P]` bool, None where nothing is padded. hidden: `[B, P, hidden]` by tapped layer, for an EAGLE-3
            head; empty without one.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    ids: torch.Tensor
    rest: torch.Tensor
    lengths: torch.Tensor
    valid: torch.Tensor | None
    hidden: dict[int, torch.Tensor]

    def dense(self, config: Any) -> DynamicCache:
        """A cache of its own that holds them; their tensors are shared until it grows."""
        cache = DynamicCache(config=config)
        layers: list[Any] = list(cache.layers)
        for layer, keys, values in zip(layers, self.keys, self.values):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def part(self, rows: slice) -> "Prompts":
        """Some of the rows."""
        if rows.start in (None, 0) and rows.stop >= len(self.rest):
            return self
        return Prompts(
            [keys[rows] for keys in self.keys], [values[rows] for values in self.values], self.ids[rows],
            self.rest[rows], self.lengths[rows], None if self.valid is None else self.valid[rows],
            {tap: states[rows] for tap, states in self.hidden.items()},
        )  # fmt: skip


@torch.no_grad()
def prefilled(model: Any, prompts: list[list[int]], at_once: int = 1 << 16, drafter: Drafter | None = None) -> Prompts:
    """Read prompts densely. Rows of one length share a forward and none of them is padded, so what is read does not
    depend on the others.

    Args:
        prompts: ids. at_once: tokens of a forward, about. drafter: whose taps shall be kept.

    Raises:
        ValueError: a prompt has no more tokens than every branch reads itself.
    """
    device = model.get_input_embeddings().weight.device
    if min(map(len, prompts)) <= REST:
        raise ValueError(f"A prompt has {min(map(len, prompts))} tokens, and {REST + 1} are the least.")
    lengths = [len(prompt) - REST for prompt in prompts]
    rows, width = len(prompts), max(lengths)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden: dict[int, torch.Tensor] = {}
    ids = torch.zeros((rows, width), dtype=torch.int64, device=device)
    for length in sorted(set(lengths)):
        same = [row for row, n in enumerate(lengths) if n == length]
        each = max(1, at_once // length)
        for first in range(0, len(same), each):
            part = same[first : first + each]
            at = torch.tensor(part, device=device)
            ids[at, width - length :] = torch.tensor([prompts[row][:length] for row in part], device=device)
            past = DynamicCache(config=model.config)
            with _tapped(model, drafter) as seen:
                model(ids[at, width - length :], **{cache_name(model): past}, logits_to_keep=1)
            layers: list[Any] = list(past.layers)
            for index, layer in enumerate(layers):
                if index == len(held):
                    shape = (rows, layer.keys.shape[1], width, layer.keys.shape[3])
                    held.append((layer.keys.new_zeros(shape), layer.values.new_zeros(shape)))
                for whole, own in zip(held[index], (layer.keys, layer.values)):
                    whole[at, :, width - length :] = own
            for tap, states in seen.items():
                if tap not in hidden:
                    hidden[tap] = states.new_zeros((rows, width, states.shape[2]))
                hidden[tap][at, width - length :] = states
    rest = torch.tensor([prompt[-REST:] for prompt in prompts], device=device)
    told = torch.tensor([len(prompt) for prompt in prompts], device=device)
    valid = None
    if min(lengths) < width:
        valid = torch.arange(width, device=device) >= (width + REST - told)[:, None]
    keys, values = ([pair[which] for pair in held] for which in (0, 1))
    return Prompts(keys, values, ids, rest, told, valid, hidden)


def _tapped(model: Any, drafter: Drafter | None) -> Any:
    return contextlib.nullcontext({}) if drafter is None else tapped(model, drafter)


def branch(model: Any, prompts: Prompts, config: OasisConfig, drafter: Any = None) -> Any:
    """An `OasisCache` of these prompts, to which `answers` gives their rest. Where nothing is drafted the drafter has
    no work."""
    drafter = drafter if wants_drafts(config) else "previous"
    past = prompts.dense(model.config)
    heads = isinstance(drafter, Drafter) and bool(drafter.taps)
    hidden: Mapping[int, torch.Tensor] | None = prompts.hidden if heads and prompts.hidden else None
    return from_dense(
        model, past, config, drafter, input_ids=prompts.ids, attention_mask=prompts.valid, hidden=hidden
    )  # fmt: skip


@torch.no_grad()
def forced(model: Any, cache: Any, prompts: Prompts, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[B, S, V]` of the S steps behind the prompts, each given the next of `tokens` `[B, S]`."""
    return torch.stack([forced_step(model, cache, prompts, tokens, step) for step in range(tokens.shape[1])], 1)


@torch.no_grad()
def forced_step(model: Any, cache: Any, prompts: Prompts, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Logits `[B, V]` of one of these steps; the first of them reads the prompts' rest before."""
    if step == 0:
        _read_rest(model, cache, prompts)
    return _step(model, cache, prompts, tokens[:, step : step + 1], step)[:, -1]


@torch.no_grad()
def answers(model: Any, cache: Any, prompts: Prompts, most: int, end: int) -> list[list[int]]:
    """What each row says greedily, up to `end` (not included) and `most` tokens at most."""
    chosen = _read_rest(model, cache, prompts).argmax(-1)
    said = [chosen]
    done = chosen == end
    for step in range(most - 1):
        if step % 4 == 3 and bool(done.all()):  # each look waits for the device
            break
        chosen = _step(model, cache, prompts, chosen[:, None], step)[:, -1].argmax(-1)
        said.append(chosen)
        done |= chosen == end
    rows = torch.stack(said, 1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def _read_rest(model: Any, cache: Any, prompts: Prompts) -> torch.Tensor:
    """Logits `[B, V]` behind the whole prompts."""
    return _step(model, cache, prompts, prompts.rest, -REST)[:, -1]


def _step(model: Any, cache: Any, prompts: Prompts, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Logits of `tokens` `[B, n]`, the first of them `step` places behind the prompts."""
    count = tokens.shape[1]
    places = (prompts.lengths + step)[:, None] + torch.arange(count, device=tokens.device)
    call: dict[str, Any] = {cache_name(model): cache, "position_ids": places, "logits_to_keep": 1}
    if prompts.valid is not None:
        more = prompts.valid.new_ones((len(tokens), step + REST + count))
        call["attention_mask"] = torch.cat((prompts.valid, more), 1).long()
    return model(tokens, **call).logits
