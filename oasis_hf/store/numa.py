"""Which NUMA node memory lies on: a GPU reads pinned pages of its own node's memory faster than the other's.

By Linux's own calls; where there is one node, or the system does not allow them, nothing is done.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import torch

_SYSTEM = Path("/sys")
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of `mbind` and `get_mempolicy` by machine."""

_PREFERRED = 1  # what the node has no room for goes elsewhere
_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR


def nodes() -> list[int]:
    """Nodes that have memory; empty where the system does not tell."""
    try:
        told = (_SYSTEM / "devices/system/node/has_memory").read_text().strip()
        ranges = [part.split("-") for part in told.split(",") if part]
        return [node for ends in ranges for node in range(int(ends[0]), int(ends[-1]) + 1)]
    except (OSError, ValueError):
        return []


def node_of(device: torch.device) -> int | None:
    """A CUDA device's node; None where the system does not tell, or there is one node alone."""
    if len(nodes()) < 2:
        return None
    try:
        own: Any = torch.cuda.get_device_properties(device)
        name = f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
        node = int((_SYSTEM / "bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError, AttributeError):
        return None
    return node if node in nodes() else None


def _call(which: int, *arguments: object) -> bool:
    numbers = _CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *arguments) == 0


def prefer(address: int, size: int, node: int) -> bool:
    """Memory that nothing has touched yet will be taken from this node while it has any. Returns whether the system
    agreed. address: of a page; size: bytes."""
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    return _call(
        0, ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(16 * 64),
        ctypes.c_uint(0),
    )  # fmt: skip


def node_at(address: int) -> int | None:
    """The node of a page that was touched; None where the system does not tell."""
    node = ctypes.c_int(-1)
    asked = ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address), ctypes.c_ulong(_NODE_OF_ADDRESS)
    return node.value if _call(1, *asked) else None
