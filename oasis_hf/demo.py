"""`oasis-hf demo`: one question about a long document, answered with a dense cache and with a working set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from . import attach, supported
from .cache import OasisCache
from .config import ConfigError, OasisConfig
from .models import ModelError

QUESTION = "How long does the canary stage last?"
EXPECTED = "36 hours"
BUDGET = 1552


def handbook() -> str:
    """The operator's handbook that ships with the package, a document of more than 6,000 tokens."""
    return (files("oasis_hf") / "data" / "handbook.md").read_text(encoding="utf-8")


@dataclass
class Run:
    """One answer and what it took.

    Attributes:
        prefill, decode: seconds until the first token, and from there. tokens: generated.
        device_bytes: what the cache holds where the model runs. host_bytes: in the store.
        moved_bytes: into the working set by decode steps. hit_rate: of the predicted blocks, or None.
    """

    answer: str
    tokens: int
    prefill: float
    decode: float
    device_bytes: int
    host_bytes: int = 0
    moved_bytes: int = 0
    hit_rate: float | None = None


@dataclass
class Result:
    """context: tokens of the prompt. budget: tokens of the working set."""

    context: int
    budget: int
    dense: Run
    oasis: Run
    cache: OasisCache


class _Clock:
    """A streamer that only notes when the first new token came."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        self.stop = time.perf_counter()


def check(budget: int, max_new_tokens: int) -> None:
    """What `ask` needs no model to refuse. Raises `ConfigError`."""
    OasisConfig(budget=budget)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is not allowed: use an integer >= 1.")


def ask(
    model: Any, tokenizer: Any, document: str, question: str, budget: int = BUDGET, max_new_tokens: int = 48,
    progress: bool = False,
) -> Result:  # fmt: skip
    """Answer a question about a document twice, greedily: with a `DynamicCache` and with an `OasisCache`.

    Raises:
        ModelError: the document is longer than the model's context.
        UnsupportedModelError, ConfigError: as `OasisCache` does.
    """
    from transformers import DynamicCache

    check(budget, max_new_tokens)
    inputs = _prompt(tokenizer, f"{document}\n\nQuestion: {question}")
    context = inputs["input_ids"].shape[1]
    limit = getattr(supported.text_config(model), "max_position_embeddings", None)
    if limit and context + max_new_tokens > limit:
        raise ModelError(
            f"The document and the question are {context:,} tokens, with {max_new_tokens} new ones more than the "
            f"model's context of {limit:,}: take a shorter document or another model."
        )
    oasis = OasisCache(model, budget=budget, progress=progress)
    dense = DynamicCache()
    first = _generate(model, tokenizer, inputs, dense, max_new_tokens)
    first.device_bytes = sum(part.nbytes for part in _tensors(dense))
    second = _generate(model, tokenizer, inputs, oasis, max_new_tokens)
    memory, stats = oasis.memory(), oasis.stats()
    moved = sum(int(stats[name].sum()) for name in ("fetched", "on_demand", "reopened"))
    second.device_bytes, second.host_bytes = memory["working_set"] + memory["summaries"], memory["host"]
    second.moved_bytes = moved * oasis.state.block_bytes
    predicted = sum(int(stats[name].sum()) for name in ("hits", "fetched", "capped"))
    second.hit_rate = int(stats["hits"].sum()) / predicted if predicted else None
    return Result(context, budget, first, second, oasis)


def _prompt(tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
    if getattr(tokenizer, "chat_template", None) is None:
        return dict(tokenizer(text + "\nAnswer:", return_tensors="pt"))
    message = [{"role": "user", "content": text}]
    return dict(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    )


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        if layer.is_initialized:
            yield from (layer.keys, layer.values)


def _generate(model: Any, tokenizer: Any, inputs: dict[str, torch.Tensor], cache: Any, count: int) -> Run:
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    clock = _Clock()
    # The argument by the name that this version of transformers prefers: the older one warns.
    out = model.generate(
        **inputs, **{attach.cache_name(model): cache}, max_new_tokens=count, do_sample=False, streamer=clock
    )
    new = out[0, inputs["input_ids"].shape[1] :]
    first = clock.first or clock.stop
    answer = tokenizer.decode(new, skip_special_tokens=True).strip()
    return Run(answer, len(new), first - clock.start, clock.stop - first, 0)


def table(result: Result) -> Any:
    """Both answers side by side, as a `rich` table."""
    from rich.table import Table
    from rich.text import Text

    dense, oasis = result.dense, result.oasis
    share = result.budget / result.context
    out = Table(
        title=f"{result.context:,} tokens of context, a working set of {result.budget:,} ({share:.0%})",
        title_justify="left", show_lines=True,
    )  # fmt: skip
    for name in ("", "dense cache", "OasisCache"):
        out.add_column(name, overflow="fold")
    out.add_row("answer", Text(dense.answer), Text(oasis.answer))  # a model may well write markup
    out.add_row("cache where the model runs", _mib(dense.device_bytes), _mib(oasis.device_bytes))
    out.add_row("cache in host memory", "-", _mib(oasis.host_bytes))
    rate = "-" if oasis.hit_rate is None else f"{oasis.hit_rate:.1%}"
    out.add_row("predicted blocks already resident", "-", rate)
    steps = max(oasis.tokens - 1, 1)
    out.add_row("moved to the working set a token", "-", _mib(oasis.moved_bytes / steps))
    out.add_row("first token after", *(f"{run.prefill:.1f} s" for run in (dense, oasis)))
    out.add_row("the other tokens", *(f"{run.tokens - 1} in {run.decode:.1f} s" for run in (dense, oasis)))
    return out


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
