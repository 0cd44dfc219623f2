"""Everything in `examples/` runs as it stands."""

import json
import os
import runpy
from pathlib import Path

import pytest

from oasis_hf.demo import EXPECTED

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / name))["main"]()
    return capsys.readouterr().out


def test_quickstart(loads_smollm2, capsys):
    out = run("quickstart.py", capsys)
    assert "Paris" in out and "hit rate" in out


def test_long_document(loads_smollm2, capsys):
    out = run("long_document.py", capsys)
    assert EXPECTED in out
    read = [int(line.split(" of them read")[0].split()[-1]) for line in out.splitlines() if "of them read" in line]
    assert len(read) == 2 and max(read) < 100  # the document itself was read once


def test_batch_left_padding(reads_smollm2, capsys):
    out = run("batch_left_padding.py", capsys)
    assert "Paris" in out and "same tokens as a dense cache: True" in out
    columns = [int(line.split("[")[1].split()[0]) for line in out.splitlines() if line.endswith(" columns]")]
    stored = json.loads(out.splitlines()[-1].removeprefix("tokens stored by row: "))
    assert len(set(columns)) == 3 and [n - columns[0] for n in columns] == [n - stored[0] for n in stored]


def test_several_gpus(reads_smollm2, capsys):
    pytest.importorskip("accelerate")
    out = run("several_gpus.py", capsys)
    assert "Paris" in out and "layers: 30 on " in out


def test_all_scripts_are_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "quickstart.py", "long_document.py", "batch_left_padding.py", "several_gpus.py",
    }  # fmt: skip


def test_notebook(smollm2_folder, monkeypatch):
    """In a kernel of its own, so from the loading of the weights (a copy, which is there sooner) to the figure."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    root = str(EXAMPLES.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(EXAMPLES / "prototype.ipynb", as_version=4)
    copy = {"pretrained_model_name_or_path": smollm2_folder}
    first = f"from oasis_hf import models\nmodels.bundled_files = lambda: {copy}"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3").execute(cwd=str(EXAMPLES))
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("hit rate" in each.get("text/html", "") for each in data)  # the cache shows itself
    assert any("image/png" in each for each in data)  # and the figure does
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert EXPECTED in text and "previous" in text and "MiB moved" in text


def test_notebook_is_stored_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "prototype.ipynb", as_version=4)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
