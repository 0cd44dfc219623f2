"""`eval/fidelity.py`: rows whose numbers are those of the logits, and a run that goes on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import byte_tokenizer
import pytest
import torch
from tiny import prompt, tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import branches  # noqa: E402
import fidelity  # noqa: E402
import texts  # noqa: E402
from result_accuracy import DENSE, Setting  # noqa: E402


def test_rows(monkeypatch):
    model, tokens = tiny("llama"), prompt(2, 220)
    read = branches.prefilled(model, tokens[:, :200].tolist())
    dense = branches.forced(model, read.dense(model.config), read, tokens[:, 200:])
    with torch.no_grad():
        logits = model(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits[:, 200:-1].transpose(1, 2), tokens[:, 201:])
    assert fidelity.perplexity(dense, tokens, 200) == pytest.approx(math.exp(losses), rel=1e-4)
    rows = {
        setting.key: fidelity.measure(model, read, tokens, ["a", "b"], dense, setting, setting.budget, "previous")
        for setting in (DENSE, Setting("oasis", 1024), Setting("quest", 48), Setting("quest", 48, "paper"),
                        Setting("window", 48))
    }  # fmt: skip
    for key in ("dense", "oasis 1024 ours tokens"):
        assert rows[key]["agreement"] == 1 and rows[key]["kl"] < 1e-5
        assert rows[key]["perplexity"] == pytest.approx(rows[key]["perplexity_dense"], rel=1e-4)
    kls = [rows[key]["kl"] for key in ("quest 48 ours tokens", "quest 48 paper tokens", "window 48 ours tokens")]
    assert all(kl > 0.01 for kl in kls) and len(set(kls)) == 3
    for row in rows.values():  # exp of the mean loss, however it is told
        increase = math.log(row["perplexity"] / row["perplexity_dense"])
        assert increase == pytest.approx(row["loss_increase"], abs=1e-4)
    assert rows["window 48 ours tokens"]["fetched_a_step"] == 0 < rows["quest 48 ours tokens"]["on_demand_a_step"]


def test_a_run_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fidelity.recording, "load", lambda device, dtype, folder: byte_tokenizer.model())
    monkeypatch.setattr(fidelity.recording, "load_tokenizer", lambda folder: byte_tokenizer.tokenizer())
    monkeypatch.setattr(texts, "SOURCES", {name: texts.SOURCES[name] for name in ("code", "table")})
    out = tmp_path / "fidelity.json"
    call = ["fidelity.py", "--texts", "code", "table", "--prompt", "900", "--steps", "6", "--budgets", "64",
            "--head", "prompt_lookup", "--dtype", "float32", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*call, "--modes", "window"])
    fidelity.main()
    first = json.loads(out.read_text())
    assert [row["mode"] for row in first["rows"]] == ["dense", *["oasis"] * 5, "window", "window"]
    assert first["rows"][7]["own_budget"] > 64 and [one["name"] for one in first["texts"]] == ["code", "table"]
    monkeypatch.setattr(sys, "argv", [*call, "--resume"])
    measured = []
    measure = fidelity.measure
    monkeypatch.setattr(fidelity, "measure", lambda *args, **kw: measured.append(args[5].key) or measure(*args, **kw))
    fidelity.main()
    then = json.loads(out.read_text())
    assert then["rows"][:8] == first["rows"] and len(measured) == len(then["rows"]) - 8 == 6
    assert "window (equal bytes)" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "nothing" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*call, "--resume", "--steps", "7"])
    with pytest.raises(SystemExit, match="was made with"):
        fidelity.main()
    monkeypatch.setattr(sys, "argv", [*call, "--steps", "0"])
    with pytest.raises(SystemExit) as error:
        fidelity.main()
    assert error.value.code == 2
