"""Tables, bars and figure of `disagg_traffic.py`."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from oasis_hf.config import BLOCK

Row = dict[str, Any]

QWEN3_8B = {"layers": 36, "kv_heads": 8, "head_dim": 128, "tokens": 32768, "k": 128, "window": 2048}
"""The paper's geometry; window: positions of the draft's own KV, of one layer."""

PAPER = {"admission_gib": 0.46, "full_gib": 4.50, "drift_ratio": {1.0: 2.53, 0.1: 1.95, 0.05: 1.61}}
"""OasisKV section 6.4: GiB a request at 32K."""

PAPER_HOST = {24576: (1.54, 3.38), 32768: (1.73, 4.52)}
"""OasisKV section 6.4: GiB of a decode node's host memory a request by tokens, partly fetched and in full."""

DECODED = 1000
"""Tokens for which the arithmetic stands."""

DRIFT = "blocks and drift"
"""The phase of `disagg_traffic.Crossed` that is many small reads over all the decoding."""

FRAMING = 0.02
"""Most that a device may receive beyond what was counted, as a share, in a read of megabytes: headers and
acknowledgements."""

LARGE = 1 << 20
"""Bytes of what counts as such a read."""


def geometry(rows: list[Row]) -> list[Row]:
    """Bytes of a request of the paper's geometry. bf16 blocks, int8 summaries with a float16 scale a vector."""
    shape = QWEN3_8B
    heads, blocks = shape["layers"] * shape["kv_heads"], shape["tokens"] // BLOCK
    page = 2 * BLOCK * shape["head_dim"] * 2
    out = []
    for parts in sorted({row["tokens_per_summary"] for row in rows}, reverse=True):
        summaries = heads * blocks * (BLOCK // parts) * 2 * (shape["head_dim"] + 2)
        draft = shape["kv_heads"] * 2 * shape["head_dim"] * 2 * shape["window"]
        table = heads * blocks * 4
        admission = heads * (shape["k"] + 1) * page + summaries + draft + table
        row = {
            "tokens_per_summary": parts, "blocks": heads * shape["k"] * page, "open_block": heads * page,
            "summaries": summaries, "draft": draft, "table": table, "admission": admission,
            "full": heads * (blocks * page) + draft,
        }  # fmt: skip
        for ratio in sorted({one["fetch_ratio"] for one in rows}):
            own = [one for one in rows if (one["tokens_per_summary"], one["fetch_ratio"]) == (parts, ratio)]
            new = mean(one["new_blocks_a_step_and_head"] for one in own)
            row[f"synthetic_drift_{ratio:g}"] = new * heads * page
            row[f"most_a_step_{ratio:g}"] = max(1, round(ratio * shape["k"])) * heads * page
        out.append(row)
    return out


def host_memory(rows: list[Row]) -> list[Row]:
    """Host bytes of a request on the decode side: pages that came against all of its KV, measured (means over texts and
    summaries) and, for the paper's geometry, by arithmetic."""
    heads = QWEN3_8B["layers"] * QWEN3_8B["kv_heads"]
    page = 2 * BLOCK * QWEN3_8B["head_dim"] * 2
    out = []
    for ratio in sorted({row["fetch_ratio"] for row in rows}, reverse=True):
        own = [row for row in rows if row["fetch_ratio"] == ratio]
        new = mean(row["new_blocks_a_step_and_head"] for row in own)
        told = {
            "fetch_ratio": ratio,
            "held": mean(row["held"] for row in own),
            "full": mean(row["full"] for row in own),
        }
        for tokens in PAPER_HOST:
            blocks = min(QWEN3_8B["k"] + 1 + new * DECODED, tokens // BLOCK)
            told[f"synthetic_held_{tokens}"] = heads * blocks * page
            told[f"full_{tokens}"] = heads * (tokens // BLOCK) * page
        out.append(told)
    return out


def beyond(phase: Row) -> float:
    """What a device received beyond what was counted, as a share of that."""
    return phase["received"] / phase["counted"] - 1


def bars(result: Row) -> list[Row]:
    """The issue's, at the budget and length that were run."""
    rows, out = result["rows"], []

    def bar(what: str, measured: float, most: float) -> None:
        out.append({"what": what, "measured": measured, "bar": most, "met": measured <= most})

    for parts, share in ((16, 1 / 5), (8, 1 / 4)):
        own = [row for row in rows if row["tokens_per_summary"] == parts]
        if own:
            measured = max((row["handle"] + row["blocks"]) / row["full"] for row in own)
            bar(f"admission of full transfer, {parts}-token summaries", measured, share)
    bar("requests whose ids differ from one process's", sum(not row["same_ids"] for row in rows), 0)
    ratios = sorted({row["fetch_ratio"] for row in rows})
    drifts = [mean(row["drift"] for row in rows if row["fetch_ratio"] == ratio) for ratio in ratios]
    bar("fetch ratios that drift more than the next larger one", sum(a > b for a, b in zip(drifts, drifts[1:])), 0)
    phases = result.get("interface", [])
    large = [beyond(one) for one in phases if one["counted"] >= LARGE and one["what"] != DRIFT]
    if large:
        bar("received beyond what was counted, as a share: handles and full transfers", max(large), FRAMING)
        bar("phases in which less was received than counted", sum(beyond(one) < 0 for one in phases), 0)
    own16 = [row for row in result["geometry"] if row["tokens_per_summary"] == 16]
    if own16:
        bar("GiB of admission at the paper's geometry", own16[0]["admission"] / 2**30, PAPER["admission_gib"])
    return out


def line(row: Row) -> str:
    total = row["handle"] + row["blocks"] + row["drift"]
    return (
        f"{row['text']:10s} {row['tokens_per_summary']:2d}-token summaries, ratio {row['fetch_ratio']:<5g} handle "
        f"{_mib(row['handle'])}, blocks {_mib(row['blocks'])}, drift {_mib(row['drift'])}, of full "
        f"{total / row['full']:.3f}, idle {row['idle']:.1%}, same ids {row['same_ids']}"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def markdown(result: Row) -> str:
    out = [
        f"# Traffic of disaggregated decoding: {result['tokens']:,} tokens, {result['new']} decoded, budget "
        f"{result['budget']:,}, {result['dtype']}, engine {result['engine']}"
        + (", two network namespaces" if result.get("namespaces") else ""),
        "",
        "MiB a request; link idle share and peak while it decodes. A full transfer moves "
        "every block before the first token.",
        "",
        "| text | summaries of | fetch ratio | handle | blocks | admission | of full | drift | total | of full "
        "| host memory | idle | peak MB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        admission = row["handle"] + row["blocks"]
        cells = [
            row["text"], f"{row['tokens_per_summary']} tokens", f"{row['fetch_ratio']:g}", _mib(row["handle"]),
            _mib(row["blocks"]), _mib(admission), f"{admission / row['full']:.3f}", _mib(row["drift"]),
            _mib(admission + row["drift"]), f"{(admission + row['drift']) / row['full']:.3f}", _mib(row["held"]),
            f"{row['idle']:.1%}", f"{row['peak'] / 1e6:.1f}",
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    for row in result["full_transfer"]:
        out.append(
            f"| {row['text']} | full transfer | - | - | {_mib(row['bytes'])} | {_mib(row['bytes'])} | 1 | 0 | "
            f"{_mib(row['bytes'])} | 1 | {_mib(row['bytes'])} | - | {row['peak'] / 1e6:.1f} |"
        )
    out += [
        "",
        "## The paper's geometry: Qwen3-8B, 32,768 tokens, K = 128 (arithmetic)",
        "",
        "GiB a request. Drift is SYNTHETIC: blocks that SmolLM2 selected anew a step and KV head, times 288 KV "
        "heads and 1,000 tokens.",
        "",
        "| summaries of | blocks | open block | summaries | draft | table | admission | full transfer | ratio "
        "| drift, synthetic |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["geometry"]:
        names = ("blocks", "open_block", "summaries", "draft", "table", "admission", "full")
        cells = [f"{row['tokens_per_summary']} tokens", *(f"{row[name] / 2**30:.3f}" for name in names)]
        drift = ", ".join(
            f"{name.removeprefix('synthetic_drift_')}: {1000 * value / 2**30:.2f}"
            for name, value in row.items() if name.startswith("synthetic_drift_")
        )  # fmt: skip
        out.append(f"| {' | '.join(cells)} | {row['full'] / row['admission']:.1f}x | {drift} |")
    out += _host_memory(result.get("host_memory", [])) + _interface(result.get("interface", []))
    out += ["", "## Bars", "", "| bar | measured | at most | |", "|---|---|---|---|"]
    out += [
        f"| {one['what']} | {one['measured']:.3f} | {one['bar']:.3f} | {'met' if one['met'] else 'MISSED'} |"
        for one in result["bars"]
    ]
    return "\n".join(out) + "\n"


def _host_memory(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    heads = [f"Qwen3-8B, {tokens // 1024}K, GiB" for tokens in PAPER_HOST]
    paper = [f"{part} of {full} GiB at {tokens // 1024}K" for tokens, (part, full) in PAPER_HOST.items()]
    out = [
        "", "## Host memory on the decode side", "",
        f"A request's pages that came, after the run, against all of its KV. Qwen3-8B is arithmetic and SYNTHETIC: 129 "
        f"blocks a KV head, and for each of {DECODED:,} tokens as many new ones as SmolLM2 selected; it can't be more "
        f"than all. The paper: {', '.join(paper)}.", "",
        f"| fetch ratio | held, MiB | all, MiB | times less | {' | '.join(heads)} |", "|---" * (4 + len(heads)) + "|",
    ]  # fmt: skip
    for row in rows:
        cells = [f"{row['fetch_ratio']:g}", _mib(row["held"]), _mib(row["full"]), f"{row['full'] / row['held']:.1f}x"]
        for tokens in PAPER_HOST:
            held, full = row[f"synthetic_held_{tokens}"], row[f"full_{tokens}"]
            cells.append(f"{held / 2**30:.2f} of {full / 2**30:.2f}, {full / held:.1f}x")
        out.append(f"| {' | '.join(cells)} |")
    return out


def _interface(phases: list[Row]) -> list[str]:
    if not phases:
        return []
    out = [
        "", "## Counted and received", "",
        "Bytes that the transport counted (of a handle, those of the handle) against those that came in through the "
        "reader's device, with headers, answers to small reads, and heartbeats.",
        "", "| phase | times | counted, MiB | received, MiB | beyond | most in one |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for what in dict.fromkeys(phase["what"] for phase in phases):
        own = [phase for phase in phases if phase["what"] == what]
        both = {name: sum(phase[name] for phase in own) for name in ("counted", "received")}
        out.append(
            f"| {what} | {len(own)} | {_mib(both['counted'])} | {_mib(both['received'])} | {beyond(both):.2%} | "
            f"{max(map(beyond, own)):.2%} |"
        )
    return out


def plot(result: Row, path: Path) -> None:
    """Admission and drift beside a full transfer, by fetch ratio."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    labels = [f"{row['text']}\n{row['tokens_per_summary']} tokens\n{row['fetch_ratio']:g}" for row in rows]
    figure, axis = plt.subplots(figsize=(1.1 * len(rows) + 2, 4), layout="constrained")
    bottom = [0.0] * len(rows)
    for name in ("handle", "blocks", "drift"):
        heights = [row[name] / row["full"] for row in rows]
        axis.bar(labels, heights, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axis.axhline(1, color="black", linestyle="--", label="full transfer")
    axis.set_ylabel("share of a full transfer")
    axis.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
