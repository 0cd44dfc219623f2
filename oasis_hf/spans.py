"""Named ranges for profilers (nvtx): what nsys shows of this package beside the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """What runs inside is `oasis: name` in a profile; nothing where no GPU is in use. A replayed step is one range: its
    kernels carry their own names."""
    if not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.nvtx.range_push(f"oasis: {name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
