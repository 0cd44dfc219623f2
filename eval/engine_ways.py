"""Ways to read blocks of a pool that another process holds: this project's engines, and what they are held against.

Each way is a server and a reader, a process each. The pool is a staging pool's memfd; servers and readers find it by
the process that owns it, readers to compare what came.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oasis_hf.config import BLOCK
from oasis_hf.disagg import Link, Memory, NixlEngine, PoolServer, StagingPool, TcpEngine, Terms, merged
from oasis_hf.disagg.nixl import NixlSettings, make_agent

SECRET = b"one evaluation, one secret"
REQUEST = "all"
SECONDS = 120.0
"""Deadline of a read, and of a sign of the other side."""

SOCKETS, TCP, NIXL, BARE = "plain sockets", "ours: tcp", "ours: nixl", "bare NIXL"
_IOV = 1024


@dataclass(frozen=True)
class Pool:
    """Where a pool is: its owner's process, the descriptor there, bytes."""

    owner: int
    fd: int
    nbytes: int

    def mapped(self) -> np.ndarray:
        """`[nbytes]` uint8, read-only."""
        fd = os.open(f"/proc/{self.owner}/fd/{self.fd}", os.O_RDONLY)
        memory = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        return np.frombuffer(memory, np.uint8)


@dataclass(frozen=True)
class Way:
    """what: one of the four. transports: UCX's, where NIXL is in it."""

    what: str
    transports: str = ""

    @property
    def name(self) -> str:
        return f"{self.what} {self.transports}".strip()

    @property
    def bare(self) -> "Way":
        return Way(BARE, self.transports)


PAGE = 4096
"""Bytes of the pool's pages, as SmolLM2's in bfloat16; a larger block is a run of them."""

TERMS = Terms("evaluation", "none", {"page_bytes": PAGE})


def cpu(pid: int) -> float:
    """Seconds of processor that another process and its threads have had: its CPU clock."""
    return time.clock_gettime((~pid << 3) | 2)


# -- servers ----------------------------------------------------------------------------------------------------------


