"""What `agreement.py` hands out: the JSON, the tables (terminal and markdown), the figure, and its bars."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cells import LOOKAHEADS, PAPER, Score, all_scores
from recording import Recording
from rich.console import Console
from rich.table import Table
from runs import Job, describe, paired

console = Console(width=150, soft_wrap=False)
Row = dict[str, Any]
KNOBS = ("scorer", "half_range", "reduction", "summary_dtype", "tokens_per_summary")


def note(line: str) -> None:
    console.print(f"[dim]{line}[/dim]", highlight=False)


def compact(table: dict[Any, Row], budgets: tuple[int, ...]) -> list[Row]:
    """One row a setting: `missed[budget]` is a list over texts, the rest are numbers by budget."""
    rows: dict[Any, Row] = {}
    for (score, lookahead, budget), entry in table.items():
        knobs = dict.fromkeys(KNOBS) if score is None else asdict(score)
        row = rows.setdefault((score, lookahead), {**knobs, "lookahead": lookahead, "missed": {}, "worst": {},
                                                   "entering": {}, "same": {}})  # fmt: skip
        row["missed"][str(budget)] = [round(x, 6) for x in entry["missed"]]
        for name in ("worst", "entering", "same"):
            row[name][str(budget)] = round(entry[name], 5)
    return list(rows.values())


def sha256(tokens: torch.Tensor) -> str:
    """Of ids `[T]`: says which text it was, for texts differ with the versions installed."""
    return hashlib.sha256(tokens.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def describe_texts(recordings: list[Recording]) -> list[Row]:
    return [
        {
            "name": one.name, "tokens": len(one.tokens), "sha256_of_ids": sha256(one.tokens),
            "lookup_found": float(one.found.double().mean()), "lookup_right": float(one.right.double().mean()),
        }
        for one in recordings
    ]  # fmt: skip


def summary_bytes(dim: int, parts: tuple[int, ...]) -> list[Row]:
    """Bytes of a block's summaries, a KV head, by dtype and tokens a summary (min/max and midrange take the same)."""
    seen: dict[tuple[str, int], Row] = {}
    for score in all_scores((0.5,), parts):
        vectors, scales = score.block_bytes(dim)
        seen[score.summary_dtype, score.tokens_per_summary] = {
            "summary_dtype": score.summary_dtype, "tokens_per_summary": score.tokens_per_summary,
            "vector_bytes": vectors, "scale_bytes": scales, "head_dim": dim,
        }  # fmt: skip
    return list(seen.values())


def find(result: Row, score: Score | None, lookahead: str) -> Row:
    """A setting's row of `result["cells"]`."""
    wanted = dict.fromkeys(KNOBS) if score is None else asdict(score)
    for row in result["cells"]:
        if row["lookahead"] == lookahead and all(row[knob] == wanted[knob] for knob in KNOBS):
            return row
    raise KeyError((score, lookahead))


def run_of(result: Row, wanted: Row) -> Row | None:
    """The row of `result["runs"]` with these knobs, lookahead, budget and dtype that ran, or None."""
    for row in result["runs"]:
        if "agreement" in row and all(row.get(name) == value for name, value in wanted.items()):
            return row
    return None


def ran(result: Row, job: Job) -> bool:
    return run_of(result, describe(job)) is not None


def default_of(result: Row) -> tuple[Score, str]:
    return Score(**{knob: result["default"][knob] for knob in KNOBS}), result["default"]["lookahead"]


