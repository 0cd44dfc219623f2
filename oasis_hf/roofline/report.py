"""What the formulas give for one model, machine and load: a dictionary, a table, a figure."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

from . import formulas
from .formulas import METHODS, Load, Step
from .hardware import Hardware
from .shape import ModelShape

EXTRA = 0.035
"""Seconds of partial fetching's extra decode step and selection on the prefilling machine: fitted, for Qwen3-8B, to the
paper's figures (`formulas.first_token`)."""

RESERVE = 0.1
"""Share of the GPU memory that is left for all but weights and KV."""

ASIDE = {
    "dense": (6, 4), "sparse": (6, 4), "on demand": (-62, -12), "prefetch": (-50, 6), "remote prefetch": (-98, -3),
}  # fmt: skip
"""Where a method's name stands beside its point, in points: three share an intensity."""

ROOFS = {"hbm": "GPU memory", "link": "link to the host", "network": "network"}


def plan(shape: ModelShape, hardware: Hardware, load: Load, hit: float = 0.9, extra: float = EXTRA) -> dict[str, Any]:
    """Everything at once, ready for JSON. Bytes, seconds, and tokens a second of all rows.

    `steps` has an entry a method: its step at the load's rows, the most rows that fit and what a step gives with those,
    and the longest context for the load's rows. `budget` is for the step that the working set takes without transfers.
    """
    steps = {method: _entry(shape, hardware, load, method) for method in METHODS}
    resident = formulas.step(shape, hardware, load, "prefetch").base
    full = shape.cache(load.context, hardware.devices)
    partial = formulas.admission(shape, load, hardware.devices)
    whole = formulas.first_token(shape, hardware, load.context, hit, full)
    part = formulas.first_token(shape, hardware, load.context, hit, partial, extra)
    return {
        "hardware": dataclasses.asdict(hardware),
        "shape": dataclasses.asdict(shape),
        "load": dataclasses.asdict(load),
        "kv_token": shape.kv_token(hardware.devices),
        "kv_row": full,
        "host_rows": formulas.host_rows(shape, hardware, load.context),
        "steps": steps,
        "budget": {
            "seconds": resident,
            "bytes": formulas.token_budget(hardware, resident),
            "tokens": formulas.budget_tokens(shape, hardware, load.rows, resident),
            "blocks": formulas.block_budget(shape, hardware, load.rows, resident),
        },
        "first_token": {
            "hit": hit, "extra": extra, "full_bytes": full, "partial_bytes": partial, "full": whole, "partial": part,
            "times_faster": whole / part,
        },
    }  # fmt: skip


def _entry(shape: ModelShape, hardware: Hardware, load: Load, method: str) -> dict[str, Any]:
    one = formulas.step(shape, hardware, load, method)
    rows = formulas.largest_rows(shape, hardware, load, method, RESERVE)
    return {
        "roof": METHODS[method],
        "kv_bytes": one.kv_bytes, "weight_bytes": one.weight_bytes, "moved_bytes": one.moved_bytes,
        "seconds": one.seconds, "overhead": one.overhead, "waiting": one.waiting,
        "tokens_per_second": one.tokens_per_second, "intensity": one.intensity, "bound": one.bound,
        "fits": formulas.fits(shape, hardware, load, method, RESERVE),
        "largest_rows": rows,
        "tokens_per_second_at_largest_rows": _at(shape, hardware, load, method, rows),
        "largest_context": formulas.largest_context(shape, hardware, load, method, RESERVE),
    }  # fmt: skip


def _at(shape: ModelShape, hardware: Hardware, load: Load, method: str, rows: int) -> float:
    if not rows:
        return 0.0
    return formulas.step(shape, hardware, dataclasses.replace(load, rows=rows), method).tokens_per_second


def table(told: dict[str, Any], model: str) -> Any:
    """A `rich` table of `plan`'s steps."""
    from rich.markup import escape
    from rich.table import Table

    load = told["load"]
    title = f"{model} on {told['hardware']['name']}: {load['rows']:,} rows of {load['context']:,} tokens"
    caption = f"What fits: weights and KV in {1 - RESERVE:.0%} of the GPU memory, full KV in the host's."
    shown = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left")
    shown.add_column("method")
    shown.add_column("under the roof of")
    for column in (
        "tokens a GB of KV", "tokens/s at most", "ms a step", "tokens/s", "rows that fit", "tokens/s with them",
        "longest context",
    ):  # fmt: skip
        shown.add_column(column, justify="right")
    for method, one in told["steps"].items():
        shown.add_row(
            method, ROOFS[one["roof"]], f"{one['intensity'] * 1e9:,.1f}", f"{one['bound']:,.0f}",
            f"{one['seconds'] * 1e3:,.1f}", f"{one['tokens_per_second']:,.0f}" + ("" if one["fits"] else " (no room)"),
            f"{one['largest_rows']:,}", f"{one['tokens_per_second_at_largest_rows']:,.0f}",
            f"{one['largest_context']:,}",
        )  # fmt: skip
    return shown


