"""Host memory above a tier that holds more: which pages are in it, and how they come and go."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .pages import HostMemoryError, PageNumbers, PagePool

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _undisturbed(method: _Method) -> _Method:
    """What is given back meanwhile, by whatever thread a collection comes in, counts from the call's end: a place must
    not go while it is looked up, or written to by a read that is waited for."""

    @functools.wraps(method)
    def run(self: "Near", *args: Any, **kwargs: Any) -> Any:
        if self._caller == threading.get_ident():
            return method(self, *args, **kwargs)
        try:
            with self._lock:
                self._caller = threading.get_ident()
                try:
                    return method(self, *args, **kwargs)
                finally:
                    self._caller = None
        finally:
            self._take_back()

    return run  # type: ignore[return-value]


class Pending(ABC):
    """Pages on their way."""

    @abstractmethod
    def wait(self) -> None:
        """Until they are there. Raises what the tier raises; none of them then counts as arrived."""

    def settling(self) -> Callable[[], bool]:
        """Tells whether nothing more will be written to their places, and keeps nothing of the tier alive."""
        return lambda: True


class Far(ABC):
    """A tier that holds pages by number, called `name` in reports. `memory` is host memory `[pages, 2, 16, D]`, `at`
    `[n]` places in it."""

    name: str

    @abstractmethod
    def begin(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> Pending:
        """Start to read pages `numbers` `[n]` into `memory[at]`."""

    @abstractmethod
    def write(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> None:
        """Pages `numbers` `[n]` from `memory[at]`; done when this returns."""

    def make_room(self, pages: int) -> None:
        """For so many pages in all. Raises `HostMemoryError` where the tier is full."""
        return None


class Near(PageNumbers):
    """Numbered pages, of which at most `most` are in host memory and the others in a `Far`. The least recently used go
    first; what was changed is written back before.

    Args:
        pool: host memory. far: the tier below it. most: pages of `pool`; None: as many as there are numbers, so that
            nothing is ever sent away. beside: a CUDA device whose caches have pages in `pool` too: it may still be
            writing to those that have become free.

    Attributes:
        read, written: pages that came from the tier and went there.
    """

    def __init__(
        self, pool: PagePool, far: Far, most: int | None = None, beside: torch.device | None = None
    ) -> None:  # fmt: skip
        super().__init__(pool.page_bytes)
        self.pool, self.far, self.most, self.beside = pool, far, most, beside
        self.read = self.written = 0
        self._place = torch.zeros(0, dtype=torch.int64)  # page -> place in the pool, -1: only far
        self._page = torch.zeros(0, dtype=torch.int64)  # place -> page, -1: none
        self._used_at = torch.zeros(0, dtype=torch.int64)
        self._changed = torch.zeros(0, dtype=torch.bool)
        self._arriving: dict[int, tuple[Pending, torch.Tensor]] = {}  # by number, and which pages
        self._arrival = torch.zeros(0, dtype=torch.int64)  # page -> that number, 0: it is there, or far
        self._begun = self._clock = 0
        self._caller: int | None = None  # the thread that is in an undisturbed call

    @property
    def pages(self) -> torch.Tensor:
        """`[places, 2, 16, D]`."""
        return self.pool.pages

    @property
    def held(self) -> int:
        """Pages in host memory."""
        return int((self._page >= 0).sum())

    def make_room(self, used: int) -> None:
        self.far.make_room(used)
        self._place, self._arrival = _wider(self._place, used, -1), _wider(self._arrival, used, 0)

    def forget(self, pages: torch.Tensor) -> None:
        for number in self._arrival[pages].unique().tolist():
            if number:
                pending, own = self._arriving.pop(number)
                self._arrival[own] = 0
                self._lose(pending, own)
        places = self._place[pages]
        self._place[pages] = -1
        self._vacate(places[places >= 0])

    def _vacate(self, places: torch.Tensor) -> None:
        self._page[places], self._changed[places] = -1, False
        self.pool.release(places)

    @_undisturbed
    def take(self, pages: torch.Tensor, places: torch.Tensor) -> None:
        """Pages `[n]`, far so far, are at these places of the pool, which others refer to as well."""
        self.pool.retain(places)
        self._widen(places)
        self._place[pages], self._page[places], self._used_at[places] = places, pages, self._clock

    @_undisturbed
    def share(self, pages: torch.Tensor) -> torch.Tensor:
        """Where pages, of any shape and all different, are, with one more reference to each place, the caller's."""
        places = self.bring(pages.flatten())
        self.pool.retain(places)
        return places.view_as(pages)

    @_undisturbed
    def own(self, pages: torch.Tensor) -> int:
        """Pages `[n]` will be written: those at places that others refer to get some of their own. Gives their number.

        A page keeps its own: a transfer that is planned asks for it.
        """
        places = self._place[pages]
        shared = places >= 0
        shared[shared.clone()] = self.pool.references[places[shared]] > 1
        if shared.any():
            moved, old = pages[shared], places[shared]
            new = self._allocated(len(moved))
            self.pool.copy(old, new)
            self._place[moved], self._page[new], self._used_at[new] = new, moved, self._clock
            self._changed[new] = self._changed[old]
            self._vacate(old)
        return int(shared.sum())

    @_undisturbed
    def copy(self, old: torch.Tensor, new: torch.Tensor) -> None:
        for some in torch.arange(len(old)).split(self.at_once(2)):
            places = self.bring(torch.cat((old[some], new[some])), torch.arange(2 * len(some)) < len(some))
            self.pages[places[len(some) :]] = self.pages[places[: len(some)]]
            self.change(places[len(some) :])

    def at_once(self, each: int = 1) -> int:
        """How many times `each` pages may be needed at once."""
        most = self._place.shape[0] if self.most is None else self.most
        if most < each:
            raise HostMemoryError(
                f"{each:,} pages of {self.page_bytes:,} bytes are needed at once, but host memory may hold {most:,}: "
                "raise host_bytes."
            )
        return max(most // each, 1)

    @_undisturbed
    def bring(self, pages: torch.Tensor, fill: torch.Tensor | None = None) -> torch.Tensor:
        """Where pages `[n]`, all different, now are in the pool, `[n]`.

        Args:
            fill: `[n]` bool, which of them must have their content; None: all.
        """
        places = self.begin(pages, fill)
        self.arrive(pages)
        return places

    @_undisturbed
    def begin(self, pages: torch.Tensor, fill: torch.Tensor | None = None) -> torch.Tensor:
        """As `bring`, but their content may still be on its way until `arrive`."""
        self._clock += 1
        places = self._place[pages]
        here = places >= 0
        self._used_at[places[here]] = self._clock
        missing, order = pages[~here].sort()  # so that what is adjacent in the tier is so here
        if len(missing):
            new = self._vacant(len(missing), len(pages))
            self._place[missing], self._page[new], self._used_at[new] = new, missing, self._clock
            wanted = missing if fill is None else missing[fill[~here][order]]
            if len(wanted):
                try:
                    pending = self.far.begin(wanted, self.pages, self._place[wanted])
                except BaseException:  # none of them is there
                    self._place[missing] = -1
                    self._vacate(new)
                    raise
                self._begun += 1
                self._arriving[self._begun], self._arrival[wanted] = (pending, wanted), self._begun
                self.read += len(wanted)
        return self._place[pages]

    @_undisturbed
    def arrive(self, pages: torch.Tensor | None = None) -> None:
        """Pages `[n]`, or all that are on their way, are there. Raises what the tier raises: what did not come is far
        as before."""
        waits = list(self._arriving) if pages is None else self._arrival[pages].unique().tolist()
        for number in waits:
            if number:
                pending, own = self._arriving.pop(number)
                self._arrival[own] = 0
                try:
                    pending.wait()
                except BaseException:
                    self._lose(pending, own)
                    raise

    def change(self, places: torch.Tensor) -> None:
        """What is at these places was changed."""
        self._changed[places] = True

    def _lose(self, pending: Pending, pages: torch.Tensor) -> None:
        """These pages are not there. Their places are nobody's until nothing can be written to them any more."""
        places = self._place[pages]
        self._place[pages], self._page[places], self._changed[places] = -1, -1, False
        self.pool.release_later(places, pending.settling())

    def _vacant(self, count: int, asked: int) -> torch.Tensor:
        """`[count]` places of the pool, for a call that asks for so many pages in all."""
        room = count if self.most is None else self.most - self.pool.pages_in_use
        if count > room:
            self._send_away(count - max(room, 0), asked)
        return self._allocated(count)

    def _allocated(self, count: int) -> torch.Tensor:
        places = self.pool.allocate(count)
        if self.beside is not None:
            torch.cuda.synchronize(self.beside)
        self._widen(places)
        return places

    def _widen(self, places: torch.Tensor) -> None:
        top = int(places.max()) + 1
        self._page, self._used_at = _wider(self._page, top, -1), _wider(self._used_at, top, 0)
        self._changed = _wider(self._changed, top, False)

    def _send_away(self, count: int, asked: int) -> None:
        self.arrive()
        # What this call asks for carries its clock, and stays.
        old = torch.where((self._page >= 0) & (self._used_at < self._clock), self._used_at, self._clock)
        order = old.argsort(stable=True)[:count]
        if len(order) < count or int(old[order].max()) == self._clock:
            late = f", {self.pool.late:,} of which a late read may still write to" if self.pool.late else ""
            raise HostMemoryError(
                f"{asked:,} pages of {self.page_bytes:,} bytes are needed at once, but host memory may hold "
                f"{self.most:,}{late}: raise host_bytes."
            )
        changed = order[self._changed[order]]
        if len(changed):
            self.far.write(self._page[changed], self.pages, changed)
            self.written += len(changed)
        self._place[self._page[order]] = -1
        self._vacate(order)


def _wider(numbers: torch.Tensor, count: int, value: int | bool) -> torch.Tensor:
    have = len(numbers)
    if count <= have:
        return numbers
    return torch.cat((numbers, numbers.new_full((max(count, 2 * have) - have,), value)))
