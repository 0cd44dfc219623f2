"""`OasisCache`: what transformers sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from . import attach, supported
from .committing import Committing
from .config import BLOCK, ConfigError, OasisConfig
from .drafters import Drafter, make_drafter
from .graphs import StepGraphs
from .layers import OasisLayer
from .lookahead import recent_window, settled
from .padding import Padding
from .placing import autocast_to, layer_devices, placed
from .report import Report
from .room import keeps_buffers
from .rows import Rows
from .sliding import SlidingLayer
from .sparsify import Sparsity
from .state import State
from .step import Stepper

if TYPE_CHECKING:
    from .prefixes import PrefixStore


class OasisCache(Report, Padding, Committing, Cache):
    """The full KV in host memory, a sparse working set of blocks where the model runs.

    ```python
    cache = OasisCache(model, budget=2064)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
    print(cache.report())
    ```

    Args:
        model: the causal language model it will be used with, plain, compiled or under an adapter (PEFT); it is
            attached while any of its caches lives.
        config: an `OasisConfig`; None: the defaults.
        drafter: see `drafters.make_drafter`; None: an EAGLE-3 head that is known for the model, else n-gram matches
            where there are any, else recent queries.
        **knobs: fields of `OasisConfig` that replace those of `config`.

    Raises:
        ConfigError: a knob has a wrong value. UnsupportedModelError: this model can't be served.
        DrafterError: the drafter does not fit the model.
    """

    def __init__(self, model: Any, config: OasisConfig | None = None, drafter: Any = None, **knobs: Any) -> None:
        model = supported.plain_model(model)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"OasisCache(model, ...) needs the model itself, not {type(model).__name__}.")
        if config is not None and not isinstance(config, OasisConfig):
            raise ConfigError(
                f"OasisCache(model, config) takes an OasisConfig, not {type(config).__name__}: name each knob instead, "
                "as in OasisCache(model, budget=2064)."
            )
        config = (config or OasisConfig()).replace(**knobs)
        windows = supported.layer_windows(model)
        if config.speculate and not supported.has_head(model):
            raise ConfigError(
                f"OasisConfig.speculate=True compares logits, but {type(model).__name__} has no language-model head: "
                "leave speculate off, or give the model with its head."
            )
        self.model = model
        self.prefixes: PrefixStore | None = None
        self.admitted: tuple[bytes, torch.Tensor] | None = None  # whose prefix it took from there, and its ids
        self.drafter: Drafter = make_drafter(drafter, model, config)
        config = settled(config, self.drafter)
        kept = recent_window(config, self.drafter.always)
        config.check_layers(windows.count(None))
        self.state = State(config, windows.count(None), kept)
        devices = layer_devices(model)
        if devices is not None:
            self.state.devices = [device for device, window in zip(devices, windows) if window is None]
            if config.fetch_ratio == "auto" and len(set(self.state.devices)) > 1:
                raise ConfigError(
                    "OasisConfig.fetch_ratio='auto' shares a budget out on one device, and this model's layers are on "
                    f"several ({', '.join(dict.fromkeys(map(str, self.state.devices)))}): use a number."
                )
        if None in windows:
            self.state.sparsity = Sparsity.of(model, config, self.drafter)
        layers: list[Any] = []
        for window in windows:
            sparse = sum(isinstance(layer, OasisLayer) for layer in layers)
            layers.append(OasisLayer(self.state, sparse) if window is None else SlidingLayer(self.state, window))
        super().__init__(layers=layers)
        self.stepper = Stepper(self)
        self.graphs = StepGraphs()
        attach.attach(model, self)

    @classmethod
    def from_prefill(cls, prefilled: Any, model: Any, drafter: Any = None, **knobs: Any) -> "OasisCache":
        """A prompt that another process has read: see `disagg.decode.from_prefill`."""
        from .disagg.decode import from_prefill

        return from_prefill(prefilled, model, drafter, **knobs)

    @classmethod
    def from_prefix(cls, prefixes: "PrefixStore", input_ids: torch.Tensor, attention_mask: Any = None) -> "OasisCache":
        """A cache that holds what `prefixes` knows of a prompt `[B, T]`, padded on the left; `model.generate` with the
        whole prompt reads the rest. Its knobs are the store's."""
        cache = prefixes.cache()
        prefixes.admit(cache, input_ids, attention_mask)
        return cache

    # -- what the wrapper calls -----------------------------------------------------------------------------------

    def run(self, inner: Any, call: dict[str, Any], name: str, keeps_logits: bool) -> Any:
        """A forward of the model: see `Stepper.run`."""
        return self.stepper.run(inner, call, name, keeps_logits)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `transformers.Cache` has it; a compiled layer leaves its graph for it. Under autocast keys and values are
        kept as attention would take them.

        Raises:
            ValueError: the model's dtype or device is another than it was.
        """
        dtype = autocast_to(key_states.device)
        if dtype is not None:
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        self.layers[layer_idx].check_kind(key_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def rows_for(self, batch: int) -> Rows:
        """The rows, opened by the first forward; another batch size than theirs raises."""
        rows = self.state.rows
        if rows is not None and len(rows) != batch and rows.columns == 0 and self.stepper.resumed is None:
            for layer in self.layers:
                layer.drop()
            self.graphs.forget()
            rows = self.state.rows = self.state.store = None
        if rows is None:
            rows = self.state.open_rows(batch)
        if len(rows) != batch:
            raise ValueError(
                f"This OasisCache holds {len(rows)} rows, the call has {batch}: use one cache a batch, or "
                "batch_select_indices / batch_repeat_interleave, or reset()."
            )
        return rows

    def settle(self) -> None:
        """Finish the transfers now that the last step left to the next one: before anything else changes."""
        self.graphs.settle(self)
        if self.state.store is not None:
            self.state.store.arrive()

    def first_select(self) -> None:
        """Fill the working sets after a prefill."""
        for layer in self.layers:
            layer.first_select()
        rows = self.state.need_rows()
        self.state.first_due = False
        if self.state.sparsity is not None:
            self.state.sparsity.lacks = False
        self.state.dirty_from = [-(-n // BLOCK) for n in rows.tokens]

    @property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        model: Any = self.model
        return placed(model).device

    # -- the contract of transformers -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def mode(self, mode: str) -> Iterator[None]:
        """Say what the forwards inside are: "prefill" (dense over everything), "decode" or "verify" (over the working
        set, 8 tokens at most). Needed only by hand-written loops that feed several tokens to a filled cache."""
        if mode not in ("prefill", "decode", "verify"):
            raise ValueError(f"mode={mode!r} is not allowed: use 'prefill', 'decode' or 'verify'.")
        before, self.stepper.forced = self.stepper.forced, mode
        try:
            yield
        finally:
            self.stepper.forced = before

    def activate_past_recording(self) -> None:
        """Assisted decoding starts: the next forward is its prompt, then come several-token verifications.

        Raises:
            ValueError: the cache is not empty. transformers gives the whole prompt in that forward, as if it were.
        """
        if self.get_seq_length() or self.stepper.resumed is not None:
            raise ValueError(
                "Assisted decoding (assistant_model, prompt_lookup_num_tokens) gives the whole prompt at first and "
                f"needs an empty cache, but this OasisCache holds {self.get_seq_length():,} tokens: leave it out, or "
                "use OasisCache(speculate=True)."
            )
        self.stepper.recording = "armed"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held, padding included, drafts excluded."""
        return self.state.rows.columns if self.state.rows is not None else 0

    @keeps_buffers
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns; a positive number is the length to keep (as transformers 5.17
        still takes it). More than there is leaves nothing."""
        rows = self.state.rows
        if rows is None:
            return
        count = rows.columns - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        count = min(max(count, 0), rows.columns)
        if count == 0:
            return
        if count == rows.columns:
            for layer in self.layers:
                if isinstance(layer, SlidingLayer):
                    layer.reset()  # however far it was written: an empty row needs nothing of it
        self._shorten(rows.valid[:, : rows.columns - count])

    @keeps_buffers
    def crop_rows(self, tokens: list[int]) -> None:
        """Rows keep their first `tokens` real ones. Columns that no row has any more are dropped.

        Raises:
            ValueError: another number of rows, or more tokens than a row has.
        """
        rows = self.state.need_rows()
        if len(tokens) != len(rows) or any(not 0 <= keep <= have for keep, have in zip(tokens, rows.tokens)):
            raise ValueError(f"crop_rows({tokens}) must name a length for each of the rows' {rows.tokens} tokens.")
        if tokens == rows.tokens:
            return
        valid = rows.valid & (rows.valid.cumsum(1) <= torch.tensor(tokens)[:, None])
        self._shorten(valid[:, : int(valid.any(0).nonzero().max()) + 1 if valid.any() else 0])

    def _shorten(self, valid: torch.Tensor) -> None:
        """Rows lose tokens at their end: `valid` `[B, columns]` is what they have from now on."""
        rows = self.state.need_rows()
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.check_crop(valid.shape[1])
        self.stepper.forget()
        if self.stepper.resumed is not None:
            self.stepper.resumed.forget(self)
            self.stepper.resumed = None
        self.settle()
        before, self.state.ready = list(rows.tokens), None
        rows.shorten(valid)
        if self.state.store is not None:
            self.state.store.truncate(rows.tokens)
        # A row whose last block was closed, or that lost its open block, must find the new last one in a slot.
        reopened = any(
            old != new and ((old - 1) // BLOCK != new // BLOCK or old % BLOCK == 0)
            for old, new in zip(before, rows.tokens)
        )
        self.state.dirty_from = [min(old, -(-n // BLOCK)) for old, n in zip(self.state.dirty_from, rows.tokens)]
        for layer in self.layers:
            if layer.is_initialized:
                layer.rewind([old - new for old, new in zip(before, rows.tokens)], reopened)
        self.state.first_due = self.state.first_due and rows.columns > 0
        self.drafter.crop(rows.tokens)

    @keeps_buffers
    def _select_rows(self, index: list[int]) -> None:
        rows = self.state.rows
        if rows is not None:
            self._check_rows(index, len(rows))
        self.stepper.forget()
        if rows is None or index == list(range(len(rows))):
            return
        self.stepper.ended, self.stepper.over = None, 0
        self.settle()
        self.graphs.forget()  # what they hold are buffers of other rows
        rows.select(index)
        self.state.ready = None
        self.state.dirty_from = [self.state.dirty_from[i] for i in index]
        if self.state.store is not None:
            self.state.store.select_rows(index)
        if self.state.shares is not None:
            self.state.shares.select_rows(torch.tensor(index, device=self.state.shares.caps.device))
        for layer in self.layers:
            layer.select_rows(index)
        self.drafter.select_rows(index)

    def _check_rows(self, index: list[int], rows: int) -> None:
        """Before anything changes: are there such rows, and does the working set's memory allow so many?"""
        if not index:
            raise ValueError("No rows would be left in this OasisCache: keep at least one, or empty it with reset().")
        if not all(0 <= row < rows for row in index):
            raise ValueError(f"Rows {index} were asked for, but this OasisCache has rows 0 to {rows - 1}.")
        if self.state.store is not None:
            heads = self.sparse_layers[0].working_set.table.shape[1]
            self.state.config.check_rows(
                self.state.slots, self.state.sparse_layers, len(index), heads, self.state.block_bytes
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`: tables and the working set, never closed pages. Like the batch
        operations it raises ValueError for no or unknown rows, ConfigError for more than `budget_bytes` allows."""
        self._select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self._select_rows([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows (indices or a boolean mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select_rows(indices.tolist())

    @property
    def batch_size(self) -> int:
        return len(self.state.rows) if self.state.rows is not None else -1

    @keeps_buffers
    def reset(self) -> None:
        """Empty, counters included; buffers stay for the next prompt of the same batch size."""
        state = self.state
        self.stepper = Stepper(self)
        if state.rows is None:
            return
        self.settle()
        state.rows, state.ready = Rows(len(state.rows)), None
        state.dirty_from = [0] * len(state.rows)
        state.first_due = False
        if state.store is not None:
            state.store.reset()
        if state.shares is not None:
            state.shares.clear()
        for layer in self.layers:
            layer.reset()
        for have in state.fired.values():
            have.zero_()
        self.drafter.reset()
        if self.prefixes is not None:
            self.prefixes.begin(self)

    @keeps_buffers
    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """As `transformers.Cache` has it: the buffers before the first forward."""
        super().early_initialization(*args, **kwargs)

    @keeps_buffers
    def __deepcopy__(self, memo: dict[int, Any]) -> "OasisCache":
        """A branch: host pages are shared, what is on the device is copied."""
        self.settle()
        other = object.__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            other.__dict__[name] = value  # what transformers or a user hung on it
        if self._watched is not None:
            other._snapshots = list(self._snapshots)
        other.state = self.state.fork()
        if self.prefixes is not None:  # its pages are the store's, whenever it takes some
            other.state.make_store = self.state.make_store
        other.layers = [layer.fork(other.state) for layer in self.layers]
        other.drafter = self.drafter.fork()
        other.stepper = Stepper(other)
        other.graphs = StepGraphs()
        other.stepper.resumed, other.stepper.decoded = self.stepper.resumed, self.stepper.decoded
        other.stepper.acceptance, other.stepper.recording = self.stepper.acceptance, self.stepper.recording
        attach.attach(other.model, other)
        return other

    def __reduce__(self) -> Any:
        raise TypeError("An OasisCache can't be pickled: its pages are in pinned memory. Use copy.deepcopy to branch.")

    def __repr__(self) -> str:
        return f"OasisCache({self.get_seq_length()} tokens, {len(self.layers)} layers, {self.state.config})"

    def detach(self) -> None:
        """Take this package's wrapper off the model; its caches stop working."""
        attach.detach(self.model)
