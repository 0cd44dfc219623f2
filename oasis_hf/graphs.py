"""A whole decode step as one CUDA graph: captured once it has run as it is, replayed while nothing moves.

What a graph holds are addresses. So it serves a step's shape while every tensor that a layer touches is the same one;
when summaries or the table grow, or rows are chosen anew, the step is captured again.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from . import experts
from .capturable import cannot_hold, hooked, not_plain
from .capture import capture
from .fused import FusedLayers, FusionError, first_line, fused_layers, joined
from .ops import cuda
from .pipeline import Pipeline, together
from .sliding import SlidingLayer
from .spans import span
from .state import Step
from .tail import Tail

if TYPE_CHECKING:
    from .cache import OasisCache

logger = logging.getLogger(__name__)

WARM = 2
"""Steps of a shape that run eagerly before it is captured: libraries set themselves up in them."""

_CACHE = object()
"""Stands for the cache among a captured output's fields."""

MOST_IDLE = 3
"""Graphs in a row that were captured and hardly replayed before something moved: then capturing does not pay."""

FEW = 4
"""Replays below which a graph counts as one of those."""


@dataclass
class Captured:
    """One graph.

    Attributes:
        place: the tensors it knows by their addresses. fused: whether its layers are compiled.
        ids, positions, weights: its inputs.
        kind, output: the type and the fields of what the model returned, overwritten by every replay; so are drafts,
            the layers' draft queries, and tail, the stacked tokens.
        held: what it was captured with, whose tensors it reads again. The cache is in none of them: it owns this, and
            a cycle would keep its pages until a collection.
        replays: how often it was replayed. notes: whether the drafter works inside it.
        accepting: graphs that accept its drafts, see `accepting.py`.
    """

    place: list[Any]
    fused: bool
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor | None
    kind: type
    output: dict[Any, Any]
    drafts: list[torch.Tensor | None]
    tail: Tail | None
    held: tuple[Any, ...]
    replays: int = 0
    notes: bool = False
    accepting: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def tokens(self) -> torch.Tensor:
        """`[B, n]`, the step's tokens and its drafts behind them, overwritten by every replay."""
        own = self.tail.tokens if self.notes and self.tail is not None else None
        return self.ids if own is None else own


@dataclass
class _Ran:
    """A step that is done. output: what the model returned."""

    output: Any


