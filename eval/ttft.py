"""Time to the next token behind a prefill elsewhere, over links of known speed: measured against the model (Fig. 15).

    python eval/ttft.py [--tokens 7000] [--rates 1000 4000] [--hit 0.9] [--out eval/results]
    python eval/ttft.py --quick

Two processes in two network namespaces, joined by a link that is held to each rate (needs root and iproute2; `--quick`
goes over loopback as it is). From the moment that a prompt is published, the decode side either fetches what its first
step attends to, or all of the request's KV, and takes that step. The model says: bytes / rate, and the step without a
network. With a known share of the prompt the prefill before it is that of the rest alone, which is timed here too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import namespaces
import outs
import texts
import torch
from provenance import provenance

from oasis_hf import OasisCache
from oasis_hf.attach import cache_name
from oasis_hf.disagg import PrefillClient, merged
from oasis_hf.models import load

Row = dict[str, Any]


@torch.no_grad()
def first_step(model: Any, cache: OasisCache, ids: torch.Tensor) -> float:
    """Seconds of the prompt's last token, answered or computed, and of the step behind it."""
    start, name = time.perf_counter(), cache_name(model)
    token = model(ids[:, -1:], **{name: cache}).logits[:, -1:].argmax(-1)
    model(token, **{name: cache})
    return time.perf_counter() - start


def partial(model: Any, client: PrefillClient, prefilled_of: str) -> Row:
    """The first step's blocks, and that step."""
    before, start = client.link.peer.traffic.payload, time.perf_counter()
    prefilled = client.fetch(prefilled_of)
    cache = OasisCache.from_prefill(prefilled, model)
    admitted = time.perf_counter() - start
    moved = prefilled.nbytes + int((prefilled.handle.selected >= 0).sum()) * client.pool.page_bytes
    step = first_step(model, cache, prefilled.ids)
    return {"how": "partial", "bytes": moved, "transfer_s": admitted, "step_s": step,
            "all_bytes": prefilled.nbytes + client.link.peer.traffic.payload - before}  # fmt: skip


def full(model: Any, client: PrefillClient, request: str) -> Row:
    """All of the request's KV, then the same step."""
    start = time.perf_counter()
    prefilled = client.fetch(request)
    pages = prefilled.handle.pages.flatten().long()
    places = client.pool.allocate(len(pages))
    client.link.read(merged(pages.numpy(), places.numpy(), client.pool.page_bytes), prefilled.far.lease).wait(600)
    moved = prefilled.nbytes + len(pages) * client.pool.page_bytes
    transfer = time.perf_counter() - start
    client.pool.release(places)
    return {"how": "full", "bytes": moved, "transfer_s": transfer}


@torch.no_grad()
def prefill_rest(model: Any, ids: torch.Tensor, hit: float, budget: int) -> float:
    """Seconds of the prompt's last `1 - hit` where the rest was read before."""
    known, name = int(ids.shape[1] * hit), cache_name(model)
    cache = OasisCache(model, budget=budget)
    if known:
        model(ids[:, :known], **{name: cache}, logits_to_keep=1)
    start = time.perf_counter()
    model(ids[:, known:], **{name: cache}, logits_to_keep=1)
    return time.perf_counter() - start


def read(args: argparse.Namespace) -> None:
    """The decode side: one JSON a line, beginning with what needs no network."""
    model, tokenizer = load(args.model, "cpu", getattr(torch, args.dtype))
    ids = texts.tokenize(tokenizer, args.text, args.tokens)
    own = OasisCache(model, budget=args.budget)
    with torch.no_grad():
        model(ids[None, :-1], **{cache_name(model): own}, logits_to_keep=1)
    first_step(model, own, ids[None])
    rest = prefill_rest(model, ids[None], args.hit, args.budget)
    print(json.dumps({"prefill_rest_s": rest}), flush=True)
    host, port = args.address.rsplit(":", 1)
    secret = Path(args.secret).read_bytes().strip()
    client = PrefillClient(
        model, (host, int(port)), secret, budget=args.budget, tokens_per_summary=args.tokens_per_summary, seconds=600.0
    )
    for line in sys.stdin:
        for how in (partial, full) * int(line):
            request = client.published(ids, 600)
            print(json.dumps(how(model, client, request)), flush=True)
        print("{}", flush=True)
    client.close()


def inside(end: namespaces.End, command: list[str], **kwargs: Any) -> subprocess.Popen:
    return subprocess.Popen([*end.prefix, *command], stdout=subprocess.PIPE, text=True, **kwargs)


