"""What is sent of a prompt whose beginning a reader holds in a `PrefixStore`, and what it leaves there afterwards."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import BLOCK, ConfigError, OasisConfig
from ..placing import placed
from ..prefixes.borrowed import Borrowed
from ..prefixes.index import digests
from ..prefixes.keeping import keep_row
from ..prefixes.store import PrefixStore, settle
from ..room import keeps_buffers
from ..store.near import Near
from ..store.pages import PagePool
from .errors import Refused
from .handle import SUMMARISED_BY, Handle

if TYPE_CHECKING:
    from .decode import PrefillClient

READ_BYTES = 64 << 20
"""Of blocks that are kept without having been selected, read at once: each read has its own deadline."""


@dataclass(frozen=True)
class Held:
    """What a reader has of a prompt.

    Attributes:
        count: of its first blocks. name: content hash of the last of them, or of whose blocks they would be; hex.
    """

    count: int
    name: str

    @classmethod
    def of(cls, borrowed: Borrowed | None) -> "Held | None":
        return None if borrowed is None else cls(borrowed.count, borrowed.name.hex())

    @classmethod
    def parse(cls, told: Any, tokens: int) -> "Held":
        """Of a prompt of so many tokens. Raises Refused where it can't be."""
        count, name = told if isinstance(told, list) and len(told) == 2 else (None, None)
        if type(count) is not int or not isinstance(name, str) or not 0 <= count <= tokens // BLOCK:
            raise Refused("request", f"A prompt of {tokens:,} tokens can't be held as {told!r:.80}.")
        return cls(count, name)

    def fits(self, ids: torch.Tensor, root: bytes) -> bool:
        """Whether these are the first blocks of ids `[n]`, of whom `root` says."""
        return self.name == [root, *digests(root, ids[: self.count * BLOCK])][self.count].hex()


def check_store(client: "PrefillClient", prefixes: PrefixStore, config: OasisConfig, host_bytes: int | None) -> None:
    """Raises ConfigError where a client's requests can't share blocks with a store."""
    if prefixes.model is not client.model:
        raise ConfigError("PrefillClient.prefixes is a PrefixStore of another model: make it with the client's.")
    if host_bytes is not None:
        raise ConfigError(
            f"PrefillClient.host_bytes={host_bytes!r} is not allowed with prefixes, in whose memory its requests' "
            "blocks are too: leave it None."
        )
    if prefixes.config.host_dtype != "model":
        raise ConfigError("PrefillClient keeps pages as they come: leave host_dtype of its PrefixStore.")
    for knob in SUMMARISED_BY:
        ours, theirs = getattr(config, knob), getattr(prefixes.config, knob)
        if ours != theirs:
            raise ConfigError(f"PrefillClient.{knob}={ours!r} differs from its PrefixStore's {theirs!r}: use one.")


def whole(handle: Handle, borrowed: Borrowed | None, pool: PagePool) -> Handle:
    """A request's handle with what was left out of it: summaries, and -1 for pages that were not sent, but stand in
    `pool`.

    Raises:
        Refused: something else was left out than is held here.
    """
    first = handle.first
    if "first" not in handle.told or (borrowed is None and not first):
        return handle
    lasts = borrowed is not None and borrowed.lasts_in(pool)
    if borrowed is None or not lasts or not Held(first, borrowed.name.hex()).fits(handle.ids, borrowed.root):
        raise Refused(
            "request", f"The request came without its first {first:,} blocks, for a reader that holds them: fetch it "
            "where it was asked for, with what it was asked for."
        )  # fmt: skip
    if not first:
        return handle
    state = dict(handle.state)
    for name in ("vectors", "scales"):
        if f"0.{name}" in state:
            for layer, own in enumerate(borrowed.part(name).unbind(1)):
                state[f"{layer}.{name}"] = torch.cat((own.transpose(0, 1), state[f"{layer}.{name}"]), 1)
    pages, sums = handle.pages, handle.sums
    left_out = pages.new_full((*pages.shape[:2], first), -1)
    if sums.numel():
        sums = torch.cat((left_out.to(sums), sums), 2)
    return replace(handle, pages=torch.cat((left_out, pages), 2), sums=sums, state=state)


class Increment:
    """A cache's prompt, for a store: its closed blocks stay as they were read, whatever the cache does meanwhile.

    Args:
        prefixes: the store. borrowed: what it had of the prompt. handle: whole. near: the request's pages. numbers:
            `[layers, KV heads, blocks]` which of them are the prompt's; the first ones are taken from the store here.

    Raises:
        Refused: the drafter's states did not come, or are others than the store's.
    """

    def __init__(
        self, prefixes: PrefixStore, borrowed: Borrowed, handle: Handle, near: Near, numbers: torch.Tensor
    ) -> None:  # fmt: skip
        self.prefixes, self.borrowed, self.handle, self.near = prefixes, borrowed, handle, near
        closed, first = len(handle.ids) // BLOCK, handle.first
        self.states = handle.state.get("states")
        if "states" in prefixes.layout.parts:
            want = [closed - first, *prefixes.layout.parts["states"][0]]
            if self.states is None or list(self.states.shape) != want:
                raise Refused("layout", f"The drafter's states came as {_shape(self.states)}, not as {want}.")
        if first:
            settle(placed(prefixes.model).device)  # another cache's writes to these pages may be on their way
            near.take(numbers[..., :first].flatten(), borrowed.pages.permute(1, 2, 0).flatten())
        self.numbers = numbers[..., :closed].clone()
        near.retain(self.numbers.flatten())
        self.close = weakref.finalize(self, near.release, self.numbers.flatten())

    @keeps_buffers
    def keep(self) -> int:
        """The closed blocks go to the store, as many as there is room for; those that no step has selected are read
        now. Gives the new ones' number.

        Raises:
            DisaggError: the node is lost. HostMemoryError: there is no memory for them.
        """
        prefixes, ids, root = self.prefixes, self.handle.ids, self.borrowed.root
        with prefixes.lock:
            prefixes.index.tick()
            held = len(prefixes.index.find(digests(root, ids[: self.numbers.shape[2] * BLOCK])))
        # Not under the lock: others may ask the store meanwhile.
        for pages in self.numbers[..., held : prefixes.index.capacity].flatten().split(
            max(1, READ_BYTES // self.near.page_bytes)
        ):  # fmt: skip
            self.near.bring(pages)
        before = self.handle.first * BLOCK if self.states is not None else 0
        with prefixes.lock:
            return keep_row(prefixes, root, ids, self._part, self._pages, before)

    def _part(self, name: str, blocks: slice) -> torch.Tensor:
        if name == "states":
            assert self.states is not None
            return self.states[blocks.start - self.handle.first : blocks.stop - self.handle.first]
        layers = [self.handle.state[f"{layer}.{name}"][:, blocks] for layer in range(self.numbers.shape[0])]
        return torch.stack(layers).movedim(2, 0)

    def _pages(self, blocks: slice) -> torch.Tensor:
        return self.near.share(self.numbers[..., blocks])


def _shape(states: torch.Tensor | None) -> str:
    return "none" if states is None else str(list(states.shape))
