"""`eval/adapter.py`: what is learned, going on, time limits, and files that peft and transformers read."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import byte_tokenizer
import pytest
import torch

pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import adapted  # noqa: E402
import adapter  # noqa: E402
import adapter_train  # noqa: E402
import prompts  # noqa: E402
from adapter_train import Plan, Trainer, length_at  # noqa: E402

PLAN = Plan(None, 4, tokens=1536, at_once=768, longest=768, rank=4, alpha=8, check=2, held_out=3,
            tasks=("pairs", "needle_keys"))  # fmt: skip


def trainer(plan=PLAN, workers=0):
    model = byte_tokenizer.model().requires_grad_(False)
    return Trainer(adapted.wrapped(model, plan.rank, plan.alpha, plan.seed), byte_tokenizer.tokenizer(), plan, workers)


def changed(one):
    """With weights that do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in one.weights:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return one


def test_only_answers_are_learned_and_the_loss_is_the_model_s():
    one = changed(trainer())
    batch = adapter_train.make(prompts.Chat(byte_tokenizer.tokenizer()), 3, 768, 1536, PLAN.tasks)
    assert batch.ids.shape == (2, 768) and 0 < int(batch.learned.sum()) < 600
    losses, same = one._losses(batch)
    labels = batch.ids.long().masked_fill(~batch.learned, -100)
    true = one.inner(input_ids=batch.ids.long(), labels=labels).loss
    assert losses.mean().item() == pytest.approx(true.item(), rel=1e-5)
    assert len(losses) == int(batch.learned.sum()) == len(same)


def test_exact_is_what_greedy_decoding_gives():
    one = changed(trainer())
    batch = one.held[0]
    row, first, last, task = batch.answers[0]
    front = batch.ids[row : row + 1, :first].long()
    said = one.inner.generate(front, max_new_tokens=last - first + 1, do_sample=False)[:, first:]
    assert one.exact()[task] < 1  # a random model
    batch.ids[row, first : first + said.shape[1]] = said[0].int()
    batch.learned[row, first + said.shape[1] :] = False
    batch.answers[:] = [(row, first, first + said.shape[1] - 1, "said")]
    one.held = [batch]
    assert one.exact() == {"said": 1.0}


def test_the_loss_falls():
    one = trainer(replace(PLAN, steps=30, check=10, rate=2e-2))
    one._ask = lambda: one.ahead.ask(0, 768, 768, ("pairs",))  # the same rows again and again
    lines = []
    one.train(lines.append)
    assert [line["step"] for line in lines] == [10, 20, 30] and one.seen == 30 * 1536
    assert lines[-1]["last_loss"] < 0.75 * lines[0]["loss"]
    assert lines[-1]["rate"] == pytest.approx(one.plan.final * one.plan.rate)
    assert all(0 <= share <= 1 for share in lines[-1]["exact"].values())


