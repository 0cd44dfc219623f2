"""`docs/support.md` says what its cells give, and so can't go stale."""

from __future__ import annotations

import re

import pytest
import support
import torch
import transformers
from families import REFUSED, SERVED

TEXT = support.PAGE.read_text(encoding="utf-8") if support.PAGE.exists() else ""
NEWEST = transformers.__version__ == support.VERSION
ALL = [(table, row) for table in support.TABLES for row in table.rows]


def section(table: support.Table) -> list[str]:
    return TEXT[TEXT.index(f"## {table.title}\n") :].split("\n## ")[0].splitlines()


def written(table: support.Table, row: str) -> str:
    found = [line for line in section(table) if line.startswith(f"| {row} |")]
    assert len(found) == 1, f"{row} has {len(found)} lines in docs/support.md: run `make support`"
    return found[0]


def test_the_page_has_every_row_and_no_other():
    assert support.page(written) == TEXT, "run `make support`"


@pytest.mark.parametrize("table, row", ALL, ids=[row for _, row in ALL])
def test_no_cell_is_silent(table, row):
    cells = written(table, row).strip("| ").split(" | ")[1:]
    assert len(cells) == len(table.columns) - 1
    for cell, made in zip(cells, table.rows[row], strict=True):
        if made is None:
            assert cell == support.NO_PART
        else:
            assert cell == support.WORKS or re.fullmatch(r"refuses: [^|]+[.]", cell), cell


def case(slow: bool):
    cases = list(support.cases(slow))
    return pytest.mark.parametrize("table, row", cases, ids=[row for _, row in cases])


def check(table: support.Table, row: str) -> None:
    if "torchao" in row:
        pytest.importorskip("torchao")
    try:
        made = support.line(table, row)
    finally:
        torch._dynamo.reset()
    if NEWEST:
        assert made == written(table, row), "run `make support`"
    else:  # other sentences, or a family that came later: what is wrong has raised already
        assert made.count("refuses: ") < len(table.columns) - 1 or row not in SERVED or row in ("GPT-J", "CodeGen")


@pytest.mark.core
@case(slow=False)
def test_cells(table, row):
    check(table, row)


@pytest.mark.slow
@case(slow=True)
def test_more_cells(table, row):
    check(table, row)


@pytest.mark.core
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_for_its_own_reason(family):
    table = next(table for table in support.TABLES if table.title == "Families that are refused")
    told = support.outcome(table.rows[family][0])
    assert REFUSED[family][1] in told and told.endswith("; use DynamicCache for it.")


def test_a_wrong_cell_is_no_refusal():
    def wrong() -> None:
        raise AssertionError("not the same")

    with pytest.raises(AssertionError):
        support.outcome(wrong)
