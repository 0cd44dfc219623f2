"""Frames over a wire: who is there (a shared secret), that nothing was changed, injected or replayed, and calls.

A frame is a JSON object and binary parts. Both sides prove that they know the secret by HMAC-SHA256 over fresh nonces
of both; each later frame carries an HMAC over its number and bytes under a key of that session and direction. It hides
nothing: that is TLS's part.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from typing import Any

from .errors import DeadlineExceeded, DisaggError, PeerLost, Refused, again, packed, unpacked
from .wire import Wire

PROTOCOL = 1
MIN_SECRET = 16
"""Bytes of a shared secret: the proof lets who listens try guesses."""

MAX_JSON = 1 << 20
MAX_BODY = 1 << 30
"""Most bytes of a frame's parts: a handle with the summaries of a long request is the largest thing sent."""

_UNPROVEN = 4096  # most bytes of a frame from someone who has proved nothing
_PREFIX = struct.Struct("!IQ")
_MAC = 32

Header = dict[str, Any]
Parts = Sequence[Any]
Handler = Callable[[str, Header, list[memoryview]], "tuple[Header, Parts]"]


class Channel:
    """Frames both ways. One thread may receive while others send.

    Args:
        keys: of what is sent and of what comes, or none (before the proof; between a process and its child).
        max_json, max_body: bytes of a frame that is accepted.
    """

    def __init__(
        self, wire: Wire, keys: tuple[bytes, bytes] | None = None, max_json: int = MAX_JSON, max_body: int = MAX_BODY
    ) -> None:
        self.wire, self.keys = wire, keys
        self.max_json, self.max_body = max_json, max_body
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(
        self, header: Header, parts: Parts = (), raw: Sequence[memoryview] = (), until: float | None = None,
        silence: float | None = None,
    ) -> None:  # fmt: skip
        """One frame, and behind it `raw` bytes as they are, which only TLS protects. Errors as `Wire.write`."""
        views = [memoryview(part).cast("B") for part in parts]
        text = json.dumps({**header, "parts": [len(view) for view in views]}).encode()
        prefix = _PREFIX.pack(len(text), sum(map(len, views)))
        with self._sending:
            frame = [memoryview(prefix), memoryview(text), *views]
            if self.keys is not None:
                frame.append(memoryview(_code(self.keys[0], self._sent, frame)))
            self._sent += 1
            try:
                self.wire.write([*frame, *raw], until, silence)
            except DisaggError:
                self.wire.shut()  # half a frame may have left: nothing that follows would be understood
                raise

    def receive(self, until: float | None = None, silence: float | None = None) -> tuple[Header, list[memoryview]]:
        """The next frame.

        Raises:
            Refused: it is too large, malformed, changed, injected or replayed; the connection is ended.
            DeadlineExceeded, PeerLost: as `Wire.read`.
        """
        prefix = bytearray(_PREFIX.size)
        self.wire.read([memoryview(prefix)], until, silence)
        size, rest = _PREFIX.unpack(prefix)
        if size > self.max_json or rest > self.max_body:
            self.wire.shut()
            raise Refused("frame", f"{self.wire.name} sent a frame of {size:,} + {rest:,} bytes, which is too large.")
        text, body, code = bytearray(size), bytearray(rest), bytearray(_MAC if self.keys is not None else 0)
        self.wire.read([memoryview(text), memoryview(body), memoryview(code)], until, silence)
        if self.keys is not None:
            frame = [memoryview(prefix), memoryview(text), memoryview(body)]
            if not hmac.compare_digest(_code(self.keys[1], self._received, frame), code):
                self.wire.shut()
                raise Refused(
                    "authentication", f"A frame from {self.wire.name} was changed, injected or sent again on its way."
                )
        self._received += 1
        try:
            return _parsed(text, body)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.wire.shut()
            raise Refused("frame", f"{self.wire.name} sent a frame that makes no sense: {error}.") from error


