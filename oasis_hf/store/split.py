"""The full KV of a model whose layers lie on several devices: a store for the layers of each, over the same pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import BlockStore


class SplitStore(BlockStore):
    """Hands every call to the store of the layer's device, or to all of them.

    Args:
        devices: of each sparse layer. make: makes the store of so many layers on a device, beside another whose memory
            it shares (None: it is the first).
    """

    def __init__(
        self, devices: list[torch.device], make: Callable[[int, torch.device, Any], BlockStore] | None = None
    ) -> None:
        self.devices = devices
        self.parts: dict[torch.device, BlockStore] = {}
        for device in dict.fromkeys(devices):
            if make is not None:
                self.parts[device] = make(devices.count(device), device, next(iter(self.parts.values()), None))
        self._local = [devices[:layer].count(device) for layer, device in enumerate(devices)]

    def _at(self, layer: int) -> tuple[Any, int]:
        """The layer's store, and its number there."""
        return self.parts[self.devices[layer]], self._local[layer]

    def ensure(self, old: list[int], new: list[int]) -> None:
        done = []
        try:
            for part in self.parts.values():
                part.ensure(old, new)
                done.append(part)
        except BaseException:  # all or none
            for part in done:
                part.truncate(old)
            raise

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        part, own = self._at(layer)
        part.write(own, row, start, keys, values)

    def join(self) -> None:
        for part in self.parts.values():
            part.join()

    def append(
        self, layer: int, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, some: bool = False
    ) -> None:  # fmt: skip
        part, own = self._at(layer)
        part.append(own, lengths, keys, values, some)

    def read(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, own = self._at(layer)
        return part.read(own, row, start, stop)

    def load(
        self, layer: int, row: int, start: int, stop: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, own = self._at(layer)
        return part.load(own, row, start, stop, like)

    def gather(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, plan_block: torch.Tensor, plan_slot: torch.Tensor
    ) -> None:
        part, own = self._at(layer)
        part.gather(own, keys, values, plan_block, plan_slot)

    def arrive(self, layer: int | None = None) -> None:
        if layer is not None:
            part, own = self._at(layer)
            return part.arrive(own)
        for part in self.parts.values():
            part.arrive()

    def abandon(self) -> None:
        for part in self.parts.values():
            part.abandon()

    def device_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        part, own = self._at(layer)
        return part.device_pages(own)

    def truncate(self, new: list[int]) -> None:
        for part in self.parts.values():
            part.truncate(new)

    def select_rows(self, index: list[int]) -> None:
        for part in self.parts.values():
            part.select_rows(index)

    def fork(self) -> "SplitStore":
        other = SplitStore(self.devices)
        other.parts = {device: part.fork() for device, part in self.parts.items()}
        return other

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    @property
    def bytes_copied(self) -> int:  # type: ignore[override]
        return sum(part.bytes_copied for part in self.parts.values())

    @property
    def beyond(self) -> str | None:  # type: ignore[override]
        return next(iter(self.parts.values())).beyond

    @property
    def placement(self) -> str | None:
        return next(iter(self.parts.values())).placement

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def near_bytes(self) -> int:
        if self.beyond is not None:  # one memory above the tier, which each counts as its own
            return next(iter(self.parts.values())).near_bytes
        return self.nbytes
