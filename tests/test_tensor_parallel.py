"""`eval/tensor_parallel.py` and the crew of ranks that runs it, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))

import tensor_parallel  # noqa: E402
from crew import Crew  # noqa: E402


def test_two_ranks_measure_what_the_first_says(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         ROOT / "eval" / "tensor_parallel.py", "--quick", "--out", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[: run.stderr.find("elastic")][-3000:]
    result = json.loads((tmp_path / "tensor_parallel.json").read_text())
    assert (tmp_path / "tensor_parallel.png").stat().st_size > 1000
    assert (tmp_path / "tensor_parallel.md").read_text().startswith("# Tensor parallelism")
    assert result["provenance"][0]["ranks"] == 2
    told = [(row["part"], row.get("mode"), row.get("rows"), row["ranks"]) for row in result["rows"]]
    assert told == [
        ("ids", None, None, 2), ("one", "oasis", 2, 1), ("one", "dense", 1, 1), ("ids", None, None, 2),
        ("split", "oasis", 4, 2), ("split", "oasis", 2, 2), ("split", "dense", 2, 2), ("split", "dense", 1, 2),
        ("host", "oasis", 2, 1),
    ]  # fmt: skip
    rows = result["rows"]
    assert rows[0]["dtype"] == "float32" and rows[0]["same"]
    # Twice the rows on two ranks: each moves what one process does with the rows.
    assert rows[4]["bytes"] == rows[1]["bytes"] == 2 * rows[5]["bytes"] > 0
    assert all(row["bytes"] == row["cap_bytes"] for row in rows if "cap_bytes" in row)
    # Of a step's reads the working set's are as many, the weights' about half.
    assert 0.5 < rows[5]["hbm_bytes"] / rows[1]["hbm_bytes"] < 0.8
    assert rows[8]["host_bytes"] == 2 * (38 + 16) * 4 * 2 * 2 * 16 * 64 * 4
    assert [bar["met"] for bar in result["bars"][:2]] == [True, True]


def row(part, rows, ranks, speed, mode="oasis", context=16384, fits=True):
    return {"part": part, "mode": mode, "rows": rows, "ranks": ranks, "context": context, "fits": fits,
            "tokens_per_second": speed}  # fmt: skip


def verdicts(*rows):
    return {bar["what"].split(":")[1].split(",")[0].strip(): bar for bar in tensor_parallel.bars({"rows": list(rows)})}


def test_bars_compare_as_many_rows_a_gpu():
    one = [row("one", 44, 1, 4000.0), row("one", 24, 1, 1300.0, "dense")]
    found = verdicts(*one, row("split", 88, 2, 6900.0), row("split", 48, 2, 2000.0, "dense"))
    assert list(found) == ["88 rows on 2 GPUs"] and found["88 rows on 2 GPUs"]["met"]
    assert not verdicts(*one, row("split", 88, 2, 6700.0))["88 rows on 2 GPUs"]["met"]
    assert not verdicts(*one, row("split", 44, 2, 9000.0))  # no 22 rows on one


def test_bars_of_the_host_take_enough_rows_alone():
    few, many = row("host", 60, 1, 9000.0), row("host", 90, 1, 5100.0)
    long = row("host", 45, 1, 3400.0, context=32768)
    found = tensor_parallel.bars({"rows": [few, many, long, row("host", 96, 1, 0.0, fits=False)]})
    assert [(bar["measured"], bar["met"]) for bar in found] == [(5100.0, True), (3400.0, False)]


def test_rows_that_the_host_has_no_room_for_are_told(capsys):
    crew = Crew("cpu", {})
    rows, host = {16384: {"oasis": 44}}, {16384: (96, 90)}
    made = list(tensor_parallel.points(crew, rows, host, 36 * 8, 8192, 210))
    assert [(point.part, point.key["rows"]) for point in made] == [("one", 44), ("host", 90)]
    assert "96 rows of 16,384 tokens need more than --host-gib 210" in capsys.readouterr().out


def test_what_does_not_fit_is_raised_for_the_sweep():
    def full():
        raise torch.OutOfMemoryError("no room")

    crew = Crew("cpu", {"full": full, "fits": lambda x: {"x": x}})
    assert crew.all_do("fits", x=3) == {"x": 3}
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        crew.all_do("full")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "split"], "There is one rank here: ids and split need torchrun"),
        (["--host-gib", "0"], "--host-gib 0 is not allowed: use a number above zero"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(arguments, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", "--quick", *arguments])
    with pytest.raises(SystemExit, match=said):
        tensor_parallel.main()
