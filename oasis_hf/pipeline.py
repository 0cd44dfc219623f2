"""Prediction and transfer beside the model, on side streams of a captured step (OasisKV section 4; issue B).

    model      | attend 0 | mlp 0 ...                | attend 1 | mlp 1 ...   attend l waits for its last transfer
    prediction |          | append, score, select 0  |          | append, ...
    transfer   | late layers' plans of the last step ...        | gather 0 | ...

The transfers of a step's later layers are issued by the next step, at its start: nothing at a step's end waits for
the link, and it is busy from the first kernel on. Their plans stay in the working sets meanwhile; `settle` makes up
for them where something else than a replay comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
        self._forked: set[torch.cuda.Stream] = set()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self.predict, self.transfer

    def _fork(self, stream: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        stream.wait_stream(after)
        self._forked.add(stream)

    def begin(self, late: dict[int, Callable[[], None]]) -> None:
        """Issue what the last step left. late: a layer's number and its transfer, in the layers' order."""
        if late:
            self._fork(self.transfer, torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.transfer):
            for layer, gather in late.items():
                gather()
                self._arrives[layer] = event = torch.cuda.Event()
                event.record(self.transfer)

    def arrive(self, layer: int) -> None:
        """The current stream waits until the blocks of a layer that came late are in their slots."""
        event = self._arrives.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

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

    def send(self, gather: Callable[[], None]) -> None:
        """A transfer of this step: after what is predicted so far."""
        self._fork(self.transfer, self.predict)
        with torch.cuda.stream(self.transfer):
            gather()

    def predicted(self) -> None:
        """The current stream waits until all is predicted: then what prediction reads, such as lengths, may change."""
        if self.predict in self._forked:
            torch.cuda.current_stream(self.device).wait_stream(self.predict)

    def join(self) -> None:
        """The current stream waits for all of it (a capture must not wait for a stream that has nothing of it)."""
        for stream in self._forked:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self.forget()

    def forget(self) -> None:
        """Let go of what is held: the capture that used it is over."""
        self._held.clear()
        self._forked.clear()
        self._arrives.clear()
