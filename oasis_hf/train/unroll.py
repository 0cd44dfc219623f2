"""The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2): a head drafts several steps ahead from its own
outputs, at many positions of packed texts at once, and each step has its loss."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..drafters.eagle3.head import Eagle3Head
from .attention import Attend, Reach, chosen, flex, merge, prepare


@dataclass
class Batch:
    """Texts packed one behind the other: N positions, of which R are learned from.

    Attributes:
        ids: `[N]`. positions: `[N]` in their own text. starts: `[N]` where their text starts in the pack.
        rows: `[R]` ascending, the positions t whose token t + 2 is guessed first. last: `[R]` the last position of
            their text. real: `[R]` bool, False for rows that only fill up.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    last: torch.Tensor
    real: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


@dataclass
class Teacher:
    """What the target says of a batch.

    Attributes:
        taps: `[N, taps * Ht]`. best: `[N]` its most likely next token, as an id of the draft vocabulary, -1 for none.
        logits: `[N, Vd]`, of the draft vocabulary.
    """

    taps: torch.Tensor
    best: torch.Tensor
    logits: torch.Tensor


@dataclass
class Unrolled:
    """loss: weighted sum over steps. losses, right: `[K]`, means over a step's rows, detached. tau: tokens a target
    pass that a chain of K drafts at these rows would give. count: rows of the first step."""

    loss: torch.Tensor
    losses: torch.Tensor
    right: torch.Tensor
    tau: torch.Tensor
    count: torch.Tensor


class Unroll:
    """Runs a head over batches. compile: fuse its pieces on CUDA.

    Args:
        embeddings: the target's, `[V, H]`, frozen.
        window: positions that a draft at position p sees: p - window + 1 to p.
    """

    def __init__(
        self, head: Eagle3Head, embeddings: torch.Tensor, window: int, steps: int, decay: float,
        attend: Attend | None = None, compile: bool | None = None,
    ) -> None:  # fmt: skip
        device = head.fc.weight.device
        self.head, self.embeddings, self.window, self.steps, self.decay = head, embeddings, window, steps, decay
        self.attend = attend or chosen(device)
        self.cuda = device.type == "cuda"
        fused = self.cuda if compile is None else compile
        self._project = _maybe_compiled(head.project, fused)
        self._finish = _maybe_compiled(head.finish, fused)
        self._merge = _maybe_compiled(merge, fused)
        self._loss = _maybe_compiled(self._step_loss, fused)

    def reach(self, batch: Batch, step: int) -> Reach:
        """What a draft `step` steps behind the rows sees of the keys that are made from the target's states."""
        low = torch.maximum(batch.starts[batch.rows], batch.rows + step - self.window + 1)
        reach = Reach(torch.minimum(low, batch.rows), batch.rows)  # a window shorter than the chain sees the row itself
        return prepare(reach, len(batch.ids)) if self.attend is flex else reach

    def outputs(self, batch: Batch, taps: torch.Tensor) -> list[torch.Tensor]:
        """The layer's output `[R, H]` of each step, as a drafter has it whose drafts are all right."""
        head, outs = self.head, list[torch.Tensor]()
        scale = head.config.head_dim**-0.5
        tokens = self._embed(batch.ids.roll(-1))
        query, keys, values, residual = self._project(tokens, head.fuse(_parts(taps, head)), batch.positions)
        query, residual = query[batch.rows], residual[batch.rows]
        own_keys: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        for step in range(self.steps):
            if step:
                token = self._embed(batch.ids[self._at(batch, step + 1)])
                position = batch.positions[batch.rows] + step
                query, own_key, own_value, residual = self._project(token, head.state(outs[-1]), position)
                own_keys.append(own_key)
                own_values.append(own_value)
            attended, total = self.attend(query, keys, values, self.reach(batch, step), scale)
            if step:
                attended = self._merge(query, attended, total, own_keys, own_values, scale)
            outs.append(self._finish(attended.flatten(1), residual))
        return outs

    def __call__(self, batch: Batch, teacher: Teacher) -> Unrolled:
        losses, right, counts = [], [], []
        alive = torch.ones_like(batch.real, dtype=torch.float32)
        tau = alive
        for step, out in enumerate(self.outputs(batch, teacher.taps)):
            at = self._at(batch, step + 1)
            valid = batch.real & (batch.rows + step + 2 <= batch.last)
            best = teacher.best[at]
            loss, hit = self._loss(out, teacher.logits[at], best, valid)
            count = valid.sum()
            losses.append(loss)
            right.append((hit & valid).sum() / count.clamp(min=1))
            counts.append(count)
            alive = alive * hit
            tau = tau + alive
        loss = sum((self.decay**k * value for k, value in enumerate(losses)), start=torch.zeros_like(losses[0]))
        whole = batch.real & (batch.rows + self.steps + 1 <= batch.last)
        mean = (tau * whole).sum() / whole.sum().clamp(min=1)
        return Unrolled(loss, torch.stack(losses).detach(), torch.stack(right), mean, counts[0])

    def _step_loss(
        self, out: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy against the target's distribution over the draft vocabulary, where its most likely token is
        among that; and where the head's own most likely token is the target's, `[R]` bool."""
        guess = self.head.logits(out).float()
        share = logits.float().softmax(-1)
        each = guess.logsumexp(-1) - (share * guess).sum(-1)
        counted = valid & (best >= 0)
        loss = torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)
        return loss, guess.detach().argmax(-1) == best

    def _at(self, batch: Batch, ahead: int) -> torch.Tensor:
        """Where the tokens `ahead` of the rows stand; of what lies behind a text, its last."""
        return torch.minimum(batch.rows + ahead, batch.last)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embeddings)


def autocast(device: torch.device) -> Any:
    """bfloat16 products on CUDA; weights and sums stay in float32."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _parts(taps: torch.Tensor, head: Eagle3Head) -> list[torch.Tensor]:
    if not torch.is_autocast_enabled(taps.device.type):
        taps = taps.to(head.fc.weight.dtype)
    return list(taps.chunk(len(head.config.taps), -1))


def _maybe_compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """Compiled, or as it is where that does not work here."""
    if not wanted:
        return function
    compiled = torch.compile(function, dynamic=False)
    working = [compiled]

    def call(*args: Any) -> Any:
        try:
            return working[0](*args)
        except torch._dynamo.exc.TorchDynamoException as error:  # type: ignore[attr-defined]
            if working[0] is function:
                raise
            warnings.warn(f"{getattr(function, '__name__', 'a piece')} runs uncompiled: {error}", stacklevel=2)
            working[0] = function
            return function(*args)

    return call
