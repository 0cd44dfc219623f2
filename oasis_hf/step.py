"""One forward of the model: its mode, its stacked drafts, and the memo of rows already verified."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import attach, supported
from .config import TAIL
from .lookahead import draft_rows, predicts_blocks, query_weights, row_weights, wants_drafts
from .progress import prefill_bar
from .reach import Reach
from .state import Step
from .tail import Tail

if TYPE_CHECKING:
    from .cache import OasisCache

_RATE = 0.05  # weight of the newest outcome in the running acceptance rate


@dataclass
class Memo:
    """Verified rows of the last forward. tokens: `[B, k]` drafts; logits: k of `[B, 1, V]`; output: the type that the
    model returned; used: how many were taken."""

    tokens: torch.Tensor
    logits: list[torch.Tensor]
    output: Callable[..., Any]
    used: int = 0


class Stepper:
    """Runs a cache's forwards.

    Attributes:
        acceptance: running rate at which a verified draft was the next input.
        recording: None; "armed" after `activate_past_recording` (the next forward is the prompt's); "on" (a
            several-token forward is the caller's own verification).
        forced: mode set by `cache.mode(...)`, or None.
        skipped: forwards saved by memoised acceptance. passes, passed: how often a row of `oasis_hf.generate` was
            verified, and how many tokens it got of that, a pass's own included.
        ends, pad: ids that end a row and that it is fed after its end, as the running generate call has them.
    """

    def __init__(self, cache: "OasisCache") -> None:
        self._cache = weakref.ref(cache)  # the cache owns this; a cycle would keep its pages until a collection
        self.acceptance = 0.5
        self.recording: str | None = None
        self.forced: str | None = None
        self.memo: Memo | None = None
        self.tail: Tail | None = None
        self.ended: torch.Tensor | None = None
        self.ends: tuple[int, ...] = ()
        self.pad: int | None = None
        self.skipped = self.forwards = self.passes = self.passed = 0
        self._pairs: dict[int, tuple[list[list[float]], torch.Tensor]] = {}
        self.warned = False
        self.reach = Reach(cache.model, supported.text_config(cache.model))

    @property
    def cache(self) -> "OasisCache":
        cache = self._cache()
        assert cache is not None
        return cache

    def forget(self) -> None:
        """Rows or lengths changed under the memo and the tail."""
        self.memo = self.tail = None

    # -- entry --------------------------------------------------------------------------------------------------------

    def run(self, inner: Callable[..., Any], call: dict[str, Any], name: str, keeps_logits: bool) -> Any:
        """The wrapped forward. call: its arguments by name, the cache under `name`."""
        _refuse(call, self.cache.model)
        given = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if given is None:
            raise ValueError("OasisCache needs input_ids or inputs_embeds in the model's call.")
        batch, count = given.shape[:2]
        rows = self.cache.rows_for(batch)
        recording = self.recording
        mode = self._mode(count, rows.columns)
        # Buffers outlive the call, so they must not become inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            decodes = mode != "prefill" and count <= TAIL and self._all_real(call, count)
            valid = None if decodes else self.cache.new_columns(call.get("attention_mask"), count)
            recent = [getattr(layer, "recent", None) for layer in self.cache.layers]
            if not decodes:  # it writes over them
                recent = [None if queries is None else queries.clone() for queries in recent]
            try:
                if decodes:
                    return self._decode(inner, call, name, keeps_logits, mode, count)
                return self._prefill(inner, call, count, valid)
            except BaseException:
                self.recording = recording
                self._undo(recent)
                raise

    def _undo(self, recent: list[torch.Tensor | None]) -> None:
        """A forward was interrupted, perhaps between layers or in the middle of one: the rows are as they were, and
        what the working sets hold is no longer known, so it is selected anew. recent: each layer's before it (a replay
        that ran to its end has written over them, which only the next prediction sees)."""
        self.forget()
        state = self.cache.state
        rows = state.need_rows()
        if state.store is not None:
            state.store.truncate(rows.tokens)
        for layer, before in zip(self.cache.layers, recent):
            if hasattr(layer, "recent"):
                layer.recent, layer.draft_queries = before, None
        rows.resync()  # a replay may have advanced the device's lengths
        self.cache.graphs.drop_late(self.cache)
        if rows.columns:
            state.mark_dirty([0] * len(rows))

    def _mode(self, count: int, columns: int) -> str:
        recording, self.recording = self.recording, "on" if self.recording == "armed" else self.recording
        if attach.in_prefill():
            self.recording = None
            return "prefill"
        if self.forced is not None:
            return self.forced
        if columns == 0 or recording == "armed":
            return "prefill"
        if count == 1:
            return "decode"
        return "verify" if recording == "on" else "prefill"

    def _all_real(self, call: dict[str, Any], count: int) -> bool:
        """Whether a decode forward's mask shows its new tokens in every row. Old ones that it hides are taken out.
        The content of a mask that generate grows is known, so that no step waits for the device to tell it."""
        mask = call.get("attention_mask")
        if mask is None:
            return True
        self.cache.check_mask(mask, count)
        if mask.device.type != "cpu" and attach.from_generate(call):
            return True
        return self.cache.new_columns(mask, count) is None

    # -- a prompt, a chunk, a turn ------------------------------------------------------------------------------------

    def _prefill(self, inner: Callable[..., Any], call: dict[str, Any], count: int, valid: torch.Tensor | None) -> Any:
        cache, state = self.cache, self.cache.state
        rows = state.need_rows()
        self.forget()
        cache.settle()
        state.tick()
        step = Step("prefill", state.number, count, list(rows.tokens), rows.columns, valid=valid)
        call["attention_mask"] = None
        try:
            with prefill_bar(state.config.progress, count, len(cache.layers)) as step.tick:
                out = self._forward(inner, call, step)
        finally:
            if state.store is not None:
                state.store.join()  # interrupted or not: what comes later may read those pages, or get them
        self.forwards += 1
        starts = rows.lengths(cache.device).clone()
        state.mark_dirty(step.starts)
        rows.extend(torch.ones((len(rows), count), dtype=torch.bool) if valid is None else valid)
        cache.drafter.observe(call.get("input_ids"), starts, valid)
        self.ended = None
        return out

    def _forward(self, inner: Callable[..., Any], call: dict[str, Any], step: Step) -> Any:
        state = self.cache.state
        step.attended.clear()  # a failed capture runs the step again
        state.step = step
        try:
            return inner(**call)
        finally:
            state.step = None

    # -- a decode step, or a caller's own verification ----------------------------------------------------------------

    def _decode(
        self, inner: Callable[..., Any], call: dict[str, Any], name: str, keeps_logits: bool, mode: str, count: int
    ) -> Any:
        cache, state = self.cache, self.cache.state
        config, rows = state.config, state.need_rows()
        ids = call.get("input_ids")
        if config.speculate and ids is not None and count == 1:
            remembered = self._recall(ids, call, name)
            if remembered is not None:
                return remembered
        self.forget()
        state.tick()
        if state.first_due:
            cache.first_select()
        cache.prepare(count)

        positions = self._positions(call, count)
        may_draft = ids is not None and self._may_draft(mode, positions, call)
        step = Step(
            mode, state.number, count, list(rows.tokens), rows.columns, draft_rows(config) if may_draft else 0,
            predicts=state.grows_sparse and predicts_blocks(config),
            on_demand=config.lookahead == "on_demand" and state.grows_sparse, taking=rows.taking,
        )  # fmt: skip
        step.tail = self.tail = Tail.chain(ids, positions, count, step.drafts)
        call = dict(call, attention_mask=None)
        if positions is not None:
            call["position_ids"] = positions
        verified = config.draft_tokens if config.speculate and step.drafts else 0
        device = cache.device
        lengths = rows.lengths(device)
        step.held = None if ids is None else cache.drafter.hold(lengths, count)
        step.pair = self._pair(count, step.drafts, device) if step.predicts else None
        stack = functools.partial(self._stack, keeps=1 + verified if keeps_logits else None)
        if step.held is None:
            call = stack(call, step)

        def run(call: dict[str, Any], step: Step) -> Any:
            if step.held is None:
                return self._forward(inner, call, step)
            own = call["input_ids"]
            out = self._forward(inner, stack(call, step), step)
            cache.drafter.note(own, lengths)
            if step.pipeline is not None:
                step.pipeline.predicted()
                lengths.add_(count if step.taking is None else step.taking)
                rows.columns_on(device).add_(count)
            return out

        out = cache.graphs.run(cache, run, call, step, name)
        if step.replayed:
            cache.prepare_ahead(count)
        self.forwards += 1
        starts = lengths if step.held is not None or not cache.drafter.proposes else lengths.clone()
        rows.advance(count, on_device=not step.replayed or step.held is None)
        if step.held is None:
            cache.drafter.observe(ids, starts, None if step.taking is None else step.taking[:, None])
        else:
            cache.drafter.noted(count)
        cache.take_snapshot()
        if not step.drafts:
            return out
        if verified and self.tail.tokens is not None:
            logits = out["logits"] if not isinstance(out, tuple) else out[0]
            kept = [logits[:, i : i + 1] for i in range(1, 1 + verified)]
            self.memo = Memo(self.tail.tokens[:, 1 : 1 + verified], kept, type(out))
        return _first_rows(out, count, count + step.drafts, 1 + verified)

    def _stack(self, call: dict[str, Any], step: Step, keeps: int | None) -> dict[str, Any]:
        """The call with its drafts stacked behind its tokens, and what each query of the step counts; on the device
        alone, if the drafter is. keeps: rows of logits to ask for."""
        cache, tail, found = self.cache, step.tail, None
        assert tail is not None
        if step.drafts:
            ids, positions = call["input_ids"], call["position_ids"]
            lengths = cache.state.need_rows().lengths(ids.device)
            draft = cache.drafter.propose(ids[:, 0], lengths, step.drafts)
            found = draft.found
            ahead = torch.arange(1, step.drafts + 1, device=positions.device)
            tail.tokens = torch.cat((ids, draft.tokens), 1)
            tail.positions = torch.cat((positions, positions[..., -1:] + ahead), -1)
            call = dict(call, input_ids=tail.tokens, position_ids=tail.positions)
            if keeps is not None:
                call["logits_to_keep"] = torch.arange(keeps, device=cache.device)
        if step.pair is not None:
            step.weights = row_weights(step.pair, found, len(cache.state.need_rows()))
        return call

    def _positions(self, call: dict[str, Any], count: int) -> torch.Tensor | None:
        """Position ids of the new tokens; None where only the model knows them."""
        positions = call.get("position_ids")
        if positions is None and not self.reach.own:
            columns = self.cache.state.need_rows().columns
            positions = torch.arange(columns, columns + count, device=self.cache.device).unsqueeze(0)
        return positions

    def _may_draft(self, mode: str, positions: torch.Tensor | None, call: dict[str, Any]) -> bool:
        cache, config = self.cache, self.cache.state.config
        if mode != "decode" or not cache.drafter.proposes or not wants_drafts(config):
            return False
        # Without speculation a draft serves prediction only; per-token router logits can't be sliced apart.
        if not (config.speculate or cache.state.grows_sparse) or call.get("output_router_logits"):
            return False
        if positions is None:
            return False
        rows = cache.state.need_rows()
        if self.reach.holds(rows.columns + 1, max(rows.tokens) + 1, draft_rows(config)):
            return True
        if self.reach.dynamic and not self.warned:
            self.warned = True
            warnings.warn(
                f"Beyond {self.reach.most:,} positions this model's dynamic RoPE scales by the furthest one, so "
                "OasisCache stacks no drafts there: recent queries predict, and speculate saves no forwards.",
                stacklevel=2,
            )
        return False

    def _pair(self, count: int, drafts: int, device: torch.device) -> torch.Tensor:
        """`query_weights` on the device `[2, W + drafts]`, in memory that stays while only their values change."""
        state = self.cache.state
        values = query_weights(state.config, state.window, drafts, self.acceptance, count)
        have = self._pairs.get(drafts)
        if have is None or have[1].device != device:
            have = self._pairs[drafts] = ([], torch.empty((2, state.window + drafts), device=device))
        if have[0] != values:
            told = torch.tensor(values)
            have[1].copy_(told.pin_memory() if device.type == "cuda" else told, non_blocking=True)
            have[0][:] = values
        return have[1]

    def note_accepted(self, accepted: int, tried: int) -> None:
        """Of `tried` verified drafts so many were the next input."""
        self.acceptance += _RATE * (accepted / tried - self.acceptance)

    # -- memoised acceptance ------------------------------------------------------------------------------------------

    def _recall(self, ids: torch.Tensor, call: dict[str, Any], name: str) -> Any:
        """The remembered row, if every unfinished row's input is its draft: no forward. Reads one bool."""
        memo = self.memo
        token = ids[:, 0]
        ended = self._note_ended(token)
        if memo is None or memo.used >= memo.tokens.shape[1] or call.get("output_hidden_states"):
            return None
        matched = memo.tokens[:, memo.used] == token
        hit = bool((matched if ended is None else matched | ended).all())
        self.note_accepted(int(hit), 1)
        if not hit:
            return None
        assert self.tail is not None
        self.cache.commit([memo.used])
        logits, memo.used = memo.logits[memo.used], memo.used + 1
        self.skipped += 1
        if memo.output is tuple:
            return (logits, self.cache)
        return memo.output(**{"logits": logits, name: self.cache})

    def _note_ended(self, token: torch.Tensor) -> torch.Tensor | None:
        """Rows that generate feeds padding after their end `[B]` bool; None where that can't be told (a hand-written
        loop, no end id, one row)."""
        if not self.ends or self.pad is None or len(token) == 1:
            return None
        is_end = torch.zeros_like(token, dtype=torch.bool)
        for end in self.ends:
            is_end = is_end | (token == end)
        fed_padding = torch.zeros_like(is_end) if self.ended is None else self.ended & (token == self.pad)
        self.ended = is_end | fed_padding
        return fed_padding


