"""The README's tables of results: what stands there between `<!-- results: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import overhead
import report_tables as tables
import results_tables as of
from report_tables import Row
from result_accuracy import SCORES, Setting

SPEED = (
    ("16K tokens a row, C = 3", "pipeline", {"cap": 3, "tokens_per_summary": 16, "drafted": 1}),
    ("16K, C = 6", "pipeline", {"cap": 6, "tokens_per_summary": 16, "drafted": 1}),
    ("16K, dense, as many rows as fit", "dense", {"rows": 24}),
    ("16K, `DynamicCache`", "stock", {"rows": 24}),
    ("32K, C = 3", "long", {"cap": 3, "tokens_per_summary": 16, "drafted": 1}),
    ("32K, dense, as many as fit", "dense", {"rows": 12}),
    ("32K, C = 6, 8-token summaries", "long", {"cap": 6, "rows": 1}),
    ("32K, dense", "dense", {"rows": 1}),
)  # fmt: skip
"""Lines of the table, and the rows of `decode.json` that they are."""

MODEL_GENERATE = "through model.generate"
PREDICTED = ("draft", "draft_top_4", "draft_previous", "prompt_lookup", "smoothed", "previous")


def speed(folder: Path) -> list[str]:
    """Steps, then what `model.generate` and a gather cost."""
    told, rows = _read(folder, "decode"), []
    for label, part, key in SPEED:
        (one,) = [row for row in told["rows"] if row["part"] == part and key.items() <= row.items()]
        link = f"{one['bytes'] / 1e6:,.0f} MB" if one["bytes"] else ""
        ms = f"{one['ms']:.1f}" if one["ms"] < 99.5 else f"{one['ms']:.0f}"
        rows.append([label, str(one["rows"]), ms, f"{one['tokens_per_second']:,.0f}", link])
    head = ["", "rows", "ms a step", "tokens/s", "over the link a step"]
    (own,) = [row for row in told["rows"] if row["what"] == MODEL_GENERATE]
    beside = {
        row["foreground"].split(" (")[1].rstrip(")"): row["slower"] for row in _read(folder, "interference")["rows"]
        if row["ctas"] == of.IN_A_STEP
    }  # fmt: skip
    return [
        *tables.markdown([("", head, rows)]),
        _wrapped(
            f"Through `model.generate` {own['rows']} rows run at {own['share_of_graph']:.0%} of the replayed step's "
            "rate. A gather is not free for what runs beside it: with four SMs and the bytes it has in flight, large "
            f"products take {beside['compute bound']:.0%} longer while it lasts and copies in GPU memory "
            f"{beside['memory bound']:.0%} (`eval/interference.py`), which is why the step places it where the model "
            "waits anyway."
        ),
    ]


def lookahead(folder: Path) -> list[str]:
    """The predictors at 7,000 tokens, and how much of it is being right."""
    told = _read(folder, "hit_rate")
    _, head, rows = of.lookahead(told, 7000, PREDICTED)
    (draft,) = [
        row for row in told["rows"] if (row["prompt"], row["predictor"], row["k"], row["speculation"], row["score"])
        == (7000, "draft", 20, "off", "default")
    ]  # fmt: skip
    return [
        *tables.markdown([("", head, rows)]),
        _wrapped(
            f"A right guess agrees in {draft['agreement_right']:.1%}, a wrong one in {draft['agreement_wrong']:.0%}, "
            "so agreement says mostly how often the head is right."
        ),
    ]


def speculation(folder: Path) -> list[str]:
    """Times the tokens a second of the same loop without drafts."""
    told, rows = _read(folder, "speculation"), []
    for loop in ("oasis_hf.generate", "model.generate"):
        for drafts in sorted({one["drafts"] for one in told["runs"] if one["drafts"] and one["loop"] == loop}):
            mine = {one["rows"]: one for one in told["runs"] if (one["loop"], one["drafts"]) == (loop, drafts)}
            times = [f"{mine[count]['times_without']:.2f}" if count in mine else "" for count in (1, 8, 32)]
            rows.append([f"`{loop}`", str(drafts), *times])
    share = sum(one["share"] for one in told["share_of_a_draft"]) / len(told["share_of_a_draft"])
    return [
        *tables.markdown([("", ["tokens/s, times those without", "drafts", "1 row", "8 rows", "32 rows"], rows)]),
        _wrapped(
            f"Qwen3-8B's shape on an H200, {told['context']:,} tokens a row, C = {told['fetched']}; drafts are "
            f"accepted as often as the shipped head's were for SmolLM2, and each takes {share:.1%} of a step."
        ),
    ]


def accuracy(folder: Path) -> list[str]:
    """Points less than dense of each mode with the adapter, and what the correction lane costs."""
    told = _read(folder, "accuracy")
    found = {(row["length"], row["budget"], Setting(row["mode"], row["budget"], row["score_name"]).label): row
             for row in told["summaries"] if row["model"] == "adapter" and row["equal"] == "tokens"}  # fmt: skip
    at = sorted({(length, budget) for length, budget, _ in found if length != "all" and budget})
    labels = dict.fromkeys(label for _, budget, label in found if budget)
    dense = {length: found[length, 0, "dense"] for length in dict.fromkeys(length for length, _ in at)}
    fewer = {key: key[0] in dense and row["tasks"] < dense[key[0]]["tasks"] for key, row in found.items()}
    cells = {
        key: f"{100 * row['difference']:+.1f}" + f" ({row['tasks']})" * fewer[key] for key, row in found.items()
    }  # fmt: skip
    rows = [[label, *(cells.get((*key, label), "") for key in at)] for label in labels]
    one, many = (overhead.lost(_read(folder, "overhead"), rows, "watch") for rows in (1, 44))
    scores = ", ".join(
        f"{100 * row['score']:.1f} at {length:,} ({row['tasks']} tasks)" for length, row in dense.items()
    )
    lane = ", ".join(f"{knob}={value!r}" for knob, value in SCORES["corrected"].items())
    shortest = min(row["samples"] // row["tasks"] for row in found.values())
    return [
        *tables.markdown([("", ["points", *(f"{length:,} tokens, {budget}" for length, budget in at)], rows)]),
        _wrapped(
            "Mean over tasks of long-context retrieval (SmolLM2 with `eval/adapter`) in which dense scores 60 to 95%: "
            f"{scores}; in brackets, of how many where it is not all. Every mode attends to as many tokens; at least "
            f"{shortest} samples a task on the mean so far. "
            f"Corrected: `{lane}`, which costs {one:.0%} of the tokens/s of one row and {many:.0%} of 44 "
            "rows' (`eval/overhead.py`)."
        ),
    ]


BLOCKS = {"speed": speed, "lookahead": lookahead, "speculation": speculation, "accuracy": accuracy}


def filled(text: str, folder: Path) -> str:
    """The README with its blocks as the results in `folder` have them.

    Raises:
        ValueError: it lacks a block, or has one of another name.
    """
    names = re.findall(r"^<!-- results: (\w+) -->$", text, re.M)
    if sorted(names) != sorted(BLOCKS):
        raise ValueError(f"The README's blocks of results are {', '.join(names) or 'none'}: use {', '.join(BLOCKS)}.")
    for name, make in BLOCKS.items():
        block = "\n\n".join([f"<!-- results: {name} -->", *make(folder), "<!-- end -->"])
        text = re.sub(rf"^<!-- results: {name} -->$.*?^<!-- end -->$", lambda _, b=block: b, text, flags=re.M | re.S)
    return text


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _read(folder: Path, name: str) -> Row:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
