"""The part of a decode step that will be captured makes no host synchronisation; around it at most one bool is read,
and none without speculation (promise 6)."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, left_padded, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from oasis_hf import OasisCache

pytestmark = pytest.mark.core

SYNCS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "item")


class CountSyncs(TorchDispatchMode):
    """Operators whose result has to reach the host before the program can go on."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean_index = name in ("index", "index_put_", "index_put") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in SYNCS or boolean_index:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def steps(model, cache, inputs, count):
    """Prefill, one decode step that makes the first selection, then `count` more: (inside, whole) syncs of each."""
    inside, whole = [], []
    stepper = cache.stepper
    plain = type(stepper)._forward

    def spied(inner, call, step):
        with CountSyncs() as counter:
            out = plain(stepper, inner, call, step)
        inside.append(counter.seen)
        return out

    stepper._forward = spied
    with torch.no_grad():
        out = model(**inputs, past_key_values=cache, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(count + 1):
            position = torch.full_like(token, cache.get_seq_length())
            inside.clear()
            with CountSyncs() as counter:
                out = model(input_ids=token, past_key_values=cache, position_ids=position)
            whole.append((list(inside), counter.seen))
            token = out.logits[:, -1].argmax(-1, keepdim=True)
    return whole[1:]


@pytest.fixture
def capturable_experts(monkeypatch):
    """What generate itself does around decoding: expert dispatch without a look at the routing."""

    def apply(model):
        if hasattr(model.config, "_experts_implementation"):
            monkeypatch.setattr(model.config, "_experts_implementation_internal", "batched_mm")

    return apply


def newest(knobs):
    return pytest.param(knobs, marks=pytest.mark.newest)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "knobs",
    [
        {"lookahead": "previous"},
        newest({"lookahead": "draft"}),
        newest({"lookahead": "draft", "speculate": True, "draft_tokens": 1}),
        {"lookahead": "draft", "speculate": True, "draft_tokens": 2},
        newest({"lookahead": "smoothed", "scorer": "minmax", "reduction": "max"}),
        newest({"lookahead": "on_demand", "summary_dtype": "model"}),
        newest({"lookahead": "previous", "correct_below": 0.1}),
        newest({"lookahead": "draft", "correction": "auto", "correct_above": 0.05}),
        newest({"lookahead": "smoothed", "correction": "always"}),
    ],
    ids=["1-query", "2-queries", "3-queries", "4-queries", "smoothed", "on-demand", "turned", "corrected", "always"],
)
def test_no_sync_inside_the_forward(family, knobs, capturable_experts):
    model = tiny(family)
    capturable_experts(model)
    cache = OasisCache(model, budget=64, **knobs)
    for inside, whole in steps(model, cache, {"input_ids": prompt(1, 100)}, 20):
        assert all(seen == [] for seen in inside)
        assert len(whole) <= (1 if knobs.get("speculate") else 0), whole
    if cache.sparse_layers:
        stats = cache.stats()
        assert (stats["fetched"] + stats["on_demand"]).sum() > 0  # sparse, and blocks opened and closed on the way


def test_no_sync_with_padded_rows():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    for inside, whole in steps(model, cache, left_padded([100, 40, 71]), 20):
        assert all(seen == [] for seen in inside) and whole == []


def test_no_sync_where_rows_open_blocks_at_every_other_step():
    """The operators' copy of the table, which only a GPU has, is brought up to date without one too."""
    model, lengths = tiny("llama"), [100 - row for row in range(0, 16, 2)]
    cache = OasisCache(model, budget=64)
    with torch.no_grad():
        model(**left_padded(lengths), past_key_values=cache, logits_to_keep=1)
    store = cache.state.store
    store.device_table, store._settle = store.table.clone(), lambda: None
    opened = 0
    for _ in range(32):
        before = list(store.blocks)
        with CountSyncs() as counter, torch.no_grad():
            cache.prepare(1)
        assert counter.seen == []
        cache.state.need_rows().advance(1)
        opened += store.blocks != before
    known = store.table >= 0
    assert opened == 16 and torch.equal(store.device_table[known], store.table[known])


def test_the_counter_counts():
    with CountSyncs() as counter:
        x = torch.arange(4)
        bool(x.sum() > 1)
        x[x > 2]
    assert counter.seen == ["_local_scalar_dense", "index"]
