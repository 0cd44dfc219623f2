"""Two ranks of one model: each keeps its own KV heads, and both give the ids of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from heads import TENSORS, plain_config, target, write
from tiny import FAMILIES, tiny

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in {which for which, _ in (ranks.SAME | ranks.TOLD).values()} - {"target", "odd"}:
        tiny(name).save_pretrained(folder / name)
    odd = FAMILIES["llama"]().config
    odd.num_attention_heads = odd.num_key_value_heads = 3
    type(tiny("llama"))(odd).save_pretrained(folder / "odd")
    target().save_pretrained(folder / "target")
    write(folder / "head", plain_config(), TENSORS)
    here = Path(ranks.__file__)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", here, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent)])},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[: run.stderr.find("elastic")][-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ranks.SAME)
def test_ranks_give_what_one_process_gives(seen, name):
    (first, want), (second, _) = seen[0][name], seen[1][name]
    assert first == want and second == want


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("phi3", "its tp_plan leaves all 2 KV heads on each of 2 ranks"),
        ("gpt_oss", "its tp_plan leaves all 2 KV heads on each of 2 ranks"),
        ("odd", "3 KV heads do not divide over tensor-parallel size 2"),
        ("disaggregated", "is split over 2 ranks: load it without tp_plan"),
    ],
)
def test_what_ranks_can_not_do_is_refused_on_each(seen, name, sentence):
    assert all(sentence in one[name][0] for one in seen), seen[0][name]


def test_layers_are_compiled_with_their_sums_over_ranks(seen):
    for failed, apart, joined, same in (one["compiled"][0] for one in seen):
        assert failed is None and apart < 1e-4 and joined and same


def test_each_rank_keeps_its_own_heads(seen):
    for heads, host, working_set, planned in (one["shares"][0] for one in seen):
        assert heads == 1
        assert host == 3 * 16 * 2 * 16 * 16 * 4, "layers, blocks, and a block of one head"
        assert working_set == planned
