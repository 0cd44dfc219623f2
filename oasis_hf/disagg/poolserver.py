"""The prefill process's end of its pool server: starts it, answers it, and starts it again when it dies or hangs."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from .channel import Channel, Header, Parts, check_secret, serve
from .control import Terms
from .errors import DeadlineExceeded, DisaggError, PeerLost, Refused
from .nixl import NixlSettings
from .staging import StagingPool
from .wire import Address, Tls, Wire, listening

ENGINES = ("tcp", "nixl")

_NO_IDS = torch.zeros(0, dtype=torch.int64)

MOST_FAILURES = 5
"""Starts in a row that end before the server is ready, after which it is given up."""

# The package's own __init__ would import torch and transformers, for which every restart would wait.
_BOOT = (
    "import sys, types\n"
    "package = types.ModuleType('oasis_hf'); package.__path__ = [sys.argv[1]]; sys.modules['oasis_hf'] = package\n"
    "from oasis_hf.disagg.serving import main; main()"
)


class PoolServer:
    """A supervised process that serves a staging pool. It returns from the constructor when readers can connect.

    The listening sockets are this process's, so the address stays and connections wait while the server is started
    again.

    Args:
        staging: the pool. Reserve and publish there. secret: shared with readers, at least 16 bytes.
        terms: what readers must agree to; the engines' wire settings are filled in here.
        address: to listen at; port 0 takes a free one. data_address: for reads over TCP; default the same.
        data_host: the host that readers are told for them; default the one of their control channel.
        engines: of `tcp`, `nixl`. tls: for both channels. nixl: its settings.
        silence: seconds without a sign of a reader until it is taken for dead.
        reader_grace: seconds that the leases of a dead reader last on, for it to connect again.
        hung: seconds without a sign of the server until it is killed and started again.
        submit, stage: take a reader's prompt (a request's name, ids `[n]`, what the reader has of it), and tell where
            one is: see `PrefillNode`.

    Raises:
        ConfigError: a wrong argument. OSError: the address can't be had. DisaggError: the server does not start.
    """

    def __init__(
        self, staging: StagingPool, secret: bytes, terms: Terms, address: Address = ("127.0.0.1", 0),
        data_address: Address | None = None, data_host: str | None = None, engines: tuple[str, ...] = ("tcp",),
        tls: Tls | None = None, nixl: NixlSettings | None = None, silence: float = 5.0, reader_grace: float = 5.0,
        hung: float = 20.0, seconds: float = 60.0, submit: Callable[[str, torch.Tensor, Any], None] | None = None,
        stage: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        if not engines or not set(engines) <= set(ENGINES):
            raise ConfigError(f"PoolServer.engines={engines!r} is not allowed: use some of {', '.join(ENGINES)}.")
        self.staging, self._secret, self._tls = staging, check_secret(secret), tls
        self._nixl = (nixl or NixlSettings()) if "nixl" in engines else None
        wire = {"tcp": {}, "nixl": {} if self._nixl is None else self._nixl.wire()}
        self.terms = replace(terms, wire={name: wire[name] for name in engines})
        self._submit, self._stage = submit, stage
        self.silence, self.reader_grace, self.hung = silence, reader_grace, hung
        if tls is not None:
            tls.context(server=True)  # a wrong file is an error here
        self._listeners = [listening(at) for at in (address, data_address) if at is not None]
        self.address: Address = self._listeners[0].getsockname()[:2]
        self.data_address: Address = self._listeners[-1].getsockname()[:2]
        self._data_host = data_host or (None if data_address is None else data_address[0])
        self.restarts = 0
        self.served: dict[str, int] = {}
        self.error: DisaggError | None = None
        self._before: dict[str, int] = {}
        self._ready, self._closing = threading.Event(), threading.Event()
        self._child: subprocess.Popen | None = None
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()
        try:
            self.wait_ready(seconds)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Of the server's process."""
        return None if self._child is None else self._child.pid

    def wait_ready(self, seconds: float) -> None:
        """Until the server, perhaps a new one, accepts readers. Raises DeadlineExceeded, or PeerLost if it was given
        up."""
        ready = self._ready.wait(seconds)
        if self.error is not None:
            raise self.error
        if not ready:
            raise DeadlineExceeded(f"The pool server was not ready within {seconds:g} s.")

    def stats(self) -> dict[str, Any]:
        """The staging pool's numbers, what the server sent, by TCP, and how often it was started again."""
        return {**self.staging.stats(), "served": dict(self.served), "restarts": self.restarts}

    def close(self) -> None:
        """Ends the server; readers lose their connections. The staging pool stays."""
        self._closing.set()
        if self._wire is not None:
            self._wire.shut()
        self._thread.join(10)
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> "PoolServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _supervise(self) -> None:
        failures = 0
        while not self._closing.is_set():
            channel = self._start()
            try:
                serve(channel, self._answer, self.hung)
            except DisaggError:
                pass  # it died, hung, or is to end
            finally:
                self._stop(channel)
            if self._closing.is_set():
                return
            failures = 0 if self._ready.is_set() else failures + 1
            self._ready.clear()
            self.restarts += 1
            if failures == MOST_FAILURES:
                self.error = PeerLost(f"The pool server ended {failures} times before it was ready; see its messages.")
                self._ready.set()
                return
            self._closing.wait(min(2.0, 0.1 * failures))

    def _start(self) -> Channel:
        mine, its = socket.socketpair()
        with its:
            fds = [its.fileno(), self.staging.fd, *(listener.fileno() for listener in self._listeners)]
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(Path(__file__).parents[1]), str(its.fileno())],
                pass_fds=fds, stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the prefill process, whose end ends the server
            )  # fmt: skip
        self._wire = Wire(mine, "the pool server")
        if self._closing.is_set():
            self._wire.shut()
        return Channel(self._wire)

    def _stop(self, channel: Channel) -> None:
        channel.wire.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        for name, count in self.served.items():
            self._before[name] = count

    def _answer(self, op: str, header: Header, parts: list[memoryview]) -> tuple[Header, Parts]:
        staging = self.staging
        if op == "config":
            return self._config(), ()
        if op == "ready":
            self._ready.set()
            return {}, ()
        if op == "report":
            staging.expire()
            self.served = {name: int(count) + self._before.get(name, 0) for name, count in header["served"].items()}
            return {}, ()
        if op == "stats":
            return {"stats": {**staging.stats(), "restarts": self.restarts}}, ()
        if op == "lost":
            for request, generation in header["requests"]:
                staging.shorten(request, generation, self.reader_grace)
            return {}, ()
        request = header["request"]
        if op == "submit":
            if self._submit is None:
                raise Refused("request", "This node takes no prompts: it publishes what it is given otherwise.")
            ids = torch.frombuffer(bytearray(parts[0]), dtype=torch.int64) if parts[0] else _NO_IDS
            self._submit(request, ids, header.get("held"))
            return {}, ()
        if op == "stage" and self._stage is not None:
            return {"stage": self._stage(request)}, ()
        if op == "handle":
            handle, generation = staging.handle(request)
            digest = hashlib.sha256(handle).hexdigest()
            times = {"ttl": staging.ttl, "grace": staging.quarantine}
            return {"generation": generation, "sha256": digest, **times}, (handle,)
        if op == "renew":
            return {"ttl": staging.renew(request, header["generation"])}, ()
        if op == "release":
            staging.release(request, header["generation"], bool(header["clean"]))
            return {}, ()
        raise Refused("request", f"There is no call {op!r:.40}.")

    def _config(self) -> Header:
        staging = self.staging
        return {
            "secret": self._secret.hex(), "terms": self.terms.json(), "silence": self.silence,
            "fd": staging.fd, "capacity": staging.capacity, "page_bytes": staging.page_bytes,
            "listeners": [listener.fileno() for listener in self._listeners],
            "data_address": [self._data_host, self.data_address[1]],
            "tls": None if self._tls is None else asdict(self._tls),
            "nixl": None if self._nixl is None else asdict(self._nixl),
        }  # fmt: skip
