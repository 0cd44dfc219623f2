"""Samples on disk and in packs: texts of any length, one behind the other, cut into batches of fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import TrainError
from .generate import Sample
from .unroll import Batch

FILE = "samples.npz"
"""No name of a file of weights: the head lies beside it."""


@dataclass
class Samples:
    """Texts in one array.

    Attributes:
        ids: all tokens. offsets: `[n + 1]` where each text starts. starts: `[n]` where its response does in it.
        share: `[n]` float32, of its positions that are learned from.
    """

    ids: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, samples: Iterable[Sample], share: float = 1.0) -> "Samples":
        listed = list(samples)
        ids = np.concatenate([np.asarray(s.ids, np.int32) for s in listed] or [np.zeros(0, np.int32)])
        offsets = np.cumsum([0, *(len(s.ids) for s in listed)]).astype(np.int64)
        starts = np.asarray([s.start for s in listed], np.int32)
        return cls(ids, offsets, starts, np.full(len(listed), share, np.float32))

    @classmethod
    def joined(cls, parts: list["Samples"]) -> "Samples":
        shift = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [part.offsets[:-1] + by for part, by in zip(parts, shift)] + [shift[-1:]]
        names = ("ids", "starts", "share")
        ids, starts, share = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(ids, np.concatenate(offsets).astype(np.int64), starts, share)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def response_tokens(self) -> int:
        return int((self.lengths - self.starts)[self.starts > 0].sum())

    def get(self, index: int) -> Sample:
        return Sample(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist(), int(self.starts[index]))

    def rows(self, index: int) -> np.ndarray:
        """Positions t of a text whose token t + 2 belongs to the response."""
        length = int(self.offsets[index + 1] - self.offsets[index])
        return np.arange(max(int(self.starts[index]) - 2, 0), max(length - 2, 0))


def save(folder: Path, parts: dict[str, Samples]) -> None:
    """Sets of samples by name, in as few bytes as their ids allow."""
    tensors: dict[str, Any] = {}
    for name, part in parts.items():
        small = not len(part.ids) or int(part.ids.max()) < 1 << 16
        tensors[f"{name}.ids"] = part.ids.astype(np.uint16) if small else part.ids
        tensors[f"{name}.lengths"] = part.lengths.astype(np.int32)
        tensors[f"{name}.starts"], tensors[f"{name}.share"] = part.starts, part.share
    unfinished = folder / (FILE + ".part")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **tensors)
    unfinished.replace(folder / FILE)


def load(folder: Path) -> dict[str, Samples]:
    """What `save` wrote. Raises `TrainError` if it can't be read."""
    try:
        with np.load(folder / FILE, allow_pickle=False) as file:
            tensors = dict(file)
        names = dict.fromkeys(key.split(".")[0] for key in tensors)
        parts = {}
        for name in names:
            offsets = np.concatenate(([0], np.cumsum(tensors[f"{name}.lengths"]))).astype(np.int64)
            ids, starts, share = (tensors[f"{name}.{what}"] for what in ("ids", "starts", "share"))
            parts[name] = Samples(ids.astype(np.int32), offsets, starts, share)
        return parts
    except Exception as error:  # what a damaged file raises has many types
        raise TrainError(f"Can't read the samples in {folder / FILE}: {error}") from error


@dataclass
class Pack:
    """Which samples stand in a batch, and which of their positions are learned from."""

    samples: list[int]
    rows: list[np.ndarray]


