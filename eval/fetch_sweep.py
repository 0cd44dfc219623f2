"""The fetch ratio from 0.01 to 1 (OasisKV, Table 2): traffic, throughput, the link's effective bandwidth, accuracy.

    python eval/fetch_sweep.py --quick
    python eval/fetch_sweep.py --out eval/results [--ratios ...] [--points forced teacher real] [--seconds 560]

forced: Qwen3-8B's shape, bfloat16, random weights, and every KV head of every layer fetches its whole cap C in every
step (of what is not resident: at a ratio of 1 a little less). teacher: SmolLM2 over real texts, what it moves by the
cache's counters and how well it follows a dense cache. real: the shape's step again, each KV head fetching as many
blocks a step as SmolLM2 did at that ratio, on average.

The effective bandwidth is that of whole steps, bytes by the counters over the step's time, as the paper has it: the
link's own is higher, since a step also does what does not move anything. A step is link-bound ("saturated") where its
bytes take longer at the link's memcpy rate, measured in the same run, than the model's step takes with nothing
predicted or moved.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import anchors
import report_tables as tables
import sweep
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, find, of, told
from teacher import Teacher, cap_of

from oasis_hf.bench import Ceilings

RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BANDWIDTH = 45e9
PARTS = ("forced", "teacher", "real")
TITLE = "Fetch ratio: traffic, throughput, bandwidth, accuracy"


def points(setting: Setting, teacher: Teacher, run: Sweep, ratios: list[float], link: float | None) -> Iterator[Point]:
    yield Point("forced", {"fetch_ratio": 0.0}, lambda: told(setting.step("model"), cap=0, cap_bytes=0, link_copy=link))
    for ratio in ratios:
        yield Point("forced", {"fetch_ratio": ratio}, lambda ratio=ratio: forced(setting, ratio))
    for ratio in ratios:
        yield Point("teacher", {"fetch_ratio": ratio}, lambda ratio=ratio: teacher.row(setting.budget, ratio))
    for ratio in ratios:
        seen = find(run.rows, "teacher", fetch_ratio=ratio)
        if seen is not None and seen["blocks"] > 0:
            yield Point("real", {"fetch_ratio": ratio}, lambda mean=seen["blocks"]: real(setting, mean))


def forced(setting: Setting, ratio: float) -> Row:
    cap = cap_of(setting.budget, ratio)
    return told(setting.step(fetch_ratio=ratio), cap=cap, cap_bytes=setting.cap_bytes(cap))


def real(setting: Setting, mean: float) -> Row:
    """A step in which a KV head fetches the whole numbers next to `mean` blocks, so often that this is the mean."""
    cap = math.ceil(mean)
    shares = [0.0] * (cap - 1) + [cap - mean, 1 - (cap - mean)]
    return told(setting.step(fetch_ratio=cap / setting.k, shares=shares), cap=cap, blocks=mean)


def saturated(result: Row) -> list[Row]:
    """Forced steps that the link bounds."""
    alone = find(result["rows"], "forced", fetch_ratio=0.0)
    if alone is None or not alone["link_copy"]:
        return []
    return [row for row in of(result, "forced") if row["bytes"] / alone["link_copy"] * 1e3 > alone["ms"]]


def bars(result: Row) -> list[Row]:
    out = []
    for part, moved, cap in (("forced", "bytes", "cap_bytes"), ("teacher", "bytes_per_step", "most_bytes_per_step")):
        rows = sorted(of(result, part), key=lambda row: row["fetch_ratio"])
        if len(rows) > 1:
            rises = all(a[moved] <= b[moved] for a, b in zip(rows, rows[1:]))
            most = max(row[moved] / row[cap] for row in rows if row[cap])
            out.append(tables.bar(f"{part}: traffic rises with the ratio", float(rises), 1))
            out.append(tables.bar(f"{part}: traffic as a share of the cap, at most", most, 1, at_most=True))
    bound = saturated(result)
    if bound:
        least = min(row["link"] for row in bound) / 1e9
        out.append(tables.bar("effective bandwidth where saturated, least, GB/s", least, BANDWIDTH / 1e9))
    return out


def lines(result: Row) -> list[Lines]:
    head = ["fetch ratio", "C", "MB a step, forced", "of the cap", "ms", "tokens/s", "link, GB/s", "KB a token"]
    head += ["blocks that SmolLM2 fetches", "tokens/s at that", "agreement", "KL", "perplexity, times dense's"]
    bound, rows = saturated(result), []
    for row in sorted(of(result, "forced"), key=lambda row: row["fetch_ratio"]):
        ratio = row["fetch_ratio"]
        seen, real = (find(result["rows"], part, fetch_ratio=ratio) for part in ("teacher", "real"))
        rows.append([
            f"{ratio:g}" if ratio else "nothing predicted", f"{row['cap']}", f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes'] / row['cap_bytes']:.1%}" if row["cap_bytes"] else "", f"{row['ms']:.2f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['link'] / 1e9:.1f}{' (saturated)' if row in bound else ''}",
            f"{row['bytes_a_token'] / 1e3:,.0f}", f"{seen['blocks']:.2f}" if seen else "",
            f"{real['tokens_per_second']:,.0f}" if real else "",
            *([f"{seen['agreement']:.2%}", f"{seen['kl']:.5f}", f"{seen['perplexity_times']:.4f}"] if seen
              else [""] * 3),
        ])  # fmt: skip
    return [("Fetch ratios", head, rows), *([tables.bars(result["bars"])] if result["bars"] else [])]


def draw(result: Row, path: Path) -> None:
    figure, ((left, middle, right),) = sweep.chart(1, 3, (5, 4))
    rows = [row for row in of(result, "forced") if row["fetch_ratio"]]
    at = [row["fetch_ratio"] for row in rows]
    left.plot(at, [row["tokens_per_second"] for row in rows], "o-", label="every KV head fetches C")
    real = of(result, "real")
    left.plot(
        [row["fetch_ratio"] for row in real], [row["tokens_per_second"] for row in real], "s-",
        label="as many as SmolLM2 fetches",
    )  # fmt: skip
    paper = anchors.PAPER_FETCH
    left.plot(list(paper), [one[1] for one in paper.values()], "^--", color="gray", label="the paper (H100)")
    left.set(xscale="log", yscale="log", xlabel="fetch ratio", ylabel="tokens/s", ylim=(None, None))
    middle.plot(at, [row["link"] / 1e9 for row in rows], "o-", label="effective, whole steps")
    middle.axhspan(*(x / 1e9 for x in anchors.PAPER_LINK), color="gray", alpha=0.3, label="the paper, past 0.1")
    middle.axhline(BANDWIDTH / 1e9, color="black", linestyle=":", label="bar where saturated")
    middle.set(xscale="log", xlabel="fetch ratio", ylabel="GB/s over the link", ylim=(0, None))
    seen = of(result, "teacher")
    right.plot([row["bytes_per_step"] / 1e6 for row in seen], [row["kl"] for row in seen], "o-", label="SmolLM2")
    for row in seen:
        right.annotate(f"{row['fetch_ratio']:g}", (row["bytes_per_step"] / 1e6, row["kl"]))
    right.set(xlabel="MB moved a row and step, SmolLM2", ylabel="KL(dense || sparse), nats", ylim=(0, None))
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
        parser.add_argument("--rows", type=int, default=44)

    args = sweep.arguments(__doc__, PARTS, own)
    for ratio in args.ratios:
        if not 0 < ratio <= 1:
            raise SystemExit(f"--ratios {ratio:g} is not allowed: use numbers above 0, up to 1.")
    setting = sweep.QUICK if args.quick else Setting(rows=args.rows)
    ratios = [0.1, 0.5] if args.quick else sorted(args.ratios)
    teacher = Teacher(args.device, args.quick)
    settings = {"shape": setting.shape, "rows": setting.rows, "context": setting.context, "budget": setting.budget}
    run = Sweep("fetch_sweep", TITLE, args, {**settings, "teacher": teacher.settings})
    link = None if args.quick else Ceilings.measured().link
    run.run(points(setting, teacher, run, ratios, link))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
