"""The decode side: a request that was prefilled elsewhere, of whose KV only selected blocks are ever fetched."""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import supported
from ..cache import OasisCache
from ..config import BLOCK, ConfigError, OasisConfig
from ..placing import placed
from ..prefixes import PrefixStore
from ..prefixes.borrowed import Borrowed
from ..resumed import Resumed
from ..room import keeps_buffers
from ..store.near import Far, Near, Pending
from ..store.pages import PagePool
from ..store.tiered import TieredStore
from .control import Control
from .errors import DeadlineExceeded, DisaggError, PeerLost, PoolFull, Refused
from .handle import SUMMARISED_BY, Handle, head_dim, terms, unpack
from .increment import Held, Increment, check_store, whole
from .link import Link
from .tcp import TcpEngine
from .transport import Engine, Lease, Memory, Read, merged, verify
from .wire import Address, Tls

PAUSE = 0.02
"""Seconds between two questions whether a prompt is read, or may be."""


class _Arriving(Pending):
    """A read of pages `numbers` to places `at`. One that is lost with its connection is tried once more over a new one:
    a pool server that was started again has the same pages, so what may still arrive of the first is the same bytes."""

    def __init__(self, far: "RemotePages", numbers: torch.Tensor, at: torch.Tensor) -> None:
        self.far, self.at = far, at
        self.runs = merged(far.places[numbers].numpy(), at.numpy(), far.page_bytes)
        self.sums = None if far.sums is None else far.sums[numbers].numpy()
        self.read = self._begun()

    def _begun(self) -> Read:
        self.far.link.restore(self.far.away)
        return self.far.link.read(self.runs, self.far.lease)

    def wait(self) -> None:
        try:
            self.read.wait(self.far.seconds)
        except PeerLost:
            self.read = self._begun()
            self.read.wait(self.far.seconds)
        if self.sums is not None:
            verify(self.read.peer.memory, self.at, self.sums, self.far.page_bytes)

    def settling(self) -> Callable[[], bool]:
        read = self.read
        return lambda: read.settled


