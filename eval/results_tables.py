"""Tables and bars of `docs/results.md`, by result file: of those whose scripts have no page of their own."""

from __future__ import annotations

from typing import Any

import report_agreement
import report_tables as tables
from report_tables import Lines, Row

from oasis_hf.bench import STEPS

MET = {True: "met", False: "**missed**", None: ""}


def verdict(measured: float, bar: float | None) -> str:
    return MET[None if bar is None else measured <= bar]


def named(row: Row, names: tuple[str, ...]) -> str:
    """Knobs of a row that it has, as text."""
    return ", ".join(f"{name} {row[name]:g}" for name in names if row.get(name) is not None)


def moved(row: Row) -> int:
    """Bytes over the link. Of a step without transfer older results tell what it would have moved."""
    return 0 if row["what"] == STEPS["prediction"][0] else row["bytes"]


def decode(result: Row) -> list[Lines]:
    out = []
    for part in dict.fromkeys(row["part"] for row in result["rows"]):
        rows = [
            [
                row["what"], named(row, ("cap", "tokens_per_summary", "drafted")), str(row["rows"]),
                f"{row['context'] // 1024}K", f"{row['ms']:.2f}", f"{row['call_ms']:.2f}",
                f"{row['tokens_per_second']:,.0f}", f"{moved(row) / 1e6:,.0f}",
                f"{moved(row) / row['rows'] / 1e6:,.1f}",
                "" if row["bar_ms"] is None else f"{row['bar_ms']:.2f}", verdict(row["ms"], row["bar_ms"]),
            ]
            for row in result["rows"] if row["part"] == part
        ]  # fmt: skip
        head = ["a step of", "", "rows", "context", "ms", "as called", "tokens/s", "MB over the link", "MB a token"]
        out.append((part, [*head, "bar, ms", ""], rows))
    return out


def decode_bars(result: Row) -> list[Row]:
    return [
        tables.bar(_decode_name(row), row["ms"], row["bar_ms"], at_most=True)
        for row in result["rows"] if row["bar_ms"] is not None
    ]  # fmt: skip


def _decode_name(row: Row) -> str:
    where = f"{row['part']}: {row['rows']} rows of {row['context'] // 1024}K"
    return ", ".join(filter(None, (where, row["what"], named(row, ("cap", "tokens_per_summary", "drafted")))))


def bench(result: Row) -> list[Lines]:
    rows = [
        [str(row["rows"]), row["what"], f"{row['ms']:.2f}", f"{row['call_ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
         f"{moved(row) / 1e6:,.0f}", f"{row['floor_ms']:.2f}"]
        for row in result["rows"]
    ]  # fmt: skip
    return [("", ["rows", "a step of", "ms", "as called", "tokens/s", "MB over the link", "floor, ms"], rows)]


def fetch_cap(result: Row) -> list[Lines]:
    out = []
    for mode in dict.fromkeys(row.get("speculation", "off") for row in result["rows"]):
        rows = [
            [row["lookahead"], f"{row['fetch_ratio']:g}", f"{row['agreement']:.2%}", f"{row['kl']:.5f}",
             f"{row['bytes_per_step'] / 1e6:.2f}", f"{row['hit_rate']:.1%}"]
            for row in result["rows"] if row.get("speculation", "off") == mode
        ]  # fmt: skip
        head = ["lookahead", "fetch ratio", "agreement", "KL", "MB a row and step", "of the predicted, resident"]
        out.append((MODES[mode], head, rows))
    return out


MODES = {"off": "Teacher-forced", "own": "Its own text, speculation off", "on": "Its own text, speculation on"}

PREDICTORS = {
    "draft": "the head's guess (right in {right:.0%} of the steps)",
    "draft_top_4": "its four best guesses, by probability (`candidates=4`)",
    "draft_previous": '`"auto"` with a head: its guess and the current query, half each',
    "prompt_lookup": "n-gram matches (right in {right:.0%})", "smoothed": "the last 8 queries",
    "previous": "the current query", "oracle": "the next token itself",
}  # fmt: skip


