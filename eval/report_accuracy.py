"""The tables and the figure of `accuracy.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_tables import made
from result_accuracy import named

Row = dict[str, Any]


def markdown(result: Row) -> str:
    """All of it as a page."""
    told = result["settings"]
    left = sum(not shard["done"] for shard in result["shards"])
    lines = [
        "# Accuracy per mode", "",
        *(line for one in made(result["provenance"]) for line in (one, "")),
        "SmolLM2-135M-Instruct. Every prompt is read once, densely; each mode answers from a branch of that,",
        f"greedily. Dense and oasis: up to {told['samples']} samples a task, others {told['others']}. Differences",
        "to dense are in points, paired over samples, with bootstrapped 95% intervals; over tasks, those where dense",
        f"scores {100 * told['band'][0]:.0f} to {100 * told['band'][1]:.0f}%. What is asked: see `retrieval.py` and",
        "`ruler.py`.",
        *([f"{left} of {len(result['shards'])} tasks have fewer samples so far."] * bool(left)),
        "",
    ]  # fmt: skip
    for model in dict.fromkeys(row["model"] for row in result["summaries"]):
        lines += [f"## {model}: over tasks", "",
                  "| tokens | budget | mode | tasks | score | less dense | 95% | worst task |",
                  "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for row in result["summaries"]:
            if row["model"] == model:
                lines.append("| " + " | ".join(summary_cells(row)) + " |")
        lines.append("")
    lines += ["## Dense, by task", "",
              "| model | tokens | task | samples | score | tokens decoded | prompt | in the band |",
              "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    prompts = {(s["model"], s["length"], s["task"]): s["prompt_tokens"] for s in result["shards"]}
    for row in result["cells"]:
        if row["mode"] == "dense":
            lines.append(
                f"| {row['model']} | {row['length']:,} | {row['task']} | {row['samples']} | {100 * row['score']:.1f} | "
                f"{row['decoded']:.1f} | {prompts[row['model'], row['length'], row['task']]:,.0f} | "
                f"{'yes' if row['in_band'] else ''} |"
            )
    if result["bars"]:
        lines += ["", "## Bars", "", "| what | measured | bar | |", "|---|---|---|---|"]
        for bar in result["bars"]:
            lines.append(
                f"| {bar['what']} | {bar['measured']:.2f} | {bar['bar']} | {'met' if bar['met'] else 'MISSED'} |"
            )
    return "\n".join([*lines, ""])


def summary_cells(row: Row) -> list[str]:
    setting = named(row_key(row))
    length = row["length"] if row["length"] == "all" else f"{row['length']:,}"
    low, high = (100 * x for x in row["interval"])
    return [length, str(row["budget"] or "all"), setting.label, str(row["tasks"]), f"{100 * row['score']:.1f}",
            f"{100 * row['difference']:+.2f}", f"{low:+.2f} to {high:+.2f}",
            f"{100 * row['worst']:+.1f} ({row['worst_task']})"]  # fmt: skip


def row_key(row: Row) -> str:
    return f"{row['mode']} {row['budget']} {row['score_name']} {row['equal']}" if row["budget"] else row["mode"]


def show(result: Row) -> None:
    for row in result["summaries"]:
        print(f"{row['model']:8s} " + "  ".join(f"{cell:>8s}" for cell in summary_cells(row)))
    for row in result["cells"]:
        if row["mode"] == "dense":
            print(f"dense {row['model']:8s} {row['length']:6,d} {row['task']:16s} {100 * row['score']:5.1f} "
                  f"({row['samples']} samples){'  in the band' if row['in_band'] else ''}")  # fmt: skip
    for bar in result["bars"]:
        print(f"{'met   ' if bar['met'] else 'MISSED'} {bar['what']}: {bar['measured']:.2f} (bar {bar['bar']})")


def plot(result: Row, path: Path) -> bool:
    """Difference to dense by mode and budget, a panel a model and length. False where there is nothing to draw."""
    from matplotlib.figure import Figure

    rows = [row for row in result["summaries"] if row["budget"]]
    panels = list(dict.fromkeys((row["model"], row["length"]) for row in rows))
    if not panels:
        return False
    labels = list(dict.fromkeys(named(row_key(row)).label for row in rows))
    budgets = sorted({row["budget"] for row in rows})
    figure = Figure(figsize=(1.2 * len(labels) + 3, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for (model, length), axis in zip(panels, axes):
        own = {(named(row_key(r)).label, r["budget"]): r for r in rows if (r["model"], r["length"]) == (model, length)}
        for at, budget in enumerate(budgets):
            found = [(place, own[label, budget]) for place, label in enumerate(labels) if (label, budget) in own]
            centre = [100 * row["difference"] for _, row in found]
            spread = [[max(0.0, y - 100 * row["interval"][0]) for y, (_, row) in zip(centre, found)],
                      [max(0.0, 100 * row["interval"][1] - y) for y, (_, row) in zip(centre, found)]]  # fmt: skip
            places = [place + 0.8 * (at - (len(budgets) - 1) / 2) / len(budgets) for place, _ in found]
            axis.bar(places, centre, 0.8 / len(budgets), yerr=spread, capsize=2, label=f"budget {budget:,}")
        axis.axhline(0, color="black", linewidth=0.8)
        tokens = "all lengths" if length == "all" else f"{length:,} tokens"
        axis.set(ylabel="points to dense", title=f"{model}, {tokens}")
        axis.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=8)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)
    return True
