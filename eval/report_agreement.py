"""The tables and the figure of `agreement.py`, for the terminal and for markdown alike."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import report_own as own
from cells import LOOKAHEADS, PAPER, Score, lookahead_named
from report_tables import Lines, console, made, markdown
from report_tables import show as show_tables
from result_agreement import KNOBS, Row, default_of, find, mean


def note(line: str) -> None:
    console.print(f"[dim]{line}[/dim]", highlight=False)


def write_markdown(result: Row, out: Path) -> None:
    pages = [f"# Agreement and kept mass: {result['settings']['model']}", *made(result["provenance"])]
    pages += [about(result), *markdown(tables(result))]
    out.write_text("\n\n".join(pages) + "\n")


def show(result: Row) -> None:
    show_tables(tables(result))


def about(result: Row) -> str:
    settings = result["settings"]
    return (
        f"Default: {label(default_of(result)[0])}, lookahead {default_of(result)[1]}."
        + f"\n\n{settings['prompt']:,} prompt tokens and {settings['steps']} teacher-forced steps a text. *Missed* is "
        "1 - kept: the share of the true attention that is on no selected block, not on the open block and not on the "
        "token itself; mean over texts, layers, KV heads and steps, **without** a fetch cap. *Under the cap* it is "
        f"what the working set misses when at most {settings['fetch_ratio']:.0%} of K comes in a step. *Same*: overlap "
        "with the selection of the true next query. *Entering*: share of K that a step's selection adds to the one "
        'before. "true draft" knows the next token: an upper bound (and what on-demand selection would choose). '
        "*Own text, off / on*: the same documents continued by the model itself, greedily, with speculation off and on "
        "(free-running, right drafts accepted, so that the tokens of a pass share what the pass before selected); in "
        "the model's runs it is the text that the cache itself says, and dense is asked along it."
    )


def tables(result: Row) -> list[Lines]:
    """Titles, heads and rows, for the terminal and for markdown alike."""
    budgets = [str(b) for b in result["settings"]["budgets"]]
    score, lookahead = default_of(result)
    out = [("Bars", ["what", "measured"], _bar_rows(result["bars"]))]
    rows = [
        [t["name"], f"{t['tokens']:,}", f"{t['lookup_found']:.1%}", f"{t['lookup_right']:.1%}"] for t in result["texts"]
    ]
    shows_own = own.there(result)
    head = ["text", "tokens", "prompt lookup found", "and was right"]
    if shows_own:
        head += ["own text: found", "and was right", "tokens a pass"]
        rows = [
            [*row, f"{t['lookup_found']:.1%}", f"{t['lookup_right']:.1%}", f"{t['tokens_a_pass']:.2f}"]
            for row, t in zip(rows, result["texts_own"])
        ]
    out.append(("Texts", head, rows))
    rows = [[str(i), _name(r), r["lookahead"], f"{r['missed']:.4f}"] for i, r in enumerate(result["ranked"], 1)]
    title = "Best int8 settings that know no future, at the paper's bytes of summaries"
    head = ["", "score", "lookahead", "missed, mean over budgets"]
    if shows_own:
        head.append(own.HEAD)
        for row, one in zip(rows, result["ranked"]):
            knobs = Score(**{k: one[k] for k in KNOBS})
            row.append(own.over_budgets(result, knobs, one["lookahead"], budgets))
    out.append((title, head, rows))
    out.append(_run_table(result))
    for name, one in dict.fromkeys((("the default's score", score), ("the paper's score", PAPER))):
        head = ["lookahead", *(f"missed @{b}" for b in budgets), *(f"same @{b}" for b in budgets)]
        head += [f"entering @{budgets[-1]}", *(f"missed @{b} under the cap" for b in budgets), "fetched of K"]
        out.append((f"Lookaheads, {name}: {label(one)}", head, [_lookahead_row(result, one, n) for n in LOOKAHEADS]))
        if shows_own:
            out.append(own.lookaheads(result, name, one, label(one)))
    out.append(_ratio_table(result))
    for name in dict.fromkeys(("true draft", lookahead)):
        head = ["score", *(f"missed @{b}" for b in budgets), f"worst layer @{budgets[-1]}"]
        rows = [["ideal: top K by true mass", *_missed(find(result, None, "ideal"), budgets)]]
        ordered = [r for r in result["cells"] if r["lookahead"] == name and r["scorer"]]
        if len(ordered) > 40:  # lambda has a table of its own
            ordered = [r for r in ordered if r["half_range"] in (1.0, score.half_range)]
        ordered.sort(key=lambda r: mean(r["missed"][budgets[-1]]))
        rows += [[_name(r), *_missed(r, budgets)] for r in ordered]
        if shows_own:
            head += [f"@{b}, {own.HEAD}" for b in budgets]
            scores: list[Score | None] = [Score(**{k: r[k] for k in KNOBS}) for r in ordered]
            for row, of in zip(rows, [None, *scores]):
                row += [own.cell(result, of, name if of else "ideal", "missed", b) for b in budgets]
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
    return [*(f"{mean(row['missed'][b]):.4f}" for b in budgets), f"{row['worst'][budgets[-1]]:.3f}"]


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
        elif name.startswith("own_agreement"):
            what = f"the same on its own text @{budget}, {dtype}, speculation off / on"
            rows.append([what, " / ".join(f"{x:.2%}" for x in value)])
        elif name.startswith("int8_less"):
            low, high = value["interval"]
            what = f"int8 less the model's dtype, top-1 agreement @{budget}, {dtype}, paired 95%"
            rows.append([what, f"{value['mean']:+.2%} ({low:+.2%} to {high:+.2%})"])
    return rows


def told(row: Row) -> str:
    """A run in a line."""
    what = row["why"] if "why" in row else f"{_name(row)}, {row['lookahead']} @{row['budget']} {row['dtype']}"
    what += {"own": ", own text", "on": ", own text, speculation on"}.get(row.get("speculation", "off"), "")
    return f"{what}: {row.get('skipped') or format(row['agreement'], '.2%')}"


def _part(result: Row, row: Row) -> str:
    """What a run is in the table: the default, the paper's, or one of the best."""
    score, lookahead = default_of(result)
    knobs = {knob: row[knob] for knob in KNOBS}
    if knobs == asdict(PAPER):
        return "**paper**" if lookahead_named(row["lookahead"]).real else "paper, draft always right"
    if knobs == asdict(score):
        if row["lookahead"] == lookahead:
            return "**default**"
        return "default's score" + ("" if lookahead_named(row["lookahead"]).real else ", draft always right")
    if row["lookahead"] == lookahead and knobs == asdict(score.replace(summary_dtype=row["summary_dtype"])):
        return "default in the model's dtype"
    for place, best in enumerate(result["ranked"], 1):
        if row["lookahead"] == best["lookahead"] and all(knobs[knob] == best[knob] for knob in KNOBS):
            return f"best {place}"
    return ""


