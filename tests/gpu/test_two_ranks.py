"""Tensor parallelism over two GPUs: steps with NCCL inside are captured, and give what eager ones and one GPU give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("two_ranks")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=384, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    here = Path(two_ranks.__file__)
    path = os.pathsep.join(map(str, (here.parents[2], here.parents[1], here.parent)))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", here, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((path, os.environ.get("PYTHONPATH", "")))},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", two_ranks.CASES)
def test_captured_is_eager_on_both_ranks(seen, name):
    first, second = (one[name] for one in seen)
    assert first["ids"] == second["ids"]
    for one in (first, second):
        assert one["refused"] is None and one["unfused"] is None and one["unaccepted"] is None, one
        assert one["replays"] > 15
        if name != "compiled":  # which rounds otherwise
            assert one["same_ids"] and one["apart"] == 0


@pytest.mark.parametrize("name", [name for name in two_ranks.CASES if name not in ("own loop", "sampled")])
def test_two_ranks_give_what_one_gives_within_rounding(seen, name):
    for one in seen:
        steps, apart = one[name]["one_process"]
        # Sums over ranks round otherwise: a score may swap two blocks, and from there on texts may part.
        assert steps > 2 and apart < 0.3, (steps, apart)


def test_each_rank_keeps_its_own_head_on_its_own_device(seen):
    assert [one["plain"]["device"] for one in seen] == ["cuda:0", "cuda:1"]
    assert all(one["plain"]["kv_heads"] == 1 and one["plain"]["pinned"] > 0 for one in seen)
