"""What crosses the network when a prompt is prefilled in one process and decoded in another (OasisKV Fig. 14).

    python eval/disagg_traffic.py [--quick] [--tokens 7000] [--new 256] [--engine tcp] [--namespaces]
        [--dtype float32] [--out eval/results]

A second process prefills real texts; this one decodes, with fetch ratios from "all that is selected" (1.0) down, and
counts what its transport moved: the handle, the blocks of admission, and those that decoding selected later (drift).
The ids must be those of a run in one process. A full transfer of the same request is measured over the same link. With
`--namespaces` the two processes are in two network namespaces (needs root), and what was counted is held against what
the reader's device received.

The table of the paper's geometry (Qwen3-8B, 32K) is arithmetic, but for one row that is marked synthetic: the blocks
that SmolLM2 selected anew a step and KV head, times that model's KV heads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import namespaces
import outs
import report_disagg as report
import texts
import torch
from provenance import provenance

from oasis_hf import OasisCache, OasisConfig
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.disagg import NixlEngine, PoolServer, PrefillClient, PrefillWorker, StagingPool, merged
from oasis_hf.disagg.handle import head_dim
from oasis_hf.disagg.nixl import NixlSettings
from oasis_hf.models import load
from oasis_hf.store.host import blocks_of

SECRET = b"one evaluation, one secret"
RATIOS = (1.0, 0.1, 0.05)
PARTS = (16, 8)
WINDOW = 0.1
"""Seconds over which a link's peak is taken."""


def node(pipe: Any, end: namespaces.End, args: argparse.Namespace, knobs: dict[str, Any]) -> None:
    """The prefill process: prefills the ids that come over `pipe`, and gives back the request's name."""
    torch.set_num_threads(1)
    model, _ = load(args.model, "cpu", getattr(torch, args.dtype))
    workers, servers = {}, []
    for parts in args.parts:
        text = model.config
        pages = text.num_hidden_layers * text.num_key_value_heads * blocks_of(args.tokens + 1)
        staging = StagingPool(2 * pages, head_dim(model), getattr(torch, args.dtype), quarantine=1.0)
        workers[parts] = PrefillWorker(model, staging, tokens_per_summary=parts, **knobs)
        servers.append(
            PoolServer(
                staging, SECRET, workers[parts].terms, (end.address, 0), engines=(args.engine,),
                nixl=NixlSettings(end.device),
            )
        )  # fmt: skip
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


class Crossed:
    """What the reader's device receives, beside what is counted; nothing where it has no namespace of its own.

    Attributes:
        phases: rows of bytes `counted` and `received`, by `what`.
    """

    def __init__(self, end: namespaces.End) -> None:
        self.device = None if end.namespace is None else end.device
        self.phases: list[dict[str, Any]] = []
        self._before = self._now()

    def _now(self) -> int:
        return 0 if self.device is None else namespaces.received(self.device)

    def begin(self) -> None:
        self._before = self._now()

    def end(self, what: str, counted: int) -> None:
        if self.device is not None:
            self.phases.append({"what": what, "counted": counted, "received": self._now() - self._before})
        self.begin()


def full_transfer(client: PrefillClient, request: str, crossed: Crossed) -> dict[str, float]:
    """All pages of a request in one read: what a disaggregation without selection moves before the first token."""
    prefilled = client.fetch(request)
    pages = prefilled.handle.pages.flatten().long()
    places = client.pool.allocate(len(pages))
    crossed.begin()
    start = time.monotonic()
    client.link.read(merged(pages.numpy(), places.numpy(), client.pool.page_bytes), prefilled.far.lease).wait(60)
    seconds = time.monotonic() - start
    crossed.end("full transfer", len(pages) * client.pool.page_bytes)
    client.pool.release(places)
    return {
        "bytes": len(pages) * client.pool.page_bytes,
        "seconds": seconds,
        "peak": client.link.peer.traffic.peak(WINDOW),
    }


