"""Which implementation of a model's experts stands in captured steps: the fastest of those that can, by measurement.

transformers has several (`experts_implementation`). "eager" asks the device which experts were hit, so it can't be
captured; "grouped_mm" sorts tokens by expert and reads each expert once; "batched_mm" copies the weights of each
token's experts, which few tokens gain by. The choice holds while a step is captured: the model's own setting is never
changed for anything else.
"""

from __future__ import annotations

import contextlib
import statistics
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import parallel, supported
from .capture import capture
from .config import OasisConfig
from .stopwatch import Span, between

CANDIDATES = ("grouped_mm", "batched_mm")
"""What can be captured: nothing of it waits for the device, and shapes are those of the tokens."""

RUNS = 5
"""How often each is timed; the median counts."""

OURS = ("eager", *CANDIDATES)
"""Settings that are transformers' own choice or can't be captured. Any other was asked for, and stays."""


@dataclass
class Choice:
    """What was measured for a number of tokens. ms: of all layers' experts, by implementation; refused: why not."""

    tokens: int
    ms: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        return min(self.ms, key=lambda name: self.ms[name], default=None)

    def told(self) -> str:
        parts = [f"{name} {ms:.3g} ms" for name, ms in sorted(self.ms.items(), key=lambda item: item[1])]
        parts += [f"{name} not ({why})" for name, why in self.refused.items()]
        return f"{self.fastest or 'as set'} for {self.tokens:,} tokens ({', '.join(parts)})"


def modules_of(model: Any) -> list[Any]:
    """The experts of each layer whose implementation can be chosen."""
    marks = ("num_experts", "has_gate", "is_transposed", "config")
    return [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]


@contextlib.contextmanager
def standing(modules: list[Any], name: str | None) -> Iterator[None]:
    """An implementation stands for these experts inside; None: their own."""
    configs = {id(module.config): module.config for module in modules} if name is not None else {}
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    for config in configs.values():
        config._experts_implementation_internal = name
    try:
        yield
    finally:
        for config, own in before:
            config._experts_implementation_internal = own


Timer = Callable[[Callable[[], Any]], float]
"""Milliseconds of what a function launches."""


def captured_ms(device: torch.device) -> Timer:
    """A timer of replays: what a function launches is captured first. Raises RuntimeError where that can't be."""

    def timed(run: Callable[[], Any]) -> float:
        run()  # libraries set themselves up
        graph, _ = capture(torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), device, run)
        spans: list[Span] = []
        for _ in range(RUNS + 1):
            with between(spans):
                graph.replay()
        torch.cuda.synchronize(device)
        return statistics.median(begin.elapsed_time(end) for begin, end in spans[1:])

    return timed


def host_ms(run: Callable[[], Any]) -> float:
    """On a CPU, where nothing is captured."""
    spans: list[Span] = []
    for _ in range(RUNS + 1):
        with between(spans, on_gpu=False):
            run()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans[1:])


@torch.no_grad()
def measured(model: Any, tokens: int, timer: Timer) -> Choice:
    """Times all layers' experts by each candidate, over noise: tokens go to experts that are drawn uniformly."""
    modules, text, choice = modules_of(model), supported.text_config(model), Choice(tokens)
    weight = next(modules[0].parameters())
    generator = torch.Generator().manual_seed(0)
    most = min(text.num_experts_per_tok, modules[0].num_experts)
    drawn = torch.rand((tokens, modules[0].num_experts), generator=generator).argsort(1)[:, :most]
    index = drawn.contiguous().to(weight.device)
    hidden = torch.randn((tokens, text.hidden_size), generator=generator).to(weight.device, weight.dtype)
    shares = torch.full(index.shape, 1 / most, dtype=weight.dtype, device=weight.device)

    def run() -> None:
        for module in modules:
            module(hidden, index, shares)

    for name in CANDIDATES:
        if name == "batched_mm" and tokens * most > 2 * modules[0].num_experts:
            choice.refused[name] = "it would copy more than twice all experts"
            continue
        try:
            with standing(modules, name):
                choice.ms[name] = timer(run)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            choice.refused[name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return choice


_chosen: "weakref.WeakKeyDictionary[Any, dict[int, Choice]]" = weakref.WeakKeyDictionary()


def choice_for(model: Any, config: OasisConfig, tokens: int, timer: Timer) -> Choice | None:
    """What a step of so many tokens is captured with, measured once a model; None: it has no experts to choose for, or
    the knob, the model's own setting or its ranks say otherwise."""
    modules = modules_of(model)
    if config.experts != "auto" or not modules or parallel.size(model) > 1:
        return None
    if modules[0].config._experts_implementation not in (None, *OURS):
        return None
    known = _chosen.setdefault(model, {})
    if tokens not in known:
        known[tokens] = measured(model, tokens, timer)
    return known[tokens]


def capturing(model: Any, config: OasisConfig, choice: Choice | None) -> contextlib.AbstractContextManager[None]:
    """A step is captured inside, with experts as chosen or as the knob says."""
    named = config.experts if config.experts in CANDIDATES else None
    name = choice.fastest if choice is not None else named
    return contextlib.nullcontext() if name is None else standing(modules_of(model), name)
