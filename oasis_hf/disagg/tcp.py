"""Reads over TCP: a frame of runs goes out, their bytes come straight into place. With TLS it is the engine for links
that others can see; without, payload is neither hidden nor protected, as with NIXL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from .channel import Channel, check_secret, greet, soon
from .control import Offer
from .errors import DisaggError, PeerLost, Refused, again, packed, unpacked
from .mapping import Mapping
from .transport import Engine, Memory, Peer, Read
from .wire import Tls, connect

STALLED = 60.0
"""Seconds without a byte moved after which a server gives a reader up that does not take what it asked for."""

_INT = np.dtype("<i8")


class TcpEngine(Engine):
    """One connection a peer, on which many reads may be under way; they are answered in order.

    Args:
        secret: shared; of the control channel too. tls: certificates; both sides or neither.
    """

    name = "tcp"

    def __init__(self, memory: Memory, secret: bytes, tls: Tls | None = None) -> None:
        super().__init__(memory)
        self._secret, self._tls = check_secret(secret), tls

    def connect(self, offer: Offer, seconds: float = 10.0) -> Peer:
        until = soon(seconds)
        wire = connect((str(offer.fields["host"] or offer.host), int(offer.fields["port"])), self._tls, seconds)
        try:
            channel = greet(wire, self._secret, until)
            channel.send({"op": "data"}, until=until)
        except BaseException:
            wire.close()
            raise
        return _TcpPeer(self.memory, channel, offer.pool_bytes)


class _TcpPeer(Peer):
    def __init__(self, memory: Memory, channel: Channel, pool_bytes: int) -> None:
        super().__init__(channel.wire.name, memory, pool_bytes)
        self._channel = channel
        self._waiting: deque[Read] = deque()
        self._order = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _begin(self, read: Read) -> None:
        runs = read.runs
        parts = (runs.far.astype(_INT, copy=False).tobytes(), runs.size.astype(_INT, copy=False).tobytes())
        with self._order:
            if self.error is not None:
                raise again(self.error)
            self._waiting.append(read)
            self._channel.send({"generation": read.lease.generation}, parts, silence=STALLED)

    def _run(self) -> None:
        try:
            while True:
                header, _ = self._channel.receive()
                read = self._waiting[0]
                error = header.get("error")
                if error is None:
                    self._channel.wire.read(list(self._places(read)))
                    error = self._channel.receive()[0].get("error")
                self._waiting.popleft()
                read.finish(None if error is None else unpacked(error))
        except Exception as error:  # also an answer that nobody asked for
            told = error if isinstance(error, PeerLost) else PeerLost(f"{self.name} was given up: {error}.")
            with self._order:
                self.lose(told)
            while self._waiting:
                self._waiting.popleft().finish(told)
        finally:
            self._channel.wire.close()

    def _places(self, read: Read) -> Iterator[memoryview]:
        """Where the answer goes: runs that are neighbours here are one piece, wherever they come from."""
        near, size = read.runs.near, read.runs.size
        starts = np.flatnonzero(np.r_[True, near[1:] != near[:-1] + size[:-1]])
        view = self.memory.view
        for at, count in zip(near[starts].tolist(), np.add.reduceat(size, starts).tolist()):
            yield view[at : at + count]

    def lose(self, error: Exception) -> None:
        super().lose(error)
        self._channel.wire.shut()

    def close(self) -> None:
        super().close()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)


class Served:
    """Counters of a server's connections, all together.

    Attributes:
        reads, runs, payload (bytes): sent. refused: reads that were not.
    """

    def __init__(self) -> None:
        self.reads = self.runs = self.payload = self.refused = 0
        self._lock = threading.Lock()

    def add(self, runs: int = 0, payload: int = 0, refused: int = 0) -> None:
        with self._lock:
            self.reads += not refused
            self.runs += runs
            self.payload += payload
            self.refused += refused

    def told(self) -> dict[str, int]:
        return {"reads": self.reads, "runs": self.runs, "payload_bytes": self.payload, "refused": self.refused}


def serve_reads(channel: Channel, mapping: Mapping, served: Served) -> None:
    """The pool's side of one connection, until it ends. Every run's bounds and generation are checked before it is
    sent, and the generation once more behind it.

    Raises:
        PeerLost, Refused: how it ended.
    """
    view = mapping.view
    while True:
        header, parts = channel.receive()
        try:
            far, size = (np.frombuffer(part, _INT) for part in parts)
            generation = int(header["generation"])
            if len(far) != len(size) or not len(far):
                raise Refused("bounds", f"A read has {len(far)} places and {len(size)} sizes.")
            mapping.check(far, size, generation)
        except DisaggError as error:
            served.add(refused=1)
            channel.send({"error": packed(error)}, silence=STALLED)
            continue
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("frame", f"{channel.wire.name} sent a read that makes no sense: {error}.") from error
        payload = [view[at : at + count] for at, count in zip(far.tolist(), size.tolist())]
        channel.send({}, raw=payload, silence=STALLED)
        try:
            mapping.current(far, size, generation)
        except DisaggError as error:
            served.add(refused=1)
            channel.send({"error": packed(error)}, silence=STALLED)
        else:
            served.add(runs=len(far), payload=int(size.sum()))
            channel.send({}, silence=STALLED)
