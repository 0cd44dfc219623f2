"""Steps whose misses and drafts are forced, for timing: with random weights what is missed or guessed means nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .config import ConfigError
from .drafters.base import Draft, Drafter
from .layers import OasisLayer
from .store import HostStore, Move
from .summaries import Summaries
from .working_set import WorkingSet

CHANCES = 8
"""Draws of chance scores."""


class Injected(Drafter):
    """Says that a share of the rows have a draft, at no cost: a head proposes one for every row, a lookup for some.

    Args:
        share: of the rows, the first ones.
    """

    name = "injected"

    def __init__(self, share: float) -> None:
        self.share, self.always = share, share == 1
        self._found: torch.Tensor | None = None

    def hold(self, lengths: torch.Tensor, count: int) -> list[torch.Tensor]:
        if self._found is None or len(self._found) != len(lengths):
            self._found = torch.arange(len(lengths), device=lengths.device) < round(self.share * len(lengths))
        return [self._found]

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> Draft:
        (found,) = self.hold(lengths, 1)
        return Draft(tokens[:, None].repeat(1, count), found)


@contextmanager
def forced_misses(on: bool, blocks: int = 0) -> Iterator[None]:
    """Scores are made as always, then replaced by chance, one of CHANCES drawn in turn, the same in all layers: what is
    predicted is anything, and C of it are fetched.

    Args:
        blocks: of a row, at most, where rows grow; 0: they hardly do, and what closes after the first step is not
            predicted.
    """
    score = Summaries.score
    drawn: dict[str, Any] = {}

    def chance(self: Summaries, query: Any, closed: Any, *rest: Any) -> torch.Tensor:
        scores = score(self, query, closed, *rest)
        if not drawn:
            rows, heads, most = self.vectors.shape[:3]
            most = max(most, blocks)
            noise = torch.rand((CHANCES, rows, heads, most), device=scores.device)
            noise.mul_(2 / most)  # shares, about, for those who ask what is missing
            drawn["place"] = torch.arange(most, device=scores.device)
            if not blocks:
                noise.masked_fill_(drawn["place"] >= closed[:, None, None], -torch.inf)
            drawn["all"], drawn["now"], drawn["first"] = noise, noise[0].clone(), id(self)
            drawn["next"] = torch.zeros(1, dtype=torch.int64, device=scores.device)
        if id(self) == drawn["first"]:  # for all layers, so that what stands for a score hardly costs anything
            drawn["next"].add_(1).remainder_(CHANCES)
            torch.index_select(drawn["all"], 0, drawn["next"], out=drawn["now"][None])
            if blocks:
                drawn["now"].masked_fill_(drawn["place"] >= closed[:, None, None], -torch.inf)
        now = drawn["now"][..., : scores.shape[2]]
        return now.clone() if len(rest) > 3 else now.contiguous()  # which scores it asks for: it may write over them

    try:
        if on:
            Summaries.score = chance  # type: ignore[method-assign, assignment]
        yield
    finally:
        Summaries.score = score  # type: ignore[method-assign]


@contextmanager
def fetches_of(shares: Sequence[float] | None) -> Iterator[None]:
    """Of what each KV head selects in a step, as many blocks move as a recorded trace says, drawn anew CHANCES times.

    Args:
        shares: how often 0, 1, ... C blocks were fetched (`eval/traces.py`); None: all that are selected.
    """
    gather = HostStore.gather_layers
    kept: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def fewer(layer: int, block: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        assert shares is not None
        key = (layer, block.shape)
        if key not in kept:
            chance = torch.tensor(shares[: block.shape[2] + 1], device=block.device)
            moved = chance.multinomial(CHANCES * block.shape[0] * block.shape[1], replacement=True)
            kept[key] = moved.view(CHANCES, *block.shape[:2], 1) > torch.arange(block.shape[2], device=block.device)
        turn = (slot[:1, :1, 0] % CHANCES).view(1)  # any number that changes from step to step
        return block.where(kept[key].index_select(0, turn)[0], -1)

    def some(self: HostStore, moves: list[Move]) -> None:
        gather(self, [(at, keys, values, fewer(at, block, slot), slot) for at, keys, values, block, slot in moves])

    try:
        if shares is not None:
            HostStore.gather_layers = some  # type: ignore[method-assign]
        yield
    finally:
        HostStore.gather_layers = gather  # type: ignore[method-assign]


@contextmanager
def parts(predict: bool = True, transfer: bool = True, select: bool = True, working_set: bool = True) -> Iterator[None]:
    """Steps that leave something out, to tell what it adds: prediction; the transfer of what is predicted; the
    selection of what is scored (and so the transfer); all that a layer does with keys and values."""
    own = OasisLayer._fetch, OasisLayer._predict, OasisLayer._decode
    gather, into, selection = HostStore.gather_layers, WorkingSet.select_into, WorkingSet.select
    try:
        if not predict:
            OasisLayer._fetch = lambda self, *args: None  # type: ignore[method-assign]
            OasisLayer._predict = lambda self, *args: None  # type: ignore[method-assign]
        if not transfer or not select:
            HostStore.gather_layers = lambda self, moves: None  # type: ignore[method-assign]
        if not select:
            WorkingSet.select_into = lambda self, *args: None  # type: ignore[method-assign]
            WorkingSet.select = _nothing  # type: ignore[method-assign, assignment]
        if not working_set:
            OasisLayer._decode = _passed  # type: ignore[method-assign, assignment]
        yield
    finally:
        OasisLayer._fetch, OasisLayer._predict, OasisLayer._decode = own  # type: ignore[method-assign]
        HostStore.gather_layers = gather  # type: ignore[method-assign]
        WorkingSet.select_into, WorkingSet.select = into, selection  # type: ignore[method-assign]


def _nothing(self: WorkingSet, scores: Any, lengths: Any, cap: int, *rest: Any) -> tuple[torch.Tensor, ...]:
    """In place of `WorkingSet.select`: no plan, nothing counted."""
    plan = self.table.new_full((*self.table.shape[:2], min(cap, self.table.shape[2])), -1)
    counts = self.table.new_zeros((4, self.table.shape[1]))
    return plan, torch.zeros_like(plan), counts[:3], counts[3]


def _passed(self: OasisLayer, step: Any, query: torch.Tensor, *args: Any) -> torch.Tensor:
    """In place of a layer's decode step: its queries, as if they were what it attended to."""
    self.draft_queries = query[:, :, step.count :]
    return query.clone()


def mean_fetched(shares: Sequence[float]) -> float:
    """Blocks a KV head and step."""
    return sum(count * share for count, share in enumerate(shares)) / sum(shares)


def traced(path: Path, cap: int) -> list[float]:
    """Shares of 0 to `cap` fetched blocks, from the JSON of `eval/traces.py`.

    Raises:
        ConfigError: it holds no trace with this cap.
    """
    for row in json.loads(path.read_text())["rows"]:
        if row["cap"] == cap:
            return row["shares"]
    raise ConfigError(f"--trace {path} holds no trace with a cap of {cap}: record one, or change --fetch-ratio.")
