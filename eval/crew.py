"""The ranks of a torchrun as one crew: the first leads, and what it says the others do at the same time.

Only the leader knows which points are left and how much time, so ranks can't disagree about what comes next.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Row = dict[str, Any]

STUCK = datetime.timedelta(minutes=3)
"""After so long in one collective of the model a rank gives up: another has failed."""

PATIENCE = datetime.timedelta(hours=2)
"""How long ranks wait for the leader, who also measures alone."""


class Crew:
    """Of a torchrun's ranks, or of this process alone.

    Args:
        device: "cuda", each rank its own GPU, with NCCL; "cpu", with gloo. jobs: by name, what all ranks can do; each
            gives a row, of which the leader's is told.

    Attributes:
        rank, size: of this process, and how many there are.
    """

    def __init__(self, device: str, jobs: dict[str, Callable[..., Row]]) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.jobs = device, jobs
        self._talk: Any = None
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if self.size > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=STUCK)
            self._talk = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def all_do(self, job: str, **arguments: Any) -> Row:
        """The leader has all ranks do a job. Raises `torch.OutOfMemoryError` where it did not fit on any of them."""
        if self.size > 1:
            dist.broadcast_object_list([(job, arguments)], 0, group=self._talk)
        return self._did(job, arguments)

    def follow(self) -> None:
        """The others do what the leader says, until it is done."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, 0, group=self._talk)
            if told[0] is None:
                return
            with contextlib.suppress(torch.OutOfMemoryError):  # the leader tells
                self._did(*told[0])
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def dismiss(self) -> None:
        """The leader has no more to do. All captured steps must be gone: NCCL waits for them."""
        if self.size > 1:
            if self.leads:
                dist.broadcast_object_list([None], 0, group=self._talk)
            gc.collect()
            dist.destroy_process_group()

    def _did(self, job: str, arguments: Row) -> Row:
        row, full = {}, None
        try:
            row = self.jobs[job](**arguments)
        except torch.OutOfMemoryError as error:
            full = str(error)
        if self.size > 1:
            fits: list[Any] = [None] * self.size
            dist.all_gather_object(fits, full, group=self._talk)
            full = next((why for why in fits if why is not None), None)
        if full is not None:
            raise torch.OutOfMemoryError(full)
        return row
