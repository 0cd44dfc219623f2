"""`OasisCache`: what transformers sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache

from . import attach
from .config import BLOCK, ConfigError, OasisConfig
from .drafters import Drafter, make_drafter
from .layers import OasisLayer
from .lookahead import recent_window
from .report import Report
from .rows import Rows
from .sliding import SlidingLayer
from .state import State
from .step import Stepper


class OasisCache(Report, Cache):
    """The full KV in host memory, a sparse working set of blocks where the model runs.

    ```python
    cache = OasisCache(model, budget=2064)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
    print(cache.report())
    ```

    Args:
        model: the causal language model it will be used with; it is attached while any of its caches lives.
        config: an `OasisConfig`; None: the defaults.
        drafter: see `drafters.make_drafter`; None: n-gram matches where there are any, else recent queries.
        **knobs: fields of `OasisConfig` that replace those of `config`.

    Raises:
        ConfigError: a knob has a wrong value. UnsupportedModelError: this model can't be served.
        DrafterError: the drafter does not fit the model.
    """

    def __init__(self, model: Any, config: OasisConfig | None = None, drafter: Any = None, **knobs: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"OasisCache(model, ...) needs the model itself, not {type(model).__name__}.")
        config = (config or OasisConfig()).replace(**knobs)
        windows = attach.layer_windows(model)
        self.model = model
        self.state = State(config, sum(window is None for window in windows), recent_window(config))
        self.drafter: Drafter = make_drafter(drafter, model, config)
        layers: list[Any] = []
        for window in windows:
            sparse = sum(isinstance(layer, OasisLayer) for layer in layers)
            layers.append(OasisLayer(self.state, sparse) if window is None else SlidingLayer(self.state, window))
        super().__init__(layers=layers)
        self.stepper = Stepper(self)
        attach.attach(model, self)

    # -- what the wrapper calls -----------------------------------------------------------------------------------

    def run(self, inner: Any, call: dict[str, Any], name: str, keeps_logits: bool) -> Any:
        """A forward of the model: see `Stepper.run`."""
        return self.stepper.run(inner, call, name, keeps_logits)

    def rows_for(self, batch: int) -> Rows:
        """The rows, opened by the first forward; another batch size than theirs raises."""
        rows = self.state.rows
        if rows is not None and len(rows) != batch and rows.columns == 0:
            for layer in self.layers:
                layer.drop()
            rows = self.state.rows = self.state.store = None
        if rows is None:
            rows = self.state.open_rows(batch)
        if len(rows) != batch:
            raise ValueError(
                f"This OasisCache holds {len(rows)} rows, the call has {batch}: use one cache a batch, or "
                "batch_select_indices / batch_repeat_interleave, or reset()."
            )
        return rows

    def new_columns(self, mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Which of `count` new columns are real `[B, count]`, None for all; reads the mask (prefill only).

        A mask that hides tokens already held (a finished row's padding, before the next turn) removes them.

        Raises:
            ValueError: the mask has another length, or shows columns that were padding when they came.
        """
        rows = self.state.need_rows()
        old = rows.columns
        if mask is None:
            mask = torch.ones((len(rows), old + count), dtype=torch.bool)
        mask = mask.detach().to("cpu", torch.bool)
        if mask.shape[1] == count and old:
            mask = torch.cat((rows.valid, mask), 1)
        if mask.shape != (len(rows), old + count):
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, but {len(rows)} rows of {old} cached + {count} new "
                "tokens were passed: give it one column for each."
            )
        if (mask[:, :old] & ~rows.valid).any():
            raise ValueError(
                "attention_mask shows columns that were padding when this OasisCache saw them, so it never stored "
                "them: pass the same padding as before (without a mask every column counts as real)."
            )
        hidden = rows.valid & ~mask[:, :old]
        for row in hidden.any(1).nonzero().flatten().tolist():
            self._hide(row, mask[row, :old])
        new = mask[:, old:]
        return None if bool(new.all()) else new

    def _hide(self, row: int, kept: torch.Tensor) -> None:
        """Take tokens out of the middle of a row: what follows them moves up."""
        state, rows = self.state, self.state.need_rows()
        stays = kept[rows.valid[row]]  # by the row's own token
        first = int((~stays).nonzero()[0])
        before = rows.tokens[row]
        later = stays[first:]
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sparse = [layer for layer in self.layers if isinstance(layer, OasisLayer)]
        for layer in sparse:
            keys, values = layer.store.read(layer.index, row, first, before)
            moved[layer.index] = keys[:, later].clone(), values[:, later].clone()
        rows.hide(row, kept)
        if state.store is not None:
            shorter = list(rows.tokens)
            shorter[row] = first
            state.store.truncate(shorter)
            state.store.ensure(shorter, rows.tokens)
        for layer in sparse:
            keys, values = (x.to(layer.device, layer.working_set.keys.dtype) for x in moved[layer.index])
            if keys.shape[1]:
                layer._store_row(row, first, keys, values)
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.hide(row, kept)
        state.mark_dirty([first if i == row else n for i, n in enumerate(rows.tokens)])
        self.drafter.hide(row, first, later)

    def first_select(self) -> None:
        """Fill the working sets after a prefill."""
        for layer in self.layers:
            layer.first_select()
        rows = self.state.need_rows()
        self.state.first_due = False
        self.state.dirty_from = [-(-n // BLOCK) for n in rows.tokens]

    def prepare(self, count: int) -> None:
        """Host-side work before a decode forward: pages, slots and summaries for `count` more tokens a row."""
        rows = self.state.need_rows()
        if self.state.store is not None:
            self.state.store.ensure(rows.tokens, [n + count for n in rows.tokens])
        for layer in self.layers:
            layer.prepare(count)
        self.state.dirty_from = [-(-(n + count) // BLOCK) for n in rows.tokens]

    @property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        model: Any = self.model
        return model.get_input_embeddings().weight.device

    # -- drafts ---------------------------------------------------------------------------------------------------

    def commit(self, path: list[int]) -> None:
        """Append accepted drafts of the last forward: their K and V become the rows' own.

        Args:
            path: indices of drafts (0 is the first stacked behind the new token), each following the one before.

        Raises:
            ValueError: there is no such draft, or it does not follow the one committed last.
        """
        tail, rows = self.stepper.tail, self.state.need_rows()
        if tail is None:
            raise ValueError("There are no drafts to commit: they are gone once another forward or a crop has run.")
        for draft in path:
            entry = tail.count + draft
            if not draft >= 0 or entry >= len(tail.parents) or tail.parents[entry] != tail.last:
                raise ValueError(
                    f"Draft {draft} does not follow entry {tail.last} of the tail (parents {tail.parents})."
                )
            if self.state.store is not None:
                self.state.store.ensure(rows.tokens, [n + 1 for n in rows.tokens])
            for layer in self.layers:
                if isinstance(layer, OasisLayer):
                    layer.prepare(1)
                layer.commit(entry, rows.columns)
            starts = rows.lengths(self.device).clone()
            rows.advance(1)
            tail.last = entry
            if tail.tokens is not None:
                self.drafter.observe(tail.tokens[:, entry : entry + 1], starts, None)

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
        """Assisted decoding starts: the next forward is its prompt, then come several-token verifications."""
        self.stepper.recording = "armed"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held, padding included, drafts excluded."""
        return self.state.rows.columns if self.state.rows is not None else 0

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
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.check_crop(rows.columns - count)
        self.stepper.forget()
        before = list(rows.tokens)
        rows.crop(count)
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
                layer.rewind(count, reopened)
        self.drafter.crop(rows.tokens)

    def _select_rows(self, index: list[int]) -> None:
        rows = self.state.rows
        if rows is None or index == list(range(len(rows))):
            self.stepper.forget()
            return
        self.stepper.forget()
        self.stepper.ended = None
        rows.select(index)
        self.state.dirty_from = [self.state.dirty_from[i] for i in index]
        if self.state.store is not None:
            self.state.store.select_rows(index)
        for layer in self.layers:
            layer.select_rows(index)
        self.drafter.select_rows(index)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`: tables and the working set, never closed pages."""
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

    def reset(self) -> None:
        """Empty, counters included; buffers stay for the next prompt of the same batch size."""
        state = self.state
        self.stepper = Stepper(self)
        if state.rows is None:
            return
        state.rows = Rows(len(state.rows))
        state.dirty_from = [0] * len(state.rows)
        state.first_due = False
        if state.store is not None:
            state.store.reset()
        for layer in self.layers:
            layer.reset()
        self.drafter.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OasisCache":
        """A branch: host pages are shared, what is on the device is copied."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            other.__dict__[name] = value  # what transformers or a user hung on it
        if self._watched is not None:
            other._snapshots = list(self._snapshots)
        other.state = self.state.fork()
        other.layers = [layer.fork(other.state) for layer in self.layers]
        other.drafter = self.drafter.fork()
        other.stepper = Stepper(other)
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
