"""How blocks come into a `PrefixStore`: those of a cache that has read them, or of a text that another process has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..config import BLOCK
from .index import digests

if TYPE_CHECKING:
    from ..cache import OasisCache
    from .store import PrefixStore


def kept_of(store: "PrefixStore", cache: "OasisCache", ids: torch.Tensor) -> int:
    """Blocks of what a cache of the store's has read as a prompt, ids `[B, T]`; the store's lock is held. Gives the new
    ones' number."""
    rows, state = cache.state.need_rows(), cache.state
    told, cache.drafter.recorded = cache.drafter.recorded, None
    if told is None and cache.drafter.state_width:
        return 0  # kept before, or cropped: what the drafter saw of these tokens is not known any more
    host, root = ids.detach().cpu(), bytes.fromhex(store.identity())
    if cache.admitted is not None:
        at_work, began = cache.admitted
        if root != at_work or not torch.equal(began, host[:, : began.shape[1]]):
            return 0  # another text follows what it took from here, or another adapter read that
    pages: Any = state.store
    pages.join()
    new = 0
    for row, valid in enumerate(rows.valid):
        own, states = host[row][valid], states_read(told, row)
        before = 0 if states is None else len(own) - len(states)
        part = functools.partial(_part, cache, row, states, before)
        new += keep_row(store, root, own, part, functools.partial(pages.share, row), before)
    state.ready = None  # pages that stand ready may be shared from here on
    return new


def states_read(told: list[Any] | None, row: int) -> torch.Tensor | None:
    """`[n, width]` of a row's tokens that its drafter was shown by the model, the last ones of it; None: it keeps
    none. told: `Drafter.recorded`."""
    if told is None:
        return None
    read = [states[row] if valid is None else states[row][valid[row]] for states, valid in told]
    return torch.cat(read) if read else torch.zeros((0, 0))


def _part(
    cache: "OasisCache", row: int, states: torch.Tensor | None, before: int, name: str, blocks: slice
) -> torch.Tensor:  # fmt: skip
    """A part of a row's blocks, `[n, *shape]` on the host. before: tokens of the row that `states` leaves out."""
    if name == "states":
        assert states is not None
        return states[blocks.start * BLOCK - before : blocks.stop * BLOCK - before].unflatten(0, (-1, BLOCK))
    layers = [getattr(layer.summaries, name)[row, :, blocks] for layer in cache.sparse_layers]
    return torch.stack(layers).movedim(2, 0).cpu()


def keep_row(
    store: "PrefixStore", root: bytes, own: torch.Tensor, part: Callable[[str, slice], torch.Tensor],
    pages: Callable[[slice], torch.Tensor], before: int,
) -> int:  # fmt: skip
    """Closed blocks of one text, as many as there is room for; the store's lock is held.

    Args:
        root: identity of who read it. own: `[n]` its ids. part: a part of some blocks, `[n, *shape]` on the host.
        pages: theirs, `[layers, KV heads, n]`, with one more reference each, which is the store's. before: tokens whose
            blocks' parts are not known: where the store has lost those, nothing is kept.

    Returns:
        New blocks.
    """
    names = digests(root, own[: len(own) // BLOCK * BLOCK])
    held = store.index.find(names)
    if len(held) * BLOCK < before:
        return 0
    fresh = _add(store, names, held, own)
    if fresh:
        at, blocks = torch.tensor(fresh), slice(len(held), len(held) + len(fresh))
        try:
            for name, kept in store.index.parts.items():
                kept[at] = part(name, blocks)
            store.index.pages[at] = pages(blocks).permute(2, 0, 1)  # [n, layers, KV heads]
        except BaseException:  # what is not whole must not be found
            for one in fresh:
                store.index.drop(one)
            raise
    return len(fresh)


def _add(store: "PrefixStore", names: list[bytes], held: list[int], own: torch.Tensor) -> list[int]:
    """Entries of a row's blocks behind those that are `held`, as many as there is room for."""
    missing = len(names) - len(held)
    room = store.index.capacity - len(store.index)
    if missing > room:
        store.drop(store.index.oldest(missing - room))
    fresh: list[int] = []
    for block in range(len(held), len(names)):
        parent = fresh[-1] if fresh else held[-1] if held else -1
        at = store.index.add(names[block], parent, own[block * BLOCK : (block + 1) * BLOCK])
        if at is None:
            break
        fresh.append(at)
    return fresh
