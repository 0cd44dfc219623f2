"""What the frozen target says of packed texts: the states that the head reads, and its next tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .. import supported
from ..drafters import taps as hooks
from . import data, seam
from .attention import Reach, chosen, flex, prepare
from .unroll import Batch, Teacher

RUN = 8192
"""Positions whose logits over the whole vocabulary are made at a time."""


class Target:
    """Reads packs with the target.

    Args:
        model: any that `seam.check` allows. taps: layers whose input the head reads.
        ids: `[Vd]` ascending, the draft vocabulary.
    """

    def __init__(self, model: Any, taps: tuple[int, ...], ids: torch.Tensor) -> None:
        seam.check(model)
        self.model, self.taps = model, taps
        output = model.get_output_embeddings()
        self.weight, self.bias = output.weight.detach(), getattr(output, "bias", None)
        self.device = self.weight.device
        self.ids = ids.to(self.device)
        self.rank = torch.full((supported.text_config(model).vocab_size,), -1, device=self.device)
        self.rank[self.ids] = torch.arange(len(ids), device=self.device)
        self.store: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def bytes_each(self) -> int:
        """Of the cache, for a position."""
        return (len(self.taps) + 1) * self.weight.shape[1] * self.weight.element_size() + 4

    @torch.no_grad()
    def keep(self, samples: data.Samples, tokens: int, tick: Callable[[int], Any] = lambda count: None) -> None:
        """From now on what the target says of these samples is looked up. tick: told how many positions are done."""
        count, wide = len(samples.ids), self.weight.shape[1]
        taps = self.weight.new_zeros((count, len(self.taps) * wide))
        final, best = self.weight.new_zeros((count, wide)), torch.zeros(count, dtype=torch.int32, device=self.device)
        for pack in data.whole(samples, tokens):
            made, origin = data.batch(samples, pack, tokens, 128)
            real = sum(int(samples.lengths[i]) for i in pack.samples)
            where = origin[:real].to(self.device, non_blocking=True)
            a, b, c = self._read(made.to(self.device))
            taps[where], final[where], best[where] = a[:real], b[:real], c[:real].int()
            tick(real)
        self.store = taps, final, best

    @torch.no_grad()
    def teach(self, batch: Batch, origin: torch.Tensor | None = None) -> Teacher:
        """origin: where the positions come from in the samples that are kept."""
        if self.store is not None and origin is not None:
            taps, final, best = (part[origin] for part in self.store)
        else:
            taps, final, best = self._read(batch)
        logits = F.linear(final, self.weight[self.ids], None if self.bias is None else self.bias[self.ids])
        return Teacher(taps, self.rank[best.long()], logits)

    def _read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tapped states `[N, taps * Ht]`, the final norm's output `[N, Ht]`, the most likely next ids `[N]`."""
        attend, reaches = chosen(self.device), dict[int | None, Reach]()
        at = torch.arange(len(batch.ids), device=self.device)

        def handler(layer: int, q: Any, k: Any, v: Any, scale: float, window: int | None) -> torch.Tensor:
            if window not in reaches:
                low = batch.starts if window is None else torch.maximum(batch.starts, at - window + 1)
                reach = Reach(low, at)
                reaches[window] = prepare(reach, len(at)) if attend is flex else reach
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            out, _ = attend(q, k, v, reaches[window], scale)
            return out[None]

        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.model
        with seam.handled(self.model, handler), tapped(self.model, self.taps) as states:
            final = decoder(
                batch.ids[None], attention_mask=seam.no_mask(self.device), position_ids=batch.positions[None],
                use_cache=False,
            ).last_hidden_state[0]  # fmt: skip
        runs = (F.linear(final[i : i + RUN], self.weight, self.bias).argmax(-1) for i in range(0, len(final), RUN))
        return torch.cat([states[i][0] for i in self.taps], -1), final, torch.cat(list(runs))


@contextlib.contextmanager
def tapped(model: Any, taps: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
    """Inputs of these layers, by layer, after a forward."""
    states: dict[int, torch.Tensor] = {}

    def hook(index: int) -> Any:
        def keep(module: Any, args: Any, kwargs: Any) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]

        return keep

    places = hooks.places(model, taps)
    handles = [place.register_forward_pre_hook(hook(i), with_kwargs=True) for i, place in zip(taps, places)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
