"""A mixture of experts, dense while it pays: `sparsify` "never", "always" and "auto" at every batch that dense fits.

    python eval/moe.py --quick
    python eval/moe.py --out eval/results [--rows 1 2 4 ...] [--points never always auto] [--context 8192]

Qwen3-30B-A3B's shape, bfloat16, random weights made on the device (61 GB), 8,192 tokens a row, one token a row and
step, prefill excluded. Sparse steps run with forced misses: every KV head of every layer fetches its whole cap. Rows
rise until one more size does not fit; "auto" and "always" go on beyond what fits dense. "auto" is first given steps to
decide in, and knows of other batches what its own points in the same run have shown it. Which experts' implementation
was captured is told.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import report_tables as tables
import sweep
import torch
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, find, of, told

from oasis_hf import OasisConfig, bench
from oasis_hf.forced import Injected, forced_misses

PARTS = ("never", "auto", "always")
NAMES = {"never": "dense", "always": "sparse", "auto": "auto"}
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
RATIO = 0.05
DECIDES = 64
"""Steps before those of "auto" that are timed: capture, times to learn from, a turn, and one back."""

MOST = 1.03
"""Of a dense step's time, for "auto"."""

TITLE = "A mixture of experts, dense while it pays"
FULL = Setting("qwen3-30b-a3b", context=8192)
QUICK = Setting("tiny-moe", "cpu", sweep.QUICK.dtype, rows=2, context=600, budget=160, steps=2, pool_gib=0.02)


def points(setting: Setting, rows: list[int]) -> Iterator[Point]:
    """From few rows to many. What is held against each other is measured one after the other."""
    for count in rows:
        for part in PARTS:
            yield Point(part, {"rows": count}, lambda part=part, n=count: measure(setting, part, n), part)


def measure(setting: Setting, part: str, rows: int) -> Row:
    model, context = setting.model, setting.context
    config = OasisConfig(budget=setting.budget, fetch_ratio=RATIO, sparsify=part, compile_after=0)
    torch.manual_seed(rows)  # which experts tokens take, and what of them stays in L2, is then the same for all parts
    with forced_misses(True):
        cache = bench.filled(model, config, rows, context, setting.pool_gib, Injected(1))
        if part == "auto":
            bench.step_ms(model, cache, DECIDES)
        before = int(cache.stats()["fetched"].sum())
        ms, call_ms = bench.step_ms(model, cache, setting.steps)
    taken = setting.steps + bench.WARM[cache.device.type]
    moved = (int(cache.stats()["fetched"].sum()) - before) * cache.state.block_bytes // taken
    sparsity, graphs = cache.state.sparsity, cache.graphs
    read = bench.hbm_bytes(model, cache, context, predicts=cache.state.grows_sparse)
    one = bench.Reading(NAMES[part], rows, ms, call_ms, moved, bench.graph_of(cache), read)
    return told(
        one, dense=cache.state.dense, turns=0 if sparsity is None else sparsity.turns,
        why=None if sparsity is None else sparsity.why, experts=graphs.experts and graphs.experts.told(),
    )  # fmt: skip


def bars(result: Row) -> list[Row]:
    """At every batch that dense fits "auto" takes at most 3% longer; where sparse is the faster by more than that, so
    is "auto"."""
    slower, won = [], []
    for row in of(result, "auto"):
        dense, sparse = (find(result["rows"], part, rows=row["rows"]) for part in ("never", "always"))
        if dense:
            slower.append(row["ms"] / dense["ms"])
            if sparse and sparse["ms"] * MOST < dense["ms"]:
                won.append(dense["ms"] / row["ms"])
    out = []
    if slower:
        out.append(tables.bar("auto's step, times dense's, at its worst batch", max(slower), MOST, at_most=True))
    if won:
        out.append(tables.bar("where sparse wins: dense's step, times auto's, at its worst batch", min(won), 1.0))
    return out


def lines(result: Row) -> list[Lines]:
    rows = []
    for row in sorted(result["rows"], key=lambda row: (row["rows"], PARTS.index(row["part"]))):
        if not row["fits"]:
            rows.append([str(row["rows"]), row["part"], "does not fit", *[""] * 6])
            continue
        rows.append([
            str(row["rows"]), row["part"], f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
            "dense" if row["dense"] else "sparse", str(row["turns"]), f"{row['bytes_a_token'] / 1e6:,.2f}",
            row["experts"] or "as set", "" if row["graph"] == "compiled layers" else row["graph"],
        ])  # fmt: skip
    head = ["rows", "sparsify", "ms a step", "tokens/s", "steps are", "turns", "MB over the link a token", "experts",
            "not as captured"]  # fmt: skip
    return [
        (f"{result['settings']['context']:,} tokens a row", head, rows),
        *([tables.bars(result["bars"])] if result["bars"] else []),
    ]


def draw(result: Row, path: Path) -> None:
    figure, ((axes,),) = sweep.chart(1, 1, (6, 4.5))
    for part, style in zip(PARTS, ("s-", "o-", "x--")):
        rows = sorted(of(result, part), key=lambda row: row["rows"])
        axes.plot([row["rows"] for row in rows], [row["tokens_per_second"] for row in rows], style, label=NAMES[part])
    title = f"{result['settings']['shape']}, {result['settings']['context']:,} tokens a row"
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens/s", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", nargs="+", type=int, help=f"batch sizes (default: {' '.join(map(str, ROWS))})")
        parser.add_argument("--context", type=int, default=FULL.context, help="tokens a row (default: 8192)")
        parser.set_defaults(memory_gb=150)

    args = sweep.arguments(__doc__, PARTS, own)
    if args.context < 1:
        raise SystemExit(f"--context {args.context} is not allowed: use an integer >= 1.")
    setting = QUICK if args.quick else Setting(FULL.shape, context=args.context)
    rows = sorted(args.rows or ((1, 2) if args.quick else ROWS))
    settings = {"shape": setting.shape, "context": setting.context, "budget": setting.budget, "fetch_ratio": RATIO}
    run = Sweep("moe", TITLE, args, settings)
    run.run(points(setting, rows))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
