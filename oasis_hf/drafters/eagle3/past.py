"""What a head keeps of each row: keys and values of its one layer, and the latest fused states."""

from __future__ import annotations

import torch

from ...config import TAIL
from .head import HeadConfig

KEPT = 16
"""Latest positions whose fused state is kept: after a crop by fewer tokens the next draft is as good as before it."""


class Past:
    """A ring of `window + KEPT` places a row, and behind it `TAIL` for a chain of drafts, which is forgotten.

    Every place knows the position of what stands in it, -1 for nothing, and a query sees by that alone; so rows may
    have holes, and what is undone is undone by its number. All stays where it is: a captured graph finds it again.

    Attributes:
        keys, values: `[B, KV heads, places, D]`, keys rotated. at: `[B, places]` int64.
        states: `[B, KEPT + 1, H]`, hidden inputs of first drafts, and a place for what is not kept. state_at:
            `[B, KEPT + 1]` int64.
    """

    def __init__(self, rows: int, config: HeadConfig, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.ring = window, window + KEPT
        shape = (rows, config.num_key_value_heads, self.ring + TAIL, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.at = torch.full((rows, self.ring + TAIL), -1, dtype=torch.int64, device=device)
        self.states = torch.zeros((rows, KEPT + 1, config.hidden_size), dtype=dtype, device=device)
        self.state_at = torch.full((rows, KEPT + 1), -1, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.at)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.at, self.states, self.state_at]

    def shipped(self) -> dict[str, torch.Tensor]:
        """Of one row, what later queries can see: keys and values `[KV heads, n, D]` at positions `[n]`, and states."""
        at = self.at[0, : self.ring]
        places = (at > at.max() - self.window).logical_and(at >= 0).nonzero()[:, 0]
        return {
            "keys": self.keys[0, :, places], "values": self.values[0, :, places], "at": at[places],
            "states": self.states[0], "state_at": self.state_at[0],
        }  # fmt: skip

    def admit(self, shipped: dict[str, torch.Tensor]) -> None:
        """The only row, empty, holds what another's `shipped` gave; nothing of a head of another shape."""
        keys, states = shipped.get("keys"), shipped.get("states")
        if keys is None or states is None or states.shape != self.states[0].shape:
            return
        if (keys.shape[0], keys.shape[2]) != (self.keys.shape[1], self.keys.shape[3]):
            return
        at = shipped["at"].to(self.at.device)[-self.ring :]
        keys, values = (
            shipped[name].to(self.keys)[:, -self.ring :].transpose(0, 1)[None] for name in ("keys", "values")
        )
        if len(at):
            self.write(keys, values, at[None], torch.ones_like(at, dtype=torch.bool)[None])
        self.states[0], self.state_at[0] = states.to(self.states), shipped["state_at"].to(self.state_at)

    def state(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fused states `[B, H]` of `positions` `[B]`, and which rows have theirs `[B]` bool."""
        index = (positions % KEPT)[:, None]
        known = (self.state_at.gather(1, index)[:, 0] == positions) & (positions >= 0)
        return self.states.gather(1, index[..., None].expand(-1, -1, self.states.shape[2]))[:, 0], known

    def remember(self, states: torch.Tensor, positions: torch.Tensor, real: torch.Tensor | None) -> None:
        """States `[B, q, H]` of ascending `positions` `[B, q]`, those where `real` `[B, q]` (None: all; real ones come
        first); the last `KEPT` of a row stay."""
        if real is not None:
            first = (real.sum(1, keepdim=True) - KEPT).clamp(min=0)
            index = first + torch.arange(min(KEPT, states.shape[1]), device=first.device)
            states = states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))
            positions, real = positions.gather(1, index), real.gather(1, index)
        states, positions = states[:, -KEPT:], positions[:, -KEPT:]
        place = positions % KEPT
        if real is not None:
            place, positions = torch.where(real, place, KEPT), torch.where(real, positions, -1)
        self.states.scatter_(1, place[..., None].expand(-1, -1, states.shape[2]), states)
        self.state_at.scatter_(1, place, positions)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, known: torch.Tensor,
        real: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """keys and values `[B, q, KV heads, D]` of `positions` `[B, q]`, `q` at most the ring; where `known` `[B, q]`
        is False their places hold nothing then, where `real` is False they are not written at all."""
        place = positions % self.ring
        if real is not None:
            place = torch.where(real, place, self.ring)  # the chain's: forgotten before the next one
        self._put(keys, values, place, torch.where(known, positions, -1))

    def _put(self, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor, at: torch.Tensor) -> None:
        wide = place[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        self.keys.scatter_(2, wide, keys.transpose(1, 2))
        self.values.scatter_(2, wide, values.transpose(1, 2))
        self.at.scatter_(1, place, at)

    def chain(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, step: int) -> None:
        """A draft's keys and values `[B, 1, KV heads, D]`, the `step`-th behind the first (from 0)."""
        place = torch.full_like(positions, self.ring + step)
        self._put(keys, values, place, positions)

    def forget_chain(self) -> None:
        self.at[:, self.ring :].fill_(-1)

    def mark(self, positions: torch.Tensor, known: torch.Tensor) -> None:
        """What stands at `positions` `[B, 1]` counts where `known` `[B, 1]`."""
        self.at.scatter_(1, positions % self.ring, torch.where(known, positions, -1))

    # -- what a cache does ----------------------------------------------------------------------------------------

    def crop(self, lengths: torch.Tensor) -> None:
        """Rows now have these lengths `[B]`. The last token's keys await the token behind it."""
        last = lengths.to(self.at.device)[:, None] - 1
        self.at.masked_fill_(self.at >= last, -1)
        self.state_at.masked_fill_(self.state_at > last, -1)

    def clear(self) -> None:
        self.at.fill_(-1)
        self.state_at.fill_(-1)

    def select(self, index: list[int]) -> None:
        self.keys, self.values, self.at = self.keys[index], self.values[index], self.at[index]
        self.states, self.state_at = self.states[index], self.state_at[index]

    def fork(self) -> "Past":
        other = object.__new__(Past)
        other.window, other.ring = self.window, self.ring
        other.keys, other.values, other.at = self.keys.clone(), self.values.clone(), self.at.clone()
        other.states, other.state_at = self.states.clone(), self.state_at.clone()
        return other

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)
