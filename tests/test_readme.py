"""What README.md shows is run, and what it states about the code is compared with it."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from oasis_hf import OasisConfig, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", README, re.S | re.M) for line in block.splitlines()]
DEMO = "oasis-hf demo"  # which tests/test_demo.py runs: it takes long


def test_nothing_is_shown_that_is_not_run():
    assert len(PYTHON) >= 3 and len(COMMANDS) >= 3
    assert set(re.findall(r"^```(.*)$", README, re.M)) == {"python", "sh", ""}
    # Indented: make and pip, which the suite can't run from inside; CI starts with them.
    plain = re.sub(r"^```.*?^```$", "", README, flags=re.S | re.M)
    shown = [line.strip() for line in re.findall(r"^    (\S.*)$", plain, re.M)]
    assert shown and all(re.match(r"(make|pip) ", line) for line in shown)
    assert all(line.startswith(("oasis-hf ", "python -m oasis_hf.lm_eval ")) for line in COMMANDS)
    assert DEMO in COMMANDS


@pytest.mark.slow
def test_python_blocks(loads_smollm2, capsys):
    names = {}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "Paris" in out and "hit rate" in out
    assert names["branch"].get_seq_length() > 22 > 0
    assert names["prefixes"].hits > 200 and names["held"].hits > 200
    assert names["cache"].stats()["fetched"].sum() > 0 and len(names["figure"].axes) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if "lm_eval" in line])
def test_commands_of_the_harness(line, loads_smollm2, capsys, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    from oasis_hf.lm_eval import __main__

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert __main__.main(shlex.split(line)[3:]) == 0
    assert "|berths|" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("oasis-hf ") and line != DEMO])
def test_commands(line, loads_smollm2, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(shlex.split(line)[1:]) == 0
    out = capsys.readouterr().out
    if "LICENSE" in line:
        assert out.count("2.0") >= 2


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_knobs_are_all_there_with_their_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", README, re.M))
    assert rows == {field.name: repr(field.default) for field in fields(OasisConfig)}


PAGES = (
    "README.md",
    "docs/architecture.md",
    "docs/results.md",
    "docs/support.md",
    "csrc/README.md",
    "eval/README.md",
    "eval/tasks/README.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    for path in re.findall(r"`((?:oasis_hf|eval|tests|examples|docs)/[\w./-]*)`", text):
        if path != "eval/results/":  # what a run of eval writes
            assert (ROOT / path).exists(), path


def test_architecture_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = text[text.index("## Rooms") : text.index("## The seam")]
    for path in sorted((ROOT / "oasis_hf").iterdir()):
        if path.name.startswith("__") or path.name == "py.typed":
            continue
        assert re.search(rf"`{path.name}/?`", rooms), f"{path.name} has no line in docs/architecture.md"
