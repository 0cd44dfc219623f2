"""`eval/lane_layers.py`: counts are the caches' own, and which layers make up a share of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import byte_tokenizer
import pytest

EVAL = Path(__file__).resolve().parent.parent / "eval"
sys.path.insert(0, str(EVAL))

import lane_layers  # noqa: E402
from result_accuracy import LAYERS, SCORES  # noqa: E402

CALL = ["lane_layers.py", "--plain", "--tasks", "code", "needle_keys", "--length", "1400", "--budget", "64",
        "--samples", "1", "--head", "prompt_lookup"]  # fmt: skip


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_layers.recording, "load", lambda device, dtype, folder: byte_tokenizer.model())
    monkeypatch.setattr(lane_layers.recording, "load_tokenizer", lambda folder: byte_tokenizer.tokenizer())
    eager = {**SCORES["corrected"], "correct_above": 0.001}  # a random model looks everywhere alike
    monkeypatch.setitem(SCORES, "corrected", eager)
    seen, families = [], []
    answers, samples = lane_layers.branches.answers, lane_layers.prompts.Makers.samples

    def watched(model, cache, *rest):
        out = answers(model, cache, *rest)
        stats = cache.stats()
        seen.append({name: stats[name].sum(1).tolist() for name in ("corrected", "compared")})
        seen[-1] |= {share: list(cache.layers_corrected(share)) for share in lane_layers.SHARES}
        return out

    def asked(self, task, seeds, length, family="eval"):
        families.append(family)
        return samples(self, task, seeds, length, family)

    monkeypatch.setattr(lane_layers.branches, "answers", watched)
    monkeypatch.setattr(lane_layers.prompts.Makers, "samples", asked)
    monkeypatch.setattr(sys, "argv", [*CALL, "--out", str(tmp_path)])
    lane_layers.main()
    result = json.loads((tmp_path / "lane_layers.json").read_text())
    assert families == ["train"] * 2 and result["settings"]["correction"] == "auto"
    assert [one["task"] for one in result["layers"]] == ["code", "needle_keys", "all"]
    for row, own, cache in zip(result["rows"], result["layers"], seen, strict=False):
        assert row["corrected"] == cache["corrected"] and row["compared"] == cache["compared"]
        assert 0 < sum(row["corrected"]) <= sum(row["compared"]) and row["steps"] > 0
        # With one sample a cache says the same of itself.
        assert own["fewest"] == {f"{share:g}": cache[share] for share in lane_layers.SHARES}
    one, two, mean = (part["shares"] for part in result["layers"])
    assert sum(mean) == pytest.approx(1) and mean == pytest.approx([(a + b) / 2 for a, b in zip(one, two)])
    page = (tmp_path / "lane_layers.md").read_text()
    assert "| mean over tasks |" in page and "1 prompts of 1,400 tokens a task" in page


def test_samples_add_up_and_few_layers_are_few():
    rows = [{"task": "one", "corrected": [60, 0, 30, 10]}, {"task": "two", "corrected": [0, 2, 8, 0]},
            {"task": "none", "corrected": [0, 0, 0, 0]}]  # fmt: skip
    one, two, every = lane_layers.told(rows)
    assert every["task"] == "all" and every["shares"] == pytest.approx([0.3, 0.1, 0.55, 0.05])
    assert one["fewest"] == {"0.8": [0, 2], "0.85": [0, 2], "0.9": [0, 2]} and two["fewest"]["0.85"] == [1, 2]
    assert every["fewest"] == {"0.8": [0, 2], "0.85": [0, 2], "0.9": [0, 1, 2]}
    assert every["of_chosen"] == pytest.approx(0.55) and 2 in LAYERS and not {0, 1, 3} & set(LAYERS)
    with pytest.raises(SystemExit, match="Nothing was corrected: use longer prompts"):
        lane_layers.over_tasks(rows[2:])


def test_the_chosen_layers_are_those_that_were_measured():
    result = json.loads((EVAL / "results" / "lane_layers.json").read_text(encoding="utf-8"))
    every = lane_layers.told(result["rows"])[-1]
    assert result["layers"][-1] == every and result["settings"]["family"] == "train"
    most = sorted(range(len(every["shares"])), key=lambda layer: -every["shares"][layer])[: len(LAYERS)]
    assert sorted(most) == list(LAYERS)
    (said,) = re.findall(r"(\d+)% of them", (EVAL / "result_accuracy.py").read_text(encoding="utf-8"))
    assert round(100 * every["of_chosen"]) == int(said)
