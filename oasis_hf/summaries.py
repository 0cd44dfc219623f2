"""Summaries of every closed block of a layer, on the model's device."""

from __future__ import annotations

import torch

from . import ops
from .config import OasisConfig

GROWTH = 8
"""Summaries grow by one part in this many at least."""


class Summaries:
    """`[B, H, N, P, 2, D]` in the model's dtype or int8, and `[B, H, N, P, 2]` float16 scales for int8.

    N grows by an eighth: summaries are what fills the device, so little may stand empty. Only closed blocks count; what
    stands behind them is left from a cropped future. With `fetch_ratio="auto"` there is `means` too, `[B, H, N]`
    float32: averages of each block's scores over steps (`sharing.smoothed`), negative where it never had one.

    Args:
        rows, heads, dim: B, H, D. dtype, device: the model's.
    """

    def __init__(
        self, config: OasisConfig, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        int8 = config.summary_dtype == "int8"
        shape = (rows, heads, 0, config.parts, 2, dim)
        self.vectors = torch.zeros(shape, dtype=torch.int8 if int8 else dtype, device=device)
        self.scales = torch.zeros(shape[:-1] if int8 else (0,), dtype=torch.float16, device=device)
        shares = config.fetch_ratio == "auto"
        self.means = torch.zeros((rows, heads, 0), device=device) if shares else None

    def ensure(self, blocks: int) -> None:
        """Room for `blocks` and one more, which takes the writes of rows that close nothing."""
        have = self.vectors.shape[2]
        if blocks + 1 > have:
            more = max(blocks + 1, have + max(have // GROWTH, GROWTH)) - have
            scales = _widen(self.scales, more) if self.scales.ndim > 1 else self.scales
            means = None if self.means is None else torch.nn.functional.pad(self.means, (0, more), value=-1.0)
            # All or none, should memory run out.
            self.vectors, self.scales, self.means = _widen(self.vectors, more), scales, means

    def summarize(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.summarize(keys, self.config.scorer, self.config.parts, self.config.summary_dtype == "int8")

    def write(self, row: int, block: int, keys: torch.Tensor) -> None:
        """Blocks `block` and on of a row. keys: `[H, n, 16, D]`."""
        vectors, scales = self.summarize(keys)
        self.vectors[row, :, block : block + keys.shape[1]] = vectors
        if scales.numel():
            self.scales[row, :, block : block + keys.shape[1]] = scales

    def close(self, keys: torch.Tensor, block: torch.Tensor, closing: torch.Tensor) -> None:
        """The open block of rows where `closing` `[B]`. keys: `[B, H, 16, D]`, block: `[B]`."""
        vectors, scales = self.summarize(keys)
        spare = self.vectors.shape[2] - 1
        index = torch.where(closing, block, spare)
        rows = torch.arange(len(block), device=block.device)
        self.vectors[rows, :, index] = vectors
        if scales.numel():
            self.scales[rows, :, index] = scales

    def score(
        self, query: torch.Tensor, closed: torch.Tensor, weights: torch.Tensor, scaling: float, blocks: int,
        reduction: str | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Scores `[B, H, blocks]` of the first `blocks` blocks: see `ops.reference.score`. reduction: None: the
        config's."""
        config = self.config
        scales = self.scales[:, :, :blocks] if self.scales.numel() else self.scales
        return ops.score(
            query, self.vectors[:, :, :blocks], scales, closed, weights, config.scorer, config.half_range,
            reduction or config.reduction, scaling, config.sink_blocks, config.recent_blocks,
        )  # fmt: skip

    def forget_from(self, block: torch.Tensor) -> None:
        """Averages of blocks at or beyond `block` `[B]` go: their content is no longer the row's."""
        if self.means is not None:
            at = torch.arange(self.means.shape[2], device=block.device)
            self.means.masked_fill_(at >= block[:, None, None], -1.0)

    def select_rows(self, index: torch.Tensor) -> None:
        self.vectors = self.vectors.index_select(0, index)
        if self.scales.ndim > 1:
            self.scales = self.scales.index_select(0, index)
        if self.means is not None:
            self.means = self.means.index_select(0, index)

    def fork(self) -> "Summaries":
        rows, heads, _, _, _, dim = self.vectors.shape
        other = Summaries(self.config, rows, heads, dim, self.vectors.dtype, self.vectors.device)
        other.vectors, other.scales = self.vectors.clone(), self.scales.clone()
        other.means = None if self.means is None else self.means.clone()
        return other

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.scales.nbytes + (0 if self.means is None else self.means.nbytes)


def _widen(tensor: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:2], more, *tensor.shape[3:]))), 2)
