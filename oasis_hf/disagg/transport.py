"""What all engines share: the runs of a read, the reader's memory, a peer, a read under way.

An engine moves bytes from a remote pool of pages to memory of this process, one-sided: nobody answers a read there.
"""

from __future__ import annotations

import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Corrupt, DeadlineExceeded, DisaggError, PeerLost, StaleLease, again
from .traffic import Traffic

if TYPE_CHECKING:
    from .control import Offer


@dataclass(frozen=True)
class Runs:
    """What one read is made of.

    Attributes:
        far: `[n]` int64, byte offsets in the pool. near: `[n]` int64, byte offsets in the reader's memory.
        size: `[n]` int64, bytes, each above zero.
    """

    far: np.ndarray
    near: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.far)

    @property
    def nbytes(self) -> int:
        return int(self.size.sum())

    def check(self, far_bytes: int, near_bytes: int) -> None:
        """Raises ValueError where a run is empty or leaves the pool or the memory: targets of one-sided reads do not
        check."""
        if not len(self):
            return
        smallest, largest = self.size.min(), self.size.max()
        for name, at, most in (("pool", self.far, far_bytes), ("reader's memory", self.near, near_bytes)):
            if smallest <= 0 or at.min() < 0 or at.max() > most - largest:  # perhaps
                wrong = (at < 0) | (self.size <= 0) | (at > most - self.size)
                if not wrong.any():
                    continue
                i = int(wrong.argmax())
                raise ValueError(
                    f"Run {i} of a read is {int(self.size[i]):,} bytes at {int(at[i]):,} of the {name}, which has "
                    f"{most:,}: a run has at least one byte and lies inside."
                )


def merged(far_pages: Any, near_pages: Any, page_bytes: int) -> Runs:
    """Pages as few runs: in the pool's order, neighbours that are adjacent on both sides joined.

    Args:
        far_pages, near_pages: `[n]` integers, page `far_pages[i]` of the pool goes to place `near_pages[i]` of the
            memory, both counted in pages.
    """
    far, near = (np.asarray(pages, dtype=np.int64).reshape(-1) for pages in (far_pages, near_pages))
    if len(far) != len(near):
        raise ValueError(f"{len(far)} pages of the pool can't go to {len(near)} places: give one place a page.")
    if (far[1:] < far[:-1]).any():
        order = far.argsort()
        far, near = far[order], near[order]
    # A small read takes about as long as these calls: none of them without need.
    joined = far[1:] - far[:-1] == 1
    if joined.any():
        joined &= near[1:] - near[:-1] == 1
    if not joined.any():
        size = np.empty(len(far), np.int64)
        size.fill(page_bytes)
        return Runs(far * page_bytes, near * page_bytes, size)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.concatenate((starts[1:], [len(far)]))
    return Runs(far[starts] * page_bytes, near[starts] * page_bytes, (ends - starts) * page_bytes)


@dataclass
class Lease:
    """The right to read a request's pages for a while. Times are this process's monotonic clock, and on the safe side.

    Attributes:
        generation: of the request's pages; no two requests of any pool share one.
        ttl: seconds that a renewal gives. grace: seconds that pages are kept from reuse after the lease's end.
        until: when it ends, if it is not renewed.
    """

    request: str
    generation: int
    ttl: float
    grace: float
    until: float

    def check(self, late: float = 0.0) -> None:
        """Raises StaleLease more than `late` seconds after the end."""
        if time.monotonic() > self.until + late:
            raise StaleLease(f"The lease on request {self.request!r} has ended: what is read now may be another's.")


class Memory:
    """Memory of this process that reads write to.

    Args:
        buffer: a contiguous CPU tensor or array, or any writable buffer; it must not move or go while it is in use.
    """

    def __init__(self, buffer: Any) -> None:
        if hasattr(buffer, "data_ptr"):
            import torch

            if buffer.device.type != "cpu" or not buffer.is_contiguous():
                raise ValueError(f"A tensor to read into must be contiguous and on the CPU, not on {buffer.device}.")
            buffer = buffer.detach().view(-1).view(torch.uint8).numpy()
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        if not (array.flags.c_contiguous and array.flags.writeable and array.nbytes):
            raise ValueError("A memory to read into must be contiguous, writable and not empty.")
        self.array = array.reshape(-1).view(np.uint8)
        self.address: int = self.array.ctypes.data
        self.nbytes: int = self.array.nbytes

    @property
    def view(self) -> memoryview:
        return self.array.data


def checksums(buffer: Any, page_bytes: int) -> np.ndarray:
    """`[pages]` int64: CRC-32 of each page of a buffer."""
    view = memoryview(buffer).cast("B")
    return np.array([zlib.crc32(view[at : at + page_bytes]) for at in range(0, len(view), page_bytes)], np.int64)


def verify(memory: Memory, near_pages: Any, sums: Sequence[int] | np.ndarray, page_bytes: int) -> None:
    """Pages that were read against their CRC-32. Raises Corrupt with the first that differs."""
    for page, want in zip(np.asarray(near_pages).tolist(), np.asarray(sums).tolist()):
        if zlib.crc32(memory.view[page * page_bytes : (page + 1) * page_bytes]) != want:
            raise Corrupt(f"The block read to place {page} differs from the one that was staged (CRC-32).")


