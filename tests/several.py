"""A model whose layers lie on two devices that are not there (`pretend.py`), beside the same on one: see
test_several_devices.py, which runs this in a process of its own.

    python several.py FOLDER

FOLDER holds a drafter's head; what was seen goes to seen.json there.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pretend
import torch
from heads import target
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache

import oasis_hf
from oasis_hf import OasisCache, PrefixStore, from_dense
from oasis_hf.attach import cache_name
from oasis_hf.disagg import PrefillWorker, StagingPool

KNOBS = {"budget": 80, "fetch_ratio": 0.5}
DRAFTING = {**KNOBS, "speculate": True, "draft_tokens": 3, "drafter": "prompt_lookup"}


def spread(model: Any) -> Any:
    """A copy by accelerate, its layers on two devices by turns."""
    count = len(model.model.layers)
    places = {f"model.layers.{i}": f"pretend:{i % 2}" for i in range(count)}
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    places |= {f"model.{name}": "pretend:1" if name == "norm" else "pretend:0" for name in names}
    made = accelerate.dispatch_model(copy.deepcopy(model), {**places, "lm_head": "pretend:1"}, force_hooks=True)
    made.generation_config = model.generation_config
    return made


def text(model: Any, inputs: Any, cache: Any, loop: Any = None, **kwargs: Any) -> list[Any]:
    device = model.get_input_embeddings().weight.device
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    given = {**{name: value.to(device) for name, value in inputs.items()}, cache_name(model): cache}
    return (loop or model.generate)(**given, **{"max_new_tokens": 10, "do_sample": False, **kwargs}).tolist()


def own_loop(model: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return text(model, *args, loop=lambda **given: oasis_hf.generate(model, **given), **kwargs)


def greedy(model: Any, folder: str, **knobs: Any) -> Any:
    return text(model, prompt(2, 170), OasisCache(model, **KNOBS, **knobs))


def padded(model: Any, folder: str) -> Any:
    return text(model, left_padded([170, 111, 17]), OasisCache(model, **KNOBS))


def on_demand(model: Any, folder: str) -> Any:
    return greedy(model, folder, lookahead="on_demand")


def corrected(model: Any, folder: str) -> Any:
    return greedy(model, folder, lookahead="previous", correct_below=0.9)


def resident(model: Any, folder: str) -> Any:
    return greedy(model, folder, store="resident")


def file_tier(model: Any, folder: str) -> Any:
    return greedy(model, folder, store="file", host_bytes=1 << 20, file_dir=folder)


def capacity(model: Any, folder: str) -> Any:
    return greedy(model, folder, host_capacity_tokens=200)


def drafts(model: Any, folder: str) -> Any:
    return text(model, prompt(3, 170), OasisCache(model, **DRAFTING))


def candidates(model: Any, folder: str) -> Any:
    return own_loop(model, prompt(2, 170), OasisCache(model, **{**DRAFTING, "candidates": 2, "draft_tokens": 2}))


def drafts_by_own_loop(model: Any, folder: str) -> Any:
    return own_loop(model, prompt(3, 170), OasisCache(model, **DRAFTING))


def lossless(model: Any, folder: str) -> Any:
    return own_loop(model, prompt(1, 170), OasisCache(model, **KNOBS), verify="full", full_drafts=3, max_new_tokens=5)


def beams(model: Any, folder: str) -> Any:
    return text(model, prompt(1, 150), OasisCache(model, **KNOBS), num_beams=3)


def head(model: Any, folder: str) -> Any:
    return own_loop(model, prompt(2, 170), OasisCache(model, **{**DRAFTING, "drafter": f"{folder}/head"}))


def turns(model: Any, folder: str) -> Any:
    """A second turn, a branch of it, rows in another order, and back over the edge of a block."""
    cache = OasisCache(model, **KNOBS)
    out = [torch.tensor(text(model, prompt(2, 150), cache, max_new_tokens=3))]
    branch = copy.deepcopy(cache)
    more = torch.cat((out[0], prompt(2, 30, 5)), 1)
    out.append(torch.tensor(text(model, more, cache, max_new_tokens=3)))
    out.append(torch.tensor(text(model, more, branch, max_new_tokens=3)))
    cache.crop(-20)
    cache.reorder_cache(torch.tensor([1, 0]))
    out.append(torch.tensor(text(model, out[1][[1, 0], : cache.get_seq_length() + 1], cache, max_new_tokens=3)))
    return [one.tolist() for one in out]


def taken_over(model: Any, folder: str) -> Any:
    """From a `DynamicCache` that lies on both devices."""
    past, ids = DynamicCache(config=model.config), prompt(2, 170)
    text(model, ids[:, :-8], past, max_new_tokens=1)
    return text(model, ids, from_dense(model, past, **KNOBS, input_ids=ids[:, :-8]))


SAME = {
    **{
        case.__name__: ("llama", case)
        for case in (
            greedy, padded, on_demand, corrected, resident, file_tier, capacity, drafts, candidates,
            drafts_by_own_loop, lossless, beams, turns, taken_over,
        )
    },
    "head": ("target", head),
    "windows": ("gemma3", padded),
    "drafts over windows": ("gemma3", drafts),
}  # fmt: skip
"""By name, a model and what must give the same on two devices as on one."""


def refused(make: Any) -> str:
    try:
        make()
    except oasis_hf.UnsupportedModelError as error:
        return str(error)
    return "it was taken"


def told(model: Any) -> dict[str, Any]:
    """What a cache on two devices says of itself, and what is refused."""
    cache = OasisCache(model, **KNOBS)
    text(model, prompt(2, 170), cache)
    one = OasisCache(tiny("llama"), **KNOBS)
    text(tiny("llama"), prompt(2, 170), one)
    return {
        "refused": cache.graphs.refused, "memory": cache.memory(), "one": one.memory(),
        "layers": [str(layer.working_set.keys.device) for layer in cache.layers],
        "stores": {str(device): len(part.table) for device, part in cache.state.store.parts.items()},
        "one pool": len({id(part.pool) for part in cache.state.store.parts.values()}) == 1,
        "lengths": sorted(map(str, cache.state.rows._device)),
        "report": cache.report(),
        "prefixes": refused(lambda: PrefixStore(model, 1 << 28)),
        "elsewhere": refused(lambda: PrefillWorker(model, StagingPool(100, 16, torch.float32))),
    }  # fmt: skip


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for name, (which, case) in SAME.items():
        whole = target() if which == "target" else tiny(which)
        want = case(whole, folder)
        with pretend.Pretending():
            made.setdefault(which, None)
            made[which] = made[which] or spread(whole)
            try:
                seen[name] = [want, case(made[which], folder)]
            except Exception:
                seen[name] = [want, traceback.format_exc()[-1700:]]
    with pretend.Pretending():
        seen["told"] = told(made["llama"])
    Path(f"{folder}/seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    pretend.set_up()
    main(sys.argv[1])
