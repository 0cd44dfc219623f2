"""`PrefixStore`: what prompts begin with, kept for those that begin alike."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .. import supported
from ..config import BLOCK, ConfigError, OasisConfig
from ..drafters import make_drafter
from ..placing import autocast_to, needs_one_device, placed
from ..reach import Reach
from ..room import keeps_buffers
from ..store.host import HostStore
from ..store.pages import PagePool
from .borrowed import Borrowed
from .calls import are_text
from .index import Index, digests, release
from .keeping import kept_of
from .kind import Kind, apart

if TYPE_CHECKING:
    from ..cache import OasisCache

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """Of threads that share a store one at a time: what one has looked up must not go before it has its pages."""

    @functools.wraps(method)
    def run(self: "PrefixStore", *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class PrefixStore:
    """Closed blocks of prompts and their summaries, shared by requests whose tokens begin alike.

    ```python
    prefixes = PrefixStore(model, host_bytes=8 << 30, budget=2064)
    model.generate(**inputs, past_key_values=prefixes.cache())   # reads what is new, and leaves it here
    ```

    A block is known by its tokens and all before them, the model's weights and the adapters at work. Pages are shared,
    never copied: a cache keeps those it uses, whatever is dropped here. Only what a prompt's own forward has written is
    kept; what decode steps write saw a working set and is another text's at best.

    Args:
        model: whose caches these are. host_bytes: most host memory for what is held here, pages of it included; what
            was used longest ago goes first.
        config, drafter, knobs: as `OasisCache` takes them, for all of its caches.

    Attributes:
        hits, asked: tokens that need not be read or sent again, and tokens of all prompts, since it was made.

    Raises:
        ConfigError: host_bytes holds not even one block, another store than "host"; as `OasisCache` does.
        UnsupportedModelError: the model has sliding-window layers or RoPE that scales by the text's length, or can't
            be served at all.
    """

    @keeps_buffers
    def __init__(
        self, model: Any, host_bytes: int, config: OasisConfig | None = None, drafter: Any = None, **knobs: Any
    ) -> None:  # fmt: skip
        self.model = supported.plain_model(model)
        self.config = (config or OasisConfig()).replace(**knobs)
        windows = supported.layer_windows(self.model)
        needs_one_device(self.model, "PrefixStore")
        if any(window is not None for window in windows):
            raise supported.UnsupportedModelError(
                f"PrefixStore does not support {type(self.model).__name__}: its sliding-window layers keep a prompt's "
                "last tokens alone, and a prefix ends before them; use OasisCache(model)."
            )
        reach = Reach(self.model, supported.text_config(self.model))
        if reach.dynamic or reach.longrope:
            raise supported.UnsupportedModelError(
                f"PrefixStore does not support {type(self.model).__name__}: its RoPE rotates a prefix by how far the "
                "whole text goes, so that it is another one in a longer text; use OasisCache(model)."
            )
        if self.config.store != "host":
            raise ConfigError(f"PrefixStore keeps pages in host memory, not with store={self.config.store!r}.")
        self.lock = threading.RLock()
        self.drafter = make_drafter(drafter, self.model, self.config)
        self.kind = Kind(self.model, self.config, self.drafter)
        self.layout = self.kind.layout
        self.pool = PagePool(self.kind.head_dim, self.kind.dtype, placed(self.model).device.type == "cuda")
        if type(host_bytes) is not int or host_bytes < self.layout.nbytes:
            told = f"{host_bytes:,}" if type(host_bytes) is int else repr(host_bytes)
            raise ConfigError(
                f"PrefixStore.host_bytes={told} is not allowed: one block of this model takes {self.layout.nbytes:,} "
                "bytes, and their number is an integer."
            )
        self.host_bytes = host_bytes
        self.hits = self.asked = 0
        self._open()

    def _open(self) -> None:
        pages = self.layout.layers * self.layout.heads
        self.index = Index(self.layout, min(self.host_bytes // self.layout.nbytes, self.pool.capacity // pages))
        self._finalizer = weakref.finalize(self, release, self.pool, self.index)

    @property
    def nbytes(self) -> int:
        """Bytes held now, `host_bytes` at most."""
        return len(self.index) * self.layout.nbytes

    def __len__(self) -> int:
        """Blocks held."""
        return len(self.index)

    @_alone
    @keeps_buffers
    def clear(self) -> None:
        """Forget all, as after a change of the model's weights; caches keep what they use."""
        self._finalizer()
        self.kind.forget()
        self._open()

    def identity(self) -> str:
        """Of the model and the adapters at work in it, and of what is kept of a block."""
        return self.kind.identity()

    def cache(self) -> "OasisCache":
        """An empty cache: `generate`'s prefill takes from here what it can, and what it reads is kept here."""
        from ..cache import OasisCache

        drafter = self.drafter.fork()
        drafter.reset()
        cache = OasisCache(self.model, self.config, drafter)
        cache.prefixes, cache.state.make_store = self, self._make_store
        self.begin(cache)
        return cache

    def begin(self, cache: "OasisCache") -> None:
        """A cache of this store's is empty, and what its drafter sees of the next prompt will be wanted."""
        cache.drafter.recorded, cache.admitted = [] if cache.drafter.state_width else None, None

    # -- around a prompt's forward ------------------------------------------------------------------------------------

    def before(self, cache: "OasisCache", ids: torch.Tensor, call: dict[str, Any], whole: bool) -> bool:
        """generate is about to read a prompt. call: what the model is given beside its ids. whole: it is read at
        once.

        Returns:
            Whether all that the cache will hold is these ids: `after` may keep it.
        """
        held = cache.get_seq_length()
        if held and any(layer.recent is not None for layer in cache.sparse_layers):
            return False  # a forward of the caller's own has read that
        if apart(self.model, cache.device) or not are_text(ids, call):
            return False
        if whole and not held:
            self.admit(cache, ids, call.get("attention_mask"))
        return True

    def after(self, cache: "OasisCache", ids: torch.Tensor) -> None:
        """It has been read."""
        rows = cache.state.rows
        if rows is not None and not cache.stepper.decoded and rows.columns == ids.shape[1]:
            self._keep(cache, ids)

    @_alone
    @keeps_buffers
    def admit(self, cache: "OasisCache", ids: torch.Tensor, mask: torch.Tensor | None = None) -> int:
        """An empty cache of this store's holds of a prompt what is known here, but for its last tokens: those are to be
        read next, whose queries choose the first working set.

        Args:
            ids: `[B, T]`. mask: `[B, T]`, 0 for padding, which must be on the left; None: there is none.

        Returns:
            Columns that the cache then holds, of T; under autocast, whose keys and values are others, 0.

        Raises:
            ValueError: ids of another shape.
        """
        if ids.ndim != 2:
            raise ValueError(f"PrefixStore takes ids of shape [rows, tokens], not {list(ids.shape)}.")
        if autocast_to(cache.device) is not None:
            return 0
        columns = ids.shape[1]
        valid = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.detach().to("cpu", torch.bool)
        pads = columns - valid.sum(1)
        if valid.shape != ids.shape or not bool((valid == (torch.arange(columns) >= pads[:, None])).all()):
            return 0
        host, root = ids.detach().cpu(), bytes.fromhex(self.identity())
        self.index.tick()
        self.asked += int(valid.sum())
        found = [
            self.index.find(digests(root, own[pad : pad + (columns - pad) // BLOCK * BLOCK]))
            for own, pad in zip(host, pads.tolist())
        ]
        rest = max(1, cache.state.window)
        ends = [min(pad + len(blocks) * BLOCK, columns - rest) for pad, blocks in zip(pads.tolist(), found)]
        end = min(ends)
        lengths = [max(0, end - pad) for pad in pads.tolist()]
        if not any(lengths):
            return 0
        self.hits += sum(lengths)
        self._fill(cache, [blocks[: -(-n // BLOCK)] for blocks, n in zip(found, lengths)], lengths)
        rows = cache.state.need_rows()
        rows.extend(valid[:, :end])
        cache.state.mark_dirty([0] * len(rows))
        cache.admitted = root, host[:, :end].clone()
        states = self._states(found, lengths, pads.tolist(), end)
        tokens = ids[:, :end].to(cache.device)
        cache.drafter.reread(tokens, None if mask is None else valid[:, :end], states)
        return end

    def _fill(self, cache: "OasisCache", found: list[list[int]], lengths: list[int]) -> None:
        """Pages and summaries of rows' blocks, as if their prompts had been read."""
        state, (device, dtype) = cache.state, placed(self.model)
        settle(device)  # other caches' writes to these pages may be on their way
        heads, dim = self.layout.heads, self.pool.pages.shape[-1]
        cache.rows_for(len(found))
        for layer in cache.sparse_layers:
            if not layer.is_initialized:  # else its buffers stay, as reset() has it
                layer.lazy_initialization(
                    *(torch.empty((len(found), heads, 0, dim), dtype=dtype, device=device) for _ in range(2))
                )
        store: Any = state.store
        store.adopt([self.index.pages[blocks].permute(1, 2, 0) for blocks in found])
        for row, (blocks, length) in enumerate(zip(found, lengths)):
            closed = blocks[: length // BLOCK]
            vectors = self.index.parts["vectors"][closed].to(device)
            scales = self.index.parts["scales"][closed].to(device) if "scales" in self.index.parts else None
            for at, layer in enumerate(cache.sparse_layers):
                layer.summaries.ensure(len(closed))
                layer.summaries.vectors[row, :, : len(closed)] = vectors[:, at].transpose(0, 1)
                if scales is not None:
                    layer.summaries.scales[row, :, : len(closed)] = scales[:, at].transpose(0, 1)
        state.tick()  # as the forward that read them: what is selected is younger than what was never

    def _make_store(self, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> HostStore:
        layers, most = self.layout.layers, self.config.host_capacity_tokens
        return HostStore(layers, rows, heads, dim, dtype, device, most, self.pool)

    def _states(self, found: list[list[int]], lengths: list[int], pads: list[int], end: int) -> torch.Tensor | None:
        """`[B, end, width]` of what the drafter is told of these tokens."""
        kept = self.index.parts.get("states")
        if kept is None:
            return None
        states = kept.new_zeros((len(found), end, kept.shape[-1]))
        for row, (blocks, length, pad) in enumerate(zip(found, lengths, pads)):
            if length:
                states[row, pad:end] = kept[blocks].flatten(0, 1)[:length]
        return states

    @keeps_buffers
    def keep(self, cache: "OasisCache", ids: torch.Tensor) -> int:
        """What a cache of this store's has read as a prompt stays here.

        Args:
            ids: `[B, T]` of all its columns, none of them padding: whether its positions counted in a loop of one's own
                is not known here.

        Returns:
            Blocks that are new here.

        Raises:
            ValueError: the cache is not of this store, holds other columns or padding, was read under autocast, or has
                decoded: what it holds then is not what reading the text would give.
        """
        rows = cache.state.rows
        read = rows is not None and rows.columns == ids.shape[1] and bool(rows.valid.all())
        own = placed(self.model).dtype
        read = read and all(layer.working_set.keys.dtype == own for layer in cache.sparse_layers)
        if cache.prefixes is not self or not read or cache.stepper.decoded:
            raise ValueError(
                "PrefixStore.keep takes a cache of its own, made by cache() or OasisCache.from_prefix, that has read "
                f"just these {ids.shape[1]} columns, without padding or autocast, and decoded nothing."
            )
        self.index.tick()
        return self._keep(cache, ids)

    @_alone
    @keeps_buffers
    def _keep(self, cache: "OasisCache", ids: torch.Tensor) -> int:
        return kept_of(self, cache, ids)

    def drop(self, entries: list[int]) -> None:
        """These entries go; whoever uses their pages keeps them."""
        if entries:
            settle(placed(self.model).device)  # a device may still be reading their pages
            self.pool.release(self.index.pages[entries].flatten())
        for at in entries:
            self.index.drop(at)

    # -- what goes elsewhere -------------------------------------------------------------------------------------------

    @_alone
    @keeps_buffers
    def borrow(self, ids: torch.Tensor) -> Borrowed:
        """What is held of a prompt of ids `[n]`, its last token's block too: it stays until it is given back."""
        host, root = ids.detach().cpu().long(), bytes.fromhex(self.identity())
        names = digests(root, host[: len(host) // BLOCK * BLOCK])
        self.index.tick()
        found = self.index.find(names)
        return Borrowed(self.pool, self.index, root, found, names)

    # -- files --------------------------------------------------------------------------------------------------------

    @_alone
    def save(self, path: str | Path) -> None:
        """What is held of the model and the adapters at work now, to a new folder. Raises OSError, PrefixFileError."""
        from .files import save

        save(self, Path(path))

    @_alone
    @keeps_buffers
    def load(self, path: str | Path) -> int:
        """What a store of the same model and knobs has saved, beside what is held. Gives the new blocks' number.

        Raises:
            PrefixFileError: another model, adapter or layout; a damaged or truncated file. HostMemoryError: there is no
                memory for more; what was read until then stays.
        """
        from .files import load

        settle(placed(self.model).device)  # a device may still be writing pages that are free again
        return load(self, Path(path))


def settle(device: torch.device) -> None:
    """What a device has been given that may touch pages is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
