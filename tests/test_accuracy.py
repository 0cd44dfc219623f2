"""`eval/accuracy.py`: shards that go on where they stopped, what is compared with what, intervals and bars."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import byte_tokenizer
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import accuracy  # noqa: E402
import prompts  # noqa: E402
import report_accuracy as report  # noqa: E402
import result_accuracy as results  # noqa: E402
from result_accuracy import DENSE, Setting  # noqa: E402

from oasis_hf.modes import gpu_bytes  # noqa: E402

OTHERS = ("quest", "on_demand", "previous", "window")
CALL = ["--models", "plain", "--tasks", "code", "needle_keys", "--lengths", "1400", "--budgets", "64", "--samples", "4",
        "--others", "2", "--rows", "3", "--screen", "0", "1", "--band", "0", "1", "--head", "prompt_lookup",
        "--dtype", "float32", "--workers", "0"]  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A random model, whose answers are worth something nevertheless."""
    monkeypatch.setattr(accuracy.recording, "load", lambda device, dtype, folder: byte_tokenizer.model())
    monkeypatch.setattr(accuracy.recording, "load_tokenizer", lambda folder: byte_tokenizer.tokenizer())
    monkeypatch.setattr(prompts, "score", lambda question, said: sum(said.encode()) % 97 / 96)


def call(monkeypatch, out, *more):
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *CALL, "--out", str(out), *more])
    accuracy.main()


def shards(folder):
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_a_run_and_its_pages(small, monkeypatch, tmp_path):
    out = tmp_path / "accuracy.json"
    call(monkeypatch, out)
    made = shards(tmp_path / "accuracy")
    assert set(made) == {"plain-1400-needle_keys.json", "plain-1400-code.json"}
    keys = {one.key for one in results.settings([64], OTHERS)}
    for shard in made.values():
        assert (
            shard["done"] and not shard["screened"] and shard["prompt_tokens"] == 1400 and set(shard["scores"]) == keys
        )
        for key, scores in shard["scores"].items():
            assert len(scores) == (4 if accuracy.alike(results.named(key)) else 2)
            assert shard["decoded"][key] >= 1
        budgets = shard["budgets"]
        assert (
            budgets["window 64 ours bytes"] > budgets["window 64 ours tokens"] == 64 == budgets["oasis 64 ours tokens"]
        )
        model = byte_tokenizer.model()
        have, most = (
            gpu_bytes(model, mode, budget, 1400, "prompt_lookup")["total"]
            for mode, budget in (("window", budgets["window 64 ours bytes"]), ("oasis", 64))
        )
        assert have <= most
    result = json.loads(out.read_text())
    assert {row["mode"] for row in result["summaries"]} == {"dense", "oasis", *OTHERS}
    assert len(result["cells"]) == 2 * len(keys)
    page = out.with_suffix(".md").read_text()
    assert "| plain | 1,400 | code | 4 |" in page and "window (equal bytes)" in page
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert str(tmp_path) not in json.dumps(result) + page


def test_a_budget_of_everything_scores_like_dense(small, monkeypatch, tmp_path):
    call(monkeypatch, tmp_path / "a.json", "--budgets", "1600", "--modes", "quest", "--tasks", "code")
    (shard,) = shards(tmp_path / "a").values()
    for key, scores in shard["scores"].items():
        assert scores == shard["scores"]["dense"][: len(scores)], key
    assert len(set(shard["scores"]["dense"])) > 1


def test_going_on_gives_what_one_run_gives(small, monkeypatch, tmp_path):
    few = ("--modes", "window", "--tasks", "code")
    call(monkeypatch, tmp_path / "whole.json", *few)
    (whole,) = shards(tmp_path / "whole").values()
    answers, count = accuracy.Bench.answers, []

    def slow(self, *args):
        count.append(args[0].key)
        if len(count) in (2, 4):  # time is up behind this one
            monkeypatch.setattr(accuracy.time, "time", lambda: 1e12)
        return answers(self, *args)

    monkeypatch.setattr(accuracy.Bench, "answers", slow)
    now = time.time
    states = []
    for more in ((), ("--resume",), ("--resume",), ("--resume",)):
        monkeypatch.setattr(accuracy.time, "time", now)
        call(monkeypatch, tmp_path / "parts.json", *few, "--seconds", "1000", *more)
        (shard,) = shards(tmp_path / "parts").values()
        states.append((shard["done"], len(count)))
    assert [done for done, _ in states] == [False, False, True, True] and [n for _, n in states[:2]] == [2, 4]
    assert states[2][1] == states[3][1] == len(count)  # nothing was done twice, and the last call did nothing
    assert shard["scores"] == whole["scores"] and shard["decoded"] == pytest.approx(whole["decoded"])
    with pytest.raises(SystemExit, match="was made with"):
        call(monkeypatch, tmp_path / "parts.json", *few, "--resume", "--samples", "3")


