"""Prediction and transfer beside the model, on side streams of a captured step (OasisKV section 4; issue B).

    model      | attend 0 | mlp 0 ...                | attend 1 | mlp 1 ...   attend l waits for its last transfer
    prediction |          | append, score, select 0  |          | append, ...
    transfer   | late layers' plans of the last step ...        | gather 0 to 5 | ...

The transfers of a step's later layers are issued by the next step, at its start: nothing at a step's end waits for
the link, and it is busy from the first kernel on. Their plans stay in the working sets meanwhile; `settle` makes up
for them where something else than a replay comes next. A launch moves a few layers' blocks: each has to wait until the
SMs it takes are free, and while it does the link is idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .store import BlockStore, Move

TOGETHER = 6
"""Layers whose blocks move in one launch."""


def together(moves: list[Move]) -> Iterator[list[Move]]:
    """What each launch moves."""
    for first in range(0, len(moves), TOGETHER):
        yield moves[first : first + TOGETHER]


class Pipeline:
    """Two side streams of one capture: `predict` and `transfer`.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.predict, self.transfer = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arrives: dict[int, torch.cuda.Event] = {}
        self._held: list[Any] = []
        self._sent: list[Move] = []
        self._store: BlockStore | None = None
        self._forked: set[torch.cuda.Stream] = set()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self.predict, self.transfer

    def _fork(self, stream: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        stream.wait_stream(after)
        self._forked.add(stream)

    def begin(self, store: BlockStore | None, late: list[Move]) -> None:
        """A step begins: issue what the last one left, in the layers' order. store: whence, unless no layer is
        sparse."""
        self._store = store
        if late:
            self._fork(self.transfer, torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.transfer):
            for moves in together(late):
                self._gather(moves)
                event = torch.cuda.Event()
                event.record(self.transfer)
                self._arrives.update((layer, event) for layer, *_ in moves)

    def _gather(self, moves: list[Move]) -> None:
        assert self._store is not None
        self._store.gather_layers(moves)

    def arrive(self, layer: int) -> None:
        """The current stream waits until the blocks of a layer that came late are in their slots."""
        event = self._arrives.get(layer)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
            self._arrives = {other: its for other, its in self._arrives.items() if its is not event}

    @contextlib.contextmanager
    def beside(self, *tensors: torch.Tensor) -> Iterator[None]:
        """What is issued inside predicts: after all that the current stream has so far, beside what it gets from now.

        Args:
            tensors: made on the current stream and used inside: kept, so that their memory is not given to others.
        """
        self._held += tensors
        self._fork(self.predict, torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.predict):
            yield

    def send(self, move: Move | None) -> None:
        """A transfer of this step: after what is predicted so far. None: none of this step comes after."""
        if move is not None:
            self._sent.append(move)
        if len(self._sent) == TOGETHER or (move is None and self._sent):
            self._fork(self.transfer, self.predict)
            with torch.cuda.stream(self.transfer):
                self._gather(self._sent)
            self._sent = []

    def drop(self) -> None:
        """What is not yet sent never is: the capture has failed."""
        self._sent = []

    def predicted(self) -> None:
        """The current stream waits until all is predicted: then what prediction reads, such as lengths, may change."""
        if self.predict in self._forked:
            torch.cuda.current_stream(self.device).wait_stream(self.predict)

    def join(self) -> None:
        """The current stream waits for all of it (a capture must not wait for a stream that has nothing of it)."""
        self.send(None)
        for stream in self._forked:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self.forget()

    def forget(self) -> None:
        """Let go of what is held: the capture that used it is over."""
        self._held.clear()
        self._sent, self._store = [], None
        self._forked.clear()
        self._arrives.clear()
