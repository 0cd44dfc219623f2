"""How good a head is on texts of the target's own: as a decoder would use it, without decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..drafters.eagle3.head import Eagle3Head
from . import data, made
from .features import Target
from .unroll import Unroll


def measure(
    head: Eagle3Head, model: Any, samples: data.Samples, window: int, drafts: int, tokens: int, rows: int
) -> dict[str, Any]:
    """Reads texts once and walks through each as a decoder that drafts `drafts` tokens a pass would.

    Args:
        head: in the dtype in which it will draft. samples: prompts with the target's greedy responses.
        window: positions that a draft sees. tokens, rows: of a batch.

    Returns:
        `next_top1`, share of first drafts that are right; `step_acc`, of each step's where those before were given;
        `tau`, tokens a target pass of a greedy chain; `accept_rate_by_depth`; `draft_vocab_coverage`, of responses;
        how many `tokens` and `passes` that is.
    """
    target = Target(model, head.config.taps, made.draft_ids(head))
    unroll = Unroll(head, model.get_input_embeddings().weight.detach(), window, drafts, 1.0, compile=False)
    hits: list[list[np.ndarray]] = [[] for _ in range(len(samples))]
    for pack in data.in_order(samples, tokens, rows):
        batch, _ = data.batch(samples, pack, tokens, rows)
        batch = batch.to(target.device)
        with torch.no_grad():
            outs = unroll.outputs(batch, target.teach(batch).taps)
            right = []
            for step, out in enumerate(outs):
                guess = head.target_ids(head.logits(out).argmax(-1))
                at = batch.rows + step + 2
                right.append((guess == batch.ids[at.clamp(max=len(batch.ids) - 1)]) & (at <= batch.last))
        found = torch.stack(right, 1).cpu().numpy()
        start = 0
        for index, own in zip(pack.samples, pack.rows):
            hits[index].append(found[start : start + len(own)])
            start += len(own)
    whole = [np.concatenate(part) if part else np.zeros((0, drafts), bool) for part in hits]
    known = np.zeros(head.config.vocab_size, bool)
    known[made.draft_ids(head).cpu().numpy()] = True
    responses = [samples.ids[a + s : b] for a, b, s in zip(samples.offsets, samples.offsets[1:], samples.starts)]
    covered = known[np.concatenate(responses or [np.zeros(0, np.int32)])]
    return {**summary(whole, drafts), "draft_vocab_coverage": _mean(covered), "samples": len(samples)}


def walk(hits: np.ndarray) -> tuple[int, int, np.ndarray]:
    """One response. hits: `[n - 1, K]` bool for n response tokens, whether the k-th draft of the forward that follows
    token i is right, where those before it are (False behind the end).

    Returns:
        Tokens that passes gave (all but the first, which the prompt gives), passes, and how many passes accepted the
        k-th draft, `[K]`.
    """
    at = passes = 0
    accepted = np.zeros(hits.shape[1], np.int64)
    while at < len(hits):
        run = int(np.minimum.accumulate(hits[at]).sum())
        accepted[:run] += 1
        passes += 1
        at += run + 1
    return min(at, len(hits)), passes, accepted


def summary(hits: list[np.ndarray], drafts: int) -> dict[str, Any]:
    """Of all responses together."""
    tokens = passes = 0
    accepted = np.zeros(drafts, np.int64)
    for one in hits:
        more, rounds, depth = walk(one)
        tokens, passes, accepted = tokens + more, passes + rounds, accepted + depth
    steps = [
        _mean(np.concatenate([one[: len(one) - k, k] for one in hits if len(one) > k] or [np.zeros(0, bool)]))
        for k in range(drafts)
    ]
    return {
        "next_top1": steps[0],
        "step_acc": steps,
        "tau": round(tokens / max(passes, 1), 4),
        "accept_rate_by_depth": [round(float(a) / max(passes, 1), 4) for a in accepted],
        "K": drafts,
        "passes": passes,
        "tokens": tokens,
    }


def _mean(x: np.ndarray) -> float:
    return round(float(x.mean()), 4) if len(x) else 0.0
