"""`eval/increment.py` over two processes with a small model, and its bars."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from letters import letter_tokenizer
from tiny import tiny

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))

import increment  # noqa: E402

BLOCK = 3 * 2 * 2048
"""Bytes of a block of the small model: layers, KV heads, a page."""


def test_the_script_over_two_processes(tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    line = ["increment.py", "--quick", "--model", str(tmp_path / "model"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    increment.main()
    result = json.loads((tmp_path / "increment.json").read_text())
    rows = {row["holds"]: row for row in result["rows"]}
    assert list(rows) == list(increment.WAYS) and all(row["same"] == result["requests"] == 2 for row in rows.values())
    assert all(0 < row["seconds"] < 60 for row in rows.values())
    for way, (keeps, _) in increment.WAYS.items():
        row = rows[way]
        moved = row["first"] + row["later"] + row["kept"]
        if keeps:  # 25 of 28 blocks, which the first prompt left: the others come, and nothing of these
            assert row["held_tokens"] == 400 and row["not_held"] == moved == 3 * BLOCK
            assert abs(rows["nobody"]["handle"] - row["handle"] - 25 * 3 * 2 * (64 + 8 + 4)) < 50
        else:
            assert row["held_tokens"] == row["kept"] == 0 and row["not_held"] == 28 * BLOCK
            assert 3 * BLOCK < row["first"] <= moved < row["not_held"]
    assert all(bar["met"] for bar in result["bars"]) and len(result["bars"]) == 5
    page = (tmp_path / "increment.md").read_text()
    assert "| both | " in page and "2 of 2 requests" in page
    assert str(tmp_path) not in (tmp_path / "increment.json").read_text() + page


def test_bars():
    row = {"holds": "both", "first": 2, "later": 1, "kept": 1, "not_held": 4, "same": 2}
    assert [bar["met"] for bar in increment.bars({"rows": [row], "requests": 2})] == [True, True]
    row = {**row, "kept": 2, "same": 1}
    assert [bar["met"] for bar in increment.bars({"rows": [row], "requests": 2})] == [False, False]


def test_what_the_manual_says_was_measured():
    result = json.loads((ROOT / "eval" / "results" / "increment.json").read_text(encoding="utf-8"))
    nobody, *_, both = result["rows"]
    text = " ".join((ROOT / "docs" / "disaggregation.md").read_text(encoding="utf-8").split())
    (said,) = re.findall(
        r"where ([\d,]+) of ([\d,]+) tokens of a prompt of SmolLM2 are held on both sides, the blocks of the first "
        r"step are ([\d.]+) MB instead of ([\d.]+), the handle ([\d.]+) MB instead of ([\d.]+), and the first token "
        r"is there in ([\d.]+) s instead of ([\d.]+) ", text
    )  # fmt: skip
    sizes = [row[name] / 1e6 for name in ("first", "handle") for row in (both, nobody)]
    told = [f"{result['prefix']:,}", f"{result['prefix'] + result['rest']:,}", *(f"{size:.1f}" for size in sizes)]
    assert list(said) == [*told, *(f"{row['seconds']:.1f}" for row in (both, nobody))]
    assert all(bar["met"] for bar in result["bars"]) and result["dtype"] == "float32"
