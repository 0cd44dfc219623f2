"""The budget from K = 64 to 256 blocks: throughput, and how well a dense cache is followed (OasisKV's K sweep).

    python eval/k_sweep.py --quick
    python eval/k_sweep.py --out eval/results [--k 64 96 128 160 192 256] [--points shape teacher] [--seconds 560]

shape: Qwen3-8B's, bfloat16, random weights; the step with nothing predicted, and whole with every KV head fetching its
cap, the default share of K. Beside it our own dense mode with as many rows as 80 GB hold. teacher: SmolLM2 over real
texts at 7,000 tokens, the same budgets and cap.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import sweep
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, find, of, told
from teacher import Teacher, cap_of

from oasis_hf import OasisConfig
from oasis_hf.config import BLOCK

KS = (64, 96, 128, 160, 192, 256)
PARTS = ("shape", "teacher")
TITLE = "Budget: throughput and accuracy by blocks selected"
RATIO = OasisConfig().fetch_ratio


def points(setting: Setting, teacher: Teacher, ks: list[int], dense_rows: int) -> Iterator[Point]:
    yield Point("shape", {"k": 0}, lambda: told(setting.dense(dense_rows)))
    for k in ks:
        yield Point("shape", {"k": k}, lambda k=k: shape(setting, k))
    for k in ks:
        yield Point("teacher", {"k": k}, lambda k=k: teacher.row((k + 1) * BLOCK, RATIO))


def shape(setting: Setting, k: int) -> Row:
    budget = (k + 1) * BLOCK
    alone = setting.step("model", budget=budget)
    return told(setting.step(budget=budget), model_ms=alone.ms, cap=cap_of(budget, RATIO), budget=budget)


def bars(result: Row) -> list[Row]:
    """None: the paper gives its factors (1.89 at K = 64, 1.39 at 192) for a reasoning load, `reasoning.py`'s."""
    return []


def lines(result: Row) -> list[Lines]:
    dense, rows = find(result["rows"], "shape", k=0), []
    head = ["K", "budget", "C", "rows", "ms, nothing predicted", "ms", "tokens/s", "times dense", "MB a step"]
    head += ["KB a token", "agreement", "95%", "KL", "perplexity, times dense's"]
    if dense is not None:
        shown = ["dense", "all", "", f"{dense['rows']}", "", f"{dense['ms']:.2f}", f"{dense['tokens_per_second']:,.0f}"]
        rows.append([*shown, "1", *[""] * 6])
    for k in sorted({row["k"] for row in result["rows"] if row["k"]}):
        row, seen = (find(result["rows"], part, k=k) for part in PARTS)
        shown = [str(k), f"{(k + 1) * BLOCK:,}"]
        if row:
            times = f"{row['tokens_per_second'] / dense['tokens_per_second']:.2f}" if dense else ""
            shown += [f"{row['cap']}", f"{row['rows']}", f"{row['model_ms']:.2f}", f"{row['ms']:.2f}"]
            shown += [f"{row['tokens_per_second']:,.0f}", times, f"{row['bytes'] / 1e6:,.1f}"]
            shown += [f"{row['bytes_a_token'] / 1e3:,.0f}"]
        shown += [""] * (10 - len(shown))
        if seen:
            low, high = seen["agreement_interval"]
            shown += [f"{seen['agreement']:.2%}", f"{low:.2%} to {high:.2%}", f"{seen['kl']:.5f}"]
            shown += [f"{seen['perplexity_times']:.4f}"]
        rows.append(shown + [""] * (len(head) - len(shown)))
    return [("Budgets", head, rows)]


def draw(result: Row, path: Path) -> None:
    figure, ((left, right),) = sweep.chart(1, 2, (5.5, 4))
    dense = find(result["rows"], "shape", k=0)
    rows = [row for row in of(result, "shape") if row["k"]]
    at = [row["k"] for row in rows]
    left.plot(at, [row["tokens_per_second"] for row in rows], "o-", label="whole step")
    left.plot(at, [row["rows"] / row["model_ms"] * 1e3 for row in rows], ".--", label="nothing predicted or moved")
    if dense is not None:
        left.axhline(dense["tokens_per_second"], color="black", label=f"dense, {dense['rows']} rows")
    left.set(xlabel="K, blocks selected", ylabel="tokens/s", ylim=(0, None))
    seen = of(result, "teacher")
    right.plot([row["k"] for row in seen], [row["kl"] for row in seen], "o-", label="KL(dense || sparse), nats")
    right.set(xlabel="K, blocks selected", ylabel="KL, nats", ylim=(0, None))
    other = right.twinx()
    other.plot([row["k"] for row in seen], [row["agreement"] * 100 for row in seen], "s--", color="#ee854a")
    other.set(ylabel="top-1 agreement (dashed), %")
    left.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--k", nargs="+", type=int, default=list(KS))
        parser.add_argument("--rows", type=int, default=44)
        parser.add_argument("--dense-rows", type=int, default=24)

    args = sweep.arguments(__doc__, PARTS, own)
    setting = sweep.QUICK if args.quick else Setting(rows=args.rows)
    ks, dense_rows = ([4, 8], 1) if args.quick else (sorted(args.k), args.dense_rows)
    teacher = Teacher(args.device, args.quick)
    settings = {"shape": setting.shape, "rows": setting.rows, "context": setting.context, "fetch_ratio": RATIO}
    run = Sweep("k_sweep", TITLE, args, {**settings, "teacher": teacher.settings})
    run.run(points(setting, teacher, ks, dense_rows))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
