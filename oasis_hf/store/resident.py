"""The full KV on the model's own device, in one plain tensor a layer: the comparison that shows that where a block
lives never changes the result. No pages and no table, so it also checks the host store's book-keeping."""

from __future__ import annotations

import torch

from ..config import BLOCK
from ..ops.reference import place_blocks
from .base import BlockStore
from .host import blocks_of


class ResidentStore(BlockStore):
    """Blocks `[layers, B, H, N, 2, 16, D]` on `device`, grown by doubling.

    Args: as `HostStore`, without pages.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = torch.zeros((layers, rows, heads, 0, 2, BLOCK, head_dim), dtype=dtype, device=device)
        self._held = [0] * rows

    def ensure(self, old: list[int], new: list[int]) -> None:
        want, have = max(map(blocks_of, new)), self.blocks.shape[3]
        if want > have:
            grown = self.blocks.new_zeros((*self.blocks.shape[:3], max(want, 2 * have), *self.blocks.shape[4:]))
            grown[:, :, :, :have] = self.blocks
            self.blocks = grown
        self._held = list(map(blocks_of, new))

    def _tokens(self, layer: int, row: int) -> torch.Tensor:
        """`[H, N, 2, 16, D]` view."""
        return self.blocks[layer, row]

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        position = torch.arange(start, start + keys.shape[1], device=keys.device)
        both = torch.stack((keys, values), 2).to(self.blocks.dtype)
        self._tokens(layer, row)[:, position // BLOCK, :, position % BLOCK] = both.transpose(0, 1)

    def append(
        self, layer: int, lengths: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, some: bool = False
    ) -> None:  # fmt: skip
        rows = torch.arange(len(lengths), device=lengths.device)
        if some:
            rows = rows[lengths >= 0]
        both = torch.stack((keys, values), 2).to(self.blocks.dtype)[rows]  # [n, H, 2, D]
        self.blocks[layer][rows, :, lengths[rows] // BLOCK, :, lengths[rows] % BLOCK] = both

    def read(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._tokens(layer, row).transpose(1, 2).flatten(2, 3)[:, :, start:stop]
        return both[:, 0], both[:, 1]

    def gather(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, plan_block: torch.Tensor, plan_slot: torch.Tensor
    ) -> None:
        index = plan_block.clamp(min=0)[..., None, None, None].expand(-1, -1, -1, *self.blocks.shape[4:])
        place_blocks(keys, values, self.blocks[layer].gather(2, index).to(keys.dtype), plan_block, plan_slot)

    def truncate(self, new: list[int]) -> None:
        self._held = list(map(blocks_of, new))

    def select_rows(self, index: list[int]) -> None:
        self.blocks = self.blocks[:, index].contiguous()
        self._held = [self._held[i] for i in index]

    def fork(self) -> "ResidentStore":
        layers, rows, heads, _, _, _, dim = self.blocks.shape
        other = ResidentStore(layers, rows, heads, dim, self.blocks.dtype, self.blocks.device)
        other.blocks, other._held = self.blocks.clone(), list(self._held)
        return other

    def reset(self) -> None:
        self._held = [0] * len(self._held)

    @property
    def nbytes(self) -> int:
        layers, _, heads = self.blocks.shape[:3]
        return layers * heads * sum(self._held) * self.blocks[0, 0, 0, :1].numel() * self.blocks.element_size()
