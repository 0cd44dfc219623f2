"""A reader's end of the control channel: what both sides agree on, offers, handles, leases."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .channel import Calls, check_secret, greet, soon
from .errors import Corrupt, Refused, StaleLease
from .transport import Lease
from .wire import Address, Tls, connect


@dataclass(frozen=True)
class Terms:
    """What must be equal before anything is read.

    Attributes:
        version: of this package. model: a fingerprint of the model and its weights.
        layout: of pages and handles, JSON: `page_bytes`, dtype, heads and so on.
        wire: settings by engine; only those of the engine that the reader chose are compared.
    """

    version: str
    model: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    wire: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, told: Any) -> "Terms":
        return cls(str(told["version"]), str(told["model"]), dict(told["layout"]), dict(told["wire"]))

    def agree(self, reader: "Terms", engine: str) -> None:
        """For the pool's side. Raises Refused with what differs and both values."""
        for what in ("version", "model"):
            ours, theirs = getattr(self, what), getattr(reader, what)
            if ours != theirs:
                raise Refused(what, f"The {what} differs: {ours!r} on the pool's side, {theirs!r} on the reader's.")
        _same("layout", self.layout, reader.layout)
        if engine not in self.wire:
            raise Refused("engine", f"The pool offers the engines {sorted(self.wire)}, not {engine!r:.40}.")
        _same("wire", self.wire[engine], reader.wire.get(engine, {}))


def _same(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            raise Refused(
                what,
                f"The {what} differs in {key!r}: {ours.get(key)!r} on the pool's side, {theirs.get(key)!r} on the "
                "reader's.",
            )


@dataclass(frozen=True)
class Offer:
    """What an engine needs to connect to a pool. A restarted pool server makes new ones.

    Attributes:
        engine: its name. host: where the control channel goes. fields: JSON. data: an engine's metadata.
        local: for an engine inside one process, the pool itself; never sent.
    """

    engine: str
    host: str
    fields: Mapping[str, Any]
    data: bytes = b""
    local: Any = None

    @property
    def pool_bytes(self) -> int:
        return int(self.fields["pool_bytes"])


class Control:
    """One reader's control channel to one pool server. Leases taken here are renewed until they are released.

    Args:
        address: host and port. secret: shared, at least 16 bytes. terms: this side's.
        engine: the one that will read. tls: certificates; both sides or neither.
        seconds: limit for connecting. beat, silence: of the heartbeat, seconds.
        on_lost: called once, from another thread, when the other side is gone.

    Raises:
        Refused: authentication, version, model, layout, engine or wire settings. PeerLost, DeadlineExceeded.
    """

    def __init__(
        self, address: Address, secret: bytes, terms: Terms, engine: str, tls: Tls | None = None,
        seconds: float = 10.0, beat: float = 1.0, silence: float = 5.0,
        on_lost: Callable[[Exception], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self.address, self.engine = address, engine
        until = soon(seconds)
        wire = connect(address, tls, seconds)
        try:
            channel = greet(wire, check_secret(secret), until)
            channel.send({"op": "control"}, until=until)
        except BaseException:
            wire.close()
            raise
        self._kept: dict[tuple[str, int], Lease] = {}
        self._calls = Calls(channel, beat, silence, self._renew_all, on_lost)
        try:
            left = max(0.0, until - time.monotonic())
            told, _ = self._calls.call("hello", seconds=left, engine=engine, terms=terms.json())
            self.terms = Terms.parse(told["terms"])
        except BaseException:
            self._calls.close()
            raise

    @property
    def lost(self) -> Exception | None:
        """Why the other side is gone, if it is."""
        return self._calls.lost

    def offer(self, seconds: float = 10.0) -> Offer:
        """What `Engine.connect` needs."""
        told, parts = self._calls.call("offer", seconds=seconds, engine=self.engine)
        return Offer(self.engine, self.address[0], told["offer"], bytes(parts[0]))

    def handle(self, request: str, seconds: float = 60.0) -> tuple[memoryview, Lease]:
        """A request's handle as it was published, and a lease on its pages.

        Raises:
            StaleLease: there is no such request (any more). Corrupt: the bytes are not those that were published.
        """
        sent = time.monotonic()
        told, (handle,) = self._calls.call("handle", seconds=seconds, request=request)
        if hashlib.sha256(handle).hexdigest() != told["sha256"]:
            raise Corrupt(f"The handle of request {request!r} differs from the published one (SHA-256).")
        ttl, grace = float(told["ttl"]), float(told["grace"])
        lease = Lease(request, int(told["generation"]), ttl, grace, sent + ttl)
        self.keep(lease)
        return handle, lease

    def keep(self, lease: Lease) -> None:
        """Has a lease renewed here from now on: one that was taken over a connection that is gone."""
        self._kept[lease.request, lease.generation] = lease

    def renew(self, lease: Lease, seconds: float = 10.0) -> None:
        """Renews a lease now. Raises StaleLease where it has ended."""
        sent = time.monotonic()
        try:
            told, _ = self._calls.call("renew", seconds=seconds, request=lease.request, generation=lease.generation)
        except StaleLease:
            self._ended(lease)
            raise
        lease.until = sent + float(told["ttl"])

    def release(self, lease: Lease, clean: bool = True, seconds: float = 10.0) -> None:
        """The request is over: its pages may be reused.

        Args:
            clean: no read of it is in flight, so they may be at once; else after the quarantine.
        """
        self._ended(lease)
        self._calls.call("release", seconds=seconds, request=lease.request, generation=lease.generation, clean=clean)

    def submit(
        self, request: str, ids: np.ndarray, seconds: float = 10.0, held: Any = None
    ) -> None:  # fmt: skip
        """A prompt, int64 `[n]`, for a `PrefillNode`. Raises PoolFull, and Refused where it is none.

        Args:
            held: `Held`, what this side has of it; None: it keeps nothing.
        """
        told = None if held is None else [held.count, held.name]
        self._calls.call("submit", [ids.astype("<i8").tobytes()], seconds=seconds, request=request, held=told)

    def stage(self, request: str, seconds: float = 10.0) -> str:
        """ "waiting" or "published". Raises StaleLease where there is no such request, DisaggError where it failed."""
        return str(self._calls.call("stage", seconds=seconds, request=request)[0]["stage"])

    def stats(self, seconds: float = 10.0) -> dict[str, Any]:
        """The pool's and its server's counters."""
        return dict(self._calls.call("stats", seconds=seconds)[0]["stats"])

    def close(self) -> None:
        """Leases still held end sooner: the pool takes the reader for dead."""
        self._calls.close()

    def _ended(self, lease: Lease) -> None:
        self._kept.pop((lease.request, lease.generation), None)
        lease.until = float("-inf")

    def _renew_all(self) -> None:
        """From the heartbeat's thread, which must not wait: the answers come in the other one."""
        for lease in list(self._kept.values()):
            sent = time.monotonic()
            if lease.until - sent > lease.ttl * 2 / 3:
                continue

            def answered(future: Any, lease: Lease = lease, sent: float = sent) -> None:
                error = future.exception()
                if isinstance(error, StaleLease):
                    self._ended(lease)
                elif error is None and (lease.request, lease.generation) in self._kept:
                    lease.until = sent + float(future.result()[0]["ttl"])

            future = self._calls.begin("renew", request=lease.request, generation=lease.generation)
            future.add_done_callback(answered)
