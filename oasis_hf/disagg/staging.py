"""The staging pool: pages in shared memory, lent to requests until their readers are done with them."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from ..config import BLOCK, ConfigError
from ..store.pages import HostMemoryError, PagePool, available_host_bytes
from .errors import PoolFull, StaleLease
from .mapping import NOBODY, Mapping


class Stage(Enum):
    """Where a request is: its pages are being written, may be read, or must not be reused yet."""

    FILLING = "filling"
    PUBLISHED = "published"
    QUARANTINED = "quarantined"


@dataclass(eq=False)
class _Request:
    pages: torch.Tensor
    generation: int
    until: float = float("inf")  # the lease's end, or the quarantine's
    stage: Stage = Stage.FILLING
    handle: bytes = b""
    pool: "RequestPages | None" = None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class RequestPages(PagePool):
    """A request's reserved pages as a pool, for its `HostStore`: same memory, and nothing beyond them. What the store
    gives back stays reserved until the lease ends.

    Args:
        whole: the pool that the pages are of. pages: `[n]` int64.
    """

    def __init__(self, whole: PagePool, pages: torch.Tensor) -> None:
        self._whole = whole  # whose end unpins the memory
        self.page_bytes, self.pages, self.capacity, self.pin = whole.page_bytes, whole.pages, whole.capacity, whole.pin
        self.references = torch.zeros(int(pages.max()) + 1 if len(pages) else 0, dtype=torch.int32)
        self._free = pages.flip(0)  # it is taken from the end
        self._used, self._reserved, self._pieces = 0, len(pages), whole._pieces
        self.devices = whole.devices
        self._closed = False
        self._lock, self._given_back = threading.Lock(), deque[torch.Tensor]()

    @property
    def pages_in_use(self) -> int:
        return self._reserved - len(self._free)

    def close(self) -> None:
        """The pages are as they will stay, or another's."""
        self._closed = True

    def allocate(self, count: int) -> torch.Tensor:
        if self._closed:
            raise HostMemoryError("A request that was published or released can't grow in the staging pool.")
        if count > len(self._free):
            raise HostMemoryError(
                f"A request needs {count:,} more pages, but of the {self._reserved:,} that it reserved in the staging "
                f"pool {len(self._free):,} are left: reserve more."
            )
        taken = self._free[len(self._free) - count :].flip(0)
        self._free = self._free[: len(self._free) - count]
        self.references[taken] = 1
        return taken


