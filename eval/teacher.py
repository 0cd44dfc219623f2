"""What a setting costs in accuracy, for sweeps: SmolLM2 over texts against a dense cache, as in `fetch_cap.py`."""

from __future__ import annotations

import math
from functools import cached_property

import texts
import torch
from agreement import default_setting
from recording import load_tokenizer
from report_tables import Row
from runs import Job, compare, oasis_logits, summary
from workers import Bench

from oasis_hf import OasisConfig
from oasis_hf.bench import random_model

DTYPE = "float32"


def cap_of(budget: int, fetch_ratio: float) -> int:
    """C, blocks a KV head, layer and step."""
    config = OasisConfig(budget=budget, fetch_ratio=fetch_ratio)
    return config.fetch_cap(config.slots)


class Teacher:
    """Every token is given, drafts are looked up, and each forward takes one token, in float32.

    Args:
        quick: noise, a few tokens of it, and the tiny shape with random weights, on a CPU.
    """

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.prompt, self.steps = (322, 6) if quick else (7000, 256)
        self.names = ["noise"] if quick else list(texts.SOURCES)

    @property
    def settings(self) -> Row:
        return {
            "model": "tiny, random" if self.quick else "SmolLM2-135M-Instruct", "prompt": self.prompt,
            "steps": self.steps, "texts": self.names, "dtype": DTYPE, "lookahead": "lookup draft",
        }  # fmt: skip

    @cached_property
    def _bench(self) -> Bench:
        count = self.prompt + self.steps
        if self.quick:
            ids = torch.randint(1, 1000, (1, count), generator=torch.Generator().manual_seed(0))
        else:
            tokenizer = load_tokenizer()
            ids = torch.stack([texts.tokenize(tokenizer, name, count) for name in self.names])
        made = Bench(self.names, ids, self.prompt, self.device, None, 0.05, math.inf)
        if self.quick:
            made.offer(DTYPE, random_model("tiny", self.device, getattr(torch, DTYPE)))
        return made

    def row(self, budget: int, fetch_ratio: float) -> Row:
        """Agreement, KL, `loss_increase` in nats and perplexity as a factor of dense's, and traffic: `bytes_per_step`
        by the cache's counters, `most_bytes_per_step` by the cap, `blocks` fetched a KV head and step, mean."""
        model, dense = self._bench.dense(DTYPE)
        job = Job(default_setting()[0], "lookup draft", budget, DTYPE)
        logits, traffic = oasis_logits(model, self._bench.tokens, self.prompt, job, fetch_ratio)
        row = {**summary(compare(logits, dense, self._bench.tokens, self.prompt), self.names), **traffic}
        row.pop("agree_bits")
        row["blocks"] = cap_of(budget, fetch_ratio) * row["bytes_per_step"] / row["most_bytes_per_step"]
        return {**row, "perplexity_times": math.exp(row["loss_increase"])}
