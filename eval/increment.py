"""What crosses of a prompt whose beginning either side of a disaggregated prefill holds (issue G).

    python eval/increment.py [--prefix 2000] [--rest 80] [--budget 528] [--out eval/results]
    python eval/increment.py --quick

Real text, one prefix and several ends. A second process prefills, this one decodes; each may have a `PrefixStore`, and
the first end leaves its prompt in those that there are. Of every further end: bytes of the handle; of the blocks that
the first step attends to, that decoding selected later, and that keeping the prompt brought at the end; seconds from
asking to the first token, the best of the ends; and whether the tokens are those of a cold run in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import namespaces
import outs
import report_tables as tables
import texts
import torch
from provenance import provenance
from report_tables import Lines, Row
from transformers import StoppingCriteria

from oasis_hf import OasisCache, PrefixStore
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.disagg import PrefillClient, PrefillNode, PrefillWorker, StagingPool
from oasis_hf.disagg.handle import head_dim
from oasis_hf.models import load
from oasis_hf.store.host import blocks_of

TITLE = "What is sent of a prompt whose beginning is held"
SECRET = b"one evaluation, one secret"
ROOM = 64 << 30
WAYS = {"nobody": (False, False), "the decode side": (True, False), "the prefill side": (False, True),
        "both": (True, True)}  # fmt: skip
"""Whether the decode side, and the prefill side, has a store."""
BYTES = ("handle", "first", "later", "kept")


class First(StoppingCriteria):
    """Stops nothing; `at` is when the first token was there."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generated(model: Any, cache: OasisCache, ids: torch.Tensor, new: int, first: First) -> list[int]:
    """Greedy ids behind a prompt `[n]`."""
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids[None])
    out = model.generate(
        ids[None], attention_mask=mask, **{cache_name(model): cache}, stopping_criteria=[first], **how
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def stores(model: Any, has: bool, budget: int) -> dict[str, Any]:
    """Of a worker or client: its knobs, or a store that has them."""
    return {"prefixes": PrefixStore(model, ROOM, budget=budget)} if has else {"budget": budget}


def node(pipe: Any, args: argparse.Namespace) -> None:
    """The prefill process: a new node each time it is told whether to have a store; gives back its address."""
    dtype = getattr(torch, args.dtype)
    model, _ = load(args.model, "cpu", dtype)
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    pages = 2 * layers * heads * blocks_of(args.prefix + args.rest + 1)  # one request's may be given back late
    while (has := pipe.recv()) is not None:
        worker = PrefillWorker(model, StagingPool(pages, head_dim(model), dtype), **stores(model, has, args.budget))
        with contextlib.closing(PrefillNode(worker, SECRET)) as own:
            pipe.send(own.server.address)
            pipe.recv()  # until the decode side is done with it
            pipe.send(None)


def request(model: Any, client: PrefillClient, ids: torch.Tensor, new: int) -> tuple[Row, list[int]]:
    """A request's bytes by what they were for, its seconds, and its ids."""
    traffic, first = client.link.peer.traffic, First()
    before, start = traffic.payload, time.perf_counter()
    prefilled = client.prefill(ids)
    cache = OasisCache.from_prefill(prefilled, model)
    said = generated(model, cache, ids, new, first)
    cache.settle()
    handle, page = prefilled.handle, client.pool.page_bytes
    selected, admitted = traffic.payload - before, int((handle.selected >= handle.first).sum()) * page
    prefilled.keep()
    heads = handle.pages.shape[0] * handle.pages.shape[1]
    row = {
        "handle": prefilled.nbytes, "first": admitted, "later": selected - admitted,
        "kept": traffic.payload - before - selected, "held_tokens": handle.first * BLOCK,
        "not_held": heads * (blocks_of(len(ids)) - handle.first) * page, "seconds": first.at - start,
    }  # fmt: skip
    prefilled.close()
    return row, said


def measure(args: argparse.Namespace) -> list[Row]:
    """A row a way."""
    pipe, process = namespaces.start(namespaces.LOOPBACK, node, args)
    rows = []
    with contextlib.ExitStack() as stack:
        stack.callback(namespaces.stop, process)
        model, tokenizer = load(args.model, "cpu", getattr(torch, args.dtype))
        ids = texts.tokenize(tokenizer, args.text, args.prefix + (args.requests + 1) * args.rest)
        prompts = [torch.cat((ids[: args.prefix], end)) for end in ids[args.prefix :].split(args.rest)]
        cold = [generated(model, OasisCache(model, budget=args.budget), one, args.new, First()) for one in prompts]
        for way, (keeps, reads) in WAYS.items():
            pipe.send(reads)
            address = namespaces.heard(pipe)
            with contextlib.closing(
                PrefillClient(model, address, SECRET, seconds=60.0, **stores(model, keeps, args.budget))
            ) as client:
                found = [request(model, client, one, args.new) for one in prompts][1:]
            pipe.send(None)
            namespaces.heard(pipe)  # that node is closed
            own = [row for row, _ in found]
            same = sum(said == want for (_, said), want in zip(found, cold[1:], strict=True))
            mean = {name: sum(row[name] for row in own) / len(own) for name in (*BYTES, "held_tokens", "not_held")}
            rows.append({"holds": way, "seconds": min(row["seconds"] for row in own), **mean, "same": same})
        pipe.send(None)
    return rows


def bars(result: Row) -> list[Row]:
    """That nothing is sent which is held, and that it makes no difference."""
    out = [
        tables.bar(f"{row['holds']}: blocks that came, share of those not held there",
                   (row["first"] + row["later"] + row["kept"]) / row["not_held"], 1, at_most=True)
        for row in result["rows"]
    ]  # fmt: skip
    same = sum(row["same"] for row in result["rows"])
    return [*out, tables.bar("requests whose tokens are a cold run's", same, result["requests"] * len(result["rows"]))]


def pages(result: Row) -> list[Lines]:
    head = ["the prefix is held by", "handle, MB", "blocks of the first step, MB", "selected later, MB",
            "to keep the prompt, MB", "to the first token, s", "tokens as cold"]  # fmt: skip
    rows = [
        [row["holds"], *(f"{row[name] / 1e6:.2f}" for name in BYTES), f"{row['seconds']:.2f}",
         f"{row['same']} of {result['requests']} requests"]
        for row in result["rows"]
    ]  # fmt: skip
    title = (f"{result['prefix']:,} of {result['prefix'] + result['rest']:,} tokens, {result['new']} more decoded, "
             f"budget {result['budget']:,}, {result['dtype']}")  # fmt: skip
    return [(title, head, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 tokens and 40, two requests")
    parser.add_argument("--model", help="folder or id (default: the bundled one)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--text", default="reference", choices=sorted(texts.SOURCES))
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--rest", type=int, default=80)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="tokens that are decoded and compared")
    parser.add_argument("--budget", type=int, default=528)
    parser.add_argument("--out", type=outs.folder, help="folder for increment.json and increment.md")
    args = parser.parse_args()
    if args.quick:
        args.prefix, args.rest, args.requests, args.new, args.budget = 400, 40, 2, 8, 96
    for name in ("prefix", "rest", "requests", "new"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not allowed: use an integer >= 1.")
    names = ("dtype", "text", "prefix", "rest", "requests", "new", "budget")
    result = {"provenance": provenance(), **{name: getattr(args, name) for name in names}, "rows": measure(args)}
    result["bars"] = bars(result)
    tables.show([*pages(result), tables.bars(result["bars"])])
    if args.out:
        tables.keep(args.out / "increment.json", result)
        tables.write(args.out / "increment.md", TITLE, result, [*pages(result), tables.bars(result["bars"])])


if __name__ == "__main__":
    main()
