"""A reader's whole connection to one prefill node: control channel and peer, given up and made again together."""

from __future__ import annotations

import time
from typing import Any

from .channel import soon
from .control import Control, Terms
from .errors import DeadlineExceeded, PeerLost, StaleLease
from .transport import Engine, Lease, Peer, Read, Runs
from .wire import Address, Tls

PAUSE = 0.1
"""Seconds between two tries to connect."""


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
            PeerLost, DeadlineExceeded: not within `seconds`. Refused: for good.
        """
        until = soon(seconds)
        self.close()
        while True:
            try:
                self._connect(until)
                break
            except (PeerLost, DeadlineExceeded):
                if time.monotonic() + PAUSE >= until:
                    raise
                time.sleep(PAUSE)
        for lease in list(self._leases):
            try:
                self.control.renew(lease)
                self.control.keep(lease)
            except StaleLease:
                self._leases.remove(lease)

    def close(self) -> None:
        """Leases still held end soon."""
        self.peer.close()
        self.control.close()
