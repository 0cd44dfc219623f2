"""Reads over NIXL's UCX backend: RDMA where there is a card for it, else TCP or, on one host, the kernel's copy between
processes.

NIXL checks no bounds on the target's side, authenticates nobody, encrypts nothing, never reports a hung peer or a cut
link, and goes on writing after a read was given up. So: equal versions and settings before anything is connected;
metadata only over the control channel, with an HMAC; bounds checked by the reader; deadlines of our own; and nothing is
released, removed or destroyed while a read is in flight. No notifications are used: nobody would collect them. For
private networks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import hmac
import importlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from .channel import check_secret
from .control import Offer
from .errors import Corrupt, PeerLost, Refused
from .mapping import Mapping
from .transport import Engine, Lease, Memory, Peer, Read, Runs

VERSION = "1.3.0"
"""Of nixl-cu13, on both ends: another one crashes the server when it reads."""

PROGRESS_US = 5000
"""How long the target's progress thread sleeps in poll(2), which a request ends: the wrapper's 0 spins a core."""

YIELDING = 0.002
"""Seconds that a waiting reader asks without sleeping: nothing else moves its side of a TCP read. It lets others run
each time: where the server shares its processors, spinning keeps it from them."""

LINGER = 0.05
"""Seconds that an engine's thread looks on after the last read."""

_making = threading.Lock()
_engines: list["NixlEngine"] = []


@dataclass(frozen=True)
class NixlSettings:
    """How UCX is set up; one per process, since UCX reads it once.

    Attributes:
        device: network device, of this side: `lo`, `eth0`, `mlx5_0:1`. transports: UCX's, `tcp` or on one host
            `tcp,cma`. segment: of TCP messages.
    """

    device: str = "lo"
    transports: str = "tcp"
    segment: str = "64k"

    @property
    def needs_writable(self) -> bool:
        """Whether a network card is told of the memory: it takes none that can't be written."""
        return not set(self.transports.split(",")) <= {"tcp", "cma"}

    def environment(self) -> dict[str, str]:
        return {
            "UCX_TLS": self.transports, "UCX_NET_DEVICES": self.device, "UCX_TCP_TX_SEG_SIZE": self.segment,
            "UCX_TCP_RX_SEG_SIZE": self.segment,
        }  # fmt: skip

    def wire(self) -> dict[str, str]:
        """What must be equal on both ends. Raises ImportError where the right nixl-cu13 is not installed."""
        try:
            installed = version("nixl-cu13")
        except PackageNotFoundError:
            installed = "none"
        if installed != VERSION:
            raise ImportError(
                f"The engine 'nixl' needs nixl-cu13=={VERSION}, installed is {installed}: pip install 'oasis-hf[nixl]'."
            )
        same = {name: value for name, value in self.environment().items() if name != "UCX_NET_DEVICES"}
        return {"nixl-cu13": installed, **same}

    def apply(self) -> None:
        """Sets the environment. Raises ValueError if this process has an agent with other settings."""
        for name, value in self.environment().items():
            if _agents_made and os.environ.get(name) != value:
                raise ValueError(
                    f"This process has a NIXL agent with {name}={os.environ.get(name)}; it can't have {value} too."
                )
            os.environ[name] = value
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")


_agents_made: list[str] = []


def make_agent(role: str, settings: NixlSettings, progress: bool) -> Any:
    """An agent with a name that no other process has, safe for threads, whose progress thread sleeps."""
    settings.wire()
    with _making:
        settings.apply()
        api: Any = importlib.import_module("nixl_cu13._api")
        bind = api.nixlBind

        class Config(bind.nixlAgentConfig):  # type: ignore[misc, name-defined]
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, PROGRESS_US if name == "pthrDelay" else value)

        class Bind:
            nixlAgentConfig = Config

            def __getattr__(self, name: str) -> Any:
                return getattr(bind, name)

        api.nixlBind = Bind()
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=progress, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            agent = api.nixl_agent(f"oasis-{role}-{uuid.uuid4().hex}", config)
        finally:
            api.nixlBind = bind
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        _agents_made.append(agent.name)
    return agent


