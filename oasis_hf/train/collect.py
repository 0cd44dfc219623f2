"""The texts of a training: the target's responses to prompts and long prompts, documents, and what is held out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import supported
from . import data, prompts
from .config import TrainConfig
from .generate import Generator, Sample

EDGES = (96, 256, 640, 1536, 3584)
"""Prompts of up to so many tokens share slots of one size."""

CONTEXTS = (1000, 3000, 7000)
"""Prompt lengths at which a head is measured."""

MOST = 6
"""Responses to one prompt."""

Tell = Callable[[str], None]


def collect(
    model: Any, tokenizer: Any, texts: prompts.Texts, config: TrainConfig, longest: int, tell: Tell
) -> dict[str, data.Samples]:
    """Everything: `train`, `documents`, and held out `short`, `long`, `continued` and `context_N`."""
    parts = held_out(model, tokenizer, texts, config, longest, tell)
    room = max(longest - config.new_tokens, 2)
    encoder = prompts.Encoder(tokenizer, room)
    documents = [encoder.plain(text) for text in texts.documents_of(False)]
    short = list(prompts.encoded(texts, encoder, False))
    count = round(len(short) * config.long_prompts / 100)
    extra = prompts.long_prompts(documents, encoder, count, config.seed) if documents else []
    runs = prompts.continuations(documents, round(len(short) * config.continuations / 100), room, config.seed)
    tell(f"{len(short):,} prompts, {len(extra):,} over long documents, {len(runs):,} runs of documents")
    extra += runs
    until = time.monotonic() + 60 * config.generate_minutes
    samples = responses(model, short, extra, config, until, tell)
    parts["train"] = data.Samples.of(samples)
    parts["documents"] = data.Samples.of(_document_texts(documents, longest), config.document_share)
    return parts


def held_out(
    model: Any, tokenizer: Any, texts: prompts.Texts, config: TrainConfig, longest: int, tell: Tell
) -> dict[str, data.Samples]:
    """Held-out prompts with the target's greedy responses."""
    room = max(longest - config.new_tokens, 2)
    encoder, most = prompts.Encoder(tokenizer, room), config.evaluate
    documents = [encoder.plain(text) for text in texts.documents_of(True)]
    kinds: dict[str, list[list[int]]] = {"short": [], "long": []}
    for i, prompt in enumerate(texts.prompts):
        if i % prompts.HELD_OUT_PROMPTS == 0:
            ids = encoder.chat(texts.messages(prompt))
            if 2 <= len(ids) <= room:
                kinds["short" if prompt.passage is None else "long"].append(ids)
    sets = {name: found[:most] for name, found in kinds.items()}
    sets["continued"] = prompts.continuations(documents, most // 2, room, config.seed)
    for length in CONTEXTS:
        sets[f"context_{length}"] = prompts.prompts_of_length(documents, encoder, length, -(-most // 4))
    made = {}
    for name, wanted in sets.items():
        fitting = [prompt for prompt in wanted if len(prompt) <= room]
        if not fitting:
            continue
        tell(f"held out: {len(fitting):,} {name}")
        made[name] = data.Samples.of(batched(model, fitting, [0.0] * len(fitting), config, lambda: False, tell))
    return {name: part for name, part in made.items() if len(part)}


def responses(
    model: Any, short: list[list[int]], extra: list[list[int]], config: TrainConfig, until: float, tell: Tell
) -> list[Sample]:
    """Long prompts once; the others as often as the tokens that are wanted need, greedy at most once each."""
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    passes = round(config.generate_tokens / max(1, 0.6 * config.new_tokens * len(short)))
    passes = min(max(passes, 1), MOST)
    first = [rng.random() < config.greedy_share for _ in short]
    jobs: list[tuple[list[int], float]] = []
    for lap in range(passes):
        for prompt, greedy in zip(short, first):
            greedy = greedy if lap == 0 else (not greedy and lap == 1)
            jobs.append((prompt, 0.0 if greedy else rng.uniform(0.5, 1.0)))
    jobs += [(p, 0.0 if rng.random() < config.greedy_share else rng.uniform(0.5, 1.0)) for p in extra]
    rng.shuffle(jobs)
    made = 0

    def enough() -> bool:
        return time.monotonic() >= until or made >= config.generate_tokens

    def done(sample: Sample) -> None:
        nonlocal made
        made += len(sample.ids) - sample.start

    return batched(model, [p for p, _ in jobs], [t for _, t in jobs], config, enough, tell, done, until)


def batched(
    model: Any, ids: list[list[int]], temperatures: list[float], config: TrainConfig, stop: Callable[[], bool],
    tell: Tell, done: Callable[[Sample], None] = lambda sample: None, until: float | None = None,
) -> list[Sample]:  # fmt: skip
    """Responses in slots of a few sizes, long ones first; with `until`, each size gets its share of the time."""
    target, weight = supported.text_config(model), model.get_input_embeddings().weight
    heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    each = 2 * target.num_hidden_layers * heads * dim * weight.element_size()
    edges = [*EDGES, max(map(len, ids))]
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(ids):
        groups.setdefault(min(edge for edge in edges if edge >= len(prompt)), []).append(i)
    found: list[Sample] = []
    costs = {edge: len(groups[edge]) * (500 + edge + config.new_tokens) for edge in groups}
    for edge in sorted(groups, reverse=True):
        members, started = groups[edge], time.monotonic()
        places = -(-(edge + config.new_tokens) // 16) * 16
        rows = int(max(1, min(config.generate_batch, len(members), config.kv_gib * 2**30 // (places * each))))
        share = costs[edge] / sum(cost for other, cost in costs.items() if other <= edge)
        limit = None if until is None else started + share * max(until - started, 0)

        def late(limit: float | None = limit) -> bool:
            return stop() or (limit is not None and time.monotonic() >= limit)

        generator = Generator(model, rows, places, config.new_tokens)
        made = generator.run([ids[i] for i in members], [temperatures[i] for i in members], late, done)
        del generator
        if weight.is_cuda:
            torch.cuda.empty_cache()  # slots of the next size do not fit into those of this one
        got = [sample for sample in made if sample is not None]
        count, seconds = sum(len(s.ids) - s.start for s in got), time.monotonic() - started
        tell(
            f"  prompts of up to {edge:,} tokens, {rows:,} rows: {len(got):,} of {len(members):,} answered, {count:,} "
            f"tokens in {seconds:.1f} s ({count / seconds:,.0f} a second)"
        )
        found += got
    return found


def _document_texts(documents: list[list[int]], longest: int) -> list[Sample]:
    """Each document from its start, and all of them joined and cut where the target's positions end."""
    stream = [token for document in documents for token in document]
    joined = [stream[i : i + longest] for i in range(0, len(stream), longest)]
    return [Sample(text, 0) for text in [*(d[:longest] for d in documents), *joined] if len(text) > 2]
