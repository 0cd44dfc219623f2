"""`eval/acceptance.py`: passes of the cache's own loop, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny import prompt, tiny

from oasis_hf import OracleDrafter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import acceptance  # noqa: E402


def test_drafts_that_are_right_are_told_as_tokens_a_pass():
    model, ids = tiny("llama"), prompt(2, 60)
    known = model.generate(ids, max_new_tokens=25, do_sample=False)
    right, wrong = OracleDrafter(known), OracleDrafter((known + 1) % 90)
    # 24 tokens behind the prompt's own: 12 passes of two a row, none wasted.
    row = acceptance.measure(model, right, [ids], 1, 25, 2064)
    assert (row["passes"], row["tokens_a_pass"], row["top1"]) == (24, 2.0, 1.0)
    row = acceptance.measure(model, right, [ids], 2, 25, 2064)
    assert (row["tokens_a_pass"], row["top1"]) == (3.0, None)
    row = acceptance.measure(model, wrong, [ids, ids], 1, 9, 2064)
    assert row["tokens_a_pass"] < 1.3 and (row["rows"], row["batches"], row["context"]) == (2, 2, 60)
    assert row["top1"] == pytest.approx(row["tokens_a_pass"] - 1)


def test_the_table_has_a_line_a_batch_and_a_column_a_number_of_drafts():
    base = {"drafter": "head", "context": 1000, "rows": 8, "batches": 1}
    rows = [{**base, "drafts": 1, "tokens_a_pass": 1.5, "top1": 0.5}, {**base, "drafts": 4, "tokens_a_pass": 2.25}]
    head, line = acceptance.table(rows)
    assert "1 draft " in head and "4 drafts" in head
    assert line.split() == ["head", "1000", "8", "0.500", "1.500", "2.250"]
