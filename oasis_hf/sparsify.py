"""When a batch turns from dense to sparse: `OasisConfig.sparsify`.

A dense batch is one whose working set has a slot for every block, so that nothing is predicted and nothing fetched. It
is the whole batch that is dense or not: slots are one tensor a layer, and a step takes as long as all of its rows.
Pages and summaries are written in any case, so turning moves nothing over the link: what the last token's query chooses
stays in the slots that are left.

Two things turn it: the next blocks would not fit the device, or steps over the working set are the faster, by what
steps were timed to take (`StepTimes`). Times are kept for a model and knobs, so that later requests know them. A batch
that turned for its times and finds sparse steps slower goes back, once, if what that costs is soon made up for.
"""

from __future__ import annotations

import contextlib
import statistics
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import parallel
from .config import BLOCK, ConfigError, OasisConfig
from .lookahead import draft_rows, wants_drafts
from .placing import layer_devices
from .roofline.formulas import SUMMARIES
from .roofline.hardware import here
from .roofline.shape import ModelShape
from .state import State
from .steptimes import DENSE, GAIN, SPARSE, Expected, StepTimes
from .stopwatch import Span, between
from .store.pages import available_host_bytes
from .working_set import FEW_SLOTS, grown

if TYPE_CHECKING:
    from .cache import OasisCache

GROUP = 8
"""Steps whose median is one time to learn from."""

SOON = 2048
"""Steps in which going back must have made up for what it moves."""

SETTLE = 2
"""Eager steps of a phase that are not learnt from."""

AHEAD = FEW_SLOTS * BLOCK
"""Tokens a row for which there must be room behind a first prompt."""

RESERVE = 0.05
"""Of the device's memory that a dense batch leaves to all else."""


def free_bytes(device: torch.device) -> int:
    """What slots may take of the device's memory: what nobody holds, and what PyTorch holds for nothing, less a share
    for all else. On a CPU, of the host's."""
    if device.type != "cuda":
        return int(available_host_bytes() * (1 - RESERVE))
    free, whole = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    most = min(free, int(fraction * whole) - reserved)
    return most + reserved - torch.cuda.memory_allocated(device) - int(RESERVE * whole)


_times: "weakref.WeakKeyDictionary[Any, dict[Any, StepTimes]]" = weakref.WeakKeyDictionary()


def times_of(model: Any, config: OasisConfig, drafter: Any) -> StepTimes:
    """What caches of the same model, knobs and drafter have learnt."""
    own = _times.setdefault(model, {})
    key = config.replace(sparsify="always"), drafter.name
    if key not in own:
        weight = next(model.parameters())
        drafts = draft_rows(config) if wants_drafts(config) and drafter.proposes else 0
        queries = {DENSE: 1 + (drafts if config.speculate else 0), SPARSE: 1 + drafts}
        shape = ModelShape.of_model(model, weight.dtype if weight.is_floating_point() else torch.bfloat16)
        active = config.slots * BLOCK
        own[key] = StepTimes(Expected(shape, here(weight.device), active, config.fetch_cap(config.slots), queries))
    return own[key]


