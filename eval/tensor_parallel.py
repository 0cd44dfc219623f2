"""Two GPUs of one host by tensor parallelism (issue F), and as many rows of one GPU as the host's memory holds.

    torchrun --nproc-per-node 2 eval/tensor_parallel.py --quick
    torchrun --nproc-per-node 2 eval/tensor_parallel.py --out eval/results [--points ids one split] [--seconds 500]
    python eval/tensor_parallel.py --out eval/results --resume --points host [--host-gib 230]

Qwen3-8B's shape with random weights made on the device, bfloat16, one token a row and step, prefill excluded, every KV
head of every layer fetching its whole cap of three blocks. "one" is the first rank's GPU by itself, "split" the model
split over all ranks by transformers' own plan, with NCCL inside the captured step; of each this cache and its dense
mode, all KV on the GPUs. Bytes are those of one GPU. "ids" compares texts of the split model with one GPU's, in float32
(sums over ranks round otherwise, which bfloat16 shows wherever two logits are close: it is told, and is no bar).

In all of these, pages lie in a small pinned pool, which the link can't tell. In "host" each block has a page of its
own: the rows' full KV is pinned memory of the host, on the GPU's NUMA node where there are several.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report_tables as tables
import sweep
import torch
from crew import Crew
from report_tables import Lines, Row
from sweep import Point, Setting, Sweep, find, of, told
from torch.distributed.tensor import DTensor

from oasis_hf import OasisCache, bench
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.store import HostMemoryError, PagePool

PARTS = ("ids", "one", "split", "host")
ROWS = {16384: {"oasis": 44, "dense": 24}, 32768: {"oasis": 22, "dense": 12}}
"""Of one GPU, as many as 80 GB hold or nearly; a split model runs as many times that as there are ranks."""

HOST_ROWS = {16384: (96, 90), 32768: (48, 45)}
RATIO = 3 / 128
NAMES = {"oasis": "this cache", "dense": "own dense mode"}
TITLE = "Tensor parallelism, and all rows that the host holds"
IDS = {"rows": 2, "prompt": 600, "new": 32}


class Models:
    """One at a time: made when asked for, let go for another.

    Args:
        setting: shape and device. crew: over whose ranks it can be split.
    """

    def __init__(self, setting: Setting, crew: Crew) -> None:
        self.setting, self.crew = setting, crew
        self._have: tuple[Any, Any] = (None, None)
        self._pool: PagePool | None = None

    def one(self, dtype: torch.dtype) -> Any:
        """All of it, the same weights on every rank."""
        return self._made(("one", dtype), lambda: self._random(dtype))

    def split(self, dtype: torch.dtype) -> Any:
        """Those weights over all ranks."""
        return self._made(("split", dtype), lambda: split(self._random(dtype)))

    def _made(self, key: Any, make: Any) -> Any:
        if self._have[0] != key:
            self._have = (None, None)
            if self.setting.device == "cuda":
                torch.cuda.empty_cache()
            self._have = (key, make())
        return self._have[1]

    def _random(self, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        return bench.random_model(self.setting.shape, self.setting.device, dtype)

    def pages(self, count: int) -> PagePool:
        """Room for as many pages, each a block's own; kept, and made anew when more are asked for."""
        if self._pool is None or self._pool.capacity < count:
            self._pool = None
            config = self.one(self.setting.dtype).config
            size = count * 2 * BLOCK * config.head_dim * self.setting.dtype.itemsize
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            # Given, not asked of the system: a virtual machine may tell of its memory only once that is in use.
            memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags)
            self._pool = PagePool(config.head_dim, self.setting.dtype, self.setting.device == "cuda", size, memory)
        return self._pool


def split(whole: Any) -> Any:
    """The same model by its own tensor-parallel plan over all ranks of this run."""
    kind: Any = type(whole)
    made = kind.from_pretrained(
        None, config=whole.config, state_dict=whole.state_dict(), tp_plan="auto", dtype=whole.dtype
    ).eval()
    for module in made.modules():  # parts of what was given are views, which would keep all of it
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, DTensor):
                part = DTensor.from_local(weight.to_local().clone(), weight.device_mesh, weight.placements)
                module._parameters[name] = torch.nn.Parameter(part, requires_grad=False)
    made.generation_config.eos_token_id = None
    return made