def lookahead(result: Row, prompt: int, names: tuple[str, ...] = tuple(PREDICTORS)) -> Lines:
    """Agreement of the 20 best, and what the whole selection keeps, of one prompt length and the default score."""
    most, rows = result["k"], []
    for name in names:
        found = {
            (row["k"], row["speculation"]): row for row in result["rows"]
            if (row["prompt"], row["predictor"], row["score"]) == (prompt, name, "default")
        }  # fmt: skip
        if (20, "off") in found:
            top, wide, on = found[20, "off"], found[most, "off"], found[most, "on"]
            label = PREDICTORS[name].format(right=top["right"])
            rows.append([label, f"{top['agreement']:.1%}", f"{top['worst_layer']:.1%}", f"{wide['of_own']:.2%}",
                         f"{on['of_own']:.2%}"])  # fmt: skip
    return f"{prompt:,} tokens", ["predicted by", "agreement", "worst layer", "kept mass", "kept, speculating"], rows


def hit_rate(result: Row) -> list[Lines]:
    return [lookahead(result, prompt) for prompt in dict.fromkeys(row["prompt"] for row in result["rows"])]


def hit_rate_bars(result: Row) -> list[Row]:
    return [{**one, "what": f"{one['prompt']:,} tokens, speculation {one['speculation']}: {one['what']}"}
            for one in result["bars"]]  # fmt: skip


def agreement(result: Row) -> list[Lines]:
    """The first ones; `agreement.md` has all."""
    return report_agreement.tables(result)[:2]


def interference(result: Row) -> list[Lines]:
    rows = [
        [str(row["ctas"]), row["foreground"], f"{row['alone_ms']:.2f}", f"{row['beside_ms']:.2f}",
         f"{row['slower']:+.1%}"]
        for row in result["rows"]
    ]  # fmt: skip
    return [("", ["CTAs of the gather", "what runs beside it", "alone, ms", "beside, ms", "longer"], rows)]


def interference_bars(result: Row) -> list[Row]:
    """Of the grid that a step uses; wider ones are there to show why."""
    return [tables.bar(f"{row['ctas']} CTAs, {row['foreground']}: longer by", row["slower"], 0.05, at_most=True)
            for row in result["rows"] if row["ctas"] == IN_A_STEP]  # fmt: skip


IN_A_STEP = 4
"""CTAs of a gather in a captured step."""


def operators(result: Row) -> list[Lines]:
    rows = [
        [row["op"], row["case"], f"{row['us']:.1f}", f"{row['gb_per_s']:,.0f}", f"{row['floor_us']:.1f}",
         "" if row["bar_us"] is None else f"{row['bar_us']:g}", verdict(row["us"], row["bar_us"])]
        for row in result["rows"]
    ]  # fmt: skip
    return [("", ["operator", "case", "us", "GB/s", "floor, us", "bar, us", ""], rows)]


def operators_bars(result: Row) -> list[Row]:
    return [tables.bar(f"{row['op']}, {row['case']}: us", row["us"], row["bar_us"], at_most=True)
            for row in result["rows"] if row["bar_us"] is not None]  # fmt: skip


def prefill(result: Row) -> list[Lines]:
    rows = [
        [one["what"], *(f"{one[key]:{form}}" for key, form in
                        (("ms", ",.0f"), ("ratio", ".2f"), ("peak_mb", ",.0f"), ("saved_mb", ",.0f")))]
        for one in result["readings"]
    ]  # fmt: skip
    return [("", ["cache", "ms", "times dense", "peak, MB", "lower by, MB"], rows)]


def prefill_bars(result: Row) -> list[Row]:
    one, bars = result["readings"][1], result["bars"]
    return [tables.bar("time, times dense's", one["ratio"], bars["ratio"], at_most=True),
            tables.bar("peak lower by, MB", one["saved_mb"], bars["saved_mb"])]  # fmt: skip


def step_time(result: Row) -> list[Lines]:
    rows = [[dtype, name, f"{row['median_ms']:.1f}", f"{row['ratio']:.2f}"]
            for dtype, found in result["results"].items() for name, row in found.items()]  # fmt: skip
    return [("", ["dtype", "setting", "ms a step", "times dense"], rows)]


def traces(result: Row) -> list[Lines]:
    rows = [[str(row["cap"]), f"{row['mean']:.2f}", ", ".join(f"{share:.3f}" for share in row["shares"])]
            for row in result["rows"]]  # fmt: skip
    return [("", ["C", "blocks a KV head and step, mean", "shares of 0, 1, ... C"], rows)]


