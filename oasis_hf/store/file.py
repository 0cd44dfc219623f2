"""The file tier: pages in a file on a local disk, so that a context larger than memory still decodes (issue E)."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..config import ConfigError
from .near import Far, Near, Pending
from .pages import HostMemoryError, PagePool, available_host_bytes

THREADS = 8
"""Reads and writes in flight: a disk answers many at once as fast as one."""

ALIGNMENT = 4096
"""Of what the system transfers without a copy of its own."""

GROWTH_BYTES = 64 << 20
"""What the file grows by, at least: claiming room asks the file system each time."""

_SEGMENTS = min(os.sysconf("SC_IOV_MAX"), 1024)


class StoreFileError(RuntimeError):
    """The file did not give or take what it should; the message says what and where."""


class _Transfers(Pending):
    def __init__(self, futures: list["Future[None]"]) -> None:
        self.futures = futures

    def settling(self) -> Callable[[], bool]:
        futures = self.futures
        return lambda: all(future.done() for future in futures)

    def wait(self) -> None:
        errors = [error for future in self.futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


class PageFile(Far):
    """Pages in a file that has no name in its folder: nothing is left of it when the process ends, however it ends.

    Where pages are whole multiples of 4 KiB and the file system allows it, the system keeps no copy of them in memory
    (O_DIRECT): that memory is what there is too little of.

    Args:
        page_bytes: bytes a page. folder: where the file is; None: the system's folder for temporary files.

    Raises:
        StoreFileError: no file can be made there.
    """

    name = "file"

    def __init__(self, page_bytes: int, folder: str | None = None) -> None:
        self.page_bytes, self.folder = page_bytes, folder or tempfile.gettempdir()
        try:
            file, name = tempfile.mkstemp(prefix="oasis-kv-", dir=self.folder)
        except OSError as error:
            raise StoreFileError(f"No file can be made in {self.folder!r}: {error.strerror}.") from error
        self.direct = False
        if page_bytes % ALIGNMENT == 0:
            with contextlib.suppress(OSError):  # tmpfs and some network file systems refuse it
                again = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                os.close(file)
                file, self.direct = again, hasattr(os, "O_DIRECT")
        os.unlink(name)
        self.file, self._bytes = file, 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="oasis-file")
        weakref.finalize(self, _close, file, self._threads)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self._bytes

    def make_room(self, pages: int) -> None:
        need = pages * self.page_bytes
        if need <= self._bytes:
            return
        for size in (max(need, self._bytes + GROWTH_BYTES), need):
            try:
                os.posix_fallocate(self.file, self._bytes, size - self._bytes)
            except OSError as error:
                why = error.strerror
                continue
            self._bytes = size
            return
        raise HostMemoryError(
            f"The full KV cache needs {need / 2**30:.2f} GiB in a file in {self.folder!r}, which holds "
            f"{self._bytes / 2**30:.2f} GiB of it and can't grow: {why}. Free some space, or choose another file_dir."
        )

    def begin(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> Pending:
        return self._transfer(os.preadv, numbers, memory, at)

    def write(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> None:
        self._transfer(os.pwritev, numbers, memory, at).wait()

    def _transfer(
        self, move: Callable[..., int], numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor
    ) -> _Transfers:
        lines = memory.flatten(1).view(torch.uint8).numpy()
        order = numbers.argsort()
        pairs = list(zip(numbers[order].tolist(), at[order].tolist()))
        return _Transfers([self._threads.submit(self._move, move, run, lines) for run in neighbours(pairs)])

    def _move(self, move: Callable[..., int], run: list[tuple[int, int]], lines: "object") -> None:
        """Pages that follow each other in the file, to or from their places."""
        parts = [memoryview(lines[place]) for _, place in run]  # type: ignore[index]
        offset, left = run[0][0] * self.page_bytes, len(run) * self.page_bytes
        while left:
            try:
                done = move(self.file, parts, offset)
            except OSError as error:
                raise StoreFileError(
                    f"A page file in {self.folder!r} failed at byte {offset:,}: {error.strerror}."
                ) from error
            if done <= 0:
                raise StoreFileError(
                    f"A page file in {self.folder!r} ended at byte {offset:,}, where {left:,} bytes more are to be: it "
                    "was cut by someone else, or the disk is full."
                )
            offset, left = offset + done, left - done
            while done:  # a part of a part is left where the system was interrupted
                taken = min(done, len(parts[0]))
                parts[0], done = parts[0][taken:], done - taken
                if not len(parts[0]):
                    parts.pop(0)


def file_pages(
    head_dim: int, dtype: torch.dtype, pin: bool, host_bytes: int | None = None, folder: str | None = None
) -> Near:
    """Pages in a file under host memory of `host_bytes` (None: half of what is available now), as `PagePool` has them.

    Raises:
        ConfigError: that is less than a page. StoreFileError: no file can be made.
    """
    pool = PagePool(head_dim, dtype, pin)
    most = (available_host_bytes() // 2 if host_bytes is None else host_bytes) // pool.page_bytes
    if most < 1:
        raise ConfigError(
            f"OasisConfig.host_bytes={host_bytes!r} is not allowed: use at least {pool.page_bytes:,}, one block of one "
            "KV head."
        )
    return Near(pool, PageFile(pool.page_bytes, folder), most)


def neighbours(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """`pairs`, sorted by their first, in runs that follow each other there, of as many as the system takes at once."""
    for _, run in itertools.groupby(enumerate(pairs), lambda one: one[1][0] - one[0]):
        whole = [pair for _, pair in run]
        for first in range(0, len(whole), _SEGMENTS):
            yield whole[first : first + _SEGMENTS]


def _close(file: int, threads: ThreadPoolExecutor) -> None:
    # Every transfer holds its `PageFile`, so none is under way; where the last one dropped it, this is a thread of
    # these, which can't wait for itself.
    threads.shutdown(wait=False)
    os.close(file)
