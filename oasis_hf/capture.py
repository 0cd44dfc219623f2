"""What a few lines launch, as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .spans import span


def capture(
    stream: torch.cuda.Stream, pool: Any, device: torch.device, run: Callable[[], Any]
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What `run` launches as a graph, and what it returned. Nothing of it has run.

    Args:
        stream: what it is captured on. pool: handle of the memory that it shares with other graphs.
    """
    graph = torch.cuda.CUDAGraph()
    generator = _generator(device)
    kept = None if generator is None else generator.clone_state()
    _own_workspaces()
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with span("capture"), _nothing_collected(), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                # Ended properly if it can be; the first error is the one to tell.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                if generator is not None:  # else it takes the capture for one that goes on, and draws nothing more
                    generator.graphsafe_set_state(kept)
                raise
            graph.capture_end()
    finally:
        _own_workspaces()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, output


def _generator(device: torch.device) -> Any:
    """What draws random numbers on a device."""
    if device.type != "cuda":
        return None
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """No collection inside: what it frees may need calls that a capture does not allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _own_workspaces() -> None:
    """cuBLAS keeps a workspace a stream. What is captured gets one of its own, in the graph's memory: no other graph
    writes over it, and it goes with the graph."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
