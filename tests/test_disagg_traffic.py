"""`eval/disagg_traffic.py`: two processes, their traffic by what it was for, and the bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from letters import letter_tokenizer
from tiny import tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import disagg_traffic  # noqa: E402
import report_disagg as report  # noqa: E402


def test_the_script_over_two_processes(tmp_path, monkeypatch, capsys):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    line = ["disagg_traffic.py", "--quick", "--model", str(tmp_path / "model"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", line)
    disagg_traffic.main()
    result = json.loads((out / "disagg_traffic.json").read_text())
    rows = result["rows"]
    assert [row["fetch_ratio"] for row in rows] == [1.0, 0.05] and all(row["same_ids"] for row in rows)
    for row in rows:
        assert 0 < row["blocks"] < row["full"] and row["drift"] >= 0 and row["held"] <= row["full"] * 1.2
        assert 0 <= row["idle"] <= 1 and row["peak"] > 0
    assert result["full_transfer"][0]["bytes"] == rows[0]["full"]
    assert (out / "disagg_traffic.md").read_text() == report.markdown(result)
    assert (out / "disagg_traffic.png").stat().st_size > 1000
    assert str(tmp_path) not in (out / "disagg_traffic.json").read_text()
    assert "| reference |" in capsys.readouterr().out


def test_the_papers_geometry():
    """OasisKV's figures for a request of 32K: 0.46 GiB at admission against 4.50 in full, 9.7 times."""
    rows = [{"tokens_per_summary": 16, "fetch_ratio": 0.05, "new_blocks_a_step_and_head": 0.5}]
    (row,) = report.geometry(rows)
    gib = {name: row[name] / 2**30 for name in ("blocks", "summaries", "draft", "admission", "full")}
    assert gib["blocks"] == pytest.approx(0.28, abs=0.005) and gib["summaries"] == pytest.approx(0.14, abs=0.005)
    assert gib["draft"] == pytest.approx(0.008, abs=0.0005) and gib["full"] == pytest.approx(4.50, abs=0.02)
    assert gib["admission"] <= 0.46 and gib["full"] / gib["admission"] >= 9.7
    assert row["most_a_step_0.05"] == 6 * 288 * 8192


def test_bars_say_what_was_missed():
    one = {"tokens_per_summary": 16, "handle": 10, "blocks": 20, "full": 100, "drift": 5, "fetch_ratio": 0.05}
    rows = [{**one, "same_ids": True}, {**one, "fetch_ratio": 0.1, "drift": 4, "same_ids": False}]
    met = {bar["what"]: bar["met"] for bar in report.bars({"rows": rows, "geometry": []})}
    assert met == {
        "admission of full transfer, 16-token summaries": False,
        "requests whose ids differ from one process's": False,
        "fetch ratios that drift more than the next larger one": False,
    }
