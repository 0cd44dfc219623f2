"""`eval/prefix.py` on a small model, and its bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from letters import letter_tokenizer
from tiny import tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import prefix  # noqa: E402


def test_the_script(tmp_path, monkeypatch, capsys):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    line = ["prefix.py", "--quick", "--model", str(tmp_path / "model"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    prefix.main()
    result = json.loads((tmp_path / "prefix.json").read_text())
    row = result["row"]
    assert row["same"] == row["requests"] == 2 and row["hits"] == 2 * (400 + 432)
    assert row["ratio"] == row["stored_s"] / row["resident_s"]
    assert (tmp_path / "prefix.md").read_text() == prefix.markdown(result)
    assert str(tmp_path) not in (tmp_path / "prefix.json").read_text()


def test_bars():
    row = {"ratio": 1.6, "requests": 3, "same": 3}
    assert [bar["met"] for bar in prefix.bars({"row": row})] == [False, True]
    assert [bar["met"] for bar in prefix.bars({"row": {**row, "ratio": 1.5, "same": 2}})] == [True, False]
