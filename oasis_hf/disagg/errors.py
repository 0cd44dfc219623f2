"""What can go wrong between two machines, one class each, and how it is told to the other side."""

from __future__ import annotations

from typing import Any


class DisaggError(RuntimeError):
    """Something about a remote pool failed; the kinds below say what."""


class PeerLost(DisaggError):
    """The other side died, went silent or closed. Blocks of a read that ends so count as not arrived."""


class DeadlineExceeded(DisaggError):
    """The other side lives as far as is known, but did not answer in time. A read's destination may still be written:
    see `Read.settled`."""


class StaleLease(DisaggError):
    """The request was released, or its lease ran out: its pages may hold another request's blocks."""


class Corrupt(DisaggError):
    """Bytes arrived that are not those that were sent."""


class Refused(DisaggError):
    """The other side answered, and said no.

    Attributes:
        what: authentication, version, model, layout, engine, wire, bounds, frame or request.
    """

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what = what

    def __str__(self) -> str:
        return str(self.args[1])


class PoolFull(DisaggError):
    """The staging pool has no room for a request now.

    Attributes:
        needed, free, quarantined, capacity: pages. requests: how many hold the others.
    """

    def __init__(self, needed: int, free: int, quarantined: int, capacity: int, requests: int) -> None:
        super().__init__(needed, free, quarantined, capacity, requests)
        self.needed, self.free, self.quarantined = needed, free, quarantined
        self.capacity, self.requests = capacity, requests

    def __str__(self) -> str:
        return (
            f"The staging pool is full: {self.needed:,} pages are needed, {self.free:,} of {self.capacity:,} are free "
            f"({self.requests} requests hold pages; {self.quarantined:,} pages wait until no late read can reach "
            "them). Try again later, or give the pool more pages."
        )


def again(error: Exception) -> Exception:
    """The same error to raise once more: one object would gather the frames of all that it was raised in."""
    return type(error)(*error.args) if isinstance(error, DisaggError) else error


_KINDS: dict[str, type[DisaggError]] = {
    kind.__name__: kind for kind in (DisaggError, PeerLost, DeadlineExceeded, StaleLease, Corrupt, Refused, PoolFull)
}


def packed(error: DisaggError) -> dict[str, Any]:
    """An error as JSON."""
    return {"kind": type(error).__name__, "args": list(error.args)}


def unpacked(told: Any) -> DisaggError:
    """The error that `packed` made; what makes no sense is a plain `DisaggError`."""
    try:
        return _KINDS[told["kind"]](*told["args"])
    except (KeyError, TypeError, IndexError):
        return DisaggError(f"The other side reported {told!r:.200}.")
