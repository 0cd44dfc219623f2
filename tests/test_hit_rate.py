"""`eval/hit_rate.py`: the head's drafts over a text, and agreement by layer and KV head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from heads import TAPS, TENSORS, ids, plain_config, states, straight, target, write

from oasis_hf.drafters import Eagle3Drafter


@pytest.fixture
def hit_rate(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "eval"))
    for name in ("hit_rate", "recording", "cells", "agreement", "texts"):
        sys.modules.pop(name, None)
    import hit_rate

    return hit_rate


@pytest.fixture
def drafter(tmp_path):
    return Eagle3Drafter.from_pretrained(write(tmp_path / "head", plain_config(), TENSORS), target())


def test_drafts_are_those_of_the_head_over_the_true_text(hit_rate, drafter):
    tokens, prompt = ids(1, 60)[0], 50
    got = hit_rate.head_drafts(target(), drafter, tokens, prompt)
    for at, draft in zip(range(prompt, 60), got.tolist(), strict=True):
        text = tokens[:at].tolist()
        assert [draft] == straight().drafts(text, states(target(), text[:-1], TAPS), 1, ())[0]


def test_readings(hit_rate, drafter):
    model = target()
    tokens = hit_rate.continued(model, ids(1, 200)[0], 12)
    assert tokens.shape == (212,)
    rows = hit_rate.measure(model, drafter, "text", tokens, 200, [4, 20])
    assert {(row["predictor"], row["k"]) for row in rows} == {(p, k) for p in hit_rate.PREDICTORS for k in (4, 20)}
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    for row in rows:
        agreement = torch.tensor(row["agreement"])
        assert agreement.shape == (layers, heads) and bool(((agreement >= 0) & (agreement <= 1)).all())
        if row["predictor"] == "oracle" or row["k"] == 20:  # 13 blocks are all chosen
            assert bool((agreement == 1).all())
    by = {(row["predictor"], row["k"]): row for row in rows}
    assert torch.tensor(by["previous", 4]["agreement"]).mean() < 1
    right = (hit_rate.head_drafts(model, drafter, tokens, 200) == tokens[200:]).double().mean()
    assert by["draft", 4]["right"] == pytest.approx(float(right))
    (one,) = [row for row in hit_rate.table(rows) if (row["predictor"], row["k"]) == ("previous", 4)]
    grid = torch.tensor(by["previous", 4]["agreement"])
    assert one["agreement"] == pytest.approx(float(grid.mean())) and one["worst_head"] == pytest.approx(
        float(grid.min())
    )
    assert one["worst_layer"] == pytest.approx(float(grid.mean(1).min()))
