"""`docs/results.md` and the README say what the JSON of `eval/results/` holds, and go stale with it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))

import report_tables as tables  # noqa: E402
import results_page  # noqa: E402
import results_readme  # noqa: E402
import results_tables  # noqa: E402
import rows  # noqa: E402

RESULTS = ROOT / "eval" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
STALE = "run `make results`"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path):
    """A copy of the results, to be changed."""
    for path in RESULTS.iterdir():
        if path.is_file():  # folders hold what a result was made of
            shutil.copy(path, tmp_path)
    return tmp_path


def change(folder, name, edit):
    told = json.loads((folder / f"{name}.json").read_text())
    edit(told)
    (folder / f"{name}.json").write_text(json.dumps(told))


def test_the_page_is_made_from_the_results_as_they_are():
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == results_page.page(), STALE


def test_the_readme_is_too():
    assert results_readme.filled(README, RESULTS) == README, STALE


def test_another_measurement_is_another_page(folder):
    before = results_page.page(folder)

    def slower(told):
        row = next(row for row in told["rows"] if row["part"] == "pipeline" and row.get("cap") == 6)
        row["ms"], row["tokens_per_second"] = 99.25, 443.0

    change(folder, "decode", slower)
    after = results_page.page(folder)
    assert "99.25" in after and "99.25" not in before
    assert after.split("## Not measured yet")[0].count("Decode steps") == before.split("## Not measured yet")[0].count(
        "Decode steps"
    ) + 1  # fmt: skip
    assert "| 16K, C = 6 | 44 | 99.2 | 443 | 623 MB |" in results_readme.filled(README, folder)


def test_every_result_has_a_section_and_every_section_a_script(folder):
    names = [one.name for one in results_page.SECTIONS]
    assert len(names) == len(set(names)) and {path.stem for path in RESULTS.glob("*.json")} <= set(names)
    page = results_page.page(folder)
    for one in results_page.SECTIONS:
        here = one.path(folder).exists()
        assert (f"\n## {one.title}\n" in page) == here
        assert (f"| {one.title} | `{one.command}` |" in page) == (not here and one.there)
        assert not here or one.there
    (folder / "traces.json").unlink()
    assert "| Blocks fetched a step | `python eval/traces.py" in results_page.page(folder)


def test_pictures_that_are_missing_are_drawn(folder):
    for name in ("agreement", "roofline"):
        (folder / f"{name}.png").unlink()
    page = results_page.page(folder)
    for name in ("agreement", "hit_rate", "roofline"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"](../eval/results/{name}.png)" in page
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "results.md").read_text()):
        assert (ROOT / "docs" / link).exists(), link


def test_bars_are_told_as_they_are(folder):
    page = results_page.page(folder)
    bars = {
        one.name: one.bars(read(one.name)) for one in results_page.SECTIONS if (RESULTS / f"{one.name}.json").exists()
    }
    missed = [bar for some in bars.values() for bar in some if not bar["met"]]
    listed = page.split("## Not measured yet")[0].split("| --- | --- | --- | --- |\n")[1].strip().splitlines()
    assert len(listed) == len(missed) > 0
    assert page.count("**missed**") == len(missed)
    # What the scripts themselves print from the same rows.
    assert bars["prefill"] and [bar["met"] for bar in bars["prefill"]] == list(read("prefill")["bars"]["met"].values())
    assert sum(row["bar_us"] is not None for row in read("operators")["rows"]) == len(bars["operators"])
    slow = {**read("operators")["rows"][0], "us": 146.0}
    (bar,) = results_tables.operators_bars({"rows": [slow]})
    assert not bar["met"] and results_tables.operators({"rows": [slow]})[0][2][0][-1] == "**missed**"


def test_a_sweep_s_section(folder):
    """A result that only a GPU gives, with the fields that the script writes."""
    row = {"fits": True, "static": False, "ms": 10.0, "tokens_per_second": 4400.0, "bytes_a_token": 14e6,
           "hbm_bytes_a_token": 8e8, "hbm_bytes": 1, "kv_bytes": 1e11, "graph": "compiled layers"}  # fmt: skip
    made = [{"part": "oasis", "context": 16384, "rows": 44, **row},
            {"part": "dense", "context": 16384, "rows": 24, **row, "tokens_per_second": 3000.0},
            {"part": "dense", "context": 16384, "rows": 28, "static": False, "fits": False}]  # fmt: skip
    told = {"provenance": [read("decode")["provenance"]], "settings": {}, "rows": made}
    (folder / "rows.json").write_text(json.dumps({**told, "bars": rows.bars(told)}))
    (one,) = [one for one in results_page.SECTIONS if one.name == "rows"]
    parts, missed = results_page.section(one, folder)
    text = "\n\n".join(parts)
    assert "| this cache | 44 | 10.00 | 4,400 | 14.00 | 0.80 | 100 |  |" in text and "| 28 | does not fit |" in text
    assert [bar["what"] for bar in missed] == ["16,384 tokens: best of ours, times own dense's best"]
    assert (folder / "rows.png").exists() and "`decode.py --out decode.json` on NVIDIA H200" in text


def test_results_of_scripts_that_write_their_own_page(folder):
    one = results_page.Section("accuracy", "Accuracy", "python eval/x.py", "About.")
    told = {"provenance": read("decode")["provenance"], "bars": [tables.bar("oasis less dense", -0.9, -0.7)]}
    (folder / "accuracy.json").write_text(json.dumps(told))
    (folder / "accuracy.md").write_text(
        "# Accuracy\n\nmade\n\n## Bars\n\nMISSED\n\n## Modes\n\n| a |\n| --- |\n| 1 |\n"
    )
    parts, missed = results_page.section(one, folder)
    text = "\n\n".join(parts)
    assert (
        "MISSED" not in text
        and "\n\nmade\n\n### Modes\n\n| a |" in text
        and "\n# Accuracy" not in text
        and len(missed) == 1
    )
    assert "| oasis less dense | -0.9 | -0.7 | **missed** |" in text


def test_scripts_whose_results_are_not_kept_yet():
    """Their tables, from rows as the scripts write them."""
    passes = {"drafter": "eagle3", "context": 7000, "rows": 8, "top1": None, "tokens_a_pass": 3.25}
    found = [{**passes, "drafts": 1, "tokens_a_pass": 1.8, "top1": 0.8}, {**passes, "drafts": 4}]
    ((_, head, body),) = results_tables.acceptance({"rows": found})
    assert head[-2:] == ["tokens a pass, 1 draft", "tokens a pass, 4 drafts"]
    assert body == [["eagle3", "7,000", "8", "80.0%", "1.80", "3.25"]]
    place = {"gap": 0.4, "at": 3, "below": 0.0, "exact_gap": 0.1}
    walked = {"prompt": "code 0", "tokens": 512, "tokens_a_pass": 4.0}
    found = [{"dtype": "float32", **walked, "equal": True, "differs": []},
             {"dtype": "float32", **walked, "equal": False, "differs": [place]}]  # fmt: skip
    (bar,) = results_tables.lossless_bars({"rows": found, "gap_bar": 0.5})
    assert (bar["measured"], bar["bar"], bar["met"]) == (1, 2, False)
    (bar,) = results_tables.lossless_bars({"rows": [{**one, "dtype": "bfloat16"} for one in found], "gap_bar": 0.5})
    assert bar["met"]  # within rounding there
    run = {"loop": "oasis_hf.generate", "rows": 8, "drafts": 2, "tokens_per_second": 500.0, "times_without": 1.1,
           "ms_a_pass": 8.0, "tokens_a_pass": 1.6, "bytes_a_token": 2e6, "bar": 1.15}  # fmt: skip
    told = {"runs": [run, {**run, "drafts": 3, "times_without": 1.2}, {**run, "drafts": 0, "bar": None}],
            "share_of_a_draft": []}  # fmt: skip
    told_of = {"length": 4096, "task": "vt", "samples": 200, "score": 0.8125, "exact": 0.5}
    assert results_tables.adapter({"evaluation": [told_of]})[0][2] == [["4,096", "vt", "200", "81.2%", "50.0%"]]
    (bar,) = results_tables.speculation_bars(told)
    assert bar["measured"] == 1.2 and bar["met"] and len(results_tables.speculation(told)[0][2]) == 3


def test_the_readme_s_blocks_are_all_there():
    with pytest.raises(ValueError, match="blocks of results are speculation, accuracy, speed: use speed, lookahead"):
        results_readme.filled(README.replace("<!-- results: lookahead -->", ""), RESULTS)


def test_the_readme_tells_what_modes_lose(tmp_path):
    """A line a mode, a column a length and budget; bytes' equals and other models are left out."""
    row = {"model": "adapter", "length": 4096, "mode": "oasis", "budget": 1040, "score_name": "ours", "equal": "tokens",
           "difference": -0.0123, "score": 0.8, "tasks": 5, "samples": 1000}  # fmt: skip
    told = [{**row, "mode": "dense", "budget": 0, "difference": 0.0, "score": 0.825}, row,
            {**row, "score_name": "corrected", "difference": 0.0012, "samples": 500},
            {**row, "budget": 2064, "samples": 500}, {**row, "budget": 2064, "mode": "window", "difference": -0.3},
            {**row, "equal": "bytes", "difference": -0.5}, {**row, "model": "plain", "difference": -0.5},
            {**row, "length": "all", "difference": -0.5}]  # fmt: skip
    (tmp_path / "accuracy.json").write_text(json.dumps({"summaries": told}))
    steps = ((1, "gather", 99), (1, "watch", 100), (44, "gather", 56), (44, "watch a fourth", 70), (44, "watch", 100))
    rows = [{"part": "adds", "fits": True, "rows": n, "step": step, "ms": ms} for n, step, ms in steps]
    (tmp_path / "overhead.json").write_text(json.dumps({"rows": rows}))
    lines = results_readme.accuracy(tmp_path)
    assert lines[0].endswith("| oasis | -1.2 | -1.2 |\n| oasis (corrected) | +0.1 |  |\n| window |  | -30.0 |")
    prose = " ".join(lines[1].split())
    assert "82.5 at 4,096 (5 tasks)" in prose and "at least 100 samples" in prose and "44% of 44 rows'" in prose


