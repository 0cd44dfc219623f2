"""What each of two ranks does with a GPU of its own, run by torchrun: see test_two_ranks.py. Without GPUs it runs over
gloo, where nothing is captured.

    torchrun --nproc-per-node 2 two_ranks.py FOLDER

FOLDER holds a model; what each rank saw goes to rank0.json and rank1.json there.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import left_padded
from transformers import AutoModelForCausalLM

import oasis_hf
from oasis_hf import OasisCache
from oasis_hf.attach import cache_name

SPECULATE = {"speculate": True, "draft_tokens": 2, "drafter": "prompt_lookup"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "recent queries": {"lookahead": "previous"}, "on demand": {"lookahead": "on_demand"},
    "drafts": SPECULATE, "own loop": SPECULATE, "sampled": SPECULATE, "compiled": {"compile_after": 2},
}  # fmt: skip


def text(model, name, graphs, device):
    """Ids and logits `[n, B, V]` of 60 tokens, and the cache."""
    inputs = {key: value.to(device) for key, value in left_padded([150, 200, 171]).items()}
    cache = OasisCache(model, **{"budget": 112, "graphs": graphs, "compile_after": None, **CASES[name]})
    given = {**inputs, cache_name(model): cache, "max_new_tokens": 60, "do_sample": name == "sampled"}
    torch.manual_seed(7)
    if name in ("own loop", "sampled"):
        return oasis_hf.generate(model, **given), None, cache
    out = model.generate(**given, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits).float(), cache


def told(model, name, device):
    """A case captured and eager."""
    ids, logits, cache = text(model, name, True, device)
    eager_ids, eager, _ = text(model, name, False, device)
    graphs = cache.graphs
    return {
        "ids": ids.tolist(), "same_ids": torch.equal(ids, eager_ids),
        "apart": 0.0 if logits is None else (logits - eager).abs().max().item(),
        "replays": graphs.replays, "refused": graphs.refused, "unfused": graphs.unfused,
        "unaccepted": graphs.unaccepted, "kv_heads": cache.state.store.table.shape[2],
        "device": str(cache.device), "pinned": cache.state.store.pool.pinned_bytes,
    }, (ids, logits)  # fmt: skip


def while_the_same(one, other):
    """Steps until two texts part, and the largest difference of their logits up to there."""
    (ids, logits), (other_ids, other_logits) = one, other
    first = ids.shape[1] - len(logits)
    for step in range(len(logits)):
        if not torch.equal(ids[:, : first + step], other_ids[:, : first + step]):
            break
    else:
        step = len(logits)
    return step, (logits[:step] - other_logits[:step]).abs().max().item()


@torch.no_grad()
def main(folder):
    warnings.simplefilter("ignore")
    on_gpu, dtype = torch.cuda.is_available(), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    parts = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tp_plan="auto").eval()
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    seen = {}
    for name in CASES:
        seen[name], got = told(parts, name, device)
        if got[1] is not None:
            seen[name]["one_process"] = while_the_same(got, text(whole, name, True, device)[:2])
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(seen))
    del parts, whole, got
    gc.collect()  # captured steps first: NCCL waits for them
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