class Sparsity:
    """Whether a cache's batch is dense at the time, and what may change that.

    Attributes:
        dense: it is. lacks: it went back, and its slots are still to be filled. why: it is not.
        stays: as it is, unless memory ends. turns: how often it has turned, either way.
    """

    def __init__(self, auto: bool, times: StepTimes | None) -> None:
        self.auto, self.times = auto, times
        self.dense, self.lacks, self.turns = True, False, 0
        self.why: str | None = None
        self.stays = False
        self._fresh = True  # something was learnt since it was last asked what pays
        self._steps = 0
        self._under_way: deque[tuple[tuple[str, int], int, Span]] = deque()
        self._group: list[tuple[int, float]] = []
        self._of: tuple[str, int] | None = None

    @classmethod
    def of(cls, model: Any, config: OasisConfig, drafter: Any) -> Sparsity | None:
        """What a cache needs of it; None: its batch is sparse from the start.

        Raises:
            ConfigError: ranks share the model, which would each decide by their own times, or several devices do.
        """
        if config.sparsify == "always":
            return None
        if config.sparsify == "auto" and parallel.size(model) > 1:
            raise ConfigError(
                f"sparsify='auto' decides by times, which {parallel.size(model)} tensor-parallel ranks measure each "
                "for itself: use 'always' or 'never'."
            )
        if config.sparsify == "auto" and layer_devices(model) is not None:
            raise ConfigError(
                "sparsify='auto' goes by one device's memory and times, and this model's layers are on several: use "
                "'always' or 'never'."
            )
        return cls(config.sparsify == "auto", times_of(model, config, drafter) if config.sparsify == "auto" else None)

    def fork(self) -> Sparsity:
        other = Sparsity(self.auto, self.times)
        other.dense, other.lacks, other.turns, other.why = self.dense, self.lacks, self.turns, self.why
        other.stays = self.stays
        return other

    def begin(self, state: State, ends: list[int], device: torch.device, slots: int = 0) -> None:
        """A first prompt comes, after which rows hold `ends` tokens; `slots` a KV head are there already."""
        self.dense, self.lacks, self.why, self.stays, self._fresh = True, False, None, False, True
        self._steps = 0
        if not self.auto:
            return
        if not fits(state, [n + AHEAD for n in ends], slots, device):
            self.dense, self.why, self.stays = False, _no_room(ends), True
        elif max(ends) > state.slots * BLOCK and self._pays(ends):
            self.dense, self.why = False, self._told(ends)

    def _pays(self, tokens: list[int]) -> bool:
        return self.times is not None and self.times.pays(len(tokens), sum(tokens))

    def _told(self, tokens: list[int]) -> str:
        assert self.times is not None
        sparse, dense = (self.times.ms(kind, len(tokens), sum(tokens)) for kind in (SPARSE, DENSE))
        return f"since {sum(tokens):,} tokens: {sparse:.3g} ms a step against {dense:.3g}"

    # -- times ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def timing(self, cache: OasisCache) -> Iterator[None]:
        """A step of the cache runs inside."""
        state, graphs, spans = cache.state, cache.graphs, list[Span]()
        rows, captures = state.need_rows(), graphs.captures
        kind = DENSE if self.dense else SPARSE
        whole = self.dense or state.grows_sparse  # a short row's sparse step predicts nothing
        tokens = sum(rows.tokens)
        with between(spans, cache.device.type == "cuda"):
            yield
        self._steps += 1
        config, last = state.config, graphs.last
        if graphs.refused is not None:
            settled = self._steps > SETTLE
        else:
            compiled = config.compile_after is None or graphs.unfused is not None or (last is not None and last.fused)
            settled = last is not None and compiled and graphs.captures == captures
        if settled and whole:
            self._under_way.append(((kind, len(rows)), tokens, spans[0]))

    def collect(self) -> None:
        """Learn from steps that the device has done; of those it has not, later."""
        while self._under_way and self._under_way[0][2][1].query():
            of, tokens, (begin, end) = self._under_way.popleft()
            if of != self._of:
                self._of, self._group = of, []
            self._group.append((tokens, begin.elapsed_time(end)))
            if len(self._group) == GROUP:
                xs, ys = zip(*self._group)
                assert self.times is not None
                self.times.learn(*of, statistics.fmean(xs), statistics.median(ys))
                self._group, self._fresh = [], True

    # -- what may turn it -------------------------------------------------------------------------------------------

    def turn_for(self, state: State, count: int, slots: int, device: torch.device) -> str | None:
        """Why the batch is to turn before a step of `count` tokens, or None.

        Args:
            slots: that are there, of a KV head.
        """
        tokens = state.need_rows().tokens
        ends = [n + count for n in tokens]
        if self.dense and not fits(state, ends, slots, device):
            self.stays = True
            return _no_room(ends)
        if not self._fresh or self.stays or state.need_rows().most_blocks < state.slots:
            return None
        self._fresh = False
        if self.dense:
            return self._told(tokens) if self._pays(tokens) else None
        return self._told(tokens) if self._goes_back(state, tokens, slots, device) else None

    def _goes_back(self, state: State, tokens: list[int], slots: int, device: torch.device) -> bool:
        times, rows, held = self.times, len(tokens), sum(tokens)
        assert times is not None
        if not times.timed(SPARSE, rows) or not times.timed(DENSE, rows):
            return False
        sparse, dense = (times.ms(kind, rows, held) for kind in (SPARSE, DENSE))
        known = times.expected
        moved = held * known.shape.kv_token() / known.hardware.link * 1e3
        soon = sparse > (1 + GAIN) * dense and (sparse - dense) * SOON > moved
        self.stays = soon and fits(state, tokens, slots, device)
        return self.stays


