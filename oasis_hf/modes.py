"""Other people's policies as modes of the same cache, so that comparisons differ in the policy alone.

A mode says whose query chooses blocks and when they come, where the full KV lives, and what is always kept. How blocks
are scored, and every other knob, stays the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import parallel, supported
from .config import BLOCK, ConfigError, OasisConfig
from .drafters import make_drafter
from .lookahead import wants_drafts
from .placing import placed
from .sliding import SlidingLayer
from .state import EVERY_SLOT, State
from .store import ResidentStore
from .summaries import Summaries
from .working_set import WorkingSet

MODES = {
    "dense": "The full KV is resident and all of it is attended to; `budget` does not count.",
    "quest": "The full KV is resident, and the current query's own top-K of it is attended to (Quest).",
    "on_demand": (
        "The full KV is on the host; what the current query chooses is fetched before attention, uncapped (ShadowKV, "
        "InfiniGen)."
    ),
    "previous": (
        "The current query prefetches for the next token, capped, and KV heads whose query has turned away from the "
        "last one's (`correct_below`) fetch before attention (FreeKV)."
    ),
    "oasis": "The defaults: a draft's queries, or recent ones, prefetch for the next token, capped (OasisKV).",
    "window": "The first block and the last ones; nothing is predicted or fetched again (StreamingLLM).",
}
"""Names of modes, and what each is."""

PAPER_SCORE: dict[str, Any] = dict(scorer="minmax", reduction="max", summary_dtype="model", tokens_per_summary=16)
"""Knobs of the score that Quest and the paper have."""

EVERYTHING = BLOCK * EVERY_SLOT
"""Budget of `dense` in tokens."""

TAU = 0.9
"""`correct_below` of `previous` where the caller names none: FreeKV takes 0.8 to 0.9."""

_POLICIES: dict[str, dict[str, Any]] = {
    "dense": dict(lookahead="none", store="host"),
    "quest": dict(lookahead="on_demand", store="resident"),
    "on_demand": dict(lookahead="on_demand", store="host"),
    "previous": dict(lookahead="previous", store="host"),
    "oasis": {},
    "window": dict(lookahead="none", store="host"),
}


def mode_config(mode: str, budget: int | None = None, **knobs: Any) -> OasisConfig:
    """The knobs of a mode.

    Args:
        mode: a name in `MODES`. budget: working set in tokens, as `OasisConfig` has it; `dense` takes no notice of it.
        **knobs: further fields of `OasisConfig`. `previous` has `correct_below=0.9` where none is given.

    Raises:
        ConfigError: an unknown mode, a wrong value, or a knob that the mode itself sets to something else.
    """
    check_mode(mode)
    policy = dict(_POLICIES[mode])
    if mode in ("dense", "window") and knobs.get("budget_bytes") is not None:
        raise ConfigError(f"mode={mode!r} takes no budget_bytes: give budget in tokens.")
    if mode == "dense":
        budget = EVERYTHING
    elif mode == "window":
        recent = OasisConfig(budget=budget).slots - 2
        policy.update(sink_blocks=1, recent_blocks=recent)
    elif mode == "previous":
        knobs.setdefault("correct_below", TAU)
    for knob, value in policy.items():
        if knob in knobs and knobs[knob] != value:
            raise ConfigError(f"mode={mode!r} sets {knob}={value!r}: leave {knob}={knobs[knob]!r} out.")
    return OasisConfig().replace(**{**knobs, **policy, **({} if budget is None else {"budget": budget})})


def check_mode(mode: Any) -> None:
    """Raise `ConfigError` unless it is one of `MODES`."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not allowed: use one of {', '.join(map(repr, MODES))}.")


