"""Many runs of the model: one after the other, or by several processes that share a device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import own_text
import torch
from recording import load
from runs import NUMERICS, Job, compare, dense_logits, describe, oasis_logits, summary


class Bench:
    """A model, the texts and the dense logits, by dtype, made when first asked for.

    Args:
        texts: names. tokens: `[B, T]` on the host. folder: see `recording.load`. stop: time (of the machine's clock)
            after which no run is started. head: folder or id of an EAGLE-3 head, or None.
    """

    def __init__(
        self, texts: list[str], tokens: torch.Tensor, prompt: int, device: str, folder: str | None,
        fetch_ratio: float, stop: float, head: str | None = None,
    ) -> None:  # fmt: skip
        self.head = head
        self.texts, self.prompt, self.folder = texts, prompt, folder
        self.device, self.fetch_ratio, self.stop = device, fetch_ratio, stop
        self.tokens = tokens.to(device)
        self.models: dict[str, Any] = {}
        self.made: dict[str, torch.Tensor] = {}

    def offer(self, dtype: str, model: Any) -> None:
        """A model that is loaded already."""
        self.models[dtype] = model

    def model(self, dtype: str) -> Any:
        if dtype not in self.models:
            self.models[dtype] = load(self.device, getattr(torch, dtype), self.folder)
        return self.models[dtype]

    def dense(self, dtype: str) -> tuple[Any, torch.Tensor]:
        model = self.model(dtype)
        if dtype not in self.made:
            self.made[dtype] = dense_logits(model, self.tokens, self.prompt)
        return model, self.made[dtype]

    def floor(self, dtype: str, logits: torch.Tensor) -> dict[str, Any]:
        """Dense logits `[B, S, V]` of another order of the same arithmetic against the dense steps."""
        outcome = compare(logits, self.dense(dtype)[1], self.tokens, self.prompt)
        return {"why": NUMERICS, "dtype": dtype, **summary(outcome, self.texts)}

    def run(self, job: Job) -> dict[str, Any]:
        """A row of the results' `runs`."""
        if time.time() > self.stop:
            return {**describe(job), "skipped": "out of time"}
        if job.speculation != "off":
            documents, steps = self.tokens[:, : self.prompt], self.tokens.shape[1] - self.prompt
            model = self.model(job.dtype)
            return own_text.run(model, self.texts, documents, job, steps, self.fetch_ratio, self.head)
        model, dense = self.dense(job.dtype)
        logits, traffic = oasis_logits(model, self.tokens, self.prompt, job, self.fetch_ratio, self.head)
        outcome = compare(logits, dense, self.tokens, self.prompt)
        return {**describe(job), **summary(outcome, self.texts), **traffic}


_bench: Bench | None = None


def _start(arguments: tuple[Any, ...], threads: int) -> None:
    global _bench
    torch.set_num_threads(threads)
    _bench = Bench(*arguments)


def _run(job: Job) -> dict[str, Any]:
    assert _bench is not None
    return _bench.run(job)


def run_in_processes(jobs: list[Job], workers: int, arguments: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Start all jobs; rows as they come. A decode step of the reference path is bound by launches, so several
    processes share a GPU.

    Args:
        arguments: of `Bench`.
    """
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (arguments, 1))
    futures = [pool.submit(_run, job) for job in jobs]
    pool.shutdown(wait=False)  # what was handed in is still done
    return (done.result() for done in as_completed(futures))