def fits(state: State, ends: list[int], slots: int, device: torch.device) -> bool:
    """Whether the device has room for slots for all blocks of rows of `ends` tokens, `slots` a KV head being there."""
    more = grown(slots, -(-max(ends) // BLOCK)) - slots
    if not more:
        return True
    one = len(ends) * state.heads * state.block_bytes  # a slot of a layer
    copied = slots * one  # a layer's slots are there twice while they grow
    return state.sparse_layers * more * one * (1 + SUMMARIES) + copied <= free_bytes(device)


def _no_room(ends: list[int]) -> str:
    return f"the device has no room for all blocks of {sum(ends):,} tokens"


# -- of a cache -----------------------------------------------------------------------------------------------------


def before_prompt(cache: OasisCache, ends: list[int]) -> None:
    """A prompt, chunk or turn comes, after which rows hold `ends` tokens. Of a cache's very first one
    `State.open_store` tells, since no layer is made yet."""
    state, sparsity = cache.state, cache.state.sparsity
    if sparsity is None or state.store is None:
        return
    if state.need_rows().columns == 0:
        sparsity.begin(state, ends, cache.device, _slots(cache))
        for layer in cache.sparse_layers:
            layer.working_set.slots = state.most_slots
            if not sparsity.dense:
                layer.condense(state.slots)
    elif sparsity.auto and sparsity.dense and not fits(state, ends, _slots(cache), cache.device):
        sparsity.stays = True
        turn(cache, _no_room(ends))


def before_step(cache: OasisCache, count: int) -> None:
    """A step of `count` tokens comes: turn the batch if that is due."""
    state, sparsity = cache.state, cache.state.sparsity
    if sparsity is None or not sparsity.auto or state.store is None:
        return
    sparsity.collect()
    why = sparsity.turn_for(state, count, _slots(cache), cache.device)
    if why is not None:
        turn(cache, why)


def timing(cache: OasisCache) -> contextlib.AbstractContextManager[None]:
    """A step runs inside, which is learnt from where a batch may turn."""
    sparsity = cache.state.sparsity
    return contextlib.nullcontext() if sparsity is None or not sparsity.auto else sparsity.timing(cache)


def has_room(cache: OasisCache, count: int) -> bool:
    """Whether a batch that may turn has room for `count` tokens more a row; one that may not is not asked."""
    state, sparsity = cache.state, cache.state.sparsity
    if sparsity is None or not sparsity.auto or not sparsity.dense or state.store is None:
        return True
    return fits(state, [n + count for n in state.need_rows().tokens], _slots(cache), cache.device)


def turn(cache: OasisCache, why: str) -> None:
    """A dense batch turns sparse, or back. Its working sets are selected before the next step."""
    state, sparsity = cache.state, cache.state.sparsity
    assert sparsity is not None
    cache.settle()
    sparsity.dense = not sparsity.dense
    sparsity.turns, sparsity._steps, sparsity.why = sparsity.turns + 1, 0, None if sparsity.dense else why
    sparsity.lacks = sparsity.dense
    for layer in cache.sparse_layers:
        layer.working_set.slots = state.most_slots
        if not sparsity.dense:
            layer.condense(state.slots)
    state.first_due, state.ready = True, None


def _slots(cache: OasisCache) -> int:
    """That every layer has: growth may have ended half way."""
    return min(layer.working_set.allocated for layer in cache.sparse_layers)
