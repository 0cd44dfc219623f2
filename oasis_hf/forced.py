"""Steps whose misses are forced, for timing: with random weights what is missed means nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .config import ConfigError
from .layers import OasisLayer
from .store.host import HostStore
from .summaries import Summaries

CHANCES = 8
"""Draws of chance scores a layer has."""


@contextmanager
def forced_misses(on: bool) -> Iterator[None]:
    """Scores are made as always, then replaced by chance, one of CHANCES drawn in turn: what is predicted is anything,
    and C of it are fetched. What closes after the first step is not predicted."""
    score = Summaries.score
    drawn: dict[int, torch.Tensor] = {}
    turns: dict[str, Any] = {}

    def chance(self: Summaries, query: Any, closed: Any, *rest: Any) -> torch.Tensor:
        scores = score(self, query, closed, *rest)
        if not drawn:
            turns["next"], turns["first"] = torch.zeros(1, dtype=torch.int64, device=scores.device), id(self)
        if id(self) not in drawn:
            rows, heads, most = self.vectors.shape[:3]
            noise = torch.rand((CHANCES, rows, heads, most), device=scores.device)
            drawn[id(self)] = noise.masked_fill_(
                torch.arange(most, device=scores.device) >= closed[:, None, None], -torch.inf
            )
        if id(self) == turns["first"]:
            turns["next"].add_(1).remainder_(CHANCES)
        return drawn[id(self)][..., : scores.shape[2]].index_select(0, turns["next"])[0]

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
    gather = HostStore.gather
    kept: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def some(self: HostStore, layer: int, keys: Any, values: Any, block: torch.Tensor, slot: torch.Tensor) -> None:
        assert shares is not None
        key = (layer, block.shape)
        if key not in kept:
            chance = torch.tensor(shares[: block.shape[2] + 1], device=block.device)
            moved = chance.multinomial(CHANCES * block.shape[0] * block.shape[1], replacement=True)
            kept[key] = moved.view(CHANCES, *block.shape[:2], 1) > torch.arange(block.shape[2], device=block.device)
        turn = (slot[:1, :1, 0] % CHANCES).view(1)  # any number that changes from step to step
        gather(self, layer, keys, values, block.where(kept[key].index_select(0, turn)[0], -1), slot)

    try:
        if shares is not None:
            HostStore.gather = some  # type: ignore[method-assign, assignment]
        yield
    finally:
        HostStore.gather = gather  # type: ignore[method-assign]


@contextmanager
def parts(predict: bool, transfer: bool) -> Iterator[None]:
    """Steps without prediction, or with prediction but no transfer: what each adds."""
    fetch, captured, gather = OasisLayer._fetch, OasisLayer._predict, HostStore.gather
    try:
        if not predict:
            OasisLayer._fetch = lambda self, *args: None  # type: ignore[method-assign]
            OasisLayer._predict = lambda self, *args: None  # type: ignore[method-assign]
        if not transfer:
            HostStore.gather = lambda self, *args: None  # type: ignore[method-assign]
        yield
    finally:
        OasisLayer._fetch, OasisLayer._predict = fetch, captured  # type: ignore[method-assign]
        HostStore.gather = gather  # type: ignore[method-assign]


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