def bars(result: Row) -> Row:
    """The figures that a default must show; see the module's table for what each means."""
    score, lookahead = default_of(result)
    most = str(result["settings"]["budgets"][-1])
    ideal = find(result, None, "ideal")["missed"][most]
    out: Row = {"missed_less_than_paper": []}
    pairs = [("true draft", "true draft"), (lookahead, "lookup draft"), (lookahead, "true draft")]
    for mine, papers in dict.fromkeys(pairs):
        ours, theirs = (find(result, *pair)["missed"][most] for pair in ((score, mine), (PAPER, papers)))
        less = [1 - a / b for a, b in zip(ours, theirs)]
        out["missed_less_than_paper"].append({
            "budget": int(most), "default_lookahead": mine, "paper_lookahead": papers,
            "mean": 1 - sum(ours) / sum(theirs), "least_of_texts": min(less),
            "by_text": dict(zip(result["settings"]["texts"], less)),
            "of_the_way_to_ideal": (sum(theirs) - sum(ours)) / (sum(theirs) - sum(ideal)),
        })  # fmt: skip
    gaps = {"default": [0.0], "every setting": [0.0]}
    index = {(*(row[k] for k in KNOBS), row["lookahead"]): row for row in result["cells"]}
    for row in result["cells"]:
        if row["summary_dtype"] == "int8":
            twin = index[(*(row[k] if k != "summary_dtype" else "model" for k in KNOBS), row["lookahead"])]
            own = row["lookahead"] == lookahead and all(row[k] == result["default"][k] for k in KNOBS)
            for budget, missed in row["missed"].items():
                gap = abs(_mean(missed) - _mean(twin["missed"][budget]))
                for name in ("default", "every setting") if own else ("every setting",):
                    gaps[name].append(gap)
    out["int8_changes_kept_mass_by_points"] = {name: 100 * max(values) for name, values in gaps.items()}
    steps, dtype = result["settings"]["steps"], result["settings"]["dtype"]
    twin = {**asdict(score), "lookahead": lookahead, "summary_dtype": "model"}
    for budget in result["settings"]["budgets"]:
        for kind in dict.fromkeys((dtype, "float32")):
            row = run_of(result, {**asdict(score), "lookahead": lookahead, "budget": budget, "dtype": kind})
            if row is None:
                continue
            out[f"agreement_at_{budget}_{kind}"] = row["agreement"]
            other = run_of(result, {**twin, "budget": budget, "dtype": kind})
            if other and other is not row and "agree_bits" in row and "agree_bits" in other:
                out[f"int8_less_model_agreement_at_{budget}_{kind}"] = paired(row, other, steps)
    return out


# -- files ------------------------------------------------------------------------------------------------------------


def save(result: Row, out: Path) -> None:
    """The JSON, one line a row."""
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in result.items():
        if isinstance(value, list):
            body = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]" if value else "[]"
        else:
            body = json.dumps(value, indent=1).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {body}")
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_markdown(result: Row, out: Path) -> None:
    pages = [f"# Agreement and kept mass: {result['settings']['model']}", _preface(result)]
    for title, head, rows in tables(result):
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        pages += [f"## {title}", "\n".join(lines)]
    out.write_text("\n\n".join(pages) + "\n")


