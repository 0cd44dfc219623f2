"""`eval/lossless.py`: the prompts it takes and what it says of a text that is not dense's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny

import oasis_hf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import lossless  # noqa: E402
import texts  # noqa: E402


def test_prompts_are_compared_token_by_token(monkeypatch):
    model, ids = tiny("llama"), prompt(2, 90)
    one, two = lossless.compare(model, ids, ["one", "two"], 20, 32, 4)
    assert one["equal"] and two["equal"] and not one["differs"] and lossless.met(one, "float32")
    assert one["tokens"] == 20 and 1 <= one["tokens_a_pass"] <= 5 and one["rows"] == 2
    dense = model.generate(ids, max_new_tokens=20, do_sample=False)
    generate = oasis_hf.generate

    def worse(*args, **kwargs):
        out = generate(*args, **kwargs)
        assert torch.equal(out, dense)
        out[1, 90 + 7] = out[1, 90 + 7] % 90 + 3
        return out

    monkeypatch.setattr(oasis_hf, "generate", worse)
    one, two = lossless.compare(model, ids, ["one", "two"], 20, 32, 4)
    with torch.no_grad():
        top = model(dense[1:, :97]).logits[0, -1].topk(2).values
    place = two["differs"][0]
    assert one["equal"] and not two["equal"] and place["at"] == 7
    assert place["gap"] == pytest.approx(float(top[0] - top[1]), abs=1e-3)
    assert place["exact_gap"] == pytest.approx(place["gap"], abs=1e-3) and place["below"] >= place["gap"] - 1e-6
    assert not lossless.met(two, "float32")


def test_in_bfloat16_dense_may_be_undecided_everywhere_it_differs():
    row = {"equal": False, "differs": [{"gap": 0.0}, {"gap": 0.049}]}
    assert lossless.met(row, "bfloat16") and not lossless.met(row, "float32")
    row["differs"].append({"gap": 0.0625})
    assert not lossless.met(row, "bfloat16")


def test_the_head_s_hook_is_taken_off():
    model = tiny("llama")
    lossless.walk(model, prompt(1, 12), 8)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_windows_are_parts_of_every_text_in_turn(monkeypatch):
    def count(text, return_tensors):  # a token a character
        return type("Ids", (), {"input_ids": torch.tensor([[ord(c) for c in text]])})

    monkeypatch.setattr(texts, "SOURCES", {"a": lambda: iter(["abcdefgh"]), "b": lambda: iter(["uvwxyz"])})
    found = texts.windows(count, 3, 5, 2)
    assert [(name, "".join(map(chr, ids.tolist()))) for name, ids in found] == [
        ("a 0", "abcde"), ("b 0", "uvwxy"), ("a 1", "cdefg"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="give 3 prompts of 5 tokens"):
        texts.windows(count, 4, 5, 2)
