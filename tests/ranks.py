"""What each of two ranks of a tensor-parallel model does, run by torchrun: see test_parallel.py.

    torchrun --nproc-per-node 2 ranks.py FOLDER

FOLDER holds models and a drafter's head; what each rank saw goes to rank0.json and rank1.json there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import left_padded, prompt
from transformers import AutoModelForCausalLM

import oasis_hf
from oasis_hf import OasisCache, fused, parallel
from oasis_hf.attach import cache_name
from oasis_hf.disagg import PrefillWorker, StagingPool
from oasis_hf.modes import gpu_bytes

KNOBS = {"budget": 96, "fetch_ratio": 0.5}
DRAFTING = {**KNOBS, "speculate": True, "draft_tokens": 3}
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def whole(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ids_of(model, inputs, cache, **kwargs):
    return model.generate(**inputs, **{cache_name(model): cache}, **{**GREEDY, **kwargs}).tolist()


def by_own_loop(model, inputs, cache, **kwargs):
    return oasis_hf.generate(model, **inputs, **{cache_name(model): cache}, **{**GREEDY, **kwargs}).tolist()


def greedy(model, folder):
    return ids_of(model, whole(prompt(2, 250)), OasisCache(model, **KNOBS))


def left_padding(model, folder):
    return ids_of(model, left_padded([250, 111, 17]), OasisCache(model, **KNOBS))


def on_demand(model, folder):
    return ids_of(model, whole(prompt(2, 250)), OasisCache(model, lookahead="on_demand", budget=64))


def verified_drafts(model, folder):
    return ids_of(model, whole(prompt(2, 250)), OasisCache(model, drafter="prompt_lookup", **DRAFTING))


def own_loop(model, folder):
    return by_own_loop(model, whole(prompt(3, 250)), OasisCache(model, drafter="prompt_lookup", **DRAFTING))


def lossless(model, folder):
    return by_own_loop(model, whole(prompt(1, 250)), OasisCache(model, **KNOBS), verify="full")


def file_tier(model, folder):
    cache = OasisCache(model, store="file", host_bytes=1 << 20, file_dir=folder, **KNOBS)
    return ids_of(model, whole(prompt(2, 250)), cache)


def beams(model, folder):
    return ids_of(model, whole(prompt(1, 150)), OasisCache(model, **KNOBS), num_beams=3)


def second_turn(model, folder):
    cache = OasisCache(model, **KNOBS)
    first = torch.tensor(ids_of(model, whole(prompt(1, 150)), cache, max_new_tokens=10))
    return ids_of(model, whole(torch.cat((first, prompt(1, 30, 5)), 1)), cache)


def head(model, folder):
    """A head that lacks embeddings, which are split over the ranks."""
    return by_own_loop(model, whole(prompt(2, 250)), OasisCache(model, drafter=f"{folder}/head", **DRAFTING))


def sampled(model, folder, loop=by_own_loop):
    """Each rank is seeded otherwise, the single process as the first one."""
    torch.manual_seed(7 + (dist.get_rank() if model.tp_size else 0))
    cache = OasisCache(model, drafter="prompt_lookup", **DRAFTING)
    return loop(model, whole(prompt(2, 250)), cache, do_sample=True, top_k=20)


def sampled_by_generate(model, folder):
    return sampled(model, folder, ids_of)


SAME = {
    **{
        case.__name__: ("llama", case)
        for case in (
            greedy, left_padding, on_demand, verified_drafts, own_loop, lossless, file_tier, beams, second_turn,
            sampled, sampled_by_generate,
        )
    },
    "head": ("target", head),
    **{family: (family, greedy) for family in ("qwen3", "qwen3_moe", "gemma3")},
}  # fmt: skip
"""By name, a model and what must give the same on both ranks as in one process."""


def refused(model, folder):
    try:
        OasisCache(model)
    except oasis_hf.UnsupportedModelError as error:
        return str(error)
    return "it was taken"


def refused_elsewhere(model, folder):
    try:
        PrefillWorker(model, StagingPool(100, 16, torch.float32))
    except oasis_hf.UnsupportedModelError as error:
        return str(error)
    return "it was taken"


def shares(model, folder):
    """KV heads and bytes of a cache's store, bytes of its working set, and what those were to be."""
    cache = OasisCache(model, **KNOBS)
    ids_of(model, whole(prompt(1, 250)), cache, max_new_tokens=2)
    planned = gpu_bytes(model, "oasis", 96, 256, "previous")["working_set"]
    return [cache.state.store.table.shape[2], cache.memory()["host"], cache.memory()["working_set"], planned]


@torch.no_grad()
def compiled(model, folder):
    """Why layers were not compiled, how far logits of compiled steps are from eager ones', and whether the weights are
    what they were, and the model's own, afterwards."""
    weights = [(weight, parallel.local(weight).clone()) for weight in model.parameters()]

    def steps(around):
        cache, ids, out = OasisCache(model, **KNOBS), prompt(2, 120), []
        model(input_ids=ids, **{cache_name(model): cache})
        for token in (5, 6, 7):
            with around():
                out.append(model(input_ids=ids[:, :1] * 0 + token, **{cache_name(model): cache}).logits)
        return torch.cat(out), cache

    eager, held = steps(contextlib.nullcontext)
    layers = fused.fused_layers(model)
    steps(layers.tried)
    apart = (steps(layers.placed)[0] - eager).abs().max().item()
    failed, joined = layers.failed, layers.holds()
    del held, layers  # the last cache: projections are split again
    same = all(now is was and torch.equal(parallel.local(now), value)
               for now, (was, value) in zip(model.parameters(), weights, strict=True))  # fmt: skip
    return [failed, apart, joined, same]


TOLD = {
    "compiled": ("qwen3", compiled),
    "phi3": ("phi3", refused), "gpt_oss": ("gpt_oss", refused), "odd": ("odd", refused),
    "disaggregated": ("llama", refused_elsewhere), "shares": ("llama", shares),
}  # fmt: skip
"""By name, a model and what is told by each rank alone."""


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    @functools.cache
    def load(name, **split):
        return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32, **split).eval()

    seen = {}
    for name, (which, case) in (SAME | TOLD).items():
        try:
            seen[name] = [case(load(which, tp_plan="auto"), folder)]
            if name in SAME:
                seen[name].append(case(load(which), folder))
        except Exception as error:
            raise RuntimeError(f"scenario {name!r} failed") from error
    Path(f"{folder}/rank{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
