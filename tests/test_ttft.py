"""`eval/ttft.py`: two processes over loopback, and what is made of their times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from letters import letter_tokenizer
from tiny import tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import ttft  # noqa: E402


@pytest.mark.slow
def test_the_script_over_loopback(tmp_path, monkeypatch, capfd):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    line = ["ttft.py", "--quick", "--model", str(tmp_path / "model"), "--dtype", "float32", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    ttft.main()
    result = json.loads((tmp_path / "ttft.json").read_text())
    whole, part = (next(row for row in result["rows"] if row["how"] == how) for how in ("full", "partial"))
    assert part["bytes"] < whole["bytes"] and part["all_bytes"] >= part["bytes"]
    (row,) = result["summary"]
    assert row["sooner"] > 0 and row["full_model_s"] == 0 and row["prefill_rest_s"] > 0
    assert (tmp_path / "ttft.md").read_text() == ttft.markdown(result)
    assert str(tmp_path) not in (tmp_path / "ttft.json").read_text()


def test_the_model_is_bytes_over_rate_and_the_best_of_the_repeats_counts():
    rows = [
        {"mbit": 1000, "how": "partial", "bytes": 25_000_000, "transfer_s": seconds, "step_s": 0.1}
        for seconds in (0.4, 0.25)
    ] + [{"mbit": 1000, "how": "full", "bytes": 125_000_000, "transfer_s": 1.25}]
    (row,) = ttft.summary(rows, rest=0.5)
    assert row["partial_model_s"] == pytest.approx(0.2) and row["full_model_s"] == pytest.approx(1.0)
    assert row["partial_s"] == 0.25 and row["transfer_sooner"] == pytest.approx(5)
    assert row["sooner"] == pytest.approx((0.5 + 1.25 + 0.1) / (0.5 + 0.25 + 0.1))
    assert row["sooner_model"] == pytest.approx((0.5 + 1.0 + 0.1) / (0.5 + 0.2 + 0.1))
