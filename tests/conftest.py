"""Settings and models for all tests."""

import os

# Before transformers is imported: no test asks the network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import settings

# Always the same examples: a failure is one for everybody.
settings.register_profile("oasis", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("oasis")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in bfloat16 on the CPU and its tokenizer; tests must leave them as they are."""
    from oasis_hf.models import load

    return load(device="cpu")


@pytest.fixture
def loads_smollm2(smollm2, monkeypatch):
    """`oasis_hf.models.load` hands out the session's model: what is run with it reads the weights no second time."""
    monkeypatch.setattr("oasis_hf.models.load", lambda model=None, device=None, dtype=None: smollm2)
