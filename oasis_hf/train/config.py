"""`TrainConfig`: every knob of a training, checked once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..config import ConfigError


class TrainError(ConfigError):
    """A drafter can't be trained like this; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class TrainConfig:
    """How a head is made. Times are minutes, lengths tokens.

    Attributes:
        generate_minutes, generate_tokens: when generation ends, whichever comes first; the prompts' end ends it too.
        new_tokens: longest response. greedy_share: of the responses, the others are sampled at 0.5 to 1.0.
        generate_batch: rows at a time, where the memory allows. kv_gib: memory for their keys and values.
        long_prompts: prompts over long documents, for each 100 others. continuations: runs of documents that the target
            goes on with as they are, likewise. longest: of prompt and response, None: as far
            as the target goes.
        document_share: of a document's positions that are learned from.
        draft_vocab: ids that the head can propose; None: 8,192 for a vocabulary of up to 64K, else 32,000.
        intermediate: width of the head's MLP; None: the target's. taps: None: as EAGLE has them.
        window: positions that a draft sees. steps_ahead: unrolled steps of a training step; decay: of their weights.
        minutes, steps: when training ends, whichever comes first; the schedule follows the one that is given, and
            `minutes` where both are.
        tokens: positions of a training step; rows: of these, how many are learned from at most.
        lr, final_lr, warmup, clip, beta2: of AdamW and its cosine schedule; warmup and final_lr are shares.
        cache_gib: device memory in which the target's states are kept; else they are computed anew in each epoch.
        checkpoint_minutes: between checkpoints. evaluate: held-out prompts of each kind; 0: none.
        seed: of everything that is random.
    """

    generate_minutes: float = 4.0
    generate_tokens: int = 12_000_000
    new_tokens: int = 288
    greedy_share: float = 0.5
    generate_batch: int = 3072
    kv_gib: float = 48.0
    long_prompts: float = 6.0
    continuations: float = 10.0
    longest: int | None = None
    document_share: float = 0.5
    draft_vocab: int | None = None
    intermediate: int | None = None
    taps: tuple[int, ...] | None = None
    window: int = 4096
    steps_ahead: int = 5
    decay: float = 0.8
    minutes: float | None = None
    steps: int | None = None
    tokens: int = 32768
    rows: int = 16384
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: float = 0.02
    clip: float = 1.0
    beta2: float = 0.95
    cache_gib: float = 50.0
    checkpoint_minutes: float = 3.0
    evaluate: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"new_tokens": 2, "generate_batch": 1, "window": 2, "steps_ahead": 1, "tokens": 128, "rows": 128}
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise TrainError(f"{_flag(name)} must be {least} or more, not {getattr(self, name)}.")
        for name in ("draft_vocab", "intermediate", "steps", "longest"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise TrainError(f"{_flag(name)} must be 1 or more, not {getattr(self, name)}.")
        for name in ("greedy_share", "document_share", "warmup", "final_lr", "decay", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise TrainError(f"{_flag(name)} must lie from 0 to 1, not be {getattr(self, name)}.")
        for name in ("generate_minutes", "minutes", "lr", "clip", "checkpoint_minutes", "kv_gib"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise TrainError(f"{_flag(name)} must be more than 0, not {getattr(self, name)}.")
        for name in ("tokens", "rows"):
            if getattr(self, name) % 128:
                raise TrainError(f"{_flag(name)} must be a multiple of 128, not {getattr(self, name)}.")
        if self.window <= self.steps_ahead:
            raise TrainError(f"--window must be more than the {self.steps_ahead} steps ahead, not {self.window}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
