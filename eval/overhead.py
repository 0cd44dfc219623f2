"""Where a decode step's time goes: the model alone, and what each part of the cache's work adds.

    python eval/overhead.py --quick
    python eval/overhead.py --out eval/results [--rows 1 16 44 64] [--points adds busy shared] [--seconds 560]

Qwen3-8B's shape, bfloat16, random weights, 16K tokens a row; every KV head fetches its whole cap. adds: the step is
timed with parts left out, one more put back each time: no keys and values at all; the stacked draft; append and
attention over the working set; scores; selection; transfer; a correction lane that watches and never fires; one that
moves its whole cap in every head, before each attention. What runs beside the model adds less than it takes, so
beside that busy: the time that each operator's kernels run in a replayed step, by the profiler, overlapping or not (on
a CPU: the operators themselves). shared: prediction without transfer, with one cap for all and with the same budget
shared out (`fetch_ratio="auto"`), which may add 1% of the step.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sweep
import torch
from report_tables import Lines, Row, bar
from sweep import Point, Setting, Sweep, find, of, told

from oasis_hf import OasisConfig, bench
from oasis_hf.attach import cache_name
from oasis_hf.forced import Injected, forced_misses

PARTS = ("adds", "busy", "shared")
MOST_SHARED = 0.01
ROWS = (1, 16, 44, 64)
FEW = 4
"""Every so many-th layer is asked where the lane watches a few."""

A_FOURTH = "watch a fourth"

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("bare", {"lookahead": "none"}), "draft": ("bare", {}), "append and attend": ("model", {}),
    "score": ("score", {}), "select": ("prediction", {}), "gather": ("whole", {}),
    A_FOURTH: ("whole", {"correction": "auto", "correct_above": 1.0}),
    "watch": ("whole", {"correction": "auto", "correct_above": 1.0}), "correct": ("whole", {"correction": "always"}),
}  # fmt: skip
"""What is put back, in turn: the part of `bench.STEPS` that then runs, and knobs."""

WATCHES = 0.05
"""Bar: the share of the tokens a second that a correction lane may cost which does not fire."""

OPERATORS = ("enter", "attend", "append", "summarize", "score", "select", "correct", "gather")
PROFILED = 5
TITLE = "A step's overhead"


def points(setting: Setting, rows: list[int]) -> Iterator[Point]:
    for count in rows:
        for name in STEPS:
            key = {"rows": count, "step": name}
            yield Point("adds", key, lambda n=count, name=name: timed(setting, n, name), f"adds {count}")
    for count in rows:
        yield Point("busy", {"rows": count}, lambda n=count: busy(setting, n), "busy")
    for count in rows:
        yield Point("shared", {"rows": count}, lambda n=count: shared(setting, n), "shared")


def timed(setting: Setting, rows: int, name: str) -> Row:
    part, knobs = STEPS[name]
    if name == A_FOURTH:
        knobs = {**knobs, "correct_layers": tuple(range(0, setting.model.config.num_hidden_layers, FEW))}
    return told(setting.step(part, rows, **knobs))


def shared(setting: Setting, rows: int) -> Row:
    """ms of a step that predicts and moves nothing, the shortest of two with one cap and of two that share, in turn."""
    ways = [{}, {"fetch_ratio": "auto"}] * 2
    ms = [setting.step("prediction", rows, **knobs).ms for knobs in ways]
    one, auto = min(ms[::2]), min(ms[1::2])
    return {"ms": one, "shared_ms": auto, "more": auto / one - 1}


@torch.no_grad()
def busy(setting: Setting, rows: int) -> Row:
    """ms a step of each operator's kernels, of all other kernels, and of the step."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = setting.device == "cuda"
    model = setting.model
    with forced_misses(True):
        config = OasisConfig(budget=setting.budget, compile_after=0)
        cache = bench.filled(model, config, rows, setting.context, setting.pool_gib, Injected(1))
        bench.step_ms(model, cache, 2)  # captured and warm
        token = torch.full((rows, 1), 7, device=setting.device)
        kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        with profile(activities=kinds) as profiler:
            begun = time.perf_counter()
            for _ in range(PROFILED):
                at = torch.full_like(token, cache.get_seq_length())
                model(input_ids=token, position_ids=at, **{cache_name(model): cache}, logits_to_keep=1)
            if on_gpu:
                torch.cuda.synchronize()
            wall = (time.perf_counter() - begun) * 1e3 / PROFILED
    events = [(one.key, one.self_device_time_total if on_gpu else one.cpu_time_total) for one in
              profiler.key_averages()]  # fmt: skip
    if on_gpu:
        own = {name: _sum(events, rf"\b{name}_kernel") for name in OPERATORS}  # torch has kernels of such names too
        rest = sum(us for _, us in events) / 1e3 / PROFILED - sum(own.values())
    else:
        own = {name: _sum(events, rf"\boasis_hf::{name}\b") for name in OPERATORS}
        rest = wall - sum(own.values())
    if not any(own.values()):
        return {"fits": False, "why": "the profiler saw none of the operators"}
    return {"busy_ms": own, "other_ms": rest, "wall_ms": wall, "graph": cache.graphs.refused or "replayed"}


