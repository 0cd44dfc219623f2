"""The documents continued by the model itself, as decoding does: with speculation off, and on.

What is teacher-forced says how a setting follows a given text, but drafts are accepted only where the text is the
model's own. So here the same readings are taken of the model's own greedy continuation, one token a forward ("off"),
and with right drafts accepted ("on"): then all tokens of a pass attend to what the pass before selected.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from cells import WINDOW, Score
from chains import continued, endless, lookup_chains
from recording import Recording, record
from runs import Job, compare, dense_logits, describe, drafter_for, summary

from oasis_hf import OasisCache, OasisConfig
from oasis_hf.attach import cache_name

MODES = ("off", "on")
VERIFIED = OasisConfig().draft_tokens
"""Drafts a pass with speculation on."""


def recordings(model: Any, names: list[str], documents: torch.Tensor, steps: int) -> dict[str, list[Recording]]:
    """By mode, of `documents` `[B, P]` and `steps` tokens more; prompt lookup drafts."""
    prompt = documents.shape[1]
    tokens = continued(model, documents, steps)
    off = [
        record(model, name, text, prompt, WINDOW, lookup_chains(text, prompt, VERIFIED + 1))
        for name, text in zip(names, tokens)
    ]
    return {"off": off, "on": [one.speculating(VERIFIED) for one in off]}


def describe_texts(off: list[Recording], on: list[Recording]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name, "lookup_found": float(one.found.double().mean()),
            "lookup_right": float(one.right.double().mean()), "tokens_a_pass": other.steps / other.passes.count,
        }
        for one, other in zip(off, on)
    ]  # fmt: skip


@torch.no_grad()
def said(model: Any, documents: torch.Tensor, job: Job, steps: int, config: OasisConfig, head: Any) -> Any:
    """Greedy `model.generate` over the cache, `steps + 1` tokens.

    Args:
        documents: `[B, P]`; one row at a time with `speculate`, so that each accepts all its drafts.

    Returns:
        tokens `[B, P + S]`; logits `[B, S, V]` of those behind them, as the cache gave them; and what it moved, bytes a
        row and token, and tokens a decode forward.
    """
    texts, logits, moved, forwards, hits, predicted = [], [], 0.0, 0, 0.0, 0.0
    for ids in documents.split(1 if config.speculate else len(documents)):
        cache = OasisCache(model, config, drafter=drafter_for(job.lookahead, model, head, None))
        with endless(model):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, max_new_tokens=steps + 1,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        texts.append(out.sequences[:, :-1])
        logits.append(torch.stack(out.logits[1:], 1))
        stats = {name: float(value.sum()) for name, value in cache.stats().items()}
        moved += stats["fetched"] * cache.state.block_bytes
        hits, predicted = hits + stats["hits"], predicted + stats["hits"] + stats["fetched"] + stats["capped"]
        forwards += len(ids) * (cache.stepper.forwards - 1)
    traffic = {
        "bytes_per_step": moved / (len(documents) * steps), "hit_rate": hits / max(predicted, 1),
        "tokens_a_forward": len(documents) * steps / forwards,
    }  # fmt: skip
    return torch.cat(texts), torch.cat(logits), traffic


def run(
    model: Any, names: list[str], documents: torch.Tensor, job: Job, steps: int, fetch_ratio: float, head: Any = None,
    **knobs: Any,
) -> dict[str, Any]:  # fmt: skip
    """A row of the results' `runs`: the cache goes its own way, and the dense cache is asked along that text.

    Args:
        job: with `speculation` "own" (off) or "on". head: folder or id, for `cells.HEAD`. knobs: of `OasisConfig`.
    """
    config = job.score.config(
        job.lookahead, budget=job.budget, fetch_ratio=fetch_ratio, speculate=job.speculation == "on",
        draft_tokens=VERIFIED, compile_after=None, **knobs,
    )  # fmt: skip
    tokens, logits, traffic = said(model, documents, job, steps, config, head)
    outcome = compare(logits, dense_logits(model, tokens, documents.shape[1]), tokens, documents.shape[1])
    row = {**describe(job), **summary(outcome, names), **traffic}
    del row["loss_increase"]  # of its own choices: no measure
    return row


def settings_of(
    ranked: list[dict[str, Any]], setting: tuple[Score, str], others: tuple[Score, ...], every: tuple[str, ...]
) -> dict[Score, set[str]]:
    """Lookaheads that are read here too, by score: all of the default's and the `others`', and what is ranked."""
    out: dict[Score, set[str]] = {score: set(every) for score in (setting[0], *others)}
    for row in ranked:
        score = Score(**{name: row[name] for name in asdict(setting[0])})
        out.setdefault(score, set()).add(row["lookahead"])
    return out
