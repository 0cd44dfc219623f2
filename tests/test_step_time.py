"""`eval/step_time.py`: what it measures; the bar itself is read from a quiet machine (eval/results/step_time.json)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_ratios_to_a_dense_step(smollm2, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "eval"))
    sys.modules.pop("step_time", None)
    import step_time

    model, tokenizer = smollm2
    ids = tokenizer("one two three four five six " * 60, return_tensors="pt").input_ids[:, :311]
    result = step_time.measure(model, ids, 300, 8)
    assert set(result) == {"dense", *step_time.SETTINGS}
    assert result["dense"]["ratio"] == 1.0
    for row in result.values():
        assert row["median_ms"] > 0 and 0.2 < row["ratio"] < 20
