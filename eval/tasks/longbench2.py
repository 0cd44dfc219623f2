"""LongBench v2 with generated answers: its repository's prompt, cut in the middle as there, and its pattern."""

from __future__ import annotations

import re
from typing import Any

HUB = "THUDM/LongBench-v2"
PROMPT = """Please read the following text and answer the question below.

<text>
{context}
</text>

What is the correct answer to this question: {question}
Choices:
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Format your response as follows: "The correct answer is (insert answer here)"."""
"""Zero-shot, `prompts/0shot.txt` of github.com/THUDM/LongBench."""

ROOM = 128 + 64
"""Tokens that are kept for the answer and a chat template around the prompt."""


def load(
    data_files: Any = None, tokenizer: Any = None, pretrained: Any = None, max_length: int | None = None, **given: Any
) -> dict[str, Any]:
    """The questions, by split, each with its `prompt`.

    Args:
        data_files: local JSON of the same fields, instead of the hub's. tokenizer, pretrained, max_length: as in
            model_args, from where they come: with a length, prompts are cut to it by that tokenizer.
    """
    import datasets

    if data_files is None:
        docs = datasets.load_dataset(HUB, split="train")
    else:
        docs = datasets.load_dataset("json", data_files=data_files, split="train", cache_dir=given.get("cache_dir"))
    if max_length is None:
        return {"test": docs.map(lambda doc: {"prompt": prompt(doc)})}
    from oasis_hf.models import load_tokenizer

    own = load_tokenizer(tokenizer or pretrained)
    return {"test": docs.map(lambda doc: {"prompt": shortened(prompt(doc), own, int(max_length) - ROOM)})}


def prompt(doc: dict[str, Any]) -> str:
    return PROMPT.format(
        **{name: str(doc[name]).strip() for name in ("context", "question", *(f"choice_{letter}" for letter in "ABCD"))}
    )


def shortened(text: str, tokenizer: Any, most: int) -> str:
    """A text of at most about `most` tokens: what is in the middle goes."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= most:
        return text
    half = most // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[len(ids) - half :]))


def answer(text: str) -> str | None:
    """The letter in "The correct answer is (A)", or without brackets; stars are ignored."""
    text = text.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        found = re.search(pattern, text)
        if found:
            return found[1]
    return None


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether it is right, also by difficulty and length."""
    said = answer(results[0])
    names = ("acc", f"acc_{doc['difficulty']}", f"acc_{doc['length']}")
    return {**dict.fromkeys(names, float(said == doc["answer"])), "answered": float(said is not None)}
