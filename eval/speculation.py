"""What speculation gains by the clock (issue C): Qwen3-8B shape, bf16, random weights, one GPU.

    python eval/speculation.py [--rows 1 8 32] [--drafts 1 2 3 4] [--context 16384] [--no-compile] [--seconds 500]
                               [--head DIR] [--texts context_7000] [--out eval/results/speculation.json]

With random weights no draft would be right, so acceptance is forced: after each pass a row keeps as many drafts as a
draw says, by the shares in which the head in `--head` had its k-th draft accepted in the texts `--texts` of its
`metrics.json`. Everything else is done: a head of the target's shape drafts, its drafts are verified, committed and
told to it, C random blocks a KV head and layer are fetched a step, and `oasis_hf.generate` or `model.generate` runs the
loop. Without speculation the head's draft is lookahead only. Bytes over the link are those of a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outs
import recording
import torch
from provenance import provenance
from transformers import LogitsProcessor

import oasis_hf
from oasis_hf import OasisConfig, bench
from oasis_hf.drafters import Eagle3Drafter
from oasis_hf.drafters.eagle3.head import Eagle3Head
from oasis_hf.forced import Injected, forced_misses
from oasis_hf.train.config import TrainConfig
from oasis_hf.train.made import head_config

BARS = {("oasis_hf.generate", 1): 1.4, ("oasis_hf.generate", 8): 1.15, ("oasis_hf.generate", 32): 1.0,
        ("model.generate", 1): 1.25}  # fmt: skip
SHARE = 0.06
"""Of a step, a draft of a head of matching shape may take so much."""

WARM = 40
"""Passes before those that are timed: eager ones, capture, compilation."""


class Draws:
    """How many drafts each row keeps in each pass. shares: P(the k-th draft is kept), falling; most: drafts."""

    def __init__(self, shares: list[float], rows: int, most: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        chance = torch.rand((4096, rows, 1), generator=generator)
        kept = torch.cat((chance < torch.tensor(shares[:most]), torch.zeros((4096, rows, 1), dtype=torch.bool)), 2)
        self.kept = kept.to(device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    def greedy(self, drafts: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of `oasis_hf.choice.greedy`; on the device alone, so a captured pass draws anew."""
        chain = scores.argmax(-1)
        if not drafts.shape[1]:
            return chain, torch.ones_like(chain[:, 0])
        self.turn.add_(1).remainder_(len(self.kept))
        hit = self.kept.index_select(0, self.turn)[0, :, : drafts.shape[1]]
        chain = torch.cat((torch.where(hit, drafts, chain[:, :-1]), chain[:, -1:]), 1)
        return chain, 1 + hit.sum(1)