def test_it_goes_on_with_batches_of_another_size(small, monkeypatch, tmp_path):
    few = ("--modes", "window", "--tasks", "code", "--scores", "ours", "few")
    call(monkeypatch, tmp_path / "whole.json", *few)
    call(monkeypatch, tmp_path / "parts.json", *few, "--rows", "1")
    (whole,), (file,) = shards(tmp_path / "whole").values(), (tmp_path / "parts").glob("*.json")
    part = json.loads(file.read_text())
    for count, key in enumerate(list(part["scores"])):
        part["scores"][key] = part["scores"][key][: 1 + count % 2]
    del part["scores"]["window 64 ours tokens"]
    file.write_text(json.dumps(part))
    call(monkeypatch, tmp_path / "parts.json", *few, "--rows", "3", "--resume")
    (part,) = shards(tmp_path / "parts").values()
    assert part["scores"] == whole["scores"] and part["done"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_rows_that_have_no_memory_go_in_halves(error, small, monkeypatch, tmp_path):
    few = ("--modes", "window", "--tasks", "code", "--scores", "ours")
    call(monkeypatch, tmp_path / "whole.json", *few)
    inner, sizes = accuracy.Bench._answers, []

    def full(self, setting, read, *args):
        sizes.append(len(read.rest))
        if len(read.rest) > 1:
            raise error("full")
        return inner(self, setting, read, *args)

    monkeypatch.setattr(accuracy.Bench, "_answers", full)
    call(monkeypatch, tmp_path / "halves.json", *few)
    assert sizes[:5] == [3, 1, 2, 1, 1]
    (one,), (other,) = (shards(tmp_path / name).values() for name in ("whole", "halves"))
    assert one["scores"] == other["scores"]


def test_scores_can_be_chosen_and_added(small, monkeypatch, tmp_path):
    few = ("--modes", "window", "--tasks", "code", "--samples", "1", "--others", "1")
    for scores in (["ours"], ["ours", "wide"]):
        call(monkeypatch, tmp_path / "a.json", *few, "--resume", "--scores", *scores)
        (shard,) = shards(tmp_path / "a").values()
        ours = [results.named(key).score for key in shard["scores"] if key.startswith("oasis")]
        assert shard["done"] and ours == scores
    assert Setting("oasis", 528, "wide_few").label == "oasis (fetch ratio 0.2, corrected in a few layers)"
    assert results.knobs("wide_few", 3) == {**results.CORRECTED, "fetch_ratio": 0.2, "correct_layers": (2,)}


def test_where_dense_tells_nothing_nothing_more_runs(small, monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "score", lambda question, said: 0.0)
    call(monkeypatch, tmp_path / "a.json", "--screen", "0.1", "0.9", "--tasks", "code", "--band", "0.6", "0.95")
    (shard,) = shards(tmp_path / "a").values()
    assert shard["screened"] and shard["done"] and shard["scores"] == {"dense": [0.0] * 3}
    result = json.loads((tmp_path / "a.json").read_text())
    assert not result["summaries"] and not result["cells"][0]["in_band"]


def test_parts_share_the_shards(small, monkeypatch, tmp_path):
    few = ("--modes", "window", "--samples", "1", "--others", "1")
    call(monkeypatch, tmp_path / "a.json", *few, "--part", "1/2")
    assert set(shards(tmp_path / "a")) == {"plain-1400-needle_keys.json"} and not (tmp_path / "a.json").exists()
    call(monkeypatch, tmp_path / "a.json", *few, "--part", "0/2")
    call(monkeypatch, tmp_path / "a.json", "--render")
    assert len(json.loads((tmp_path / "a.json").read_text())["shards"]) == 2


def test_wrong_calls(monkeypatch, tmp_path, capsys):
    for more, told in (
        (("--samples", "0"), "--samples 0 is not allowed"),
        (("--part", "2/2"), "'2/2' is not allowed"),
        (("--tasks", "chess"), "chess"),
    ):
        with pytest.raises(SystemExit) as error:
            call(monkeypatch, tmp_path / "a.json", *more)
        assert error.value.code == 2 and told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="There are no shards in a"):
        call(monkeypatch, tmp_path / "a.json", "--render")
    with pytest.raises(SystemExit, match="has no file adapter_model"):
        call(monkeypatch, tmp_path / "a.json", "--models", "adapter", "--adapter", str(tmp_path))


