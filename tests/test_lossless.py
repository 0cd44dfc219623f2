"""`eval/lossless.py`: the prompts it takes and what it says of a text that parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny

import oasis_hf


@pytest.fixture
def lossless(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "eval"))
    sys.modules.pop("lossless", None)
    import lossless

    return lossless


def test_a_prompt_is_compared_token_by_token(lossless, monkeypatch):
    model, ids = tiny("llama"), prompt(1, 90)
    row = lossless.compare(model, ids, 20, 32, 4)
    assert row["equal"] and row["tokens"] == 20 and 1 <= row["tokens_a_pass"] <= 5 and "gap" not in row
    generate = oasis_hf.generate

    def worse(*args, **kwargs):
        out = generate(*args, **kwargs)
        out.sequences[0, 90 + 7] += 1
        return out

    monkeypatch.setattr(oasis_hf, "generate", worse)
    row = lossless.compare(model, ids, 20, 32, 4)
    with torch.no_grad():
        dense = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
        top = model(dense[:, :97]).logits[0, -1].topk(2).values
    assert not row["equal"] and row["parts_at"] == 7 and row["gap"] == pytest.approx(float(top[0] - top[1]), abs=1e-4)
