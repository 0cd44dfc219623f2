"""Two network namespaces joined by a link: two machines' network on one. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class End:
    """One side of a link.

    Attributes:
        namespace: its name; None: the machine's own. device: of the link. address: of the device.
    """

    namespace: str | None
    device: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """In front of a command that is to run here."""
        return [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]


LOOPBACK = End(None, "lo", "127.0.0.1")


@contextlib.contextmanager
def joined() -> Iterator[tuple[End, End]]:
    """The node's end and the reader's; both are gone afterwards. Raises SystemExit where that is not allowed."""
    ends = End(f"oasis-node-{os.getpid()}", "oasis-v0", "10.77.7.1"), End(f"oasis-read-{os.getpid()}", "oasis-v1",
                                                                          "10.77.7.2")  # fmt: skip
    node, reader = ends
    lines = [
        *(f"netns add {end.namespace}" for end in ends),
        f"link add {node.device} netns {node.namespace} type veth peer name {reader.device} netns {reader.namespace}",
        *(f"-n {end.namespace} addr add {end.address}/24 dev {end.device}" for end in ends),
        *(f"-n {end.namespace} link set {device} up" for end in ends for device in (end.device, "lo")),
    ]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # without an exception they would stay
    try:
        for line in lines:
            done = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"ip {line}: {done.stderr.strip()}. Two namespaces need root.")
        yield ends
    except FileNotFoundError:
        raise SystemExit("The command `ip` (iproute2) is not here: two namespaces can't be made.") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        for end in ends:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", str(end.namespace)], capture_output=True)


def hold_to(end: End, mbit: int) -> None:
    """What this end sends, to a rate."""
    line = f"qdisc replace dev {end.device} root tbf rate {mbit}mbit burst {max(32, mbit // 4)}kb latency 50ms"
    subprocess.run([*end.prefix, "tc", *line.split()], check=True)


def received(device: str) -> int:
    """Bytes that came in through a device of this process's namespace, frames and all."""
    return int(Path(f"/sys/class/net/{device}/statistics/rx_bytes").read_text())


def start(end: End, work: Callable[..., None], *args: Any) -> tuple[Connection, BaseProcess]:
    """`work(pipe, *args)` in a new process at this end; gives the pipe's other side. End it with `stop`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["oasis_hf.disagg.decode"])  # torch and transformers: once, not in every process
    here, there = context.Pipe()
    process = context.Process(target=_at, args=(end, work, there, *args), daemon=True)
    process.start()
    there.close()
    return here, process


def heard(pipe: Connection, seconds: float | None = None) -> Any:
    """What comes through it. Raises SystemExit where nothing does, within `seconds`."""
    if not pipe.poll(seconds):
        raise SystemExit(f"A process of the measurement said nothing for {seconds:g} s.")
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise SystemExit("A process of the measurement ended; its messages say why.") from None


def stop(process: BaseProcess) -> None:
    """Ends it, unless it ends by itself within a second."""
    process.join(1)
    process.terminate()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


_NEW_NET, _NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x40000000, 0x00020000, 1 << 14, 1 << 18


def _at(end: End, work: Callable[..., None], pipe: Connection, *args: Any) -> None:
    if end.namespace is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{end.namespace}") as file:
            _did(libc.setns(file.fileno(), _NEW_NET))
        # /sys tells of the namespace in which it was mounted, and UCX looks there for its devices.
        _did(libc.unshare(_NEW_MOUNTS))
        _did(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))
        _did(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    work(pipe, *args)


def _did(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
