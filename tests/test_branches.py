"""`eval/branches.py`: what comes out of a branch is what the whole prompt gives, whatever its neighbours' lengths."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from heads import TENSORS, plain_config, target, write
from tiny import prompt, tiny

from oasis_hf import OasisCache
from oasis_hf.attach import cache_name
from oasis_hf.drafters import Eagle3Drafter, make_drafter
from oasis_hf.modes import MODES, mode_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import branches  # noqa: E402
import runs  # noqa: E402

ROWS = [prompt(1, n, seed)[0].tolist() for seed, n in enumerate((90, 120, 90, 150))]
NEW = 12


def generated(model, ids, **kwargs):
    return model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, **kwargs)[0, len(ids) :].tolist()


def test_dense_answers_are_generate_s():
    model = tiny("llama")
    read = branches.prefilled(model, ROWS, at_once=150)
    said = branches.answers(model, read.dense(model.config), read, NEW, -1)
    assert said == [generated(model, ids) for ids in ROWS]
    assert branches.answers(model, read.dense(model.config), read, NEW, -1) == said  # what was read is still the same
    end = said[0][4]
    stopped = branches.answers(model, read.dense(model.config), read, NEW, end)
    assert stopped == [row[: row.index(end)] if end in row else row for row in said]


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_is_a_cache_that_has_read_the_prompt_itself(mode):
    model = tiny("llama")
    same = [ROWS[0], ROWS[2]]
    drafter = make_drafter("prompt_lookup", model, mode_config(mode, 64))
    read = branches.prefilled(model, same, drafter=drafter)
    config = mode_config(mode, 64)
    said = branches.answers(model, branches.branch(model, read, config, drafter), read, NEW, -1)
    for ids, row in zip(same, said):
        cache = OasisCache(model, config, "prompt_lookup")
        assert row == generated(model, ids, **{cache_name(model): cache})
    whole = branches.branch(model, read, mode_config(mode, 1024), drafter)
    assert branches.answers(model, whole, read, NEW, -1) == [generated(model, ids) for ids in same]


def test_a_head_sees_the_prompt_that_was_read_before(tmp_path):
    model = target()
    drafter = Eagle3Drafter.from_pretrained(write(tmp_path / "head", plain_config(), TENSORS), model)
    rows = [prompt(1, n, n)[0].tolist() for n in (120, 150)]
    config = mode_config("oasis", 48, fetch_ratio=0.3)
    read = branches.prefilled(model, rows, drafter=drafter)
    assert set(read.hidden) == set(drafter.taps) and read.valid is not None
    cache = branches.branch(model, read, config, drafter)
    said = branches.answers(model, cache, read, NEW, -1)
    for ids, row in zip(rows, said):
        own = OasisCache(model, config, drafter=drafter)
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                             **{cache_name(model): own})  # fmt: skip
        assert row == out[0, len(ids) :].tolist()


def test_forced_steps_are_those_of_a_dense_cache():
    model, tokens = tiny("qwen3"), prompt(2, 100)
    read = branches.prefilled(model, tokens[:, :90].tolist())
    logits = branches.forced(model, read.dense(model.config), read, tokens[:, 90:])
    assert torch.allclose(logits, runs.dense_logits(model, tokens, 90), atol=1e-4)


def test_a_prompt_must_be_longer_than_what_branches_read():
    with pytest.raises(ValueError, match="has 8 tokens, and 9 are the least"):
        branches.prefilled(tiny("llama"), [ROWS[0], ROWS[1][:8]])