def own_pool(pipe: Any, nbytes: int, address: str, device: str, transports: list[str]) -> None:
    """The staging pool and its servers: one for tcp, and one for each of NIXL's transports."""
    import torch

    pool = StagingPool(nbytes // PAGE, PAGE // (2 * BLOCK * 2), torch.bfloat16, ttl=3600)
    np.frombuffer(pool.mapping.memory, np.int64, nbytes // 8)[:] = np.arange(nbytes // 8)  # no two words alike
    pool.reserve(REQUEST, pool.capacity)
    pool.publish(REQUEST, b"")
    patient = {"silence": SECONDS, "hung": SECONDS}  # a busy machine is slow, not dead
    servers = {"": PoolServer(pool, SECRET, TERMS, (address, 0), **patient)}
    for some in transports:
        settings = NixlSettings(device, some)
        servers[some] = PoolServer(pool, SECRET, TERMS, (address, 0), engines=("nixl",), nixl=settings, **patient)
    told = {some: (server.address, server.pid) for some, server in servers.items()}
    pipe.send((Pool(os.getpid(), pool.fd, nbytes), told))
    pipe.recv()
    for server in servers.values():
        server.close()


def serve_sockets(pipe: Any, pool: Pool, address: str) -> None:
    """A request is how many blocks of how many bytes, and which; the answer is their bytes, gathered by the system."""
    view = pool.mapped().data
    with socket.create_server((address, 0)) as listener:
        pipe.send((listener.getsockname(), os.getpid()))
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := sock.recv(16, socket.MSG_WAITALL):
        count, block = struct.unpack("<qq", head)
        wanted = np.frombuffer(sock.recv(8 * count, socket.MSG_WAITALL), np.int64) * block
        for first in range(0, count, _IOV):
            views = [view[at : at + block] for at in wanted[first : first + _IOV].tolist()]
            left = len(views) * block - sock.sendmsg(views)
            while left:
                whole, part = divmod(len(views) * block - left, block)
                left -= sock.sendmsg([views[whole][part:], *views[whole + 1 :]])


def serve_bare(pipe: Any, pool: Pool, settings: NixlSettings) -> None:
    memory = pool.mapped()
    agent = make_agent("pool", settings, progress=True)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    pipe.send(((agent.get_agent_metadata(), memory.ctypes.data), os.getpid()))
    pipe.recv()


# -- readers ----------------------------------------------------------------------------------------------------------

Reader = Callable[[np.ndarray, int], None]
"""Reads blocks `[n]` of so many bytes, one behind the other, to the beginning of its memory."""


def ours(memory: np.ndarray, where: Any, settings: NixlSettings | None) -> Reader:
    """As the product reads: runs of the blocks, a read, its end."""
    held = Memory(memory)
    engine = TcpEngine(held, SECRET) if settings is None else NixlEngine(held, SECRET, settings)
    link = Link(where, SECRET, TERMS, engine, silence=SECONDS)
    _, lease = link.handle(REQUEST)

    def read(wanted: np.ndarray, block: int) -> None:
        link.read(merged(wanted, np.arange(len(wanted)), block), lease).wait(SECONDS)

    return read


def sockets(memory: np.ndarray, where: Any, settings: NixlSettings | None) -> Reader:
    sock = socket.create_connection(where)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(wanted: np.ndarray, block: int) -> None:
        sock.sendall(struct.pack("<qq", len(wanted), block) + wanted.astype("<i8").tobytes())
        view = memory.data[: len(wanted) * block]
        while view:
            view = view[sock.recv_into(view) :]

    return read


def bare(memory: np.ndarray, where: Any, settings: NixlSettings) -> Reader:
    """NIXL's own calls and no more: nothing here would notice a hung peer, or a block that is another's by now."""
    metadata, base = where
    agent = make_agent("reader", settings, progress=False)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(metadata)

    def read(wanted: np.ndarray, block: int) -> None:
        far, near = np.zeros((len(wanted), 3), np.uint64), np.zeros((len(wanted), 3), np.uint64)
        far[:, 0] = wanted * block + base
        near[:, 0] = np.arange(len(wanted)) * block + memory.ctypes.data
        far[:, 1] = near[:, 1] = block
        local, remote = agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, peer)
        state, until = agent.transfer(handle), time.monotonic() + SECONDS
        while state == "PROC" and time.monotonic() < until:
            time.sleep(0)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"A bare read ended as {state}.")

    return read


_READERS: dict[str, Callable[..., Reader]] = {SOCKETS: sockets, TCP: ours, NIXL: ours, BARE: bare}


def read_blocks(pipe: Any, way: Way, pool: Pool, where: Any, server: int, device: str, most: int) -> None:
    """Reads what `pipe` asks for, (bytes a block, random distinct blocks, their seed), and tells of each read seconds,
    processor seconds on both sides, and whether every byte is right.

    Args:
        where: what the way's server told. server: its process. device: this side's. most: bytes of a read.
    """
    memory = np.zeros(most, np.uint8)
    read = _READERS[way.what](memory, where, NixlSettings(device, way.transports) if way.transports else None)
    there = pool.mapped()
    while (asked := pipe.recv()) is not None:
        block, count, seed = asked
        blocks = there.reshape(-1, block)
        wanted = np.random.default_rng(seed).permutation(len(blocks))[:count]
        its, own, start = cpu(server), time.process_time(), time.perf_counter()
        read(wanted, block)
        seconds = time.perf_counter() - start
        told = {"s": seconds, "client_cpu_s": time.process_time() - own, "server_cpu_s": cpu(server) - its}
        came = memory[: count * block].reshape(count, block)
        right = all(
            np.array_equal(came[first : first + _IOV], blocks[wanted[first : first + _IOV]])
            for first in range(0, count, _IOV)
        )
        pipe.send({**told, "right": right})
    os._exit(0)  # nothing is in flight; an agent's end is no part of this