# -- numbers ----------------------------------------------------------------------------------------------------------


def shard(task, scores, length=4096):
    return {"model": "adapter", "length": length, "task": task, "scores": scores, "budgets": {}, "decoded": {}}


def test_keys_and_labels():
    every = results.settings([528, 1040], ["quest", "on_demand", "previous", "window"])
    assert every[0] == DENSE and len({one.key for one in every}) == len(every) == 1 + 2 * 13
    assert all(results.named(one.key) == one for one in every)
    assert Setting("window", 528, equal="bytes").label == "window (equal bytes)"
    assert Setting("oasis", 528, "corrected").label == "oasis (corrected)"
    assert Setting("oasis", 528, "few").label == "oasis (corrected in a few layers)"


def test_intervals_are_paired_and_hold_the_mean():
    rng = np.random.default_rng(1)
    dense = rng.random(200)
    less = rng.normal(-0.02, 0.1, 200)
    low, high = results.bootstrap([less])
    assert low < less.mean() < high and high - low == pytest.approx(2 * 1.96 * 0.1 / np.sqrt(200), rel=0.2)
    assert results.bootstrap([less]) == [low, high]
    both = shard("a", {"dense": [*dense, 0.0], "oasis 528 ours tokens": list(dense)})
    found = results.over_tasks([both], Setting("oasis", 528))
    assert found["difference"] == 0 and found["interval"] == [0, 0] and found["samples"] == 200
    two = results.bootstrap([less, np.zeros(50)])
    assert two[1] - two[0] == pytest.approx((high - low) / 2, rel=0.1)


def test_bars():
    def scores(oasis, quest, window):
        dense = [1.0] * 80 + [0.0] * 20
        return {
            "dense": dense, "oasis 2064 ours tokens": dense[:-1] + [oasis],
            "quest 2064 ours tokens": dense[:-1] + [quest],
            "window 2064 ours bytes": [*dense[:-20], *[window] * 20],
        }  # fmt: skip

    good = [shard(str(i), scores(0, 0, 0.5), length) for i in range(5) for length in (4096, 7000)]
    told = results.bars(good, "adapter")
    assert len(told) == 5 and all(bar["met"] for bar in told)
    nearer = [bar["measured"] for bar in told if "nearer" in bar["what"]]
    assert nearer == [pytest.approx(10)]
    # One task out of the band, and oasis a point above quest's loss.
    easy = [*good[:-1], shard("easy", {"dense": [1.0] * 10}, 7000)]
    assert [bar["met"] for bar in results.bars(easy, "adapter")][:2] == [True, False]
    low = [1.0] * 78 + [0.0] * 22
    worse = [shard(str(i), {**scores(0, 0, 0.5), "oasis 2064 ours tokens": low}) for i in range(5)]
    missed = [bar["what"] for bar in results.bars(worse, "adapter") if not bar["met"]]
    assert missed == ["oasis at 2064 less dense", "oasis at 2064 less quest, the same score"]
    worst = results.over_tasks([*good, shard("bad", {**scores(0, 0, 0), "oasis 2064 ours tokens": [0.0] * 100})],
                               Setting("oasis", 2064))  # fmt: skip
    assert worst["worst"] == pytest.approx(-0.8) and worst["worst_task"] == "bad at 4,096"


def test_nothing_is_drawn_where_nothing_is_in_the_band(tmp_path):
    assert not report.plot({"summaries": []}, tmp_path / "a.png") and not (tmp_path / "a.png").exists()
