"""How much a running gather slows a dense compute stream (issue B): large products, small ones, and copies.

    python eval/interference.py [--ctas 4 8 16 32] [--out eval/results/interference.json]

The gather runs on a side stream from before the compute stream's first kernel until after its last.
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

ROWS, HEADS, DIM, CAP, SLOTS, LAUNCHES = 64, 8, 128, 24, 129, 40
PAGE = 2 * BLOCK * DIM * 2


def foreground() -> dict[str, Callable[[int], Any]]:
    big = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    rows = torch.randn(96, 4096, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    product = torch.empty(96, 12288, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(big[0])
    copies = [torch.empty(1 << 28, device="cuda", dtype=torch.uint8) for _ in range(2)]
    return {
        "products of 4,096 x 4,096 (compute bound)": lambda i: torch.mm(big[0], big[1], out=out),
        "96 rows x 4,096 x 12,288 (a decode step's)": lambda i: torch.mm(rows, weights[i % 8], out=product),
        "copies of 256 MB (memory bound)": lambda i: copies[0].copy_(copies[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctas", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--pinned-gib", type=float, default=2)
    parser.add_argument("--out", type=outs.json_file)
    args = parser.parse_args()
    pages = torch.empty((int(args.pinned_gib * 2**30) // PAGE, 2, BLOCK, DIM), dtype=torch.bfloat16, pin_memory=True)
    pages.view(torch.int16)[::16] = 1
    keys = torch.empty(ROWS, HEADS, TAIL + SLOTS * BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    values = torch.empty_like(keys)
    table = torch.randint(0, len(pages), (ROWS, HEADS, 1024), device="cuda")
    plans = [torch.randint(0, 1024, (ROWS, HEADS, CAP), device="cuda") for _ in range(4)]
    slots = torch.arange(CAP, device="cuda").expand(ROWS, HEADS, CAP).contiguous()
    front, side = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    rows: list[dict[str, Any]] = []
    for ctas in args.ctas:
        cuda.GATHER_CTAS = ctas
        for name, launch in foreground().items():
            times: dict[bool, list[float]] = {False: [], True: []}
            for beside in [False, True] * 8:
                torch.cuda.synchronize()
                if beside:
                    with torch.cuda.stream(side):
                        for i in range(4 * LAUNCHES):
                            cuda.gather(pages, table, keys, values, plans[i % 4], slots)
                        done = torch.cuda.Event(enable_timing=True)
                        done.record()
                with torch.cuda.stream(front):
                    torch.cuda._sleep(2_000_000)  # until all is launched, and the gather is on its way
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    for i in range(LAUNCHES):
                        launch(i)
                    end.record()
                torch.cuda.synchronize()
                if beside:
                    assert end.elapsed_time(done) > 0, "the gather ended first: launch more of it"
                times[beside].append(begin.elapsed_time(end))
            alone, together = (statistics.median(times[key][2:]) for key in (False, True))
            slower = together / alone - 1
            rows.append({"ctas": ctas, "foreground": name, "alone_ms": alone, "beside_ms": together, "slower": slower})
            verdict = f"bar 5% {'met' if slower <= 0.05 else 'MISSED'}"
            print(
                f"{ctas:3d} CTAs  {name:44s} {alone:8.3f} -> {together:8.3f} ms  {slower:+6.1%}  {verdict}", flush=True
            )
    if args.out:
        args.out.write_text(json.dumps({"provenance": provenance("cuda"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
