"""The file tier: a context whose KV is four times the host memory that it gets, against all of it in memory (issue E).

    python eval/file_tier.py [--tokens 7000] [--new 128] [--share 0.25] [--out eval/results]
    python eval/file_tier.py --quick

One real text, read and gone on with by `store="host"` and by `store="file"`, whose memory is `--share` of what the
first one's KV takes. The tokens must be the same; told are seconds of the prompt and of decoding, and what was read
from the file and written to it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import outs
import texts
import torch
from provenance import provenance
from report_tables import Lines, Row, bar, show

from oasis_hf import OasisCache, supported
from oasis_hf.attach import cache_name
from oasis_hf.models import load
from oasis_hf.store.host import blocks_of

TITLE = "A context larger than memory: the file tier"
STORES = ("host", "file")


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, new: int, **knobs: Any) -> tuple[Row, list[int]]:
    """Seconds and bytes of one cache, and the greedy ids behind a prompt `[1, n]`."""
    cache = OasisCache(model, **knobs)
    name, said, times = cache_name(model), [], [time.perf_counter()]
    logits = model(ids, **{name: cache}, logits_to_keep=1).logits
    for step in range(new):
        token = logits[:, -1:].argmax(-1)
        said.append(int(token))
        times.append(time.perf_counter())
        if step < new - 1:
            logits = model(token, **{name: cache}).logits
    pages = cache.state.store.pool
    moved = {
        f"bytes_{what}": getattr(pages, what) * pages.page_bytes if knobs["store"] == "file" else 0
        for what in ("read", "written")
    }
    memory, heads = cache.memory(), supported.kv_shape(supported.text_config(model))[0]
    row = {
        "store": knobs["store"], "heads": len(cache.sparse_layers) * heads, "page_bytes": cache.state.block_bytes,
        "prompt_s": times[1] - times[0], "decode_s": times[-1] - times[1], **moved, "host": memory["host"],
        "file": memory.get("file", 0),
    }  # fmt: skip
    return row, said


def bars(result: Row) -> list[Row]:
    filed = next(row for row in result["rows"] if row["store"] == "file")
    return [
        bar("tokens that differ from those of store='host'", result["differ"], 0, at_most=True),
        bar("host memory, share of the KV", filed["host"] / result["kv_bytes"], result["share"], at_most=True),
    ]


def lines(result: Row) -> list[Lines]:
    head = ["store", "host memory, MB", "file, MB", "prompt, s", "decoding, s", "read, MB", "written, MB"]
    rows = [
        [row["store"], *(f"{row[name] / 1e6:,.1f}" for name in ("host", "file")), f"{row['prompt_s']:.1f}",
         f"{row['decode_s']:.1f}", *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_read", "bytes_written"))]
        for row in result["rows"]
    ]  # fmt: skip
    title = (
        f"{result['tokens']:,} tokens and {result['new']} more, budget {result['budget']:,}, {result['dtype']}: "
        f"{result['kv_bytes'] / 1e6:,.1f} MB of KV"
    )
    return [(title, head, rows)]


def measure(args: argparse.Namespace) -> Row:
    model, tokenizer = load(args.model, "cpu", getattr(torch, args.dtype))
    ids = texts.tokenize(tokenizer, args.text, args.tokens)[None]
    knobs: dict[str, Any] = {"budget": args.budget}
    first, said = run(model, ids, args.new, store="host", **knobs)
    kv_bytes = first["heads"] * blocks_of(args.tokens + args.new) * first["page_bytes"]
    most = int(args.share * kv_bytes)
    second, filed = run(model, ids, args.new, store="file", host_bytes=most, file_dir=args.file_dir, **knobs)
    names = ("dtype", "text", "tokens", "new", "budget", "share")
    result = {
        "provenance": provenance(), **{name: getattr(args, name) for name in names}, "kv_bytes": kv_bytes,
        "rows": [first, second], "differ": sum(a != b for a, b in zip(said, filed, strict=True)),
    }  # fmt: skip
    return {**result, "bars": bars(result)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 tokens and 8 more")
    parser.add_argument("--model", help="folder or id (default: the bundled one)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--text", default="reference", choices=list(texts.SOURCES))
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--new", type=int, default=128, help="tokens that are decoded")
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--share", type=float, default=0.25, help="of the KV's bytes that host memory may hold")
    parser.add_argument("--file-dir", help=f"folder of the file (default: {tempfile.gettempdir()})")
    parser.add_argument("--out", type=outs.folder, help="folder for file_tier.json")
    args = parser.parse_args()
    if not 0 < args.share <= 1:
        parser.error(f"--share {args.share} is not allowed: use a number above 0, at most 1")
    if args.quick:
        args.tokens, args.new, args.budget = 400, 8, 64
    result = measure(args)
    show(lines(result))
    for one in result["bars"]:
        print(f"{one['what']}: {one['measured']:.3g}, at most {one['bar']:g}: {'met' if one['met'] else 'MISSED'}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "file_tier.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
