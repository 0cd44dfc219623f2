"""Loglikelihoods over the working set: what is scored are the logits of decode steps.

A request is a context and a continuation. All of the context but its last token is a prompt, read densely; that token
and the continuation's are fed one by one, as `generate` would have fed them, so that the first scored logits are those
of a working set too: a multiple choice by one letter would else measure nothing but dense prefill.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..attach import cache_name

if TYPE_CHECKING:
    from ..cache import OasisCache

Ids = tuple[int, ...]


@dataclass
class Fed:
    """One row of a batch of decode steps.

    Attributes:
        prompt: which prompt of the batch stands before it. start: that one's tokens. ids: what is fed, one a step.
        requests: those that feed just this, by their number; they may differ in the last id that they score.
        targets: `[requests]`, the ids that each scores, one a step.
    """

    prompt: int
    start: int
    ids: Ids
    requests: list[int]
    targets: list[Ids]


@dataclass
class Scored:
    """A request's number, the sum of its continuation's log probabilities, and whether each was the likeliest."""

    request: int
    total: float
    greedy: bool


@torch.no_grad()
def loglikelihoods(
    cache: "OasisCache", requests: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int, longest: int,
    dtype: torch.dtype | None = None,
) -> Iterator[Scored]:  # fmt: skip
    """Score continuations over the working set. Requests with one context share its prefill: their rows branch from it
    and share its pages.

    Args:
        cache: emptied first. requests: ids of a context, at least one, and of its continuation, at least one.
        rows: most rows of a batch. longest: tokens that a model sees; a request with more loses its first ones.
        dtype: of the log softmax; None: float32.

    Yields:
        each request's score, longest prompts first.
    """
    tree: dict[Ids, dict[Ids, list[int]]] = {}
    for number, (context, continuation) in enumerate(requests):
        whole = [*context, *continuation][-(longest + 1) :]
        first = len(whole) - len(continuation) - 1
        branches = tree.setdefault(tuple(whole[:first]), {})
        branches.setdefault(tuple(whole[first:-1]), []).append(number)
    prompts = sorted(tree, key=len, reverse=True)
    # Nothing is prefilled for an empty prompt, so it can't stand in a batch with others.
    for batch in _batches([prompt for prompt in prompts if prompt], rows):
        _prefill(cache, batch)
        # With budget_bytes the prompts' rows have all the memory there is.
        most = rows if cache.state.config.budget_bytes is None else len(batch)
        fed = [one for at, prompt in enumerate(batch) for one in _fed(at, prompt, tree[prompt], requests)]
        chunks = list(_batches(sorted(fed, key=lambda one: len(one.ids)), most))
        for chunk in chunks:
            branch = cache if chunk is chunks[-1] else copy.deepcopy(cache)
            branch.batch_select_indices(torch.tensor([one.prompt for one in chunk]))
            yield from _score(branch, chunk, dtype)
    for chunk in _batches(list(_fed(0, (), tree.get((), {}), requests)), rows):
        cache.reset()
        yield from _score(cache, chunk, dtype)


def _batches(items: list[Any], most: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]


def _fed(at: int, prompt: Ids, branches: dict[Ids, list[int]], requests: Any) -> Iterator[Fed]:
    for ids, numbers in branches.items():
        yield Fed(at, len(prompt), ids, numbers, [tuple(requests[number][1]) for number in numbers])


def _prefill(cache: "OasisCache", prompts: list[Ids]) -> None:
    """Read prompts, padded on the left, into the emptied cache."""
    cache.reset()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    _forward(cache, ids, positions, attention_mask=mask)


def _score(cache: "OasisCache", fed: list[Fed], dtype: torch.dtype | None) -> Iterator[Scored]:
    """One decode step for each token of the longest row. One that has come to its end repeats its last token: nobody
    reads what it says then."""
    steps, most = max(len(one.ids) for one in fed), max(len(one.requests) for one in fed)
    targets = torch.zeros((len(fed), most, steps), dtype=torch.long)
    for row, one in enumerate(fed):
        targets[row, : len(one.targets), : len(one.ids)] = torch.tensor(one.targets)
    targets, said, likeliest = targets.to(cache.device), [], []
    for step in range(steps):
        at = [min(step, len(one.ids) - 1) for one in fed]
        ids = torch.tensor([[one.ids[place]] for one, place in zip(fed, at)])
        positions = torch.tensor([[one.start + place] for one, place in zip(fed, at)])
        logits = _forward(cache, ids, positions).logits[:, -1].to(cache.device)
        now = targets[:, :, step]
        # In 16 bits the sum over a long continuation would be mostly rounding.
        said.append(F.log_softmax(logits, -1, dtype=dtype or torch.float32).gather(1, now))
        likeliest.append(logits.argmax(-1, keepdim=True) == now)
    totals, greedy = torch.stack(said, -1).to("cpu", torch.float64), torch.stack(likeliest, -1).cpu()
    for row, one in enumerate(fed):
        for place, request in enumerate(one.requests):
            own = slice(len(one.ids))
            yield Scored(request, float(totals[row, place, own].sum()), bool(greedy[row, place, own].all()))


def _forward(cache: "OasisCache", ids: torch.Tensor, positions: torch.Tensor, **given: Any) -> Any:
    """One call of the model, whose last position's logits alone are wanted."""
    model: Any = cache.model
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        given["logits_to_keep"] = 1
    given.update({cache_name(model): cache, "use_cache": True, "return_dict": True})
    return model(input_ids=ids.to(cache.device), position_ids=positions.to(cache.device), **given)
