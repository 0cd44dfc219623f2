"""RULER's tasks that need no download, from lm-eval's own generators and with its own metric, of any length and number.

lm-eval builds 500 samples a task and length whatever limit it is given. Here its task functions run as they are, but
are told how many samples to make. What they made is kept on disk with the versions that made it, and a machine without
lm-eval can take it from there.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib
import io
import json
import os
import random
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from prompts import Chat, Sample

TASKS = {
    "niah_single_1": ("niah_utils", "niah_single_1", "generate_samples", 128),
    "niah_multikey_2": ("niah_utils", "niah_multikey_2", "generate_samples", 128),
    "niah_multikey_3": ("niah_utils", "niah_multikey_3", "generate_samples", 128),
    "ruler_vt": ("vt_utils", "get_vt_dataset", "sys_vartrack_w_noise_random", 30),
    "ruler_cwe": ("cwe_utils", "get_cw_dataset", "sys_word_pair_random", 120),
    "ruler_fwe": ("fwe_utils", "fwe_download", "sys_kwext", 50),
}
"""lm-eval's module of a task, its function there, the sampler that it calls, and the task's `max_gen_toks`."""

SHORTEST = 1024
"""Below it some generators never end."""


def folder() -> Path:
    """Where samples are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oasis_hf" / "ruler"


def documents(
    tokenizer: Any, task: str, length: int, count: int, seed: int = 0, keep: Path | None = None
) -> list[dict[str, Any]]:
    """lm-eval's documents of a task: `input`, `outputs`, `gen_prefix`, `max_length` and more.

    Args:
        length: tokens of a prompt and its answer at most, without a chat template. keep: folder; None: `folder()`.

    Raises:
        ValueError: no such task, a length below 1,024, or fewer than one sample. ImportError: `oasis-hf[eval]` is not
            installed.
    """
    if task not in TASKS:
        raise ValueError(f"There is no RULER task {task!r} that needs no download: there are {', '.join(TASKS)}.")
    if length < SHORTEST:
        raise ValueError(f"length={length} is not allowed: RULER's generators need {SHORTEST:,} tokens at least.")
    if count < 1:
        raise ValueError(f"count={count} is not allowed: use an integer >= 1.")
    words = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    what = hashlib.sha256(json.dumps([task, length, count, seed, words]).encode()).hexdigest()
    file = (keep or folder()) / f"{task}-{what[:16]}.json.gz"
    if file.is_file():
        kept = json.loads(gzip.decompress(file.read_bytes()))
        if versions() in (None, kept["made_with"]):
            return kept["documents"]
    made = {"documents": _made(tokenizer, task, length, count, seed), "made_with": versions()}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.part")
    unfinished.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
    unfinished.replace(file)
    return made["documents"]


def versions() -> dict[str, str] | None:
    """Of the packages that samples depend on, None where one is missing."""
    try:
        return {name: metadata.version(name) for name in ("lm_eval", "wonderwords")}
    except metadata.PackageNotFoundError:
        return None


def _made(tokenizer: Any, task: str, length: int, count: int, seed: int) -> list[dict[str, Any]]:
    where, function, sampler, _ = TASKS[task]
    # Their random numbers are everybody's; whoever called has theirs back afterwards.
    states = random.getstate(), np.random.get_state()
    module = _module(where)
    sample = getattr(module, sampler)

    def fewer(*args: Any, **kwargs: Any) -> Any:
        return sample(*args, **{**kwargs, "num_samples": min(kwargs.get("num_samples", count), count)})

    random.seed(seed)
    np.random.seed(seed)
    if hasattr(module, "RNG"):
        module.RNG.seed(42 + seed)
    try:
        with (
            mock.patch.object(module, sampler, fewer),
            mock.patch.object(module, "get_tokenizer", lambda *args, **kwargs: tokenizer),
            contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
        ):  # fmt: skip
            return getattr(module, function)(tokenizer="given", max_seq_lengths=[length])["test"].to_list()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _module(name: str) -> ModuleType:
    try:
        # On import it asks the network for sentences of essays, which no task here has.
        with mock.patch("nltk.download"), contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(f"lm_eval.tasks.ruler.{name}")
    except ImportError as error:
        raise ImportError(
            f"RULER's tasks need lm-eval and its words: pip install 'oasis-hf[eval]' ({error})."
        ) from error


def score(document: dict[str, Any], said: str) -> float:
    """lm-eval's metric of the task: the share of `outputs` that occur in what was said, in any case. Where lm-eval is
    not installed, on a GPU machine to which samples were brought, it is written out here (a test compares the two)."""
    if versions() is None:
        return matched(document, said)
    return _module("common_utils").process_results(document, [said])[str(document["max_length"])]


def matched(document: dict[str, Any], said: str) -> float:
    """`score` without lm-eval."""
    told = re.sub(r"[\x00-\x1f]", "\n", said.strip()).strip().lower()
    return sum(one.lower() in told for one in document["outputs"]) / len(document["outputs"])


def samples(
    chat: Chat, task: str, length: int, count: int, seed: int = 0, keep: Path | None = None
) -> list[Sample]:  # fmt: skip
    """Prompts of a task as chats: the document's input is the user's turn, and its prefix begins the answer, as lm-eval
    has it with `--apply_chat_template`. Arguments and errors are those of `documents`."""
    out = []
    for one in documents(chat.tokenizer, task, length, count, seed, keep):
        ids = chat.prompt(one["input"], one["gen_prefix"])
        out.append(Sample(ids, TASKS[task][3], ", ".join(one["outputs"]), functools.partial(score, one)))
    return out
