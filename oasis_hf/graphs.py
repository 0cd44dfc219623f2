"""A whole decode step as one CUDA graph: captured once it has run as it is, replayed while nothing moves.

What a graph holds are addresses. So its key is the step's shape and the address of everything a layer touches; when
summaries or the table grow, or rows are chosen anew, the key is another and the step is captured again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .layers import OasisLayer
from .ops import cuda
from .pipeline import Pipeline
from .state import Step

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

_PLAIN = {"input_ids", "position_ids", "attention_mask", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments that a captured call may have; any other that is not None, False or empty makes it eager."""


@dataclass
class Captured:
    """One graph. ids, positions, weights: its inputs. kind, output: the type and the fields of what the model returned,
    overwritten by every replay. drafts: the layers' draft queries, likewise. held: what it was captured with, whose
    tensors it reads again. The cache is in none of them: it owns this, and a cycle would keep its pages until a
    collection. replays: how often it was replayed."""

    key: tuple[Any, ...]
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor | None
    kind: type
    output: dict[Any, Any]
    drafts: list[torch.Tensor | None]
    held: tuple[Any, ...]
    replays: int = 0


class StepGraphs:
    """The captured steps of one cache, the latest a shape.

    Attributes:
        replays: steps that were replayed. captures: graphs made.
        refused: why the last step ran eagerly, or None.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.seen: dict[tuple[Any, ...], int] = {}
        self.replays = self.captures = 0
        self.refused: str | None = None
        self._broken: str | None = None
        self._idle = 0
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._pipeline: Pipeline | None = None

    def forget(self) -> None:
        """Give the graphs and their memory back: the rows they were captured for are gone."""
        self.captured.clear()
        self.seen.clear()
        self._idle = 0

    def run(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        name: str,
    ) -> Any:  # fmt: skip
        """The step's output: by a replay where there is a graph for it, else eagerly.

        Args:
            forward: runs the model under a step. call: its arguments, the cache under `name`.
        """
        why = self._refuses(cache, call, step, name)
        if why is not None:
            if why != self.refused:
                logger.info("decode steps run without a CUDA graph: %s", why)
            self.refused = why
            return forward(call, step)
        self.refused = None
        shape: tuple[Any, ...] = (step.drafts, *call["input_ids"].shape, *call["position_ids"].shape)
        shape += (_kept(call.get("logits_to_keep")), call.get("return_dict"))
        key = (shape, _addresses(cache))
        self.seen[shape] = self.seen.get(shape, 0) + 1
        have = self.captured.get(shape)
        if have is None or have.key != key:
            if self.seen[shape] <= WARM:
                return forward(call, step)
            if have is not None:
                self._idle = self._idle + 1 if have.replays < FEW else 0
            self.captured.pop(shape, None)
            if self._idle >= MOST_IDLE:
                self._broken = "the cache is rearranged at nearly every step (beams, or a caller's own verification)"
                return forward(call, step)
            why = _hooked(cache.model)
            if why is not None:
                self.refused = why
                return forward(call, step)
            try:
                have = self.captured[shape] = self._capture(cache, forward, call, step, key, name)
            except RuntimeError as error:
                # Nothing has run: the step is still to be done.
                self._broken = f"it could not be captured ({str(error).splitlines()[0]})"
                logger.warning("decode steps run without a CUDA graph: %s", self._broken)
                return forward(call, step)
        have.ids.copy_(call["input_ids"])
        have.positions.copy_(call["position_ids"])
        if have.weights is not None and step.weights is not None:
            have.weights.copy_(step.weights)
        have.graph.replay()
        have.replays += 1
        self.replays += 1
        for layer, draft in zip(cache.sparse_layers, have.drafts):
            layer.draft_queries = draft
        return _returned(have, cache)

    def _refuses(self, cache: "OasisCache", call: dict[str, Any], step: Step, name: str) -> str | None:
        config = cache.state.config
        if not config.graphs:
            return "graphs=False"
        if self._broken is not None:
            return self._broken
        if cache.device.type != "cuda":
            return "the model is not on a CUDA device"
        if step.mode != "decode" or step.count != 1:
            return "it verifies a caller's own tokens"
        if not cache.state.grows_sparse:
            return "the working set is still growing"
        if call.get("input_ids") is None:
            return "the call has embeddings instead of ids"
        if call.get("position_ids") is None:
            return "the call has no position_ids"
        other = [
            key for key, value in call.items()
            if key not in _PLAIN and key != name and not (value is None or value is False or value == {})
        ]  # fmt: skip
        if other:
            return f"the call has {', '.join(sorted(other))}"
        for layer in cache.layers:
            if not isinstance(layer, OasisLayer):
                return "the model has sliding-window layers"
            if layer.device != cache.device:
                return "layers are on several devices"
            if not cuda.serves(layer.working_set.keys):
                return "the compiled operators don't serve this model's dtype and head_dim here"
            pages = layer.store.device_pages(layer.index)
            if pages is None:
                return f"store={config.store!r}"
            if pages[0].dtype != layer.working_set.keys.dtype:
                return f"host_dtype={config.host_dtype!r}"
        if config.lookahead == "none" and (config.sink_blocks or config.recent_blocks):
            return "lookahead='none' keeps sink or recent blocks"
        if cache.stepper.reach.dynamic or cache.stepper.reach.longrope:
            return "the model's RoPE scales by the furthest position, which it asks the device for"
        return None

    def _capture(
        self, cache: "OasisCache", forward: Callable[[dict[str, Any], Step], Any], call: dict[str, Any], step: Step,
        key: tuple[Any, ...], name: str,
    ) -> Captured:  # fmt: skip
        device = cache.device
        if self._stream is None or self._pipeline is None:
            self._stream, self._pipeline = torch.cuda.Stream(device), Pipeline(device)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        ids, positions = call["input_ids"].clone(), call["position_ids"].clone()
        weights = None if step.weights is None else step.weights.to(device, copy=True).contiguous()
        call = {**call, "input_ids": ids, "position_ids": positions}
        step.weights, step.captured = weights, True
        step.pipeline = self._pipeline
        step.tail_mask(device)  # made from the host, so before
        streams = (self._stream, self._pipeline.stream)
        for stream in streams:
            cuda.reserve(stream)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = forward(call, step)
                    self._pipeline.join()
                except BaseException:
                    # Ended properly if it can be; the first error is the one to tell.
                    for end in (self._pipeline.join, graph.capture_end):
                        with contextlib.suppress(RuntimeError):
                            end()
                    raise
                graph.capture_end()
        except BaseException:
            step.captured, step.pipeline = False, None
            raise
        finally:
            self._pipeline.forget()
            scratch = [tensor for stream in streams for tensor in cuda.take(stream)]
        torch.cuda.current_stream(device).wait_stream(self._stream)
        self.captures += 1
        del call[name]
        fields = dict(enumerate(output)) if isinstance(output, tuple) else dict(output.items())
        fields = {key: _CACHE if value is cache else value for key, value in fields.items()}
        drafts = [layer.draft_queries for layer in cache.sparse_layers]
        return Captured(key, graph, ids, positions, weights, type(output), fields, drafts, (call, step, scratch))


def _hooked(model: Any) -> str | None:
    """Why code of others runs inside the model's forward: a replay would leave it out. transformers' own hooks, which
    stay once a call asked for hidden states, do nothing unless a call asks, and such a call is eager."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"]
        if foreign or hasattr(module, "_hf_hook"):
            return f"{name or 'the model'} has a forward hook"
    return None


def _kept(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _addresses(cache: "OasisCache") -> tuple[Any, ...]:
    """Of everything a captured step touches; hooks have a number that grows with every one registered anywhere."""
    state = cache.state
    weight = next(cache.model.parameters())
    out: list[Any] = [RemovableHandle.next_id, weight.data_ptr()]
    out += [state.clock(cache.device).data_ptr(), state.need_rows().lengths(cache.device).data_ptr()]
    for layer in cache.sparse_layers:
        out += layer.addresses()
    return tuple(out)


def _returned(have: Captured, cache: "OasisCache") -> Any:
    """The output with tensors of its own: the next replay writes over the graph's."""

    def copy(value: Any) -> Any:
        if value is _CACHE:
            return cache
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, tuple):
            return tuple(copy(item) for item in value)
        return value

    fields = {key: copy(value) for key, value in have.output.items()}
    return tuple(fields.values()) if have.kind is tuple else have.kind(**fields)
