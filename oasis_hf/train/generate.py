"""The target's own answers to many prompts, in a batch whose rows are refilled as they end.

A row's keys and values stand in a slot of fixed size, so one step is always the same launches: on CUDA it is captured
once and replayed. A step takes each row's newest token to its place, attends, and samples inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import supported
from . import seam
from .config import TrainError

LOOP = 96
"""A text of which the last so many tokens repeat themselves with a period of a third of that or less goes nowhere."""

_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What attends with a mask: cuDNN would plan anew for each shape."""

CHECK = 16
"""Steps between looks at which rows have ended."""


@dataclass
class Sample:
    """ids of a text, and where the response starts in it (0: all of it is learned from)."""

    ids: list[int]
    start: int


@dataclass
class _Slots:
    """Device tensors of R rows: `token`, `at` (its position), `made` (tokens of the response), `temperature`, `ended`,
    all `[R]`; `out` `[R, new]`; keys and values `[layers][R, H, places, D]`."""

    token: torch.Tensor
    at: torch.Tensor
    made: torch.Tensor
    temperature: torch.Tensor
    ended: torch.Tensor
    out: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def make(cls, model: Any, rows: int, places: int, new: int) -> "_Slots":
        config, weight = supported.text_config(model), model.get_input_embeddings().weight
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (rows, getattr(config, "num_key_value_heads", None) or config.num_attention_heads, places, dim)
        kv = [weight.new_zeros(shape, requires_grad=False) for _ in range(2 * config.num_hidden_layers)]
        count = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        return cls(
            count, count.clone(), count.clone(), torch.zeros(rows, device=weight.device), count == 0,
            torch.zeros((rows, new + 1), dtype=torch.int64, device=weight.device), kv[::2], kv[1::2],
        )  # fmt: skip


