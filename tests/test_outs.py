"""Every script of `eval/` refuses a wrong `--out` with one sentence, before it measures anything."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parent.parent / "eval"
sys.path.insert(0, str(EVAL))

import outs  # noqa: E402

SWEEPS = "sweep.arguments("
"""They share one parser."""
SCRIPTS = sorted(
    path.stem for path in EVAL.glob("*.py")
    if "def main(" in (text := path.read_text(encoding="utf-8"))
    and ('"--out"' in text or SWEEPS in text)
)  # fmt: skip
FILES = {"accuracy", "adaptive", "agreement", "decode", "fetch_cap", "fidelity", "interference", "operators", "prefill",
         "speculation", "step_time", "tail_estimate", "traces"}  # fmt: skip


@pytest.fixture
def parsed(monkeypatch):
    """What a script makes of its arguments, and no more: else it would begin to measure."""

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def only(self, *args, **kwargs):
        raise Parsed(parse(self, *args, **kwargs).out)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only)

    def run(name, out):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(out)])
        with pytest.raises((Parsed, SystemExit)) as caught:
            importlib.import_module(name).main()
        return caught.value.args[0] if isinstance(caught.value, Parsed) else caught.value.code

    return run


def test_which_scripts_there_are():
    assert set(SCRIPTS) > FILES and len(SCRIPTS) >= 30
    for path in EVAL.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert 'add_argument("--out"' not in line or "type=outs." in line, f"{path.name}: {line}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_out_is_refused(name, parsed, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "plain.txt").touch()
    (tmp_path / "made.json").mkdir()
    good, bad = [tmp_path / "new.json"], [tmp_path / "there", tmp_path / "made.json", tmp_path / "new"]
    if name not in FILES:
        good, bad = [tmp_path / "there", tmp_path / "new"], [tmp_path / "new.json"]
    for out in good:
        assert parsed(name, out) == out
    capsys.readouterr()
    for out in [*bad, tmp_path / "plain.txt"]:
        assert parsed(name, out) == 2, out
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"error: argument --out: '{out}' is " in told and told.endswith("."), told


def test_a_folder_is_told_which_file_is_meant(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/fidelity.py"])
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name the file, for example '.*/fidelity.json'"):
        outs.json_file(str(tmp_path))