def _code(key: bytes, number: int, frame: list[memoryview]) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "big"), hashlib.sha256)
    for view in frame:
        mac.update(view)
    return mac.digest()


def _parsed(text: bytearray, body: bytearray) -> tuple[Header, list[memoryview]]:
    header = json.loads(text)
    sizes = header.pop("parts")
    if any(not isinstance(size, int) or size < 0 for size in sizes) or sum(sizes) != len(body):
        raise ValueError("the sizes of its parts do not fit")
    parts, at = [], 0
    for size in sizes:
        parts.append(memoryview(body)[at : at + size])
        at += size
    return header, parts


def _proof(secret: bytes, label: str, nonces: bytes) -> bytes:
    return hmac.new(secret, f"oasis-hf {PROTOCOL} {label} ".encode() + nonces, hashlib.sha256).digest()


def check_secret(secret: bytes) -> bytes:
    """Raises ValueError where it is too short to be one."""
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET:
        raise ValueError(f"A shared secret is at least {MIN_SECRET} bytes (such as secrets.token_bytes(32)).")
    return secret


def greet(wire: Wire, secret: bytes, until: float) -> Channel:
    """The connecting side of the proof.

    Raises:
        Refused: the secrets or the protocols differ. DeadlineExceeded, PeerLost.
    """
    plain = Channel(wire, None, _UNPROVEN, 0)
    mine = secrets.token_bytes(32)
    plain.send({"protocol": PROTOCOL, "nonce": mine.hex()}, until=until)
    nonces = mine + _nonce(_answer(plain, until))
    plain.send({"proof": _proof(secret, "client", nonces).hex()}, until=until)
    proof = str(_answer(plain, until).get("proof"))
    if not hmac.compare_digest(proof.encode(), _proof(secret, "server", nonces).hex().encode()):
        raise Refused("authentication", f"{wire.name} does not know the shared secret.")
    return Channel(wire, (_proof(secret, "to server", nonces), _proof(secret, "to client", nonces)))


def admit(wire: Wire, secret: bytes, until: float) -> Channel:
    """The accepting side of the proof. Errors as `greet`; the other side is told."""
    plain = Channel(wire, None, _UNPROVEN, 0)
    try:
        hello, _ = plain.receive(until)
        if hello.get("protocol") != PROTOCOL:
            raise Refused("version", f"This side speaks protocol {PROTOCOL}, the other {hello.get('protocol')!r:.20}.")
        mine = secrets.token_bytes(32)
        nonces = _nonce(hello) + mine
        plain.send({"nonce": mine.hex()}, until=until)
        proof = str(plain.receive(until)[0].get("proof"))
        if not hmac.compare_digest(proof.encode(), _proof(secret, "client", nonces).hex().encode()):
            raise Refused("authentication", "The shared secrets of the two sides differ.")
        plain.send({"proof": _proof(secret, "server", nonces).hex()}, until=until)
    except Refused as error:
        with contextlib.suppress(DisaggError):
            plain.send({"error": packed(error)}, until=until)
        raise
    return Channel(wire, (_proof(secret, "to client", nonces), _proof(secret, "to server", nonces)))


def _answer(channel: Channel, until: float) -> Header:
    header, _ = channel.receive(until)
    if "error" in header:
        raise unpacked(header["error"])
    return header


def _nonce(header: Header) -> bytes:
    try:
        nonce = bytes.fromhex(header["nonce"])
    except (KeyError, TypeError, ValueError):
        nonce = b""
    if len(nonce) != 32:
        raise Refused("frame", "The other side's nonce is not 32 bytes.")
    return nonce


