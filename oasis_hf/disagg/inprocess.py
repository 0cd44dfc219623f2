"""Reads from a pool in this process, by a thread: one process as two, and the tests' stand-in."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .control import Offer
from .errors import DisaggError, PeerLost, StaleLease
from .mapping import Mapping
from .transport import Engine, Lease, Memory, Peer, Read, Runs

if TYPE_CHECKING:
    from .staging import StagingPool


def offer(mapping: Mapping) -> Offer:
    """Of a pool mapped here (`StagingPool.mapping`)."""
    return Offer("inprocess", "", {"pool_bytes": mapping.pool_bytes}, local=mapping)


class InProcessEngine(Engine):
    """Copies.

    Args:
        hook: called with a read's runs before they are copied: sleeping delays it, a `DisaggError` fails it.
    """

    name = "inprocess"

    def __init__(self, memory: Memory, hook: Callable[[Runs], None] = lambda runs: None) -> None:
        super().__init__(memory)
        self._hook = hook

    def connect(self, offer: Offer, seconds: float = 10.0) -> Peer:
        return _InProcessPeer(self.memory, offer.local, self._hook)


class _InProcessPeer(Peer):
    def __init__(self, memory: Memory, mapping: Mapping, hook: Callable[[Runs], None]) -> None:
        super().__init__("this process", memory, mapping.pool_bytes)
        self._mapping, self._hook = mapping, hook
        self._queue: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _begin(self, read: Read) -> None:
        self._queue.put(read)

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            if self.error is not None:
                read.finish(self.error)
                continue
            try:
                self._copy(read)
            except DisaggError as error:
                read.finish(error)
                if isinstance(error, PeerLost):
                    self.lose(error)
            else:
                read.finish()

    def _copy(self, read: Read) -> None:
        runs, far, near = read.runs, self._mapping.view, self.memory.view
        self._hook(runs)
        self._mapping.check(runs.far, runs.size, read.lease.generation)
        for at, to, size in zip(runs.far.tolist(), runs.near.tolist(), runs.size.tolist()):
            near[to : to + size] = far[at : at + size]
        self._mapping.current(runs.far, runs.size, read.lease.generation)

    def close(self) -> None:
        super().close()
        self._queue.put(None)


class LocalLink:
    """What `Link` is, for a staging pool in this process: no server, no control channel.

    Args:
        staging: the pool. engine: reads; its memory is where they go to.
    """

    def __init__(self, staging: "StagingPool", engine: InProcessEngine) -> None:
        self.staging, self.engine = staging, engine
        self._leases: list[Lease] = []
        self._stop = threading.Event()
        self.peer = engine.connect(offer(staging.mapping))
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> Exception | None:
        """Why the pool can't be read, if it can't."""
        return self.peer.error

    def handle(self, request: str, seconds: float = 60.0) -> tuple[memoryview, Lease]:
        """As `Link.handle`."""
        now, staging = time.monotonic(), self.staging
        handle, generation = staging.handle(request)
        lease = Lease(request, generation, staging.ttl, staging.quarantine, now + staging.ttl)
        self._leases.append(lease)
        return memoryview(handle), lease

    def read(self, runs: Runs, lease: Lease) -> Read:
        """As `Peer.read`."""
        return self.peer.read(runs, lease)

    def release(self, lease: Lease, seconds: float = 10.0) -> None:
        """As `Link.release`."""
        if lease in self._leases:
            self._leases.remove(lease)
        lease.until = float("-inf")
        clean = not any(read.lease is lease for read in self.peer.in_flight)
        self.staging.release(lease.request, lease.generation, clean)

    def reconnect(self, seconds: float = 10.0) -> None:
        """As `Link.reconnect`."""
        self.peer.close()
        self.peer = self.engine.connect(offer(self.staging.mapping))

    def close(self) -> None:
        """Leases still held are no longer renewed."""
        self._stop.set()
        self.peer.close()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stop.wait(self.staging.ttl / 3):
            for lease in list(self._leases):
                now = time.monotonic()
                try:
                    lease.until = now + self.staging.renew(lease.request, lease.generation)
                except StaleLease:
                    lease.until = float("-inf")
                    self._leases.remove(lease)