def show(result: Row) -> None:
    for title, head, rows in tables(result):
        table = Table(title=title, title_justify="left")
        for place, name in enumerate(head):
            table.add_column(name, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _preface(result: Row) -> str:
    settings = result["settings"]
    made = []
    for one in result["provenance"]:
        machine = one["machine"].get("gpu", one["machine"]["processor"])
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        made.append(f"`{one['command']}` on {machine}, {one['date']}, commit {one['commit']}; {versions}.")
    return (
        "\n\n".join(made)
        + f"\n\nDefault: {label(default_of(result)[0])}, lookahead {default_of(result)[1]}."
        + f"\n\n{settings['prompt']:,} prompt tokens and {settings['steps']} teacher-forced steps a text. *Missed* is "
        "1 - kept: the share of the true attention that is on no selected block, not on the open block and not on the "
        "token itself; mean over texts, layers, KV heads and steps, **without** a fetch cap. *Under the cap* it is "
        f"what the working set misses when at most {settings['fetch_ratio']:.0%} of K comes in a step. *Same*: overlap "
        "with the selection of the true next query. *Entering*: share of K that a step's selection adds to the one "
        'before. "true draft" knows the next token: an upper bound (and what on-demand selection would choose).'
    )


def tables(result: Row) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, heads and rows, for the terminal and for markdown alike."""
    budgets = [str(b) for b in result["settings"]["budgets"]]
    score, lookahead = default_of(result)
    out = [("Bars", ["what", "measured"], _bar_rows(result["bars"]))]
    rows = [
        [t["name"], f"{t['tokens']:,}", f"{t['lookup_found']:.1%}", f"{t['lookup_right']:.1%}"] for t in result["texts"]
    ]
    out.append(("Texts", ["text", "tokens", "prompt lookup found", "and was right"], rows))
    rows = [[str(i), _name(r), r["lookahead"], f"{r['missed']:.4f}"] for i, r in enumerate(result["ranked"], 1)]
    title = "Best int8 settings that know no future, at the paper's bytes of summaries"
    out.append((title, ["", "score", "lookahead", "missed, mean over budgets"], rows))
    out.append(_run_table(result))
    for name, one in dict.fromkeys((("the default's score", score), ("the paper's score", PAPER))):
        head = ["lookahead", *(f"missed @{b}" for b in budgets), *(f"same @{b}" for b in budgets)]
        head += [f"entering @{budgets[-1]}", *(f"missed @{b} under the cap" for b in budgets), "fetched of K"]
        out.append((f"Lookaheads, {name}: {label(one)}", head, [_lookahead_row(result, one, n) for n in LOOKAHEADS]))
    out.append(_ratio_table(result))
    for name in dict.fromkeys(("true draft", lookahead)):
        head = ["score", *(f"missed @{b}" for b in budgets), f"worst layer @{budgets[-1]}"]
        rows = [["ideal: top K by true mass", *_missed(find(result, None, "ideal"), budgets)]]
        ordered = [r for r in result["cells"] if r["lookahead"] == name and r["scorer"]]
        if len(ordered) > 40:  # lambda has a table of its own
            ordered = [r for r in ordered if r["half_range"] in (1.0, score.half_range)]
        ordered.sort(key=lambda r: _mean(r["missed"][budgets[-1]]))
        rows += [[_name(r), *_missed(r, budgets)] for r in ordered]
        out.append((f"Scores, lookahead: {name}", head, rows))
        out.append(_lambda_table(result, name, budgets))
    rows = [
        [f"{r['summary_dtype']}, {r['tokens_per_summary']} tokens", f"{r['vector_bytes']}", f"{r['scale_bytes']}"]
        for r in result["summary_bytes"]
    ]
    title = f"Summaries of a block and KV head, head_dim {result['summary_bytes'][0]['head_dim']}"
    out.append((title, ["dtype, tokens a summary", "bytes", "bytes of scales"], rows))
    return out


def label(score: Score) -> str:
    return _name(asdict(score))


def _name(row: Row) -> str:
    scorer = f"midrange {row['half_range']}" if row["scorer"] == "midrange" else row["scorer"]
    return f"{scorer}, {row['reduction']}, {row['summary_dtype']}, {row['tokens_per_summary']} tokens"


def _missed(row: Row, budgets: list[str]) -> list[str]:
    return [*(f"{_mean(row['missed'][b]):.4f}" for b in budgets), f"{row['worst'][budgets[-1]]:.3f}"]


def _bar_rows(found: Row) -> list[list[str]]:
    rows = []
    for one in found["missed_less_than_paper"]:
        what = f"missed mass @{one['budget']}, default's score ({one['default_lookahead']})"
        what += f" against the paper's ({one['paper_lookahead']})"
        rows.append([what, f"{one['mean']:.1%} less; least on a text {one['least_of_texts']:.1%}; "
                     f"{one['of_the_way_to_ideal']:.0%} of the way to ideal"])  # fmt: skip
    for name, points in found["int8_changes_kept_mass_by_points"].items():
        rows.append([f"int8 against the model's dtype, kept mass, most over budgets ({name})", f"{points:.3f} points"])
    for name, value in found.items():
        *_, budget, dtype = name.split("_")
        if name.startswith("agreement_at_"):
            rows.append([f"top-1 agreement of the default @{budget}, {dtype}", f"{value:.2%}"])
        elif name.startswith("int8_less"):
            low, high = value["interval"]
            what = f"int8 less the model's dtype, top-1 agreement @{budget}, {dtype}, paired 95%"
            rows.append([what, f"{value['mean']:+.2%} ({low:+.2%} to {high:+.2%})"])
    return rows


def told(row: Row) -> str:
    """A run in a line."""
    what = row["why"] if "why" in row else f"{_name(row)}, {row['lookahead']} @{row['budget']} {row['dtype']}"
    return f"{what}: {row.get('skipped') or format(row['agreement'], '.2%')}"


def _part(result: Row, row: Row) -> str:
    """What a run is in the table: the default, the paper's, or one of the best."""
    score, lookahead = default_of(result)
    knobs = {knob: row[knob] for knob in KNOBS}
    if knobs == asdict(PAPER):
        return "**paper**" if LOOKAHEADS[row["lookahead"]].real else "paper, draft always right"
    if knobs == asdict(score):
        if row["lookahead"] == lookahead:
            return "**default**"
        return "default's score" + ("" if LOOKAHEADS[row["lookahead"]].real else ", draft always right")
    if row["lookahead"] == lookahead and knobs == asdict(score.replace(summary_dtype=row["summary_dtype"])):
        return "default in the model's dtype"
    for place, best in enumerate(result["ranked"], 1):
        if row["lookahead"] == best["lookahead"] and all(knobs[knob] == best[knob] for knob in KNOBS):
            return f"best {place}"
    return ""


def _run_table(result: Row) -> tuple[str, list[str], list[list[str]]]:
    head = ["run", "score", "lookahead", "budget", "dtype", "top-1 agreement", "least text", "KL", "loss +"]
    head += ["KiB/step", "hit rate"]
    rows = []
    for row in sorted(result["runs"], key=lambda r: (r["dtype"], -r.get("budget", 1 << 20), r.get("kl", 9))):
        if "skipped" in row:
            continue
        if "budget" in row:
            who = [_part(result, row), _name(row), row["lookahead"], str(row["budget"]), row["dtype"]]
        else:
            who = [row["why"], "", "", "", row["dtype"]]
        low, high = row["agreement_interval"]
        moved = [f"{row['bytes_per_step'] / 1024:,.0f}", f"{row['hit_rate']:.1%}"] if "hit_rate" in row else ["", ""]
        least = min(row["agreement_by_text"].values())
        rows.append([*who, f"{row['agreement']:.2%} ± {(high - low) / 2:.2%}", f"{least:.1%}", f"{row['kl']:.5f}",
                     f"{row['loss_increase']:+.4f}", *moved])  # fmt: skip
    return "The model, teacher-forced, against the dense cache (bytes a row and step)", head, rows


def _ratio_table(result: Row) -> tuple[str, list[str], list[list[str]]]:
    """Lookaheads at equal bytes: missed mass and blocks fetched by fetch ratio."""
    score, budget = default_of(result)[0], result["settings"]["budgets"][-1]
    found = {
        (r["lookahead"], r["fetch_ratio"]): r for r in result["capped"]
        if r["budget"] == budget and all(r[k] == getattr(score, k) for k in KNOBS)
    }  # fmt: skip
    ratios = sorted({ratio for _, ratio in found})
    rows = [
        [name, *(f"{_mean(r['missed']):.4f} / {r['fetched']:.2f}" if (r := found.get((name, ratio))) else ""
                 for ratio in ratios)]
        for name in LOOKAHEADS
    ]  # fmt: skip
    title = f"Lookaheads by the bytes they move: the default's score @{budget}, missed mass / blocks fetched a step"
    return title, ["lookahead", *(f"at most {ratio:.2%} of K" for ratio in ratios)], rows


def _lookahead_row(result: Row, score: Score, lookahead: str) -> list[str]:
    budgets = [str(b) for b in result["settings"]["budgets"]]
    row, most = find(result, score, lookahead), budgets[-1]
    cells = [lookahead, *_missed(row, budgets)[:-1], *(f"{row['same'][b]:.1%}" for b in budgets)]
    cells.append(f"{row['entering'][most]:.1%}")
    under = {
        str(r["budget"]): r for r in result["capped"]
        if (r["lookahead"], r["fetch_ratio"]) == (lookahead, result["settings"]["fetch_ratio"])
        and all(r[k] == getattr(score, k) for k in KNOBS)
    }  # fmt: skip
    cells += [f"{_mean(under[b]['missed']):.4f}" if b in under else "" for b in budgets]
    share = under[most]["fetched"] / (-(-int(most) // 16) - 1) if most in under else None
    return [*cells, f"{share:.2%}" if share is not None else ""]


def _lambda_table(result: Row, lookahead: str, budgets: list[str]) -> tuple[str, list[str], list[list[str]]]:
    """midrange, softmax-mean, int8: mean missed by lambda."""
    lambdas = list(result["settings"]["half_ranges"])
    rows = []
    for tokens in result["settings"]["parts"]:
        for budget in budgets:
            values = [
                _mean(find(result, Score("midrange", x, "softmax-mean", "int8", tokens), lookahead)["missed"][budget])
                for x in lambdas
            ]
            rows.append([f"{tokens} tokens @{budget}", *(f"{v:.4f}{' *' if v == min(values) else ''}" for v in values)])
    return f"Lambda (midrange, softmax-mean, int8), lookahead: {lookahead}", ["missed", *map(str, lambdas)], rows


def draw(result: Row, out: Path) -> None:
    """Missed mass by text, default against paper against ideal; agreement by budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    score, lookahead = default_of(result)
    names, most = result["settings"]["texts"], str(result["settings"]["budgets"][-1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2), layout="constrained")
    bars_ = [
        ("paper's score, draft always right", find(result, PAPER, "true draft"), "#b0b7c3"),
        ("paper's score, prompt lookup", find(result, PAPER, "lookup draft"), "#8a93a6"),
        (f"default ({lookahead})", find(result, score, lookahead), "#2a6f97"),
        ("ideal", find(result, None, "ideal"), "#5aa469"),
    ]
    for place, (name, row, colour) in enumerate(bars_):
        at = [i + (place - 1.5) * 0.2 for i in range(len(names))]
        left.bar(at, row["missed"][most], 0.2, label=name, color=colour)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel(f"missed attention mass, budget {most}")
    left.legend(frameon=False)
    runs = [r for r in result["runs"] if "budget" in r and "kl" in r and r["dtype"] == result["settings"]["dtype"]]
    for part, colour in (("**default**", "#2a6f97"), ("**paper**", "#8a93a6"), ("default's score", "#d98324")):
        rows = sorted((r for r in runs if _part(result, r) == part), key=lambda r: r["budget"])
        for name in dict.fromkeys(r["lookahead"] for r in rows):
            line = [r for r in rows if r["lookahead"] == name]
            right.plot([r["budget"] for r in line], [r["kl"] for r in line], "o-", color=colour,
                       label=f"{part.strip('*')}, {name}")  # fmt: skip
    right.set(xlabel="budget, tokens", ylabel="KL(dense || sparse), nats", yscale="log", xscale="log")
    ticks = result["settings"]["budgets"]
    right.set_xticks(ticks, map(str, ticks))
    right.minorticks_off()
    right.legend(frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