class Read:
    """A read under way. Any thread may wait for it.

    Its result (`done`, `wait`) and its destination (`settled`) are two things: at a deadline, or when the peer is given
    up, the result is known, but the engine may still write. Never use or free the destination before `settled`.
    """

    def __init__(self, peer: "Peer", runs: Runs, lease: Lease) -> None:
        self.peer, self.runs, self.lease = peer, runs, lease
        self.nbytes = runs.nbytes
        self.error: Exception | None = None
        self.overdue = False
        self._is_over = self._is_settled = False

    def done(self) -> bool:
        """Whether the result is known; `wait` then returns or raises at once."""
        self._advance()
        return self._is_over

    @property
    def settled(self) -> bool:
        """Whether nothing will write to the destination any more."""
        self._advance()
        return self._is_settled

    def wait(self, seconds: float) -> None:
        """Until all bytes are there. A read that is late may be waited for again.

        Raises:
            DeadlineExceeded: not within `seconds`; from now on the read is in quarantine: see `settled`.
            PeerLost, StaleLease, Refused: as their names say. The bytes count as not arrived.
        """
        if not self._await(lambda: self._is_over, seconds):
            self.overdue = True
            raise DeadlineExceeded(
                f"A read of {self.nbytes:,} bytes from {self.peer.name} did not end within {seconds:g} s; its "
                "destination is in quarantine until it does."
            )
        if self.error is not None:
            raise again(self.error)

    def wait_settled(self, seconds: float) -> bool:
        """Until the destination may be used again; whether it may."""
        return self._await(lambda: self._is_settled, seconds)

    def _await(self, reached: Callable[[], bool], seconds: float) -> bool:
        with self.peer.changed:
            return self.peer.changed.wait_for(reached, seconds)

    def _advance(self) -> None:
        """Engines without a thread of their own look how far they are."""

    def lose(self, error: Exception) -> None:
        """The result is this error, whatever may still arrive."""
        with self.peer.changed:
            if not self._is_over:
                self.error, self._is_over = error, True
                self.peer.changed.notify_all()

    def finish(self, error: Exception | None = None) -> None:
        """For engines: nothing writes to the destination any more."""
        if error is None:
            try:
                self.lease.check(self.lease.grace)  # later, pages may have been given to others under the read
            except StaleLease as stale:
                error = stale
        with self.peer.changed:
            if self._is_settled:
                return
            if not self._is_over:
                self.error = error
            self.peer._ended(self)
            self._is_over = self._is_settled = True
            self.peer.changed.notify_all()


class Peer(ABC):
    """A remote pool, connected.

    Args:
        name: for messages. memory: where reads go to. pool_bytes: of the pool's pages.
    """

    def __init__(self, name: str, memory: Memory, pool_bytes: int) -> None:
        self.name, self.memory, self.pool_bytes = name, memory, pool_bytes
        self.traffic = Traffic()
        self.error: Exception | None = None
        self._reads: set[Read] = set()
        self.changed = threading.Condition()

    def read(self, runs: Runs, lease: Lease) -> Read:
        """Begins a read and returns at once.

        Raises:
            ValueError: a run is empty or out of bounds. StaleLease: the lease has ended. PeerLost: the peer is gone.
        """
        runs.check(self.pool_bytes, self.memory.nbytes)
        lease.check()
        read = self._make(runs, lease)
        with self.changed:
            if self.error is not None:
                raise again(self.error)
            self._reads.add(read)
        self.traffic.began(len(runs))
        if not len(runs):
            read.finish()
            return read
        try:
            self._begin(read)
        except BaseException as error:
            told = error if isinstance(error, DisaggError) else PeerLost(f"A read from {self.name} failed: {error}")
            read.finish(told)
            raise
        return read

    @property
    def quarantined(self) -> list[Read]:
        """Reads whose result is known, or overdue, while their destination may still be written."""
        return [read for read in self.in_flight if read.overdue or read._is_over]

    @property
    def in_flight(self) -> list[Read]:
        with self.changed:
            return list(self._reads)

    def lose(self, error: Exception) -> None:
        """The peer is given up: waiting reads end with this error and new ones are refused. Destinations stay in
        quarantine until they are settled."""
        with self.changed:
            self.error = self.error or error
            for read in self._reads:
                read.lose(error)

    def close(self) -> None:
        """No more reads. Those in flight are lost; what they need is kept until they are settled."""
        self.lose(PeerLost(f"The connection to {self.name} was closed."))

    def _make(self, runs: Runs, lease: Lease) -> Read:
        return Read(self, runs, lease)

    def _ended(self, read: Read) -> None:
        self._reads.discard(read)
        self.traffic.ended(read.nbytes if read.error is None else 0)

    @abstractmethod
    def _begin(self, read: Read) -> None:
        """Sends it on its way."""


class Engine(ABC):
    """A way to read. One per process and destination.

    Args:
        memory: where all its reads go to, registered once.
    """

    name: str

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def wire(self) -> dict[str, Any]:
        """Settings that must be equal on both ends, compared before anything is connected."""
        return {}

    @abstractmethod
    def connect(self, offer: "Offer", seconds: float = 10.0) -> Peer:
        """A peer of what `Control.offer` gave.

        Raises:
            PeerLost: it is not there. Refused: it is, and said no. DeadlineExceeded: it did not answer.
        """

    def close(self) -> None:
        """Gives back what has no reads in flight; the rest is kept until the process ends."""
        return None
