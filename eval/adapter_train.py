"""The training of `adapter.py`: rows made ahead by worker processes, schedules, steps, checkpoints."""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import adapted
import prompts
import torch
import torch.nn.functional as F
from retrieval import TASKS

STATE = "state.pt"
HELD_OUT = 1 << 40
"""Seeds from here on are never trained on."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run.

    Attributes:
        seconds, steps: how long to train; None: no limit of that kind. The schedules go by whichever is further.
        tokens: of a step. at_once: of a forward; a step has as many as it takes. longest: of a row.
        rate: the highest learning rate. warmup: share of the run in which it rises. final: what is left of it at last.
        check: steps between readings of the held-out rows. held_out: their number.
    """

    seconds: float | None
    steps: int | None
    tokens: int = 32768
    at_once: int = 32768
    longest: int = 8192
    rank: int = 24
    alpha: int = 48
    rate: float = 2e-3
    warmup: float = 0.03
    final: float = 0.05
    clip: float = 1.0
    seed: int = 0
    check: int = 100
    held_out: int = 24
    tasks: tuple[str, ...] = tuple(TASKS)


CURRICULUM = ((0.06, {1: 1.0}), (0.16, {1: 0.4, 2: 0.6}), (0.32, {2: 0.4, 4: 0.6}), (0.45, {2: 0.2, 4: 0.4, 8: 0.4}),
              (1.0, {1: 0.05, 2: 0.15, 4: 0.35, 8: 0.45}))  # fmt: skip
"""Up to which share of the run which lengths come how often, in eighths of the longest."""


LEAST = 256
"""Tokens of a row."""


