"""`eval/own_text.py`: the cache's own text with speculation off and on, and the recordings beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import own_text  # noqa: E402
import texts  # noqa: E402
from cells import PAPER, Score  # noqa: E402
from chains import endless  # noqa: E402
from runs import Job, drafter_for  # noqa: E402

SCORE = Score("midrange", 0.6, "softmax-mean", "int8", 8)
STEPS = 60


@pytest.fixture(scope="module")
def documents() -> torch.Tensor:
    return prompt(2, 20, seed=4).repeat(1, 8)[:, :150]


def test_within_the_budget_the_text_and_the_logits_are_dense_s(documents):
    model = tiny("llama")
    dense = model.generate(documents, max_new_tokens=STEPS, do_sample=False)
    for speculation in ("own", "on"):
        job = Job(SCORE, "lookup draft", 2064, "float32", speculation)
        config = SCORE.config(job.lookahead, budget=2064, speculate=speculation == "on")
        tokens, logits, traffic = own_text.said(model, documents, job, STEPS, config, None)
        assert torch.equal(tokens, dense) and logits.shape[:2] == (2, STEPS)
        assert torch.equal(logits[:, :-1].argmax(-1), dense[:, 151:])
        assert (traffic["tokens_a_forward"] == 1) == (speculation == "own")
        row = own_text.run(model, ["one", "two"], documents, job, STEPS, 0.05)
        assert row["agreement"] == 1 and row["kl"] < 1e-6 and row["speculation"] == speculation
        assert row["tokens_a_forward"] == traffic["tokens_a_forward"] and "loss_increase" not in row


def test_a_small_working_set_is_told_by_kl_and_bytes(documents):
    job = Job(PAPER, "lookup draft", 48, "float32", "on")
    row = own_text.run(tiny("llama"), ["one", "two"], documents, job, STEPS, 0.5)
    assert row["kl"] > 1e-4 and row["bytes_per_step"] > 0 and 0 < row["hit_rate"] < 1
    assert set(row["agree_bits"]) == {"one", "two"}


def test_recordings_are_of_the_model_s_greedy_text(documents):
    model = tiny("llama")
    both = own_text.recordings(model, ["one", "two"], documents, STEPS)
    dense = model.generate(documents, max_new_tokens=STEPS, do_sample=False)
    told = own_text.describe_texts(**both)
    config = SCORE.config("lookup draft", budget=2064, speculate=True)
    for row, (off, on) in enumerate(zip(both["off"], both["on"])):
        assert torch.equal(off.tokens, dense[row]) and off.passes.count == STEPS and on.verified == own_text.VERIFIED
        # The cache's own loop takes as many passes, but for what the last one gets beyond the recording's end.
        traffic = own_text.said(model, documents[row : row + 1], Job(SCORE, "lookup draft", 2064), STEPS, config, None)[
            2
        ]
        assert abs(STEPS / traffic["tokens_a_forward"] - on.passes.count) <= 1
        assert told[row]["tokens_a_pass"] == STEPS / on.passes.count
    assert any(one["tokens_a_pass"] > 1 for one in told)


def test_the_settings_are_all_lookaheads_of_the_named_scores_and_what_is_ranked():
    ranked = [{**SCORE.replace(half_range=0.5).__dict__, "lookahead": "previous", "missed": 0.1}]
    found = own_text.settings_of(ranked, (SCORE, "lookup draft"), (PAPER,), ("previous", "true draft"))
    every = {"previous", "true draft"}
    assert found == {SCORE: every, PAPER: every, SCORE.replace(half_range=0.5): {"previous"}}


def test_true_drafts_need_a_text_that_is_known():
    with pytest.raises(ValueError, match="'true draft' needs the text"):
        drafter_for("true draft", tiny("llama"), None, None)


def test_end_ids_come_back():
    model = tiny("llama")
    config = model.generation_config
    before = config.eos_token_id, config.pad_token_id
    config.eos_token_id = 2
    try:
        with pytest.raises(RuntimeError), endless(model):
            assert config.eos_token_id is None
            raise RuntimeError
        assert config.eos_token_id == 2
    finally:
        config.eos_token_id, config.pad_token_id = before


def test_a_text_that_is_asked_about_is_one_turn_of_exactly_so_many_tokens(monkeypatch):
    class Tokenizer:  # a token a character
        def __call__(self, text, return_tensors):
            return type("Ids", (), {"input_ids": torch.tensor([[ord(c) for c in text]])})

        def apply_chat_template(self, turn, add_generation_prompt, tokenize):
            assert add_generation_prompt and not tokenize
            return f"<{turn[0]['content']}>"

    monkeypatch.setattr(texts, "SOURCES", {"a": lambda: iter(["abcdefgh" * 20])})
    ids = texts.asked(Tokenizer(), "a", 60)
    told = "".join(map(chr, ids.tolist()))
    assert len(told) == 60 and told.startswith("<abcdefgh") and told.endswith("Summarize the text above.>")
