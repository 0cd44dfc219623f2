"""`oasis-hf bench`: the time of a decode step over a model of random weights, and where its bytes go.

With random weights what is missed means nothing, so misses are forced: every KV head of every layer fetches exactly C
uniformly random blocks a step. The full KV is not made either: all pages of a row's blocks lie somewhere in a pinned
pool of `pool_gib`, which the link can't tell.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import __version__
from .cache import OasisCache
from .config import BLOCK, ConfigError, OasisConfig
from .layers import OasisLayer
from .store.host import HostStore
from .summaries import Summaries

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        model_type="qwen3", hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=131072,
    ),
}  # fmt: skip


WARM = 8
"""Steps before those that are timed: eager ones, compilation and capture."""

CHANCES = 8
"""Draws of chance scores a layer has."""

STEPS = {
    "model": ("model over the working set", False, False),
    "prediction": ("and prediction", True, False),
    "whole": ("and transfer: the whole step", True, True),
}
"""Parts of a step that are timed: a name, and whether blocks are predicted and transferred."""

DENSE_ROOM = 256
"""Tokens that the dense mode's cache holds beyond the context."""


@dataclass
class Reading:
    """ms: median of a step, its replay alone where it is captured; call_ms: as its caller sees it; bytes: moved over
    the link in it; graph: what was replayed."""

    what: str
    rows: int
    ms: float
    call_ms: float
    bytes: int
    graph: str

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.ms * 1e3

    @property
    def link(self) -> float:
        """Bytes a second."""
        return self.bytes / self.ms * 1e3


def random_model(shape: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of a shape in `SHAPES` with random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SHAPES[shape])
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        finally:
            torch.set_default_dtype(before)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.02)
    return model.eval()


