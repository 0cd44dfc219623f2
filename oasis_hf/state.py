"""What the layers of one cache share: configuration, rows, store, and the forward under way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .config import BLOCK, ConfigError, OasisConfig
from .pacing import Pace, link_rate
from .pipeline import Pipeline
from .rows import Rows
from .sharing import Shares
from .store import BlockStore, HostStore, ResidentStore, SplitStore, TieredStore, file_pages
from .summaries import GROWTH
from .tail import Tail

if TYPE_CHECKING:
    from .sparsify import Sparsity

EVERY_SLOT = 1 << 20
"""Slots, more than any context has blocks: they are allocated as they are needed."""


@dataclass
class Step:
    """One forward, as the wrapper set it.

    Attributes:
        mode: "prefill" (dense over everything), "decode" or "verify" (over the working set).
        number: rises with every forward; the clock of `last_selected`.
        count: tokens that stay (they are appended). drafts: rows stacked behind them.
        starts: real tokens a row before it. columns: columns before it.
        valid: prefill only: `[B, q]` bool on the host, or None when all are real.
        tail: decode and verify only.
        predicts: whether blocks are predicted. weights: `[B, W + drafts]`, what each recent and draft query counts in
            that, once it is known from `pair` `[2, W + drafts]`: with a draft and without.
        held: what the drafter uses on the device in this step, where that can be captured. replayed: it was.
        on_demand: select and fetch before attending; corrects: the same, in KV heads whose prediction went wrong.
        taking: `[B]` bool, which rows take the token; None: all. The others run along, and nothing of them changes.
        pipeline: side streams of the step that is being captured; None: it runs eagerly.
        attended: indices of the layers that have attended in it. windows: of the masks that the model has asked for.
    """

    mode: str
    number: int
    count: int
    starts: list[int]
    columns: int
    drafts: int = 0
    valid: torch.Tensor | None = None
    tail: Tail | None = None
    predicts: bool = False
    pair: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    on_demand: bool = False
    corrects: bool = False
    taking: torch.Tensor | None = None
    held: list[torch.Tensor] | None = None
    replayed: bool = False
    pipeline: Pipeline | None = None
    tick: Callable[[], None] | None = None
    attended: set[int] = field(default_factory=set)
    windows: set[int | None] = field(default_factory=set)
    _shared: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    def tail_mask(self, device: torch.device) -> torch.Tensor:
        assert self.tail is not None
        tail = self.tail
        return self.once(("tail", device), lambda: tail.mask(device))

    def on(self, what: str, device: torch.device) -> torch.Tensor:
        """`weights` or `taking` on a layer's device: brought there once a step."""
        own: torch.Tensor = getattr(self, what)
        return own if own.device == device else self.once((what, device), lambda: own.to(device))

    def once(self, what: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What all layers of a step need alike, made by the first that asks."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    def unshare(self) -> None:
        """A capture failed in which layers shared something: it was never computed."""
        self._shared.clear()

    def where_taking(self, lengths: torch.Tensor, otherwise: int) -> torch.Tensor:
        """`lengths` `[B]`, and `otherwise` in rows that take no token."""
        if self.taking is None:
            return lengths
        return torch.where(self.on("taking", lengths.device), lengths, otherwise)

    @property
    def ends(self) -> list[int]:
        if self.valid is None:
            return [n + self.count for n in self.starts]
        return [n + new for n, new in zip(self.starts, self.valid.sum(1).tolist())]

    def real(self, device: torch.device) -> torch.Tensor | None:
        """`valid` on a device: moved there once a step, and the host does not wait for it."""
        valid = self.valid
        return None if valid is None else self.once(("real", device), lambda: valid.to(device, non_blocking=True))

    def kept(self, row: int, device: torch.device) -> torch.Tensor | None:
        """Columns of this prefill that are real tokens of a row, or None when all are; on a device, as `real`."""
        if self.valid is None or bool(self.valid[row].all()):
            return None
        own = self.valid[row]
        return self.once((row, device), lambda: own.nonzero().squeeze(1).to(device, non_blocking=True))


class State:
    """Shared by the layers of one cache.

    Attributes:
        rows: lengths and validity; None before the first forward.
        store: where the full KV lives; made when the first sparse layer sees its keys.
        slots, cap: S and C. shares: with `fetch_ratio="auto"`, whose part of a step's transfer is how large;
            pace: how much that is where nobody says. window: recent queries kept a layer.
        first_due: the working set must be selected anew before the next decode step.
        devices: of each sparse layer, where they are several; None: all are on one.
        sparsity: whether the batch is dense at the time; None: `sparsify` is "always". heads: KV heads.
        make_store: makes the store of rows, KV heads, head_dim, dtype and device; None: as the config says.
        dirty_from: a row's first block whose slot is out of date since the last selection.
    """

    def __init__(self, config: OasisConfig, sparse_layers: int, window: int) -> None:
        self.config, self.sparse_layers, self.window = config, sparse_layers, window
        self.rows: Rows | None = None
        self.store: BlockStore | None = None
        self.slots = self.cap = 0
        self.shares: Shares | None = None
        self.pace: Pace | None = None
        self.block_bytes = self.heads = 0
        self.sparsity: Sparsity | None = None
        self.step: Step | None = None
        self.number = 0
        self.devices: list[torch.device] | None = None
        self.make_store: Callable[[int, int, int, torch.dtype, torch.device], BlockStore] | None = None
        self._clocks: dict[torch.device, torch.Tensor] = {}
        self.fired: dict[torch.device, torch.Tensor] = {}
        self.first_due = False
        self.dirty_from: list[int] = []
        # Blocks a row for which pages, slots and summaries are there; None: unknown.
        self.ready: list[int] | None = None

    def open_rows(self, batch: int) -> Rows:
        self.rows, self.ready = Rows(batch), None
        self.dirty_from = [0] * batch
        return self.rows

    def open_store(self, keys: torch.Tensor) -> BlockStore:
        """The store, made from the first keys `[B, H, q, D]` seen."""
        rows, heads, _, dim = keys.shape
        if self.store is None:
            config = self.config
            dtype = keys.dtype if config.host_dtype == "model" else getattr(torch, config.host_dtype)
            if (keys.dtype, dtype) == (torch.bfloat16, torch.float16):
                raise ConfigError(
                    "OasisConfig.host_dtype='float16' can't hold a bfloat16 model's keys and values beyond 65,504: use "
                    "'model' or 'float32'."
                )
            self.block_bytes = 2 * BLOCK * dim * keys.element_size()
            self.slots = config.slots_for(self.sparse_layers, rows, heads, self.block_bytes)
            self.cap, self.heads = config.fetch_cap(self.slots), heads
            if config.fetch_ratio == "auto":
                layers, every = self.sparse_layers, self.sparse_layers * rows * heads
                blocks = config.fetch_blocks(self.slots, every, self.block_bytes)
                self.cap = config.shared_cap(self.slots, blocks, every)
                self.shares = Shares(layers, rows, heads, self.cap, blocks, self.slots - 1, keys.device)
                linked = keys.is_cuda and config.store == "host" and self.make_store is None
                if config.fetch_bytes is None and linked:
                    self.pace = Pace(link_rate(keys.device), self.block_bytes)
            if self.sparsity is not None:
                ends = self.step.ends if self.step is not None else self.need_rows().tokens
                self.sparsity.begin(self, ends, keys.device)
            self._check_device_memory(keys)
            if self.make_store is not None:
                self.store = self.make_store(rows, heads, dim, dtype, keys.device)
            elif self.devices is None:
                self.store = self._new_store(self.sparse_layers, rows, heads, dim, dtype, keys.device)
            else:
                self.store = SplitStore(
                    self.devices,
                    lambda layers, device, beside: self._new_store(layers, rows, heads, dim, dtype, device, beside),
                )
        return self.store

    def _new_store(
        self, layers: int, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, beside: Any = None
    ) -> BlockStore:
        """Of so many layers, in the memory of the one `beside`."""
        config = self.config
        if config.store == "resident":
            return ResidentStore(layers, rows, heads, dim, dtype, device)
        pool: Any = None if beside is None else beside.pool
        if config.store == "file":
            if pool is None:
                pool = file_pages(dim, dtype, device.type == "cuda", config.host_bytes, config.file_dir)
            return TieredStore(layers, rows, heads, device, pool)
        tokens = config.host_capacity_tokens
        made = HostStore(layers, rows, heads, dim, dtype, device, tokens, pool)
        if tokens is not None and pool is None and layers < self.sparse_layers:
            made.pool.commit(self.sparse_layers * rows * heads * -(-tokens // BLOCK))  # the others' too
        return made

    def _check_device_memory(self, keys: torch.Tensor) -> None:
        if not keys.is_cuda:
            return
        devices = self.devices or [keys.device] * self.sparse_layers
        for device in dict.fromkeys(devices):
            self._check_memory_of(device, devices.count(device), keys)

    def _check_memory_of(self, device: torch.device, layers: int, keys: torch.Tensor) -> None:
        rows, heads, _, dim = keys.shape
        most = max(self.step.ends) if self.step is not None else 0
        most_slots = min(self.most_slots, most // BLOCK + 1) if self.dense else self.slots
        slots = layers * rows * heads * min(most_slots, most // BLOCK + 1) * self.block_bytes
        size = 1 if self.config.summary_dtype == "int8" else keys.element_size()
        room = most // BLOCK + 1 + max(most // BLOCK // GROWTH, GROWTH)  # as much as their next growth takes
        summaries = layers * rows * heads * room * self.config.parts * 2 * dim * size
        free, _ = torch.cuda.mem_get_info(device)
        if slots + summaries > free:
            raise MemoryError(
                f"The working set needs {slots / 2**30:.2f} GiB ({layers} layers x {rows} rows x {heads} "
                f"KV heads x {most_slots} slots x {self.block_bytes:,} bytes) and summaries {summaries / 2**30:.2f} "
                f"GiB of GPU memory, but {free / 2**30:.2f} GiB are free; use fewer rows, a smaller budget or "
                "summary_dtype='int8'."
            )

    def need_rows(self) -> Rows:
        assert self.rows is not None, "no forward has run on this cache"
        return self.rows

    def need_step(self) -> Step:
        if self.step is None:
            raise RuntimeError(
                "OasisCache.update was called outside its model's forward: pass the cache to the model it was made "
                "for, OasisCache(model)."
            )
        return self.step

    def mark_read(self, step: Step) -> None:
        """A prompt or chunk is in the store; while the batch is dense, rows that began in it are in their slots too."""
        self.mark_dirty(step.starts)
        if self.dense:
            self.dirty_from = [
                old if start else -(-end // BLOCK) for old, start, end in zip(self.dirty_from, step.starts, step.ends)
            ]

    def mark_dirty(self, starts: list[int]) -> None:
        """Content at and beyond these tokens changed in the store only."""
        self.first_due, self.ready = True, None
        self.dirty_from = [min(old, n // BLOCK) for old, n in zip(self.dirty_from, starts)]

    def tick(self) -> None:
        """A forward begins."""
        self.number += 1
        for clock in self._clocks.values():
            clock += 1

    def clock(self, device: torch.device, back: int = 0) -> torch.Tensor:
        """`number - back` (0 or 1) as an int64 scalar on a device; the same storage at every step."""
        if device not in self._clocks:
            self._clocks[device] = torch.tensor([self.number, self.number - 1], device=device)
        return self._clocks[device][back]

    def fired_on(self, device: torch.device) -> torch.Tensor:
        """`[1 + B]` int64 on a device: steps of a row in which a head of its layers there was corrected, all of them
        counted; then the last such step of each row, its `number`."""
        have, rows = self.fired.get(device), len(self.need_rows())
        if have is None or len(have) != 1 + rows:
            new = torch.zeros(1 + rows, dtype=torch.int64, device=device)
            if have is not None:
                new[:1] = have[:1]
            have = self.fired[device] = new
        return have

    @property
    def grows_sparse(self) -> bool:
        """Whether any row fills its slots at its next block: from here on blocks are predicted."""
        return not self.dense and self.need_rows().most_blocks >= self.slots

    @property
    def dense(self) -> bool:
        return self.sparsity is not None and self.sparsity.dense

    @property
    def lacks(self) -> bool:
        """Whether closed blocks are missing in the slots of a batch that is dense."""
        closed = [n // BLOCK for n in self.need_rows().tokens]
        return (self.sparsity is not None and self.sparsity.lacks) or any(map(operator.lt, self.dirty_from, closed))

    @property
    def most_slots(self) -> int:
        """Slots that a KV head may have now: S, or as many as there are blocks."""
        return EVERY_SLOT if self.dense else self.slots

    def fork(self) -> "State":
        self.ready = None  # pages are shared from here on
        other = State(self.config, self.sparse_layers, self.window)
        other.rows = self.rows.fork() if self.rows is not None else None
        other.store = self.store.fork() if self.store is not None else None
        other.slots, other.cap, other.block_bytes, other.heads = self.slots, self.cap, self.block_bytes, self.heads
        other.sparsity = None if self.sparsity is None else self.sparsity.fork()
        other.shares = None if self.shares is None else self.shares.fork()
        other.pace = None if self.pace is None else self.pace.again()
        other.devices = self.devices
        other.fired = {device: have.clone() for device, have in self.fired.items()}
        other.number, other.first_due, other.dirty_from = self.number, self.first_due, list(self.dirty_from)
        return other


def check_kind(held: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ValueError where a forward's keys are of another dtype or device than what a layer holds."""
    if held.dtype != keys.dtype or held.device != keys.device:
        was, now = (f"{str(one.dtype).removeprefix('torch.')} on {one.device}" for one in (held, keys))
        raise ValueError(
            f"This OasisCache holds keys in {was}, and the call gives {now}: the model was moved or cast since (to(), "
            "half(), autocast), so make a new OasisCache."
        )
