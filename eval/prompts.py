"""Samples as token ids: prompts of an exact length to evaluate with, and packed chats to train on."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import retrieval
from retrieval_words import FAMILIES
from worlds import Question, World, score


@dataclass(frozen=True)
class Sample:
    """A prompt and what its answer is worth.

    Attributes:
        ids: the prompt, the answer's lead included. new: how many tokens an answer may have. expected: for a look.
        score: of the text that was said, in [0, 1].
    """

    ids: list[int]
    new: int
    expected: str
    score: Callable[[str], float]


class Chat:
    """A tokenizer's chat template, as ids between which texts stand.

    Attributes:
        before: up to the first user's text. answer: from there to the assistant's. again: from an assistant's text to
            the next user's; its first ids end the turn.
        end: the id that ends a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        marks = ["(FIRST)", "(SECOND)", "(THIRD)"]
        turns = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks)]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        parts = []
        for mark in marks:
            part, text = text.split(mark)
            parts.append(self.encode(part))
        self.before, self.answer, self.again = parts
        self.end = self.again[0]
        self.count = functools.lru_cache(1 << 16)(lambda text: len(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prompt(self, user: str, lead: str, padding: list[int] | None = None) -> list[int]:
        """Ids up to where the model goes on. padding: ids between the template's and the user's text."""
        return [*self.before, *(padding or []), *self.encode(user), *self.answer, *self.encode(lead)]


def asked(world: World, question: Question) -> str:
    return f"{world.context}\n\n{question.ask}"


def sample(chat: Chat, task: str, seed: int, length: int, family: str = "eval") -> Sample:
    """One question about a world of its own, in exactly `length` tokens: what is missing in front is filled with real
    text of the family, cut where it ends.

    Raises:
        ValueError: no world of this task is so small.
    """
    room, slack = length - len(chat.before) - len(chat.answer) - 80, 96
    best: tuple[int, World] | None = None
    for _ in range(24):
        world = retrieval.world(task, seed, family, room, chat.count)
        left = length - len(chat.prompt(asked(world, world.questions[0]), world.questions[0].lead))
        if left >= 0 and (best is None or left < best[0]):
            best = left, world
        if 0 <= left <= slack or room < 16:
            break
        # Entries differ in size, so a little less than what is missing.
        room += left - 8 if left < 0 else max(1, left - slack // 2)
    if best is None:
        raise ValueError(f"A sample of {task!r} does not fit {length:,} tokens: ask for longer ones.")
    left, world = best
    question = world.questions[0]
    padding = filler(chat, family, seed, left)
    ids = chat.prompt(asked(world, question), question.lead, padding)
    new = chat.count(question.target) + 8
    return Sample(ids, new, question.target.strip(), functools.partial(score, question))


def filler(chat: Chat, family: str, seed: int, count: int) -> list[int]:
    """`count` ids of real text, the last one a line's end."""
    if count == 0:
        return []
    sentences = FAMILIES[family].sentences()
    at = seed * 7919 % len(sentences)
    ids: list[int] = []
    while len(ids) < count:
        ids += chat.encode(sentences[at % len(sentences)] + " ")
        at += 1
    return [*ids[: count - 1], chat.encode("\n")[-1]]


class Makers:
    """Processes that make samples side by side; this one does where `workers` is 0."""

    def __init__(self, tokenizer: Any, workers: int) -> None:
        self.chat, self.pool = Chat(tokenizer), None
        if workers:
            self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (tokenizer,))

    def samples(self, task: str, seeds: range, length: int, family: str = "eval") -> list[Sample]:
        """One for each seed; see `sample`."""
        if self.pool is None:
            return [sample(self.chat, task, seed, length, family) for seed in seeds]
        parts = [(task, list(seeds[first : first + 8]), length, family) for first in range(0, len(seeds), 8)]
        return [one for part in self.pool.map(_some, parts) for one in part]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


_chat: Chat | None = None


def _start(tokenizer: Any) -> None:
    global _chat
    _chat = Chat(tokenizer)


def _some(part: tuple[str, list[int], int, str]) -> list[Sample]:
    assert _chat is not None
    task, seeds, length, family = part
    return [sample(_chat, task, seed, length, family) for seed in seeds]


@dataclass(frozen=True)
class Row:
    """A chat to train on: ids, which of them are learned (the answers and what ends them), and each answer's first and
    last place and its task."""

    ids: list[int]
    learned: list[bool]
    answers: list[tuple[int, int, str]]


MIXED = 0.25
"""Share of the rows whose context is several worlds of different tasks."""


OFTEN = {"variables": 2, "common": 3, "frequent": 3}
"""Tasks whose worlds have few questions are drawn so many times as often."""


def row(chat: Chat, seed: int, length: int, tasks: list[str], family: str = "train") -> Row:
    """A context and as many questions and answers behind it as `length` tokens hold; `length` ids at most."""
    rng = random.Random(f"row {FAMILIES[family].seed} {seed}")
    parts = rng.choice((2, 3)) if rng.random() < MIXED and length >= 768 else 1
    chosen = rng.choices(tasks, weights=[OFTEN.get(task, 1) for task in tasks], k=parts)
    room = int(length * rng.uniform(0.6, 0.92)) - len(chat.before)
    for attempt in range(24):
        worlds = [
            retrieval.world(task, seed * 31 + place, family, room // parts, chat.count)
            for place, task in enumerate(chosen)
        ]
        context = "\n\n".join(world.context for world in worlds)
        pool = [(task, question) for task, world in zip(chosen, worlds) for question in world.questions]
        rng.shuffle(pool)
        made = _packed(chat, context, pool, length)
        if made is not None:
            return made
        room = int(room * 0.8)
        if attempt == 8:  # a world that can't be so small
            chosen, parts = ["needle_keys"], 1
    raise ValueError(f"No row of {length:,} tokens can be made: ask for longer ones.")


def _packed(chat: Chat, context: str, pool: list[tuple[str, Question]], length: int) -> Row | None:
    """None: not one answer fits."""
    ids: list[int] = []
    learned: list[bool] = []
    answers: list[tuple[int, int, str]] = []
    for task, question in pool:
        user = [*chat.again, *chat.encode(question.ask)] if ids else [
            *chat.before, *chat.encode(f"{context}\n\n{question.ask}")
        ]  # fmt: skip
        target = [*chat.encode(question.target), chat.end]
        front = [*user, *chat.answer, *chat.encode(question.lead)]
        # The end of the turn was the last answer's own.
        front = front[1:] if ids else front
        if len(ids) + len(front) + len(target) > length:
            break
        answers.append((len(ids) + len(front), len(ids) + len(front) + len(target) - 1, task))
        ids += front + target
        learned += [False] * len(front) + [True] * len(target)
    return Row(ids, learned, answers) if answers else None