class Forcing(LogitsProcessor):
    """In transformers' loop: the next token is the draft that was verified for it, or any other, as the draw says."""

    def __init__(self, cache: Any, draws: Draws) -> None:
        self.cache, self.kept, self.turn = cache, draws.kept.cpu(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        memo = self.cache.stepper.memo
        place = -1 if memo is None else memo.behind[0]
        if memo is None or place >= memo.drafts:
            return scores
        self.turn += place == 0
        hit = bool(self.kept[self.turn % len(self.kept), 0, place])
        return scores.scatter(1, memo.stacked[:, place + 1 : place + 2], torch.inf if hit else -torch.inf)


class Clock:
    """Times of passes, as the host sees them."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.stamps = cache, list[tuple[float, int, int]]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.note(int(input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def note(self, tokens: int) -> None:
        self.stamps.append((time.perf_counter(), tokens, self.cache.stepper.forwards))

    def told(self, rows: int) -> dict[str, float]:
        """From the first pass after `WARM` forwards to the last."""
        first = next(one for one in self.stamps if one[2] >= WARM + self.stamps[0][2])
        last = self.stamps[-1]
        seconds, tokens, passes = (b - a for a, b in zip(first, last))
        return {"tokens_per_second": tokens / seconds, "ms_a_pass": seconds / passes * 1e3,
                "tokens_a_pass": tokens / passes / rows}  # fmt: skip


def head_for(model: Any) -> Eagle3Head:
    """A head of the shape that a trainer would give it, with random weights."""
    config = head_config(model, TrainConfig(minutes=1), 4096)
    weight = model.get_input_embeddings().weight
    head = Eagle3Head(config, weight.device).to(weight.dtype)
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.02)
    return head


@contextmanager
def forced(draws: Draws | None) -> Iterator[None]:
    from oasis_hf import accepting, choice

    own = choice.greedy
    if draws is not None:
        choice.greedy = accepting.greedy = draws.greedy  # type: ignore[assignment]
    try:
        yield
    finally:
        choice.greedy = accepting.greedy = own  # type: ignore[assignment]


def generated(model: Any, head: Eagle3Head, rows: int, drafts: int, loop: str, shares: list[float], args: Any) -> dict:
    """One loop's rate. drafts: 0 for no speculation."""
    config = OasisConfig(
        speculate=drafts > 0, draft_tokens=max(drafts, 1), compile_after=0 if args.compile else None,
        fetch_ratio=args.fetched / 128,
    )  # fmt: skip
    cache = bench.filled(model, config, rows, args.context, 4, Eagle3Drafter(head, model))
    clock, before = Clock(cache), int(cache.stats()["fetched"].sum())
    draws = Draws(shares, rows, drafts, cache.device) if drafts else None
    ids = torch.randint(1, 1000, (rows, args.context + 1), device=cache.device)
    call: dict[str, Any] = dict(past_key_values=cache, do_sample=False, pad_token_id=0, eos_token_id=None)
    with forced_misses(True), forced(draws):
        if loop == "oasis_hf.generate":
            from oasis_hf import generation

            one_round = generation._round

            def timed(*given: Any) -> Any:
                told = one_round(*given)
                clock.note(sum(given[3].tokens))
                return told

            generation._round = timed  # type: ignore[assignment]
            try:
                oasis_hf.generate(model, ids, max_new_tokens=args.tokens, **call)
            finally:
                generation._round = one_round
        else:
            if draws is not None:
                call["logits_processor"] = [Forcing(cache, draws)]
            model.generate(ids, max_new_tokens=args.tokens, stopping_criteria=[clock], **call)
    told = clock.told(rows)
    if loop == "model.generate":  # its clock counts one row's tokens
        told["tokens_per_second"] *= rows
        told["tokens_a_pass"] *= rows
    moved = (int(cache.stats()["fetched"].sum()) - before) * cache.state.block_bytes / cache.stepper.forwards
    graphs = cache.graphs
    return {
        "loop": loop, "rows": rows, "drafts": drafts, **told,
        "bytes_a_token": moved / (rows * told["tokens_a_pass"]),
        "graph": graphs.refused or graphs.unfused or ("compiled layers" if args.compile else "stock layers"),
        "accepted_in_a_graph": getattr(graphs, "unaccepted", None) or "yes", "captures": graphs.captures,
    }  # fmt: skip


def drafter_share(model: Any, head: Eagle3Head, rows: int, args: Any) -> dict[str, Any]:
    """What one draft of the head adds to the replayed step, which scores the same queries without it."""
    times = {}
    for name, drafter in (("without", Injected(1)), ("with", Eagle3Drafter(head, model))):
        config = OasisConfig(
            compile_after=0 if args.compile else None, fetch_ratio=args.fetched / 128,
            lookahead=dict(Eagle3Drafter.lookahead),
        )  # fmt: skip
        with forced_misses(True):
            cache = bench.filled(model, config, rows, args.context, 4, drafter)
            times[name] = bench.step_ms(model, cache, 20)[0]
    share = (times["with"] - times["without"]) / times["with"]
    return {"rows": rows, "step_ms": times["with"], "without_ms": times["without"], "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--fetched", type=int, default=6, help="C, blocks a KV head, layer and step (default: 6)")
    parser.add_argument("--tokens", type=int, default=240, help="new tokens a row (default: 240)")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-share", dest="share", action="store_false", help="leave out the drafter's own share")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--head", type=Path, default=recording.HEAD)
    parser.add_argument("--texts", default="context_7000")
    parser.add_argument("--out", type=outs.json_file, default=Path("eval/results/speculation.json"))
    args = parser.parse_args()
    shares = json.loads((args.head / "metrics.json").read_text())["evaluation"][args.texts]["accept_rate_by_depth"]
    began, model = (
        time.monotonic(),
        bench.random_model(args.shape, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32),
    )
    model.generation_config.eos_token_id = None
    head = head_for(model)
    told: dict[str, Any] = {**provenance(args.device), "acceptance": shares, "runs": [], "share_of_a_draft": []}
    told |= {"texts": args.texts, "context": args.context, "fetched": args.fetched}
    jobs = [(rows, drafts, loop) for rows in args.rows for loop, drafts in (
        ("model.generate", 0), *(("oasis_hf.generate", k) for k in args.drafts),
        *([("model.generate", max(args.drafts))] if rows == 1 else []))]  # fmt: skip
    alone: dict[int, float] = {}
    for rows, drafts, loop in jobs:
        if time.monotonic() - began > args.seconds:
            print(f"no time for {rows} rows, {drafts} drafts")
            continue
        one = generated(model, head, rows, drafts, loop, shares, args)
        torch.cuda.empty_cache()
        if not drafts:
            alone[rows] = one["tokens_per_second"]
        one["times_without"] = one["tokens_per_second"] / alone[rows]
        one["bar"] = BARS.get((loop, rows)) if drafts else None
        told["runs"].append(one)
        print(
            f"{loop:18} rows {rows:2}, drafts {drafts}: {one['tokens_per_second']:8.1f} tokens/s, "
            f"{one['times_without']:.2f}x (bar {one['bar']}), {one['ms_a_pass']:.2f} ms a pass of "
            f"{one['tokens_a_pass']:.2f} tokens, {one['bytes_a_token'] / 1e6:.1f} MB a token, {one['graph']}, "
            f"accepted in a graph: {one['accepted_in_a_graph']}", flush=True,
        )  # fmt: skip
    for rows in args.rows if args.share else ():
        if time.monotonic() - began < args.seconds:
            told["share_of_a_draft"].append(drafter_share(model, head, rows, args))
            print("share of a draft", {k: round(v, 4) for k, v in told["share_of_a_draft"][-1].items()}, flush=True)
    times_of = [(one["loop"], one["rows"], one["times_without"]) for one in told["runs"] if one["drafts"]]
    best = [max((times for *where, times in times_of if tuple(where) == key), default=None) for key in BARS]
    for (loop, rows), bar, times in zip(BARS, BARS.values(), best):
        if times is not None:
            print(f"{loop}, {rows} rows: {times:.2f}x, bar {bar}: {'met' if times >= bar else 'MISSED'}")
    share = statistics.mean(one["share"] for one in told["share_of_a_draft"]) if told["share_of_a_draft"] else None
    if share is not None:
        print(f"a draft takes {share:.1%} of a step, bar {SHARE:.0%}: {'met' if share <= SHARE else 'MISSED'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
