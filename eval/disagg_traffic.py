"""What crosses the network when a prompt is prefilled in one process and decoded in another (OasisKV Fig. 14).

    python eval/disagg_traffic.py [--quick] [--tokens 7000] [--new 256] [--engine tcp] [--out eval/results]

A second process prefills real texts; this one decodes, with fetch ratios from "all that is selected" (1.0) down, and
counts what its transport moved: the handle, the blocks of admission, and those that decoding selected later (drift).
The ids must be those of a run in one process. A full transfer of the same request is measured over the same link.

The table of the paper's geometry (Qwen3-8B, 32K) is arithmetic, but for one row that is marked synthetic: the blocks
that SmolLM2 selected anew a step and KV head, times that model's KV heads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import report_disagg as report
import texts
import torch
from provenance import provenance

from oasis_hf import OasisCache, OasisConfig
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.disagg import PoolServer, PrefillClient, PrefillWorker, StagingPool, merged
from oasis_hf.disagg.handle import head_dim
from oasis_hf.models import load
from oasis_hf.store.host import blocks_of

SECRET = b"one evaluation, one secret"
RATIOS = (1.0, 0.1, 0.05)
PARTS = (16, 8)
WINDOW = 0.1
"""Seconds over which a link's peak is taken."""


def node(
    pipe: Any, model_path: str | None, dtype: str, engine: str, tokens: int, parts_of: list[int], knobs: dict[str, Any]
) -> None:  # fmt: skip
    """The prefill process: prefills the ids that come over `pipe`, and gives back the request's name."""
    torch.set_num_threads(1)
    model, _ = load(model_path, "cpu", getattr(torch, dtype))
    workers, servers = {}, []
    for parts in parts_of:
        text = model.config
        pages = text.num_hidden_layers * text.num_key_value_heads * blocks_of(tokens + 1)
        staging = StagingPool(2 * pages, head_dim(model), getattr(torch, dtype), quarantine=1.0)
        workers[parts] = PrefillWorker(model, staging, tokens_per_summary=parts, **knobs)
        servers.append(PoolServer(staging, SECRET, workers[parts].terms, engines=(engine,)))
    pipe.send({parts: server.address for parts, server in zip(workers, servers)})
    while (asked := pipe.recv()) is not None:
        parts, ids = asked
        start = time.perf_counter()
        request = workers[parts].prefill(torch.tensor(ids))
        pipe.send((request, time.perf_counter() - start))


def generated(model: Any, cache: OasisCache, ids: torch.Tensor, new: int) -> torch.Tensor:
    """`[new]` greedy ids."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, max_new_tokens=new, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, ids.shape[1] :]


def full_transfer(client: PrefillClient, request: str) -> dict[str, float]:
    """All pages of a request in one read: what a disaggregation without selection moves before the first token."""
    prefilled = client.fetch(request)
    pages = prefilled.handle.pages.flatten().long()
    places = client.pool.allocate(len(pages))
    start = time.monotonic()
    client.link.read(merged(pages.numpy(), places.numpy(), client.pool.page_bytes), prefilled.far.lease).wait(60)
    seconds = time.monotonic() - start
    client.pool.release(places)
    return {
        "bytes": len(pages) * client.pool.page_bytes,
        "seconds": seconds,
        "peak": client.link.peer.traffic.peak(WINDOW),
    }


def one(
    model: Any, client: PrefillClient, request: str, ids: torch.Tensor, new: int, ratio: float, budget: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """A request's traffic by what it was for, bytes; and its ids."""
    traffic = client.link.peer.traffic
    before = traffic.payload
    prefilled = client.fetch(request)
    cache = OasisCache.from_prefill(prefilled, model, budget=budget, fetch_ratio=ratio)
    admitted = int((prefilled.handle.selected >= 0).sum()) * client.pool.page_bytes
    start = time.monotonic()
    said = generated(model, cache, ids[None], new)
    stop = time.monotonic()
    near, moved = cache.state.store.pool, traffic.payload - before
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    if moved != near.read * near.page_bytes:
        raise RuntimeError(
            f"{moved:,} bytes crossed for {near.read:,} pages of {near.page_bytes:,}: some crossed twice."
        )
    row = {
        "fetch_ratio": ratio, "handle": prefilled.nbytes, "blocks": admitted, "drift": moved - admitted,
        "full": prefilled.handle.pages.numel() * near.page_bytes, "held": near.held * near.page_bytes,
        "new_blocks_a_step_and_head": (moved - admitted) / near.page_bytes / heads / new,
        "decode_seconds": stop - start, "idle": traffic.idle_share(start, stop), "peak": traffic.peak(WINDOW),
    }  # fmt: skip
    return row, said


def measure(args: argparse.Namespace, model: Any, tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, full = [], []
    knobs = {"budget": args.budget}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(
        target=node, args=(there, args.model, args.dtype, args.engine, args.tokens, args.parts, knobs), daemon=True
    )
    child.start()
    there.close()
    try:
        addresses = here.recv()
        for name in args.texts:
            ids = texts.tokenize(tokenizer, name, args.tokens)
            for parts in args.parts:
                client = PrefillClient(
                    model, addresses[parts], SECRET, args.engine, tokens_per_summary=parts, seconds=60.0, **knobs
                )
                for ratio in args.ratios:
                    here.send((parts, ids.tolist()))
                    request, seconds = here.recv()
                    row, said = one(model, client, request, ids, args.new, ratio, args.budget)
                    own = OasisCache(model, budget=args.budget, tokens_per_summary=parts, fetch_ratio=ratio)
                    same = torch.equal(generated(model, own, ids[None], args.new), said)
                    rows.append(
                        {"text": name, "tokens_per_summary": parts, **row, "same_ids": same, "prefill_seconds": seconds}
                    )
                    print(report.line(rows[-1]), flush=True)
                here.send((parts, ids.tolist()))
                full.append({"text": name, **full_transfer(client, here.recv()[0])})
                client.close()
        here.send(None)
    finally:
        child.terminate()
    return rows, full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one text of 400 tokens, few steps")
    parser.add_argument("--model", help="folder or id (default: the bundled one)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--new", type=int, default=256, help="tokens that are decoded")
    parser.add_argument("--budget", type=int, default=1040)
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--parts", type=int, nargs="+", default=list(PARTS), choices=[16, 8, 4],
                        help="tokens a summary")  # fmt: skip
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), default=["reference", "code"])
    parser.add_argument("--engine", default="tcp", choices=["tcp", "nixl"])
    parser.add_argument("--out", type=Path, help="folder for disagg_traffic.json, .md and .png")
    args = parser.parse_args()
    if args.quick:
        args.texts, args.tokens, args.new, args.budget = args.texts[:1], 200, 6, 64
        args.ratios, args.parts = [1.0, 0.05], [16]
    model, tokenizer = load(args.model, "cpu", getattr(torch, args.dtype))
    rows, full = measure(args, model, tokenizer)
    settings = {name: getattr(args, name) for name in ("dtype", "tokens", "new", "budget", "engine")}
    result = {
        "provenance": provenance(), **settings, "k": OasisConfig(budget=args.budget).slots - 1, "block": BLOCK,
        "rows": rows, "full_transfer": full, "geometry": report.geometry(rows), "bars": [],
    }  # fmt: skip
    result["bars"] = report.bars(result)
    print(report.markdown(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "disagg_traffic.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "disagg_traffic.md").write_text(report.markdown(result))
        report.plot(result, args.out / "disagg_traffic.png")


if __name__ == "__main__":
    main()
