"""Prefill/decode disaggregation: a staging pool of pages, one-sided reads of them, the channel that controls both.

Names are imported when they are asked for: the pool server's process needs neither torch nor transformers, and a
restart would wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "errors": ("Corrupt", "DeadlineExceeded", "DisaggError", "PeerLost", "PoolFull", "Refused", "StaleLease"),
    "transport": ("Engine", "Lease", "Memory", "Peer", "Read", "Runs", "merged"),
    "wire": ("Tls",),
    "control": ("Control", "Offer", "Terms"),
    "staging": ("StagingPool",),
    "poolserver": ("PoolServer",),
    "inprocess": ("InProcessEngine", "LocalLink"),
    "tcp": ("TcpEngine",),
    "nixl": ("NixlEngine",),
    "link": ("Link",),
    "prefill": ("PrefillWorker",),
    "node": ("PrefillNode",),
    "decode": ("PrefillClient", "Prefilled", "from_prefill"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