def _sum(events: list[tuple[str, float]], name: str) -> float:
    """Milliseconds a step of what bears a name, a pattern."""
    return sum(us for key, us in events if re.search(name, key)) / 1e3 / PROFILED


def adds(result: Row, rows: int) -> dict[str, float]:
    """ms that each part adds to those before it, in the order of `STEPS`, as far as they were measured."""
    out, before = {}, 0.0
    for name in STEPS:
        row = find(result["rows"], "adds", rows=rows, step=name)
        if row is None and name == A_FOURTH:  # older results lack it
            continue
        if row is None:
            break
        out[name], before = row["ms"] - before, row["ms"]
    return out


def counts(result: Row) -> list[int]:
    return list(dict.fromkeys(row["rows"] for row in result["rows"] if row["part"] == "adds"))


def lost(result: Row, rows: int, step: str) -> float | None:
    """Share of the tokens a second of the whole step that a lane of this step costs; None where it was not measured."""
    plain, watched = (find(result["rows"], "adds", rows=rows, step=name) for name in ("gather", step))
    return 1 - plain["ms"] / watched["ms"] if plain and watched else None


def bars(result: Row) -> list[Row]:
    """Of the correction lane and of what is shared out; `decode.py` has those of the whole step."""
    out = []
    for count in counts(result):
        for name, which in (("watch", "which watches"), (A_FOURTH, "which watches a fourth of the layers")):
            if (cost := lost(result, count, name)) is not None:
                out.append(bar(f"{count} rows: tokens/s that a correction lane costs {which}", cost, WATCHES, True))
    return out + [
        bar(f"share of a step that sharing out adds, {row['rows']} rows", row["more"], MOST_SHARED, at_most=True)
        for row in of(result, "shared")
    ]


def lines(result: Row) -> list[Lines]:
    rows = []
    for count in counts(result):
        parts = adds(result, count)
        whole = find(result["rows"], "adds", rows=count, step="gather")
        moved = [f"{whole['ms']:.2f}", f"{whole['bytes'] / 1e6:,.1f}"] if whole else ["", ""]
        rows.append([str(count), *(f"{parts[name]:+.3f}" if name in parts else "" for name in STEPS), *moved])
    out: list[Lines] = [
        ("ms that each part adds", ["rows", *STEPS, "whole step but for the lane, ms", "MB over the link"], rows)
    ]
    seen = of(result, "busy")
    if seen:
        ran = [name for name in OPERATORS if any(name in row["busy_ms"] for row in seen)]
        cells = [
            [str(row["rows"]), *(f"{row['busy_ms'].get(name, 0):.3f}" for name in ran), f"{row['other_ms']:.3f}"]
            for row in seen
        ]
        out.append(("ms that each operator runs in a step, overlapping or not", ["rows", *ran, "others"], cells))
    both = of(result, "shared")
    if both:
        cells = [
            [str(row["rows"]), f"{row['ms']:.3f}", f"{row['shared_ms']:.3f}", f"{row['more']:+.2%}"] for row in both
        ]
        out.append(
            ("ms of a step that predicts, with one cap and shared out", ["rows", "one cap", "shared", ""], cells)
        )
    return out


def draw(result: Row, path: Path) -> None:
    figure, ((left, right),) = sweep.chart(1, 2, (5.5, 4.5))
    at = counts(result)
    names = [str(count) for count in at]
    floor = [0.0] * len(at)
    for name in STEPS:
        heights = [max(0.0, adds(result, count).get(name, 0.0)) for count in at]
        left.bar(names, heights, bottom=floor, label=name)
        floor = [a + b for a, b in zip(floor, heights)]
    left.set(xlabel="rows", ylabel="ms a step", title="what each part adds")
    seen = of(result, "busy")
    names, floor = [str(row["rows"]) for row in seen], [0.0] * len(seen)
    for name in OPERATORS:
        heights = [row["busy_ms"].get(name, 0) for row in seen]
        right.bar(names, heights, bottom=floor, label=name)
        floor = [a + b for a, b in zip(floor, heights)]
    right.set(xlabel="rows", ylabel="ms a step", title="what each operator runs, partly beside the model")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))

    args = sweep.arguments(__doc__, PARTS, own)
    setting = sweep.QUICK if args.quick else Setting()
    rows = [2] if args.quick else sorted(args.rows)
    settings = {"shape": setting.shape, "context": setting.context, "budget": setting.budget}
    run = Sweep("overhead", TITLE, args, settings)
    run.run(points(setting, rows))
    run.finish(bars, lines, draw)


if __name__ == "__main__":
    main()
