"""A reasoning load from end to end (OasisKV, Fig. 13): short prompts, long outputs, rows that grow dense to sparse.

    python eval/reasoning.py --quick
    python eval/reasoning.py --out eval/results [--points oasis dense stock check real] [--seconds 560]

Qwen3-8B's shape, bfloat16, random weights; every KV head fetches its whole cap once a row is sparse. All rows begin
with a prompt of 128 tokens and end at 8,192 or 16,384. A whole run takes minutes, so steps are timed at chosen lengths,
as their caller sees them, and the time between is read off the straight line between two of them. That this is honest
is checked by a real run of reduced size (real): `model.generate` from 128 to 3,072 tokens with half the budget, every
token timed, beside the same integral from steps timed at chosen lengths (check). What grows on the way (summaries,
slots, and the captures that this takes) is in the real run alone. Prefill is left out.

"dense" is our own mode, all KV on the GPU; "stock" is transformers' eager `DynamicCache`. Each with as many rows as
`--memory-gb` holds at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anchors
import report_tables as tables
import sweep
import torch
from chains import endless
from decode import stock_step
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, of, told
from transformers import StoppingCriteria

from oasis_hf import OasisCache
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.forced import Injected, forced_misses

PARTS = ("oasis", "dense", "stock", "real", "check")
PROMPT = 128
ENDS = (8192, 16384)
LENGTHS = (256, 1024, 1984, 2304, 4096, 8192, 16384)
"""At which steps are timed; some 40 after 1,984 tokens a working set of 2,064 still holds all of a row."""

ROWS = {"oasis": (24, 64, 128), "dense": (24, 48), "stock": (24,)}
CHECK = {"rows": 16, "budget": 1040, "end": 3072, "lengths": (256, 960, 1152, 2048, 3072)}
RATIO = 0.05
NAMES = {"oasis": "this cache", "dense": "own dense mode", "stock": "transformers, DynamicCache"}
TITLE = "A reasoning load: short prompts, long outputs"


def points(setting: Setting, rows: dict[str, Any], lengths: Any, check: Row) -> Iterator[Point]:
    for part in ("oasis", "dense"):
        for count in rows[part]:
            for length in lengths:
                key = {"rows": count, "length": length}
                yield Point(
                    part, key, lambda part=part, n=count, at=length: timed(setting, part, n, at), f"{part} {count}"
                )
    yield Point("real", {"rows": check["rows"]}, lambda: real(setting, check["rows"], check["budget"], check["end"]))
    for length in check["lengths"]:
        key = {"rows": check["rows"], "length": length}
        yield Point("check", key, lambda at=length: timed(setting, "oasis", check["rows"], at, budget=check["budget"]))
    for count in rows["stock"]:
        for length in (lengths[0], lengths[len(lengths) // 2], lengths[-1]):
            key = {"rows": count, "length": length}
            yield Point("stock", key, lambda n=count, at=length: timed(setting, "stock", n, at), f"stock {count}")


def timed(setting: Setting, part: str, rows: int, length: int, **knobs: Any) -> Row:
    if part == "oasis":
        return told(setting.step(rows=rows, context=length, fetch_ratio=RATIO, **knobs))
    if part == "dense":
        return told(setting.dense(rows, length))
    return told(stock_step(setting.model, rows, length, False, setting.steps))


class Clock(StoppingCriteria):
    """When each token was there, as the host sees it."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def real(setting: Setting, rows: int, budget: int, end: int) -> Row:
    """`model.generate` from the prompt to `end` tokens a row."""
    model, clock = setting.model, Clock()
    with forced_misses(True, 2 * end // BLOCK), endless(model):  # summaries have room for more blocks than there are
        cache = OasisCache(
            model, budget=budget, fetch_ratio=RATIO, compile_after=0, host_capacity_tokens=end + BLOCK,
            drafter=Injected(1),
        )  # fmt: skip
        ids = torch.randint(1, model.config.vocab_size, (rows, PROMPT), device=setting.device)  # 0 would be padding
        model.generate(
            ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, max_new_tokens=end - PROMPT,
            do_sample=False, stopping_criteria=[clock], pad_token_id=0,
        )  # fmt: skip
    each = [b - a for a, b in zip(clock.stamps, clock.stamps[1:])]
    usual = statistics.median(each)
    slow = [one for one in each if one > 3 * usual]
    return {
        "end": end, "budget": budget, "steps": len(each), "seconds": sum(each), "median_ms": usual * 1e3,
        "tokens_per_second": rows * len(each) / sum(each), "slow_steps": len(slow), "slow_seconds": sum(slow),
        "captures": cache.graphs.captures, "bytes": int(cache.stats()["fetched"].sum()) * cache.state.block_bytes,
        "graph": cache.graphs.refused or cache.graphs.unfused or "compiled layers",
    }  # fmt: skip


def seconds(rows: list[Row], start: int, end: int) -> float | None:
    """Of the steps from `start` to `end` tokens a row, by straight lines between the lengths of `rows` (as the first
    one's before it); None: they do not reach so far."""
    curve = sorted((row["length"], row["call_ms"]) for row in rows)
    if not curve or curve[-1][0] < end:
        return None
    total, at = 0.0, start
    before = (0, curve[0][1])
    for length, ms in curve:
        stop = min(length, end)
        if stop > at:
            first, last = (_between(before, (length, ms), x) for x in (at, stop))
            total, at = total + (stop - at) * (first + last) / 2, stop
        before = (length, ms)
    return total / 1e3


def _between(one: tuple[int, float], other: tuple[int, float], at: int) -> float:
    return one[1] + (other[1] - one[1]) * (at - one[0]) / (other[0] - one[0])


def overall(result: Row, part: str, rows: int, end: int) -> float | None:
    """Tokens a second from the prompt to `end` tokens a row."""
    spent = seconds([row for row in of(result, part) if row["rows"] == rows], PROMPT, end)
    return None if spent is None else rows * (end - PROMPT) / spent


def best(result: Row, part: str, end: int) -> float:
    counts = {row["rows"] for row in of(result, part)}
    return max((overall(result, part, count, end) or 0 for count in counts), default=0)


def checked(result: Row) -> tuple[Row, float] | None:
    """The real run, and the seconds that the integral gives it."""
    for row in of(result, "real"):
        # Its first step is already behind the first stamp.
        spent = seconds(of(result, "check"), PROMPT + 1, row["end"])
        if spent is not None:
            return row, spent
    return None


def bars(result: Row) -> list[Row]:
    out = []
    gain = anchors.PAPER_REASONING[0] / anchors.PAPER_REASONING[1]
    for end in result["settings"]["ends"]:
        ours, dense = best(result, "oasis", end), best(result, "dense", end)
        if ours and dense:
            out.append(tables.bar(f"to {end:,} tokens: times own dense, both with their best rows", ours / dense, gain))
    run = checked(result)
    if run is not None:
        out.append(tables.bar("a real run's time, times the integral's", run[0]["seconds"] / run[1], 1.1, at_most=True))
    return out


def lines(result: Row) -> list[Lines]:
    ends, rows, curves = result["settings"]["ends"], [], []
    for part in ("oasis", "dense", "stock"):
        for count in dict.fromkeys(row["rows"] for row in result["rows"] if row["part"] == part):
            have = {row["length"]: row for row in of(result, part) if row["rows"] == count}
            speeds = [overall(result, part, count, end) for end in ends]
            rows.append([NAMES[part], str(count), *(f"{x:,.0f}" if x else "" for x in speeds)])
            told_of = [f"{have[at]['call_ms']:.2f}" if at in have else "" for at in result["settings"]["lengths"]]
            curves.append([NAMES[part], str(count), *told_of])
    out: list[Lines] = [
        ("Tokens a second over the whole of it", ["", "rows", *(f"to {end:,} tokens" for end in ends)], rows),
        ("ms a step, as called, by length", ["", "rows", *(f"{at:,}" for at in result["settings"]["lengths"])], curves),
    ]
    run = checked(result)
    if run is not None:
        one, spent = run
        head = ["rows", "tokens", "seconds", "by the integral", "steps over 3 medians", "their seconds", "captures"]
        shown = [str(one["rows"]), f"{one['end']:,}", f"{one['seconds']:.2f}", f"{spent:.2f}"]
        shown += [f"{one['slow_steps']} of {one['steps']:,}", f"{one['slow_seconds']:.2f}", str(one["captures"])]
        out.append(("A real run beside its integral", head, [shown]))
    return [*out, *([tables.bars(result["bars"])] if result["bars"] else [])]


def draw(result: Row, path: Path) -> None:
    figure, ((left, right),) = sweep.chart(1, 2, (6, 4.5))
    ends = result["settings"]["ends"]
    for part, style in (("oasis", "-"), ("dense", "--"), ("stock", ":")):
        for count in dict.fromkeys(row["rows"] for row in of(result, part)):
            rows = sorted((r for r in of(result, part) if r["rows"] == count), key=lambda row: row["length"])
            name, at = f"{NAMES[part]}, {count} rows", [row["length"] for row in rows]
            (line,) = left.plot(at, [count / row["call_ms"] * 1e3 for row in rows], f"o{style}", label=name)
            times = [seconds(rows, PROMPT, length) for length in at]
            done = [count * (length - PROMPT) / 1e6 for length in at]
            right.plot(times, done, f"o{style}", color=line.get_color(), label=name)
    left.axvline(result["settings"]["budget"], color="gray", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="tokens a row (line: the budget)", ylabel="tokens/s at that length")
    right.set(xlabel="seconds", ylabel=f"million tokens generated, rows up to {ends[-1]:,}", ylim=(0, None))
    left.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", nargs="+", type=int, help="the same for all parts, instead of each one's own")
        parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))

    args = sweep.arguments(__doc__, PARTS, own)
    setting = sweep.QUICK if args.quick else Setting()
    lengths, ends, check = sorted(args.lengths), list(ENDS), dict(CHECK)
    rows = {part: args.rows or list(counts) for part, counts in ROWS.items()}
    if args.quick:
        lengths, ends = [144, 400, 600], [600]
        rows = {part: [2] for part in ROWS}
        check = {"rows": 2, "budget": 80, "end": 192, "lengths": (130, 192)}
    settings = {
        "shape": setting.shape, "prompt": PROMPT, "ends": ends, "lengths": lengths, "budget": setting.budget,
        "fetch_ratio": RATIO, "memory_gb": args.memory_gb,
    }  # fmt: skip
    run = Sweep("reasoning", TITLE, args, settings)
    run.run(points(setting, rows, lengths, check))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
