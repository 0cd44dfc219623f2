"""What `accuracy.py` compares, and what follows from its scores: differences to dense, intervals, bars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oasis_hf.modes import PAPER_SCORE

Row = dict[str, Any]
CORRECTED: dict[str, Any] = {"correction": "auto", "correct_above": 0.05, "correct_blocks": 32}

LAYERS = (2, 6, 7, 8, 14, 17, 18, 20)
"""The eight of SmolLM2's 30 that do most corrections with the adapter and a budget of 2,064: 84% of them, the mean over
six tasks of the family "train". `lane_layers.py` measures that."""

WIDE: dict[str, Any] = {"fetch_ratio": 0.2}

SCORES: dict[str, dict[str, Any]] = {
    "ours": {},
    "paper": PAPER_SCORE,
    "corrected": CORRECTED,
    "few": {**CORRECTED, "correct_layers": LAYERS},
    "wide": WIDE,
    "wide_few": {**CORRECTED, **WIDE, "correct_layers": LAYERS},
}
"""Knobs of each way to choose blocks: this package's defaults, Quest's own bound, and the defaults with the correction
lane, which lets heads that miss much fetch before they attend, in all layers or where that happens most; and with four
times the fetch ratio, which the link carries where rows are few."""


def knobs(score: str, layers: int) -> dict[str, Any]:
    """Of a way to choose blocks, for a model of so many layers."""
    found = SCORES[score]
    if "correct_layers" not in found:
        return found
    return {**found, "correct_layers": tuple(one for one in LAYERS if one < layers) or None}


CALLED = {
    "paper": "paper's score", "corrected": "corrected", "few": "corrected in a few layers", "wide": "fetch ratio 0.2",
    "wide_few": "fetch ratio 0.2, corrected in a few layers",
}  # fmt: skip
"""What a label says of these."""

WHOLE = ("ours", "corrected", "few", "wide", "wide_few")
"""Those of which `oasis` gets all samples."""

BAND = (0.60, 0.95)
"""Where dense must lie for a task to tell modes apart: the issue's bars are about such."""

ENOUGH = 5
"""Tasks in the band that the bars ask for."""

DRAWS = 2000


@dataclass(frozen=True)
class Setting:
    """mode: of `oasis_hf.modes`. score: a name in `SCORES`. budget: tokens; 0 for dense. equal: what it has in common
    with `oasis` at that budget: "tokens" attended to, or "bytes" of GPU memory (its own budget is then another)."""

    mode: str
    budget: int = 0
    score: str = "ours"
    equal: str = "tokens"

    @property
    def key(self) -> str:
        return f"{self.mode} {self.budget} {self.score} {self.equal}" if self.budget else self.mode

    @property
    def label(self) -> str:
        """Without the budget."""
        more = [CALLED.get(self.score), "equal bytes" if self.equal == "bytes" else None]
        told = ", ".join(filter(None, more))
        return f"{self.mode} ({told})" if told else self.mode


DENSE = Setting("dense")


def settings(
    budgets: Iterable[int], modes: Iterable[str], equal_bytes: bool = True, scores: Iterable[str] = WHOLE
) -> list[Setting]:
    """Dense first, then `oasis` by these scores, then the others."""
    chosen, out = set(modes) | {"dense", "oasis"}, [DENSE]
    for budget in budgets:
        out += [Setting("oasis", budget, score) for score in WHOLE if score in set(scores)]
    for budget in budgets:
        for mode in ("quest", "on_demand", "previous", "window"):
            if mode in chosen:
                out.append(Setting(mode, budget))
                if mode == "quest":
                    out += [Setting("quest", budget, "paper"), Setting("oasis", budget, "paper")]
                if equal_bytes and mode in ("previous", "window"):
                    out.append(Setting(mode, budget, equal="bytes"))
    return out


def in_band(shard: Row, band: tuple[float, float] = BAND) -> bool:
    dense = shard["scores"].get(DENSE.key, [])
    return bool(dense) and band[0] <= float(np.mean(dense)) <= band[1]


def paired(shard: Row, setting: Setting, other: Setting = DENSE) -> np.ndarray | None:
    """`setting` less `other` on the samples that both have, None where there are none."""
    one, two = (shard["scores"].get(which.key, []) for which in (setting, other))
    count = min(len(one), len(two))
    return np.asarray(one[:count]) - np.asarray(two[:count]) if count else None


def bootstrap(differences: list[np.ndarray], seed: int = 0, draws: int = DRAWS) -> list[float]:
    """95% interval of the mean over tasks of the mean over samples: each task's samples are drawn anew, with
    replacement; the tasks themselves stay."""
    rng = np.random.default_rng(seed)
    means = np.zeros(draws)
    for own in differences:
        means += own[rng.integers(0, len(own), (draws, len(own)))].mean(1)
    low, high = np.percentile(means / len(differences), [2.5, 97.5])
    return [float(low), float(high)]


