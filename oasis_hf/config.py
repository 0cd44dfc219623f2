"""`OasisConfig`: every knob of the cache, validated once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

BLOCK = 16
"""Tokens in a block, the unit of selection, transfer and eviction (paper, section 4)."""

TAIL = 8
"""Most query tokens of one decode step: the new token and its drafts."""

FETCH_RATIO = 0.05
"""The fetch cap as a share of K where nobody says (paper, table 2)."""

MOST_RATIO = 0.2
"""Of K: most that `fetch_ratio="auto"` gives one KV head, layer and row in a step."""

LOOKAHEADS = ("auto", "draft", "previous", "smoothed", "oracle", "on_demand", "none")
SUMMARY_DTYPES = ("model", "int8")
HOST_DTYPES = ("model", "float32", "float16", "bfloat16")
REDUCTIONS = ("max", "mean", "softmax-mean")
STORES = ("host", "resident", "file")
SPARSIFY = ("always", "never", "auto")
EXPERTS = ("auto", "own", "grouped_mm", "batched_mm")
CORRECTIONS = ("off", "auto", "always")


class ConfigError(ValueError):
    """A knob of `OasisConfig` has a value that is not allowed."""


def _fail(knob: str, value: Any, allowed: str) -> None:
    raise ConfigError(f"OasisConfig.{knob}={value!r} is not allowed: use {allowed}.")


def _check_choice(knob: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _fail(knob, value, "one of " + ", ".join(repr(c) for c in choices))


def _check_int(knob: str, value: Any, low: int, high: int | None = None, none_ok: bool = False) -> None:
    if none_ok and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        _fail(knob, value, span + (" or None" if none_ok else ""))


def _check_number(
    knob: str, value: Any, low: float, high: float, open_low: bool = False, none_ok: bool = False, other: str = ""
) -> None:
    if none_ok and value is None:
        return
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_low and value == low):
        span = f"a number {'above' if open_low else 'from'} {low} {'up ' if open_low else ''}to {high}"
        _fail(knob, value, span + (" or None" if none_ok else "") + (f" or {other}" if other else ""))


@dataclass(frozen=True)
class OasisConfig:
    """Knobs of an `OasisCache`. Frozen; a wrong value raises `ConfigError` naming the knob and what is allowed.

    Args:
        budget: working set in tokens a KV head, the open block's included; `S = ceil(budget / 16)` slots,
            of which `K = S - 1` are selectable. The paper's setting is 2064 (K = 128).
        budget_bytes: the working set in bytes of device memory instead, for K and V of its blocks over all sparse
            layers, rows and KV heads of the cache; resolved to whole slots when the first prompt arrives, for the
            rows it has then (`reset` and another batch: anew), so more rows later are refused. Excludes `budget`.
        block_size: tokens a block; 16 is the only size.
        fetch_ratio: the fetch cap as a share of K: at most `C = max(1, round(fetch_ratio * K))` blocks a KV head
            a layer a step (paper, table 2). `"auto"`: a step's bytes, `fetch_bytes`, are shared out over layers, rows
            and KV heads by the attention that each block promises, averaged over steps (needs
            `reduction="softmax-mean"`, whose scores are shares of attention).
        fetch_bytes: with `fetch_ratio="auto"`: most bytes that a decode step moves under its cap, over all layers, rows
            and KV heads. None: what a ratio of 0.05 moves at most; on CUDA from host pages as much as the link moves
            in the time that steps take, so that answers depend on it.
        lookahead: whose queries predict the next step's blocks. `"auto"`: what serves the drafter best, its
            `Drafter.lookahead` (a cache's report says which). `"draft"`: the drafter's rows; `"previous"`: the
            current token's; `"smoothed"`: the mean over the last `smooth_queries` tokens' standardised scores;
            `"oracle"`: a drafter told the true next token; `"on_demand"`: the current token's own query, fetched
            on the critical path and uncapped; `"none"`: the first selection stays. A mix is a mapping such as
            `{"draft": 0.7, "previous": 0.3}`.
        smooth_queries: how many recent queries `"smoothed"` averages (also the fallback of rows without a draft).
        correct_below: with `lookahead="previous"` only, from -1 to 1: a KV head in which the current token's query has
            turned away from the last one's, so that the cosine between them (the mean over the group's query heads) is
            below this, selects by the current query and fetches before attention, uncapped (FreeKV, arXiv 2505.13109,
            with 0.8 to 0.9). Of several tokens in one call the first is compared. None: what was prefetched is
            attended to. With `correction="auto"` and any lookahead: corrected are the heads that turned away.
        correction: `"auto"`: before a layer attends, its token's own query scores the blocks, and a KV head whose best
            K hold more than `correct_above` of the predicted mass beyond what is resident fetches the best of them, at
            most `correct_blocks`, which that layer alone waits for. `"always"`: every head does. `"off"`: none.
        correct_above: that share, from 0 to 1, of the softmax over all closed blocks (the mean over a group's heads).
            Less than 1e-5 counts as that much, since it may be rounding.
        correct_blocks: most blocks that a correction moves, a KV head a layer a step; beyond the fetch cap.
        correct_layers: full-attention layers that are asked, by their places among these; None: all. To ask costs time,
            and a few layers do most corrections (`cache.layers_corrected()`).
        scorer: a name in `oasis_hf.scorers.SCORERS`: `"minmax"` (Quest's upper bound, the paper's) or
            `"midrange"` (midpoint + `half_range` x half-range).
        half_range: lambda of the `"midrange"` scorer.
        reduction: how the query heads of a group become one score a KV head: `"max"` or `"mean"` of raw scores,
            or `"softmax-mean"`, the mean over heads of the softmax over blocks.
        summary_dtype: `"model"`, or `"int8"` with one scale a vector.
        tokens_per_summary: 16, 8 or 4: a block holds 1, 2 or 4 summaries.
        sink_blocks, recent_blocks: first and last closed blocks that always score +inf; they count in K.
        host_dtype: dtype of the pages in the host store; `"model"` keeps the model's own. `"bfloat16"` rounds a
            float16 or float32 model's K and V, `"float16"` a float32 model's, and holds no more than 65,504: it is
            refused for a bfloat16 model.
        host_capacity_tokens: reserve and commit this many tokens a row before the first prompt; a longer row raises.
            Candidates that assisted decoding verifies and crops again count. With `store="host"` only.
        store: `"host"` (pages in host memory), `"file"` (in a file on a local disk, for contexts larger than memory;
            host memory holds what was used last), or `"resident"` (the full KV on the model's device, same selection:
            for comparison).
        host_bytes: most host memory for pages with `store="file"`; None: half of what is available when the first
            prompt runs.
        file_dir: folder of that file, which has no name and goes with the process; None: the system's for temporary
            files.
        sparsify: `"always"`: rows hold a working set of `budget` from the start. `"auto"`: a batch stays dense, all its
            blocks on the device and nothing predicted, until steps over the working set are the faster or device memory
            would run out (see `oasis_hf.sparsify`). `"never"`: it stays dense. Pages go to the store in any case.
        speculate: return a verified draft's logits without a forward (memoised acceptance). Off: the draft row is
            lookahead only, as in the paper.
        draft_tokens: verified drafts a step when `speculate` is on (one more row is stacked as lookahead).
        candidates: m, how many of the drafter's likeliest next tokens are stacked side by side, 1 to 4; the chain goes
            on from the first. They share its weight in the block scores by their probabilities, and with `speculate`
            any of them is accepted. Of a drafter that is not `several` there is one.
        verify_up_to: most unfinished rows with which `speculate` verifies drafts; with more of them one draft is
            stacked and serves lookahead alone. None: always.
        draft_up_to: most unfinished rows with which drafts are stacked at all; with more of them the last
            `smooth_queries` queries predict. None: always.
        sliding_slack: tokens beyond the window that a sliding-window layer keeps, so that `crop` can restore them.
        graphs: on CUDA, capture a whole decode step as one CUDA graph and replay it, with prediction and transfer on a
            side stream; steps that can't be captured run eagerly (`cache.graphs.refused` says why).
        compile_after: replays of a step's shape after which its decoder layers are compiled (`torch.compile`) and the
            step is captured anew: some seconds once, a quarter off each step; results are the same within the model
            dtype's rounding. The projections of one input then share one weight tensor. None: never.
        experts: implementation of a mixture's experts in captured steps: `"auto"` times those that can be captured,
            once for a step's number of tokens, and takes the fastest (the report says which), unless the model is set
            to another than transformers itself chooses; `"own"` leaves what the model is set to; or one by its name.
        progress: show a bar during prefill.
        seed: order in which equally old victims are evicted; 0 is slot order, others a fixed permutation.
    """

    budget: int | None = None
    budget_bytes: int | None = None
    block_size: int = BLOCK
    fetch_ratio: float | str = FETCH_RATIO
    fetch_bytes: int | None = None
    lookahead: str | Mapping[str, float] = "auto"
    smooth_queries: int = 4
    correct_below: float | None = None
    correction: str = "off"
    correct_above: float = 0.2
    correct_blocks: int = 8
    correct_layers: tuple[int, ...] | None = None
    scorer: str = "midrange"
    half_range: float = 0.6
    reduction: str = "softmax-mean"
    summary_dtype: str = "int8"
    tokens_per_summary: int = 8
    sink_blocks: int = 0
    recent_blocks: int = 0
    host_dtype: str = "model"
    host_capacity_tokens: int | None = None
    store: str = "host"
    host_bytes: int | None = None
    file_dir: str | None = None
    sparsify: str = "always"
    speculate: bool = False
    draft_tokens: int = 1
    candidates: int = 1
    verify_up_to: int | None = None
    draft_up_to: int | None = None
    sliding_slack: int = 64
    graphs: bool = True
    compile_after: int | None = 64
    experts: str = "auto"
    progress: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        from .scorers import SCORERS

        if self.budget is not None and self.budget_bytes is not None:
            _fail("budget_bytes", self.budget_bytes, "either budget (tokens) or budget_bytes, not both")
        if self.budget is None and self.budget_bytes is None:
            object.__setattr__(self, "budget", 2064)
        _check_int("budget", self.budget, 2 * BLOCK, none_ok=True)
        _check_int("budget_bytes", self.budget_bytes, 1, none_ok=True)
        if self.block_size != BLOCK or not isinstance(self.block_size, int):
            _fail("block_size", self.block_size, f"{BLOCK}, the only block size")
        self._check_fetch()
        self._check_lookahead()
        _check_int("smooth_queries", self.smooth_queries, 1, 64)
        _check_number("correct_below", self.correct_below, -1.0, 1.0, none_ok=True)
        self._check_correction()
        _check_choice("scorer", self.scorer, tuple(SCORERS))
        _check_number("half_range", self.half_range, 0.0, 1.0)
        _check_choice("reduction", self.reduction, REDUCTIONS)
        _check_choice("summary_dtype", self.summary_dtype, SUMMARY_DTYPES)
        if self.tokens_per_summary not in (16, 8, 4) or not isinstance(self.tokens_per_summary, int):
            _fail("tokens_per_summary", self.tokens_per_summary, "16, 8 or 4")
        _check_int("sink_blocks", self.sink_blocks, 0)
        _check_int("recent_blocks", self.recent_blocks, 0)
        _check_choice("host_dtype", self.host_dtype, HOST_DTYPES)
        _check_int("host_capacity_tokens", self.host_capacity_tokens, 1, none_ok=True)
        _check_choice("store", self.store, STORES)
        if self.store != "host" and self.host_capacity_tokens is not None:
            _fail("host_capacity_tokens", self.host_capacity_tokens, f"None with store={self.store!r}, or store='host'")
        _check_int("host_bytes", self.host_bytes, 1, none_ok=True)
        if self.file_dir is not None and not isinstance(self.file_dir, (str, os.PathLike)):
            _fail("file_dir", self.file_dir, "a folder, or None")
        for knob in ("host_bytes", "file_dir"):
            if self.store != "file" and getattr(self, knob) is not None:
                _fail(knob, getattr(self, knob), f"None with store={self.store!r}, or store='file'")
        _check_choice("experts", self.experts, EXPERTS)
        _check_choice("sparsify", self.sparsify, SPARSIFY)
        if self.sparsify != "always" and (self.budget is None or self.store == "resident"):
            _fail("sparsify", self.sparsify, "'always' with budget_bytes or store='resident'")
        for flag in ("speculate", "graphs", "progress"):
            if not isinstance(getattr(self, flag), bool):
                _fail(flag, getattr(self, flag), "True or False")
        _check_int("compile_after", self.compile_after, 0, none_ok=True)
        _check_int("draft_tokens", self.draft_tokens, 1, TAIL - 2)
        _check_int("candidates", self.candidates, 1, 4)
        room = TAIL - 1 - self.draft_tokens
        if self.speculate and self.candidates > room:
            allowed = f"at most {room} with draft_tokens={self.draft_tokens}, or fewer draft_tokens"
            _fail("candidates", self.candidates, allowed)
        _check_int("verify_up_to", self.verify_up_to, 1, none_ok=True)
        _check_int("draft_up_to", self.draft_up_to, 1, none_ok=True)
        _check_int("sliding_slack", self.sliding_slack, TAIL)
        _check_int("seed", self.seed, 0)
        if self.budget is not None:
            self.check_protected(self.slots)

    def _check_fetch(self) -> None:
        if self.fetch_ratio != "auto":
            _check_number("fetch_ratio", self.fetch_ratio, 0.0, 1.0, open_low=True, other="'auto'")
            if self.fetch_bytes is not None:
                _fail("fetch_bytes", self.fetch_bytes, "None, or fetch_ratio='auto'")
        _check_int("fetch_bytes", self.fetch_bytes, 1, none_ok=True)
        if self.fetch_ratio == "auto" and self.reduction != "softmax-mean":
            _fail("fetch_ratio", "auto", "a number, or reduction='softmax-mean'")

    def _check_lookahead(self) -> None:
        if isinstance(self.lookahead, str):
            _check_choice("lookahead", self.lookahead, LOOKAHEADS)
            return
        allowed = f"one of {', '.join(map(repr, LOOKAHEADS))} or a mix such as {{'draft': 0.7, 'previous': 0.3}}"
        ok = isinstance(self.lookahead, Mapping) and set(self.lookahead) == {"draft", "previous"}
        if not ok or not all(isinstance(w, (int, float)) and 0 < w < math.inf for w in self.lookahead.values()):
            _fail("lookahead", self.lookahead, allowed)
        # A plain mapping would leave the frozen config mutable and unhashable.
        object.__setattr__(self, "lookahead", _Mix(self.lookahead))

    def _check_correction(self) -> None:
        _check_choice("correction", self.correction, CORRECTIONS)
        _check_number("correct_above", self.correct_above, 0.0, 1.0)
        _check_int("correct_blocks", self.correct_blocks, 1)
        self._check_correct_layers()
        if self.correction != "off" and self.lookahead in ("on_demand", "none"):
            _fail("correction", self.correction, f"'off' with lookahead={self.lookahead!r}")
        if self.correct_below is None or self.correction == "auto":
            return
        if self.correction == "always":
            _fail("correct_below", self.correct_below, "None with correction='always'")
        if self.lookahead != "previous":
            _fail("correct_below", self.correct_below, "None, or lookahead='previous', or correction='auto'")

    def _check_correct_layers(self) -> None:
        if (layers := self.correct_layers) is None:
            return
        told = isinstance(layers, (list, tuple)) and all(type(one) is int and one >= 0 for one in layers)
        if not told or len(set(layers)) != len(layers) or not layers:
            _fail("correct_layers", layers, "a tuple of different integers >= 0, or None")
        if not self.corrects:
            _fail("correct_layers", layers, "None with correction='off'")
        object.__setattr__(self, "correct_layers", tuple(sorted(layers)))

    def check_layers(self, sparse: int) -> None:
        """Raise `ConfigError` if `correct_layers` names more than `sparse` full-attention layers."""
        if self.correct_layers is not None and self.correct_layers[-1] >= sparse:
            _fail("correct_layers", self.correct_layers, f"numbers below {sparse}, the model's full-attention layers")

    def check_protected(self, slots: int) -> None:
        """Raise `ConfigError` if sink and recent blocks leave nothing of `slots - 1` to select."""
        if self.sink_blocks + self.recent_blocks > slots - 1:
            _fail(
                "sink_blocks + recent_blocks",
                self.sink_blocks + self.recent_blocks,
                f"at most K = {slots - 1}, or a larger budget than {slots * BLOCK} tokens",
            )

    @property
    def slots(self) -> int:
        """S, block-sized slots a KV head; only where the budget is in tokens."""
        assert self.budget is not None
        return math.ceil(self.budget / BLOCK)

    @property
    def corrects(self) -> bool:
        """Whether a step may choose blocks before it attends beside those that were predicted."""
        return self.correction != "off" or self.correct_below is not None

    @property
    def watches_mass(self) -> bool:
        """Whether the mass that a head misses says if it is corrected."""
        return self.correction == "auto" and self.correct_below is None

    @property
    def parts(self) -> int:
        """Summaries a block."""
        return BLOCK // self.tokens_per_summary

    def slots_for(self, layers: int, rows: int, kv_heads: int, block_bytes: int) -> int:
        """S for a cache of this shape; a `budget_bytes` that holds fewer than two slots raises `ConfigError`.

        Args:
            layers: sparse layers. rows: sequences. kv_heads: local KV heads.
            block_bytes: bytes of one block of one KV head, K and V.
        """
        if self.budget_bytes is None:
            return self.slots
        one = layers * rows * kv_heads * block_bytes
        slots = self.budget_bytes // one
        if slots < 2:
            _fail(
                "budget_bytes",
                self.budget_bytes,
                f"at least {2 * one:,} bytes: two slots x {layers} layers x {rows} rows x {kv_heads} KV heads "
                f"x {block_bytes:,} bytes a block",
            )
        self.check_protected(slots)
        return slots

    def check_rows(self, slots: int, layers: int, rows: int, kv_heads: int, block_bytes: int) -> None:
        """Raise `ConfigError` if `rows` rows of `slots`, which `slots_for` found for fewer, pass `budget_bytes`."""
        need = layers * rows * kv_heads * block_bytes * slots
        if self.budget_bytes is not None and need > self.budget_bytes:
            raise ConfigError(
                f"OasisConfig.budget_bytes={self.budget_bytes:,} gave the first prompt's rows {slots} slots each, and "
                f"{rows} rows of as many would take {need:,} bytes: repeat the rows before that prompt runs, or give "
                "budget in tokens."
            )

    def fetch_cap(self, slots: int) -> int:
        """C, most blocks admitted per KV head per layer per step."""
        ratio = MOST_RATIO if isinstance(self.fetch_ratio, str) else self.fetch_ratio
        return max(1, round(ratio * (slots - 1)))

    def fetch_blocks(self, slots: int, heads: int, block_bytes: int) -> int:
        """Most blocks that a step moves with `fetch_ratio="auto"`; `fetch_bytes` below one block raises `ConfigError`.

        Args:
            heads: KV heads of all sparse layers and rows. block_bytes: as in `slots_for`.
        """
        if self.fetch_bytes is None:
            return heads * max(1, round(FETCH_RATIO * (slots - 1)))
        if self.fetch_bytes < block_bytes:
            _fail("fetch_bytes", self.fetch_bytes, f"at least {block_bytes:,} bytes, one block of one KV head")
        return self.fetch_bytes // block_bytes

    def shared_cap(self, slots: int, blocks: int, heads: int) -> int:
        """C where `blocks` a step are shared out: most that one of `heads` KV heads of all layers and rows gets."""
        return min(max(self.fetch_cap(slots), -(-2 * blocks // heads)), slots)

    def replace(self, **knobs: Any) -> "OasisConfig":
        """A copy with some knobs changed; unknown names raise `ConfigError`."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in knobs:
            if name not in known:
                raise ConfigError(f"OasisConfig has no knob {name!r}: the knobs are {', '.join(sorted(known))}.")
        for name, other in (("budget", "budget_bytes"), ("budget_bytes", "budget")):
            if knobs.get(name) is not None and knobs.get(other) is None:
                known[other] = None
        return OasisConfig(**{**known, **knobs})


class _Mix(dict):
    """An immutable, hashable lookahead mix."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def _no(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("OasisConfig is frozen: use config.replace(lookahead=...)")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _no  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return (_Mix, (dict(self),))

    def __deepcopy__(self, memo: Any) -> "_Mix":
        return self
