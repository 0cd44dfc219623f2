"""What the sweeps over a step's speed share: points that are measured one after the other until the time is over, kept
as they come; a model of random weights; readings of it as rows of a result.

On one GPU the shape is Qwen3-8B's in bfloat16. `--quick` runs every point once on a CPU with a tiny shape: that shows
that the script works, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import outs
import torch
from provenance import provenance
from report_tables import Lines, Row, keep, show, write

from oasis_hf import bench
from oasis_hf.config import BLOCK


@dataclass(frozen=True)
class Setting:
    """What is measured: a shape of `bench.SHAPES`, rows, tokens a row, the budget, steps that are timed, and how many
    GiB of pinned pages stand for the full KV."""

    shape: str = "qwen3-8b"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    rows: int = 44
    context: int = 16384
    budget: int = 2064
    steps: int = 30
    pool_gib: float = 4

    @property
    def k(self) -> int:
        """Blocks that are selected."""
        return self.budget // BLOCK - 1

    @cached_property
    def model(self) -> Any:
        return bench.random_model(self.shape, self.device, self.dtype)

    def step(
        self, part: str = "whole", rows: int | None = None, context: int | None = None, **given: Any
    ) -> bench.Reading:
        """Of `bench.bench`. given: knobs, `shares` or `drafted`."""
        knobs = {"budget": self.budget, "steps": self.steps, "pool_gib": self.pool_gib, **given}
        (one,) = bench.bench(self.model, rows or self.rows, context or self.context, parts_of=(part,), **knobs)
        return one

    def dense(self, rows: int, context: int | None = None) -> bench.Reading:
        return bench.dense(self.model, rows, context or self.context, self.steps, self.pool_gib)

    def cap_bytes(self, cap: int, rows: int | None = None) -> int:
        """Bytes over the link if every KV head of every layer and row fetches `cap` blocks."""
        config = self.model.config
        page = 2 * BLOCK * config.head_dim * self.dtype.itemsize
        return (rows or self.rows) * config.num_hidden_layers * config.num_key_value_heads * cap * page


QUICK = Setting("tiny", "cpu", torch.float32, rows=2, context=800, budget=160, steps=2, pool_gib=0.02)


def told(one: bench.Reading, **more: Any) -> Row:
    """A reading as a row. bytes: over the link a step; link: those a second; hbm_bytes: read of GPU memory a step."""
    return {
        **asdict(one), "tokens_per_second": one.tokens_per_second, "link": one.link,
        "bytes_a_token": one.bytes / one.rows, "hbm_bytes_a_token": one.hbm_bytes / one.rows, **more,
    }  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measurement. part: what it belongs to, for `--points`; key: what tells it from the part's others; measure:
    gives the rest of the row, with `fits` False where there is none; series: points of which none is tried once one did
    not fit the memory."""

    part: str
    key: Row
    measure: Callable[[], Row]
    series: str = ""


@dataclass
class Sweep:
    """Rows of a result, written after every point.

    Args:
        name: of the script, and of its files. title: of its page. settings: what holds for all rows.
        args: of `arguments`.
    """

    name: str
    title: str
    args: argparse.Namespace
    settings: Row
    rows: list[Row] = field(default_factory=list)
    runs: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun, self._full = time.monotonic(), set[str]()
        if self.args.resume and self.path is not None and self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if before["settings"] != json.loads(json.dumps(self.settings)):
                raise SystemExit(f"--resume: {self.path.name} was measured with other settings: give another --out.")
            self.rows, self.runs = before["rows"], before["provenance"]
        self.runs.append(provenance(self.args.device))
        if self.args.device == "cuda":
            limit(self.args.memory_gb)

    @property
    def path(self) -> Path | None:
        return None if self.args.out is None else self.args.out / f"{self.name}.json"

    @property
    def result(self) -> Row:
        return {"provenance": self.runs, "settings": self.settings, "rows": self.rows}

    def run(self, points: Iterable[Point]) -> None:
        for point in points:
            have = any(row["part"] == point.part and point.key.items() <= row.items() for row in self.rows)
            if have or (self.args.points and point.part not in self.args.points) or point.series in self._full:
                continue
            if time.monotonic() - self.begun > self.args.seconds:
                print(f"no time for {point.part} {point.key}", flush=True)
                continue
            begun, row = time.monotonic(), {}
            try:
                row = {"fits": True, **point.measure()}
            except torch.OutOfMemoryError as error:
                row = {"fits": False, "why": str(error).splitlines()[0][:100]}
                self._full |= {point.series} - {""}
            gc.collect()
            if self.args.device == "cuda":
                torch.cuda.empty_cache()
            self.rows.append({"part": point.part, **point.key, **row, "took_seconds": time.monotonic() - begun})
            print(_line(self.rows[-1]), flush=True)
            self._keep(self.result)

    def _keep(self, result: Row) -> None:
        if self.path is not None:
            keep(self.path, result)

    def finish(
        self, bars: Callable[[Row], list[Row]], tables: Callable[[Row], list[Lines]], draw: Callable[[Row, Path], None]
    ) -> None:
        """Tables, and beside the JSON a page and a figure."""
        result = self.result
        result["bars"] = bars(result)
        show(tables(result))
        self._keep(result)
        if self.path is not None:
            write(self.path.with_suffix(".md"), self.title, result, tables(result))
            draw(result, self.path.with_suffix(".png"))


def limit(memory_gb: float) -> None:
    """Of the GPU's memory this process takes so much at most."""
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb * 1e9 / whole))


def find(rows: list[Row], part: str, /, **key: Any) -> Row | None:
    """The row of a point; None: not measured, or there was no room for it."""
    for row in rows:
        if row["part"] == part and row["fits"] and key.items() <= row.items():
            return row
    return None


def of(result: Row, part: str) -> list[Row]:
    """The rows of a part for which there was room."""
    return [row for row in result["rows"] if row["part"] == part and row["fits"]]


def _line(row: Row) -> str:
    shown = ("ms", "tokens_per_second", "bytes", "agreement", "kl", "seconds", "graph", "why")
    key = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in list(row.items())[1:5])
    values = [f"{k} {row[k]:,.4g}" if isinstance(row[k], float) else f"{k} {row[k]}" for k in shown if k in row]
    return f"{row['part']:10s} {key}: {', '.join(values)} ({row['took_seconds']:.1f} s)"


def arguments(about: str, parts: Iterable[str], given: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """The common arguments and a script's own.

    Args:
        parts: names for `--points`. given: adds the script's own arguments.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape on a CPU: whether the script works")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--points", nargs="+", choices=list(parts), help="only these parts")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no point after so many")
    parser.add_argument("--resume", action="store_true", help="measure only what the result in --out lacks")
    parser.add_argument("--memory-gb", type=float, default=80, help="GPU memory that may be used (default: 80)")
    parser.add_argument("--out", type=outs.folder, help="folder for JSON, page and figure")
    given(parser)
    args = parser.parse_args()
    for name in ("rows", "dense_rows", "contexts", "lengths", "k"):
        value = getattr(args, name, None)
        for one in value if isinstance(value, list) else [1 if value is None else value]:
            if one < 1:
                raise SystemExit(f"--{name.replace('_', '-')} {one} is not allowed: use integers >= 1.")
    if args.quick:
        args.device = "cpu"
    elif args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: --quick shows on a CPU that the script works.")
    elif args.device == "cpu":
        raise SystemExit("A CPU's times say nothing of a GPU's: use --quick.")
    return args


def chart(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of panels `[rows][columns]`, of `size` inches each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
