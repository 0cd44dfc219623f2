"""What the tasks of `retrieval.py` are made of: questions with their scores, background, lists that fill a context."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import retrieval_words as words
from retrieval_words import Family

Count = Callable[[str], int]
Make = Callable[[random.Random, Family], str]
Task = Callable[[random.Random, Family, int, Count], "World"]


@dataclass(frozen=True)
class Question:
    """ask: what the user says behind the context. lead: how the answer is begun for the model; may be empty. target:
    what follows then, as it is trained. answers: what must be in it. kind: how it is scored, see `score`."""

    ask: str
    lead: str
    target: str
    answers: tuple[str, ...]
    kind: str = "found"


@dataclass(frozen=True)
class World:
    context: str
    questions: tuple[Question, ...]


def score(question: Question, said: str) -> float:
    """In [0, 1]. "found": share of the answers that occur, as whole words, in any case. "order": share of the answers
    that stand as lines of their own in this order. "json": share of the fields of the rows that are right; a row is
    found by its first field."""
    if question.kind == "found":
        return sum(_occurs(answer, said) for answer in question.answers) / len(question.answers)
    if question.kind == "order":
        lines = [line.strip() for line in said.strip().split("\n")]
        return sum(a == b for a, b in zip(question.answers, lines)) / len(question.answers)
    said_rows = {next(iter(row.values())): row for row in _objects(said) if row}
    right = total = 0
    for answer in question.answers:
        row = json.loads(answer)
        mine = said_rows.get(next(iter(row.values())), {})
        right += sum(mine.get(name) == value for name, value in row.items())
        total += len(row)
    return right / total


def _occurs(answer: str, said: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", said.lower()) is not None


def _objects(said: str) -> Iterator[dict[str, object]]:
    for text in re.findall(r"\{[^{}]*\}", said):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict) and all(isinstance(value, (str, int, float)) for value in found.values()):
            yield found


KEYS = (words.compound, words.coined, words.person)
VALUES = (words.number, words.long_number, words.code, words.noun, words.compound, words.coined)


def distinct(rng: random.Random, family: Family, make: Make, count: int) -> list[str]:
    """Different ones; fewer where there are no more."""
    out: dict[str, None] = {}
    for _ in range(20 * count):
        if len(out) == count:
            break
        out[make(rng, family)] = None
    return list(out)


def background(rng: random.Random, family: Family) -> Iterator[str]:
    """Sentences without end: real prose from any place on, or a few short ones over and over."""
    sentences = family.sentences() if rng.random() < 0.7 else family.noise
    at = rng.randrange(len(sentences))
    while True:
        yield sentences[at % len(sentences)]
        at += 1


def scattered(rng: random.Random, family: Family, facts: list[str], room: int, count: Count) -> str:
    """The facts in their order, at random places of a background that fills the room."""
    left = room - sum(count(" " + fact) for fact in facts)
    others: list[str] = []
    for sentence in background(rng, family):
        left -= count(" " + sentence)
        if left < 0:
            break
        others.append(sentence)
    places = sorted(rng.randrange(len(others) + 1) for _ in facts)
    for place, fact in reversed(list(zip(places, facts))):
        others.insert(place, fact)
    return " ".join(others)


def fitting(entry: Callable[[], str], room: int, count: Count, least: int = 4) -> int:
    """How many entries fill the room."""
    return max(least, int(room / (sum(count(entry() + "\n") for _ in range(8)) / 8)))


def listed(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def after(lead: str, text: str) -> str:
    return f" {text}" if lead else text


def asked_of(rng: random.Random, number: int, most: int = 32) -> list[int]:
    return rng.sample(range(number), min(number, most))
