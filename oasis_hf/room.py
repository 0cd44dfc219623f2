"""Room for the tokens that come: pages, slots and summaries, made by the host before the device needs them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import sparsify
from .config import BLOCK
from .state import State

_Method = TypeVar("_Method", bound=Callable[..., Any])


def keeps_buffers(method: _Method) -> _Method:
    """A method that makes or changes what outlives the call, which must never become an inference tensor."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


class Room:
    """The part of `OasisCache` that makes room."""

    if TYPE_CHECKING:
        state: State
        layers: list[Any]

        @property
        def sparse_layers(self) -> list[Any]: ...

    def prepare(self, count: int) -> None:
        """Host-side work before a decode forward: pages, slots and summaries for `count` more tokens a row.

        Raises:
            ValueError: nothing came before it (`mode` said "decode" or "verify" of a prompt).
        """
        rows = self.state.need_rows()
        if rows.columns == 0:
            raise ValueError(
                "A decode or verify forward needs a prompt before it, but this OasisCache is empty: run the prompt "
                "outside `with cache.mode(...)` or under mode('prefill')."
            )
        self.state.dirty_from = self._make_room(count)
        if self.state.pace is not None and self.state.shares is not None:
            self.state.pace.begin(self.state.shares)
        for layer in self.layers:
            if layer.is_sliding:
                layer.prepare(count)

    def prepare_ahead(self, count: int) -> None:
        """The same for one token more, beside a step of `count` tokens that the device has just begun. Nothing is
        raised for want of memory: the step that needs it will."""
        rows, store = self.state.need_rows(), self.state.store
        if not sparsify.has_room(self, count + 1):  # type: ignore[arg-type]
            self.state.ready = None
            return
        try:
            self._make_room(count + 1)
        except (MemoryError, torch.OutOfMemoryError):
            if store is not None:  # what came in part goes back
                store.truncate([n + count for n in rows.tokens])
            self.state.ready = None

    @keeps_buffers
    def make_room_for(self, drafts: list[int]) -> None:
        """Pages, slots and summaries for so many more tokens of each row.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no memory for them.
        """
        self._make_room(max(drafts), drafts)

    def _make_room(self, count: int, counts: list[int] | None = None) -> list[int]:
        """Pages, slots and summaries for `count` more tokens a row (or a row's own of `counts`, `count` at most),
        unless they are known to be there. Returns how many blocks a row that makes."""
        state, rows = self.state, self.state.need_rows()
        ends = [n + more for n, more in zip(rows.tokens, counts or [count * takes for takes in rows.takes])]
        blocks, most = [-(-n // BLOCK) for n in ends], state.config.host_capacity_tokens
        ready = state.ready or [0] * len(rows)
        if any(map(operator.gt, blocks, ready)) or (most is not None and max(ends) > most):
            if state.store is not None:
                state.store.ensure(rows.tokens, ends)
            for layer in self.sparse_layers:
                layer.prepare(count)
            state.ready = list(map(max, blocks, ready))
        return blocks
