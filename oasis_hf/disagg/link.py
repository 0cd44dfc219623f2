"""A reader's whole connection to one prefill node: control channel and peer, given up and made again together."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from .channel import soon
from .control import Control, Terms
from .errors import DeadlineExceeded, DisaggError, PeerLost, StaleLease, again
from .transport import Engine, Lease, Peer, Read, Runs
from .wire import Address, Tls

PAUSE = 0.1
"""Seconds between two tries to connect."""

ABSENT = (5.0, 60.0)
"""Seconds that a node which was waited for in vain is not waited for again: at first, and at most."""


def costs_nothing(error: Exception) -> bool:
    """Whether it says that nobody listens there, which is told at once."""
    return isinstance(error.__cause__, ConnectionRefusedError)


class Absence:
    """Whether a node has just been waited for in vain: who comes next fails at once. Each more time in a row counts
    twice as long."""

    def __init__(self) -> None:
        self._seconds, self._until = ABSENT[0], 0.0
        self._told: DisaggError | None = None

    def check(self) -> None:
        """Raises what was told the last time, where that was lately."""
        if self._told is not None and time.monotonic() < self._until:
            raise again(self._told)

    def note(self, told: DisaggError, error: DisaggError) -> None:
        """It was waited for in vain, because of `error`, unless that came at once."""
        if not costs_nothing(error):
            # As it is when it was not raised: else it would keep what ran into it alive, pages too.
            self._told, self._until = cast(DisaggError, again(told)), time.monotonic() + self._seconds
            self._seconds = min(2 * self._seconds, ABSENT[1])

    def end(self) -> None:
        """It is there."""
        self._seconds, self._told = ABSENT[0], None


class Link:
    """Connects at once, and again by `reconnect`: a restarted pool server has new metadata for the same pages.

    When the control channel's heartbeat fails, reads in flight end with PeerLost, whatever the engine knows.

    Args:
        address, secret, terms, tls, beat, silence: as `Control`; the engine's wire settings are filled in here.
        engine: reads; its memory is where they go to. seconds: limit for connecting.

    Raises:
        As `Control` and `Engine.connect`.
    """

    control: Control
    peer: Peer

    def __init__(
        self, address: Address, secret: bytes, terms: Terms, engine: Engine, tls: Tls | None = None,
        seconds: float = 10.0, beat: float = 1.0, silence: float = 5.0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._leases: list[Lease] = []
        self._connecting, self._closed, self._absence = threading.Lock(), False, Absence()
        wire = {engine.name: engine.wire}
        terms = Terms(terms.version, terms.model, terms.layout, wire)
        self._how = (address, secret, terms, engine.name, tls)
        self._beats: dict[str, Any] = {"beat": beat, "silence": silence}
        self._connect(soon(seconds))

    def _connect(self, until: float) -> None:
        def lost(error: Exception) -> None:
            for peer in peers:
                peer.lose(error)

        left = max(0.1, until - time.monotonic())
        peers: list[Peer] = []
        control = Control(*self._how, seconds=left, on_lost=lost, **self._beats)
        try:
            self.peer = self.engine.connect(control.offer(left), left)
            peers.append(self.peer)
        except BaseException:
            control.close()
            raise
        self.control = control
        if control.lost is not None:
            self.peer.lose(control.lost)

    @property
    def lost(self) -> Exception | None:
        """Why the node is gone, if it is."""
        return self.control.lost or self.peer.error

    def handle(self, request: str, seconds: float = 60.0) -> tuple[memoryview, Lease]:
        """As `Control.handle`; the lease lives on over a `reconnect`."""
        handle, lease = self.control.handle(request, seconds)
        self._leases.append(lease)
        return handle, lease

    def read(self, runs: Runs, lease: Lease) -> Read:
        """As `Peer.read`."""
        return self.peer.read(runs, lease)

    def release(self, lease: Lease, seconds: float = 10.0) -> None:
        """The request is over. Its pages are reused at once if none of its reads is in flight."""
        if lease in self._leases:
            self._leases.remove(lease)
        clean = not any(read.lease is lease for read in self.peer.in_flight)
        self.control.release(lease, clean, seconds)

    def reconnect(self, seconds: float = 10.0) -> None:
        """Connects anew, trying until it succeeds, and renews the leases that are held; one that has ended meanwhile
        tells it at its next read.

        Raises:
            PeerLost, DeadlineExceeded: not within `seconds`; PeerLost at once where nobody listens, since the pages are
            gone with who did, and where this side has closed the link. Refused: for good.
        """
        with self._connecting:
            self._reconnect(seconds)

    def restore(self, seconds: float) -> None:
        """`reconnect`, if it is lost. Of several threads one does it and the others wait for it.

        Raises:
            PeerLost: not within `seconds`, or lately not (`ABSENT`). Refused: for good.
        """
        with self._connecting:
            if isinstance(self.lost, PeerLost):
                self._absence.check()
                try:
                    self._reconnect(seconds)
                except (PeerLost, DeadlineExceeded) as error:
                    host, port = self._how[0]
                    lost = PeerLost(f"{host}:{port} was lost and did not come back: {error}")
                    self._absence.note(lost, error)
                    raise lost from error
                self._absence.end()

    def _reconnect(self, seconds: float) -> None:
        until = soon(seconds)
        self._drop()
        while True:
            if self._closed:
                raise PeerLost("The connection was closed on this side.")
            try:
                self._connect(until)
                break
            except (PeerLost, DeadlineExceeded) as error:
                if costs_nothing(error) or time.monotonic() + PAUSE >= until:
                    raise
                time.sleep(PAUSE)
        if self._closed:
            self._drop()
        for lease in list(self._leases):
            try:
                self.control.renew(lease)
                self.control.keep(lease)
            except StaleLease:
                self._leases.remove(lease)

    def close(self) -> None:
        """For good. Leases still held end soon."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self.peer.close()
        self.control.close()
