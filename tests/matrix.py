"""The equality matrix, a cell a promise: each takes a tiny model in float32 and compares an `OasisCache` with what
`DynamicCache` gives, or with a cache whose blocks live elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from test_generate import assert_same, generate
from tiny import left_padded, prompt
from transformers import DynamicCache

import oasis_hf
from oasis_hf import OasisCache, mode_config

SMALL = 48
"""A budget in tokens that a prompt of `LONG` overflows."""
LONG = 112


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def dense(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@torch.no_grad()
def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Token by token; the logits of the last one."""
    for at in range(ids.shape[1]):
        last = model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
    return last


@torch.no_grad()
def read(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache).logits[:, -1]


def same_tokens(model: Any) -> None:
    """Drafts are accepted too."""
    assert_same(model, prompt(1, 50), lambda: OasisCache(model, speculate=True, draft_tokens=2), max_new_tokens=8)


def chunked_prefill(model: Any) -> None:
    assert_same(model, prompt(1, 50), lambda: OasisCache(model), prefill_chunk_size=19, max_new_tokens=2)


def left_padding(model: Any) -> None:
    assert_same(model, left_padded([21, 50, 33]), lambda: OasisCache(model), max_new_tokens=5)


def next_turn(model: Any) -> None:
    ids, last = prompt(1, 60), []
    for cache in (dense(model), OasisCache(model)):
        read(model, cache, ids[:, :30])
        feed(model, cache, ids[:, 30:33])
        last.append(read(model, cache, ids[:, 33:]))
    close(*last)


def crop(model: Any) -> None:
    """Back over the edge of a block, as if what is gone had never come."""
    ids, cache, never = prompt(1, 60), OasisCache(model), dense(model)
    read(model, cache, ids[:, :40])
    feed(model, cache, prompt(1, 12, seed=9))
    cache.crop(-12)
    read(model, never, ids[:, :40])
    close(feed(model, cache, ids[:, 40:43]), feed(model, never, ids[:, 40:43]))


def branch(model: Any) -> None:
    ids, last = prompt(1, 45), []
    for cache in (dense(model), OasisCache(model)):
        read(model, cache, ids[:, :40])
        last.append(feed(model, copy.deepcopy(cache), ids[:, 40:43]))
    close(*last)


def beams(model: Any) -> None:
    assert_same(model, prompt(2, 37), lambda: OasisCache(model), num_beams=2, max_new_tokens=5)


def sparse(model: Any) -> None:
    """A working set smaller than the context: where the blocks live changes no bit, and it is not the dense result."""
    outs = [
        generate(model, prompt(1, LONG), OasisCache(model, budget=SMALL, store=store), max_new_tokens=9)
        for store in ("host", "resident")
    ]
    for a, b in zip(*(out.logits for out in outs), strict=True):
        assert torch.equal(a, b)
    all_of_it = generate(model, prompt(1, LONG), dense(model), max_new_tokens=2).logits[1]
    if OasisCache(model).state.sparse_layers:
        assert not torch.allclose(all_of_it, outs[0].logits[1], atol=1e-4)
    else:
        close(all_of_it, outs[0].logits[1])


def on_demand(model: Any) -> None:
    """What a query fetches before it attends is what it chooses where the full KV is resident (Quest)."""
    outs = [
        generate(model, prompt(1, LONG), OasisCache(model, mode_config(mode, SMALL)), max_new_tokens=5).logits
        for mode in ("on_demand", "quest")
    ]
    for a, b in zip(*outs, strict=True):
        close(a, b)


def verified(model: Any) -> None:
    """`verify="full"`: dense tokens from a small working set."""
    ids, kwargs = prompt(1, LONG), dict(max_new_tokens=8, do_sample=False)
    want = model.generate(ids, past_key_values=dense(model), **kwargs)
    cache = OasisCache(model, budget=SMALL)
    got = oasis_hf.generate(model, ids, past_key_values=cache, verify="full", full_drafts=3, **kwargs)
    assert torch.equal(got, want)


CELLS: dict[str, Callable[[Any], None]] = {
    "same tokens": same_tokens,
    "chunked prefill": chunked_prefill,
    "left padding": left_padding,
    "next turn": next_turn,
    "crop": crop,
    "branch": branch,
    "beams": beams,
    "sparse": sparse,
    "on demand": on_demand,
    'verify="full"': verified,
}
