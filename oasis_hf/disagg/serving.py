"""The pool server's own process: serves reads of the pool's pages and answers the control channel.

It keeps nothing: handles and leases stay with the prefill process, pages in the memfd. So it may die and be started
again. It imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time

from .channel import Calls, Channel, Header, Parts, admit, serve, soon
from .control import Terms
from .errors import DisaggError, Refused, StaleLease
from .mapping import Mapping
from .tcp import Served, serve_reads
from .wire import Tls, Wire

OWNER_SILENCE = 60.0
"""Seconds without a sign of the prefill process after which its server ends itself."""

ADMISSION = 10.0
"""Seconds that someone has to prove that they know the secret."""

MOST_CONNECTIONS = 512

log = logging.getLogger("oasis_hf.disagg")


class Server:
    """Accepts and serves, a thread a connection.

    Args:
        link: calls to the prefill process. config: what `PoolServer` gave.
    """

    def __init__(self, link: Calls, config: Header) -> None:
        self.link = link
        self.secret = bytes.fromhex(config["secret"])
        self.terms = Terms.parse(config["terms"])
        self.silence = float(config["silence"])
        settings = None
        if config["nixl"] is not None:
            from .nixl import NixlSettings, NixlTarget

            settings = NixlSettings(**config["nixl"])
        # Where it can be, read-only: neither a mistake here nor a reader's write can reach the KV.
        writable = settings is not None and settings.needs_writable
        self.mapping = Mapping(int(config["fd"]), int(config["capacity"]), int(config["page_bytes"]), writable)
        self.served = Served()
        self.context = None if config["tls"] is None else Tls(**config["tls"]).context(server=True)
        self.data = config["data_address"]
        self.target = None if settings is None else NixlTarget(self.mapping, settings)
        self.listeners = [socket.socket(fileno=fd) for fd in config["listeners"]]
        self.holders: dict[tuple[str, int], set[_Session]] = {}
        self.lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def run(self) -> None:
        """Never returns; the process ends with the link."""
        for listener in self.listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self.link.call("ready")
        while True:
            time.sleep(0.5)
            with contextlib.suppress(DisaggError):  # the link's own end ends the process
                self.link.call("report", served=self.served.told())

    def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(True)
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:  # out of descriptors
                log.warning("The pool server can't accept: %s.", error)
                time.sleep(0.2)
                continue
            if not self._room.acquire(blocking=False):
                log.warning("The pool server has %d connections and closed one more.", MOST_CONNECTIONS)
                sock.close()
                continue
            name = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._connection, args=(sock, name), daemon=True).start()

    def _connection(self, sock: socket.socket, name: str) -> None:
        wire = None
        try:
            until = soon(ADMISSION)
            wire = Wire(sock, name, self.context, server=True, seconds=ADMISSION)
            channel = admit(wire, self.secret, until)
            if channel.receive(until)[0].get("op") == "data":
                serve_reads(channel, self.mapping, self.served)
            else:
                _Session(self).run(channel)
        except Refused as error:
            log.warning("The pool server refused %s: %s", name, error)
        except DisaggError as error:
            log.info("The pool server lost %s: %s", name, error)
        finally:
            if wire is not None:
                wire.close()
            self._room.release()


class _Session:
    """One reader's control connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.agreed = False
        self.held: set[tuple[str, int]] = set()

    def run(self, channel: Channel) -> None:
        try:
            serve(channel, self._answer, self.server.silence)
        finally:
            server = self.server
            with contextlib.suppress(DisaggError), server.lock:
                for key in self.held:
                    self._drop(key)
                # Not what another connection holds: of another reader, or of this one, which was back before its end
                # was noticed here. Sent under the lock, so that the renewal of one that comes now is the later one.
                lost = [list(key) for key in self.held if key not in server.holders]
                if lost:
                    server.link.begin("lost", requests=lost)

    def _answer(self, op: str, header: Header, parts: list[memoryview]) -> tuple[Header, Parts]:
        server = self.server
        if op == "hello":
            server.terms.agree(Terms.parse(header["terms"]), str(header["engine"]))
            self.agreed = True
            return {"terms": server.terms.json()}, ()
        if not self.agreed:
            raise Refused("request", f"The call {op!r:.40} came before the two sides agreed.")
        if op == "offer":
            return self._offer(str(header["engine"]))
        if op == "stats":
            told, _ = server.link.call("stats")
            return {"stats": {**told["stats"], "served": server.served.told()}}, ()
        request = str(header["request"])
        if op in ("submit", "stage"):
            told, _ = server.link.call(op, parts, request=request, held=header.get("held"))
            return {key: told[key] for key in ("stage",) if key in told}, ()
        if op == "handle":
            told, answer = server.link.call("handle", request=request, seconds=60)
            self._hold((request, int(told["generation"])))
            return {key: told[key] for key in ("generation", "sha256", "ttl", "grace")}, answer
        key = (request, int(header["generation"]))
        if op == "renew":
            self._hold(key)  # perhaps after the reader connected anew
            try:
                told, _ = server.link.call("renew", request=request, generation=key[1])
            except StaleLease:
                with server.lock:
                    self._drop(key)
                    self.held.discard(key)
                raise
            return {"ttl": told["ttl"]}, ()
        if op == "release":
            with server.lock:
                self._drop(key)
                self.held.discard(key)
                clean = bool(header["clean"]) and not server.holders.get(key)
            server.link.call("release", request=request, generation=key[1], clean=clean)
            return {}, ()
        raise Refused("request", f"There is no call {op!r:.40}.")

    def _offer(self, engine: str) -> tuple[Header, Parts]:
        server = self.server
        if engine == "tcp" and "tcp" in server.terms.wire:
            host, port = server.data
            return {"offer": {"host": host, "port": port, "pool_bytes": server.mapping.pool_bytes}}, (b"",)
        if engine == "nixl" and server.target is not None:
            fields, metadata = server.target.offer(server.secret)
            return {"offer": fields}, (metadata,)
        raise Refused("engine", f"The pool does not offer the engine {engine!r:.40}.")

    def _hold(self, key: tuple[str, int]) -> None:
        with self.server.lock:
            self.held.add(key)
            self.server.holders.setdefault(key, set()).add(self)

    def _drop(self, key: tuple[str, int]) -> None:
        holders = self.server.holders.get(key, set())
        holders.discard(self)
        if not holders:
            self.server.holders.pop(key, None)


def main() -> None:
    """What `PoolServer` starts. The only argument is the descriptor of the link; secrets come over it."""
    logging.basicConfig(format="%(message)s")
    wire = Wire(socket.socket(fileno=int(sys.argv[-1])), "the prefill process")
    link = Calls(Channel(wire), beat=0.5, silence=OWNER_SILENCE, on_lost=lambda error: os._exit(0))
    config, _ = link.call("config", seconds=OWNER_SILENCE)
    Server(link, config).run()
