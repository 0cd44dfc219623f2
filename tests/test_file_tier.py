"""`eval/file_tier.py`: a tiny model whose KV is four times its memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from letters import letter_tokenizer
from tiny import tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import file_tier  # noqa: E402


@pytest.fixture
def line(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    return ["file_tier.py", "--quick", "--model", str(tmp_path / "model"), "--file-dir", str(tmp_path)]


def test_the_script(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*line, "--out", str(tmp_path)])
    file_tier.main()
    result = json.loads((tmp_path / "file_tier.json").read_text())
    host, filed = result["rows"]
    assert result["kv_bytes"] == 3 * 2 * 26 * 2 * 16 * 16 * 4 and result["differ"] == 0
    assert filed["host"] <= result["kv_bytes"] / 4 < host["host"] <= result["kv_bytes"] == filed["file"]
    assert filed["bytes_read"] > 0 and filed["bytes_written"] > result["kv_bytes"] / 2
    assert host["bytes_read"] == host["bytes_written"] == 0
    assert all(bar["met"] for bar in result["bars"]) and "MISSED" not in capsys.readouterr().out
    assert str(tmp_path) not in (tmp_path / "file_tier.json").read_text()
    assert [row[0] for row in file_tier.lines(result)[0][2]] == ["host", "file"]


def test_a_token_that_differs_is_a_missed_bar(line, monkeypatch, capsys):
    own = file_tier.run

    def other(model, ids, new, **knobs):
        row, said = own(model, ids, new, **knobs)
        return row, [said[0] + (knobs["store"] == "file"), *said[1:]]

    monkeypatch.setattr(file_tier, "run", other)
    monkeypatch.setattr(sys, "argv", line)
    file_tier.main()
    assert "differ from those of store='host': 1, at most 0: MISSED" in capsys.readouterr().out


def test_a_wrong_share(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*line, "--share", "1.5"])
    with pytest.raises(SystemExit) as ended:
        file_tier.main()
    assert ended.value.code == 2 and "--share 1.5 is not allowed: use a number above 0" in capsys.readouterr().err