def lines(told: dict[str, Any]) -> list[str]:
    """What the table does not hold, a sentence each."""
    budget, first, load = told["budget"], told["first_token"], told["load"]
    held = f"{told['kv_row'] / 1e9:,.2f} GB a row; host memory holds {told['host_rows']:,.1f} rows."
    return [
        f"KV: {told['kv_token']:,} bytes a token, {held}",
        f"Budget: a step of {budget['seconds'] * 1e3:,.1f} ms hides {budget['bytes'] / 1e6:,.0f} MB over the link, "
        f"{budget['tokens']:,.0f} tokens a row or {budget['blocks']:,} blocks a KV head.",
        f"On demand, {told['steps']['on demand']['waiting']:.0%} of a step at a fetch share of {load['fetch']:g} is "
        "waiting.",
        f"First token from another machine, {first['hit']:.0%} of the prompt known: {first['full'] * 1e3:,.0f} ms with "
        f"all KV, {first['partial'] * 1e3:,.0f} ms with the working set and "
        f"{first['extra'] * 1e3:g} ms for the choice of it ({first['times_faster']:.2f} times as fast).",
    ]


def measured() -> list[dict[str, Any]]:
    """Points that were measured, the paper's and ours: who, what, roof, rows, bytes of KV a step under that roof,
    tokens a second, hardware and source."""
    return json.loads((resources.files("oasis_hf") / "data" / "roofline.json").read_text(encoding="utf-8"))["points"]


def figure(shape: ModelShape, hardware: Hardware, load: Load, model: str) -> Any:
    """Tokens a second over token-KV intensity (paper, Fig. 1): three roofs, the ceilings that weights and memory set
    (dense, and the working set, with all rows that fit), the methods at the load, and what was measured.

    Returns:
        a `matplotlib.figure.Figure` (not shown).

    Raises:
        ImportError: matplotlib is not there.
    """
    from matplotlib.figure import Figure

    steps: list[Step] = [formulas.step(shape, hardware, load, method) for method in METHODS]
    points = measured()
    at = [one.intensity for one in steps] + [point["rows"] / point["bytes"] for point in points]
    span = [min(at) / 2, max(at) * 2]
    chart = Figure(figsize=(9, 6), layout="constrained")
    axes = chart.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="tokens a byte of KV moved", ylabel="tokens a second")
    axes.set_title(f"{model} on {hardware.name}, {load.rows:,} rows of {load.context:,} tokens")
    for roof, color in zip(ROOFS, ("#4878d0", "#ee854a", "#6acc64")):
        bandwidth = getattr(hardware, roof)
        label = f"{ROOFS[roof]}, {bandwidth / 1e9:,.0f} GB/s"
        axes.plot(span, [x * bandwidth for x in span], color=color, label=label)
    for method, style in (("dense", "--"), ("prefetch", ":")):
        rows = formulas.largest_rows(shape, hardware, load, method, RESERVE)
        if rows:
            ceiling = _at(shape, hardware, dataclasses.replace(load, fetch=1e-9), method, rows)
            what = "dense" if method == "dense" else "working set"
            axes.axhline(ceiling, color="gray", linestyle=style, label=f"ceiling, {what}, {rows:,} rows")
    for one in steps:
        axes.plot(one.intensity, one.tokens_per_second, "k*", markersize=9)
        at_point = one.intensity, one.tokens_per_second
        axes.annotate(one.method, at_point, xytext=ASIDE[one.method], textcoords="offset points")
    for who, marker, color in (("paper", "s", "#d65f5f"), ("ours", "o", "#956cb4")):
        own = [point for point in points if point["who"] == who]
        axes.plot(
            [point["rows"] / point["bytes"] for point in own], [point["tokens_per_second"] for point in own], marker,
            color=color, alpha=0.8, linestyle="none",
            label=f"measured, {'the paper (H100)' if who == 'paper' else 'ours (H200)'}, Qwen3-8B",
        )  # fmt: skip
    axes.legend(loc="lower right", fontsize="small")
    return chart
