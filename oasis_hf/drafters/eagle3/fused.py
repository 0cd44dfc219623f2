"""A draft's arithmetic in pieces that a captured step compiles: norms, RoPE, masks and the choice of a token (issue C).

What writes to the rows' past stays as it is, since compiled it would copy the past; so do the products.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...fused import SHAPES, first_line
from .head import Eagle3Head

logger = logging.getLogger(__name__)


def fuse(head: Eagle3Head, taps: list[torch.Tensor]) -> torch.Tensor:
    return head.fuse(taps)


def project(
    head: Eagle3Head, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`head.project` of token ids. weight: the target's embeddings, where the head has none."""
    return head.project(head.embed(tokens, weight), hidden, positions)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor, positions: torch.Tensor,
    window: int,
) -> torch.Tensor:  # fmt: skip
    """One query a row over its past. Two products with a softmax between them, since attention kernels give a KV head
    of one row a single multiprocessor, which takes four times as long.

    Args:
        query: `[B, 1, heads, D]` at `positions` `[B, 1]`, which sees the window that ends there. keys, values:
            `[B, KV heads, places, D]`. at: `[B, places]`, what stands where.

    Returns:
        `[B, 1, heads * D]`.
    """
    rows, heads, _, dim = keys.shape
    # Before a row's first token there is nothing: it sees what is empty, so that no output is nan.
    seen = (at >= positions.clamp(max=0)) & (at <= positions) & (at > positions - window)
    grouped = query.reshape(rows, heads, -1, dim)  # one query's heads as queries: they see the same
    scores = (grouped @ keys.transpose(-1, -2)).float() / math.sqrt(dim)
    shares = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    return (shares.to(values.dtype) @ values).reshape(rows, 1, -1)


def finish(
    head: Eagle3Head, attended: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., Vd]` logits and the state for the next of a chain. weight: the target's head, where there is no own."""
    output = head.finish(attended, residual)
    return head.logits(output, weight), head.state(output)


def best(head: Eagle3Head, logits: torch.Tensor) -> torch.Tensor:
    """The target's ids of the highest logits."""
    return head.target_ids(logits.argmax(-1))


@functools.cache
def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(piece, dynamic=False, fullgraph=True)


class Pieces:
    """Runs pieces as they are, or compiled inside `compiled`.

    Attributes:
        failed: why they can't be compiled, or None.
    """

    def __init__(self) -> None:
        self.failed: str | None = None
        self._on = False

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        self._on = self.failed is None
        limits = {"recompile_limit": SHAPES, "accumulated_recompile_limit": 8 * SHAPES}
        try:
            with torch._dynamo.config.patch(limits):
                yield
        finally:
            self._on = False

    def run(self, piece: Callable[..., Any], *args: Any) -> Any:
        if self._on:
            try:
                return _compiled(piece)(*args)
            except Exception as error:  # dynamo and inductor raise what they like
                self._on, self.failed = False, f"{type(error).__name__}: {first_line(error)}"
                logger.warning("a draft head's steps are captured as they are, not compiled: %s", self.failed)
        return piece(*args)