class StepGraphs:
    """The captured steps of one cache, the latest a shape.

    Attributes:
        replays: steps that were replayed. captures: graphs made.
        refused: why the last step ran eagerly, or None. unfused: why layers are captured as they are, or None.
        autocast: whether the call under way is under `torch.autocast`.
        experts: what the last captured step's experts were chosen by, or None.
        unaccepted: why drafts are accepted without a graph, or None. last: the graph of the last step, if it had one.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.seen: dict[tuple[Any, ...], int] = {}
        self.replays = self.captures = 0
        self.autocast = False
        self.refused: str | None = None
        self._broken: str | None = None
        self._idle = 0
        self.unfused: str | None = None
        self.unaccepted: str | None = None
        self.experts: experts.Choice | None = None
        self.last: Captured | None = None
        self._compiled: dict[tuple[Any, ...], FusedLayers] = {}
        self._left = False
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._pipeline: Pipeline | None = None

    def forget(self) -> None:
        """Give the graphs and their memory back: the rows they were captured for are gone."""
        self.captured.clear()
        self.seen.clear()
        self.last = None
        self._compiled.clear()
        self._idle, self._left = 0, False

    def settle(self, cache: "OasisCache") -> None:
        """What the last replay left to the next one is done now: called before anything else touches the cache."""
        if self._left and cache.state.store is not None:
            late = [layer for layer in cache.sparse_layers if layer.late and layer.plan is not None]
            for moves in together([layer.move for layer in late]):
                cache.state.store.gather_layers(moves)
            for layer in late:
                layer.unplan()
        self._left = False

    def drop_late(self, cache: "OasisCache") -> None:
        """A step was interrupted: what was planned is void."""
        self._left = False
        for layer in cache.sparse_layers:
            layer.unplan()

    def run(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        name: str,
    ) -> Any:  # fmt: skip
        """The step's output: by a replay where there is a graph for it, else eagerly.

        Args:
            forward: runs the model under a step. call: its arguments, the cache under `name`.
        """
        self.last = None
        have = self._graph(cache, forward, call, step, name)
        if have is None:
            self.settle(cache)
            with span("eager step"):
                return forward(call, step)
        if isinstance(have, _Ran):
            return have.output
        have.ids.copy_(call["input_ids"])
        have.positions.copy_(call["position_ids"])
        if have.weights is not None and step.weights is not None:
            have.weights.copy_(step.weights)
        self._left = self._left or step.predicts
        with span("replayed step"):
            have.graph.replay()
        have.replays += 1
        self.replays += 1
        self.last = have
        step.replayed = True
        if step.held is not None and step.tail is not None and have.tail is not None:
            step.tail.tokens, step.tail.positions = have.tail.tokens, have.tail.positions
        for layer, draft in zip(cache.sparse_layers, have.drafts):
            layer.draft_queries = draft
        for layer in cache.layers:
            if isinstance(layer, SlidingLayer):
                layer.ran(step)
        return _returned(have, cache)

    def _graph(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        name: str,
    ) -> "Captured | _Ran | None":  # fmt: skip
        """The graph to replay; None: the step is to run eagerly; or it ran already, while its layers were compiled."""
        why = self._refuses(cache, call, step, name)
        if why is not None:
            if why != self.refused:
                logger.info("decode steps run without a CUDA graph: %s", why)
            self.refused = why
            return None
        self.refused = None
        shape: tuple[Any, ...] = (step.drafts, *call["input_ids"].shape, *call["position_ids"].shape)
        shape += (step.predicts, step.on_demand, step.corrects, step.taking is not None)
        shape += (_kept(call.get("logits_to_keep")), call.get("return_dict"))
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.seen[shape] <= WARM:
            return None
        after = cache.state.config.compile_after
        fuse = after is not None and self.unfused is None and self.seen[shape] > WARM + after
        extra = [step.pair, step.taking, *(step.held or ())]
        have, place = self.captured.get(shape), _place(cache)
        if have is not None and have.fused == fuse and _same(have.place, place + extra):
            return have
        self.refused = cannot_hold(cache) or hooked(cache.model)
        if self.refused is not None:
            return None
        config, tokens = cache.state.config, (1 + step.drafts) * len(cache.state.need_rows())
        self.experts = experts.choice_for(cache.model, config, tokens, experts.captured_ms(cache.device))
        with experts.capturing(cache.model, config, self.experts):
            return self._made(cache, forward, call, step, name, shape, fuse, extra)

    def _made(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        name: str, shape: tuple[Any, ...], fuse: bool, extra: list[Any],
    ) -> "Captured | _Ran | None":  # fmt: skip
        """`_graph` where the step is not known to be captured as it is now."""
        have = self.captured.get(shape)
        # What was made anew is brought where the graph looks for it, which may be all it takes.
        for layer in cache.sparse_layers:
            layer.hold_still()
        layers = self._layers(cache) if fuse else None
        fuse, place = layers is not None, _place(cache)
        if have is not None and have.fused == fuse and _same(have.place, place + extra):
            return have
        if layers is not None and self._compiled.get(shape) is not layers:
            self.settle(cache)
            return self._compile(cache, layers, forward, call, step, shape)
        if have is not None:
            self._idle = self._idle + 1 if have.replays < FEW else 0
        # The memory of old graphs serves the new one, if one of them lives until it has begun.
        old = list(self.captured.values())
        self._pool = self._pool if old else None
        self.captured.pop(shape, None)
        # Of other shapes those stay that hold no buffers of the past.
        self.captured = {at: one for at, one in self.captured.items() if _same(one.place[: len(place)], place)}
        if self._idle >= MOST_IDLE:
            return None
        self.settle(cache)
        try:
            have = self.captured[shape] = self._capture(cache, forward, call, step, place + extra, layers, name)
        except (RuntimeError, ValueError) as error:
            # Nothing has run: the step is still to be done.
            why = f"it could not be captured ({first_line(error)})"
            if layers is not None:
                self.unfused = why
            else:
                self._broken = why
            logger.warning("decode steps run without %s: %s", "compiled layers" if fuse else "a CUDA graph", why)
            return None
        return have

    def _layers(self, cache: "OasisCache") -> FusedLayers | None:
        try:
            return fused_layers(cache.model)
        except (FusionError, torch.OutOfMemoryError) as error:
            self.unfused = first_line(error)
            logger.info("layers are captured as they are: %s", self.unfused)
            return None

    def _compile(
        self, cache: "OasisCache", layers: FusedLayers, forward: Callable[[dict[str, Any], Step], Any],
        call: dict[str, Any], step: Step, shape: tuple[Any, ...],
    ) -> "_Ran":  # fmt: skip
        """One more eager step, beside which the layers are compiled for its shape."""
        with span("compile"), layers.tried(), cache.drafter.compiled():
            output = forward(call, step)
        self._compiled[shape] = layers
        if layers.failed is not None:
            self.unfused = layers.failed
            logger.warning("layers are captured as they are, they could not be compiled: %s", self.unfused)
        return _Ran(output)

    def _refuses(self, cache: "OasisCache", call: dict[str, Any], step: Step, name: str) -> str | None:
        config = cache.state.config
        if not config.graphs:
            return "graphs=False"
        if self._broken is not None:
            return self._broken
        if self._idle >= MOST_IDLE:
            return "the cache is rearranged at nearly every step (beams, or a caller's own verification)"
        if cache.state.devices is not None:
            return "layers are on several devices"
        if cache.device.type != "cuda":
            return "the model is not on a CUDA device"
        if self.autocast:
            return "the call is under torch.autocast"
        why = not_plain(call, step, name)
        if why is not None:
            return why
        if config.lookahead == "none" and (config.sink_blocks or config.recent_blocks):
            return "lookahead='none' keeps sink or recent blocks"
        if cache.stepper.reach.dynamic or cache.stepper.reach.longrope:
            return "the model's RoPE scales by the furthest position, which it asks the device for"
        return None

    def _capture(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        place: list[Any], layers: FusedLayers | None, name: str,
    ) -> Captured:  # fmt: skip
        device = cache.device
        if self._stream is None or self._pipeline is None:
            self._stream, self._pipeline = torch.cuda.Stream(device, priority=-1), Pipeline(device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        ids, positions = call["input_ids"].clone(), call["position_ids"].clone()
        weights = None if step.weights is None else step.weights.to(device, copy=True).contiguous()
        call = {**call, "input_ids": ids, "position_ids": positions}
        step.weights = weights
        step.tail_mask(device)  # made from the host, so before
        late = [layer.move for layer in cache.sparse_layers if layer.late and step.predicts]
        streams = (self._stream, *self._pipeline.streams)
        for stream in streams:
            cuda.reserve(stream)
        step.pipeline = pipeline = self._pipeline

        def whole() -> Any:
            try:
                pipeline.begin(cache.state.store, late)
                output = forward(call, step)
                pipeline.join()
                return output
            except BaseException:
                # Ended properly if it can be; the first error is the one to tell.
                pipeline.drop()
                with contextlib.suppress(RuntimeError):
                    pipeline.join()
                raise

        try:
            with contextlib.ExitStack() as compiled:
                if layers is not None:
                    compiled.enter_context(layers.placed())
                    compiled.enter_context(cache.drafter.compiled())
                graph, output = self.capture(device, whole)
        except BaseException:
            step.pipeline = None
            step.unshare()
            raise
        finally:
            pipeline.forget()
            scratch = [tensor for stream in streams for tensor in cuda.take(stream)]
        self.captures += 1
        del call[name]
        fields = dict(enumerate(output)) if isinstance(output, tuple) else dict(output.items())
        fields = {key: _CACHE if value is cache else value for key, value in fields.items()}
        drafts = [layer.draft_queries for layer in cache.sparse_layers]
        held = (call, step, scratch)
        return Captured(
            place, layers is not None, graph, ids, positions, weights, type(output), fields, drafts, step.tail, held,
            notes=step.held is not None,
        )  # fmt: skip

    def capture(self, device: torch.device, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What `run` launches as a graph, in the memory of the others, and what it returned. Nothing of it has run."""
        assert self._stream is not None
        return capture(self._stream, self._pool, device, run)

    def behind(self, cache: "OasisCache") -> Captured | None:
        """The graph of the step that just ran, if it was replayed and all that it touches is still the same."""
        place = _place(cache)
        return self.last if self.last is not None and _same(self.last.place[: len(place)], place) else None


def _kept(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _place(cache: "OasisCache") -> list[Any]:
    """Everything that a captured step finds by its address; hooks have a number that grows with every one registered
    anywhere."""
    state, device = cache.state, cache.device
    weight = next(cache.model.parameters())
    place: list[Any] = [(RemovableHandle.next_id, weight.data_ptr()), joined(cache.model)]
    place += [state.need_rows().lengths(device), state.need_rows().columns_on(device)]
    for layer in cache.layers:
        place += layer.place()
    return place


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether two places hold the same tensors: what is made anew is another, whatever its address."""
    return len(a) == len(b) and a[0] == b[0] and all(map(operator.is_, a[1:], b[1:]))


def _returned(have: Captured, cache: "OasisCache") -> Any:
    """The output with tensors of its own: the next replay writes over the graph's."""
    fields = {key: _copy(value, cache) for key, value in have.output.items()}
    return tuple(fields.values()) if have.kind is tuple else have.kind(**fields)


def _copy(value: Any, cache: "OasisCache") -> Any:
    if value is _CACHE:
        return cache
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_copy(item, cache) for item in value) if isinstance(value, tuple) else value