class StagingPool:
    """Pages of all requests, in a memfd that a pool server maps too. Every method may be called from any thread.

    A request reserves pages, fills them, publishes them with its handle, and is then read under a lease that its reader
    renews. At the lease's end its pages are nobody's at once, and another request's only when no read that began before
    can still be running.

    Args:
        capacity: pages. head_dim: D. dtype: of the pages. pin: register with CUDA, as a model on a GPU needs it.
        ttl: seconds of a lease. quarantine: seconds from a lease's end until its pages are reused, more than the
            longest deadline of a read.
        clock: seconds, monotonic.
        on_end: called with a request and why it ended, "released" or "expired"; it must not wait.

    Raises:
        HostMemoryError: the host has not so much memory, or CUDA can't pin it.
    """

    def __init__(
        self, capacity: int, head_dim: int, dtype: torch.dtype, pin: bool = False, ttl: float = 60.0,
        quarantine: float = 30.0, clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[str, str], None] = lambda request, why: None,
    ) -> None:  # fmt: skip
        for name, value in (("capacity", capacity), ("ttl", ttl), ("quarantine", quarantine)):
            if value < 0 or (value == 0 and name != "quarantine"):
                raise ConfigError(f"StagingPool.{name}={value!r} is not allowed: use a number above zero.")
        self.capacity, self.head_dim, self.dtype = capacity, head_dim, dtype
        self.page_bytes = 2 * BLOCK * head_dim * dtype.itemsize
        self.ttl, self.quarantine, self.clock, self._on_end = ttl, quarantine, clock, on_end
        need, free = Mapping.size(capacity, self.page_bytes), available_host_bytes()
        if need > free:
            raise HostMemoryError(
                f"A staging pool of {capacity:,} pages x {self.page_bytes:,} bytes needs {need / 2**30:.2f} GiB of "
                f"host memory, but {free / 2**30:.2f} GiB are available; use fewer pages."
            )
        self.fd = Mapping.create(capacity, self.page_bytes)
        self.mapping = Mapping(self.fd, capacity, self.page_bytes, writable=True)
        self.pool = PagePool(head_dim, dtype, pin, self.mapping.pool_bytes, memory=self.mapping.memory)
        if pin:  # all of it now, so that no prompt waits for it
            try:
                self.pool.release(self.pool.allocate(capacity))
            except BaseException:
                os.close(self.fd)
                raise
        self._requests: dict[str, _Request] = {}
        self._quarantined: list[_Request] = []
        # A reader's lease from an earlier process at this address must not fit by chance.
        self._generation = secrets.randbits(40) << 20
        self._lock = threading.RLock()

    def reserve(self, request: str, pages: int) -> tuple[torch.Tensor, int]:
        """Pages for a request, and their generation.

        Args:
            request: its name, not one that is here already. pages: layers x KV heads x blocks of all its tokens to
            come.

        Raises:
            PoolFull: not so many are free now. ValueError: the name or the number is wrong.
        """
        with self._lock:
            self.expire()
            if request in self._requests:
                raise ValueError(f"The request {request!r} is in the staging pool already: give each its own name.")
            if pages < 1:
                raise ValueError(f"A request can't reserve {pages} pages: it needs at least one.")
            if pages > self.free:
                raise PoolFull(pages, self.free, self.quarantined, self.capacity, len(self._requests))
            self._generation += 1
            taken = self.pool.allocate(pages).sort().values  # neighbours are read in one run
            self._requests[request] = held = _Request(taken, self._generation)
            return held.pages, held.generation

    def pages_of(self, request: str) -> PagePool:
        """The request's pages as a pool, for `HostStore(..., pool=...)`."""
        with self._lock:
            held = self._held(request)
            if held.pool is None:
                held.pool = RequestPages(self.pool, held.pages)
            return held.pool

    def publish(self, request: str, handle: bytes, keep: torch.Tensor | None = None) -> None:
        """A request's pages are complete: from now on they may be read, and its lease runs.

        Args:
            handle: what its reader gets. keep: `[n]` pages that are in use; the others are free again.
        """
        with self._lock:
            held = self._held(request)
            if held.stage is not Stage.FILLING:
                raise ValueError(f"The request {request!r} was published before.")
            if keep is not None:
                used = torch.isin(held.pages, keep.cpu().flatten())
                if int(used.sum()) != keep.unique().numel():
                    raise ValueError(f"The request {request!r} can't keep pages that it has not reserved.")
                spare, held.pages = held.pages[~used], held.pages[used]
                self.pool.release(spare)
            held.close()
            held.handle, held.stage, held.until = bytes(handle), Stage.PUBLISHED, self.clock() + self.ttl
            self.mapping.generations[held.pages.numpy()] = held.generation

    def handle(self, request: str) -> tuple[bytes, int]:
        """A published request's handle and generation; its lease begins anew. Raises StaleLease where it is not
        here."""
        with self._lock:
            self.expire()
            held = self._requests.get(request)
            if held is None or held.stage is not Stage.PUBLISHED:
                raise StaleLease(f"There is no published request {request!r} in the staging pool (any more).")
            held.until = self.clock() + self.ttl
            return held.handle, held.generation

    def holds(self, request: str) -> bool:
        """Whether it is published, and its lease runs."""
        with self._lock:
            self.expire()
            held = self._requests.get(request)
            return held is not None and held.stage is Stage.PUBLISHED

    def renew(self, request: str, generation: int) -> float:
        """A lease begins anew; gives its seconds. Raises StaleLease where it has ended."""
        with self._lock:
            self.expire()
            held = self._held(request, generation)
            if held.stage is Stage.PUBLISHED:  # the prefill's own time is its own
                held.until = self.clock() + self.ttl
            return self.ttl

    def shorten(self, request: str, generation: int, seconds: float) -> None:
        """The reader seems to be dead: its lease ends in `seconds` at most, unless it is renewed before."""
        with self._lock, contextlib.suppress(StaleLease):
            held = self._held(request, generation)
            if held.stage is Stage.PUBLISHED:
                held.until = min(held.until, self.clock() + seconds)

    def release(self, request: str, generation: int, clean: bool = False) -> None:
        """The request is over.

        Args:
            clean: nobody can be reading its pages: they are free at once; else after the quarantine. Unpublished ones
                always are.

        Raises:
            StaleLease: it was over before.
        """
        with self._lock:
            held = self._held(request, generation)
            clean = clean or held.stage is Stage.FILLING
            self._end(request, "released")
            if clean:
                self._quarantined.remove(held)
                self.pool.release(held.pages)

    def expire(self) -> list[str]:
        """Ends leases whose time is over and quarantines that are; gives the requests whose lease ended."""
        with self._lock:
            now = self.clock()
            ended = [name for name, held in self._requests.items() if now > held.until]
            for name in ended:
                self._end(name, "expired")
            for held in [held for held in self._quarantined if now >= held.until]:
                self._quarantined.remove(held)
                self.pool.release(held.pages)
            return ended

    def _held(self, request: str, generation: int | None = None) -> _Request:
        held = self._requests.get(request)
        if held is None or (generation is not None and held.generation != generation):
            raise StaleLease(f"The request {request!r} was released, or its lease ended.")
        return held

    def _end(self, request: str, why: str) -> None:
        held = self._requests.pop(request)
        held.close()
        self.mapping.generations[held.pages.numpy()] = NOBODY
        held.stage, held.until, held.handle = Stage.QUARANTINED, self.clock() + self.quarantine, b""
        self._quarantined.append(held)
        self._on_end(request, why)

    @property
    def free(self) -> int:
        """Pages that a request could reserve now."""
        return self.capacity - self.pool.pages_in_use

    @property
    def quarantined(self) -> int:
        """Pages that wait until no late read can reach them."""
        with self._lock:
            return sum(len(held.pages) for held in self._quarantined)

    def stats(self) -> dict[str, int | float]:
        """Pages by what they are, requests by where they are, bytes of a page, seconds until more pages are free at the
        latest if nothing is renewed (-1: never)."""
        with self._lock:
            self.expire()
            count = {stage: sum(held.stage is stage for held in self._requests.values()) for stage in Stage}
            ends = [held.until for held in self._quarantined]
            ends += [held.until + self.quarantine for held in self._requests.values()]
            soonest = min(ends, default=float("inf")) - self.clock()
            return {
                "capacity": self.capacity, "free": self.free, "quarantined": self.quarantined,
                "in_use": self.capacity - self.free - self.quarantined, "page_bytes": self.page_bytes,
                "filling": count[Stage.FILLING], "published": count[Stage.PUBLISHED],
                "more_in_s": round(soonest, 3) if np.isfinite(soonest) else -1,
            }  # fmt: skip

    def close(self) -> None:
        """Ends all leases at once; the memory goes with the last tensor on it."""
        with self._lock:
            self.mapping.generations[:] = NOBODY
            self._requests.clear()
            self._quarantined.clear()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