def test_the_readme_tells_speculations_gains(tmp_path):
    """A line a loop and number of drafts, a column a number of rows."""
    run = {"loop": "oasis_hf.generate", "rows": 8, "drafts": 2, "times_without": 1.5}
    told = {"runs": [run, {**run, "rows": 1, "times_without": 1.75}, {**run, "drafts": 0},
                     {**run, "loop": "model.generate", "rows": 1, "drafts": 3, "times_without": 1.25}],
            "share_of_a_draft": [{"share": 0.05}, {"share": 0.03}], "context": 16384, "fetched": 6}  # fmt: skip
    (tmp_path / "speculation.json").write_text(json.dumps(told))
    lines = results_readme.speculation(tmp_path)
    assert "| `oasis_hf.generate` | 2 | 1.75 | 1.50 |  |\n| `model.generate` | 3 | 1.25 |  |  |" in lines[0]
    assert "each takes 4.0% of a step" in " ".join(lines[-1].split())


def stated(pattern):
    """What the groups are in the one place of the README that the pattern finds."""
    (found,) = re.findall(pattern, re.sub(r"\s+", " ", README))
    return list(found)


def test_numbers_in_the_readme_s_prose():
    ratio = {dtype: found["default"]["ratio"] for dtype, found in read("step_time")["results"].items()}
    found = stated(r"takes ([\d.]+) times a dense one in float32, ([\d.]+) times in bfloat16")
    assert found == [f"{ratio[dtype]:.1f}" for dtype in ("float32", "bfloat16")]
    (path,) = results_page.HEADS.glob("*/metrics.json")
    told = json.loads(path.read_text())
    head = told["evaluation"]
    found = stated(
        r"about the next token in (\d+)% of all places \((\d+)% with a passage in the prompt\), and a chain of five "
        r"gives ([\d.]+) tokens a pass \(([\d.]+)\), ([\d.]+) at 7,000 tokens"
    )
    measured = [head["short"]["next_top1"] * 100, head["long"]["next_top1"] * 100]
    measured += [10 * head[name]["tau"] for name in ("short", "long", "context_7000")]
    scale = [1, 1, 10, 10, 10]
    assert all(abs(float(x) * times - y) <= 0.51 for x, times, y in zip(found, scale, measured))
    runs = [told["goes_on_from"], told]
    found = stated(
        r"(\w+) minutes of training on (\w+) of responses \(([\d.]+) million tokens\), and later (\w+) on (\w+) more, "
        r"with runs of documents to go on with among them \(([\d.]+) million tokens\)"
    )
    assert found[2::3] == [str(round(run["train_response_tokens"] / 1e6, 1)) for run in runs]
    assert found[:2] + found[3:5] == ["nine", "three", "eight", "three"]
    assert [round(run["generate_seconds"] / 60) for run in runs] == [3, 3]
    assert [round(run["train_seconds"] / 60) for run in runs] == [9, 8]