def filled(
    model: Any, config: OasisConfig, rows: int, context: int, pool_gib: float, drafter: Any = None
) -> OasisCache:
    """A cache as after a prompt of `context` tokens a row, without having run one."""
    cache = OasisCache(model, config, drafter=drafter)
    state = cache.state
    text = model.config.get_text_config(decoder=True)
    heads, dim = text.num_key_value_heads, text.head_dim
    device, dtype = cache.device, next(model.parameters()).dtype
    state.open_rows(rows).extend(torch.ones((rows, context), dtype=torch.bool))
    keys = torch.empty((rows, heads, 1, dim), dtype=dtype, device=device)
    store = state.open_store(keys)
    assert isinstance(store, HostStore)
    blocks = -(-context // BLOCK) + (DENSE_ROOM // BLOCK)
    pages = store.pool.allocate(int(pool_gib * 2**30) // store.pool.page_bytes)
    store.pool.pages[: len(pages)].fill_(0.01)
    layers = store.table.shape[0]
    store._set_table(torch.randint(len(pages), (layers, rows, heads, blocks)))
    store.blocks = [blocks] * rows
    for layer in cache.sparse_layers:
        layer.lazy_initialization(keys, keys)
        layer.working_set.ensure(blocks)
        layer.summaries.ensure(blocks)
        layer.summaries.vectors.random_(-90, 90) if layer.summaries.vectors.dtype == torch.int8 else (
            layer.summaries.vectors.normal_()
        )
        layer.summaries.scales.fill_(0.01)
        own = layer.working_set
        own.keys.normal_()
        own.values.normal_()
        last = (context - 1) // BLOCK
        slots = own.allocated
        if slots > last:
            own.table.copy_(torch.arange(slots, device=device))
            own.table.masked_fill_(own.table > last, -1)
        else:
            chance = torch.rand((rows * heads, last), device=device).argsort(1)[:, : slots - 1]
            own.table[:, :, : slots - 1] = chance.view(rows, heads, -1)
            own.table[:, :, slots - 1] = last
        layer.recent = torch.randn(rows, text.num_attention_heads, 1, dim, dtype=dtype, device=device).repeat(
            1, 1, state.window, 1
        )
        layer.scaling = dim**-0.5
    ids = torch.randint(text.vocab_size, (rows, context), device=device)
    cache.drafter.observe(ids, torch.zeros(rows, dtype=torch.int64, device=device), None)
    state.first_due = False
    state.dirty_from = [blocks] * rows
    return cache


@contextmanager
def forced_misses(on: bool) -> Iterator[None]:
    """Scores are made as always, then replaced by chance, one of CHANCES drawn in turn: what is predicted is anything,
    and C of it are fetched. What closes after the first step is not predicted."""
    score = Summaries.score
    drawn: dict[int, torch.Tensor] = {}
    turns: dict[str, Any] = {}

    def chance(self: Summaries, query: Any, closed: Any, *rest: Any) -> torch.Tensor:
        scores = score(self, query, closed, *rest)
        if not drawn:
            turns["next"], turns["first"] = torch.zeros(1, dtype=torch.int64, device=scores.device), id(self)
        if id(self) not in drawn:
            rows, heads, most = self.vectors.shape[:3]
            noise = torch.rand((CHANCES, rows, heads, most), device=scores.device)
            drawn[id(self)] = noise.masked_fill_(
                torch.arange(most, device=scores.device) >= closed[:, None, None], -torch.inf
            )
        if id(self) == turns["first"]:
            turns["next"].add_(1).remainder_(CHANCES)
        return drawn[id(self)][..., : scores.shape[2]].index_select(0, turns["next"])[0]

    try:
        if on:
            Summaries.score = chance  # type: ignore[method-assign, assignment]
        yield
    finally:
        Summaries.score = score  # type: ignore[method-assign]


@contextmanager
def parts(predict: bool, transfer: bool) -> Iterator[None]:
    """Steps without prediction, or with prediction but no transfer: what each adds."""
    fetch, captured, gather = OasisLayer._fetch, OasisLayer._predict, HostStore.gather
    try:
        if not predict:
            OasisLayer._fetch = lambda self, *args: None  # type: ignore[method-assign]
            OasisLayer._predict = lambda self, *args: None  # type: ignore[method-assign]
        if not transfer:
            HostStore.gather = lambda self, *args: None  # type: ignore[method-assign]
        yield
    finally:
        OasisLayer._fetch, OasisLayer._predict = fetch, captured  # type: ignore[method-assign]
        HostStore.gather = gather  # type: ignore[method-assign]


class _Timed:
    """A graph whose replays are timed. times: their events."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph
        self.times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        with _between(self.times):
            self.graph.replay()


@contextmanager
def _between(times: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> Iterator[None]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    yield
    end.record()
    times.append((begin, end))


def _median(times: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


@torch.no_grad()
def step_ms(model: Any, cache: OasisCache, steps: int) -> tuple[float, float]:
    """Median milliseconds of a decode step: its replay alone, and as its caller sees it with no work between steps."""
    rows = len(cache.state.need_rows())
    token = torch.full((rows, 1), 7, device=cache.device)
    calls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for step in range(steps + WARM):
        if step == WARM:
            calls.clear()
            for one in cache.graphs.captured.values():
                one.graph = _Timed(one.graph)  # type: ignore[assignment]
        at = torch.full_like(token, cache.get_seq_length())
        with _between(calls):
            model(input_ids=token, position_ids=at, past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
    replays = [time for one in cache.graphs.captured.values() for time in getattr(one.graph, "times", ())]
    return _median(replays or calls), _median(calls)


def bench(
    model: Any, rows: int, context: int, steps: int = 30, pool_gib: float = 4, graphs: bool = True,
    compiled: bool = True, parts_of: Sequence[str] = ("model", "prediction", "whole"), **knobs: Any,
) -> list[Reading]:  # fmt: skip
    """Readings of the step whole, without its transfer, and without prediction."""
    readings = []
    for part in parts_of:
        what, predict, transfer = STEPS[part]
        config = OasisConfig(graphs=graphs, compile_after=0 if compiled else None, **knobs)
        with forced_misses(True), parts(predict, transfer):
            readings.append(_reading(what, model, config, rows, context, steps, pool_gib))
    return readings


def dense(
    model: Any, rows: int, context: int, steps: int = 30, pool_gib: float = 4, graphs: bool = True,
    compiled: bool = True,
) -> Reading:  # fmt: skip
    """The same graph and modules over the whole context on the GPU: one query, nothing predicted or fetched."""
    config = OasisConfig(
        budget=context + DENSE_ROOM, lookahead="none", graphs=graphs, compile_after=0 if compiled else None,
        tokens_per_summary=16,
    )  # fmt: skip
    return _reading("dense, all on the GPU", model, config, rows, context, steps, pool_gib)


def _reading(
    what: str, model: Any, config: OasisConfig, rows: int, context: int, steps: int, pool_gib: float
) -> Reading:
    cache = filled(model, config, rows, context, pool_gib)
    before = int(cache.stats()["fetched"].sum())
    ms, call_ms = step_ms(model, cache, steps)
    moved = (int(cache.stats()["fetched"].sum()) - before) * cache.state.block_bytes // (steps + WARM)
    graph = f"none: {cache.graphs.refused}" if cache.graphs.refused else "compiled layers"
    if not cache.graphs.refused and (cache.graphs.unfused or config.compile_after is None):
        graph = f"stock layers{': ' + cache.graphs.unfused if cache.graphs.unfused else ''}"
    del cache
    torch.cuda.empty_cache()
    return Reading(what, rows, ms, call_ms, moved, graph)


def main(args: argparse.Namespace) -> int:
    """The command: a table a row count, and JSON where asked.

    Raises:
        ConfigError: no GPU, or a shape that is not known.
    """
    from rich.console import Console
    from rich.table import Table

    if args.shape not in SHAPES:
        raise ConfigError(f"--shape {args.shape!r} is not known: use one of {', '.join(SHAPES)}.")
    knobs = dict(
        budget=args.budget, fetch_ratio=args.fetch_ratio, lookahead=args.lookahead,
        tokens_per_summary=args.tokens_per_summary,
    )  # fmt: skip
    OasisConfig(**knobs)  # refused before anything is made
    if not torch.cuda.is_available():
        raise ConfigError("oasis-hf bench needs a CUDA device: times of the reference path on a CPU say nothing.")
    model = random_model(args.shape)
    title = f"{args.shape}, {args.context:,} tokens a row, budget {args.budget:,}, {args.lookahead}, random weights"
    table = Table(title=title)
    for column in ("rows", "a step of", "ms", "as called", "tokens/s", "over the link, MB", "link, GB/s", "graph"):
        table.add_column(column, justify="left" if column in ("a step of", "graph") else "right")
    readings: list[Reading] = []
    how: dict[str, Any] = dict(graphs=not args.eager, compiled=not args.no_compile)
    for rows in args.rows:
        readings += bench(model, rows, args.context, args.steps, **how, **knobs)
    for rows in args.dense_rows:
        readings.append(dense(model, rows, args.context, args.steps, **how))
    for one in readings:
        table.add_row(
            str(one.rows), one.what, f"{one.ms:.2f}", f"{one.call_ms:.2f}", f"{one.tokens_per_second:,.0f}",
            f"{one.bytes / 1e6:,.1f}", f"{one.link / 1e9:.1f}", one.graph,
        )  # fmt: skip
    Console(width=130).print(table)
    if args.json:
        rows_out = [{**asdict(one), "tokens_per_second": one.tokens_per_second} for one in readings]
        told = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "oasis_hf": __version__, "shape": args.shape, "context": args.context, **knobs,
        }  # fmt: skip
        args.json.write_text(json.dumps({**told, "forced_misses": True, "rows": rows_out}, indent=1) + "\n")
    return 0
