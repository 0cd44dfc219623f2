"""Layers on several devices (accelerate's `device_map`): the tokens of one device, and nothing of one device's meets
another's. The devices are not there: see pretend.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heads import TENSORS, plain_config, write
from torch import nn

from oasis_hf import placing
from oasis_hf.store import HostMemoryError, HostStore, PagePool, SplitStore

pytest.importorskip("accelerate")
import several  # noqa: E402

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    write(folder / "head", plain_config(), TENSORS)
    here = Path(several.__file__)
    run = subprocess.run(
        [sys.executable, here, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent)])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("name", several.SAME)
def test_two_devices_give_what_one_gives(seen, name):
    want, got = seen[name]
    assert not isinstance(got, str), got
    assert got == want


def test_each_layer_and_its_pages_are_its_devices_own(seen):
    told = seen["told"]
    assert told["layers"] == ["pretend:0", "pretend:1", "pretend:0"]
    assert told["stores"] == {"pretend:0": 2, "pretend:1": 1} and told["one pool"]
    assert told["lengths"] == ["pretend:0", "pretend:1"]
    assert told["memory"] == told["one"]


def test_what_is_on_one_device_alone_says_so(seen):
    assert seen["told"]["refused"] == "layers are on several devices"
    assert seen["told"]["prefixes"].startswith("PrefixStore does not support LlamaForCausalLM on several devices")
    assert "on several devices (pretend:0, pretend:1): load it on one" in seen["told"]["elsewhere"]


class Model(nn.Module):
    """Two decoder layers. map: its `hf_device_map`."""

    class config:
        num_hidden_layers = 2

        @classmethod
        def get_text_config(cls, decoder):
            return cls

    def __init__(self, devices, map):
        super().__init__()
        self.layers = nn.ModuleList()
        for index, device in enumerate(devices):
            layer = nn.Linear(2, 2, device=device)
            layer.layer_idx = index
            self.layers.append(layer)
        self.hf_device_map = map


def test_a_model_on_one_device_is_not_looked_at(monkeypatch):
    monkeypatch.setattr("oasis_hf.fused.decoder_layers", lambda model: pytest.fail("looked at"))
    assert placing.layer_devices(Model(["cpu", "meta"], {"": "cpu"})) is None
    assert placing.layer_devices(nn.Linear(2, 2)) is None


def test_where_layers_compute_is_told_by_their_weights_or_by_what_brings_them():
    split = {"layers.0": "cpu", "layers.1": "disk"}
    assert placing.layer_devices(Model(["cpu", "cpu"], split)) is None
    offloaded = Model(["cpu", "meta"], split)
    offloaded.layers[1]._hf_hook = type("Hook", (), {"execution_device": "cpu"})
    assert placing.layer_devices(offloaded) is None  # it is brought to where the other one is
    offloaded.layers[1]._hf_hook = type("Hook", (), {"execution_device": 1})
    assert placing.layer_devices(offloaded) == [torch.device("cpu"), torch.device("cuda", 1)]


def split_store(capacity):
    """For three layers, the middle one elsewhere, in a pool of so many pages of 16 x 4 floats."""
    pool = PagePool(4, torch.float32, False, capacity * 2 * 16 * 4 * 4)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    return SplitStore(
        [cpu, meta, cpu], lambda layers, device, beside: HostStore(layers, 1, 2, 4, torch.float32, device, pool=pool)
    ), pool  # fmt: skip


def test_room_is_made_on_all_devices_or_on_none():
    store, pool = split_store(capacity=5)
    with pytest.raises(HostMemoryError):
        store.ensure([0], [16])  # 4 pages on one device, 2 on the other
    assert pool.pages_in_use == 0 and [part.blocks for part in store.parts.values()] == [[0], [0]]


def test_layers_have_their_own_pages_and_branches_share_them():
    store, pool = split_store(capacity=100)
    store.ensure([0], [20])
    kept = [torch.rand(2, 2, 20, 4) for _ in range(3)]
    for layer, (keys, values) in enumerate(kept):
        store.write(layer, 0, 0, keys, values)
    branch = store.fork()
    assert pool.pages_in_use == 12 and store.nbytes == 12 * pool.page_bytes
    for layer, (keys, values) in enumerate(kept):
        for one in (store, branch):
            got = one.read(layer, 0, 0, 20)
            assert torch.equal(got[0], keys) and torch.equal(got[1], values)
    store.truncate([16])
    assert pool.pages_in_use == 12
    del branch, one
    assert pool.pages_in_use == 6
    store.reset()
    assert store.nbytes == 0 and pool.pages_in_use == 0
