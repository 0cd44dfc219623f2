"""Prediction and transfer beside the model: what a layer fetches for the next step runs on a side stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Pipeline:
    """One side stream of a step. A layer's score, select and gather are forked off once its own attention and append
    are issued, and run while the later layers compute; `join` makes the step's end wait for the last of them.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._held: list[Any] = []

    @contextlib.contextmanager
    def beside(self, *tensors: torch.Tensor) -> Iterator[None]:
        """What is issued inside runs after all that the current stream has so far, and beside what it gets from now on.

        Args:
            tensors: made on the current stream and used inside: kept, so that their memory is not given to others.
        """
        self._held += tensors
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """The current stream waits for all that was issued beside it (if nothing was, a capture must not wait)."""
        if not self._held:
            return
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.forget()

    def forget(self) -> None:
        """Let go of what is held: the capture that used it is over."""
        self._held.clear()
