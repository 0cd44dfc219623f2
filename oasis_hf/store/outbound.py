"""Writes to the store beside the model: a layer's keys and values leave while the next layers compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Outbound:
    """One side stream of a store and what is on its way over it.

    When a layer's keys and values come, the current stream (never the host) waits until the layer's before it have
    arrived and lets go of them: two layers' at most are in the device's memory. `record_stream` would not bound that,
    since it keeps memory until the host, which runs far ahead, finds it unused.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        # Before others: a few CTAs that had to wait for a large kernel's last ones would always come late.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._layer: int | None = None
        self._held: list[torch.Tensor] = []

    @contextlib.contextmanager
    def beside(self, layer: int, *tensors: torch.Tensor) -> Iterator[None]:
        """What is issued inside runs after all that the current stream has so far, and beside what it gets from now on.

        Args:
            layer: whose writes these are. tensors: used inside: kept until the current stream has waited for them.
        """
        if layer != self._layer:
            self.join()
            self._layer = layer
        self._held += tensors
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """The current stream waits for all that was issued beside it, and nothing is kept any longer."""
        if self._held:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._held.clear()