class RemotePages(Far):
    """A request's pages in a staging pool: each is read once at most, and never written.

    Args:
        link: to the prefill node. lease: on the request, given back when this goes. seconds: deadline of a read.
        away: seconds that the node, lost, has to come back.
    """

    name = "remote"

    def __init__(self, link: Link, lease: Lease, page_bytes: int, seconds: float, away: float = 10.0) -> None:
        self.link, self.lease, self.page_bytes, self.seconds, self.away = link, lease, page_bytes, seconds, away
        self.places = torch.zeros(0, dtype=torch.int64)
        self.sums: torch.Tensor | None = None
        self.release = weakref.finalize(self, _release, link, lease)

    def hold(self, pages: torch.Tensor, sums: torch.Tensor) -> None:
        """Page number i stands at `pages[i]` there. sums: CRC-32s, or nothing."""
        self.places, self.sums = pages, sums if sums.numel() else None

    def begin(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> Pending:
        return _Arriving(self, numbers, at)

    def write(self, numbers: torch.Tensor, memory: torch.Tensor, at: torch.Tensor) -> None:
        raise AssertionError("pages of a request are kept in host memory once they are there")


def _release(link: Link, lease: Lease) -> None:
    with contextlib.suppress(DisaggError, OSError):  # what is gone needs no release
        link.release(lease, 2.0)


class Prefilled:
    """A request that waits on a prefill node: what `OasisCache.from_prefill` takes.

    Attributes:
        ids: `[1, n]` its tokens, for `model.generate`. nbytes: of its handle, as it came. taken: a cache holds it.
    """

    def __init__(
        self, client: "PrefillClient", request: str, handle: Handle, lease: Lease, nbytes: int,
        borrowed: Borrowed | None = None,
    ) -> None:  # fmt: skip
        self.client, self.request, self.handle, self.nbytes = client, request, handle, nbytes
        self.borrowed, self.taken = borrowed, False
        self.increment: Increment | None = None
        self.far = RemotePages(client.link, lease, client.pool.page_bytes, client.seconds, client.away)
        self.ids = handle.ids[None]

    def keep(self) -> int:
        """The prompt's closed blocks stay in the client's `PrefixStore`, as many as there is room for. Those that no
        step has selected come now, so do this when the request has been answered. What its cache does makes no
        difference to them.

        Returns:
            New blocks there; 0 where the client has no store, or the node another model, adapter or drafter than it.

        Raises:
            ValueError: no cache has taken the request, or it is over. DisaggError: the node is lost. HostMemoryError:
                there is no memory for them.
        """
        if not self.taken:
            raise ValueError(f"No cache has taken the request {self.request!r} yet: keep it after from_prefill.")
        if self.over:
            raise ValueError(f"The request {self.request!r} is over: keep it before close.")
        return 0 if self.increment is None else self.increment.keep()

    @property
    def over(self) -> bool:
        """Whether it was closed: its blocks may be another's since."""
        return not self.far.release.alive

    def close(self) -> None:
        """The request is over, whoever still refers to it: its node has its pages back, and the store what it lent."""
        for held in (self.increment, self.borrowed):
            if held is not None:
                held.close()
        self.far.release()


class PrefillClient:
    """A decode process's connection to a prefill node.

    Args:
        model: the same as there. address, secret, tls: of the node's pool server.
        engine: "tcp" or "nixl", or a function that makes an `Engine` of a `Memory`.
        config, knobs: as `OasisCache` takes them; their summaries must be those of the prefill node.
        host_bytes: most host memory for KV of all its requests; None: the machine's. prefixes: what it holds of a
            prompt does not come; its knobs are the client's where none are given, and its memory holds the requests'
            KV too. `Prefilled.keep` leaves a prompt there. Clients may share one.
        seconds: deadline of a read of blocks. away: seconds that the node has to come back when it is lost; who needs
            it soon after that fails at once (`link.ABSENT`). limits: `seconds`, `beat`, `silence` of the connection
            (`Link`).

    Raises:
        Refused: the node has another model, version, layout or secret. PeerLost: it is not there. ConfigError: an
            unknown engine, or prefixes of another model or other blocks.
    """

    def __init__(
        self, model: Any, address: Address, secret: bytes, engine: Any = "tcp", tls: Tls | None = None,
        config: OasisConfig | None = None, host_bytes: int | None = None, seconds: float = 10.0,
        away: float = 10.0, limits: dict[str, float] | None = None, prefixes: PrefixStore | None = None, **knobs: Any,
    ) -> None:  # fmt: skip
        self.model, self.address, self.away, self.prefixes = supported.plain_model(model), address, away, prefixes
        own = OasisConfig() if prefixes is None else prefixes.config
        self.config, self.seconds = (config or own).replace(**knobs), seconds
        device, dtype = placed(self.model)
        if prefixes is None:
            self.pool = PagePool(head_dim(self.model), dtype, device.type == "cuda", host_bytes)
        else:
            check_store(self, prefixes, self.config, host_bytes)
            self.pool = prefixes.pool
        reads = _engine(engine, Memory(self.pool.pages), secret, tls)
        try:
            self.link = Link(address, secret, terms(self.model, self.config), reads, tls, **(limits or {}))
        except BaseException:
            reads.close()
            raise

    def fetch(self, request: str, borrowed: Borrowed | None = None) -> Prefilled:
        """A published request: its handle, which is not small, comes now, and none of its KV.

        Args:
            borrowed: what it was asked for with.

        Raises:
            StaleLease: there is no such request. Refused: it came without blocks that are not held here. Corrupt,
                PeerLost, DeadlineExceeded: as their names say.
        """
        self._alive()
        data, lease = self.link.handle(request)
        try:
            handle = whole(Handle.parse(bytes(data)), borrowed, self.pool)
        except BaseException:
            _release(self.link, lease)
            raise
        if self.prefixes is not None:
            with self.prefixes.lock:
                self.prefixes.asked += len(handle.ids)
                self.prefixes.hits += handle.first * BLOCK
        return Prefilled(self, request, handle, lease, len(data), borrowed)

    def prefill(self, ids: torch.Tensor, seconds: float = 120.0) -> Prefilled:
        """`published`, and fetched."""
        borrowed = self.borrow(ids)
        try:
            return self.fetch(self.published(ids, seconds, borrowed), borrowed)
        except BaseException:
            if borrowed is not None:
                borrowed.close()
            raise

    def borrow(self, ids: torch.Tensor) -> Borrowed | None:
        """What its store holds of a prompt of ids `[n]` or `[1, n]`, which then stays there, so that it need not come;
        None: it has no store."""
        return None if self.prefixes is None else self.prefixes.borrow(_one(ids))

    def published(self, ids: torch.Tensor, seconds: float = 120.0, borrowed: Borrowed | None = None) -> str:
        """Has the node read a prompt of ids `[n]` or `[1, n]`, which a `PrefillNode` does. Gives the request's name
        once it may be fetched.

        Args:
            seconds: limit of waiting for room in its pool, and for its turn. borrowed: what need not come; the request
                is fetched with it then.

        Raises:
            PoolFull: there was no room all the time. Refused: the prompt is none. ValueError: more than one.
                DeadlineExceeded, DisaggError.
        """
        request, until, ids = uuid.uuid4().hex, time.monotonic() + seconds, _one(ids)
        control = self._alive()
        while True:
            try:
                control.submit(request, ids.to(torch.int64).cpu().numpy(), held=Held.of(borrowed))
                break
            except PoolFull:
                if time.monotonic() + PAUSE > until:
                    raise
                time.sleep(PAUSE)
        while control.stage(request) != "published":
            if time.monotonic() > until:
                raise DeadlineExceeded(f"The prompt was not read within {seconds:g} s.")
            time.sleep(PAUSE)
        return request

    def memory(self) -> dict[str, int]:
        """Bytes of host memory: `host`, blocks of its requests, and all of its `PrefixStore`'s; `late`, places of
        requests that are over, which a late read may still write to."""
        late = self.pool.late
        return {"host": (self.pool.pages_in_use - late) * self.pool.page_bytes, "late": late * self.pool.page_bytes}

    def _alive(self) -> Control:
        """The control channel, made anew if it was lost."""
        self.link.restore(self.away)
        return self.link.control

    def close(self) -> None:
        """Caches of its requests stop working where they need blocks that are not here."""
        self.link.close()
        self.link.engine.close()


def _one(ids: torch.Tensor) -> torch.Tensor:
    """Ids `[n]` of one prompt `[n]` or `[1, n]`."""
    if ids.ndim != 1 and (ids.ndim != 2 or len(ids) != 1):
        raise ValueError(f"A request is one prompt, of ids [n] or [1, n], not {list(ids.shape)}.")
    return ids.flatten()


def _engine(engine: Any, memory: Memory, secret: bytes, tls: Tls | None) -> Engine:
    if engine == "tcp":
        return TcpEngine(memory, secret, tls)
    if engine == "nixl":
        from .nixl import NixlEngine

        return NixlEngine(memory, secret)
    if isinstance(engine, str):
        raise ConfigError(f"PrefillClient.engine={engine!r} is not allowed: use 'tcp' or 'nixl'.")
    return engine(memory)


@keeps_buffers
def from_prefill(prefilled: Prefilled, model: Any, drafter: Any = None, **knobs: Any) -> OasisCache:
    """A cache that holds a prefilled request; `model.generate(prefilled.ids, past_key_values=cache)` goes on with it.

    Admission reads what the first steps attend to; other blocks come when they are selected, each once at most. Of a
    sliding-window layer the window's tokens come, so that `crop` can't go behind the prompt's end.

    Args:
        prefilled: of `PrefillClient.fetch`, used once. drafter, knobs: as `OasisCache` takes them; where the client
            has a `PrefixStore`, its drafter is the default.

    Raises:
        Refused: the summaries are others than the client's. ConfigError: a store or host_dtype in the knobs.
        ValueError: another model than the client's, or a cache holds the request already, or it is over. DisaggError:
            the node is lost.
    """
    client, handle = prefilled.client, prefilled.handle
    if prefilled.taken:
        raise ValueError(
            f"A cache holds the request {prefilled.request!r} already, and it can be taken once: branch that cache "
            "with copy.deepcopy, or prefill again."
        )
    if prefilled.over:
        raise ValueError(f"The request {prefilled.request!r} is over: it can't be taken after close.")
    if supported.plain_model(model) is not client.model:
        raise ValueError("from_prefill needs the model that its PrefillClient was made with.")
    if drafter is None and client.prefixes is not None:
        drafter = client.prefixes.drafter.fork()
        drafter.reset()
    cache = OasisCache(model, client.config, drafter, **knobs)
    ours, theirs = cache.state.config, client.config
    for knob in SUMMARISED_BY:
        if getattr(ours, knob) != getattr(theirs, knob):
            raise Refused(
                "layout", f"The prefill node summarises blocks with {knob}={getattr(theirs, knob)!r}, not "
                f"{getattr(ours, knob)!r}."
            )  # fmt: skip
    if ours.store != "host" or ours.host_dtype != "model":
        raise ConfigError(
            "from_prefill keeps the pages that come in host memory as they are: leave store and host_dtype."
        )
    if ours.sparsify != "always":
        raise ConfigError(
            f"sparsify={ours.sparsify!r} would bring all blocks of a request that was read elsewhere, of which "
            "from_prefill brings what is selected: leave it 'always'."
        )
    state, pages = cache.state, handle.pages
    far = prefilled.far
    device = placed(client.model).device
    near = Near(client.pool, far, beside=device if client.prefixes is not None and device.type == "cuda" else None)
    layers, heads, blocks = pages.shape
    shares = client.prefixes is not None and prefilled.borrowed is not None and "first" in handle.told

    def make_store(
        rows: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> TieredStore:  # fmt: skip
        store = TieredStore(layers, rows, kv_heads, device, near)
        store.admit(near.allocate(pages.numel()).view(layers, kv_heads, blocks), shares)
        return store

    state.make_store = make_store
    far.hold(pages.flatten().long(), handle.sums.flatten())
    unpack(cache, handle)
    store = state.store
    if isinstance(store, TieredStore):
        if shares:
            assert client.prefixes is not None and prefilled.borrowed is not None
            prefilled.increment = Increment(client.prefixes, prefilled.borrowed, handle, near, store.table[:, 0])
        _begin(near, store.table[:, 0], handle.selected)
        near.arrive()
        _begin(near, store.table[:, 0], handle.ahead)  # beside the first step
    cache.stepper.resumed = Resumed(int(handle.ids[-1]), handle.logits)
    prefilled.taken = True
    return cache


def _begin(near: Near, table: torch.Tensor, blocks: torch.Tensor) -> None:
    """Read blocks `[layers, KV heads, K]`, -1 for none, of a table `[layers, KV heads, N]`."""
    near.begin(table.gather(2, blocks.long().clamp(min=0))[blocks >= 0])