class Generator:
    """Answers prompts with a model, in `rows` slots of `places` tokens, `new` of them for the response.

    Sampling draws from the device's default generator (`torch.manual_seed`).
    """

    def __init__(self, model: Any, rows: int, places: int, new: int) -> None:
        seam.check(model)
        self.model, self.rows, self.places, self.new = model, rows, places, new
        self.device = model.get_input_embeddings().weight.device
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
        self.ends = torch.tensor(ends, dtype=torch.int64, device=self.device)
        self.end_ids = set(map(int, ends))
        self.slots = _Slots.make(model, rows, places, new)
        self._mask = seam.no_mask(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], temperatures: list[float], stop: Callable[[], bool] = lambda: False,
        done: Callable[[Sample], None] = lambda sample: None,
    ) -> list[Sample | None]:  # fmt: skip
        """Responses to prompts in their order; None for those that were not reached.

        Args:
            temperatures: of each prompt's response; 0: greedy.
            stop: asked now and then; once it is true no more prompts are begun and rows under way are cut as they are.
            done: called with each sample.
        """
        for prompt in prompts:
            if not 2 <= len(prompt) <= self.places - self.new:
                raise TrainError(f"A prompt of {len(prompt)} tokens does not fit a slot of {self.places}.")
        results: list[Sample | None] = [None] * len(prompts)
        holds: list[int | None] = [None] * self.rows
        self.slots.ended.fill_(True)
        waiting, late = 0, False
        least = max(1, self.rows // 8)  # not one by one: a prefill is a forward of its own
        while True:
            late = late or stop()
            free = [row for row, held in enumerate(holds) if held is None]
            if not late and waiting < len(prompts) and len(free) >= min(least, len(prompts) - waiting):
                taken = list(range(waiting, min(waiting + len(free), len(prompts))))
                self._fill(free[: len(taken)], [prompts[i] for i in taken], [temperatures[i] for i in taken])
                for row, i in zip(free, taken):
                    holds[row] = i
                waiting += len(taken)
            if all(held is None for held in holds):
                return results
            for _ in range(CHECK):
                self._step()
            self.slots.ended |= self._looping()
            ended, made = torch.stack((self.slots.ended.long(), self.slots.made)).cpu()
            over = [(row, i) for row, i in enumerate(holds) if i is not None and (ended[row] or late)]
            index = torch.tensor([row for row, _ in over], device=self.device, dtype=torch.int64)
            for (row, i), out in zip(over, self.slots.out[index].cpu()):
                response = self._cut(out[: int(made[row])].tolist())
                if response:
                    sample = results[i] = Sample(prompts[i] + response, len(prompts[i]))
                    done(sample)
                holds[row] = None
            if late:
                self.slots.ended.fill_(True)

    def _cut(self, response: list[int]) -> list[int]:
        """Without what comes behind an end, and without the second and third time of a loop."""
        end = next((i for i, token in enumerate(response) if token in self.end_ids), None)
        if end is not None:
            return response[: end + 1]
        return response[: loop_start(response)]

    def _fill(self, rows: list[int], prompts: list[list[int]], temperatures: list[float]) -> None:
        """New prompts in these rows: all but the last token of each is run, by length, in few forwards."""
        slots, device = self.slots, self.device
        order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
        start = 0
        while start < len(order):
            stop = start + 1
            width = len(prompts[order[start]])
            while stop < len(order):
                wider = len(prompts[order[stop]])
                if wider * (stop + 1 - start) > 131072 or wider > 1.25 * len(prompts[order[start]]) + 32:
                    break
                width, stop = wider, stop + 1
            part = order[start:stop]
            ids = torch.zeros((len(part), max(width - 1, 1)), dtype=torch.int64)
            for line, i in enumerate(part):
                ids[line, : len(prompts[i]) - 1] = torch.tensor(prompts[i][:-1])
            self._prefill(torch.tensor([rows[i] for i in part], device=device), ids.to(device))
            start = stop
        index = torch.tensor(rows, device=device)
        slots.token[index] = torch.tensor([prompt[-1] for prompt in prompts], device=device)
        slots.at[index] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        slots.temperature[index] = torch.tensor(temperatures, device=device)
        slots.made[index] = 0
        slots.ended[index] = False

    def _prefill(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """ids `[n, T]`, padded at the right: what is written behind a prompt's end is overwritten before it is seen."""
        slots, width = self.slots, ids.shape[1]

        def attend(layer: int, q: Any, k: Any, v: Any, scale: float, window: int | None) -> torch.Tensor:
            slots.keys[layer][rows, :, :width] = k
            slots.values[layer][rows, :, :width] = v
            mask = None
            if window is not None and window < width:
                at = torch.arange(width, device=q.device)
                mask = (at <= at[:, None]) & (at > at[:, None] - window)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
            return out.transpose(1, 2)

        positions = torch.arange(width, device=self.device)[None]
        with seam.handled(self.model, attend):
            self.model(ids, attention_mask=self._mask, position_ids=positions, use_cache=False, logits_to_keep=1)

    def _forward(self) -> None:
        """One token of every row. Rows that have ended repeat their last step, into the same place."""
        slots = self.slots
        at = slots.at
        place = torch.arange(self.places, device=self.device)
        seen = place <= at[:, None]

        def attend(layer: int, q: Any, k: Any, v: Any, scale: float, window: int | None) -> torch.Tensor:
            keys, values = slots.keys[layer], slots.values[layer]
            wide = at[:, None, None, None].expand(-1, keys.shape[1], 1, keys.shape[3])
            keys.scatter_(2, wide, k)
            values.scatter_(2, wide, v)
            mask = seen if window is None else seen & (place > at[:, None] - window)
            grouped = q.reshape(len(at), keys.shape[1], -1, keys.shape[3])  # a group's heads as queries of one head
            with sdpa_kernel(_MASKED):
                out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scale)
            return out.reshape(len(at), 1, -1, keys.shape[3])

        with seam.handled(self.model, attend):
            given = dict(attention_mask=self._mask, position_ids=at[:, None], use_cache=False)
            logits = self.model(slots.token[:, None], **given).logits[:, -1].float()
        # The largest of logits and Gumbel noise times the temperature is a sample at that temperature.
        noise = torch.empty_like(logits).exponential_().log_()
        token = (logits - noise * slots.temperature[:, None]).argmax(-1)
        token = torch.where(slots.ended, slots.token, token)
        slots.out.scatter_(1, torch.where(slots.ended, self.new, slots.made)[:, None], token[:, None])
        going = (~slots.ended).long()
        slots.token.copy_(token)
        slots.at.add_(going)
        slots.made.add_(going)
        slots.ended |= (token[:, None] == self.ends).any(1) | (slots.made >= self.new)

    def _step(self) -> None:
        if self.device.type != "cuda":
            self._forward()
            return
        if self._graph is None:
            kept = [x.clone() for x in self._state()]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward()  # libraries set themselves up
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._forward()
            for tensor, before in zip(self._state(), kept):
                tensor.copy_(before)
        self._graph.replay()

    def _state(self) -> list[torch.Tensor]:
        """What a step changes and must find unchanged after a capture; keys and values are written alike again."""
        slots = self.slots
        return [slots.token, slots.at, slots.made, slots.ended, slots.out]

    def _looping(self) -> torch.Tensor:
        """Rows whose last `LOOP` tokens repeat themselves, `[R]` bool."""
        slots = self.slots
        if self.new < LOOP:
            return torch.zeros_like(slots.ended)
        index = (slots.made[:, None] - LOOP).clamp(min=0) + torch.arange(LOOP, device=self.device)
        return (slots.made >= LOOP) & repeats(slots.out.gather(1, index))


def repeats(window: torch.Tensor) -> torch.Tensor:
    """Which rows of `[B, LOOP]` ids have a period of `LOOP // 3` or less, `[B]` bool."""
    found = torch.zeros(len(window), dtype=torch.bool, device=window.device)
    for period in range(1, LOOP // 3 + 1):
        found |= (window[:, period:] == window[:, :-period]).all(1)
    return found


def loop_start(response: list[int]) -> int:
    """How much of a response is kept: all, or up to the second round of a loop that lasts for `LOOP` tokens."""
    if len(response) < LOOP:
        return len(response)
    windows = torch.tensor(response).unfold(0, LOOP, 1)
    found = repeats(windows).nonzero()
    return len(response) if not len(found) else int(found[0]) + LOOP // 3
