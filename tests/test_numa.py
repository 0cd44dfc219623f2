"""On which NUMA node pinned pages are taken: the system's files and calls, and a pool that asks them."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from oasis_hf.store import PagePool, numa


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with two GPUs on nodes 1 and 0; returns what says its nodes."""
    told = tmp_path / "devices/system/node/has_memory"
    told.parent.mkdir(parents=True)
    told.write_text("0-1\n")
    for bus, node in ((0x18, 1), (0xDE, 0)):
        folder = tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    buses = [0x18, 0xDE, 0x44]
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[device.index], pci_device_id=0),
    )  # fmt: skip
    return told


def gpu(index):
    return torch.device("cuda", index)


def test_a_gpus_node_is_what_the_system_says(system):
    assert numa.nodes() == [0, 1]
    assert [numa.node_of(gpu(index)) for index in range(3)] == [1, 0, None]
    system.write_text("0,2-3\n")
    assert numa.nodes() == [0, 2, 3] and numa.node_of(gpu(0)) is None  # a node without memory
    system.write_text("0\n")
    assert numa.node_of(gpu(1)) is None
    system.unlink()
    assert numa.nodes() == [] and numa.node_of(gpu(1)) is None


class Driver:
    """In place of CUDA's runtime: registers anything. order: what happened."""

    def __init__(self, order):
        self.order = order

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.order.append(("pin", address, size))
        return 0


@pytest.fixture
def pinned(system, monkeypatch):
    """Makes a pool of pages that is pinned for GPUs, and says what it did in order."""
    order: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(order))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("oasis_hf.store.pages._unpin", lambda *args: None)
    monkeypatch.setattr("oasis_hf.store.pages._touch", lambda memory: order.append(("touch", memory.data_ptr())))
    monkeypatch.setattr(numa, "prefer", lambda *args: order.append(("prefer", *args)))

    def make(*devices):
        pool = PagePool(4, torch.float32, True, 1 << 20)
        pool.devices += devices
        pool.allocate(3)
        return pool, order

    return make


def test_memory_is_asked_of_the_gpus_node_before_it_is_touched(pinned, monkeypatch):
    pool, order = pinned(gpu(0))
    base = pool.pages.data_ptr()
    assert order == [("prefer", base, 4096, 1), ("touch", base), ("pin", base, 4096)]
    monkeypatch.setattr(numa, "node_at", lambda address: 1)
    assert pool.placement == "100% on NUMA node 1, the GPU's"
    monkeypatch.setattr(numa, "node_at", lambda address: None)
    assert pool.placement == "0% on NUMA node 1, the GPU's"


@pytest.mark.parametrize("devices", [(gpu(0), gpu(1)), (gpu(2),)], ids=["of both nodes", "not told"])
def test_memory_of_no_one_node_is_taken_as_it_comes(pinned, devices):
    pool, order = pinned(*devices)
    assert [what for what, *_ in order] == ["touch", "pin"]
    assert pool.placement == "on no NUMA node in particular"


def test_a_machine_with_one_node_asks_for_nothing(pinned, system):
    system.write_text("0\n")
    pool, order = pinned(gpu(0))
    assert [what for what, *_ in order] == ["touch", "pin"] and pool.placement == "on the only NUMA node"


def test_nothing_pinned_is_nowhere():
    assert PagePool(4, torch.float32, False, 1 << 20).placement is None


def test_the_systems_own_calls_do_what_they_say_or_nothing():
    memory = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
    have = numa.nodes()
    agreed = numa.prefer(bytes_.data_ptr(), len(bytes_), have[-1] if have else 0)
    bytes_.zero_()
    at = numa.node_at(bytes_.data_ptr())
    assert at in (*have, None)
    if agreed and at is not None:
        assert at == have[-1]
    assert not numa.prefer(bytes_.data_ptr(), len(bytes_), 1000)  # there is no such node


def test_a_machine_whose_calls_are_not_known_does_nothing(monkeypatch):
    monkeypatch.setattr(numa.platform, "machine", lambda: "sparc")
    assert not numa.prefer(0, 4096, 0) and numa.node_at(0) is None