class Jobs:
    """What all ranks can do; those that only the first does are nothing on the others."""

    def __init__(self, setting: Setting, models: Models, crew: Crew) -> None:
        self.setting, self.models, self.crew = setting, models, crew

    def one(self, mode: str, rows: int, context: int) -> Row:
        return self._step(self.models.one(self.setting.dtype), mode, rows, context) if self.crew.leads else {}

    def split(self, mode: str, rows: int, context: int) -> Row:
        return self._step(self.models.split(self.setting.dtype), mode, rows, context)

    def host(self, rows: int, context: int, pages: int) -> Row:
        if not self.crew.leads:
            return {}
        pool = self.models.pages(pages)
        try:
            row = self._step(self.models.one(self.setting.dtype), "oasis", rows, context, pool)
        except HostMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error
        config = self.models.one(self.setting.dtype).config
        heads = config.num_hidden_layers * config.num_key_value_heads
        host_bytes = blocks(rows, context) * heads * pool.page_bytes
        return {**row, "host_bytes": host_bytes, "pinned": pool.pinned_bytes, "placement": pool.placement}

    def _step(self, model: Any, mode: str, rows: int, context: int, pool: PagePool | None = None) -> Row:
        own, how = self.setting, {"pool_gib": self.setting.pool_gib if pool is None else pool}
        if mode == "dense":
            return told(bench.dense(model, rows, context, own.steps, **how))
        knobs = {"budget": own.budget, "fetch_ratio": RATIO, "steps": own.steps, **how}
        (one,) = bench.bench(model, rows, context, parts_of=("whole",), **knobs)
        return told(one, cap_bytes=own.cap_bytes(max(1, round(RATIO * own.k)), rows) // (_ranks(model) or 1))

    @torch.no_grad()
    def ids(self, dtype: str) -> Row:
        """Texts of the first rank's own model, then of the split one."""
        kind = getattr(torch, dtype)
        one = self._text(self.models.one(kind)) if self.crew.leads else None
        parted = self._text(self.models.split(kind))
        if one is None:
            return {}
        same = (one == parted).int().cumprod(1).sum(1)
        return {"tokens": one.numel(), "before_any_differs": same.tolist(), "same": bool((one == parted).all())}

    def _text(self, model: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, 1000, (IDS["rows"], IDS["prompt"]), generator=generator).to(model.device)
        model.generation_config.eos_token_id = None
        cache = OasisCache(model, budget=160, fetch_ratio=0.5, drafter="prompt_lookup", compile_after=None)
        given = {cache_name(model): cache, "max_new_tokens": IDS["new"], "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **given)[:, IDS["prompt"] :].cpu()


def _ranks(model: Any) -> int:
    return getattr(model, "_tp_size", None) or 1


def blocks(rows: int, context: int) -> int:
    """Of all rows, one KV head and layer, as `bench.filled` makes them."""
    return rows * (-(-context // BLOCK) + bench.DENSE_ROOM // BLOCK)


def points(crew: Crew, rows: Row, host: Row, heads: int, page: int, host_gib: float) -> Iterator[Point]:
    """In the order in which they matter. heads: KV heads of all layers; page: bytes of one."""
    if crew.size > 1:
        yield _texts(crew, "float32")
    for context, counts in rows.items():
        for mode, count in counts.items():
            yield _point(crew, "one", mode, count, context, 1)
    if crew.size > 1:
        yield _texts(crew, "bfloat16")  # here, between the models that it needs too
        for context, counts in rows.items():
            for mode, count in counts.items():
                for times in (crew.size, 1):
                    yield _point(crew, "split", mode, count * times, context, crew.size)
    fits = {at: [n for n in counts if blocks(n, at) * heads * page <= host_gib * 2**30] for at, counts in host.items()}
    most = max((blocks(n, at) * heads for at, counts in fits.items() for n in counts), default=0)
    for context, counts in host.items():
        for count in counts:
            key = {"mode": "oasis", "context": context, "rows": count, "ranks": 1}
            if count not in fits[context]:
                print(f"{count} rows of {context:,} tokens need more than --host-gib {host_gib:g}", flush=True)
                continue
            yield Point("host", key, lambda n=count, at=context: crew.all_do("host", rows=n, context=at, pages=most))


def _texts(crew: Crew, dtype: str) -> Point:
    return Point("ids", {"dtype": dtype, "ranks": crew.size}, lambda: crew.all_do("ids", dtype=dtype))


def _point(crew: Crew, part: str, mode: str, rows: int, context: int, ranks: int) -> Point:
    key = {"mode": mode, "context": context, "rows": rows, "ranks": ranks}
    return Point(part, key, lambda: crew.all_do(part, mode=mode, rows=rows, context=context))


def bars(result: Row) -> list[Row]:
    out = []
    for row in of(result, "ids"):
        if row["dtype"] == "float32":
            out.append(tables.bar(f"{row['ranks']} ranks write one GPU's ids, float32", float(row["same"]), 1))
    moved = [row["bytes"] / row["cap_bytes"] for row in result["rows"] if row.get("cap_bytes")]
    if moved:
        out.append(tables.bar("bytes over the link as a share of the cap's, the least", min(moved), 1))
    for row in of(result, "split"):
        alone = find(
            result["rows"], "one", mode=row["mode"], context=row["context"], rows=row["rows"] // row["ranks"]
        )  # fmt: skip
        if row["mode"] == "oasis" and alone is not None:
            times = row["tokens_per_second"] / alone["tokens_per_second"]
            named = (
                f"{row['context']:,} tokens: {row['rows']} rows on {row['ranks']} GPUs, times {alone['rows']} on one"
            )
            out.append(tables.bar(named, times, 0.85 * row["ranks"]))
    for context, least, speed in ((16384, 90, 5000), (32768, 45, 3500)):
        real = [row for row in of(result, "host") if row["context"] == context and row["rows"] >= least]
        if real:
            best = max(row["tokens_per_second"] for row in real)
            out.append(tables.bar(f"{context:,} tokens: {least} rows and more of one GPU, tokens/s", best, speed))
    return out


def lines(result: Row) -> list[Lines]:
    out: list[Lines] = []
    head = ["", "GPUs", "rows", "ms a step", "tokens/s", "MB over a link", "GB of pages", "layers"]
    for context in dict.fromkeys(row["context"] for row in result["rows"] if "context" in row):
        rows = []
        for row in (row for row in result["rows"] if row.get("context") == context):
            name = NAMES[row["mode"]] + (", a page for every block" if row["part"] == "host" else "")
            if not row["fits"]:
                rows.append([name, str(row["ranks"]), str(row["rows"]), "does not fit", *[""] * 4])
                continue
            rows.append([
                name, str(row["ranks"]), str(row["rows"]), f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
                f"{row['bytes'] / 1e6:,.0f}", f"{row['host_bytes'] / 1e9:,.0f}" if row["part"] == "host" else "",
                row["graph"],
            ])  # fmt: skip
        out.append((f"{context:,} tokens a row", head, rows))
    texts = [
        [row["dtype"], str(row["ranks"]), str(row["tokens"]), ", ".join(map(str, row["before_any_differs"]))]
        for row in of(result, "ids")
    ]  # fmt: skip
    if texts:
        out.append(("Texts of a split model and of one GPU", ["", "GPUs", "tokens", "a row's, the same"], texts))
    return [*out, *([tables.bars(result["bars"])] if result["bars"] else [])]


def draw(result: Row, path: Path) -> None:
    contexts = list(dict.fromkeys(row["context"] for row in result["rows"] if "context" in row))
    figure, (panels,) = sweep.chart(1, max(len(contexts), 1), (6, 4))
    for context, axes in zip(contexts, panels):
        shown = [row for row in result["rows"] if row.get("context") == context and row["fits"]]
        labels = [f"{NAMES[row['mode']]}\n{row['ranks']} GPU, {row['rows']} rows" for row in shown]
        colours = ["C0" if row["mode"] == "oasis" else "C1" for row in shown]
        axes.barh(range(len(shown)), [row["tokens_per_second"] for row in shown], color=colours)
        axes.set_yticks(range(len(shown)), labels, fontsize="small")
        axes.set(xlabel="tokens/s", title=f"{context:,} tokens a row")
        axes.invert_yaxis()
    figure.savefig(path, dpi=100)


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--contexts", nargs="+", type=int, choices=list(ROWS), default=list(ROWS))
        parser.add_argument("--host-gib", type=float, default=230, help="host memory for pages (default: 230)")

    args = sweep.arguments(__doc__, PARTS, own)
    if not args.host_gib > 0:
        raise SystemExit(f"--host-gib {args.host_gib:g} is not allowed: use a number above zero.")
    setting = sweep.QUICK if args.quick else Setting()
    rows = {600: {"oasis": 2, "dense": 1}} if args.quick else {at: ROWS[at] for at in args.contexts}
    host = {600: (2,)} if args.quick else {at: HOST_ROWS[at] for at in args.contexts}
    jobs: dict[str, Any] = {}
    crew = Crew(setting.device, jobs)
    own_jobs = Jobs(setting, Models(setting, crew), crew)
    jobs.update({name: getattr(own_jobs, name) for name in PARTS})
    if not crew.leads:
        if args.device == "cuda":
            sweep.limit(args.memory_gb)
        crew.follow()
    else:
        if crew.size == 1 and args.points and set(args.points) & {"ids", "split"}:
            raise SystemExit("There is one rank here: ids and split need torchrun --nproc-per-node 2.")
        settings = {"shape": setting.shape, "budget": setting.budget, "fetch_ratio": RATIO, "memory_gb": args.memory_gb}
        run = Sweep("tensor_parallel", TITLE, args, settings)
        run.runs[-1]["ranks"] = crew.size
        shape = bench.SHAPES[setting.shape]
        heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
        page = 2 * BLOCK * shape["head_dim"] * setting.dtype.itemsize
        run.run(points(crew, rows, host, heads, page, args.host_gib))
        run.finish(bars, lines, draw)
    own_jobs.models._have = (None, None)
    crew.dismiss()


if __name__ == "__main__":
    main()
