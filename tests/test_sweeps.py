"""The sweeps over a step's speed (`eval/sweep.py` and what uses it): what they count, sum up and call met."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "eval"))

import fetch_sweep  # noqa: E402
import k_sweep  # noqa: E402
import overhead  # noqa: E402
import reasoning  # noqa: E402
import rows as rows_sweep  # noqa: E402
import sweep  # noqa: E402
from sweep import QUICK, Point, Sweep  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def seeded():
    torch.manual_seed(0)


def given(out=None, **more):
    known = {"device": "cpu", "points": None, "seconds": 1e9, "resume": False, "memory_gb": 80, "out": out}
    return argparse.Namespace(**{**known, **more})


def run(module, out, monkeypatch, *arguments):
    """Its command, on a CPU. Returns the result that it wrote."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--quick", "--out", str(out), *arguments])
    module.main()
    name = module.__name__
    assert (out / f"{name}.png").stat().st_size > 1000 and (out / f"{name}.md").read_text().startswith("# ")
    result = json.loads((out / f"{name}.json").read_text())
    assert all(one["device"] == "cpu" for one in result.get("device", []))
    assert result["provenance"][0]["versions"]["torch"] and "gpu" not in result["provenance"][0]["machine"]
    return result


# -- points ---------------------------------------------------------------------------------------------------------


def points(*numbers, series=""):
    return [Point("p", {"n": n}, lambda n=n: {"ms": float(n)}, series) for n in numbers]


def test_points_are_kept_as_they_come_and_never_measured_twice(tmp_path):
    first = Sweep("s", "S", given(tmp_path), {"a": (1, 2)})

    def stops():
        yield from points(1, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stops())
    assert [row["n"] for row in json.loads((tmp_path / "s.json").read_text())["rows"]] == [1, 2]
    again = Sweep("s", "S", given(tmp_path, resume=True), {"a": (1, 2)})
    again.run([Point("p", {"n": 1}, lambda: pytest.fail("measured twice")), *points(3)])
    result = json.loads((tmp_path / "s.json").read_text())
    assert [row["n"] for row in result["rows"]] == [1, 2, 3] and len(result["provenance"]) == 2
    with pytest.raises(SystemExit, match="s.json was measured with other settings"):
        Sweep("s", "S", given(tmp_path, resume=True), {"a": 3})


def test_no_point_begins_after_the_time_and_only_those_asked_for(capsys):
    late = Sweep("s", "S", given(seconds=-1), {})
    late.run(points(1))
    assert not late.rows and "no time for p {'n': 1}" in capsys.readouterr().out
    some = Sweep("s", "S", given(points=["q"]), {})
    some.run([*points(1), Point("q", {"n": 2}, lambda: {"ms": 1.0})])
    assert [row["part"] for row in some.rows] == ["q"]