class Calls:
    """Calls over a channel whose other side answers them by `serve`, and the heartbeat.

    Every `beat` seconds a beat is sent, as the other side does. Without a byte for `silence` seconds the other
    side is lost.

    Args:
        on_beat: called at every beat. on_lost: called once with the error, from a thread of this class.
    """

    def __init__(
        self, channel: Channel, beat: float = 1.0, silence: float = 5.0,
        on_beat: Callable[[], None] = lambda: None, on_lost: Callable[[Exception], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self.channel, self.beat, self.silence = channel, beat, silence
        self.lost: Exception | None = None
        self._on_beat, self._on_lost = on_beat, on_lost
        self._waiting: dict[int, Future] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._pulse)]
        for thread in self._threads:
            thread.start()

    def begin(self, op: str, parts: Parts = (), **fields: Any) -> Future:
        """Sends a call; its future gives (header, parts) or raises what the other side raised, or PeerLost."""
        future: Future = Future()
        with self._lock:
            if self.lost is not None:
                raise again(self.lost)
            self._number += 1
            number = self._number
            self._waiting[number] = future
        try:
            self.channel.send({"op": op, "id": number, **fields}, parts, silence=self.silence)
        except DisaggError as error:
            self._lose(error)
        return future

    def call(self, op: str, parts: Parts = (), seconds: float = 10.0, **fields: Any) -> tuple[Header, list[memoryview]]:
        """Sends a call and waits for its answer.

        Raises:
            DeadlineExceeded: no answer within `seconds`. PeerLost, and whatever the other side raised.
        """
        future = self.begin(op, parts, **fields)
        try:
            return future.result(seconds)
        except TimedOut:
            name = self.channel.wire.name
            raise DeadlineExceeded(f"{name} did not answer {op!r} within {seconds:g} s.") from None

    def _receive(self) -> None:
        try:
            while True:
                header, parts = self.channel.receive(silence=self.silence)
                future = self._waiting.pop(header.get("id", 0), None)
                if future is None:
                    continue  # a beat
                if "error" in header:
                    future.set_exception(unpacked(header["error"]))
                else:
                    future.set_result((header, parts))
        except DisaggError as error:
            self._lose(error)
        except Exception as error:
            self._lose(PeerLost(f"{self.channel.wire.name} sent what makes no sense: {error}."))
        finally:
            self.channel.wire.close()

    def _pulse(self) -> None:
        while not self._stop.wait(self.beat):
            try:
                self.channel.send({"op": "beat"}, silence=self.silence)
                self._on_beat()
            except DisaggError as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = error
            waiting, self._waiting = self._waiting, {}
        self._stop.set()
        self.channel.wire.shut()
        for future in waiting.values():
            future.set_exception(error)
        self._on_lost(error)

    def close(self) -> None:
        """Ends the connection and waits for the threads, if called from another one."""
        self._lose(PeerLost(f"The connection to {self.channel.wire.name} was closed."))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)


def serve(channel: Channel, handler: Handler, silence: float | None, beat: float = 1.0) -> None:
    """Answers calls until the other side is gone, and sends a beat every so many seconds, however long a call takes.
    What the handler raises is told to the other side; what is no `DisaggError`, such as a header without what the
    handler looks for, as Refused.

    Raises:
        PeerLost, Refused: how it ended.
    """
    stop = threading.Event()

    def pulse() -> None:
        with contextlib.suppress(DisaggError):
            while not stop.wait(beat):
                channel.send({"op": "beat"}, silence=silence)

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        while True:
            header, parts = channel.receive(silence=silence)
            if header.get("op") != "beat":
                channel.send(*_answered(handler, header, parts), silence=silence)
    finally:
        stop.set()
        channel.wire.shut()
        thread.join()


def _answered(handler: Handler, header: Header, parts: list[memoryview]) -> tuple[Header, Parts]:
    op, number = str(header.get("op")), header.get("id", 0)
    try:
        fields, answer = handler(op, header, parts)
        return {**fields, "id": number}, answer
    except DisaggError as error:
        return {"id": number, "error": packed(error)}, ()
    except Exception as error:
        refused = Refused("request", f"The call {op!r:.40} is not understood: {type(error).__name__} {error}.")
        return {"id": number, "error": packed(refused)}, ()


def soon(seconds: float) -> float:
    """The time of the monotonic clock in so many seconds."""
    return time.monotonic() + seconds