def _run_table(result: Row) -> Lines:
    head = ["run", "score", "lookahead", "budget", "dtype", "top-1 agreement", "least text", "KL", "loss +"]
    head += ["KiB/step", "hit rate", f"{own.HEAD}: top-1", "KL", "tokens a forward"]
    settings: dict[str, list[Row]] = {}
    for row in sorted(result["runs"], key=lambda r: (r["dtype"], -r.get("budget", 1 << 20), r.get("kl", 9))):
        if "skipped" not in row:
            settings.setdefault(str([row.get(k) for k in (*KNOBS, "lookahead", "budget", "dtype")]), []).append(row)
    rows = []
    for group in settings.values():
        forced = next((row for row in group if row.get("speculation", "off") == "off"), None)
        row = forced or group[0]
        if "budget" in row:
            who = [_part(result, row), _name(row), row["lookahead"], str(row["budget"]), row["dtype"]]
        else:
            who = [row["why"], "", "", "", row["dtype"]]
        told = [""] * 6
        if forced:
            low, high = row["agreement_interval"]
            moved = ["", ""]
            if "hit_rate" in row:
                moved = [f"{row['bytes_per_step'] / 1024:,.0f}", f"{row['hit_rate']:.1%}"]
            least = min(row["agreement_by_text"].values())
            told = [f"{row['agreement']:.2%} ± {(high - low) / 2:.2%}", f"{least:.1%}", f"{row['kl']:.5f}",
                    f"{row['loss_increase']:+.4f}", *moved]  # fmt: skip
        rows.append([*who, *told, *own.runs(group)])
    title = "The model against the dense cache (bytes a row and step): teacher-forced, speculation off"
    return f"{title}; and on its own text", head, rows


