"""The "jump" task: eight documents, and questions that switch from one to another while the answer is being said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import texts
import torch

DOCUMENTS = 8
CUE = 8
"""Tokens of a passage that its question quotes."""
ORDER = (2, 6, 0, 4, 7, 1, 5, 3)
"""Documents in the order in which they are asked about: each question goes to one far from the last one's."""


@dataclass
class Jumps:
    """One text of `T` tokens, teacher-forced from token `prompt` on.

    Attributes:
        tokens: `[T]` ids: eight documents, the first question and the beginning of its answer; then the steps: the
            answer's rest, the next question and its answer, and so on.
        part: `[T - prompt]` int64, of each step's token: 0 where an answer has settled, 1 around a jump: the question
            and the first tokens of its answer.
        names: of the documents.
    """

    tokens: torch.Tensor
    prompt: int
    part: torch.Tensor
    names: list[str]


def jumps(tokenizer: Any, length: int, count: int, answer: int, settling: int, first: int = 0) -> Jumps:
    """Documents are real texts (`texts.windows`); an answer is a passage of one, word by word, so that the model can
    say it from what it attends to and from nothing else.

    Args:
        length: tokens a document. count: jumps. answer: tokens of each answer. settling: of these, how many still count
            as around the jump. first: which question of `ORDER` comes first.

    Raises:
        ValueError: a document has no room for a cue and an answer behind its first half.
    """
    if length // 2 + CUE + answer > length:
        raise ValueError(f"A document of {length} tokens has no room for {CUE + answer} tokens behind its middle.")

    def said(words: str) -> torch.Tensor:
        return tokenizer(words, add_special_tokens=False, return_tensors="pt").input_ids[0].to(torch.int64)

    windows = texts.windows(tokenizer, DOCUMENTS, length, length)
    pieces = [piece for at, (_, ids) in enumerate(windows) for piece in (said(f"\n\nDocument {at + 1}:\n"), ids)]
    part: list[int] = []
    for place in range(count + 1):
        at = ORDER[(first + place) % DOCUMENTS]
        begin = length // 2 - (length // 4 if first + place >= DOCUMENTS else 0)
        cue, passage = windows[at][1][begin : begin + CUE], windows[at][1][begin + CUE : begin + CUE + answer]
        question = torch.cat((said(f'\n\nHow does document {at + 1} go on after "'), cue, said('"?\n'), cue))
        pieces += [question, passage]
        if place:
            part += [1] * (len(question) + settling) + [0] * (answer - settling)
    tokens = torch.cat(pieces)
    begun = answer // 2  # of the first answer, which the prompt ends in
    part = [0] * (answer - begun) + part
    return Jumps(tokens, len(tokens) - len(part), torch.tensor(part), [name for name, _ in windows])