def test_going_on_is_the_same_as_not_stopping(tmp_path):
    whole = trainer()
    whole.train(lambda line: None)
    first = trainer()
    first.train(lambda line: first.save(tmp_path) if line["step"] == 2 else None)
    second = trainer()
    second.load(tmp_path)
    assert second.step == 2 and not torch.equal(second.weights[1], whole.weights[1])
    second.train(lambda line: None)
    assert second.step == 4 and second.seen == whole.seen and second.learned == whole.learned
    for a, b in zip(second.weights, whole.weights, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(SystemExit, match="has no file state.pt"):
        second.load(tmp_path / "none")
    with pytest.raises(SystemExit, match="another rank, model or seed"):
        trainer(replace(PLAN, rank=8)).load(tmp_path)


def test_training_stops_in_time():
    one = trainer(replace(PLAN, steps=None, seconds=0.4, check=1000))
    begun = time.monotonic()
    one.train(lambda line: None)
    assert one.step >= 1 and one.done() >= 1 and time.monotonic() - begun < 60 and len(one.history) == 1
    other = trainer(replace(PLAN, steps=1000))
    other.train(lambda line: None, stop=time.time() + 0.3)
    assert 1 <= other.step < 1000 and len(other.history) == 1 + (other.step - 1) // 2


def test_workers_make_the_same_rows():
    def ask(run):  # lengths are drawn when a batch is asked for, which is earlier with workers
        run.ahead.ask(run.made * 1000, 768, 768, PLAN.tasks)
        run.made += 1

    plan = replace(PLAN, steps=2)
    one, other = trainer(plan), trainer(plan, workers=1)
    one._ask, other._ask = lambda: ask(one), lambda: ask(other)
    try:
        other.prime()
        for run in (one, other):
            run.train(lambda line: None)
    finally:
        other.close()
    assert one.seen == other.seen and one.learned == other.learned > 0
    for a, b in zip(one.weights, other.weights, strict=True):
        assert torch.equal(a, b)


def test_schedules():
    import random

    one = trainer(replace(PLAN, steps=None, seconds=100.0))
    rates = [one.rate(done / 100) for done in range(101)]
    assert max(rates) <= PLAN.rate and rates[0] < rates[2] < rates[4] and rates[50] > rates[99]
    assert rates[-1] == pytest.approx(PLAN.final * PLAN.rate)
    rng = random.Random(0)
    drawn = [{length_at(done, 8192, rng) for _ in range(300)} for done in (0.0, 0.2, 0.9)]
    assert drawn == [{1024}, {2048, 4096}, {1024, 2048, 4096, 8192}]
    assert {length_at(0.0, 512, rng)} == {256}


def test_files_are_those_of_peft_and_a_merged_model_says_the_same(tmp_path):
    import peft

    one = changed(trainer())
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        wanted = one.inner(ids).logits
        size = adapted.save(one.model, tmp_path)
        assert size < 2 * sum(p.numel() for p in one.weights) + 10_000
        plain = byte_tokenizer.model()(ids).logits
        assert (plain - wanted).abs().max() > 0.05
        unmerged = peft.PeftModel.from_pretrained(byte_tokenizer.model(), str(tmp_path))(ids).logits
        own = byte_tokenizer.model()
        own.load_adapter(str(tmp_path))
        merged = adapted.merged(byte_tokenizer.model(), tmp_path)
        assert not any("lora" in name for name, _ in merged.named_parameters())
        for logits in (own(ids).logits, merged(ids).logits):
            assert torch.allclose(logits, unmerged, atol=2e-4)
        # Saved in bfloat16.
        assert (unmerged - wanted).abs().max() < 0.05 * (plain - wanted).abs().max()
        assert torch.equal(one.model.unload()(ids).logits, plain)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == adapted.BASE and told["target_modules"] == adapted.LINEAR
    assert adapted.merged(byte_tokenizer.model(), tmp_path, torch.bfloat16).dtype == torch.bfloat16
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(SystemExit, match="has no file adapter_config.json"):
        adapted.check(tmp_path)


def test_the_command_leaves_an_adapter_with_its_card(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter.recording, "load", lambda device, dtype, folder: byte_tokenizer.model())
    monkeypatch.setattr(adapter.recording, "load_tokenizer", lambda folder: byte_tokenizer.tokenizer())
    monkeypatch.setattr(adapter, "TASKS", ["pairs", "sections"])
    out = tmp_path / "made"
    call = ["adapter.py", "--longest", "1024", "--tokens", "1024", "--steps", "2", "--rank", "2", "--samples", "2",
            "--lengths", "1500", "--workers", "0", "--out", str(out), "--keep-state"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", call)
    adapter.main()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == 2 and len(metrics["evaluation"]) == len(adapter.TASKS)
    assert {row["length"] for row in metrics["evaluation"]} == {1500}
    told = (out / "README.md").read_text()
    assert "2 steps of 1,024 tokens" in told and "| 1,500 | sections | 2 |" in told
    assert str(tmp_path) not in (out / "adapter_config.json").read_text() + told + json.dumps(metrics)
    monkeypatch.setattr(sys, "argv", [*call, "--resume", str(out), "--steps", "3", "--evaluate-only"])
    adapter.main()
    assert json.loads((out / "metrics.json").read_text())["steps"] == 2
    monkeypatch.setattr(sys, "argv", ["adapter.py", "--rank", "0"])
    with pytest.raises(SystemExit) as error:
        adapter.main()
    assert error.value.code == 2