def test_what_does_not_fit_ends_its_series_alone():
    def full():
        raise torch.OutOfMemoryError("no room\nat all")

    one = Sweep("s", "S", given(), {})
    one.run([*points(1, series="a"), Point("p", {"n": 2}, full, "a"), *points(3, series="a"), *points(4, series="b")])
    assert [(row["n"], row["fits"]) for row in one.rows] == [(1, True), (2, False), (4, True)]
    assert one.rows[1]["why"] == "no room" and sweep.find(one.rows, "p", n=2) is None
    assert sweep.of(one.result, "p") == [one.rows[0], one.rows[2]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_a_cpu_is_refused_but_for_a_quick_run(monkeypatch):
    for arguments, said in (([], "There is no GPU here: --quick"), (["--device", "cpu"], "A CPU's times say nothing")):
        monkeypatch.setattr(sys, "argv", ["overhead.py", *arguments])
        with pytest.raises(SystemExit, match=said):
            overhead.main()


# -- the fetch ratio and the budget ---------------------------------------------------------------------------------


def test_fetch_ratios(tmp_path, monkeypatch):
    result = run(fetch_sweep, tmp_path, monkeypatch)
    forced = {row["fetch_ratio"]: row for row in sweep.of(result, "forced")}
    page = 4 * 2 * 2 * 2 * 16 * 64 * 4  # layers, KV heads, rows; keys and values of a block
    assert forced[0.0]["bytes"] == 0 and forced[0.1]["cap"] == 1 and forced[0.5]["cap"] == 4
    assert all(row["bytes"] == row["cap_bytes"] == row["cap"] * page for row in forced.values())
    seen = {row["fetch_ratio"]: row for row in sweep.of(result, "teacher")}
    assert 0 < seen[0.1]["blocks"] <= 1 and seen[0.1]["blocks"] <= seen[0.5]["blocks"] <= 4
    assert all(row["bytes_per_step"] <= row["most_bytes_per_step"] and row["kl"] > 0 for row in seen.values())
    for row in sweep.of(result, "real"):
        assert row["blocks"] == seen[row["fetch_ratio"]]["blocks"]
        assert row["bytes"] == pytest.approx(row["blocks"] * page, rel=1e-4)
    assert all(bar["met"] for bar in result["bars"]) and len(result["bars"]) == 4


def test_a_real_step_moves_the_mean_that_was_seen(monkeypatch):
    asked = {}

    def step(self, **given):
        asked.update(given)
        return sweep.bench.Reading("", 1, 1.0, 1.0, 0, "")

    monkeypatch.setattr(sweep.Setting, "step", step)
    for mean in (0.25, 1.0, 5.6, 12.0):
        fetch_sweep.real(QUICK, mean)
        shares = asked["shares"]
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert sum(count * share for count, share in enumerate(shares)) == pytest.approx(mean)
        assert len(shares) == math.ceil(mean) + 1 and asked["fetch_ratio"] * QUICK.k == pytest.approx(math.ceil(mean))


def forced_row(ratio, moved, ms, cap=1000.0, **more):
    return {"part": "forced", "fits": True, "fetch_ratio": ratio, "bytes": moved, "cap_bytes": cap, "ms": ms,
            "link": moved / ms * 1e3, **more}  # fmt: skip


def verdicts(*rows):
    return {bar["what"].split(",")[0].split(": ")[-1]: bar["met"] for bar in fetch_sweep.bars({"rows": list(rows)})}


def test_bars_of_the_fetch_ratio_can_be_missed():
    alone = forced_row(0.0, 0, 8.0, 0, link_copy=55e9)
    good = [forced_row(0.05, 3e8, 9.0, 3e8), forced_row(0.1, 6e8, 12.5, 6e8)]
    assert verdicts(alone, *good) == {
        "traffic rises with the ratio": True, "traffic as a share of the cap": True,
        "effective bandwidth where saturated": True,
    }  # fmt: skip
    # 300 MB take 5.5 ms at the link's rate, less than the model's 8: that step's 33 GB/s are not the link's.
    assert fetch_sweep.saturated({"rows": [alone, *good]}) == good[1:]
    assert not verdicts(alone, good[0], forced_row(0.1, 6e8, 14.0, 6e8))["effective bandwidth where saturated"]
    assert not verdicts(alone, good[0], forced_row(0.1, 2e8, 12.5, 6e8))["traffic rises with the ratio"]
    assert not verdicts(alone, good[0], forced_row(0.1, 7e8, 12.5, 6e8))["traffic as a share of the cap"]


def test_budgets(tmp_path, monkeypatch):
    result = run(k_sweep, tmp_path, monkeypatch)
    assert [(row["part"], row["k"]) for row in result["rows"]] == [
        ("shape", 0), ("shape", 4), ("shape", 8), ("teacher", 4), ("teacher", 8),
    ]  # fmt: skip
    small, large = (sweep.find(result["rows"], "teacher", k=k) for k in (4, 8))
    assert small["kl"] > large["kl"] > 0
    (table,) = k_sweep.lines(result)
    assert [row[0] for row in table[2]] == ["dense", "4", "8"] and all(len(row) == len(table[1]) for row in table[2])


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (k_sweep, ["--k", "64", "0"], "--k 0 is not allowed: use integers >= 1"),
        (k_sweep, ["--dense-rows", "0"], "--dense-rows 0 is not allowed"),
        (reasoning, ["--lengths", "-5"], "--lengths -5 is not allowed"),
        (fetch_sweep, ["--ratios", "0.5", "1.5"], "--ratios 1.5 is not allowed: use numbers above 0, up to 1"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(module, arguments, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--quick", *arguments])
    with pytest.raises(SystemExit, match=said) as error:
        module.main()
    assert "\n" not in str(error.value)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows(tmp_path, monkeypatch):
    result = run(rows_sweep, tmp_path, monkeypatch)
    told = [(row["part"], row["rows"], row["static"]) for row in result["rows"]]
    assert told == [("oasis", 1, False), ("oasis", 2, False), ("dense", 1, False), ("dense", 2, False),
                    ("stock", 1, False), ("stock", 2, False), ("stock", 2, True)]  # fmt: skip
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["rows"] / row["ms"] * 1e3)
        assert (row["bytes_a_token"] > 0) == (row["part"] == "oasis")
        assert row["kv_bytes"] == row["rows"] * 600 * 2 * 4 * 2 * 64 * 4


def test_bars_of_rows_take_the_best_of_each():
    def row(part, rows, speed):
        return {"part": part, "rows": rows, "context": 16384, "fits": True, "tokens_per_second": speed}

    made = [row("oasis", 44, 3000.0), row("oasis", 64, 2900.0), row("dense", 24, 1300.0), row("dense", 16, 1100.0)]
    own, vllm = rows_sweep.bars({"rows": made})
    assert own["measured"] == pytest.approx(3000 / 1300) and own["met"]
    assert vllm["measured"] == pytest.approx(3000 / 1258)
    made[2]["tokens_per_second"] = 1500.0
    assert not rows_sweep.bars({"rows": made})[0]["met"]


# -- reasoning ------------------------------------------------------------------------------------------------------


def curve(*at):
    return [{"length": length, "call_ms": ms} for length, ms in at]


def test_time_between_the_lengths_is_a_straight_line():
    line = curve((200, 2.0), (400, 4.0), (600, 6.0))
    assert reasoning.seconds(line, 200, 600) == pytest.approx(400 * 4 / 1e3)
    assert reasoning.seconds(line[::-1], 250, 350) == pytest.approx(100 * 3 / 1e3)
    assert reasoning.seconds(line, 0, 200) == pytest.approx(200 * 2 / 1e3)  # as the first one's before it
    assert reasoning.seconds(line, 100, 400) == pytest.approx((100 * 2 + 200 * 3) / 1e3)
    assert reasoning.seconds(line, 0, 601) is None and reasoning.seconds([], 0, 1) is None
    fine = curve(*((x, 1 + x * x / 1e4) for x in range(0, 601, 10)))
    assert reasoning.seconds(fine, 0, 600) == pytest.approx((600 + 600**3 / 3e4) / 1e3, rel=1e-3)


def test_reasoning(tmp_path, monkeypatch):
    result = run(reasoning, tmp_path, monkeypatch)
    at = {row["length"]: row for row in sweep.of(result, "oasis")}
    assert at[144]["bytes"] == 0 and at[400]["bytes"] == at[600]["bytes"] > 0  # dense, then sparse
    (real,) = sweep.of(result, "real")
    assert real["steps"] == 192 - 128 - 1 and real["seconds"] > 0 and real["bytes"] > 0
    found = reasoning.overall(result, "dense", 2, 600)
    spent = reasoning.seconds(sweep.of(result, "dense"), 128, 600)
    assert found == pytest.approx(2 * 472 / spent) and reasoning.best(result, "dense", 600) == found
    whole, check = reasoning.checked(result)
    assert whole == real and check == pytest.approx(reasoning.seconds(sweep.of(result, "check"), 129, 192))


# -- overhead -------------------------------------------------------------------------------------------------------


def test_overhead(tmp_path, monkeypatch):
    result = run(overhead, tmp_path, monkeypatch)
    parts = overhead.adds(result, 2)
    assert list(parts) == list(overhead.STEPS)
    assert sum(parts.values()) == pytest.approx(sweep.find(result["rows"], "adds", rows=2, step="correct")["ms"])
    bar, fourth, shared = result["bars"]
    assert shared["bar"] == 0.01 and fourth["what"].endswith("watches a fourth of the layers")
    plain, watched = (sweep.find(result["rows"], "adds", rows=2, step=name)["ms"] for name in ("gather", "watch"))
    assert bar["measured"] == pytest.approx(1 - plain / watched) and bar["bar"] == 0.05
    (busy,) = sweep.of(result, "busy")
    assert all(busy["busy_ms"][name] > 0 for name in ("attend", "append", "score", "select"))
    assert busy["busy_ms"]["correct"] == 0  # there is no lane in that step
    assert 0 < sum(busy["busy_ms"].values()) < busy["wall_ms"]
    result["rows"] = [row for row in result["rows"] if row.get("step") != "score"]
    assert list(overhead.adds(result, 2)) == ["model", "draft", "append and attend"]
