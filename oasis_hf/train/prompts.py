"""What a training starts from: prompts and documents, from files to token ids."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import TrainError

HELD_OUT_PROMPTS, HELD_OUT_DOCUMENTS = 50, 20
"""Every so manieth is never trained on."""

TASKS = (
    "{DOC}\n\nWrite a continuation of the text above.",
    "Summarize the following document in a few sentences.\n\n{DOC}",
    "{DOC}\n\nGive three questions and answers about this document.",
    "Here is a document:\n\n{DOC}\n\nWhat is said at its end? Explain it to a beginner.",
    "Read the following document and list its main points.\n\n{DOC}",
    "{DOC}\n\nQuote a passage of the text above and say what it means.",
)


@dataclass
class Prompt:
    """messages: of a chat, to be answered. passage: what `{DOC}` stands for, `(document, start, length)` in
    characters."""

    messages: list[dict[str, str]]
    passage: tuple[int, int, int] | None = None


@dataclass
class Texts:
    """What the files hold."""

    prompts: list[Prompt] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    def prompts_of(self, held_out: bool) -> list[Prompt]:
        """Prompts without or with those that are held out; a prompt over a held-out document is neither."""
        chosen = []
        for i, prompt in enumerate(self.prompts):
            of_held_out = prompt.passage is not None and prompt.passage[0] % HELD_OUT_DOCUMENTS == 0
            if (i % HELD_OUT_PROMPTS == 0) == held_out and (held_out or not of_held_out):
                chosen.append(prompt)
        return chosen

    def documents_of(self, held_out: bool) -> list[str]:
        return [text for i, text in enumerate(self.documents) if (i % HELD_OUT_DOCUMENTS == 0) == held_out]

    def messages(self, prompt: Prompt) -> list[dict[str, str]]:
        """With the passage in its place."""
        if prompt.passage is None:
            return prompt.messages
        document, start, length = prompt.passage
        passage = self.documents[document][start : start + length]
        return [{**m, "content": m["content"].replace("{DOC}", passage)} for m in prompt.messages]


def read(files: list[Path]) -> Texts:
    """Files of prompts and documents: `.jsonl` (also `.gz`) with lines `{"p": prompt}`, `{"p": prompt, "d": [document,
    start, length]}`, `{"t": document}` or `{"messages": [...]}`, and `.txt`, a document each.

    Raises:
        TrainError: a file can't be read, or there is no prompt in any of them.
    """
    texts = Texts()
    for file in files:
        first = len(texts.documents)  # passages name the documents of their own file
        try:
            if ".jsonl" not in file.suffixes:
                texts.documents.append(file.read_text(encoding="utf-8"))
                continue
            with (
                gzip.open(file, "rt", encoding="utf-8")
                if file.suffix == ".gz"
                else file.open(encoding="utf-8") as lines
            ):
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        _line(texts, line, first, f"{file.name}, line {number}")
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise TrainError(f"Can't read the data file {file}: {error}.") from error
    for prompt in texts.prompts:
        if prompt.passage is not None and not 0 <= prompt.passage[0] < len(texts.documents):
            raise TrainError(f"A prompt is over document {prompt.passage[0]}, but there are {len(texts.documents)}.")
    if not texts.prompts:
        raise TrainError('There are no prompts in the data: lines of a .jsonl file like {"p": "How ...?"}.')
    return texts


def _line(texts: Texts, line: str, first: int, where: str) -> None:
    try:
        entry = json.loads(line)
        if "t" in entry:
            texts.documents.append(str(entry["t"]))
        elif "messages" in entry:
            messages = list(entry["messages"])
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()  # the target answers itself
            if messages:
                texts.prompts.append(Prompt(messages))
        else:
            passage = tuple(map(int, entry["d"])) if "d" in entry else None
            if passage is not None:
                passage = (passage[0] + first, *passage[1:])
            texts.prompts.append(Prompt([{"role": "user", "content": entry["p"]}], passage))  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError) as error:
        known = '{"p": ...}, {"p": ..., "d": [...]}, {"t": ...} or {"messages": [...]}'
        raise TrainError(f"{where} is not a line of data ({known}): {error!r}.") from error


class Encoder:
    """Texts to ids as the target reads them."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.plain("\n\n".join(m["content"] for m in messages) + "\n\n")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def over(self, task: str, document: list[int]) -> list[int]:
        """A task over a document of which the ids are given, so that its length is."""
        ids = self.chat([{"role": "user", "content": task}])
        before, after = self.tokenizer.decode(ids).split("{DOC}")
        return self.plain(before) + document + self.plain(after)


def encoded(texts: Texts, encoder: Encoder, held_out: bool) -> Iterator[list[int]]:
    """The prompts as ids, those that fit."""
    for prompt in texts.prompts_of(held_out):
        ids = encoder.chat(texts.messages(prompt))
        if 2 <= len(ids) <= encoder.longest:
            yield ids


def long_prompts(documents: list[list[int]], encoder: Encoder, count: int, seed: int) -> list[list[int]]:
    """Tasks over runs of documents, with 1,000 tokens up to as many as fit, all lengths alike."""
    stream = [token for document in documents for token in document]
    rng, prompts = random.Random(seed), []
    most = min(encoder.longest - 80, len(stream))  # the task's own words and the template
    if most < 16:
        return []
    for _ in range(count):
        length = rng.randint(min(1000, most // 2), most)
        start = rng.randrange(len(stream) - length + 1)
        prompts.append(encoder.over(rng.choice(TASKS), stream[start : start + length])[: encoder.longest])
    return prompts


def continuations(documents: list[list[int]], count: int, most: int, seed: int) -> list[list[int]]:
    """Runs of documents as they are, which a model goes on with: of 64 to 1,024 tokens (`most`, if that is less), short
    ones as often as long ones by their logarithm."""
    rng, made = random.Random(seed), list[list[int]]()
    stream = [token for document in documents for token in document]
    most = min(most, 1024, len(stream))
    if most < 64:
        return []
    for _ in range(count):
        length = round(64 * (most / 64) ** rng.random())
        start = rng.randrange(len(stream) - length + 1)
        made.append(stream[start : start + length])
    return made


def prompts_of_length(documents: list[list[int]], encoder: Encoder, length: int, count: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens whose documents end alike whatever the length: only what is before differs."""
    stream = [token for document in documents for token in document]
    prompts = []
    for i in range(count):
        task = TASKS[(0, 2, 5)[i % 3]]  # those with the document first
        end = len(stream) - i * max(1, (len(stream) - 7000) // max(count, 1)) if len(stream) > 7000 else len(stream)
        room = length - len(encoder.over(task, []))
        if room < 1 or room > end:
            continue
        prompts.append(encoder.over(task, stream[end - room : end]))
    return prompts
