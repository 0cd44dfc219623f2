"""`oasis-hf bench`: the time of a decode step over a model of random weights, and where its bytes go.

With random weights what is missed means nothing, so misses are forced: every KV head of every layer fetches exactly C
blocks a step, uniformly drawn for each row and head. The full KV is not made either: all pages of a row's blocks lie
somewhere in a pinned pool of `pool_gib`, which the link can't tell.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import __version__, parallel
from .attach import cache_name, ranks_of
from .cache import OasisCache
from .config import BLOCK, ConfigError, OasisConfig
from .drafters.base import Drafter
from .forced import Injected, fetches_of, forced_misses, mean_fetched, parts, traced
from .lookahead import draft_rows, predicts_blocks, wants_drafts
from .roofline.shape import ModelShape
from .stopwatch import Span, between, median
from .store import HostStore, PagePool

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "tiny-moe": dict(
        model_type="qwen3_moe", hidden_size=256, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        vocab_size=1024, max_position_embeddings=131072,
    ),
    "tiny": dict(
        model_type="qwen3", hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=131072,
    ),
}  # fmt: skip


WARM = {"cuda": 8, "cpu": 1}
"""Steps before those that are timed: on a GPU eager ones, compilation and capture."""

STEPS: dict[str, tuple[str, dict[str, bool]]] = {
    "bare": ("model without keys and values", dict(working_set=False, predict=False, transfer=False)),
    "model": ("model over the working set", dict(predict=False, transfer=False)),
    "score": ("and scores", dict(select=False)),
    "prediction": ("and prediction", dict(transfer=False)),
    "whole": ("and transfer: the whole step", {}),
}
"""Parts of a step that are timed: a name, and what `forced.parts` leaves out."""

DENSE_ROOM = 256
"""Tokens that the dense mode's cache holds beyond the context."""


