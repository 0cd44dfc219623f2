"""The memory behind a pool: pages, then a table of their generations, in one memfd that several processes map."""

from __future__ import annotations

import mmap
import os

import numpy as np

from .errors import Refused, StaleLease

NOBODY = 0
"""The generation of a page that may not be read."""


class Mapping:
    """One process's view of the pool's memory.

    The owner writes a request's generation to its pages' entries when it publishes them and takes it out at the lease's
    end, so that whoever serves reads sees at once what they may still give away, with no message between them.

    Args:
        fd: of the memfd. capacity: pages. writable: for the owner; a server's own mistakes must not reach the KV.
    """

    def __init__(self, fd: int, capacity: int, page_bytes: int, writable: bool) -> None:
        self.capacity, self.page_bytes = capacity, page_bytes
        self.pool_bytes = capacity * page_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(fd, self.size(capacity, page_bytes), mmap.MAP_SHARED, protection)
        self.view = memoryview(self.memory)[: self.pool_bytes]
        self.generations = np.frombuffer(self.memory, np.int64, capacity, self.pool_bytes)

    @staticmethod
    def size(capacity: int, page_bytes: int) -> int:
        """Bytes of the memfd."""
        whole = capacity * (page_bytes + 8)
        return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE

    @staticmethod
    def create(capacity: int, page_bytes: int) -> int:
        """A memfd with all of its memory taken from the system now: later there would be a signal in place of an error.
        Raises OSError where the system has not so much."""
        fd = os.memfd_create("oasis-hf staging", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, Mapping.size(capacity, page_bytes))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check(self, far: np.ndarray, size: np.ndarray, generation: int) -> None:
        """Raises Refused where a run leaves the pool, StaleLease where one of its pages is not of this generation."""
        if ((far < 0) | (size <= 0) | (far > self.pool_bytes - size)).any():
            raise Refused("bounds", f"A run leaves the pool of {self.pool_bytes:,} bytes, or is empty.")
        if size.sum() > self.pool_bytes:
            raise Refused("bounds", f"A read of {size.sum():,} bytes is more than the pool's {self.pool_bytes:,}.")
        self.current(far, size, generation)

    def current(self, far: np.ndarray, size: np.ndarray, generation: int) -> None:
        """The second half of `check`, for when the bytes have left: pages may have been taken back meanwhile."""
        first, last = far // self.page_bytes, (far + size - 1) // self.page_bytes
        counts = last - first + 1
        pages = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        if generation == NOBODY or (self.generations[pages] != generation).any():
            raise StaleLease(
                f"The pages of generation {generation} were given back: the request ended or its lease did."
            )