def cells(shards: list[Row], band: tuple[float, float] = BAND) -> list[Row]:
    """A row a model, length, task and setting."""
    out = []
    for shard in shards:
        for setting in map(named, shard["scores"]):
            scores, less = shard["scores"][setting.key], paired(shard, setting)
            if less is None:
                continue
            out.append({
                "model": shard["model"], "length": shard["length"], "task": shard["task"], **told(setting),
                "own_budget": shard["budgets"].get(setting.key), "samples": len(scores),
                "score": float(np.mean(scores)), "less_dense": float(less.mean()),
                "interval": bootstrap([less]), "in_band": in_band(shard, band),
                "decoded": shard["decoded"].get(setting.key),
            })  # fmt: skip
    return out


def told(setting: Setting) -> Row:
    """Of a setting, for a row."""
    return {"mode": setting.mode, "budget": setting.budget, "score_name": setting.score, "equal": setting.equal}


def named(key: str) -> Setting:
    """The setting of a key."""
    if " " not in key:
        return Setting(key)
    mode, budget, score, equal = key.split()
    return Setting(mode, int(budget), score, equal)


def over_tasks(shards: list[Row], setting: Setting, other: Setting = DENSE) -> Row | None:
    """`setting` less `other`, mean over the tasks of these shards that have both, and the worst of them."""
    found = [(shard, less) for shard in shards if (less := paired(shard, setting, other)) is not None]
    if not found:
        return None
    means = [float(less.mean()) for _, less in found]
    worst = int(np.argmin(means))
    return {
        "tasks": len(found), "samples": sum(len(less) for _, less in found), "difference": float(np.mean(means)),
        "interval": bootstrap([less for _, less in found]), "worst": means[worst],
        "worst_task": f"{found[worst][0]['task']} at {found[worst][0]['length']:,}",
        "score": float(np.mean([np.mean(shard["scores"][setting.key]) for shard, _ in found])),
    }  # fmt: skip


def summaries(shards: list[Row], band: tuple[float, float] = BAND) -> list[Row]:
    """A row a model, length ("all" among them) and setting, over the tasks in the band."""
    out = []
    for model in dict.fromkeys(shard["model"] for shard in shards):
        own = [shard for shard in shards if shard["model"] == model and in_band(shard, band)]
        lengths: list[Any] = sorted({shard["length"] for shard in own})
        for length in [*lengths, "all"]:
            some = [shard for shard in own if length in (shard["length"], "all")]
            for key in dict.fromkeys(key for shard in some for key in shard["scores"]):
                found = over_tasks(some, named(key))
                if found is not None:
                    out.append({"model": model, "length": length, **told(named(key)), **found})
    return out


def bars(shards: list[Row], model: str) -> list[Row]:
    """Those of the issue, over the tasks of `model` in the band; differences are in points of 100."""
    own = [shard for shard in shards if shard["model"] == model and in_band(shard)]
    out: list[Row] = []

    def tell(what: str, measured: float | None, bar: float) -> None:
        if measured is not None:
            out.append({"model": model, "what": what, "measured": measured, "bar": bar, "met": measured >= bar})

    for length in sorted({shard["length"] for shard in shards if shard["model"] == model}):
        tell(f"tasks with dense in the band at {length:,} tokens", sum(s["length"] == length for s in own), ENOUGH)
    budgets = sorted({named(key).budget for shard in own for key in shard["scores"]} - {0})
    for budget in budgets:
        for score in WHOLE:
            oasis = Setting("oasis", budget, score)
            have = sum(oasis.key in shard["scores"] for shard in own)
            name = f"{oasis.label} at {budget}" + f", {have} of {len(own)} tasks," * (have < len(own))
            if budget in (1040, 2064):
                tell(f"{name} less dense", points(over_tasks(own, oasis)), -0.7 if budget == 2064 else -2.0)
            for mode in ("previous", "window"):
                nearer = nearer_by(own, oasis, Setting(mode, budget, equal="bytes"))
                tell(f"how much nearer to dense {name} is than {mode} at its bytes", nearer, 0)
            found = over_tasks(own, oasis, Setting("quest", budget))
            tell(f"{name} less quest, the same score", points(found), -0.5)
        found = over_tasks(own, Setting("oasis", budget, "paper"), Setting("quest", budget, "paper"))
        tell(f"oasis less quest at {budget}, paper's score", points(found), -0.5)
    return out


def points(found: Row | None) -> float | None:
    return None if found is None else 100 * found["difference"]


def nearer_by(shards: list[Row], oasis: Setting, other: Setting) -> float | None:
    """In points of 100: how much further from dense `other` is than `oasis`, on the samples that both have."""
    both = [(one, two) for shard in shards
            if (one := paired(shard, oasis)) is not None and (two := paired(shard, other)) is not None]  # fmt: skip
    if not both:
        return None
    count = min(len(two) for _, two in both)
    gaps = [abs(float(np.mean([pair[which][:count].mean() for pair in both]))) for which in (0, 1)]
    return 100 * (gaps[1] - gaps[0])
