"""The model itself, teacher-forced: `OasisCache` against the dense cache on the same tokens."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cells import Score, lookahead_named
from transformers import DynamicCache

from oasis_hf import Drafter, Eagle3Drafter, OasisCache, OracleDrafter, PreviousDrafter, PromptLookupDrafter
from oasis_hf.attach import cache_name

NUMERICS = "dense again, all steps in one forward (rounding only)"


@dataclass(frozen=True)
class Job:
    """One run: a setting at a budget, in a dtype of the model. speculation: "off", teacher-forced; "own", off, on the
    text that the cache itself says; "on", the same with drafts accepted."""

    score: Score
    lookahead: str
    budget: int
    dtype: str = "bfloat16"
    speculation: str = "off"


def describe(job: Job) -> dict[str, Any]:
    row = {"lookahead": job.lookahead, "budget": job.budget, "dtype": job.dtype, "speculation": job.speculation}
    return {**asdict(job.score), **row}


def drafter_for(lookahead: str, model: Any, head: Any, tokens: torch.Tensor | None) -> Drafter:
    """A new one.

    Args:
        head: folder or id of an EAGLE-3 head, for `cells.HEAD`. tokens: `[B, T]`, for drafts that are true.
    """
    draft = lookahead_named(lookahead).draft
    if draft == "head":
        return Eagle3Drafter.from_pretrained(head, model)
    if draft == "true":
        if tokens is None:
            raise ValueError(f"The lookahead {lookahead!r} needs the text, and the model is still to say it.")
        return OracleDrafter(tokens)
    return PromptLookupDrafter() if draft == "lookup" else PreviousDrafter()


@dataclass
class Outcome:
    """agree: `[B, S]` bool, same top token as dense. kl: `[B, S]` nats, KL(dense || this). loss: `[B, S]`, this run's
    negative log-likelihood of the true token less the dense one's."""

    agree: torch.Tensor
    kl: torch.Tensor
    loss: torch.Tensor


@torch.no_grad()
def dense_logits(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """`[B, S, V]` of a `DynamicCache` fed one token a step. tokens: `[B, prompt + S]`."""
    cache = DynamicCache(config=model.config)
    model(tokens[:, :prompt], **{cache_name(model): cache}, logits_to_keep=1)
    return _steps(model, cache, tokens, prompt)


@torch.no_grad()
def oasis_logits(
    model: Any, tokens: torch.Tensor, prompt: int, job: Job, fetch_ratio: float | str, head: Any = None, **knobs: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """`[B, S, V]` of an `OasisCache`, and its traffic: per row and decode step, summed over layers and KV heads."""
    drafter = drafter_for(job.lookahead, model, head, tokens)
    config = job.score.config(job.lookahead, budget=job.budget, fetch_ratio=fetch_ratio, store="resident", **knobs)
    cache = OasisCache(model, config, drafter=drafter)
    model(tokens[:, :prompt], **{cache_name(model): cache}, logits_to_keep=1)
    logits = _steps(model, cache, tokens, prompt)
    stats = {name: float(value.sum()) for name, value in cache.stats().items()}
    each = tokens.shape[0] * (tokens.shape[1] - prompt)
    most = cache.state.cap * len(cache.sparse_layers) * model.config.num_key_value_heads
    if cache.state.shares is not None:
        most = int(cache.state.shares.budget) // len(tokens)
    predicted = stats["hits"] + stats["fetched"] + stats["capped"]
    traffic = {
        "bytes_per_step": stats["fetched"] * cache.state.block_bytes / each,
        "most_bytes_per_step": most * cache.state.block_bytes,
        "hit_rate": stats["hits"] / max(predicted, 1),
        "capped_share": stats["capped"] / max(predicted, 1),
        "wasted_share": stats["wasted"] / max(stats["fetched"], 1),
        "first_bytes": stats["first"] * cache.state.block_bytes / tokens.shape[0],
    }
    return logits, traffic


def _steps(model: Any, cache: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    rows = []
    for position in range(prompt, tokens.shape[1]):
        at = torch.full((len(tokens), 1), position, device=tokens.device)
        out = model(tokens[:, position : position + 1], **{cache_name(model): cache}, position_ids=at)
        rows.append(out.logits[:, -1])
    return torch.stack(rows, 1)


def compare(logits: torch.Tensor, dense: torch.Tensor, tokens: torch.Tensor, prompt: int) -> Outcome:
    """Both `[B, S, V]`; step t's logits are of the token after position `prompt + t` (the last has none: loss 0)."""
    agree, kl, loss = [], [], []
    for row in range(len(dense)):  # a row at a time: float32 of everything is large
        mine, true = logits[row].float().log_softmax(-1), dense[row].float().log_softmax(-1)
        agree.append(logits[row].argmax(-1) == dense[row].argmax(-1))
        kl.append((true.exp() * (true - mine)).sum(-1))
        wanted = tokens[row, prompt + 1 :, None]
        more = true[:-1].gather(1, wanted) - mine[:-1].gather(1, wanted)
        loss.append(F.pad(more.squeeze(1), (0, 1)))
    return Outcome(torch.stack(agree).cpu(), torch.stack(kl).cpu(), torch.stack(loss).cpu())


def summary(outcome: Outcome, texts: list[str]) -> dict[str, Any]:
    """Means, a 95% interval of agreement over tokens, each text's own, and every token's agreement as hexadecimal bits
    (the last step is the lowest bit), so that runs can be paired later."""
    agree = outcome.agree.double()
    bits = ["".join("1" if one else "0" for one in row.tolist()) for row in outcome.agree]
    return {
        "agreement": float(agree.mean()), "agreement_interval": interval(agree.flatten()),
        "agreement_by_text": dict(zip(texts, agree.mean(1).tolist())),
        "kl": float(outcome.kl.double().mean()), "kl_by_text": dict(zip(texts, outcome.kl.double().mean(1).tolist())),
        "loss_increase": float(outcome.loss.double().sum() / (outcome.loss.numel() - len(texts))),
        "agree_bits": {name: f"{int(row, 2):x}" for name, row in zip(texts, bits)},
    }  # fmt: skip


def paired(one: dict[str, Any], other: dict[str, Any], steps: int) -> dict[str, Any]:
    """Agreement of one row of runs less another's: mean and 95% interval over the same tokens."""
    flags = [
        torch.tensor([[int(c) for c in f"{int(bits, 16):0{steps}b}"] for bits in row["agree_bits"].values()])
        for row in (one, other)
    ]
    difference = (flags[0] - flags[1]).double()
    return {"mean": float(difference.mean()), "interval": interval(difference.flatten())}


def interval(values: torch.Tensor) -> list[float]:
    """95% interval of a mean over tokens, by the normal law (a thousand tokens and more; neighbours taken as
    independent). For a paired comparison pass differences."""
    mean = float(values.double().mean())
    half = 1.96 * float(values.double().std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return [mean - half, mean + half]
