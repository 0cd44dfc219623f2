"""A connected socket, plain or TLS, that one thread reads while another writes, with a time limit on everything."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .errors import DeadlineExceeded, PeerLost, Refused

Address = tuple[str, int]

_IOV = min(1024, os.sysconf("SC_IOV_MAX")) if "SC_IOV_MAX" in os.sysconf_names else 16
_AT_ONCE = 1 << 20
_TLS_CHUNK = 1 << 18  # a bytes object of this size is sent at once where one can't send several pieces


@dataclass(frozen=True)
class Tls:
    """Mutual TLS 1.3: either side shows a certificate that the other's `ca` vouches for. Host names are not compared,
    since nodes are named by address and the authority is your own.

    Attributes:
        cert, key, ca: paths of PEM files.
    """

    cert: str
    key: str
    ca: str

    def context(self, server: bool) -> ssl.SSLContext:
        """Raises OSError or ssl.SSLError where the files are not there or do not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)
        return context


class Wire:
    """Reads and writes whole buffers.

    Args:
        sock: connected. name: for messages. context: of TLS. server: this side accepted.
        seconds: limit of TLS's handshake.
    """

    def __init__(
        self, sock: socket.socket, name: str, context: ssl.SSLContext | None = None, server: bool = False,
        seconds: float = 10.0,
    ) -> None:  # fmt: skip
        self.name, self.tls = name, context is not None
        self._sock = sock
        # OpenSSL's state must not be used by two threads at once; plain sockets may.
        self._lock: contextlib.AbstractContextManager = threading.Lock() if self.tls else contextlib.nullcontext()
        if sock.family != socket.AF_UNIX:
            _watchful(sock)
        try:
            if context is not None:
                sock.settimeout(seconds)
                self._sock = context.wrap_socket(sock, server_side=server)
            self._sock.setblocking(False)
        except ssl.SSLError as error:
            sock.close()
            raise Refused("authentication", f"TLS with {name} failed: {error}.") from error
        except OSError as error:
            sock.close()
            raise PeerLost(f"{name} did not speak TLS: {error}.") from error

    def read(self, views: Sequence[memoryview], until: float | None = None, silence: float | None = None) -> None:
        """Fills the buffers, in order.

        Args:
            until: time of the monotonic clock. silence: most seconds without a byte.

        Raises:
            DeadlineExceeded: not by `until`. PeerLost: closed, or silent for so long.
        """
        if self.tls:
            for view in views:
                self._move(lambda some: self._sock.recv_into(some[0]), select.POLLIN, [view], until, silence)
        else:
            self._move(lambda some: self._sock.recvmsg_into(some)[0], select.POLLIN, views, until, silence)

    def write(self, views: Sequence[memoryview], until: float | None = None, silence: float | None = None) -> None:
        """Sends the buffers. Arguments and errors as `read`."""
        if self.tls:
            for view in _joined(views):
                self._move(lambda some: self._sock.send(some[0]), select.POLLOUT, [view], until, silence)
        else:
            self._move(self._sock.sendmsg, select.POLLOUT, views, until, silence)

    def _move(
        self, step: Callable[[list[memoryview]], int], event: int, views: Sequence[memoryview], until: float | None,
        silence: float | None,
    ) -> None:  # fmt: skip
        heard = time.monotonic()
        left = deque(view for view in views if len(view))
        while left:
            try:
                with self._lock:
                    count = step(_first(left))
            except (BlockingIOError, InterruptedError):
                self._pause(event, heard, until, silence)
                continue
            except ssl.SSLWantReadError:
                self._pause(select.POLLIN, heard, until, silence)
                continue
            except ssl.SSLWantWriteError:
                self._pause(select.POLLOUT, heard, until, silence)
                continue
            except (OSError, ValueError) as error:
                raise PeerLost(f"The connection to {self.name} broke: {error}.") from error
            if count == 0:
                raise PeerLost(f"{self.name} closed the connection.")
            heard = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def _pause(self, event: int, heard: float, until: float | None, silence: float | None) -> None:
        now = time.monotonic()
        if until is not None and now >= until:
            raise DeadlineExceeded(f"{self.name} did not answer in time.")
        if silence is not None and now >= heard + silence:
            raise PeerLost(f"{self.name} has been silent for {silence:g} s.")
        limits = [
            60.0,
            *(() if until is None else (until - now,)),
            *(() if silence is None else (heard + silence - now,)),
        ]
        # Under TLS the other thread may have taken what this one waits for.
        seconds = min(*limits, 0.1 if self.tls else 60.0)
        poll = select.poll()
        try:
            poll.register(self._sock, event)
            poll.poll(max(1, int(seconds * 1000)))
        except (OSError, ValueError) as error:
            raise PeerLost(f"The connection to {self.name} was closed.") from error

    def shut(self) -> None:
        """Wakes whoever reads or writes; the socket itself stays until `close`, so that its number is not reused."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """For the thread that reads."""
        self.shut()
        self._sock.close()


def _first(left: deque[memoryview]) -> list[memoryview]:
    """As much as a socket may take at once: what it does not take is listed again."""
    some, size = [], 0
    for view in left:
        some.append(view)
        size += len(view)
        if size >= _AT_ONCE or len(some) == _IOV:
            break
    return some


def _joined(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Pieces of at most 256 KiB for a socket that sends one at a time: a record a small block would be costly."""
    held = bytearray()
    for view in views:
        if len(held) + len(view) > _TLS_CHUNK and held:
            yield memoryview(held)
            held = bytearray()
        if len(view) >= _TLS_CHUNK:
            yield view
        else:
            held += view
    if held:
        yield memoryview(held)


def _watchful(sock: socket.socket) -> None:
    """Small frames leave at once, and a machine that vanished is noticed by the system too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: Address, tls: Tls | None = None, seconds: float = 10.0) -> Wire:
    """A wire to a listening socket.

    Raises:
        PeerLost: nobody listens there. DeadlineExceeded: no answer in time. Refused: TLS failed.
    """
    name = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout=seconds)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not answer within {seconds:g} s.") from error
    except OSError as error:
        raise PeerLost(f"Nobody answers at {name}: {error}.") from error
    return Wire(sock, name, None if tls is None else tls.context(server=False), seconds=seconds)


def listening(address: Address) -> socket.socket:
    """A listening socket, also at an IPv6 address. Raises OSError."""
    return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
