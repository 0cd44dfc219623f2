"""The prefill side: prompts are read here, their KV goes to a staging pool, and the GPU is free for the next."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from .. import supported
from ..attach import cache_name
from ..cache import OasisCache
from ..config import BLOCK, ConfigError, OasisConfig
from ..placing import placed
from ..prefixes import PrefixStore
from ..prefixes.keeping import states_read
from ..prefixes.kind import Kind, apart
from ..store.host import HostStore, blocks_of
from .handle import Handle, head_dim, pack, terms
from .increment import Held
from .staging import StagingPool
from .transport import checksums


class PrefillWorker:
    """Reads prompts into a staging pool (OasisKV's Remote Partial Fetching, prefill side).

    Args:
        model: any that an `OasisCache` serves. staging: the pool; its pages must be of the model's head_dim and dtype.
        config, knobs: as `OasisCache` takes them. Decode sides may choose another budget, lookahead or fetch cap, but
            not other summaries.
        drafter: the same. A head's keys and values go along, so that the decode side's begins warm.
        checked: publish a CRC-32 of each page, which the decode side then checks.
        prefixes: what prompts begin with, so that it is not read again; its knobs and drafter are this worker's. Blocks
            that are sent are copied from it to the staging pool.

    Raises:
        ConfigError: pages of another kind, or not pinned where the model is on a GPU, or a store in the config; or
            prefixes of another model, or with other knobs beside them.
    """

    def __init__(
        self, model: Any, staging: StagingPool, config: OasisConfig | None = None, drafter: Any = None,
        checked: bool = False, prefixes: PrefixStore | None = None, **knobs: Any,
    ) -> None:  # fmt: skip
        self.model, self.staging, self.drafter, self.checked = supported.plain_model(model), staging, drafter, checked
        self.prefixes, self._kind = prefixes, None if prefixes is None else prefixes.kind
        if prefixes is None:
            self.config = (config or OasisConfig()).replace(**knobs)
        elif prefixes.model is not self.model:
            raise ConfigError("PrefillWorker.prefixes is a PrefixStore of another model: make it with the worker's.")
        elif config is not None or drafter is not None or knobs:
            raise ConfigError("PrefillWorker has its PrefixStore's knobs and drafter: name them there, and none here.")
        else:
            self.config = prefixes.config
        if self.config.store != "host" or self.config.host_dtype != "model":
            raise ConfigError("PrefillWorker keeps pages in its staging pool as they are: leave store and host_dtype.")
        if placed(self.model).device.type == "cuda" and not staging.pool.pin:
            raise ConfigError("A model on a GPU writes its pages by itself: make the pool StagingPool(..., pin=True).")
        if self.config.sparsify != "always":
            raise ConfigError(
                f"sparsify={self.config.sparsify!r} is for caches that decode, and PrefillWorker reads prompts: leave "
                "it 'always'."
            )
        self._reserved: dict[str, int] = {}
        self.terms = terms(self.model, self.config)
        layout = self.terms.layout
        own = (head_dim(self.model), layout["dtype"])
        if own != (staging.head_dim, str(staging.dtype).removeprefix("torch.")):
            raise ConfigError(
                f"The staging pool has pages of head_dim {staging.head_dim} in {staging.dtype}, but "
                f"{type(self.model).__name__} needs head_dim {own[0]} in {own[1]}."
            )

    def pages_for(self, tokens: int) -> int:
        """Pages that a prompt of so many tokens reserves: those of the step behind it too. One where every layer has a
        sliding window, which is not used: a request without any can't be told from one that is over."""
        return max(1, self.terms.layout["layers"] * self.terms.layout["kv_heads"] * blocks_of(tokens + 1))

    def prefill(self, input_ids: torch.Tensor, request: str | None = None, held: Held | None = None) -> str:
        """Read a prompt, and publish it.

        Args:
            input_ids: `[n]` or `[1, n]` ids, without padding. request: its name; None: a new one. held: what its reader
                has of it, which is left out where it is what would be read here.

        Returns:
            The name, by which a decode side fetches it.

        Raises:
            PoolFull: the staging pool has no room for it now. ValueError: no prompt, or more than one.
        """
        ids = input_ids.reshape(1, -1) if input_ids.ndim == 1 else input_ids
        if ids.shape[0] != 1 or not ids.shape[1]:
            raise ValueError(f"A request is one prompt of at least one token, not {list(input_ids.shape)}.")
        request = request or uuid.uuid4().hex
        self.reserve(request, ids.shape[1])
        self.read(request, ids[0], held)
        return request

    def reserve(self, request: str, tokens: int) -> None:
        """Pages for a prompt of so many tokens, which `read` fills. Raises PoolFull."""
        self._reserved[request] = self.staging.reserve(request, self.pages_for(tokens))[1]

    @torch.no_grad()
    def read(self, request: str, ids: torch.Tensor, held: Held | None = None) -> None:
        """Ids `[n]` of a request that has its pages; published when this returns, and given back if it raises."""
        generation = self._reserved.pop(request)
        try:
            handle = self._read(ids[None].cpu().long(), request, held)
            self.staging.publish(request, handle.to_bytes(), handle.pages.flatten().long())
        except BaseException:
            self.staging.release(request, generation)
            raise

    def _read(self, ids: torch.Tensor, request: str, held: Held | None) -> Handle:
        cache = self._cache(request)
        state, name, told = cache.state, cache_name(self.model), {"drafter": cache.drafter.name}
        if apart(self.model, cache.device):
            held = None
        if held is not None and held.fits(ids[0], bytes.fromhex(self._kind_of(cache).identity())):
            told["first"] = str(held.count)
        first = int(told.get("first", 0))
        logits, states = self._logits(cache, ids, name, "first" in told)
        packed = pack(cache, first)
        if states is not None:
            packed["states"] = states[first * BLOCK : ids.shape[1] // BLOCK * BLOCK].unflatten(0, (-1, BLOCK))
        blocks = blocks_of(ids.shape[1])
        selected, ahead = self._selected(cache, logits, name, blocks)
        cache.settle()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # the pages are written
        layers = cache.sparse_layers
        table = torch.zeros((0, 0, 0), dtype=torch.int64)  # every layer has a sliding window
        if isinstance(state.store, HostStore):
            table = state.store.table[:, 0, :, first:blocks]
        assert len(layers) == len(table)
        if self.prefixes is not None:
            table = self._staged(request, table)
        sums = torch.zeros(0, dtype=torch.int64)
        if self.checked and table.numel():
            pages = self.staging.pool.pages[table.flatten()].view(torch.uint8).numpy()
            sums = torch.from_numpy(checksums(pages, self.staging.page_bytes)).view(table.shape)
        return Handle(ids[0], logits.cpu(), table.int(), selected, ahead, sums, packed, told)

    def _cache(self, request: str) -> OasisCache:
        """An empty one, whose pages are the request's, or those of the store of prefixes."""
        if self.prefixes is not None:
            return self.prefixes.cache()
        cache = OasisCache(self.model, self.config, self.drafter)
        state = cache.state
        state.make_store = lambda rows, heads, dim, dtype, device: HostStore(
            state.sparse_layers, rows, heads, dim, dtype, device, pool=self.staging.pages_of(request)
        )
        return cache

    def _kind_of(self, cache: OasisCache) -> Kind:
        if self._kind is None:
            self._kind = Kind(self.model, self.config, cache.drafter.fork())
        return self._kind

    def _logits(
        self, cache: OasisCache, ids: torch.Tensor, name: str, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Reads a prompt `[1, n]`, or what the store of prefixes does not hold of it. Gives the logits `[V]` behind it,
        and what the drafter was told of it, `[n, width]`, if that is wanted and it is told anything."""
        drafter, prefixes = cache.drafter, self.prefixes
        if prefixes is None:
            drafter.recorded = [] if wanted and drafter.state_width else None
        else:
            with prefixes.lock:  # else what it takes might go before its states are looked up
                keeps, known = prefixes.before(cache, ids, {}, whole=True), prefixes.borrow(ids[0])
        past, (device, dtype) = cache.get_seq_length(), placed(self.model)
        with cache.mode("prefill"):
            logits = self.model(ids[:, past:].to(device), **{name: cache}, logits_to_keep=1).logits[0, -1]
        states = states_read(drafter.recorded, 0) if wanted else None
        if prefixes is not None:
            if states is not None and past:
                states = torch.cat((known.part("states").flatten(0, 1)[:past].to(states.dtype), states))
            known.close()
            if keeps:
                prefixes.after(cache, ids)
        drafter.recorded = None
        return logits, None if states is None else states.to(dtype)

    def _staged(self, request: str, table: torch.Tensor) -> torch.Tensor:
        """Pages of the store of prefixes, copied to as many of a request's: both `[layers, KV heads, n]`."""
        assert self.prefixes is not None
        own = self.staging.pages_of(request).allocate(table.numel()).view_as(table)
        for to, page in zip(own, table):
            self.staging.pool.pages[to] = self.prefixes.pool.pages[page]
        return own

    def _selected(
        self, cache: OasisCache, logits: torch.Tensor, name: str, blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """What the first step attends to, selected by the last token's query, and what the next token's query, which
        one more step gives (paper, section 5), selects besides: `[layers, KV heads, K]` int32 each, -1 for none."""
        layers = cache.sparse_layers
        if not layers:
            return torch.zeros((0, 0, 0), dtype=torch.int32), torch.zeros((0, 0, 0), dtype=torch.int32)
        with cache.mode("decode"):
            cache.first_select()
            before = torch.stack([layer.working_set.table[0].cpu() for layer in layers])
            self.model(logits.argmax().view(1, 1), **{name: cache}, logits_to_keep=1)
        after = torch.stack([layer.working_set.table[0].cpu() for layer in layers])
        after = torch.where(after < blocks, after, -1)  # that step may have opened one more
        new = (after[..., None] != before[..., None, :]).all(-1)
        return before.int(), torch.where(new, after, -1).int()