@dataclass
class Reading:
    """ms: median of a step, its replay alone where it is captured; call_ms: as its caller sees it; bytes: moved over
    the link in it; graph: what was replayed; hbm_bytes: what the step must read of the GPU's memory once."""

    what: str
    rows: int
    ms: float
    call_ms: float
    bytes: int
    graph: str
    hbm_bytes: int = 0

    def floor_ms(self, ceilings: "Ceilings") -> float:
        """What the slower of memory and link takes at the least."""
        return 1e3 * max(self.hbm_bytes / ceilings.hbm, self.bytes / ceilings.link)

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.ms * 1e3

    @property
    def link(self) -> float:
        """Bytes a second."""
        return self.bytes / self.ms * 1e3


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second. hbm: read and written by a copy on the device; link: from pinned memory to the device."""

    hbm: float
    link: float

    @classmethod
    def measured(cls, size: int = 1 << 30) -> "Ceilings":
        """Of the GPU here, by copies of `size` bytes and a quarter of that."""
        source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        pinned = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=True)

        def seconds(copy: Callable[[], Any]) -> float:
            times: list[Span] = []
            for _ in range(7):
                with between(times):
                    copy()
            return median(times[2:]) / 1e3

        hbm = 2 * size / seconds(lambda: target.copy_(source))
        link = pinned.numel() / seconds(lambda: target[: pinned.numel()].copy_(pinned, non_blocking=True))
        return cls(hbm, link)


def hbm_bytes(model: Any, cache: OasisCache, context: int, predicts: bool, attends: bool = True) -> int:
    """What a step must read of this rank's device's memory: weights (of experts those that its tokens choose, if all
    are alike), K and V of the working set where it attends and, where it predicts, the summaries of closed blocks."""
    state = cache.state
    drafts = draft_rows(state.config) if state.grows_sparse and wants_drafts(state.config) else 0
    drafts *= cache.drafter.proposes
    tokens = len(state.need_rows()) * (1 + drafts)
    if parallel.size(model) > 1:
        skipped = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        tied = head is not None and head.weight is skipped
        total = sum(parallel.local(weight).nbytes for weight in model.parameters() if tied or weight is not skipped)
    else:
        total = round(ModelShape.of_model(model, next(model.parameters()).dtype).weights_read(tokens))
    for layer in cache.sparse_layers:
        if attends:
            total += layer.working_set.keys.nbytes + layer.working_set.values.nbytes
        if predicts and predicts_blocks(cache.state.config):
            total += layer.summaries.nbytes * (context // BLOCK) // layer.summaries.vectors.shape[2]
    return total


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
    model: Any, config: OasisConfig, rows: int, context: int, pool_gib: float | PagePool, drafter: Any = None
) -> OasisCache:
    """A cache as after a prompt of `context` tokens a row, without having run one.

    Args:
        pool_gib: of pages that stand for the full KV; or pages for all of it, each block its own.
    """
    cache = OasisCache(model, config, drafter=drafter)
    state = cache.state
    text = model.config.get_text_config(decoder=True)
    heads, dim = parallel.local_heads(model, text.num_key_value_heads), text.head_dim
    queries = parallel.local_heads(model, text.num_attention_heads)
    device, dtype = cache.device, next(model.parameters()).dtype
    state.open_rows(rows).extend(torch.ones((rows, context), dtype=torch.bool))
    keys = torch.empty((rows, heads, 1, dim), dtype=dtype, device=device)
    if isinstance(pool_gib, PagePool):
        whole: Any = pool_gib
        state.make_store = lambda rows, heads, dim, dtype, device: HostStore(
            state.sparse_layers, rows, heads, dim, dtype, device, pool=whole
        )
    store = state.open_store(keys)
    assert isinstance(store, HostStore)
    blocks = -(-context // BLOCK) + (DENSE_ROOM // BLOCK)
    extent = (store.table.shape[0], rows, heads, blocks)
    if isinstance(pool_gib, PagePool):
        pages = pool_gib.allocate(math.prod(extent))
        store._set_table(pages[torch.randperm(len(pages))].view(extent))
    else:
        pages = store.pool.allocate(int(pool_gib * 2**30) // store.pool.page_bytes)
        store.pool.pages[: len(pages)].fill_(0.01)
        store._set_table(torch.randint(len(pages), extent))
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
        layer.recent = torch.randn(rows, queries, 1, dim, dtype=dtype, device=device).repeat(1, 1, state.window, 1)
        layer.scaling = dim**-0.5
    ids = torch.randint(text.vocab_size, (rows, context), device=device)
    cache.drafter.observe(ids, torch.zeros(rows, dtype=torch.int64, device=device), None)
    state.first_due = False
    state.dirty_from = [blocks] * rows
    return cache


class _Timed:
    """A graph whose replays are timed. times: their events; meet: called before each."""

    def __init__(self, graph: torch.cuda.CUDAGraph, meet: Callable[[], None]) -> None:
        self.graph, self.meet = graph, meet
        self.times: list[Span] = []

    def replay(self) -> None:
        self.meet()
        with between(self.times):
            self.graph.replay()


@torch.no_grad()
def step_ms(model: Any, cache: OasisCache, steps: int) -> tuple[float, float]:
    """Median milliseconds of a decode step: its replay alone, and as its caller sees it with no work between steps. On
    a CPU nothing is replayed, and both are the call's. Ranks that a model is split over begin their replays together,
    so that none's holds the wait for another's Python."""
    rows, on_gpu = len(cache.state.need_rows()), cache.device.type == "cuda"
    token = torch.full((rows, 1), 7, device=cache.device)
    calls: list[Span] = []
    warm, group = WARM[cache.device.type], ranks_of(model)
    together = torch.zeros(1, device=cache.device)

    def meet() -> None:
        if group is not None:
            dist.all_reduce(together, group=group)

    for step in range(steps + warm):
        if step == warm:
            calls.clear()
            for step_graph in cache.graphs.captured.values():
                step_graph.graph = _Timed(step_graph.graph, meet)  # type: ignore[assignment]
        at = torch.full_like(token, cache.get_seq_length())
        with between(calls, on_gpu):
            model(input_ids=token, position_ids=at, **{cache_name(model): cache}, logits_to_keep=1)
        if on_gpu:
            torch.cuda.synchronize()
    replays = [time for have in cache.graphs.captured.values() for time in getattr(have.graph, "times", ())]
    return median(replays or calls), median(calls)


def bench(
    model: Any, rows: int, context: int, steps: int = 30, pool_gib: float | PagePool = 4, graphs: bool = True,
    compiled: bool = True, parts_of: Sequence[str] = ("model", "prediction", "whole"),
    shares: Sequence[float] | None = None, drafted: float = 1, **knobs: Any,
) -> list[Reading]:  # fmt: skip
    """Readings of the step whole, without its transfer, and without prediction. shares: as in `fetches_of`;
    bytes are then what the trace moves on average. drafted: rows whose draft predicts; recent queries do in the
    others."""
    readings = []
    for part in parts_of:
        what, left = STEPS[part]
        config = OasisConfig(graphs=graphs, compile_after=0 if compiled else None, **knobs)
        with forced_misses(True), fetches_of(shares), parts(**left):
            does = left.get("predict", True), left.get("working_set", True)
            readings.append(_reading(what, model, config, rows, context, steps, pool_gib, *does, Injected(drafted)))
            if not left.get("transfer", True):
                readings[-1].bytes = 0  # the counters are the selection's
            elif shares is not None:
                readings[-1].bytes = round(readings[-1].bytes * mean_fetched(shares) / (len(shares) - 1))
    return readings


def dense(
    model: Any, rows: int, context: int, steps: int = 30, pool_gib: float | PagePool = 4, graphs: bool = True,
    compiled: bool = True,
) -> Reading:  # fmt: skip
    """The same graph and modules over the whole context on the GPU: one query, nothing predicted or fetched."""
    config = OasisConfig(
        budget=context + DENSE_ROOM, lookahead="none", graphs=graphs, compile_after=0 if compiled else None,
        tokens_per_summary=16,
    )  # fmt: skip
    return _reading("dense, all on the GPU", model, config, rows, context, steps, pool_gib, False)


def _reading(
    what: str, model: Any, config: OasisConfig, rows: int, context: int, steps: int, pool_gib: float | PagePool,
    predicts: bool, attends: bool = True, drafter: Drafter | None = None,
) -> Reading:  # fmt: skip
    cache = filled(model, config, rows, context, pool_gib, drafter)
    before = int(cache.stats()["fetched"].sum())
    read = hbm_bytes(model, cache, context, predicts, attends)
    ms, call_ms = step_ms(model, cache, steps)
    moved = (
        (int(cache.stats()["fetched"].sum()) - before) * cache.state.block_bytes // (steps + WARM[cache.device.type])
    )
    graph = graph_of(cache)
    del cache
    torch.cuda.empty_cache()
    return Reading(what, rows, ms, call_ms, moved, graph, read)


def graph_of(cache: OasisCache) -> str:
    """What its steps were replayed with."""
    graphs = cache.graphs
    if graphs.refused:
        return f"none: {graphs.refused}"
    if graphs.unfused or cache.state.config.compile_after is None:
        return f"stock layers{': ' + graphs.unfused if graphs.unfused else ''}"
    return "compiled layers"


def main(args: argparse.Namespace) -> int:
    """The command: a table a row count, and JSON where asked.

    Raises:
        ConfigError: no GPU, or a shape or share that is not known.
    """
    from rich.console import Console
    from rich.table import Table

    if args.shape not in SHAPES:
        raise ConfigError(f"--shape {args.shape!r} is not known: use one of {', '.join(SHAPES)}.")
    if not 0 <= args.drafted <= 1:
        raise ConfigError(f"--drafted {args.drafted} is not a share of the rows: use 0 to 1.")
    knobs = dict(
        budget=args.budget, fetch_ratio=args.fetch_ratio, lookahead=args.lookahead,
        tokens_per_summary=args.tokens_per_summary,
    )  # fmt: skip
    cap = OasisConfig(**knobs).fetch_cap(OasisConfig(**knobs).slots)  # refused before anything is made
    shares = None if args.trace is None else traced(args.trace, cap)
    if not torch.cuda.is_available():
        raise ConfigError("oasis-hf bench needs a CUDA device: times of the reference path on a CPU say nothing.")
    ceilings = Ceilings.measured()
    model = random_model(args.shape)
    title = f"{args.shape}, {args.context:,} tokens a row, budget {args.budget:,}, {args.lookahead}, random weights"
    table = Table(title=title)
    for column in (
        "rows", "a step of", "ms", "as called", "tokens/s", "over the link, MB", "link, GB/s", "floor, ms", "of floor",
        "graph",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("a step of", "graph") else "right")
    readings: list[Reading] = []
    how: dict[str, Any] = dict(graphs=not args.eager, compiled=not args.no_compile)
    for rows in args.rows:
        readings += bench(model, rows, args.context, args.steps, shares=shares, drafted=args.drafted, **how, **knobs)
    for rows in args.dense_rows:
        readings.append(dense(model, rows, args.context, args.steps, **how))
    for one in readings:
        table.add_row(
            str(one.rows), one.what, f"{one.ms:.2f}", f"{one.call_ms:.2f}", f"{one.tokens_per_second:,.0f}",
            f"{one.bytes / 1e6:,.1f}", f"{one.link / 1e9:.1f}", f"{one.floor_ms(ceilings):.2f}",
            f"{one.floor_ms(ceilings) / one.ms:.0%}", one.graph,
        )  # fmt: skip
    Console(width=130).print(table)
    if args.json:
        rows_out = [
            {**asdict(one), "tokens_per_second": one.tokens_per_second, "floor_ms": one.floor_ms(ceilings)}
            for one in readings
        ]
        told = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "oasis_hf": __version__, "shape": args.shape, "context": args.context, **knobs,
            "ceilings": asdict(ceilings),
        }  # fmt: skip
        args.json.write_text(
            json.dumps(
                {**told, "forced_misses": shares is None, "trace": shares, "drafted": args.drafted, "rows": rows_out},
                indent=1,
            )
            + "\n"
        )
    return 0