def head(result: Row) -> list[Lines]:
    rows = [
        [name.replace("_", " "), f"{one['samples']}", f"{one['next_top1']:.1%}", f"{one['tau']:.2f}",
         ", ".join(f"{x:.2f}" for x in one["accept_rate_by_depth"])]
        for name, one in result["evaluation"].items()
    ]  # fmt: skip
    return [("", ["held-out texts", "samples", "next token right", "tokens a pass", "kept, by place"], rows)]


def adapter(result: Row) -> list[Lines]:
    rows = [
        [f"{one['length']:,}", one["task"], str(one["samples"]), f"{one['score']:.1%}", f"{one['exact']:.1%}"]
        for one in result["evaluation"]
    ]  # fmt: skip
    return [("", ["tokens", "task", "samples", "score", "exact"], rows)]


def acceptance(result: Row) -> list[Lines]:
    counts = sorted({row["drafts"] for row in result["rows"]})
    rows = []
    for key in dict.fromkeys((row["drafter"], row["context"], row["rows"]) for row in result["rows"]):
        mine = {row["drafts"]: row for row in result["rows"] if (row["drafter"], row["context"], row["rows"]) == key}
        cells = [f"{mine[count]['tokens_a_pass']:.2f}" if count in mine else "" for count in counts]
        rows.append([key[0], f"{key[1]:,}", str(key[2]), f"{mine[1]['top1']:.1%}" if 1 in mine else "", *cells])
    names = [f"tokens a pass, {count} draft{'s' if count > 1 else ''}" for count in counts]
    return [("", ["drafter", "context", "rows", "top-1", *names], rows)]


def lossless(result: Row) -> list[Lines]:
    rows: list[list[str]] = []
    for one in result["rows"]:
        gap = max((place["gap"] for place in one["differs"]), default=0.0)
        rows.append([one["dtype"], one["prompt"], f"{one['tokens']:,}", f"{len(one['differs'])}",
                     f"{gap:.4f}" if one["differs"] else "", f"{one['tokens_a_pass']:.2f}"])  # fmt: skip
    names = ["dtype", "prompt", "tokens", "other than dense's", "widest gap of dense's two best", "tokens a pass"]
    return [("", names, rows)]


def lossless_bars(result: Row) -> list[Row]:
    out = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["dtype"] == dtype]
        bar = result["gap_bar"]
        good = [one["equal"] or (dtype == "bfloat16" and all(place["gap"] < bar for place in one["differs"]))
                for one in mine]  # fmt: skip
        out.append(tables.bar(f"{dtype}: prompts answered as dense does", sum(good), len(good)))
    return out


def speculation(result: Row) -> list[Lines]:
    rows = [
        [one["loop"], str(one["rows"]), str(one["drafts"]), f"{one['tokens_per_second']:,.1f}",
         f"{one['times_without']:.2f}", f"{one['ms_a_pass']:.2f}", f"{one['tokens_a_pass']:.2f}",
         f"{one['bytes_a_token'] / 1e6:.1f}"]
        for one in result["runs"]
    ]  # fmt: skip
    names = ["loop", "rows", "drafts", "tokens/s", "times without", "ms a pass", "tokens a pass", "MB a token"]
    share = [[str(one["rows"]), f"{one['step_ms']:.2f}", f"{one['without_ms']:.2f}", f"{one['share']:.1%}"]
             for one in result["share_of_a_draft"]]  # fmt: skip
    return [("", names, rows), ("A draft's share of a step", ["rows", "ms", "ms without", "share"], share)]


def speculation_bars(result: Row) -> list[Row]:
    """The best number of drafts of each loop and batch."""
    best: dict[tuple[str, int], Row] = {}
    for one in result["runs"]:
        key = (one["loop"], one["rows"])
        if one["bar"] and (key not in best or one["times_without"] > best[key]["times_without"]):
            best[key] = one
    return [tables.bar(f"{loop}, {rows} rows: times without", one["times_without"], one["bar"])
            for (loop, rows), one in best.items()]  # fmt: skip


def given(result: Row) -> list[Row]:
    """The bars that a result holds itself."""
    bars: Any = result.get("bars", [])
    return bars if isinstance(bars, list) else []
