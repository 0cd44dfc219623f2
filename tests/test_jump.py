"""`eval/jump.py`: the task, the kept mass of a running cache, what is recovered, and a whole run on a small model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import byte_tokenizer
import pytest
import torch
from tiny import prompt, tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import jump  # noqa: E402
import jumps  # noqa: E402
from kept import Kept  # noqa: E402

from oasis_hf import OasisCache  # noqa: E402
from oasis_hf.attach import cache_name  # noqa: E402
from oasis_hf.config import BLOCK  # noqa: E402
from oasis_hf.layers import OasisLayer  # noqa: E402


def test_answers_are_passages_of_the_documents_that_are_asked_about():
    tokenizer = byte_tokenizer.tokenizer()
    one = jumps.jumps(tokenizer, 120, 9, 20, 8, first=3)
    text = tokenizer.decode(one.tokens)
    before, *said = text.split("How does document ")
    documents = before.split("\n\nDocument ")[1:]
    assert [int(piece[0]) - 1 for piece in said] == [jumps.ORDER[(3 + at) % 8] for at in range(10)]
    seen = set()
    for piece in said:
        at, (cue, answer) = int(piece[0]) - 1, piece.split('go on after "')[1].split('"?\n')
        answer = answer if piece is said[-1] else answer.removesuffix("\n\n")
        assert answer.startswith(cue) and answer in documents[at] and len(answer) == jumps.CUE + 20
        assert answer not in seen
        seen.add(answer)
    # The prompt ends in the first answer; from each question's first token to the eighth of its answer it is a jump.
    assert (
        len(one.part) == len(one.tokens) - one.prompt and tokenizer.decode(one.tokens[: one.prompt]).count("How") == 1
    )
    parts, counts = one.part.unique_consecutive(return_counts=True)
    assert parts.tolist() == [0, 1] * 9 + [0] and counts[0] == 10 and set(counts[2::2].tolist()) == {12}
    questions = [len(f'\n\nHow does document {piece.split(chr(34) + "?")[0]}"?\n') + jumps.CUE for piece in said[1:]]
    assert counts[1::2].tolist() == [question + 8 for question in questions]
    with pytest.raises(ValueError, match="A document of 40 tokens has no room for 28 tokens behind its middle"):
        jumps.jumps(tokenizer, 40, 1, 20, 8)


@torch.no_grad()
def test_kept_mass_is_that_of_a_straight_computation(monkeypatch):
    model, text = tiny("llama"), prompt(1, 220)
    queries, keys = [], []
    cache = OasisCache(model, budget=64)
    model(text[:, :200], **{cache_name(model): cache})
    attend = OasisLayer.attend
    with Kept() as kept:
        kept.watch(cache)

        def look(self, query, new_keys, *rest):
            queries.append(query[0, :, 0])
            stored = self.store.read(self.index, 0, 0, cache.get_seq_length())[0]
            keys.append(torch.cat((stored, new_keys[0, :, :1]), 1))
            return attend(self, query, new_keys, *rest)

        monkeypatch.setattr(OasisLayer, "attend", look)
        for at in range(200, 220):
            before = len(kept.rows)
            tables = [layer.working_set.table.clone() for layer in cache.sparse_layers]
            model(text[:, at : at + 1], position_ids=torch.tensor([[at]]), **{cache_name(model): cache})
            if at == 200:
                continue  # its first selection comes in the forward
            for layer, (got, query, own, table) in enumerate(
                zip(kept.rows[before:], queries[-3:], keys[-3:], tables, strict=True)
            ):
                for head in range(2):
                    held = {block for block in table[0, head].tolist() if block >= 0}
                    shares = (query[3 * head : 3 * head + 3] @ own[head].T / 4).softmax(-1).mean(0)
                    wanted = sum(
                        float(share) for place, share in enumerate(shares) if place // BLOCK in held or place == at
                    )
                    assert float(got[head]) == pytest.approx(wanted, abs=1e-5), (at, layer)
    assert kept.by_step(3).shape == (20, 3, 2) and 0.2 < kept.by_step(3).mean() < 0.99
    model(text[:, :1], position_ids=torch.tensor([[220]]), **{cache_name(model): cache})
    assert len(kept.rows) == 60  # it looks no more


def test_what_is_recovered():
    def row(setting, kl, kept, steps=10, part="jump"):
        return {"setting": setting, "part": part, "steps": steps, "kl": kl, "kept": kept, "fired_steps": 0.0}

    result = {"rows": [row("off", 0.5, 0.8), row("off", 0.2, 0.8, 20), row("on_demand", 0.1, 0.9, 30),
                       row("auto", 0.15, 0.9, 30)]}  # fmt: skip
    assert jump.mean(result, "off", "jump", "kl") == pytest.approx(0.3)
    assert jump.recovered(result, "auto", "jump", "kl") == pytest.approx(0.75)
    assert jump.recovered(result, "auto", "jump", "kept") == pytest.approx(1)
    result["rows"][2]["kl"] = 0.4
    assert jump.recovered(result, "auto", "jump", "kl") is None


def test_a_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jump.recording, "load", lambda device, dtype, folder: byte_tokenizer.model())
    monkeypatch.setattr(jump.recording, "load_tokenizer", lambda folder: byte_tokenizer.tokenizer())
    call = ["jump.py", "--quick", "--head", "prompt_lookup", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", call)
    jump.main()
    result = json.loads((tmp_path / "jump.json").read_text())
    settings = ["off", "on_demand", "auto 0.2, 8 blocks", "always, 8 blocks"]
    assert jump.names(result) == settings and len(result["rows"]) == 4 * 3
    assert {row["part"] for row in result["rows"]} == set(jump.PARTS)
    rows = {(row["setting"], row["part"]): row for row in result["rows"]}
    for part in jump.PARTS:
        off, on_demand, *_, always = (rows[setting, part] for setting in settings)
        assert off["lane_bytes"] == off["fired_steps"] == off["fired_heads"] == 0 < off["lookahead_bytes"]
        assert on_demand["lookahead_bytes"] == 0 < on_demand["lane_bytes"]
        assert always["fired_steps"] == always["fired_heads"] == 1 and always["lane_bytes"] > 0
    assert all(0 < row["kept"] <= 1 and row["kl"] >= 0 for row in result["rows"])
    assert any(bar["what"].startswith("auto 0.2, 8 blocks: share of plain text's steps") for bar in result["bars"])
    assert "around a jump" in (tmp_path / "jump.md").read_text() and "around a jump" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*call[:1], "--above", "0.1", "0.3", "--below", "0.5", "--blocks", "2", "4"])
    asked = jump.settings(jump.arguments())
    assert len(asked) == 2 + 2 * 4 and asked["cosine 0.5, 2 blocks"].correct_below == 0.5
    assert (asked["auto 0.3, 4 blocks"].correct_above, asked["auto 0.3, 4 blocks"].correct_blocks) == (0.3, 4)
    monkeypatch.setattr(sys, "argv", [*call[:1], "--above", "0.1", "0.3", "--layers", "4", "2"])
    asked = jump.settings(jump.arguments())
    assert len(asked) == 2 + 2 * 2 + 1 and asked["auto 0.1, 8 blocks"].correct_layers is None
    assert asked["auto 0.1, 8 blocks, 2 layers"].correct_layers == (2, 4)
    monkeypatch.setattr(sys, "argv", [*call[:1], "--settling", "50"])
    with pytest.raises(SystemExit) as error:
        jump.main()
    assert error.value.code == 2
    assert "--settling 50 is not allowed: use at most the answer's 40 tokens" in capsys.readouterr().err
