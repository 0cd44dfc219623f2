"""A growing pool of equal pages in host memory, reference-counted, pinned piece by piece where there is a GPU."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ..config import BLOCK
from . import numa

PIECE_BYTES = 1 << 30
"""Largest piece registered with CUDA at once: bigger ones are slower to pin and fail whole."""

AHEAD_BYTES = 64 << 20
"""Most memory taken before it is asked for: what a decode step waits for when its pool grows."""

_PORTABLE = 1  # cudaHostRegisterPortable
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)


class HostMemoryError(MemoryError):
    """The full KV does not fit in host memory."""


def available_host_bytes() -> int:
    """Bytes of host memory that can be taken without swapping, or without being killed for a container's limit."""
    limits = [_system_available_bytes()]
    for limit, used in _CGROUPS:
        try:
            with open(limit) as most, open(used) as now:
                limits.append(max(0, int(most.read()) - int(now.read())))
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return min(limits)


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _system_available_bytes() -> int:
    try:
        with open("/proc/meminfo") as info:
            for line in info:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _touch(memory: torch.Tensor) -> None:
    """Have the system give memory now, by many threads: CUDA pins in a fraction of the time what is there already."""
    memory.zero_()


_unpinned_later: list[tuple[list[tuple[int, int]], torch.Tensor, list[torch.device]]] = []


def _unpin(pieces: list[tuple[int, int]], pages: torch.Tensor, devices: list[torch.device]) -> None:
    """Memory must not go before its registration, which can't be given back while a stream is captured: then it stays
    until the next pool goes or grows."""
    _unpinned_later.append((pieces, pages, devices))
    _unpin_now()


def _unpin_now() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    if torch.cuda.is_initialized():  # a device may still be writing what nobody will read
        here = torch.device("cuda", torch.cuda.current_device())
        for device in {device for pieces, _, devices in _unpinned_later if pieces for device in devices or [here]}:
            torch.cuda.synchronize(device)
    while _unpinned_later:
        pieces, _pages, _ = _unpinned_later.pop()
        for address, _ in pieces:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]


