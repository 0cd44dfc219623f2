"""One full-attention layer: what a forward does with its queries, keys and values."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from .attention import dense_attention
from .captured import CapturedSteps
from .config import BLOCK
from .ops import cuda
from .selecting import Selecting
from .spans import span
from .state import State, Step, check_kind
from .stats import Counters
from .store import BlockStore
from .summaries import Summaries
from .tail import Entry, at_entry
from .working_set import WorkingSet


class OasisLayer(CapturedSteps, Selecting, CacheLayerMixin):
    """Full KV in the store, summaries and a working set on the model's device.

    Args:
        state: what the layers of the cache share. index: this layer's place among the sparse layers.
    """

    is_sliding = False
    is_croppable = True
    window: int | None = None

    def __init__(self, state: State, index: int) -> None:
        super().__init__()
        self.state, self.index = state, index
        self.working_set: WorkingSet
        self.summaries: Summaries
        self.counters: Counters
        self.recent: torch.Tensor | None = None  # [B, Hq, W, D], the last W committed tokens' queries
        self.draft_queries: torch.Tensor | None = None  # [B, Hq, drafts, D]
        self.scaling = 1.0
        self.heads = 0

    # -- the contract of transformers -----------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, dim = key_states.shape
        if value_states.shape[-1] != dim:
            raise ValueError(
                f"OasisCache needs keys and values of one head_dim, but they have {dim} and {value_states.shape[-1]}: "
                "use DynamicCache for this model."
            )
        state = self.state
        if state.rows is None:
            state.open_rows(rows)
        state.open_store(key_states)
        if state.block_bytes != 2 * BLOCK * dim * key_states.element_size():
            raise ValueError(
                f"OasisCache needs one head_dim and dtype over all full-attention layers, but layer {self.index} has "
                f"head_dim {dim} in {key_states.dtype}: use DynamicCache for this model."
            )
        device, dtype = key_states.device, key_states.dtype
        self.working_set = WorkingSet(state.most_slots, rows, heads, dim, dtype, device, state.config.seed)
        self.summaries = Summaries(state.config, rows, heads, dim, dtype, device)
        self.counters = Counters(heads, device)
        self.device, self.heads, self.is_initialized = device, heads, True

    def check_kind(self, keys: torch.Tensor) -> None:
        """Raise ValueError where a forward's keys are of another dtype or device than what is held."""
        if self.is_initialized:
            check_kind(self.working_set.keys, keys)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, H, q, D]` of this forward, handed back as they are: `attend` stores them, since only
        the attention function sees the queries."""
        self.state.need_step()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.rows.columns if self.state.rows is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.state.config.host_capacity_tokens or -1

    @property
    def batch_size(self) -> int:
        return len(self.state.rows) if self.state.rows is not None else -1

    @property
    def store(self) -> BlockStore:
        assert self.state.store is not None
        return self.state.store

    # -- a forward ------------------------------------------------------------------------------------------------

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """query `[B, Hq, q, D]`, keys and values `[B, H, q, D]`, drafts last. Returns `[B, Hq, q, D]`."""
        step = self.state.need_step()
        self.scaling = scaling
        with span(f"{step.mode} layer {self.index}"):
            if step.mode == "prefill":
                return self._prefill(step, query, keys, values, sinks)
            return self._decode(step, query, keys, values, sinks)

    def _prefill(
        self, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        past, seen = self._past(step, keys)
        self.keep_prompt(step, keys, values)
        window = self.state.window
        if self.recent is None:
            self.recent = query.new_zeros((query.shape[0], query.shape[1], window, query.shape[3]))
        for row in range(len(query)):
            kept = step.kept(row, keys.device)
            last = query[row, :, -window:] if kept is None else query[row].index_select(1, kept[-window:])
            self.recent[row] = torch.cat((self.recent[row, :, last.shape[1] :], last), 1)
        # Once the writes are issued: they can get away beside it, and are the sooner gone.
        return dense_attention(query, keys, values, past, seen, step.real(keys.device), self.scaling, sinks)

    def keep_prompt(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values `[B, H, q, D]` of a prompt or chunk: what is real goes to the store, with summaries of the
        blocks it closes."""
        if self.index == 0:
            self.store.ensure(step.starts, step.ends)
        self.summaries.ensure(max(step.ends) // BLOCK)
        if self.state.dense and 0 in step.starts:
            self.working_set.ensure(-(-max(step.ends) // BLOCK))
        for row, start in enumerate(step.starts):
            kept = step.kept(row, keys.device)
            row_keys, row_values = (x[row] if kept is None else x[row].index_select(1, kept) for x in (keys, values))
            if row_keys.shape[1]:
                self._store_row(row, start, row_keys, row_values)

    def _past(
        self, step: Step, keys: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """Earlier keys and values `[B, H, P, D]`, streamed back from the store, and which exist `[B, P]`."""
        longest = max(step.starts)
        if longest == 0:
            return None, None
        rows, heads, _, dim = keys.shape
        past = keys.new_zeros((2, rows, heads, longest, dim))
        for row, length in enumerate(step.starts):
            if length:
                for which, part in enumerate(self.store.load(self.index, row, 0, length, keys[row])):
                    past[which, row, :, :length] = part
        lengths = self.state.need_rows().lengths(keys.device)
        seen = torch.arange(longest, device=keys.device) < lengths[:, None]
        return (past[0], past[1]), seen

    def _store_row(self, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens `[H, n, D]` of one row: to the store, and summaries of the blocks they close."""
        first, last = start // BLOCK, (start + keys.shape[1]) // BLOCK
        closed = keys
        if last > first and start % BLOCK:
            lead = self.store.load(self.index, row, first * BLOCK, start, keys)[0]
            closed = torch.cat((lead, keys), 1)
        self.store.write(self.index, row, start, keys, values)
        if self.state.dense and start == 0:
            self.working_set.place(row, keys, values)
        if last > first:
            self.summaries.write(row, first, closed[:, : (last - first) * BLOCK].unflatten(1, (-1, BLOCK)))

    def _decode(
        self, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        lengths = self.state.need_rows().lengths(keys.device)
        if step.pipeline is not None:
            step.pipeline.arrive(self.index)
            return self._decode_captured(step, step.pipeline, query, keys, values, lengths, sinks)
        self.store.arrive(self.index)
        self.working_set.write_tail(keys, values)
        self._fetch_now(step, query[:, :, : step.count], lengths)
        out = self.working_set.attend(query, lengths, step.tail_mask(keys.device), self.scaling, sinks)
        # Older than what this step predicts, so that a block it opens next never takes a predicted one's place.
        age = self.state.clock(keys.device, 0 if step.weights is None else 1)
        for entry in range(step.count):
            at = step.where_taking(lengths + entry if entry else lengths, -1)
            self._append(entry, at, [n + entry for n in step.starts], age)
        self._remember(query[:, :, : step.count])
        self.draft_queries = query[:, :, step.count :]
        if step.weights is not None:
            assert self.recent is not None
            queries = torch.cat((self.recent, self.draft_queries), 2)
            after = step.where_taking(lengths + step.count, 0)
            self._fetch("fetched", queries, step.on("weights", keys.device), after, self.state.cap)
            self._share_out()
        return out

    def _append(self, entry: Entry, lengths: torch.Tensor, tokens: list[int] | None, age: torch.Tensor) -> None:
        """Tail entry to the open block and its page; a block it fills is summarised. `tokens` are `lengths`, known to
        the host (None: they are not), so that steps in which nothing opens or closes skip that work."""
        config = self.state.config
        keys, values = at_entry(self.working_set.keys, entry), at_entry(self.working_set.values, entry)
        opens = tokens is None or any(n % BLOCK == 0 for n in tokens)
        if opens and config.lookahead == "none" and (config.sink_blocks or config.recent_blocks):
            # No selection keeps them young here.
            self.working_set.keep(config.sink_blocks, lengths // BLOCK - config.recent_blocks, age)
        if self._append_fused(keys, values, lengths, age):
            return
        slot, wasted = self.working_set.append_from_tail(entry, lengths, age, opens)
        some = tokens is None or self.state.need_rows().taking is not None
        self.store.append(self.index, lengths, keys, values, some)
        if opens:
            self.counters.add("wasted", wasted.sum(0))
        if tokens is None or any(n % BLOCK == BLOCK - 1 for n in tokens):
            closing = (lengths >= 0) & ((lengths + 1) % BLOCK == 0)
            self.summaries.close(self.working_set.slot_keys(slot), lengths // BLOCK, closing)

    def _append_fused(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, age: torch.Tensor) -> bool:
        """All of an append in one launch, where the compiled operators and the store's memory allow it."""
        pages = self.store.device_pages(self.index)
        if pages is None or not cuda.serves(keys) or pages[0].dtype != keys.dtype:
            return False
        own, sums = self.working_set, self.summaries
        cuda.append_step(
            own.keys, own.values, own.table, own.last_selected, lengths, own.order, keys, values, age, own.fresh,
            self.counters.of("wasted"), *pages, sums.vectors, sums.scales, self.state.config.scorer,
            self.state.config.summary_dtype == "int8",
        )  # fmt: skip
        return True

    def _remember(self, query: torch.Tensor) -> None:
        assert self.recent is not None
        # Made anew: an interrupted forward puts the old one back.
        self.recent = torch.cat((self.recent, query), 2)[:, :, -self.state.window :]

    # -- between forwards -----------------------------------------------------------------------------------------

    def commit(self, entry: Entry, position: int, lengths: torch.Tensor, tokens: list[int] | None) -> None:
        """A tail entry is accepted in rows where `lengths` `[B]` is not negative: append it there. `tokens` are the
        rows' lengths on the host, None where it does not know them."""
        entry = entry if isinstance(entry, int) else entry.to(self.device)
        # As old as what the step itself appended: the slot of a predicted block, which may come late, is not taken.
        self._append(entry, lengths.to(self.device), tokens, self.state.clock(self.device, 1))

    def remember_drafts(self, entries: list[Entry], counts: torch.Tensor) -> None:
        """The queries of these entries of the last step, so many of each row's as `counts` `[B]` says, are its latest
        ones. Where a captured step finds them they stay."""
        first = entries[0]
        if self.draft_queries is None or not self.draft_queries.shape[2] or (isinstance(first, int) and first == 0):
            return
        assert self.recent is not None
        if isinstance(first, torch.Tensor):
            counts = (counts - (first == 0).long()).clamp(min=0)  # the step's own token is remembered in it
        drafts = [one - 1 if isinstance(one, int) else (one.to(self.device) - 1).clamp(min=0) for one in entries]
        queries = torch.cat((self.recent, *(at_entry(self.draft_queries, one).unsqueeze(2) for one in drafts)), 2)
        at = counts.to(self.device)[:, None] + torch.arange(self.state.window, device=self.device)
        self.recent.copy_(queries.gather(2, at[:, None, :, None].expand_as(self.recent)))

    def prepare(self, count: int) -> None:
        """Room for `count` tokens more a row."""
        blocks = -(-(max(self.state.need_rows().tokens) + count) // BLOCK)
        if self.working_set.allocated < self.working_set.slots:
            self.store.arrive(self.index)  # its slots are about to move
        self.working_set.ensure(blocks)
        self.summaries.ensure(blocks)

    def rewind(self, removed: list[int], reopened: bool) -> None:
        """After `crop`: rows and store are short already, each by so many tokens. `reopened`: some row's last block was
        closed or gone."""
        rows = self.state.need_rows()
        keep = torch.tensor([-(-n // BLOCK) for n in rows.tokens], device=self.device)
        self.working_set.forget_from(keep)
        if self.summaries.means is not None:
            self.summaries.forget_from(torch.tensor([n // BLOCK for n in rows.tokens], device=self.device))
        if reopened and not self.state.first_due:
            self._open("reopened")
        if self.recent is not None and any(removed):
            older = torch.arange(self.state.window) - torch.tensor(removed)[:, None]  # the oldest stands for those gone
            at = older.clamp(min=0).to(self.device)[:, None, :, None].expand_as(self.recent)
            self.recent.copy_(self.recent.gather(2, at))
        self.draft_queries = None

    def select_rows(self, index: list[int]) -> None:
        if not self.is_initialized:
            return
        at = torch.tensor(index, device=self.device)
        self.working_set.select_rows(at)
        self.summaries.select_rows(at)
        if self.recent is not None:
            self.recent = self.recent.index_select(0, at)
        self.draft_queries = self.queries = self.plan = None

    def reset(self) -> None:
        if self.is_initialized:
            self.working_set.table.fill_(-1)
            self.working_set.fresh.zero_()
            self.working_set.last_selected.zero_()
            self.counters.values.zero_()
        self.recent = self.draft_queries = None

    def drop(self) -> None:
        """Give the buffers back: the next prompt has another batch size."""
        self.is_initialized = False
        self.recent = self.draft_queries = self.queries = self.plan = None

    def fork(self, state: State) -> "OasisLayer":
        other = OasisLayer(state, self.index)
        other.scaling = self.scaling
        if self.is_initialized:
            other.working_set, other.summaries = self.working_set.fork(), self.summaries.fork()
            other.counters = self.counters.fork()
            other.device, other.heads, other.is_initialized = self.device, self.heads, True
        other.recent = None if self.recent is None else self.recent.clone()
        return other

    def place(self) -> list[torch.Tensor | None]:
        """All that a captured step touches here."""
        own, sums = self.working_set, self.summaries
        held: list[torch.Tensor | None] = [
            own.keys,
            own.values,
            own.table,
            own.last_selected,
            own.fresh,
            own.order,
            sums.vectors,
            sums.scales,
        ]
        shared = self.state.shares.place() if self.state.shares is not None else []
        held += [sums.means, *shared]
        held += [self.counters.values, self.queries, self.recent, *(self.plan or ()), self.store.table_on_device]
        return [*held, self.state.fired_on(self.device)] if self.state.config.corrects else held

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Working set and summaries on the model's device."""
        if not self.is_initialized:
            return 0, 0
        return self.working_set.nbytes, self.summaries.nbytes
