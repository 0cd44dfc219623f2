"""`eval/disagg_traffic.py`: two processes, their traffic by what it was for, and the bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from letters import letter_tokenizer
from pools import needs_nixl
from test_namespaces import needs_namespaces
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
    assert result["interface"] == [] and not result["namespaces"]
    for told, row in zip(result["host_memory"], rows, strict=True):
        assert (told["fetch_ratio"], told["held"], told["full"]) == (row["fetch_ratio"], row["held"], row["full"])


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tcp", pytest.param("nixl", marks=needs_nixl)])
def test_two_namespaces(tmp_path, monkeypatch, engine):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    line = ["disagg_traffic.py", "--quick", "--model", str(tmp_path / "model"), "--out", str(tmp_path), "--namespaces"]
    monkeypatch.setattr(sys, "argv", [*line, "--engine", engine])
    disagg_traffic.main()
    result = json.loads((tmp_path / f"disagg_traffic_namespaces_{engine}.json").read_text())
    assert len(result["rows"]) == 2 and all(row["same_ids"] for row in result["rows"])
    assert [phase["what"] for phase in result["interface"]] == ["handle", report.DRIFT] * 2 + ["full transfer"]
    for phase in result["interface"]:  # small reads: headers count for more than in a real one
        assert phase["counted"] <= phase["received"] < 1.5 * phase["counted"] + 20_000


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


def test_what_a_device_received_is_held_against_what_was_counted():
    one = {"tokens_per_summary": 16, "handle": 1, "blocks": 1, "full": 100, "drift": 5, "fetch_ratio": 0.05}
    phases = [
        {"what": "handle", "counted": 2 << 20, "received": int((2 << 20) * 1.01)},
        {"what": report.DRIFT, "counted": 4 << 20, "received": int((4 << 20) * 1.2)},
        {"what": "full transfer", "counted": 1000, "received": 2000},  # too small to say anything
    ]
    result = {"rows": [{**one, "same_ids": True}], "geometry": [], "interface": phases}

    def told():
        return [(bar["measured"], bar["met"]) for bar in report.bars(result) if "received" in bar["what"]]

    assert told() == [(pytest.approx(0.01, abs=1e-4), True), (0, True)]
    phases.append({"what": "full transfer", "counted": 2 << 20, "received": int((2 << 20) * 1.03)})
    phases.append({"what": "full transfer", "counted": 2 << 20, "received": (2 << 20) - 1})
    assert told() == [(pytest.approx(0.03, abs=1e-4), False), (1, False)]


def test_host_memory_of_the_papers_geometry():
    one = {"held": 30.0, "full": 60.0, "new_blocks_a_step_and_head": 0.5}
    rows = [{**one, "fetch_ratio": 1.0, "new_blocks_a_step_and_head": 9.0}, {**one, "fetch_ratio": 0.05}]
    most, least = report.host_memory(rows)
    block = 288 * 8192
    assert (most["fetch_ratio"], least["fetch_ratio"], least["full"] / least["held"]) == (1.0, 0.05, 2)
    assert least["synthetic_held_32768"] == least["synthetic_held_24576"] == (129 + 500) * block
    assert most["synthetic_held_24576"] == most["full_24576"] == 1536 * block  # no more than all
    gib = [least[f"full_{tokens}"] / 2**30 for tokens in (24576, 32768)]
    assert gib == [pytest.approx(3.38, abs=0.01), pytest.approx(4.50, abs=0.01)]