@dataclass(frozen=True)
class _Load:
    """What bytes are counted for. drafter: bytes of its weights, and of what it keeps of the rows."""

    model: Any
    mode: str
    config: OasisConfig
    context: int
    rows: int
    drafter: tuple[int, int]

    def of(self, slots: int | None = None) -> dict[str, int]:
        """`gpu_bytes`, with another number of slots than the config's. Everything is made as a cache makes it, but of
        no memory (device "meta")."""
        config, rows, device = self.config, self.rows, torch.device("meta")
        heads, dim = supported.kv_shape(supported.text_config(self.model))
        heads = parallel.local_heads(self.model, heads)
        dtype = placed(self.model).dtype
        windows = supported.layer_windows(self.model)
        sparse = sum(window is None for window in windows)
        if slots is None:  # of a model whose layers all slide, the budget does not count
            slots = config.slots_for(max(sparse, 1), rows, heads, 2 * BLOCK * dim * dtype.itemsize)
        parts = dict.fromkeys(("working_set", "summaries", "full_kv", "sliding"), 0)
        if self.mode in ("dense", "quest"):
            full = ResidentStore(1, rows, heads, dim, dtype, device)
            full.ensure([0] * rows, [self.context] * rows)
            parts["full_kv"] = sparse * full.nbytes
        else:
            working_set = WorkingSet(slots, rows, heads, dim, dtype, device, config.seed)
            working_set.ensure(-(-self.context // BLOCK))
            parts["working_set"] = sparse * working_set.nbytes
        if self.mode not in ("dense", "window"):
            summaries = Summaries(config, rows, heads, dim, dtype, device)
            summaries.ensure(self.context // BLOCK)
            parts["summaries"] = sparse * summaries.nbytes
        keys, state = torch.empty((rows, heads, 0, dim), dtype=dtype, device=device), State(config, sparse, 1)
        for window in windows:
            if window is not None:
                ring = SlidingLayer(state, window)
                ring.lazy_initialization(keys, keys)
                parts["sliding"] += ring.device_bytes[0]
        parts["drafter_weights"], parts["drafter_kv"] = self.drafter
        return {**parts, "total": sum(parts.values())}


def _load(model: Any, mode: str, config: OasisConfig, context: int, drafter: Any, rows: int) -> _Load:
    model = supported.plain_model(model)
    for name, value in (("context", context), ("rows", rows)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} is not allowed: use an integer >= 1.")
    if config.sparsify != "always":
        raise ConfigError(
            f"sparsify={config.sparsify!r} takes as much memory as there is: leave it out, or take mode='dense'."
        )
    held = make_drafter(drafter, model, config).bytes_for(rows) if wants_drafts(config) else (0, 0)
    return _Load(model, mode, config, context, rows, held)


def gpu_bytes(
    model: Any, mode: str, budget: int | None, context: int, drafter: Any = None, rows: int = 1, **knobs: Any
) -> dict[str, int]:
    """What a mode needs of GPU memory beside the model, in bytes, right behind a prompt.

    `dense` and `quest` hold the full KV, which is attended to where it is (our own `store="resident"`, there to compare
    results, keeps a working set of it too); `dense` and `window` need no summaries. What grows while a row is decoded
    (slots by doubling until the budget, summaries by an eighth) is not in it.

    Args:
        model: as `OasisCache` takes it; its sizes and dtype count. mode, budget, knobs: as `mode_config` takes them.
        context: tokens of each row. rows: sequences.
        drafter: as `OasisCache` takes it, so None means a head where one is known for the model; it counts in modes
            that stack drafts.

    Returns:
        `working_set` (slots, tail and tables), `summaries`, `full_kv`, `sliding` (rings of sliding-window layers),
        `drafter_weights` (once, however many rows), `drafter_kv` (all that it keeps of the rows), and their `total`.

    Raises:
        ConfigError: a wrong value, or a model that can't be served. DrafterError: as `OasisCache` does.
    """
    return _load(model, mode, mode_config(mode, budget, **knobs), context, drafter, rows).of()


def budget_for(
    model: Any, mode: str, nbytes: int, context: int, drafter: Any = None, rows: int = 1, **knobs: Any
) -> int:  # fmt: skip
    """The largest budget in tokens with which a mode needs no more than `nbytes` of GPU memory: `gpu_bytes` turned
    round, with its arguments. Where everything fits, or the budget does not count, it is one that covers the context.

    Raises:
        ConfigError: not even two blocks fit, or what `gpu_bytes` raises.
    """
    load = _load(model, mode, mode_config(mode, 2 * BLOCK, **knobs), context, drafter, rows)
    least, most = 2, max(2, context // BLOCK + 1)
    need = load.of(least)["total"]
    if need > nbytes:
        raise ConfigError(
            f"nbytes={nbytes:,} is not allowed: mode={mode!r} needs at least {need:,} bytes for {rows} rows of "
            f"{context:,} tokens."
        )
    while least < most:  # the largest number of slots that fits is in [least, most]
        middle = (least + most + 1) // 2
        if load.of(middle)["total"] <= nbytes:
            least = middle
        else:
            most = middle - 1
    return least * BLOCK
