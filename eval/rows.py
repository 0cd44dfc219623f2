"""Throughput against rows at 16K and 32K (OasisKV, Fig. 11): this cache, its own dense mode, transformers' own caches.

    python eval/rows.py --quick
    python eval/rows.py --out eval/results [--contexts 16384 32768] [--rows 1 8 ...] [--points oasis dense stock]

Qwen3-8B's shape, bfloat16, random weights, one token a row and step, prefill excluded, batches of one length. Every KV
head of every layer fetches its whole cap. "dense" is our own: the same graph and compiled layers, all KV on the GPU.
"stock" is eager `DynamicCache`, and `StaticCache` compiled as generate does it, at one size only (it takes a minute).
Rows rise until one more size does not fit `--memory-gb` of the GPU. The host's memory is no limit here (pages lie in a
small pinned pool): what the rows' full KV would take there is told beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import anchors
import report_tables as tables
import sweep
from decode import stock_step
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, of, told

CONTEXTS = (16384, 32768)
ROWS = {"oasis": (1, 4, 8, 16, 32, 48, 64, 96, 128), "dense": (1, 4, 8, 12, 16, 24, 28), "stock": (1, 8, 12, 16, 24)}
PARTS = tuple(ROWS)
STATIC_ROWS = 16
"""Rows of the compiled `StaticCache`, at the first context."""

NAMES = {"oasis": "this cache", "dense": "own dense mode", "stock": "transformers"}
TITLE = "Throughput against rows"
RATIO = 0.05


def points(setting: Setting, contexts: list[int], rows: dict[str, list[int]], static: list[int]) -> Iterator[Point]:
    """In the order in which they matter: ours, dense, stock."""
    for part in PARTS:
        for context in contexts:
            for count in rows[part]:
                key = {"context": context, "rows": count, "static": False}
                yield Point(
                    part, key, lambda part=part, n=count, at=context: measure(setting, part, n, at), f"{part} {context}"
                )
    for count in static:
        key = {"context": contexts[0], "rows": count, "static": True}
        yield Point("stock", key, lambda n=count: measure(setting, "stock", n, contexts[0], True))


def measure(setting: Setting, part: str, rows: int, context: int, static: bool = False) -> Row:
    config = setting.model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * setting.dtype.itemsize
    if part == "oasis":
        one = setting.step(rows=rows, context=context, fetch_ratio=RATIO)
    elif part == "dense":
        one = setting.dense(rows, context)
    else:
        one = stock_step(setting.model, rows, context, static, setting.steps)
    return told(one, kv_bytes=rows * context * token)


def best(result: Row, part: str, context: int) -> Row | None:
    rows = [row for row in of(result, part) if row["context"] == context]
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)


def bars(result: Row) -> list[Row]:
    """Best rows of both within the same memory: at least the paper's gain over its dense (2.1 and up to 2.4 times)."""
    out = []
    for context, least in zip(CONTEXTS, (2.1, 2.4)):
        ours, dense = (best(result, part, context) for part in ("oasis", "dense"))
        if ours and dense:
            times = ours["tokens_per_second"] / dense["tokens_per_second"]
            out.append(tables.bar(f"{context:,} tokens: best of ours, times own dense's best", times, least))
        if ours and context in anchors.VLLM_DENSE:
            times = ours["tokens_per_second"] / max(speed for _, speed in anchors.VLLM_DENSE[context])
            out.append(tables.bar(f"{context:,} tokens: best of ours, times vLLM's best in 80 GB", times, least))
    return out


def lines(result: Row) -> list[Lines]:
    out = []
    for context in dict.fromkeys(row["context"] for row in result["rows"]):
        rows = []
        for row in (row for row in result["rows"] if row["context"] == context):
            name = f"{NAMES[row['part']]}{', StaticCache compiled' if row['static'] else ''}"
            if not row["fits"]:
                rows.append([name, str(row["rows"]), "does not fit", *[""] * 5])
                continue
            graph = row["graph"] if row["graph"].startswith(("none", "stock layers:")) else ""
            rows.append([
                name, str(row["rows"]), f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
                f"{row['bytes_a_token'] / 1e6:,.2f}" if row["part"] == "oasis" else "0",
                f"{row['hbm_bytes_a_token'] / 1e9:,.2f}" if row["hbm_bytes"] else "",
                f"{row['kv_bytes'] / 1e9:,.0f}", graph,
            ])  # fmt: skip
        head = ["", "rows", "ms a step", "tokens/s", "MB over the link a token", "GB of GPU memory read a token"]
        out.append((f"{context:,} tokens a row", [*head, "GB of full KV", "not as captured"], rows))
    return [*out, *([tables.bars(result["bars"])] if result["bars"] else [])]


def draw(result: Row, path: Path) -> None:
    contexts = list(dict.fromkeys(row["context"] for row in result["rows"]))
    figure, (line,) = sweep.chart(1, len(contexts), (6, 4.5))
    for context, axes in zip(contexts, line):
        for part, style in (("oasis", "o-"), ("dense", "s-"), ("stock", "^-")):
            rows = [row for row in of(result, part) if row["context"] == context and not row["static"]]
            axes.plot([row["rows"] for row in rows], [row["tokens_per_second"] for row in rows], style,
                      label=NAMES[part])  # fmt: skip
        fixed = [row for row in of(result, "stock") if row["context"] == context and row["static"]]
        axes.plot([row["rows"] for row in fixed], [row["tokens_per_second"] for row in fixed], "v", color="C2",
                  label="transformers, StaticCache compiled")  # fmt: skip
        others = [("dense vLLM + FA3, same card", anchors.VLLM_DENSE.get(context, []), "x--")]
        if context == 16384:
            others += [("paper: OasisKV (H100)", anchors.PAPER_ROWS_16K, "*:")]
            others += [("paper: dense vLLM (H100)", anchors.PAPER_DENSE_16K, "+:")]
        for (name, measured, style), colour in zip(others, ("black", "dimgray", "darkgray")):
            axes.plot(*zip(*measured), style, color=colour, label=name) if measured else None
        axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens/s", title=f"{context:,} tokens a row")
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
        parser.add_argument("--rows", nargs="+", type=int, help="the same for all parts, instead of each one's own")
        parser.add_argument("--no-static", action="store_true", help="leave the compiled StaticCache out")

    args = sweep.arguments(__doc__, PARTS, own)
    setting = sweep.QUICK if args.quick else Setting()
    contexts = [600] if args.quick else sorted(args.contexts)
    given = [1, 2] if args.quick else args.rows
    rows = {part: sorted(given or own) for part, own in ROWS.items()}
    static = [] if args.no_static else [2 if args.quick else STATIC_ROWS]
    settings = {"shape": setting.shape, "budget": setting.budget, "fetch_ratio": RATIO, "memory_gb": args.memory_gb}
    run = Sweep("rows", TITLE, args, settings)
    run.run(points(setting, contexts, rows, static))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