class NixlTarget:
    """The pool's side: registered memory and a progress thread. Its readers never wake Python."""

    def __init__(self, mapping: Mapping, settings: NixlSettings) -> None:
        self._mapping, self._settings = mapping, settings
        self._base = int(np.frombuffer(mapping.memory, np.uint8).ctypes.data)
        self._agent = make_agent("pool", settings, progress=True)
        self._agent.register_memory([(self._base, mapping.pool_bytes, 0, "")], "DRAM")

    def offer(self, secret: bytes) -> tuple[dict[str, Any], bytes]:
        """Fields and metadata of an `Offer`."""
        metadata = self._agent.get_agent_metadata()
        fields = {
            "agent": self._agent.name, "base": self._base, "pool_bytes": self._mapping.pool_bytes,
            "wire": self._settings.wire(), "sha256": hashlib.sha256(metadata).hexdigest(),
            "hmac": _sign(secret, self._agent.name, metadata),
        }  # fmt: skip
        return fields, metadata


def _sign(secret: bytes, agent: str, metadata: bytes) -> str:
    return hmac.new(secret, b"oasis-hf nixl " + agent.encode() + b"\0" + metadata, hashlib.sha256).hexdigest()


class NixlEngine(Engine):
    """Reads by one NIXL agent.

    Args:
        secret: shared; of the control channel too. settings: of this side.

    Raises:
        ImportError: nixl-cu13 is not installed in the right version.
    """

    name = "nixl"

    def __init__(self, memory: Memory, secret: bytes, settings: NixlSettings | None = None) -> None:
        super().__init__(memory)
        self._secret, self._settings = check_secret(secret), settings or NixlSettings()
        self.agent = make_agent("reader", self._settings, progress=False)
        self._registered = self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self._peers: list[_NixlPeer] = []
        self._known = threading.Lock()
        self._awake, self._last = threading.Event(), 0.0
        self._closed = False
        _engines.append(self)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def wire(self) -> dict[str, Any]:
        return self._settings.wire()

    def connect(self, offer: Offer, seconds: float = 10.0) -> Peer:
        fields, mine = offer.fields, self.wire
        if dict(fields["wire"]) != mine:
            raise Refused("wire", f"The NIXL settings differ: {dict(fields['wire'])} there, {mine} here.")
        if not hmac.compare_digest(_sign(self._secret, fields["agent"], offer.data), str(fields["hmac"])):
            raise Refused("authentication", "The NIXL metadata was not made by someone who knows the shared secret.")
        if hashlib.sha256(offer.data).hexdigest() != fields["sha256"]:
            raise Corrupt("The NIXL metadata differs from what was sent (SHA-256).")
        with self._known:
            try:
                name = self.agent.add_remote_agent(offer.data)
            except Exception as error:
                raise PeerLost(f"The pool's NIXL agent can't be reached: {type(error).__name__} {error}.") from error
            peer = _NixlPeer(self, _text(name), int(fields["base"]), offer.pool_bytes)
            self._peers.append(peer)
        return peer

    def forget(self, peer: "_NixlPeer") -> None:
        """For a closed peer with nothing in flight. Another one of the same agent, connected while the first had reads
        in quarantine, needs what is known of it."""
        with self._known:
            if peer in self._peers:
                self._peers.remove(peer)
                if all(other.agent_name != peer.agent_name for other in self._peers):
                    with contextlib.suppress(Exception):  # it may be gone with its process
                        self.agent.remove_remote_agent(peer.agent_name)

    def wake(self) -> None:
        """A read was begun. Waking a thread costs as much as a small read takes, so it stays awake a little."""
        self._last = time.monotonic()
        if not self._awake.is_set():
            self._awake.set()

    def _watch(self) -> None:
        """Moves reads that nobody waits for, those in quarantine among them, until the last is settled."""
        while True:
            self._awake.wait()
            for peer in list(self._peers):
                for read in peer.in_flight:
                    read._advance()
                if peer.closed and not peer.in_flight:
                    self.forget(peer)
            busy = any(peer.in_flight for peer in list(self._peers))
            if self._closed and not busy:
                break
            if not busy and time.monotonic() > self._last + LINGER:
                self._awake.clear()
                if not any(peer.in_flight for peer in list(self._peers)) and not self._closed:
                    continue
                self._awake.set()
            time.sleep(0.001)
        with contextlib.suppress(Exception):
            self.agent.deregister_memory(self._registered)
        _engines.remove(self)
        del self.agent

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close()
        self._closed = True
        self._awake.set()


