"""`eval/moe.py`: its command, and what its bars take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import moe  # noqa: E402


def test_the_command_measures_every_part_and_goes_on(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(moe, "DECIDES", 6)
    argv = ["moe.py", "--quick", "--rows", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--points", "never"])
    moe.main()
    monkeypatch.setattr(sys, "argv", [*argv, "--resume"])
    moe.main()
    result = json.loads((tmp_path / "moe.json").read_text())
    assert [row["part"] for row in result["rows"]] == list(moe.PARTS) and len(result["provenance"]) == 2
    never, auto, always = result["rows"]
    assert never["dense"] and never["bytes"] == 0 and not always["dense"]
    # Four layers, two KV heads, the cap of C = 1 block of 16 tokens, 64 wide, K and V, float32.
    assert always["bytes"] == 4 * 2 * 16 * 64 * 2 * 4
    assert auto["turns"] in (0, 1, 2) and (auto["dense"] or auto["bytes"] > 0)
    # Dense, a token meets two of eight experts of 3 x 256 x 64, and K and V of all slots and the tail.
    plain = sum(w.nbytes for name, w in moe.QUICK.model.named_parameters() if ".experts." not in name)
    plain -= moe.QUICK.model.get_input_embeddings().weight.nbytes
    slots = (never["hbm_bytes"] - plain - 4 * 2 * 3 * 256 * 64 * 4) / (4 * 2 * 64 * 2 * 4) - 8
    assert slots % 16 == 0 and 600 < slots < 1000
    assert (tmp_path / "moe.md").read_text().startswith("# ") and (tmp_path / "moe.png").stat().st_size > 1000


def made(part, rows, ms):
    return {"part": part, "rows": rows, "ms": ms, "fits": True}


def test_bars():
    rows = [made("never", 1, 10.0), made("always", 1, 12.0), made("auto", 1, 10.2),
            made("never", 8, 20.0), made("always", 8, 15.0), made("auto", 8, 15.1), made("auto", 64, 99.0)]  # fmt: skip
    slower, won = moe.bars({"rows": rows})
    assert slower["measured"] == pytest.approx(1.02) and slower["met"] and won["met"]
    assert won["measured"] == pytest.approx(20 / 15.1)
    rows[2]["ms"], rows[5]["ms"] = 10.4, 20.1
    slower, won = moe.bars({"rows": rows})
    assert not slower["met"] and not won["met"]


def test_wrong_input(monkeypatch):
    for argv, said in (
        (["--context", "0"], "--context 0 is not allowed"),
        (["--rows", "0"], "--rows 0 is not allowed"),
    ):
        monkeypatch.setattr(sys, "argv", ["moe.py", "--quick", *argv])
        with pytest.raises(SystemExit, match=said):
            moe.main()