def packs(samples: Samples, tokens: int, rows: int, epoch: int, seed: int) -> list[Pack]:
    """All samples once, in an order of the epoch's own, in packs of at most `tokens` positions and `rows` rows."""
    rng = np.random.default_rng((seed, epoch))
    lengths = samples.lengths
    done: list[Pack] = []
    open_: list[tuple[Pack, list[int]]] = []  # with the room that is left
    for index in rng.permutation(len(samples)).tolist():
        own = samples.rows(index)
        share = float(samples.share[index])
        if share < 1:
            own = own[rng.random(len(own)) < share]
        if len(own) > rows:
            own = np.sort(rng.choice(own, rows, replace=False))
        if not len(own):
            continue
        length = int(lengths[index])
        if length > tokens:
            raise TrainError(f"A text of {length:,} tokens does not fit a batch: --tokens must be as many at least.")
        place = next((p for p in open_ if p[1][0] >= length and p[1][1] >= len(own)), None)
        if place is None:
            if len(open_) == 6:
                done.append(open_.pop(0)[0])
            place = (Pack([], []), [tokens, rows])
            open_.append(place)
        place[0].samples.append(index)
        place[0].rows.append(own)
        place[1][0] -= length
        place[1][1] -= len(own)
    return done + [pack for pack, _ in open_]


def batch(samples: Samples, pack: Pack, tokens: int, rows: int) -> tuple[Batch, torch.Tensor]:
    """A pack as tensors `[tokens]` and `[rows]`, filled up with a text that nothing is learned from; and where in
    `samples.ids` each position comes from, `[tokens]` (0 where it is filled up)."""
    origin, positions, starts = (np.zeros(tokens, np.int64) for _ in range(3))
    chosen, last = (np.zeros(rows, np.int64) for _ in range(2))
    at = count = 0
    for index, own in zip(pack.samples, pack.rows):
        first, length = int(samples.offsets[index]), int(samples.offsets[index + 1] - samples.offsets[index])
        origin[at : at + length] = np.arange(first, first + length)
        positions[at : at + length] = np.arange(length)
        starts[at : at + length] = at
        chosen[count : count + len(own)] = own + at
        last[count : count + len(own)] = at + length - 1
        at, count = at + length, count + len(own)
    # What fills up has short texts, which costs least.
    positions[at:] = np.arange(tokens - at) % 128
    starts[at:] = at + np.arange(tokens - at) // 128 * 128
    chosen[count:], last[count:] = chosen[count - 1], last[count - 1]
    ids = samples.ids[origin].astype(np.int64)
    made = Batch(*map(torch.from_numpy, (ids, positions, starts, chosen, last, np.arange(rows) < count)))
    return made, torch.from_numpy(origin)


def in_order(samples: Samples, tokens: int, rows: int) -> Iterator[Pack]:
    """Packs of all samples in their order, each with the rows that a decoder passes: t of the first response token's
    forward up to the last but two. A text with more rows than fit is in several packs."""
    pack, left, room = Pack([], []), tokens, rows
    for index, length in enumerate(samples.lengths.tolist()):
        own = np.arange(max(int(samples.starts[index]) - 1, 0), max(length - 2, 0))
        for part in np.array_split(own, max(1, -(-len(own) // rows))):
            if length > left or len(part) > room:
                yield pack
                pack, left, room = Pack([], []), tokens, rows
            pack.samples.append(index)
            pack.rows.append(part)
            left, room = left - length, room - len(part)
    if pack.samples:
        yield pack


def whole(samples: Samples, tokens: int) -> Iterator[Pack]:
    """Packs of all samples in their order, with a row of each pack only: for what is read, not learned from."""
    pack, left = Pack([], []), tokens
    for index, length in enumerate(samples.lengths.tolist()):
        if length > left:
            yield pack
            pack, left = Pack([], []), tokens
        pack.samples.append(index)
        pack.rows.append(np.arange(0 if len(pack.rows) else 1))
        left -= length
    if pack.samples:
        yield pack


def vocabulary(parts: list[Samples], size: int, count: int, always: Iterable[int]) -> torch.Tensor:
    """The `count` most frequent ids of what is learned from, ascending; `always` are among them, and of equally
    frequent ones the lowest."""
    frequency = np.zeros(size, np.int64)
    for part in parts:
        learned = np.arange(len(part.ids)) - np.repeat(part.offsets[:-1] + part.starts, part.lengths) >= 0
        frequency += np.bincount(part.ids[learned], minlength=size)[:size]
    for token in always:
        frequency[token] = np.iinfo(np.int64).max
    order = np.argsort(-frequency, kind="stable")[: min(count, size)]
    return torch.from_numpy(np.sort(order))
