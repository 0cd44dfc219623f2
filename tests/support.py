"""`docs/support.md`: what works and what is refused, as the tables of the tests give it. `make support` writes it.

Every cell is run: it works where nothing is raised, and is refused where one of ours or transformers' errors is, with
its sentence. An assertion that fails is neither, and stops the page.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no cell asks the network

import features
import matrix
import vision
import weights
from families import REFUSED, SERVED, refused, served

from oasis_hf import OasisCache

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
VERSION = "5.24.0"
"""The transformers whose sentences the page shows."""
WORKS, NO_PART = "works", "has no part in it"

Cell = Callable[[], object]


@dataclass(frozen=True)
class Table:
    """One of the page. columns: the first names the rows. rows: of cells, None where there is nothing to do. slow: rows
    that are not among those that CI runs first."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell | None, ...]]
    slow: frozenset[str] = frozenset()


def outcome(cell: Cell | None) -> str:
    """`WORKS`, `NO_PART`, or the sentence of a refusal."""
    if cell is None:
        return NO_PART
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cell()
    except (ValueError, RuntimeError) as error:  # ConfigError is a ValueError
        return re.sub(r"https://\S*[^\s.]", "its recipe on the hub", " ".join(str(error).split()))
    return WORKS


def line(table: Table, row: str) -> str:
    """A row of the page as the cells give it now."""
    told = [outcome(cell) for cell in table.rows[row]]
    return " | ".join((f"| {row}", *(one if one in (WORKS, NO_PART) else f"refuses: {one}" for one in told))) + " |"


def _calls() -> dict[str, tuple[Cell | None, ...]]:
    rows: dict[str, tuple[Cell | None, ...]] = {
        what: (functools.partial(call, False), functools.partial(call, True)) for what, call in features.CALLS.items()
    }
    return rows | {what: (call, None) for what, call in features.ALONE.items()}


OFTEN = (
    "Llama 3.1", "Qwen2,", "Qwen3", "Mistral", "Phi-3,", "Phi-3 ", "Gemma 3", "Gemma 4", "gpt-oss", "OLMo 3", "SmolLM3",
    "Granite 3", "GPT-2",
)  # fmt: skip
"""How the families begin that CI runs first."""

TABLES = (
    Table(
        "Families",
        "Tiny random models in float32, with the attention of the real ones (groups, windows, sinks, RoPE, experts). "
        "The first seven columns have a budget of the whole text and compare with `DynamicCache`. `sparse` and `on "
        "demand` have one of 48 tokens for a text of 112: the first gives the same bits wherever the blocks live, and "
        "another result than dense attention; the second what attention over the resident full KV gives. "
        '`verify="full"` gives dense tokens from that budget. Where all layers slide nothing is chosen, and the last '
        "three compare with dense. Works for a family does not say how well a budget serves it: "
        "[results.md](results.md) does.",
        ("family", *matrix.CELLS),
        {
            family: tuple((lambda family=family, cell=cell: cell(served(family))) for cell in matrix.CELLS.values())
            for family in SERVED
        },
        frozenset(family for family in SERVED if not family.startswith(OFTEN)),
    ),
    Table(
        "Families that are refused",
        "When the cache is made, and by `oasis-hf doctor` before that.",
        ("family", "`OasisCache(model)`"),
        {family: ((lambda family=family: OasisCache(refused(family))),) for family in REFUSED},
    ),
    Table(
        "Models that take images",
        "The language model has the cache; whatever is before it is the model's own.",
        ("family", *vision.SEEN),
        {family: tuple(functools.partial(cell, family) for cell in vision.SEEN.values()) for family in vision.VISION},
        frozenset(("Qwen2-VL", "Qwen3-VL", "InternVL", "SmolVLM")),
    ),
    Table(
        "What generate can be asked for",
        "A tiny Llama, a budget of the whole text. Each is the same as with a `DynamicCache`: tokens, and what else is "
        "asked for. `oasis_hf.generate` draws samples in another order, so there the likeliest is drawn. Some of the "
        "sentences are transformers' own: four searches are recipes on the hub, which no test loads.",
        ("asked for", "`model.generate`", "`oasis_hf.generate`"),
        _calls(),
    ),
    Table(
        "Weights and wrappers",
        "Greedy text of the model as it is handed over, against itself with a `DynamicCache`, drafts accepted on the "
        "way; with an EAGLE-3 head that reads the model's own embedding and head. In 16 bits a near-tie may tip.",
        ("model", "n-gram drafts", "EAGLE-3 head"),
        {
            kind: (functools.partial(weights.same_tokens, kind), functools.partial(weights.with_a_head, kind))
            for kind in weights.WEIGHTS
        },
        frozenset(("float16", "offloaded to disk (accelerate)", "`model.compile()`", "int4, torchao")),
    ),
)


def head(table: Table) -> list[str]:
    rule = "|" + " --- |" * len(table.columns)
    return [f"## {table.title}", "", table.about, "", f"| {' | '.join(table.columns)} |", rule]


def page(lines: Callable[[Table, str], str]) -> str:
    """The page. lines: gives each row's."""
    parts = [
        "# What works, and what is refused",
        "",
        f"Made by `make support` with transformers {VERSION}: each cell was run, and `tests/test_support.py` compares. "
        "`oasis-hf doctor MODEL` says it of a model by its configuration.",
        "",
    ]
    for table in TABLES:
        parts += [*head(table), *(lines(table, row) for row in table.rows), ""]
    return "\n".join(parts)


def _progress(table: Table, row: str) -> str:
    made = line(table, row)
    print(made, file=sys.stderr, flush=True)
    return made


def cases(slow: bool) -> Iterator[tuple[Table, str]]:
    for table in TABLES:
        for row in table.rows:
            if (row in table.slow) == slow:
                yield table, row


if __name__ == "__main__":
    PAGE.write_text(page(_progress), encoding="utf-8")