def length_at(done: float, longest: int, rng: random.Random) -> int:
    """A row's length when `done` of the run is behind."""
    mix = next((mix for end, mix in CURRICULUM if done < end), CURRICULUM[-1][1])
    eighths = rng.choices(list(mix), weights=list(mix.values()))[0]
    return max(longest * eighths // 8, min(longest, LEAST))


@dataclass
class Batch:
    """Rows of one length. ids: `[B, T]` int32, filled up behind a row's end. learned: `[B, T]` bool. answers: row,
    first and last place, task."""

    ids: torch.Tensor
    learned: torch.Tensor
    answers: list[tuple[int, int, int, str]]


def make(chat: prompts.Chat, first_seed: int, length: int, tokens: int, tasks: tuple[str, ...]) -> Batch:
    """As many rows of `length` as `tokens` hold, one at least. The same arguments make the same batch."""
    rows = [prompts.row(chat, first_seed + i, length, list(tasks)) for i in range(max(1, tokens // length))]
    ids = torch.full((len(rows), length), chat.end, dtype=torch.int32)
    learned = torch.zeros((len(rows), length), dtype=torch.bool)
    answers = []
    for at, one in enumerate(rows):
        ids[at, : len(one.ids)] = torch.tensor(one.ids, dtype=torch.int32)
        learned[at, : len(one.ids)] = torch.tensor(one.learned)
        answers += [(at, first, last, task) for first, last, task in one.answers]
    return Batch(ids, learned, answers)


_chat: prompts.Chat | None = None


def _start(tokenizer: Any) -> None:
    global _chat
    torch.set_num_threads(1)
    _chat = prompts.Chat(tokenizer)


def _make(*arguments: Any) -> Batch:
    assert _chat is not None
    return make(_chat, *arguments)


class Ahead:
    """Batches in the order in which they were asked for, made by processes, or by this one where `workers` is 0."""

    def __init__(self, tokenizer: Any, workers: int) -> None:
        self.waiting: deque[Future[Batch] | tuple[Any, ...]] = deque()
        self.depth = 3 * workers if workers else 1
        self.pool, self.chat = None, None
        if workers:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(workers, context, _start, (tokenizer,))
        else:
            self.chat = prompts.Chat(tokenizer)

    def ask(self, *arguments: Any) -> None:
        self.waiting.append(self.pool.submit(_make, *arguments) if self.pool else arguments)

    def next(self) -> Batch:
        one = self.waiting.popleft()
        if isinstance(one, Future):
            return one.result()
        assert self.chat is not None
        return make(self.chat, *one)

    def wait(self) -> None:
        """Until the next batch is there."""
        if self.waiting and isinstance(self.waiting[0], Future):
            self.waiting[0].result()

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)


class Trainer:
    """Trains the adapter of a peft model whose weights are in the model's dtype: float32 copies of them are what the
    optimizer moves, so that small steps are not lost to rounding.

    Args:
        model: of `adapted.wrapped`. tokenizer: with a chat template. workers: processes that make rows.

    Attributes:
        step: steps done. made: batches asked for, whose number is their seed. seconds: spent in training. seen,
        learned: tokens read, and learned from. history: a line a check.
    """

    def __init__(self, model: Any, tokenizer: Any, plan: Plan, workers: int) -> None:
        self.model, self.plan = model, plan
        self.inner = model.get_base_model()
        self.device = self.inner.get_input_embeddings().weight.device
        self.weights = adapted.weights(model)
        self.masters = [p.detach().float().clone() for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.ahead = Ahead(tokenizer, workers)
        self.held = [
            make(prompts.Chat(tokenizer), HELD_OUT + 1000 * i, length, 1, (plan.tasks[i % len(plan.tasks)],))
            for i, length in enumerate(self._held_lengths())
        ]
        self.step = self.made = self.seen = self.learned = 0
        self.seconds = 0.0
        self.losses: list[torch.Tensor] = []
        self.history: list[dict[str, Any]] = []

    def _held_lengths(self) -> Iterator[int]:
        for i in range(self.plan.held_out):
            yield max(self.plan.longest // (4, 2, 1)[i % 3], min(self.plan.longest, LEAST))

    def done(self) -> float:
        """Share of the training that is behind."""
        plan = self.plan
        by_steps = self.step / plan.steps if plan.steps else 0.0
        return max(by_steps, self.seconds / plan.seconds if plan.seconds else 0.0)

    def rate(self, done: float) -> float:
        """A linear rise, then a cosine down to `final` of the highest."""
        plan = self.plan
        if done < plan.warmup:
            return plan.rate * max(done / plan.warmup, 0.02)
        way = min((done - plan.warmup) / (1 - plan.warmup), 1.0)
        return plan.rate * (plan.final + (1 - plan.final) * 0.5 * (1 + math.cos(math.pi * way)))

    def prime(self) -> None:
        """Ask for the first batches and wait for one: starting workers is no part of the training's time."""
        self._fill()
        self.ahead.wait()

    def _fill(self) -> None:
        while len(self.ahead.waiting) < self.ahead.depth:
            self._ask()

    def train(self, tell: Callable[[dict[str, Any]], None], stop: float = math.inf) -> None:
        """Until the plan is done, or the machine's clock passes `stop`."""
        began, before = time.monotonic(), self.seconds
        last = time.monotonic()
        while self.done() < 1 and time.time() < stop:
            self._fill()
            self._one()
            self.seconds = before + time.monotonic() - began
            over = self.done() >= 1 or time.time() >= stop
            if self.step % self.plan.check == 0 or over:
                line = self._line(time.monotonic() - last)
                if not math.isfinite(line["loss"]):
                    raise SystemExit(f"The loss is {line['loss']} at step {self.step}: try a lower --rate.")
                self.history.append(line)
                tell(line)
                last = time.monotonic()
                self.seconds = before + last - began

    def _ask(self) -> None:
        plan = self.plan
        length = length_at(self.done(), plan.longest, random.Random(f"length {plan.seed} {self.made}"))
        self.ahead.ask((plan.seed << 32) + self.made * 1000, length, min(plan.tokens, plan.at_once), plan.tasks)
        self.made += 1

    def _one(self) -> None:
        """One optimizer step: forwards until the step has its tokens."""
        plan, tokens, parts = self.plan, 0, []
        while tokens < plan.tokens:
            if not self.ahead.waiting:
                self._ask()
            parts.append(self.ahead.next())
            tokens += parts[-1].ids.numel()
        count = sum(int(part.learned.sum()) for part in parts)
        total = torch.zeros((), device=self.device)
        for part in parts:
            loss, _ = self._losses(part)
            loss = loss.sum() / count
            loss.backward()
            total += loss.detach()
        for master, p in zip(self.masters, self.weights):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, plan.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.done())
        self.optimizer.step()
        self._show()
        self.step, self.seen, self.learned = self.step + 1, self.seen + tokens, self.learned + count
        self.losses.append(total)

    @torch.no_grad()
    def _show(self) -> None:
        """The model gets what the optimizer has."""
        for master, p in zip(self.masters, self.weights):
            p.copy_(master)

    def _losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every learned token, in order: its loss, and whether it is the model's own choice. Only their logits are
        made. Rows have no padding in front and nothing is learned behind their end, so causal attention needs no mask.
        """
        ids, learned = batch.ids.to(self.device, torch.int64), batch.learned.to(self.device)
        states = self.inner.model(input_ids=ids, use_cache=False).last_hidden_state
        where = learned[:, 1:]
        logits = self.inner.lm_head(states[:, :-1][where]).float()
        wanted = ids[:, 1:][where]
        return F.cross_entropy(logits, wanted, reduction="none"), logits.detach().argmax(-1) == wanted

    @torch.no_grad()
    def exact(self) -> dict[str, float]:
        """Share of the held-out answers that greedy decoding would give to the letter, by task: an answer is exact
        where every token is the model's choice behind the true ones."""
        right: dict[str, list[bool]] = {}
        for batch in self.held:
            _, same = self._losses(batch)
            flags = torch.ones(batch.ids.shape, dtype=torch.bool)
            flags[:, 1:][batch.learned[:, 1:]] = same.cpu()
            for row, first, last, task in batch.answers:
                right.setdefault(task, []).append(bool(flags[row, first : last + 1].all()))
        return {task: sum(own) / len(own) for task, own in sorted(right.items())}

    def _line(self, passed: float) -> dict[str, Any]:
        losses, self.losses = torch.stack(self.losses).tolist() if self.losses else [math.nan], []
        exact = self.exact()
        speed = len(losses) * self.plan.tokens / passed if passed > 0 else 0.0
        mean = sum(exact.values()) / max(len(exact), 1)
        return {"step": self.step, "seconds": round(self.seconds, 1), "loss": sum(losses) / len(losses),
                "last_loss": losses[-1], "rate": self.rate(self.done()), "exact": exact, "mean_exact": mean,
                "tokens_a_second": round(speed)}  # fmt: skip

    # -- going on -----------------------------------------------------------------------------------------------------

    NAMES = ("step", "seconds", "seen", "learned", "history")

    def save(self, folder: Path) -> None:
        """All that going on needs. Batches that were asked for and not taken are asked for again."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"masters": self.masters, "optimizer": self.optimizer.state_dict(), "plan": asdict(self.plan),
                 "made": self.made - len(self.ahead.waiting),
                 **{name: getattr(self, name) for name in self.NAMES}}  # fmt: skip
        unfinished = folder / (STATE + ".part")
        torch.save(state, unfinished)
        unfinished.replace(folder / STATE)

    def load(self, folder: Path) -> None:
        """Raises `SystemExit` where there is no such state, or one of another adapter."""
        if not (folder / STATE).is_file():
            raise SystemExit(f"--resume: the folder {folder.name} has no file {STATE}.")
        state = torch.load(folder / STATE, map_location=self.device, weights_only=True)
        shapes = [list(master.shape) for master in self.masters]
        if [list(one.shape) for one in state["masters"]] != shapes or state["plan"]["seed"] != self.plan.seed:
            raise SystemExit(f"--resume: the {STATE} in {folder.name} is of another rank, model or seed.")
        for master, held in zip(self.masters, state["masters"]):
            master.copy_(held)
        self.optimizer.load_state_dict(state["optimizer"])
        self.made = state["made"]
        for name in self.NAMES:
            setattr(self, name, state[name])
        self._show()

    def close(self) -> None:
        self.ahead.close()
