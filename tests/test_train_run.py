"""Whole trainings of a tiny model: the loss falls, runs go on exactly, and what is saved is a head that others load."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from tiny import prompt, tiny

from oasis_hf import cli
from oasis_hf.drafters import Eagle3Drafter
from oasis_hf.train import data, loop, made, run
from oasis_hf.train.config import TrainConfig, TrainError
from oasis_hf.train.features import Target
from oasis_hf.train.generate import Generator

CONFIG = TrainConfig(steps=60, tokens=256, rows=128, steps_ahead=3, draft_vocab=60, lr=3e-3, taps=(1, 2, 3), warmup=0.1)


@pytest.fixture(scope="module")
def samples():
    asked = [prompt(1, 4 + i % 9, seed=i)[0].tolist() for i in range(40)]
    return data.Samples.of(Generator(tiny("llama"), 20, 60, 40).run(asked, [0.0] * 40))


def trainer(samples, config=CONFIG, keep=False):
    model = tiny("llama")
    ids = data.vocabulary([samples], 96, 60, [])
    head = made.new_head(model, made.head_config(model, config, 2048), ids, config.seed)
    target = Target(model, head.config.taps, ids)
    if keep:
        target.keep(samples, config.tokens)
    return loop.Trainer(head, target, samples, config)


def quiet(*args):
    pass


def test_the_loss_falls_and_guesses_come_right(samples):
    one = trainer(samples, dataclasses.replace(CONFIG, rows=256), keep=True)
    one.train(quiet, quiet)
    first, last = one.history[0], one.history[-1]
    assert one.step == 60 and len(one.history) == 3
    assert last["loss"] < 0.8 * first["loss"] and last["right"][0] > first["right"][0] + 0.1
    assert one.history[-1]["lr"] < 0.05 * CONFIG.lr
    assert not any(p.requires_grad and p.grad is not None for p in tiny("llama").parameters())


def test_an_interrupted_run_goes_on_exactly(samples, tmp_path):
    whole, before, after = (trainer(samples) for _ in range(3))
    whole.train(quiet, quiet, most=27)
    before.train(quiet, quiet, most=20)
    before.save(tmp_path)
    assert before.index > 0 or before.epoch > 0
    after.load(loop.read_state(tmp_path))
    after.train(quiet, quiet, most=7)
    for (name, a), b in zip(whole.head.state_dict().items(), after.head.state_dict().values()):
        assert torch.equal(a, b), name
    assert whole.history == after.history
    assert (whole.step, whole.epoch, whole.index) == (after.step, after.epoch, after.index)
    before.save(tmp_path, compact=True)
    nearly = trainer(samples)
    nearly.load(loop.read_state(tmp_path))
    nearly.train(quiet, quiet, most=7)
    torch.testing.assert_close(nearly.head.fc.weight, whole.head.fc.weight, atol=5e-3, rtol=5e-2)


def test_states_made_anew_and_kept_teach_the_same(samples):
    results = []
    for keep in (False, True):
        one = trainer(samples, keep=keep)
        one.train(quiet, quiet, most=3)
        results.append(one.head.fc.weight)
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


def test_the_saved_head_is_of_the_plain_layout_and_drafts(samples, tmp_path):
    one = trainer(samples, dataclasses.replace(CONFIG, steps=2))
    one.train(quiet, quiet)
    made.save(one.head, tmp_path, tiny("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["rope_theta"] == 10000.0 and config["draft_vocab_size"] == 60 and not config["tie_word_embeddings"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("d2t").dtype == torch.int64 and file.get_tensor("fc.weight").dtype == torch.bfloat16
    layer = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj", "hidden_norm", "input_layernorm", "post_attention_layernorm")  # fmt: skip
    outer = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert names == outer | {f"midlayer.{name}.weight" for name in layer}
    drafter = Eagle3Drafter.from_pretrained(tmp_path, tiny("llama"))
    assert drafter.taps == (1, 2, 3)
    assert torch.equal(made.draft_ids(drafter.head), made.draft_ids(one.head))
    torch.testing.assert_close(drafter.head.fc.weight, one.head.fc.weight, atol=1e-2, rtol=1e-2)


class Words:
    """A tokenizer of letters."""

    chat_template = None

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def decode(self, ids):
        raise AssertionError("ids of one letter are not text")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr("oasis_hf.models.load", lambda *args, **kwargs: (tiny("llama"), Words()))
    monkeypatch.setattr("oasis_hf.train.prompts.Encoder.over", lambda self, task, document: [5, 6, *document, 7])
    file = tmp_path / "prompts.jsonl"
    lines = [{"p": f"Say {i} and {i * 7}"} for i in range(60)] + [{"t": "abc def " * (10 + i)} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_the_command_makes_a_head_and_goes_on(files, tmp_path, capsys):
    out, more = tmp_path / "out", tmp_path / "more"
    knobs = "--generate-tokens 1200 --new-tokens 24 --longest 300 --tokens 384 --rows 256 --draft-vocab 60 --taps 1 2 3"
    knobs += " --steps-ahead 2 --evaluate 4"
    call = ["train-drafter", "any", "--data", str(files), *knobs.split()]
    assert cli.main([*call, "--out", str(out), "--steps", "5", "--stop-after", "0.00001"]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["evaluation"] == {} and metrics["steps"] < 5
    assert cli.main(["train-drafter", "any", *knobs.split(), "--resume", str(out), "--steps", "5"]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == 5 and metrics["evaluation"]["short"]["tau"] >= 1
    assert metrics["settings"]["seed"] == 0 and metrics["train_response_tokens"] > 0
    assert metrics["data"] == ["prompts.jsonl"] and "| data | prompts.jsonl |" in (out / "README.md").read_text()
    assert "Held out" in (out / "README.md").read_text()
    (out / loop.STATE).unlink()
    assert cli.main([*call, "--resume", str(out), "--out", str(more), "--steps", "2", "--drop-state"]) == 0
    assert not (more / loop.STATE).exists()
    assert (more / "model.safetensors").stat().st_mode == (more / "README.md").stat().st_mode
    seen = tmp_path / "seen"
    assert cli.main([*call, "--evaluate-only", str(more), "--samples", str(out), "--out", str(seen)]) == 0
    measured = json.loads((seen / "metrics.json").read_text())["evaluation"]
    assert measured == json.loads((more / "metrics.json").read_text())["evaluation"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "3"], "--out FOLDER"),
        (["--out", "{new}"], "--minutes or --steps"),
        (["--out", "{full}", "--data", "{file}", "--steps", "3"], "is not empty"),
        (["--out", "{new}", "--steps", "3"], "Name files of prompts"),
        (["--resume", "{full}", "--steps", "3"], "nothing to resume"),
        (["--out", "{new}", "--data", "missing.jsonl", "--steps", "3"], "Can't read the data file missing.jsonl"),
        (["--out", "{new}", "--steps", "3", "--window", "1"], "--window must be 2 or more"),
        (["--out", "{new}", "--steps", "3", "--tokens", "100"], "--tokens must be"),
        (["--evaluate-only", "{new}", "--data", "{file}"], "no config.json"),
    ],
)
def test_mistakes_are_said_in_a_sentence(files, tmp_path, capsys, arguments, reason):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("x")
    arguments = [a.format(new=tmp_path / "new", full=full, file=files) for a in arguments]
    if reason == "--minutes or --steps":
        arguments += ["--data", str(files)]
    assert cli.main(["train-drafter", "any", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_an_unknown_model(files, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    arguments = [
        "train-drafter",
        "no/such-model-here",
        "--data",
        str(files),
        "--out",
        str(tmp_path / "o"),
        "--steps",
        "3",
    ]
    assert cli.main(arguments) == 2
    assert "Can't load no/such-model-here" in capsys.readouterr().err


def test_a_run_keeps_its_settings(tmp_path):
    state = {"config": CONFIG.to_dict()}
    assert run._changed(state["config"], dataclasses.replace(CONFIG, steps=99)) == []
    assert run._changed(state["config"], dataclasses.replace(CONFIG, lr=1.0, seed=3)) == ["lr", "seed"]
    with pytest.raises(TrainError, match="--lr must be more than 0"):
        TrainConfig(lr=0)
