"""The training loop: schedule, optimizer, checkpoints, and going on from one exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..drafters.eagle3.head import Eagle3Head
from . import data
from .config import TrainConfig, TrainError
from .features import Target
from .unroll import Unroll, autocast

STATE = "state.pt"

EVERY = 20
"""Steps between readings of the loss, each of which waits for the device."""


class Trainer:
    """Trains a head. What is random in it follows from the seed and the step alone.

    Attributes:
        step: steps done. epoch, index: the next pack. seconds: spent in training. history: a line every `EVERY` steps:
            step, loss, and per step of the chain losses and shares of right guesses, tokens a pass, learning rate.
        tokens_seen: positions learned from.
    """

    def __init__(self, head: Eagle3Head, target: Target, samples: data.Samples, config: TrainConfig) -> None:
        self.head, self.target, self.samples, self.config = head, target, samples, config
        self.unroll = Unroll(
            head, target.model.get_input_embeddings().weight.detach(), config.window, config.steps_ahead, config.decay
        )
        self.parameters = [p.requires_grad_(True) for p in head.parameters()]
        fused = target.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0, fused=fused
        )
        self.step = self.epoch = self.index = 0
        self.seconds, self.tokens_seen = 0.0, 0
        self.history: list[dict[str, Any]] = []

    def done(self) -> float:
        """Share of the training that is behind, by steps or by time, whichever is further."""
        by_steps = self.step / self.config.steps if self.config.steps else 0.0
        by_time = self.seconds / 60 / self.config.minutes if self.config.minutes else 0.0
        return max(by_steps, by_time)

    def rate(self, done: float) -> float:
        """The learning rate there: a linear rise, then a cosine down to `final_lr`."""
        config = self.config
        if done < config.warmup:
            return config.lr * max(done / config.warmup, 1e-2)
        way = min((done - config.warmup) / max(1 - config.warmup, 1e-9), 1.0)
        return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * way)))

    def train(
        self, tell: Callable[[dict[str, Any]], None], checkpoint: Callable[[], None], most: int | None = None,
        stop_after: float | None = None,
    ) -> None:  # fmt: skip
        """Until the budget is spent, or for `most` steps, or for `stop_after` minutes: the schedule knows nothing of
        these two. tell: given each line of the history."""
        config, device = self.config, self.target.device
        started, before, saved = time.monotonic(), self.seconds, time.monotonic()
        last = None if most is None else self.step + most
        end = float("inf") if stop_after is None else before + 60 * stop_after
        window: list[torch.Tensor] = []

        def going() -> bool:
            return self.done() < 1 and (last is None or self.step < last) and self.seconds < end

        while going():
            packs = data.packs(self.samples, config.tokens, config.rows, self.epoch, config.seed)
            if not packs:
                raise TrainError("There is nothing to learn from: every text is too short.")
            while self.index < len(packs) and going():
                window.append(self._one(packs[self.index]))
                self.step, self.index = self.step + 1, self.index + 1
                if self.step % EVERY == 0:
                    self._note(window)
                    tell(self.history[-1])
                    window = []
                if device.type == "cpu" or self.step % EVERY == 0:  # else only handing out work would be timed
                    self.seconds = before + time.monotonic() - started
                    if self.step % EVERY == 0 and time.monotonic() - saved > 60 * config.checkpoint_minutes:
                        checkpoint()
                        saved = time.monotonic()
            if self.index >= len(packs):
                self.epoch, self.index = self.epoch + 1, 0
        if window:
            self._note(window)
        self.seconds = before + time.monotonic() - started

    def _one(self, pack: data.Pack) -> torch.Tensor:
        """One step; what it says of itself, on the device."""
        config, device = self.config, self.target.device
        batch, origin = data.batch(self.samples, pack, config.tokens, config.rows)
        batch = batch.to(device)
        teacher = self.target.teach(batch, origin.to(device, non_blocking=True))
        with autocast(device):
            result = self.unroll(batch, teacher)
        self.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.done())
        self.optimizer.step()
        self.tokens_seen += sum(map(len, pack.rows))
        return torch.cat((result.loss.detach()[None], result.losses, result.right, result.tau[None]))

    def _note(self, window: list[torch.Tensor]) -> None:
        values, count = torch.stack(window).float().mean(0).tolist(), self.config.steps_ahead
        self.history.append({
            "step": self.step, "loss": values[0], "losses": values[1 : count + 1],
            "right": values[count + 1 : 2 * count + 1], "tau": values[-1], "lr": self.rate(self.done()),
            "epoch": self.epoch,
        })  # fmt: skip
        if not math.isfinite(values[0]):
            raise TrainError(f"The loss is {values[0]} at step {self.step}: try a lower --lr.")

    def state(self, compact: bool = False) -> dict[str, Any]:
        """All that going on exactly needs, with the head. compact: two thirds of the size, since the optimizer's means
        are in bfloat16; going on is then exact but for that."""
        optimizer = self.optimizer.state_dict()
        if compact:
            means = ("exp_avg", "exp_avg_sq")
            optimizer["state"] = {
                i: {name: x.bfloat16() if name in means else x for name, x in one.items()}
                for i, one in optimizer["state"].items()
            }
        names = ("step", "epoch", "index", "seconds", "tokens_seen", "history")
        return {
            "head": self.head.state_dict(),
            "optimizer": optimizer,
            "config": self.config.to_dict(),
            **{name: getattr(self, name) for name in names},
        }

    def save(self, folder: Path, compact: bool = False) -> None:
        unfinished = folder / (STATE + ".part")
        torch.save(self.state(compact), unfinished)
        unfinished.replace(folder / STATE)

    def load(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("step", "epoch", "index", "seconds", "tokens_seen", "history"):
            setattr(self, name, state[name])


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state that `Trainer.save` wrote, None where there is none. Raises `TrainError` if it is damaged."""
    if not (folder / STATE).is_file():
        return None
    try:
        return torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises has many types
        raise TrainError(f"Can't read the checkpoint {folder / STATE}: {error}") from error
