"""One forward of the model: its mode, its stacked drafts, and the memo of rows already verified."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import attach, sparsify, supported
from .config import TAIL
from .lookahead import draft_rows, predicts_blocks, query_weights, row_weights, wants_drafts
from .memo import Memo
from .progress import prefill_bar
from .reach import Reach
from .recall import Recall
from .resumed import Resumed
from .state import Step
from .tail import Tail

if TYPE_CHECKING:
    from .cache import OasisCache


class Stepper(Recall):
    """Runs a cache's forwards.

    Attributes:
        acceptance: running rate at which a verified draft was the next input.
        recording: None; "armed" after `activate_past_recording` (the next forward is the prompt's); "on" (a
            several-token forward is the caller's own verification).
        forced: mode set by `cache.mode(...)`, or None.
        over: rows known to have ended. load: unfinished rows of the call under way. unverified, undrafted: forwards
            whose drafts were not verified, or not stacked, because of it.
        skipped: forwards saved by memoised acceptance. left_out: how often a row was, because its token was known while
            others needed a forward. passes, passed: how often a row of `oasis_hf.generate` was
            verified, and how many tokens it got of that, a pass's own included.
        decoded: whether it may hold anything but a prompt as it is read: a step's tokens, or a prompt that lost some.
        ends, pad: ids that end a row and that it is fed after its end, as the running generate call has them.
    """

    def __init__(self, cache: "OasisCache") -> None:
        self._cache = weakref.ref(cache)  # the cache owns this; a cycle would keep its pages until a collection
        self.acceptance = 0.5
        self.recording: str | None = None
        self.forced: str | None = None
        self.memo: Memo | None = None
        self.tail: Tail | None = None
        self.waits: list[bool] | None = None
        self.ended: torch.Tensor | None = None
        self.ends: tuple[int, ...] = ()
        self.pad: int | None = None
        self.skipped = self.left_out = self.forwards = self.passes = self.passed = 0
        self.resumed: Resumed | None = None
        self.decoded = False
        self.over = self.load = self.unverified = self.undrafted = 0
        self._pairs: dict[tuple[int, int], tuple[list[list[float]], torch.Tensor]] = {}
        self.warned = False
        self.reach = Reach(cache.model, supported.text_config(cache.model))

    @property
    def cache(self) -> "OasisCache":
        cache = self._cache()
        assert cache is not None
        return cache

    def forget(self) -> None:
        """Rows or lengths changed under the memo and the tail."""
        self.memo = self.tail = self.waits = None

    # -- entry --------------------------------------------------------------------------------------------------------

    def run(self, inner: Callable[..., Any], call: dict[str, Any], name: str, keeps_logits: bool) -> Any:
        """The wrapped forward. call: its arguments by name, the cache under `name`."""
        _refuse(call, self.cache.model)
        given = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if given is None:
            raise ValueError("OasisCache needs input_ids or inputs_embeds in the model's call.")
        batch, count = given.shape[:2]
        rows = self.cache.rows_for(batch)
        if self.resumed is not None:
            out = self.resumed.answer(self.cache, call, name)
            self.resumed = None
            if out is not None:
                return out
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
            state.store.abandon()
            state.store.truncate(rows.tokens)
        for layer, before in zip(self.cache.layers, recent):
            if hasattr(layer, "recent"):
                layer.recent, layer.draft_queries = before, None
        rows.resync()  # a replay may have advanced the device's lengths
        self.cache.graphs.drop_late(self.cache)
        if rows.columns:
            state.mark_dirty([0] * len(rows))

    def _mode(self, count: int, columns: int) -> str:
        due = columns > 0 and any(getattr(layer, "recent", layer) is None for layer in self.cache.layers)
        if due and self.forced in ("decode", "verify"):
            raise ValueError(
                f"This OasisCache holds {columns} tokens whose prompt is not yet at its end: give it the prompt's rest "
                f"outside `with cache.mode({self.forced!r})`."
            )
        recording, self.recording = self.recording, "on" if self.recording == "armed" else self.recording
        if attach.in_prefill():
            self.recording = None
            return "prefill"
        if self.forced is not None:
            return self.forced
        if columns == 0 or recording == "armed" or due:
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
        sparsify.before_prompt(cache, step.ends)
        call["attention_mask"] = None
        try:
            with prefill_bar(state.config.progress, count, len(cache.layers)) as step.tick:
                out = self._forward(inner, call, step)
        finally:
            if state.store is not None:
                state.store.join()  # interrupted or not: what comes later may read those pages, or get them
        self.forwards += 1
        starts = rows.lengths(cache.device).clone()
        state.mark_read(step)
        rows.extend(torch.ones((len(rows), count), dtype=torch.bool) if valid is None else valid)
        cache.drafter.observe(call.get("input_ids"), starts, valid)
        self.ended, self.over = None, 0
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
        ids, config, self.decoded = call.get("input_ids"), self.cache.state.config, True
        run = functools.partial(self._step, inner, name=name, keeps_logits=keeps_logits, mode=mode, count=count)
        ended = None
        if ids is not None and count == 1 and (config.speculate or config.draft_up_to is not None):
            ended = self._note_ended(ids[:, 0])
            remembered = self._recall(ids, ended, call, name, run if mode == "decode" else None)
            if remembered is not None:
                return remembered
        self.load = self._unfinished(ended)
        return run(call)

    def _unfinished(self, ended: torch.Tensor | None) -> int:
        """Rows that go on. Read from the device only where it may turn on what so many rows have turned off."""
        config, rows = self.cache.state.config, self.cache.state.need_rows()
        if rows.taking is not None:
            return sum(rows.takes)
        limits = [most for most in (config.verify_up_to, config.draft_up_to) if most is not None]
        if ended is not None and limits and len(rows) - self.over > min(limits):
            self.over = int(ended.sum())
        return len(rows) - self.over

    def _step(
        self, inner: Callable[..., Any], call: dict[str, Any], name: str, keeps_logits: bool, mode: str, count: int
    ) -> Any:
        cache, state = self.cache, self.cache.state
        config, rows, ids = state.config, state.need_rows(), call.get("input_ids")
        self.forget()
        state.tick()
        sparsify.before_step(cache, count)
        if state.first_due:
            cache.first_select()
        cache.prepare(count)

        positions = self._positions(call, count)
        may_draft = ids is not None and count == 1 and self._may_draft(mode, positions, call)
        verifies = config.verify_up_to is None or self.load <= config.verify_up_to
        shed = config.draft_up_to is not None and self.load > config.draft_up_to
        if may_draft:
            self.undrafted += shed
            self.unverified += config.speculate and not verifies and not shed
            # Drafts that nobody verifies serve prediction only.
            may_draft = not shed and (verifies or state.grows_sparse)
        chain = draft_rows(config, verifies) if may_draft else 0
        others = config.candidates - 1 if may_draft and cache.drafter.several else 0
        step = Step(
            mode, state.number, count, list(rows.tokens), rows.columns, chain + others,
            predicts=state.grows_sparse and predicts_blocks(config),
            on_demand=config.lookahead == "on_demand" and state.grows_sparse,
            corrects=config.corrects and state.grows_sparse, taking=rows.taking,
        )  # fmt: skip
        step.tail = self.tail = Tail.chain(ids, positions, count, chain, others)
        call = {**call, "attention_mask": None, **({} if positions is None else {"position_ids": positions})}
        verified = chain - 1 if config.speculate and verifies and chain else 0
        device = cache.device
        lengths = rows.lengths(device)
        step.held = None if ids is None else cache.drafter.hold(lengths, count)
        step.pair = self._pair(count, chain, others, shed, device) if step.predicts else None
        stack = functools.partial(self._stack, chain=chain, verified=verified, keeps_logits=keeps_logits)
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

        with sparsify.timing(cache):
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
            if others and not keeps_logits:  # the lookahead row is none of them
                logits = torch.cat((logits[:, : 1 + verified], logits[:, 1 + chain :]), 1)
            self.memo = Memo(self.tail, verified, others, logits, type(out))
        return _first_rows(out, count, count + step.drafts, 1 + verified + (others if verified else 0))

    def _stack(self, call: dict[str, Any], step: Step, chain: int, verified: int, keeps_logits: bool) -> dict[str, Any]:
        """The call with its drafts stacked behind its tokens, and what each query of the step counts; on the device
        alone, if the drafter is. chain: how many drafts follow each other, of which the first `verified` are verified;
        the step's others stand beside the first. keeps_logits: whether the model can be asked for logits."""
        cache, tail, found, probabilities = self.cache, step.tail, None, None
        assert tail is not None
        if step.drafts:
            others = step.drafts - chain
            ids, positions = call["input_ids"], call["position_ids"]
            lengths = cache.state.need_rows().lengths(ids.device)
            ahead = torch.arange(1, chain + 1, device=positions.device)
            kept = torch.arange(1 + verified, device=cache.device)
            if others:
                draft = cache.drafter.propose_several(ids[:, 0], lengths, chain, others)
                assert draft.others is not None
                probabilities = draft.probabilities
                ahead = torch.cat((ahead, ahead[:1].expand(others)))
                beside = torch.arange(1 + chain, 1 + step.drafts, device=cache.device)
                kept = torch.cat((kept, beside)) if verified else kept
                tail.tokens = torch.cat((ids, draft.tokens, draft.others), 1)
            else:
                draft = cache.drafter.propose(ids[:, 0], lengths, chain)
                tail.tokens = torch.cat((ids, draft.tokens), 1)
            found = draft.found
            tail.positions = torch.cat((positions, positions[..., -1:] + ahead), -1)
            call = dict(call, input_ids=tail.tokens, position_ids=tail.positions)
            if keeps_logits or "logits_to_keep" in call:
                call["logits_to_keep"] = kept if keeps_logits else 0  # all
        if step.pair is not None:
            rows = len(cache.state.need_rows())
            step.weights = row_weights(step.pair, found, rows, probabilities, cache.state.window)
        return call

    def _positions(self, call: dict[str, Any], count: int) -> torch.Tensor | None:
        """Position ids of the new tokens; None where only the model knows them."""
        positions = call.get("position_ids")
        if positions is None and not self.reach.own:
            columns = self.cache.state.need_rows().columns
            positions = torch.arange(columns, columns + count, device=self.cache.device).unsqueeze(0)
        return positions

    def _may_draft(self, mode: str, positions: torch.Tensor | None, call: dict[str, Any], ahead: int = 0) -> bool:
        """Whether drafts may be stacked behind tokens at these positions, or `ahead` further on."""
        cache, config = self.cache, self.cache.state.config
        if mode != "decode" or not cache.drafter.proposes or not wants_drafts(config):
            return False
        # Without speculation a draft serves prediction only; per-token router logits can't be sliced apart.
        if not (config.speculate or cache.state.grows_sparse) or call.get("output_router_logits"):
            return False
        if positions is None:
            return False
        rows = cache.state.need_rows()
        if self.reach.holds(rows.columns + 1 + ahead, max(rows.tokens) + 1 + ahead, draft_rows(config)):
            return True
        if self.reach.dynamic and not self.warned:
            self.warned = True
            warnings.warn(
                f"Beyond {self.reach.most:,} positions this model's dynamic RoPE scales by the furthest one, so "
                "OasisCache stacks no drafts there: recent queries predict, and speculate saves no forwards.",
                stacklevel=2,
            )
        return False

    def _pair(self, count: int, chain: int, others: int, shed: bool, device: torch.device) -> torch.Tensor:
        """`query_weights` on the device `[2, W + drafts]`, in memory that stays while only their values change."""
        state = self.cache.state
        values = query_weights(state.config, state.window, chain, self.acceptance, count, others, shed)
        have = self._pairs.get((chain, others))
        if have is None or have[1].device != device:
            room = torch.empty((2, state.window + chain + others), device=device)
            have = self._pairs[chain, others] = ([], room)
        if have[0] != values:
            told = torch.tensor(values)
            have[1].copy_(told.pin_memory() if device.type == "cuda" else told, non_blocking=True)
            have[0][:] = values
        return have[1]


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
