"""A prompt on one GPU: time and peak memory of `OasisCache` against `DynamicCache`, over a model of random weights.

    python eval/prefill.py [--tokens 32768] [--rows 1] [--ctas 0 8 32] [--out eval/results/prefill.json]

The same random ids every time, logits of the last token only; times are a caller's own, from the call until the GPU is
idle, the median of 3 after a warm-up. "pinned before": `host_capacity_tokens`, and a first prompt that made the pages.
"cold": one prompt of a new cache that pins its pages as it goes. Peaks are those of `torch.cuda`, less the weights. Of
the KV's size they can't save the summaries (6 % of it in int8) and the layers on their way, one or two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import outs
import torch
from provenance import provenance
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.bench import SHAPES, random_model
from oasis_hf.ops import cuda

RATIO = 1.10
"""Most that a prompt may take, of the time with a `DynamicCache`."""

SAVED = 0.85
"""Least that its peak must be lower, of the KV's size."""


@torch.no_grad()
def prefill(model: Any, cache: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Milliseconds of a prompt, and the most bytes allocated in it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, torch.cuda.max_memory_allocated()


def reading(what: str, runs: list[tuple[float, int]], weights: int) -> dict[str, Any]:
    return {
        "what": what,
        "ms": statistics.median(ms for ms, _ in runs),
        "all_ms": [ms for ms, _ in runs],
        "peak_mb": (max(peak for _, peak in runs) - weights) / 1e6,
    }


def measure(model: Any, ids: torch.Tensor, ctas: list[int], runs: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Readings, the dense one first, and bytes in MB that the cache tells of itself."""
    weights = torch.cuda.memory_allocated()
    dense = [prefill(model, DynamicCache(config=model.config), ids) for _ in range(runs + 1)]
    readings = [reading("DynamicCache", dense[1:], weights)]
    torch.cuda.empty_cache()

    cache = OasisCache(model, host_capacity_tokens=ids.shape[1])
    prefill(model, cache, ids)  # pins, and makes the pages
    for count in ctas:
        cuda.WRITE_CTAS = count
        warm = []
        for _ in range(runs + 1):
            cache.reset()
            warm.append(prefill(model, cache, ids))
        name = "OasisCache, pinned before" + (f", {count} CTAs write" if count else "")
        readings.append(reading(name, warm[1:], weights))
    cuda.WRITE_CTAS = 0
    sizes = {f"{name}_mb": size / 1e6 for name, size in cache.memory().items()}
    del cache
    torch.cuda.empty_cache()

    cold = OasisCache(model)
    readings.append(reading("OasisCache, cold", [prefill(model, cold, ids)], weights))
    return readings, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--ctas", nargs="+", type=int, default=[0], help="sizes of the write's grid; 0: its default")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=outs.json_file)
    args = parser.parse_args()
    model = random_model(args.shape)
    ids = torch.randint(model.config.vocab_size, (args.rows, args.tokens), device="cuda")
    readings, sizes = measure(model, ids, args.ctas, args.runs)

    dense, oasis = readings[:2]
    kv, summaries = sizes["dense_mb"], sizes["summaries_mb"]
    print(f"{args.shape}, {args.rows} x {args.tokens:,} tokens; KV {kv:,.0f} MB, its summaries {summaries:,.0f} MB")
    for one in readings:
        one |= {"ratio": one["ms"] / dense["ms"], "saved_mb": dense["peak_mb"] - one["peak_mb"]}
        numbers = f"{one['ms']:9.1f} ms  {one['ratio']:5.2f} x dense  peak {one['peak_mb']:9,.0f} MB"
        print(f"{one['what']:44s}{numbers}  saved {one['saved_mb']:8,.0f} MB")
    least = SAVED * kv
    bars = {"ratio": oasis["ratio"] <= RATIO, "saved": oasis["saved_mb"] >= least}
    ratio, saved = ("met" if bars[name] else "MISSED" for name in ("ratio", "saved"))
    print(f"bars: at most {RATIO:.2f} x dense {ratio}; peak lower by {least:,.0f} MB {saved}")
    if args.out:
        result = {
            "provenance": provenance("cuda"), "shape": args.shape, "tokens": args.tokens, "rows": args.rows,
            "bars": {"ratio": RATIO, "saved_mb": least, "met": bars}, **sizes, "readings": readings,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