def _ratio_table(result: Row) -> Lines:
    """Lookaheads at equal bytes: missed mass and blocks fetched by fetch ratio."""
    score, budget = default_of(result)[0], result["settings"]["budgets"][-1]
    found = {
        (r["lookahead"], r["fetch_ratio"]): r for r in result["capped"]
        if r["budget"] == budget and all(r[k] == getattr(score, k) for k in KNOBS)
    }  # fmt: skip
    ratios = sorted({ratio for _, ratio in found})
    rows = [
        [name, *(f"{mean(r['missed']):.4f} / {r['fetched']:.2f}" if (r := found.get((name, ratio))) else ""
                 for ratio in ratios)]
        for name in LOOKAHEADS
    ]  # fmt: skip
    head = ["lookahead", *(f"at most {ratio:.2%} of K" for ratio in ratios)]
    if own.there(result):
        head += [f"{name} {ratio:.2%}, {own.HEAD}" for ratio in ratios for name in ("missed", "fetched")]
        rows = [
            [*row, *(cell for ratio in ratios for cell in own.capped(result, score, row[0], budget, ratio))]
            for row in rows
        ]
    title = f"Lookaheads by the bytes they move: the default's score @{budget}, missed mass / blocks fetched a step"
    return title, head, rows


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
    cells += [f"{mean(under[b]['missed']):.4f}" if b in under else "" for b in budgets]
    share = under[most]["fetched"] / (-(-int(most) // 16) - 1) if most in under else None
    return [*cells, f"{share:.2%}" if share is not None else ""]


def _lambda_table(result: Row, lookahead: str, budgets: list[str]) -> Lines:
    """midrange, softmax-mean, int8: mean missed by lambda."""
    lambdas = list(result["settings"]["half_ranges"])
    rows = []
    for tokens in result["settings"]["parts"]:
        for budget in budgets:
            values = [
                mean(find(result, Score("midrange", x, "softmax-mean", "int8", tokens), lookahead)["missed"][budget])
                for x in lambdas
            ]
            rows.append([f"{tokens} tokens @{budget}", *(f"{v:.4f}{' *' if v == min(values) else ''}" for v in values)])
            if own.there(result):
                scores = [Score("midrange", x, "softmax-mean", "int8", tokens) for x in lambdas]
                told = [own.cell(result, score, lookahead, "missed", budget) for score in scores]
                rows.append([f"the same, {own.HEAD}", *told])
    return f"Lambda (midrange, softmax-mean, int8), lookahead: {lookahead}", ["missed", *map(str, lambdas)], rows


def draw(result: Row, out: Path) -> None:
    """Missed mass by text and by budget, default against paper against ideal; KL against bytes moved of the runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    score, lookahead = default_of(result)
    names, budgets = result["settings"]["texts"], result["settings"]["budgets"]
    most = str(budgets[-1])
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    settings = [
        ("paper's score, draft always right", find(result, PAPER, "true draft"), "#b0b7c3"),
        ("paper's score, prompt lookup", find(result, PAPER, "lookup draft"), "#8a93a6"),
        (f"default ({lookahead})", find(result, score, lookahead), "#2a6f97"),
        ("ideal", find(result, None, "ideal"), "#5aa469"),
    ]
    for place, (name, row, colour) in enumerate(settings):
        at = [i + (place - 1.5) * 0.2 for i in range(len(names))]
        left.bar(at, row["missed"][most], 0.2, label=name, color=colour)
        middle.plot(budgets, [mean(row["missed"][str(b)]) for b in budgets], "o-", label=name, color=colour)
    left.set_xticks(range(len(names)), names)
    left.set_ylabel(f"missed attention mass, budget {most}")
    middle.set(xscale="log", yscale="log", xlabel="budget, tokens", ylabel="missed attention mass, mean over texts")
    middle.set_xticks(budgets, map(str, budgets))
    middle.minorticks_off()
    runs = [r for r in result["runs"] if r.get("budget") == budgets[-1] and "kl" in r]
    runs = [r for r in runs if r["dtype"] == result["settings"]["dtype"] and r.get("speculation", "off") == "off"]
    for name in dict.fromkeys(r["lookahead"] for r in runs):
        line = [r for r in runs if r["lookahead"] == name and _part(result, r) not in ("**default**", "**paper**")]
        right.plot([r["bytes_per_step"] / 1024 for r in line], [r["kl"] for r in line], "o", label=name, alpha=0.8)
    for part, colour in (("**default**", "#2a6f97"), ("**paper**", "#8a93a6")):
        line = [r for r in runs if _part(result, r) == part]
        at = [r["bytes_per_step"] / 1024 for r in line], [r["kl"] for r in line]
        right.plot(*at, "*", markersize=12, color=colour, label=part.strip("*"))
    right.legend(frameon=False)
    right.set(
        xlabel="KiB moved a row and step",
        ylabel=f"KL(dense || sparse), nats, budget {most}",
        ylim=(0, None),
        xlim=(0, None),
    )
    left.legend(frameon=False)
    figure.savefig(out, dpi=110)
    plt.close(figure)
