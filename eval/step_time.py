"""One decode step on a CPU: `OasisCache` against `DynamicCache`, as a ratio in one run.

    python eval/step_time.py [--quick] [--tokens 7000] [--dtype bfloat16 float32] [--out eval/results/step_time.json]

Both caches are prefilled with the same real text once; then steps alternate, so that what else the machine does falls
on both. The reference path runs here; speed on a GPU is another matter and another script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import outs
import torch
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.models import BUNDLED, load

try:
    from provenance import provenance
except ImportError:
    from eval.provenance import provenance

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper's score, previous query": dict(
        lookahead="previous", scorer="minmax", reduction="max", summary_dtype="model", tokens_per_summary=16
    ),
    "nothing fetched": dict(lookahead="none"),
}


def time_step(model: Any, cache: Any, token: torch.Tensor) -> float:
    position = torch.full_like(token, cache.get_seq_length())
    start = time.perf_counter()
    model(input_ids=token, position_ids=position, past_key_values=cache, logits_to_keep=1)
    return (time.perf_counter() - start) * 1e3


def measure(model: Any, ids: torch.Tensor, prompt: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step by setting: median, and the median of the paired ratios to dense."""
    caches = {"dense": DynamicCache(config=model.config)}
    caches |= {name: OasisCache(model, **knobs) for name, knobs in SETTINGS.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    with torch.no_grad():
        for cache in caches.values():
            model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
        for step in range(steps + 3):
            token = ids[:, prompt + step : prompt + step + 1]
            for name, cache in caches.items():
                spent = time_step(model, cache, token)
                if step >= 3:  # the first one selects the working set, and all of them warm up
                    times[name].append(spent)
    return {
        name: {
            "median_ms": statistics.median(spent),
            "ratio": statistics.median(a / b for a, b in zip(spent, times["dense"])),
        }
        for name, spent in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1,500 tokens, few steps")
    parser.add_argument("--model", default=None, help=f"id or path; default {BUNDLED}")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=outs.json_file, default=None)
    args = parser.parse_args()
    tokens, steps = (1500, 8) if args.quick else (args.tokens, args.steps)

    import pydoc_data.topics as topics

    result: dict[str, Any] = {"provenance": provenance(), "tokens": tokens, "steps": steps, "results": {}}
    for dtype in args.dtype:
        model, tokenizer = load(args.model, "cpu", getattr(torch, dtype))
        ids = tokenizer("\n".join(topics.topics.values()), return_tensors="pt").input_ids[:, : tokens + steps + 3]
        result["results"][dtype] = measure(model, ids, tokens, steps)
        for name, row in result["results"][dtype].items():
            print(f"{dtype:9s} {name:30s} {row['median_ms']:8.1f} ms   {row['ratio']:.2f} x dense")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