def measure(args: argparse.Namespace) -> tuple[list[Row], float]:
    quick, rows = args.quick, []
    ends = contextlib.nullcontext((namespaces.LOOPBACK,) * 2) if quick else namespaces.joined()
    with tempfile.TemporaryDirectory() as folder, ends as (there, here):
        secret = f"{folder}/secret"
        model = [args.model] if args.model else []
        same = ["--dtype", args.dtype, "--budget", str(args.budget)]
        node = inside(there, [
            sys.executable, "-m", "oasis_hf.cli", "prefill-server", *model, "--secret-file", secret, *same, "--device",
            "cpu", "--listen", f"{there.address}:0", "--pool-gib", str(args.pool_gib), "--threads",
            "1", "--tokens-per-summary", str(args.tokens_per_summary),
        ])  # fmt: skip
        reader = None
        try:
            address = node.stdout.readline().rsplit(" ", 1)[-1].strip()  # type: ignore[union-attr]
            if ":" not in address:
                raise SystemExit("The prefill server did not start; see its messages.")
            command = [
                sys.executable,
                os.path.abspath(__file__),
                "--role",
                "reader",
                "--address",
                address,
                "--secret",
                secret,
            ]
            command += [
                *(["--model", args.model] if args.model else []),
                *same,
                "--tokens",
                str(args.tokens),
                "--text",
                args.text,
            ]
            command += ["--hit", str(args.hit), "--tokens-per-summary", str(args.tokens_per_summary)]
            reader = inside(here, command, stdin=subprocess.PIPE)
            rest = json.loads(reader.stdout.readline())["prefill_rest_s"]  # type: ignore[union-attr]
            for rate in [0] if quick else args.rates:
                if rate:
                    namespaces.hold_to(there, rate)
                reader.stdin.write(f"{args.repeats}\n")  # type: ignore[union-attr]
                reader.stdin.flush()  # type: ignore[union-attr]
                while row := json.loads(reader.stdout.readline()):  # type: ignore[union-attr]
                    rows.append({"mbit": rate, **row})
                    print(line_of(rows[-1]), flush=True)
            return rows, rest
        finally:
            for child in (reader, node):
                if child is not None:
                    child.terminate()
                    child.wait(30)


def line_of(row: Row) -> str:
    rate = f"{row['mbit']:,} Mbit/s" if row["mbit"] else "loopback"
    return f"{rate:14s} {row['how']:8s} {row['bytes'] / 2**20:7.1f} MiB in {row['transfer_s']:.3f} s"


def summary(rows: list[Row], rest: float) -> list[Row]:
    """By rate: seconds of each way (best of its repeats), the model's, and how many times sooner the partial one is."""
    out = []
    for mbit in dict.fromkeys(row["mbit"] for row in rows):
        here = [row for row in rows if row["mbit"] == mbit]
        own = {row["how"]: row for row in sorted(here, key=lambda row: -row["transfer_s"])}  # the soonest stays
        step = own["partial"]["step_s"]
        model = {how: row["bytes"] * 8 / (mbit * 1e6) if mbit else 0.0 for how, row in own.items()}
        told: Row = {"mbit": mbit, "step_s": step, "prefill_rest_s": rest}
        for how, row in own.items():
            told |= {f"{how}_mib": row["bytes"] / 2**20, f"{how}_s": row["transfer_s"], f"{how}_model_s": model[how]}
        told["sooner"] = (rest + own["full"]["transfer_s"] + step) / (rest + own["partial"]["transfer_s"] + step)
        told["sooner_model"] = (rest + model["full"] + step) / (rest + model["partial"] + step)
        told["transfer_sooner"] = own["full"]["transfer_s"] / own["partial"]["transfer_s"]
        out.append(told)
    return out


def markdown(result: Row) -> str:
    out = [
        f"# Time to the next token behind a prefill elsewhere: {result['tokens']:,} tokens, budget "
        f"{result['budget']:,}, {result['dtype']}", "",
        f"Two processes in two network namespaces; {result['hit']:.0%} of the prompt known before. Seconds from "
        "publication to arrival; the model is bytes / rate.", "",
        "| rate | partial: MiB | measured | model | full: MiB | measured | model | transfer sooner | to the next token "
        "sooner | the model's |", "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["summary"]:
        cells = [f"{row['mbit']:,} Mbit/s" if row["mbit"] else "loopback"]
        for how in ("partial", "full"):
            cells += [f"{row[f'{how}_mib']:.1f}", f"{row[f'{how}_s']:.3f}", f"{row[f'{how}_model_s']:.3f}"]
        cells += [f"{row['transfer_sooner']:.2f}x", f"{row['sooner']:.2f}x", f"{row['sooner_model']:.2f}x"]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 tokens over loopback")
    parser.add_argument("--model", help="folder or id (default: the bundled one)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--text", default="reference", choices=list(texts.SOURCES))
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--tokens-per-summary", type=int, default=16, choices=[16, 8, 4])
    parser.add_argument("--hit", type=float, default=0.9, help="share of the prompt that was known (default: 0.9)")
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 4000], help="Mbit/s (default: 1000 4000)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pool-gib", type=float, default=1.0, help="of the prefill node")
    parser.add_argument("--out", type=outs.folder, help="folder for ttft.json and ttft.md")
    parser.add_argument("--role", choices=["reader"], help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "reader":
        return read(args)
    if args.quick:
        args.tokens, args.budget, args.repeats, args.pool_gib = 200, 64, 1, 0.1
    rows, rest = measure(args)
    names = ("dtype", "text", "tokens", "budget", "tokens_per_summary", "hit", "repeats")
    result = {"provenance": provenance(), **{name: getattr(args, name) for name in names}, "rows": rows,
              "summary": summary(rows, rest)}  # fmt: skip
    print(markdown(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "ttft.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "ttft.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