class PageNumbers:
    """Which pages are handed out, and how often each is referred to. Any thread may call, and a collection that gives
    pages back may come in the middle of a call.

    Attributes:
        page_bytes: bytes of a page. references: int32, by page number. devices: CUDA devices that reach the pages.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.references = torch.zeros(0, dtype=torch.int32)
        self.devices: list[torch.device] = []
        self._free = torch.zeros(0, dtype=torch.int64)
        self._used = 0  # high-water mark: pages beyond it were never handed out
        self._lock, self._given_back = threading.Lock(), deque[torch.Tensor]()

    def __deepcopy__(self, memo: Any) -> "PageNumbers":
        # Pages are shared by design; each store holds its own table of references.
        return self

    @property
    def pages_in_use(self) -> int:
        return self._used - len(self._free)

    def allocate(self, count: int) -> torch.Tensor:
        """`[count]` page numbers, each referenced once.

        Raises:
            HostMemoryError: there is no room for them; nothing is allocated.
        """
        try:
            with self._lock:
                fresh = max(0, count - len(self._free))
                used = self._used + fresh
                self.make_room(used)
                reused = self._free[len(self._free) - (count - fresh) :]
                self._free = self._free[: len(self._free) - (count - fresh)]
                pages = torch.cat((reused, torch.arange(self._used, used)))
                self._used = used
                if used > len(self.references):
                    room = torch.zeros(max(used, 2 * len(self.references)) - len(self.references), dtype=torch.int32)
                    self.references = torch.cat((self.references, room))
                self.references[pages] = 1
                return pages
        finally:
            self._take_back()

    def retain(self, pages: torch.Tensor) -> None:
        """One more reference to each (a page named twice gains two)."""
        with self._lock:
            self.references.index_add_(0, pages, torch.ones(len(pages), dtype=torch.int32))
        self._take_back()

    def release(self, pages: torch.Tensor) -> None:
        """One reference fewer to each; pages that nobody refers to are free again."""
        self._given_back.append(pages)
        self._take_back()

    def _take_back(self) -> None:
        """Unless a call is under way, which does it at its end: perhaps this thread's own, below a collection."""
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                while self._given_back:
                    self._free_again(self._given_back.popleft())
            finally:
                self._lock.release()

    def _free_again(self, pages: torch.Tensor) -> None:
        self.references.index_add_(0, pages, torch.full((len(pages),), -1, dtype=torch.int32, device="cpu"))
        gone = pages[self.references[pages] == 0].unique()
        self._free = torch.cat((self._free, gone))
        self.forget(gone)

    def make_room(self, used: int) -> None:
        """Before the first `used` pages are handed out; raises `HostMemoryError` where that can't be."""

    def forget(self, pages: torch.Tensor) -> None:
        """What these hold is no longer wanted."""

    def copy(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """The content of pages `old` `[n]` to pages `new`."""
        raise NotImplementedError


class PagePool(PageNumbers):
    """Pages `[capacity, 2, 16, D]`: K then V of one block of one KV head.

    One address range is reserved at once and costs nothing until it is touched, so the pool grows a page at a time,
    copies nothing and keeps its base address. On CUDA each newly used piece is registered with `cudaHostRegister`,
    hardly larger than needed (torch's pinned allocator rounds 3 GiB up to 4).

    Args:
        head_dim: D. dtype: of the pages. pin: register with CUDA.
        reserve_bytes: address space to reserve; default the machine's physical memory.
        memory: a writable mapping to live on instead, page-aligned and taken from the system already; of its bytes the
            first `reserve_bytes` are used.
    """

    def __init__(
        self, head_dim: int, dtype: torch.dtype, pin: bool, reserve_bytes: int | None = None,
        memory: mmap.mmap | None = None,
    ) -> None:  # fmt: skip
        super().__init__(2 * BLOCK * head_dim * dtype.itemsize)
        self._given = memory is not None
        if reserve_bytes is None:
            physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            reserve_bytes = physical if memory is None else len(memory)
        self.capacity = max(1, reserve_bytes // self.page_bytes)
        if memory is None:
            memory = mmap.mmap(-1, self.capacity * self.page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        if pin:  # what is pinned is touched whole: in huge pages that takes a fraction of the time
            with contextlib.suppress(OSError, AttributeError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        count = self.capacity * self.page_bytes // dtype.itemsize
        self.pages = torch.frombuffer(memory, dtype=dtype, count=count).view(self.capacity, 2, BLOCK, head_dim)
        self.pin = pin
        # To one GPU pages are pinned as they always were; several may share them.
        self._flags = _PORTABLE if pin and torch.cuda.device_count() > 1 else 0
        self._covered = 0  # pages whose memory is pinned or, without pinning, was available when last looked at
        self._pieces: list[tuple[int, int]] = []
        self._late: deque[tuple[torch.Tensor, Callable[[], bool]]] = deque()
        if pin:
            weakref.finalize(self, _unpin, self._pieces, self.pages, self.devices)

    @property
    def pinned_bytes(self) -> int:
        return sum(size for _, size in self._pieces)

    @property
    def placement(self) -> str | None:
        """Where the pinned memory lies; None: none is pinned."""
        if not self._pieces:
            return None
        node = self._node()
        if node is None:
            return "on the only NUMA node" if len(numa.nodes()) == 1 else "on no NUMA node in particular"
        held = sum(size for address, size in self._pieces if numa.node_at(address) == node)
        return f"{held / self.pinned_bytes:.0%} on NUMA node {node}, the GPU's"

    def _node(self) -> int | None:
        """The NUMA node of the GPUs that reach these pages; None: there is none of all, or it is not told."""
        if len(numa.nodes()) < 2:
            return None
        devices = self.devices or [torch.device("cuda", torch.cuda.current_device())]
        near = {numa.node_of(device) for device in devices}
        return near.pop() if len(near) == 1 else None

    @property
    def pages_in_use(self) -> int:
        return super().pages_in_use - sum(len(pages) for pages, settled in list(self._late) if settled())

    @property
    def late(self) -> int:
        """Pages that are nobody's but may still be written to."""
        return sum(len(pages) for pages, settled in list(self._late) if not settled())

    def release_later(self, pages: torch.Tensor, settled: Callable[[], bool]) -> None:
        """As `release`, once `settled` says that nothing writes to them any more."""
        self._late.append((pages, settled))

    def allocate(self, count: int) -> torch.Tensor:
        for _ in range(len(self._late)):
            try:
                pages, settled = self._late.popleft()
            except IndexError:  # another thread was the first
                break
            if settled():
                self.release(pages)
            else:
                self._late.append((pages, settled))
        return super().allocate(count)

    def copy(self, old: torch.Tensor, new: torch.Tensor) -> None:
        self.pages[new] = self.pages[old]

    def make_room(self, used: int) -> None:
        if used > self._covered:
            self._cover(used)

    def commit(self, count: int) -> None:
        """Memory for so many pages is taken now, and they are free."""
        pages = self.allocate(count)
        if not self.pin:  # what is pinned was touched for it
            self.pages[pages[0] : pages[-1] + 1].zero_()  # committed by the system, not just reserved
        self.release(pages)

    def _cover(self, used: int) -> None:
        """See to the memory of the first `used` pages, and of a few more: asking the system at every small growth would
        cost a decode step more than the growth itself."""
        more = used - self._covered
        need = more * self.page_bytes
        if used > self.capacity:
            raise HostMemoryError(
                f"The full KV cache needs {more:,} more pages x {self.page_bytes:,} bytes of host memory, but may take "
                f"{self.capacity:,} in all (pages in use: {self.pages_in_use:,}); use fewer rows or a shorter context, "
                "or allow it more."
            )
        free = (self.capacity - self._covered) * self.page_bytes if self._given else available_host_bytes()
        if need > free:
            raise HostMemoryError(
                f"The full KV cache needs {more:,} more pages x {self.page_bytes:,} bytes = {need / 2**30:.2f} GiB of "
                f"host memory, but {free / 2**30:.2f} GiB are available (pages in use: {self.pages_in_use:,}); use "
                "fewer rows, a shorter context or a smaller host_dtype."
            )
        ahead = min(used // 100, AHEAD_BYTES // self.page_bytes, (free - need) // self.page_bytes, self.capacity - used)
        if self.pin:
            self._pin_to(used * self.page_bytes, ahead * self.page_bytes)
            ahead = min(ahead, self.pinned_bytes // self.page_bytes - used)
        self._covered = used + ahead

    def _pin_to(self, needed: int, ahead: int) -> None:
        """Pin `needed` bytes in all, and `ahead` more if that can be had."""
        _unpin_now()
        target = needed + ahead
        page = mmap.PAGESIZE
        done = self.pinned_bytes
        memory, node = self.pages.view(-1).view(torch.uint8), self._node()
        while done < target:
            size = min(PIECE_BYTES, -(-(target - done) // page) * page)
            address = self.pages.data_ptr() + done
            if node is not None:
                numa.prefer(address, size, node)
            _touch(memory[done : done + size])  # nothing of it was handed out yet
            status = torch.cuda.cudart().cudaHostRegister(address, size, self._flags)  # type: ignore[attr-defined]
            if int(status) != 0:
                if torch.cuda.is_initialized():
                    # CUDA tells an error again to the next launch that asks, which must not be the caller's.
                    with contextlib.suppress(RuntimeError):
                        torch.zeros(1, device="cuda")
                if target > needed:
                    target = needed
                    continue
                raise HostMemoryError(
                    f"CUDA could not pin {size / 2**30:.2f} GiB more of host memory (error {int(status)}; "
                    f"{done / 2**30:.2f} GiB are pinned); use fewer rows or a shorter context, or raise the limit "
                    "on locked memory."
                )
            self._pieces.append((address, size))
            done += size