def _refuse(call: dict[str, Any], model: Any) -> None:
    """Calls that would be silently wrong."""
    if call.get("use_cache") is False:
        raise ValueError(
            "use_cache=False with an OasisCache would append the whole sequence at every step: leave use_cache on, or "
            "pass no cache."
        )
    if call.get("output_attentions") or (
        call.get("output_attentions") is None and getattr(model.config, "output_attentions", False)
    ):
        raise ValueError(
            "OasisCache gives no attention weights (most of the context is not in the working set): set "
            "output_attentions=False, or use DynamicCache."
        )
    mask = call.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim != 2):
        raise ValueError("OasisCache takes a 2D attention_mask [rows, tokens]: pass padding only, not a prepared mask.")
    if call.get("cu_seq_lens_q") is not None:
        raise ValueError("OasisCache does not take packed sequences: pass rows with padding instead.")


def _first_rows(out: Any, count: int, total: int, logits: int) -> Any:
    """The output without what belongs to drafts. total: rows run; logits: rows that the head was asked for."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:, :count] if value.ndim > 1 and value.shape[1] in (total, logits) else value
        if isinstance(value, tuple):
            return tuple(cut(item) for item in value)
        return value

    if isinstance(out, tuple):
        return tuple(cut(item) for item in out)
    kept = {key: cut(value) for key, value in out.items()}
    return type(out)(**kept)
