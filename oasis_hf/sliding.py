"""One sliding-window layer: small, so it stays resident and dense, in a ring."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from .attention import dense_attention
from .config import TAIL
from .ops.reference import masked_attention
from .state import State, Step, check_kind
from .tail import Entry, at_entry


class SlidingLayer(CacheLayerMixin):
    """Keys and values `[B, H, R, D]`: column p (padding included, as transformers counts) stands at p % R.

    R is the window plus some slack, so that drafts beyond the committed length and `crop` find the past intact.

    Args:
        state: what the layers of the cache share. window: in tokens.
    """

    is_sliding = True
    is_croppable = True

    def __init__(self, state: State, window: int) -> None:
        super().__init__()
        self.state, self.window = state, window
        self.size = window + state.config.sliding_slack
        self.ring_keys: torch.Tensor
        self.ring_values: torch.Tensor
        self.real: torch.Tensor  # [B, R] bool: not padding
        self.heads = 0
        self.high = 0  # columns ever written since the last reset: the ring holds the last R of them
        self.began = 0  # the first of them, where a prompt was taken over without those before it

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, _ = key_states.shape
        if self.state.rows is None:
            self.state.open_rows(rows)
        self.ring_keys = key_states.new_zeros((rows, heads, self.size, key_states.shape[-1]))
        self.ring_values = value_states.new_zeros((rows, heads, self.size, value_states.shape[-1]))
        self.real = torch.zeros((rows, self.size), dtype=torch.bool, device=key_states.device)
        self.device, self.heads, self.is_initialized, self.high = key_states.device, heads, True, 0

    def check_kind(self, keys: torch.Tensor) -> None:
        """Raise ValueError where a forward's keys are of another dtype or device than what is held."""
        if self.is_initialized:
            check_kind(self.ring_keys, keys)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of this forward, handed back as they are: `attend` stores them."""
        self.state.need_step()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.rows.columns if self.state.rows is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = max(self.get_seq_length() - self.window + 1, 0)
        return self.get_seq_length() + query_length - offset, offset

    def get_max_length(self) -> int:
        return self.window

    @property
    def batch_size(self) -> int:
        return len(self.state.rows) if self.state.rows is not None else -1

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """query `[B, Hq, q, D]`, keys and values `[B, H, q, D]`, drafts last. Returns `[B, Hq, q, D]`."""
        step = self.state.need_step()
        if step.mode == "prefill":
            out = self._prefill(step, query, keys, values, scaling, sinks)
        else:
            out = self._decode(step, query, keys, values, scaling, sinks)
        return out

    def _prefill(
        self, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        past, seen = None, None
        if step.columns:
            first = max(0, step.columns - self.window + 1)
            at = torch.arange(first, step.columns, device=keys.device) % self.size
            past = (self.ring_keys.index_select(2, at), self.ring_values.index_select(2, at))
            seen = self.real.index_select(1, at)
        valid = step.real(keys.device)
        if seen is not None and past is not None and past[0].shape[2] == 0:
            past, seen = None, None
        out = dense_attention(query, keys, values, past, seen, valid, scaling, sinks, self.window)
        count = keys.shape[2]
        if step.columns and count > self.state.config.sliding_slack - TAIL:
            self._grow(step.columns, self.window + 2 * count)
        self.keep(keys, values, step.columns + count, valid)
        return out

    def keep(self, keys: torch.Tensor, values: torch.Tensor, end: int, valid: torch.Tensor | None) -> None:
        """Keys and values `[B, H, q, D]` of the columns before `end`, as many of the last as there is room for. valid:
        `[B, columns]` bool, which of the last columns are real, None for all."""
        count = min(keys.shape[2], self.size)
        at = torch.arange(end - count, end, device=keys.device) % self.size
        self.ring_keys[:, :, at], self.ring_values[:, :, at] = keys[:, :, -count:], values[:, :, -count:]
        self.real[:, at] = True if valid is None else valid[:, -count:]
        self.high = max(self.high, end)

    def last(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, H, n, D]` of the columns before `end` that later ones and the last can see."""
        at = torch.arange(max(0, end - self.window), end, device=self.device) % self.size
        return self.ring_keys.index_select(2, at), self.ring_values.index_select(2, at)

    def _grow(self, columns: int, size: int) -> None:
        """A longer ring, so that a long verified stretch can be cropped again."""
        if size <= self.size:
            return
        first = max(0, columns - self.size)
        old = torch.arange(first, columns, device=self.device) % self.size
        new = torch.arange(first, columns, device=self.device) % size
        for name, dim in (("ring_keys", 2), ("ring_values", 2), ("real", 1)):
            tensor = getattr(self, name)
            shape = list(tensor.shape)
            shape[dim] = size
            setattr(self, name, tensor.new_zeros(shape).index_copy_(dim, new, tensor.index_select(dim, old)))
        self.size = size

    def _decode(
        self, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        rows, heads, count, dim = keys.shape
        entry = torch.arange(count, device=keys.device)
        columns = self.state.need_rows().columns_on(keys.device)  # a replayed step finds it advanced
        at = (columns + entry) % self.size
        self.ring_keys.index_copy_(2, at, keys)
        self.ring_values.index_copy_(2, at, values)
        self.real.index_fill_(1, at, True)
        self.ran(step)
        end = columns + count - 1
        position = end - (end - torch.arange(self.size, device=keys.device)) % self.size  # column at each ring place
        # A draft stands behind its parent, which need not be the entry before it.
        depth = step.tail_mask(keys.device).sum(-1) - 1
        visible = (position < columns) & (position >= 0)
        in_window = position > (columns + depth)[:, None] - self.window
        allowed = (visible & in_window)[None] & self.real[:, None]
        tail = step.tail_mask(keys.device)[:, :count] & (depth[:, None] - depth < self.window)
        allowed = allowed.index_copy(2, at, tail.expand(rows, -1, -1))
        group = query.shape[1] // heads
        packed = query.reshape(rows, heads, group * count, dim)
        if sinks is not None:
            sinks = sinks.view(heads, group, 1).expand(-1, -1, count).reshape(1, heads, -1, 1)
        mask = allowed.repeat(1, group, 1).unsqueeze(1)
        return masked_attention(packed, self.ring_keys, self.ring_values, mask, scaling, sinks).reshape(query.shape)

    def ran(self, step: Step) -> None:
        """What the host knows of a decode step, replayed or not."""
        self.high = max(self.high, step.columns + step.count + step.drafts)

    def place(self) -> list[torch.Tensor | None]:
        """All that a captured step touches here."""
        return [self.ring_keys, self.ring_values, self.real]

    def commit(self, entry: Entry, position: int, lengths: torch.Tensor, tokens: list[int] | None) -> None:
        """A tail entry that stands `entry` columns behind the step's first is accepted at column `position`, in every
        row."""
        target = position % self.size
        if isinstance(entry, torch.Tensor) or self._tail_start + entry != position:
            source = (self._tail_start + (entry if isinstance(entry, int) else entry.to(self.device))) % self.size
            for ring in (self.ring_keys, self.ring_values):
                ring[:, :, target] = at_entry(ring, source)
        self.real[:, target] = True

    def remember_drafts(self, entries: list[Entry], counts: torch.Tensor) -> None:
        """No queries are kept."""

    def prepare(self, count: int) -> None:
        self._tail_start = self.get_seq_length()

    def first_select(self) -> None:
        """Everything is resident."""

    def check_crop(self, columns: int) -> None:
        """Raise if the ring does not hold the window before `columns`."""
        first = max(0, columns - self.window + 1)
        if self.is_initialized and first < self.began:
            raise ValueError(
                f"crop to {columns:,} tokens reaches behind what a sliding-window layer keeps of a prompt that it did "
                f"not read itself: it needs {self.window - 1:,} tokens before and has those from {self.began:,} on. "
                "Crop less, or read the shorter prompt anew."
            )
        if self.is_initialized and first < self.high - self.size:
            raise ValueError(
                f"crop to {columns:,} tokens reaches behind what a sliding-window layer keeps ({self.size:,} tokens, "
                f"written up to {self.high:,}): crop less, or set OasisConfig.sliding_slack above "
                f"{self.high - columns + TAIL:,}."
            )

    def rewind(self, removed: list[int], reopened: bool) -> None:
        """The length is the rows' own; the ring keeps what it has."""

    def hide(self, row: int, valid: torch.Tensor) -> None:
        """A row's columns `[columns]` bool changed: padding hides what was a token."""
        columns = valid.shape[0]
        first = max(0, columns - self.size)
        at = torch.arange(first, columns) % self.size
        self.real[row, at.to(self.device)] = valid[first:].to(self.device)

    def select_rows(self, index: list[int]) -> None:
        if self.is_initialized:
            at = torch.tensor(index, device=self.device)
            self.ring_keys, self.ring_values = self.ring_keys.index_select(0, at), self.ring_values.index_select(0, at)
            self.real = self.real.index_select(0, at)

    def reset(self) -> None:
        self.high = self.began = 0
        if self.is_initialized:
            self.real.zero_()

    def drop(self) -> None:
        if self.is_initialized:
            del self.ring_keys, self.ring_values, self.real
        self.is_initialized, self.high, self.began = False, 0, 0

    def fork(self, state: State) -> "SlidingLayer":
        other = SlidingLayer(state, self.window)
        other.size = self.size
        if self.is_initialized:
            other.ring_keys, other.ring_values, other.real = (
                self.ring_keys.clone(),
                self.ring_values.clone(),
                self.real.clone(),
            )
            other.device, other.heads, other.is_initialized = self.device, self.heads, True
            other.high, other.began = self.high, self.began
        return other

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Ring and summaries on the model's device."""
        return (self.ring_keys.nbytes + self.ring_values.nbytes, 0) if self.is_initialized else (0, 0)
