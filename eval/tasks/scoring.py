"""Answers found in what a model says, and avg@k and pass@k over k samples of it."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

LETTERS = "ABCD"


def at_k(answers: list[str | None], right: str) -> dict[str, float]:
    """Metrics of one question. answers: one a sample, None where none was found."""
    hits = [answer == right for answer in answers]
    return {
        "avg_at_k": sum(hits) / len(hits), "pass_at_k": float(any(hits)),
        "answered": sum(answer is not None for answer in answers) / len(answers),
    }  # fmt: skip


def boxed(text: str) -> str | None:
    """What is in the last closed `\\boxed{...}`, braces inside it included; None without one."""
    found = None
    for start in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for at in range(start.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                found = text[start.end() : at]
                break
    return found


def integer(text: str | None) -> str | None:
    """An answer of AIME, 0 to 999, as it is written without leading zeros; None where that is no such number."""
    if text is None:
        return None
    plain = re.sub(r"\\text\{.*?\}|\\[,;!]|\^\s*\\circ|[\s$,.]", "", text)
    return str(int(plain)) if re.fullmatch(r"\d{1,4}", plain) else None


def aime(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """results: one list of k samples, as the filter `take_first_k` leaves them."""
    right = next(value for name, value in doc.items() if name.lower() == "answer")
    return at_k([integer(boxed(text)) for text in results[0]], str(int(right)))


def gpqa_docs(dataset: Any) -> Any:
    """Choices in an order that is the question's own, the same in every run and for every model."""

    def mixed(doc: dict[str, Any]) -> dict[str, Any]:
        choices = [doc["Correct Answer"], *(doc[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        choices = [choice.strip() for choice in choices]
        seed = int(hashlib.sha256(doc["Question"].encode()).hexdigest()[:16], 16)
        order = random.Random(seed).sample(range(4), 4)
        return {
            "question": doc["Question"].strip(), "choices": [choices[i] for i in order],
            "letter": LETTERS[order.index(0)],
        }  # fmt: skip

    return dataset.map(mixed)


def letter(text: str) -> str | None:
    """The last `Answer: X`, whatever marks stand around the letter (simple-evals' pattern, and bold or boxed ones)."""
    found = re.findall(r"(?i)answer[ \t]*\**[ \t]*:[ \t]*\**[ \t]*\$?(?:\\boxed\{)?\(?([A-D])\b", text)
    return found[-1].upper() if found else None


def gpqa(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """results: as `aime` has them."""
    return at_k([letter(text) for text in results[0]], doc["letter"])
