"""eval/speculation.py: acceptance is what was asked for, in both loops, and rates count every row's tokens."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import speculation

from oasis_hf import bench

SHARES = [0.8, 0.5, 0.2]
ARGS = Namespace(compile=False, fetched=2, context=600, tokens=130)


def test_draws_follow_the_shares():
    draws = speculation.Draws(SHARES, 5, 3, torch.device("cpu"))
    drafts, scores = torch.zeros((5, 3), dtype=torch.int64), torch.zeros((5, 4, 9))
    scores[..., 7] = 1
    counts = []
    for _ in range(400):
        chain, count = draws.greedy(drafts, scores)
        counts.append(count)
        for row, n in zip(chain.tolist(), count.tolist()):
            assert row == [0] * (n - 1) + [7] * (5 - n)
    counts = torch.stack(counts)
    for depth, share in enumerate(SHARES):
        assert abs(float((counts > depth + 1).float().mean()) - share) < 0.04


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = bench.random_model("tiny", "cpu", torch.float32)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("loop, rows, drafts", [
    ("oasis_hf.generate", 2, 2), ("model.generate", 1, 2), ("model.generate", 2, 0)
])  # fmt: skip
def test_both_loops_get_the_tokens_a_pass_that_are_forced(model, monkeypatch, loop, rows, drafts):
    monkeypatch.setattr(speculation, "WARM", 8)
    told = speculation.generated(model, speculation.head_for(model), rows, drafts, loop, SHARES, ARGS)
    expected = 1 + sum(SHARES[:drafts])
    assert told["tokens_a_pass"] == pytest.approx(expected, abs=0.25 if drafts else 1e-9)
    assert told["tokens_per_second"] * told["ms_a_pass"] / 1e3 == pytest.approx(rows * told["tokens_a_pass"])
    assert told["loop"] == loop and told["bytes_a_token"] >= 0