def one(
    model: Any,
    client: PrefillClient,
    request: str,
    ids: torch.Tensor,
    args: argparse.Namespace,
    ratio: float,
    crossed: Crossed,
) -> tuple[dict[str, Any], torch.Tensor]:
    """A request's traffic by what it was for, bytes; and its ids."""
    traffic = client.link.peer.traffic
    before = traffic.payload
    crossed.begin()
    prefilled = client.fetch(request)
    crossed.end("handle", prefilled.nbytes)
    cache = OasisCache.from_prefill(prefilled, model, budget=args.budget, fetch_ratio=ratio)
    admitted = int((prefilled.handle.selected >= 0).sum()) * client.pool.page_bytes
    start = time.monotonic()
    said = generated(model, cache, ids[None], args.new)
    stop = time.monotonic()
    near, moved = cache.state.store.pool, traffic.payload - before
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    if moved != near.read * near.page_bytes:
        raise RuntimeError(
            f"{moved:,} bytes crossed for {near.read:,} pages of {near.page_bytes:,}: some crossed twice."
        )
    crossed.end("blocks and drift", moved)
    row = {
        "fetch_ratio": ratio, "handle": prefilled.nbytes, "blocks": admitted, "drift": moved - admitted,
        "full": prefilled.handle.pages.numel() * near.page_bytes, "held": near.held * near.page_bytes,
        "new_blocks_a_step_and_head": (moved - admitted) / near.page_bytes / heads / args.new,
        "decode_seconds": stop - start, "idle": traffic.idle_share(start, stop), "peak": traffic.peak(WINDOW),
    }  # fmt: skip
    return row, said


def measure(pipe: Any, end: namespaces.End, args: argparse.Namespace, knobs: dict[str, Any]) -> dict[str, Any]:
    """The decode process.

    Args:
        pipe: to the prefill process. end: where this one is.
    """
    model, tokenizer = load(args.model, "cpu", getattr(torch, args.dtype))
    rows, full, crossed = [], [], Crossed(end)
    addresses = namespaces.heard(pipe)

    def nixl(memory: Any) -> NixlEngine:
        return NixlEngine(memory, SECRET, NixlSettings(end.device))

    def prefilled(parts: int, ids: torch.Tensor) -> tuple[str, float]:
        pipe.send((parts, ids.tolist()))
        return namespaces.heard(pipe)

    for name in args.texts:
        ids = texts.tokenize(tokenizer, name, args.tokens)
        for parts in args.parts:
            client = PrefillClient(
                model, addresses[parts], SECRET, nixl if args.engine == "nixl" else args.engine,
                tokens_per_summary=parts, seconds=60.0, **knobs,
            )  # fmt: skip
            for ratio in args.ratios:
                request, seconds = prefilled(parts, ids)
                row, said = one(model, client, request, ids, args, ratio, crossed)
                own = OasisCache(model, budget=args.budget, tokens_per_summary=parts, fetch_ratio=ratio)
                same = torch.equal(generated(model, own, ids[None], args.new), said)
                rows.append(
                    {"text": name, "tokens_per_summary": parts, **row, "same_ids": same, "prefill_seconds": seconds}
                )
                print(report.line(rows[-1]), flush=True)
            full.append({"text": name, **full_transfer(client, prefilled(parts, ids)[0], crossed)})
            client.close()
    pipe.send(None)
    return {"rows": rows, "full_transfer": full, "interface": crossed.phases}


def measured(pipe: Any, *args: Any) -> None:
    pipe.send(measure(*args))


def both(args: argparse.Namespace) -> dict[str, Any]:
    """The two processes; this one decodes, but for namespaces."""
    knobs = {"budget": args.budget}
    with contextlib.ExitStack() as stack:
        ends = namespaces.joined() if args.namespaces else contextlib.nullcontext((namespaces.LOOPBACK,) * 2)
        there, here = stack.enter_context(ends)
        pipe, process = namespaces.start(there, node, there, args, knobs)
        stack.callback(namespaces.stop, process)
        if not args.namespaces:
            return measure(pipe, here, args, knobs)
        told, process = namespaces.start(here, measured, pipe, here, args, knobs)
        stack.callback(namespaces.stop, process)
        return namespaces.heard(told)


def stem(args: argparse.Namespace) -> str:
    """Of the result's files."""
    where = ["namespaces", args.engine] if args.namespaces else []
    return "_".join(["disagg_traffic", *([args.dtype] if args.dtype != "float32" else []), *where])


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
    parser.add_argument("--namespaces", action="store_true", help="the processes in two network namespaces (root)")
    parser.add_argument("--out", type=outs.folder, help="folder for disagg_traffic.json, .md and .png; other "
                        "dtypes and namespaces have names of their own")  # fmt: skip
    args = parser.parse_args()
    if args.quick:
        args.texts, args.tokens, args.new, args.budget = args.texts[:1], 200, 6, 64
        args.ratios, args.parts = [1.0, 0.05], [16]
    found = both(args)
    settings = {name: getattr(args, name) for name in ("dtype", "tokens", "new", "budget", "engine", "namespaces")}
    result = {
        "provenance": provenance(), **settings, "k": OasisConfig(budget=args.budget).slots - 1, "block": BLOCK,
        **found, "geometry": report.geometry(found["rows"]), "host_memory": report.host_memory(found["rows"]),
    }  # fmt: skip
    result["bars"] = report.bars(result)
    print(report.markdown(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = stem(args)
        (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(report.markdown(result))
        report.plot(result, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