class _NixlPeer(Peer):
    def __init__(self, engine: NixlEngine, name: str, base: int, pool_bytes: int) -> None:
        super().__init__(name, engine.memory, pool_bytes)
        self.engine, self.agent_name, self.base = engine, name, base
        self.closed = False

    def _make(self, runs: Runs, lease: Lease) -> Read:
        return _NixlRead(self, runs, lease)

    def _begin(self, read: Read) -> None:
        assert isinstance(read, _NixlRead)
        agent, runs = self.engine.agent, read.runs
        near, far = both = np.zeros((2, len(runs), 3), np.uint64)  # address, bytes, device
        near[:, 0], far[:, 0] = runs.near + self.memory.address, runs.far + self.base
        both[:, :, 1] = runs.size
        try:
            local, remote = agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, self.agent_name)
            state = agent.transfer(handle)
        except Exception as error:
            # Bounds were checked before, so what NIXL does not find here is the peer.
            lost = PeerLost(f"{self.name} is gone: {type(error).__name__} {error}.")
            read.finish(lost)
            self.lose(lost)
            raise lost from error
        read.begun(handle, state)
        self.engine.wake()

    def close(self) -> None:
        super().close()
        self.closed = True
        if self.in_flight:
            self.engine.wake()
        else:
            self.engine.forget(self)


class _NixlRead(Read):
    handle: Any = None  # once it is posted: asking before ruins NIXL's memory

    def __init__(self, peer: Peer, runs: Runs, lease: Lease) -> None:
        super().__init__(peer, runs, lease)
        self._asking = threading.Lock()

    def _advance(self) -> None:
        if self.handle is None or self._is_settled or not self._asking.acquire(blocking=False):
            return
        try:
            if not self._is_settled:
                self._ended(self.peer.engine.agent.check_xfer_state(self.handle))  # type: ignore[attr-defined]
        except Exception as error:  # nixlRemoteDisconnectError and its like
            self._fail(f"{type(error).__name__} {error}")
        finally:
            self._asking.release()

    def begun(self, handle: Any, state: str) -> None:
        """It was posted."""
        with self._asking:
            self.handle = handle
            self._ended(state)

    def _ended(self, state: str) -> None:
        if state == "DONE":
            self._release()
            self.finish()
        elif state != "PROC":
            self._fail(f"its state is {state}")

    def _fail(self, why: str) -> None:
        lost = PeerLost(f"{self.peer.name} was lost in a read: {why}.")
        self._release()
        self.finish(lost)
        self.peer.lose(lost)

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            self.peer.engine.agent.release_xfer_handle(self.handle)  # type: ignore[attr-defined]

    def _await(self, reached: Callable[[], bool], seconds: float) -> bool:
        began = time.monotonic()
        while not reached():
            self._advance()
            waited = time.monotonic() - began
            if waited >= seconds:
                return reached()
            time.sleep(0 if waited < YIELDING else 0.00005)
        return True


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


@atexit.register
def _keep() -> None:
    """An agent that is destroyed in mid-read can take the server down: one that has reads in flight outlives Python."""
    for engine in _engines:
        handles = [read.handle for peer in engine._peers for read in peer.in_flight if isinstance(read, _NixlRead)]
        for kept in [*handles, engine.agent, engine.agent.agent] if handles else []:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
