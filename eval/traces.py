"""How many blocks a KV head fetches in a step of a real model: what `oasis-hf bench --trace` moves (issue B).

    python eval/traces.py [--quick] [--tokens 6000] [--steps 200] [--device cuda] [--out eval/results/traces.json]

The model decodes real texts token by token, as they stand, with the default lookahead; counters are read after every
step. A row gives, for one cap C, the share of (text, step, layer, KV head) that fetched 0, 1, ... C blocks.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import outs
import torch

from oasis_hf import OasisCache
from oasis_hf.models import BUNDLED, load

try:
    import texts
    from provenance import provenance
except ImportError:
    from eval import texts
    from eval.provenance import provenance

K = 128


@torch.no_grad()
def fetched(model: Any, ids: torch.Tensor, prompt: int, steps: int, cap: int) -> torch.Tensor:
    """Blocks by step, layer and KV head `[steps, L, H]`, once the working set has settled for 20 steps."""
    cache = OasisCache(model, budget=(K + 1) * 16, fetch_ratio=cap / K)
    model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    counts = []
    for at in range(prompt, prompt + steps + 21):
        model(
            ids[:, at : at + 1], past_key_values=cache, logits_to_keep=1,
            position_ids=torch.full((1, 1), at, device=ids.device),
        )  # fmt: skip
        counts.append(cache.stats()["fetched"].clone())
    return torch.stack(counts).diff(dim=0)[20:]


def row(cap: int, counts: torch.Tensor) -> dict[str, Any]:
    shares = counts.flatten().bincount(minlength=cap + 1).double()
    shares /= shares.sum()
    mean = float(counts.double().mean())
    print(
        f"C={cap}: {mean:.2f} blocks a KV head and step; shares of 0..{cap}: {[round(x, 3) for x in shares.tolist()]}"
    )
    return {"cap": cap, "mean": mean, "shares": shares.tolist(), "by_layer": counts.double().mean((0, 2)).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one text, few steps")
    parser.add_argument("--model", default=None, help=f"id or path; default {BUNDLED}")
    parser.add_argument("--texts", nargs="+", default=["reference", "code", "tutorial"])
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--caps", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=outs.json_file)
    args = parser.parse_args()
    names, steps, tokens = (args.texts[:1], 8, 3000) if args.quick else (args.texts, args.steps, args.tokens)
    model, tokenizer = load(args.model, args.device, torch.float32 if args.device == "cpu" else torch.bfloat16)
    rows = []
    for cap in args.caps:
        counts = []
        for name in names:
            ids = texts.tokenize(tokenizer, name, tokens + steps + 21).view(1, -1).to(args.device)
            counts.append(fetched(model, ids, tokens, steps, cap))
        rows.append(row(cap, torch.cat(counts)))
    if args.out:
        told = {"provenance": provenance(args.device), "model": args.model or BUNDLED, "texts": names}
        told |= {"tokens": tokens, "steps": steps, "budget": (K + 1) * 16, "rows": rows}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
