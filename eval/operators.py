"""The CUDA operators against their bars and floors on one GPU (issue B); 8 KV heads, group 4, head_dim 128, bf16.

    python eval/operators.py [--rows 64] [--out eval/results/operators.json]

Each time is a replayed CUDA graph of several launches over rotating inputs larger than the L2 cache, divided by their
number; the median of many replays. Bytes are the floor's: what must cross HBM (or the link) once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import outs
import torch
from provenance import provenance

from oasis_hf.config import BLOCK, TAIL
from oasis_hf.ops import cuda

HEADS, GROUP, DIM, SLOTS = 8, 4, 128, 129
OPS = ["attend", "score", "select", "gather", "write", "append", "summarize"]
HBM = 4.273e12
"""Bytes a second that a device-to-device copy reaches, read and write together."""


def timed(launches: list[Callable[[], Any]], repeats: int = 30) -> float:
    """Microseconds a launch."""
    torch.cuda.synchronize()  # the inputs are made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        times = []
        for _ in range(repeats + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[3:])


def working_set(rows: int, tokens: int = SLOTS * BLOCK) -> dict[str, torch.Tensor]:
    shape = (rows, HEADS, TAIL + SLOTS * BLOCK, DIM)
    table = torch.stack([torch.randperm(SLOTS, device="cuda") for _ in range(rows * HEADS)])
    return {
        "keys": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "values": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "table": table.view(rows, HEADS, SLOTS),
        "lengths": torch.full((rows,), tokens - 3, device="cuda"),
    }


def attend(rows: int, queries: int) -> dict[str, Any]:
    sets = [working_set(rows) for _ in range(2 if rows > 4 else 24)]
    query = torch.randn(rows, HEADS * GROUP, queries, DIM, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(queries, TAIL, device="cuda", dtype=torch.bool).tril()
    time = timed([lambda s=s: cuda.attend(query, **s, tail_mask=mask, scaling=DIM**-0.5, sinks=None) for s in sets])
    size = 2 * rows * HEADS * (TAIL + SLOTS * BLOCK) * DIM * 2
    return {"op": "attend", "case": f"{rows} rows, {queries} queries, 2,064 tokens", "us": time, "bytes": size}


def score(rows: int, blocks: int, parts: int, int8: bool, queries: int, active: int) -> dict[str, Any]:
    """queries: tokens handed over; active: those of weight above 0."""
    dtype = torch.int8 if int8 else torch.bfloat16
    shape = (rows, HEADS, blocks, parts, 2, DIM)
    count = 2 if rows > 4 else 24
    vectors = [torch.randint(-127, 127, shape, device="cuda", dtype=torch.int8).to(dtype) for _ in range(count)]
    scales = torch.rand(shape[:-1], device="cuda").half() * 0.02 if int8 else torch.empty(0, device="cuda")
    query = torch.randn(rows, HEADS * GROUP, queries, DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.zeros(rows, queries, device="cuda")
    weights[:, queries - active :] = 1 / active
    closed = torch.full((rows,), blocks, device="cuda")
    reduction = "softmax-mean"
    time = timed(
        [
            lambda v=v: cuda.score(query, v, scales, closed, weights, "midrange", 0.6, reduction, DIM**-0.5, 0, 0)
            for v in vectors
        ]
    )
    size = vectors[0].nbytes + scales.nbytes
    kind = f"{'int8' if int8 else 'bf16'}, {BLOCK // parts}-token"
    case = f"{rows} rows, {blocks:,} blocks, {kind}, {active} of {queries} queries"
    return {"op": "score", "case": case, "us": time, "bytes": size}


def select(rows: int, blocks: int, cap: int) -> dict[str, Any]:
    scores = [torch.randn(rows, HEADS, blocks, device="cuda") for _ in range(8)]
    table = torch.stack([torch.randperm(blocks - 1, device="cuda")[:SLOTS] for _ in range(rows * HEADS)])
    table = table.view(rows, HEADS, SLOTS).contiguous()
    last = torch.randint(0, 9, table.shape, device="cuda")
    lengths = torch.full((rows,), blocks * BLOCK - 3, device="cuda")
    order, step = torch.arange(SLOTS, device="cuda"), torch.tensor(10, device="cuda")
    time = timed([lambda s=s: cuda.select(s, table, last, lengths, order, cap, step) for s in scores])
    size = scores[0].nbytes + 3 * table.nbytes
    return {"op": "select", "case": f"{rows * HEADS} x {blocks:,} blocks, C={cap}", "us": time, "bytes": size}


def gather(pages: torch.Tensor, rows: int, cap: int, ctas: int) -> dict[str, Any]:
    buffers = working_set(rows)
    total = rows * HEADS * cap
    page_table = torch.randint(0, len(pages), (rows, HEADS, 1024), device="cuda")
    plans = [torch.randint(0, 1024, (rows, HEADS, cap), device="cuda") for _ in range(8)]
    slots = torch.arange(cap, device="cuda").expand(rows, HEADS, cap).contiguous()
    before, cuda.GATHER_CTAS = cuda.GATHER_CTAS, ctas
    keys, values = buffers["keys"], buffers["values"]
    time = timed([lambda p=p: cuda.gather(pages, page_table, keys, values, p, slots) for p in plans])
    cuda.GATHER_CTAS = before
    size = total * 2 * BLOCK * DIM * 2
    return {"op": "gather", "case": f"{total:,} blocks of 8 KiB, {ctas or 'default'} CTAs", "us": time, "bytes": size}


def write(pages: torch.Tensor, tokens: int, token_major: bool, ctas: int) -> dict[str, Any]:
    table = torch.randperm(len(pages), device="cuda")[: HEADS * tokens // BLOCK].view(HEADS, -1)
    made = [torch.randn(2, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    if token_major:
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    before, cuda.WRITE_CTAS = cuda.WRITE_CTAS, ctas
    time = timed([lambda x=x: cuda.write(pages, table, x[0], x[1], 0) for x in made])
    cuda.WRITE_CTAS = before
    kind = "token-major" if token_major else "head-major"
    case = f"{tokens:,} tokens, {kind}, {ctas or 'default'} CTAs"
    return {"op": "write", "case": case, "us": time, "bytes": made[0].nbytes}


def append(rows: int) -> dict[str, Any]:
    s = working_set(rows)
    last, order = torch.zeros_like(s["table"]), torch.arange(SLOTS, device="cuda")
    step = torch.tensor(1, device="cuda")
    new = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    call = lambda: cuda.append(s["keys"], s["values"], s["table"], last, s["lengths"], order, new, new, step)  # noqa: E731
    return {"op": "append", "case": f"{rows} rows", "us": timed([call] * 20), "bytes": 4 * new.nbytes}


def summarize(blocks: int, parts: int, int8: bool) -> dict[str, Any]:
    keys = [torch.randn(1, blocks, BLOCK, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    time = timed([lambda k=k: cuda.summarize(k, "midrange", parts, int8) for k in keys])
    size = keys[0].nbytes + blocks * parts * 2 * (DIM + 2 if int8 else 2 * DIM)
    kind = "int8" if int8 else "bf16"
    return {"op": "summarize", "case": f"{blocks:,} blocks, {parts} parts, {kind}", "us": time, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pinned-gib", type=float, default=4)
    parser.add_argument("--ops", nargs="+", default=OPS)
    parser.add_argument("--out", type=outs.json_file)
    args = parser.parse_args()
    rows = args.rows
    page = 2 * BLOCK * DIM * 2
    calls: list[tuple[Callable[[], dict[str, Any]], float | None]] = [
        (lambda: attend(rows, 2), 145), (lambda: attend(rows, 1), None), (lambda: attend(rows, 8), None),
        (lambda: attend(1, 2), None), (lambda: attend(16, 2), None),
        (lambda: score(rows, 1024, 1, False, 2, 1), 80), (lambda: score(rows, 1024, 1, True, 2, 1), 45),
        (lambda: score(rows, 1024, 2, True, 2, 1), None), (lambda: score(rows, 1024, 2, True, 5, 4), None),
        (lambda: score(rows, 1024, 1, True, 5, 4), None), (lambda: score(1, 2048, 2, True, 5, 1), None),
        (lambda: select(rows, 1024, 6), 25), (lambda: select(rows, 2048, 6), None), (lambda: select(1, 2048, 6), None),
        (lambda: append(rows), None), (lambda: append(1), None),
        (lambda: summarize(65536, 2, True), None), (lambda: summarize(65536, 1, False), None),
    ]  # fmt: skip
    if {"gather", "write"} & set(args.ops):
        pages = torch.empty(
            (int(args.pinned_gib * 2**30) // page, 2, BLOCK, DIM), dtype=torch.bfloat16, pin_memory=True
        )
        pages.view(torch.int16)[::16] = 1  # touched
        for ctas in (2, 4, 8, 16, 32, 0):
            calls.append((lambda c=ctas: write(pages, 16384, True, c), None))  # type: ignore[misc]
        calls += [(lambda: write(pages, 16384, False, 0), None), (lambda: write(pages, 512, True, 0), None)]
        for ctas in (4, 8, 16, 32, 0):
            calls.append((lambda c=ctas: gather(pages, 64, 24, c), None))  # type: ignore[misc]
        calls += [(lambda: gather(pages, 32, 1, 16), 50), (lambda: gather(pages, 44, 3, 16), 180),
                  (lambda: gather(pages, 1, 1, 16), None)]  # fmt: skip
    result = []
    for call, bar in calls:
        try:
            row = call()
        except Exception as error:  # one broken operator must not hide the others' times
            print("FAILED:", error)
            continue
        if row["op"] not in args.ops:
            continue
        row |= {"bar_us": bar, "gb_per_s": row["bytes"] / row["us"] / 1e3}
        ceiling = 55.4e9 if row["op"] in ("gather", "write") else HBM
        row["floor_us"] = row["bytes"] / ceiling * 1e6
        result.append(row)
        verdict = "" if bar is None else f"bar {bar:.0f} us {'met' if row['us'] <= bar else 'MISSED'}"
        numbers = f"{row['us']:8.1f} us {row['gb_per_s']:8.1f} GB/s  floor {row['floor_us']:7.1f} us"
        print(f"{row['op']:10s} {row['case']:62s} {numbers}  {verdict}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"provenance": provenance("cuda"), "rows": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
