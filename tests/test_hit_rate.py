"""`eval/hit_rate.py`: the head's drafts over a text, agreement by layer and KV head, and the bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from heads import TAPS, TENSORS, ids, plain_config, states, straight, target, write

from oasis_hf.drafters import Eagle3Drafter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import hit_rate  # noqa: E402
import report_hit_rate as report  # noqa: E402
from cells import WINDOW, Scorings, selections, truth
from chains import Chains, continued, head_chains  # noqa: E402

PROMPT = 322
KS = [4, 8, 20]


@pytest.fixture
def drafter(tmp_path):
    return Eagle3Drafter.from_pretrained(write(tmp_path / "head", plain_config(), TENSORS), target())


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_those_of_the_head_over_the_true_text(drafter, count):
    tokens, prompt = ids(1, 60)[0], 50
    got = head_chains(target(), drafter, tokens, prompt, count)
    assert got.found.all() and got.tokens.shape == (10, count)
    for at, draft in zip(range(prompt, 60), got.tokens.tolist(), strict=True):
        text = tokens[:at].tolist()
        assert draft == straight().drafts(text, states(target(), text[:-1], TAPS), count, ())[0]


def test_readings(drafter, tmp_path):
    model = target()
    tokens = continued(model, ids(2, PROMPT), 12)
    assert tokens.shape == (2, PROMPT + 12)
    rows = hit_rate.measure(model, drafter, tokens, PROMPT, ["one", "two"], KS, 144, 1)
    found = {(row["score"], row["predictor"], row["speculation"], row["k"]): row for row in rows}
    assert len(found) == len(rows) == 2 * len(hit_rate.PREDICTORS) * 2 * len(KS)
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    for row in rows:
        grid = torch.tensor(row["agreement_by_layer_and_head"])
        assert grid.shape == (layers, heads) and bool(((grid >= 0) & (grid <= 1)).all())
        assert row["agreement"] == pytest.approx(float(grid.mean()), abs=1e-4)
        assert row["worst_head"] == pytest.approx(float(grid.min()), abs=1e-4)
        assert row["worst_layer"] == pytest.approx(float(grid.mean(1).min()), abs=1e-4)
        assert row["agreement"] == pytest.approx(sum(row["agreement_by_text"]) / 2, abs=1e-4)
        assert 1 - row["kept"] == pytest.approx(sum(row["missed_by_layer"]) / layers, abs=1e-5)
        if row["predictor"] == "oracle" or row["k"] == 20 and row["speculation"] == "off":
            assert row["agreement"] == 1 and row["of_own"] == 1  # never more than 20 blocks
    right = [head_chains(model, drafter, text, PROMPT).tokens[:, 0] == text[PROMPT:] for text in tokens]
    draft = found["default", "draft", "off", 4]
    assert draft["right"] == pytest.approx(float(torch.stack(right).double().mean()))
    parts = draft["right"] * (draft["agreement_right"] or 0), (1 - draft["right"]) * (draft["agreement_wrong"] or 0)
    assert sum(parts) == pytest.approx(draft["agreement"], abs=1e-5)
    if draft["agreement_right"] is not None:  # a right draft's query is the next one's
        assert draft["agreement_right"] > 0.99
    assert found["default", "previous", "off", 4]["agreement"] < 1
    assert draft["tokens_a_pass"] == 1 <= found["default", "draft", "on", 4]["tokens_a_pass"]
    capped = found["default", "draft", "off", 8]["capped"]
    assert [one["fetch_ratio"] for one in capped] == list(hit_rate.RATIOS)
    assert all(a["fetched"] <= b["fetched"] + 1e-9 for a, b in zip(capped, capped[1:]))
    assert not found["default", "draft", "off", 4]["capped"]

    bars = report.bars(rows, 8)
    assert {(bar["prompt"], bar["speculation"]) for bar in bars} == {(PROMPT, "off"), (PROMPT, "on")}
    assert all(bar["met"] == (bar["measured"] >= bar["bar"]) for bar in bars)
    report.plot(rows, (4, 8), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_with_speculation_a_step_is_right_where_the_first_draft_of_the_pass_before_was():
    tokens = ids(1, PROMPT + 12)[0]
    drafts = torch.nn.functional.pad(tokens[PROMPT:], (0, 1), value=5).unfold(0, 2, 1).clone()
    drafts[1, 0] += 1
    recording = hit_rate.recording.record(
        target(), "text", tokens, PROMPT, WINDOW, Chains(drafts, torch.ones(12, dtype=torch.bool))
    )
    on = recording.speculating(1)
    origins = on.passes.origin.tolist()
    assert origins == [
        -1,
        0,
        0,
        1,
        1,
        3,
        3,
        5,
        5,
        7,
        7,
        9,
    ]  # the first pass's draft was wrong: two steps follow from it
    true = truth(on)
    scores = Scorings(on, hit_rate.PAPER, true.closed)
    reading = hit_rate.Reading()
    reading.add(on, true, scores.block_scores("lookup draft"), selections(scores.own_scores(), {4: 4}))
    assert (reading.right[4][0][1], reading.wrong[4][0][1]) == (10, 2) and reading.passes == 7


def test_kept_mass_is_read_between_measured_bytes():
    capped = [{"fetched": 1.0, "kept": 0.90}, {"fetched": 3.0, "kept": 0.98}]
    assert report.kept_at(capped, 2.0) == pytest.approx(0.94)
    assert report.kept_at(capped, 0.5) == 0.90 and report.kept_at(capped, 9.0) == 0.98
