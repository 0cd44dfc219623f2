"""A decode process: prompts go to prefill nodes, and their KV comes as it is selected."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, TextStreamer

from .. import supported
from ..attach import cache_name
from ..cache import OasisCache
from ..placing import placed
from .decode import PrefillClient, Prefilled
from .errors import DeadlineExceeded, DisaggError, PeerLost, PoolFull, Refused, StaleLease
from .link import Absence
from .wire import Address

AHEAD = 2
"""Prompts that are being prefilled while another is decoded."""

AWAY = 2.0
"""Seconds that a lost node has to come back where a prompt can be read on another: longer than a pool server's restart
(with NIXL that takes three, and the prompt is read again)."""

LOST = (PeerLost, DeadlineExceeded, StaleLease)
"""What a node does to a request that another node may do better."""


@dataclass
class Job:
    """One completion. prompt: text, or ids. options: of `generate`. seed: of sampling, None: none is set.

    Attributes:
        tell: called with ("text", piece), then ("done", what came of it) or ("error", a sentence).
        gone: set where nobody waits for it any more: it ends with the next token, or is not begun.
        tried, why: nodes that lost it, and how the last one did.
    """

    prompt: str | list[int]
    options: dict[str, Any]
    seed: int | None
    tell: Callable[[str, Any], None]
    tried: set[Address] = field(default_factory=set)
    why: str = ""
    gone: bool = False


class _Gone(StoppingCriteria):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.job.gone, device=input_ids.device)


class _Pieces(TextStreamer):
    def __init__(self, tokenizer: Any, tell: Callable[[str, Any], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tell = tell

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.tell("text", text)


class DecodeWorker:
    """Decodes one completion at a time; the next prompts are prefilled meanwhile.

    A prefill node that is lost costs a request nothing but time where there is another: its prompt is read there, and
    other requests are decoded meanwhile.

    Args:
        model, tokenizer: as on the nodes. addresses: of the nodes, taken in turn. secret, client: as `PrefillClient`;
            where it has prefixes, each prompt's blocks go there when it has been answered.
        patience: seconds that a prompt may wait for room in the nodes' pools, and for being read.
    """

    def __init__(
        self, model: Any, tokenizer: Any, addresses: Sequence[Address], secret: bytes, patience: float = 120.0,
        **client: Any,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.patience = model, tokenizer, patience
        if len(set(addresses)) > 1:
            client.setdefault("away", AWAY)
        self._connect = {at: lambda at=at: PrefillClient(model, at, secret, **client) for at in addresses}
        self._clients: dict[Address, PrefillClient] = {}
        self._absences = {at: Absence() for at in addresses}
        self._turn = itertools.cycle(addresses)
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._ready: queue.Queue[tuple[Job, torch.Tensor, Prefilled] | None] = queue.Queue(AHEAD)
        self._over, self._ending = False, threading.Lock()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._prefill, self._decode)]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Ends after what was added."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for client in self._clients.values():
            client.close()

    def _prefill(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                with self._ending:
                    self._over = self._jobs.empty()
                if self._over:
                    break
                self._jobs.put(None)  # what came back goes first
                continue
            try:
                if not job.gone:
                    ids = self._ids(job)
                    self._ready.put((job, ids, self._prefilled(job, ids)))
            except Exception as error:
                job.tell("error", _sentence(error))
            del job
        self._ready.put(None)

    def _ids(self, job: Job) -> torch.Tensor:
        if isinstance(job.prompt, str):
            ids = self.tokenizer(job.prompt, return_tensors="pt").input_ids[0]
        else:
            ids = torch.tensor(job.prompt, dtype=torch.int64)
        new, most = job.options["max_new_tokens"], supported.text_config(self.model).max_position_embeddings
        if len(ids) + new > most:
            raise Refused(
                "request", f"A prompt of {len(ids):,} tokens and max_tokens={new:,} are more than the {most:,} "
                "tokens of the model: ask for fewer."
            )  # fmt: skip
        return ids

    def _prefilled(self, job: Job, ids: torch.Tensor) -> Prefilled:
        """From the next node that is there and has room."""
        errors: list[DisaggError] = []
        for address in itertools.islice(self._turn, len(self._connect)):
            if address in job.tried:
                continue
            try:
                return self._client(address).prefill(ids, self.patience)
            except (*LOST, PoolFull) as error:
                errors.append(error)
        raise errors[-1] if errors else PeerLost(f"Every prefill node lost this request; the last: {job.why}")

    def _client(self, address: Address) -> PrefillClient:
        if address not in self._clients:
            absence = self._absences[address]
            absence.check()
            try:
                self._clients[address] = self._connect[address]()
            except (PeerLost, DeadlineExceeded) as error:
                absence.note(error, error)
                raise
            absence.end()
        return self._clients[address]

    def _decode(self) -> None:
        while (ready := self._ready.get()) is not None:
            self._answer(*ready)
            del ready  # else its pages stay on the node until the next one comes

    def _answer(self, job: Job, ids: torch.Tensor, prefilled: Prefilled) -> None:
        try:
            if job.gone:
                prefilled.close()
                return
            while not self._completed(job, ids, prefilled):
                with self._ending:
                    if not self._over:
                        return self._jobs.put(job)
                prefilled = self._prefilled(job, ids)
        except Exception as error:
            job.tell("error", _sentence(error))

    def _completed(self, job: Job, ids: torch.Tensor, prefilled: Prefilled) -> bool:
        """Whether it was, and is told; else its node lost it."""
        if job.tried:
            job.tell("again", None)  # what was said before is said anew
        try:
            job.tell("done", self._generated(job, ids, prefilled))
            with contextlib.suppress(DisaggError, MemoryError):  # it was answered, and can be read again
                prefilled.keep()
            return True
        except LOST as error:
            job.tried.add(prefilled.client.address)
            job.why = str(error)
            return False
        finally:
            prefilled.close()

    def _generated(self, job: Job, ids: torch.Tensor, prefilled: Prefilled) -> dict[str, Any]:
        cache = OasisCache.from_prefill(prefilled, self.model)
        try:
            return self._said(job, ids, cache)
        finally:  # its pages and its lease must not wait for a collection
            with contextlib.suppress(DisaggError):
                cache.reset()

    def _said(self, job: Job, ids: torch.Tensor, cache: OasisCache) -> dict[str, Any]:
        device = placed(self.model).device
        if job.options.get("do_sample"):
            if job.seed is None:
                job.seed = int(torch.seed()) & 0x7FFFFFFF  # decoded again it says the same
            torch.manual_seed(job.seed)
        prompt = ids[None].to(device)
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), streamer=_Pieces(self.tokenizer, job.tell),
            stopping_criteria=[_Gone(job)], **{cache_name(self.model): cache}, **job.options,
        )  # fmt: skip
        new = out[0, len(ids) :]
        near = cache.state.store
        ends = self.model.generation_config.eos_token_id
        ended = len(new) and int(new[-1]) in ([ends] if isinstance(ends, int) else ends or [])
        return {
            "text": self.tokenizer.decode(new, skip_special_tokens=True), "ids": new.tolist(),
            "prompt_tokens": len(ids), "finish": "stop" if ended else "length",
            "bytes": 0 if near is None else near.near_bytes,
        }  # fmt: skip


def _sentence(error: Exception) -> str:
    # Of a `Refused` whoever asked is told that it is their mistake: a wrong secret or model is not.
    ours = isinstance(error, Refused) and error.what != "request"
    kind = DisaggError.__name__ if ours else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())}"
