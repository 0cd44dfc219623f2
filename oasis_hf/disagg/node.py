"""A prefill node: prompts wait here in turn, are read, and are served until their readers are done with them."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

import torch

from .errors import DisaggError, Refused, StaleLease
from .increment import Held
from .poolserver import PoolServer
from .prefill import PrefillWorker

MOST_FAILED = 256
"""Failed requests whose reason is remembered."""


class PrefillNode:
    """Takes prompts over the control channel of a pool server; see `PrefillClient.prefill`.

    A prompt's pages are reserved when it comes, so a full pool refuses it at once, with its numbers.

    Args:
        worker: reads them, one at a time. secret, serving: as `PoolServer` takes them.
    """

    def __init__(self, worker: PrefillWorker, secret: bytes, **serving: Any) -> None:
        self.worker, self.staging = worker, worker.staging
        self._prompts: queue.Queue[tuple[str, torch.Tensor, Held | None] | None] = queue.Queue()
        self._waiting: set[str] = set()
        self._failed: dict[str, str] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="oasis-prefill", daemon=True)
        self.server = PoolServer(self.staging, secret, worker.terms, submit=self.submit, stage=self.stage, **serving)
        self._thread.start()

    def submit(self, request: str, ids: torch.Tensor, held: Any = None) -> None:
        """A prompt of ids `[n]` takes its place in the queue.

        Args:
            held: as `Control.submit` has it.

        Raises:
            PoolFull: there is no room for its KV now. Refused: it is empty, too long, or has ids that are none; or
                more of it is held than there is.
        """
        config = self.worker.model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None)
        if not len(ids) or (most is not None and len(ids) >= most):
            raise Refused("request", f"A prompt of {len(ids):,} tokens is not possible: use 1 to {(most or 0) - 1:,}.")
        if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()):
            raise Refused("request", f"A prompt has token ids outside 0 to {config.vocab_size - 1:,}.")
        had = None if held is None else Held.parse(held, len(ids))
        self.worker.reserve(request, len(ids))
        with self._lock:
            self._waiting.add(request)
        self._prompts.put((request, ids, had))

    def stage(self, request: str) -> str:
        """ "waiting" or "published".

        Raises:
            StaleLease: no such request. DisaggError: reading it failed; the message says how.
        """
        with self._lock:
            if request in self._waiting:
                return "waiting"
            if request in self._failed:
                raise DisaggError(f"The prefill of request {request!r} failed: {self._failed[request]}")
        if not self.staging.holds(request):
            raise StaleLease(f"There is no request {request!r} on this node (any more).")
        return "published"

    def _read(self) -> None:
        while (prompt := self._prompts.get()) is not None:
            request, ids, held = prompt
            why = None
            try:
                self.worker.read(request, ids, held)
            except Exception as error:  # the next prompt may be better
                why = f"{type(error).__name__}: {error}"
            with self._lock:
                if why is not None:
                    self._failed[request] = why
                    while len(self._failed) > MOST_FAILED:
                        self._failed.pop(next(iter(self._failed)))
                self._waiting.discard(request)

    def close(self) -> None:
        """Ends after the prompt that is being read; readers lose their connections."""
        self._prompts.put(None)
        self.server.close()
        self._thread.join(60)
        with contextlib.suppress(DisaggError):
            self.staging.close()

    def __enter__(self) -> "PrefillNode":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
