"""The result of `agreement.py`: what its JSON holds, how rows are found in it, and the bars it must meet."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cells import PAPER, Score, all_scores
from recording import Recording
from runs import Job, describe, paired

Row = dict[str, Any]
KNOBS = ("scorer", "half_range", "reduction", "summary_dtype", "tokens_per_summary")


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


def find(result: Row, score: Score | None, lookahead: str, part: str = "cells") -> Row:
    """A setting's row of `result["cells"]`, or of another part like it."""
    wanted = dict.fromkeys(KNOBS) if score is None else asdict(score)
    for row in result[part]:
        if row["lookahead"] == lookahead and all(row[knob] == wanted[knob] for knob in KNOBS):
            return row
    raise KeyError((score, lookahead))


def run_of(result: Row, wanted: Row) -> Row | None:
    """The row of `result["runs"]` with these knobs, lookahead, budget, dtype and speculation (off where none is named)
    that ran, or None."""
    wanted = {"speculation": "off", **wanted}
    for row in result["runs"]:
        told = {"speculation": "off", **row}
        if "agreement" in row and all(told.get(name) == value for name, value in wanted.items()):
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
                gap = abs(mean(missed) - mean(twin["missed"][budget]))
                for name in ("default", "every setting") if own else ("every setting",):
                    gaps[name].append(gap)
    out["int8_changes_kept_mass_by_points"] = {name: 100 * max(values) for name, values in gaps.items()}
    steps, dtype = result["settings"]["steps"], result["settings"]["dtype"]
    twin = {**asdict(score), "lookahead": lookahead, "summary_dtype": "model"}
    for budget in result["settings"]["budgets"]:
        for kind in dict.fromkeys((dtype, "float32")):
            same = {**asdict(score), "lookahead": lookahead, "budget": budget, "dtype": kind}
            row = run_of(result, same)
            if row is None:
                continue
            out[f"agreement_at_{budget}_{kind}"] = row["agreement"]
            pair = [one for mode in ("own", "on") if (one := run_of(result, {**same, "speculation": mode}))]
            if len(pair) == 2:
                out[f"own_agreement_at_{budget}_{kind}"] = [one["agreement"] for one in pair]
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


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
