"""Decoder layers compiled for captured steps: element-wise work fused, projections of one input joined (issue B).

Weights are inputs of what is compiled, and so is the number by which its attention, one custom operator, finds its
layer of the cache: all layers of a kind share one compiled graph, a few seconds' work a shape of step.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import attach, parallel, supported

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling projections of one input, by the names that transformers' models give them."""

SHAPES = 64
"""Shapes of step that one kind of layer is compiled for, before dynamo gives up."""


_trying: ContextVar[bool] = ContextVar("oasis_trying", default=False)


class FusionError(RuntimeError):
    """These layers can't be compiled; the message says why."""


def first_line(error: BaseException) -> str:
    """Of its message, which may have none."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def _layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """A compiled layer's attention, as attach's function has it. index: the layer's number, on the host."""
    if _trying.get():
        return query.new_zeros([query.shape[i] for i in (0, 2, 1, 3)])
    cache = attach.active_cache()
    assert cache is not None, "a layer compiled for an OasisCache ran without one"
    return attach.attend_layer(cache, int(index), query, key, value, scaling, sinks)


_library = torch.library.Library("oasis_hf", "FRAGMENT")
_library.define("layer(Tensor query, Tensor key, Tensor value, Tensor index, float? scaling, Tensor? sinks) -> Tensor")
_library.impl("layer", _layer, "CompositeExplicitAutograd")
torch.library.register_fake(
    "oasis_hf::layer", lambda query, *rest: query.new_empty([query.shape[i] for i in (0, 2, 1, 3)])
)


class _Slice(nn.Module):
    """Stands in for one of several joined projections: rows `start:stop` of the product with all their weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias, self.start, self.stop = weight, bias, start, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)[..., self.start : self.stop]


def _sum(x: torch.Tensor, group: str) -> None:
    """In place, over the ranks of a group named as in `parallel.groups`."""
    if not _trying.get():  # where one rank fails to compile, the others must not wait for it
        dist.all_reduce(x, group=parallel.groups[group])


_library.define("sum_ranks(Tensor(a!) x, str group) -> ()")
_library.impl("sum_ranks", _sum, "CompositeExplicitAutograd")
torch.library.register_fake("oasis_hf::sum_ranks", lambda x, group: None)


class _Summed(nn.Module):
    """Stands in for a projection whose inputs are split over ranks: their products are summed, then comes the bias."""

    start = 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight)
        torch.ops.oasis_hf.sum_ranks(out, self.group)
        return out if self.bias is None else out + self.bias


class _Once(CustomGraphPass):
    """Products that joined projections ask for several times are made once."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        aten = torch.ops.aten
        pure = {aten.mm.default, aten.addmm.default, aten.permute.default, aten.view.default, aten.t.default,
                aten.reshape.default}  # fmt: skip
        seen: dict[Any, torch.fx.Node] = {}
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in pure:
                continue
            key = (node.target, repr(node.args), repr(node.kwargs))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node

    def uuid(self) -> Any:
        return "oasis_hf.fused._Once.1"


@functools.cache
def _compiled(kind: type) -> Callable[..., Any]:
    """A kind of layer's forward, compiled once a process for each shape: models and caches come and go."""
    forward: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    return torch.compile(forward, dynamic=False, fullgraph=True, options={"post_grad_custom_pre_pass": _Once()})


class FusedLayers:
    """The decoder layers of one model, and what is compiled of them.

    Args:
        model: a causal language model, attached to a cache.

    Attributes:
        failed: why a layer could not be compiled, or None.

    Raises:
        FusionError: its decoder layers were not found, or are replaced.
    """

    def __init__(self, model: Any) -> None:
        self.layers = decoder_layers(model)
        if any("forward" in layer.__dict__ for layer in self.layers):
            raise FusionError("something else stands in for a layer's forward")
        self.failed: str | None = None
        self._slices: list[tuple[nn.Module, str, nn.Linear, _Slice | _Summed]] = []
        group = attach.ranks_of(model)
        for layer in self.layers:
            if group is not None and not all(map(_splits_plainly, layer.modules())):
                raise FusionError(f"{type(layer).__name__} is split over ranks in other ways than whole projections")
            for parent in list(layer.modules()):
                for names in GROUPS:
                    self._join(parent, names)
                if group is not None:
                    self._part(parent, group)

    def _join(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        """One weight for sibling projections; their own become views of it, so that nothing is held twice."""
        found = [parent._modules.get(name) for name in names]
        linears = [module for module in found if type(module) is nn.Linear]
        if len(linears) < len(names) or not _alike(linears):
            return
        weight = torch.cat([parallel.local(linear.weight.data) for linear in linears])
        biased = linears[0].bias is not None
        bias = torch.cat([parallel.local(linear.bias.data) for linear in linears]) if biased else None
        start = 0
        for name, linear in zip(names, linears):
            stop = start + len(parallel.local(linear.weight))
            parallel.put(linear.weight, weight[start:stop])
            if bias is not None:
                parallel.put(linear.bias, bias[start:stop])
            self._slices.append((parent, name, linear, _Slice(weight, bias, start, stop)))
            start = stop

    def _part(self, parent: nn.Module, group: Any) -> None:
        """Stand-ins for projections that ranks hold parts of, and that share no input with others."""
        done = {name for held, name, _, _ in self._slices if held is parent}
        for name, linear in parent._modules.items():
            if name in done or not isinstance(linear, nn.Linear) or not parallel.is_part(linear.weight):
                continue
            weight = parallel.local(linear.weight.data)
            bias = None if linear.bias is None else parallel.local(linear.bias.data)
            stand_in: _Slice | _Summed = _Slice(weight, bias, 0, len(weight))
            if parallel.split_along(linear.weight) == 1:
                stand_in = _Summed(weight, bias, parallel.named(group))
            self._slices.append((parent, name, linear, stand_in))

    def holds(self) -> bool:
        """Whether the joined projections are still the model's own: nothing was loaded, moved, wrapped or hooked."""
        return not any("forward" in layer.__dict__ for layer in self.layers) and all(
            parent._modules.get(name) is linear
            and not _changed(linear)
            and parallel.local(linear.weight).data_ptr() == one.weight[one.start].data_ptr()
            for parent, name, linear, one in self._slices
        )

    def split(self) -> None:
        """Every projection has a weight of its own again. Where there is no memory for that it stays a view, which
        computes the same: a cache may be released when the device is full."""
        with contextlib.suppress(torch.OutOfMemoryError):
            for _, _, linear, one in self._slices:
                own = parallel.local(linear.weight.data)
                if len(own) < len(one.weight) and own.data_ptr() == one.weight[one.start].data_ptr():
                    parallel.put(linear.weight, own.clone())
                    if linear.bias is not None:
                        parallel.put(linear.bias, parallel.local(linear.bias.data).clone())

    def _forward(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The cache would lead dynamo to the layer's number, and each layer to a graph of its own.
        kwargs = {name: None if name in attach.CACHE_NAMES else value for name, value in kwargs.items()}
        limits = {"recompile_limit": SHAPES, "accumulated_recompile_limit": 4 * SHAPES}
        with self._standing_in(), torch._dynamo.config.patch(limits):
            kind: Any = type(layer)
            return _compiled(kind)(layer, *args, **kwargs)

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        before = [parent._modules[name] for parent, name, _, _ in self._slices]
        for parent, name, _, stand_in in self._slices:
            parent._modules[name] = stand_in
        try:
            yield
        finally:
            for (parent, name, _, _), module in zip(self._slices, before):
                parent._modules[name] = module

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The model's layers run compiled inside."""
        with self._hung(lambda layer: lambda *args, **kwargs: self._forward(layer, args, kwargs)):
            yield

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """The model's layers run as they are inside, and each is compiled for what it is given (layers alike share what
        was compiled first); `failed` says afterwards whether that went wrong."""
        self.failed = None

        def beside(layer: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if self.failed is None:
                    token = _trying.set(True)
                    try:
                        self._forward(layer, args, kwargs)
                    except Exception as error:  # dynamo and inductor raise what they like
                        self.failed = f"{type(error).__name__}: {first_line(error)}"
                    finally:
                        _trying.reset(token)
                return type(layer).forward(layer, *args, **kwargs)  # type: ignore[operator]

            return forward

        with self._hung(beside):
            yield

    @contextlib.contextmanager
    def _hung(self, stand_in: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
        for layer in self.layers:
            layer.__dict__["forward"] = stand_in(layer)
            for module in layer.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    setattr(module, attach.HANDLE, torch.tensor(module.layer_idx))
        hooks = _put_aside(part for layer in self.layers for part in layer.modules())
        try:
            yield
        finally:
            for module, kind, own in hooks:
                setattr(module, kind, own)
            for layer in self.layers:
                del layer.__dict__["forward"]
                for module in layer.modules():
                    module.__dict__.pop(attach.HANDLE, None)


def _put_aside(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Takes hooks off that dynamo can't trace: those that collect a call's outputs (a call that asks for outputs is not
    compiled), and what sums gradients over ranks. Returns what to put back."""
    before = []
    for module in modules:
        for kind, origin in (("_forward_hooks", attach.OUTPUT_HOOKS), ("_backward_hooks", parallel.PLANS)):
            own = getattr(module, kind)
            rest = OrderedDict((at, hook) for at, hook in own.items() if hook.__module__ != origin)
            if len(rest) < len(own):
                setattr(module, kind, rest)
                before.append((module, kind, own))
        if parallel.is_for_gradients(module.__dict__.get("forward")):
            before.append((module, "forward", module.__dict__.pop("forward")))
    return before


def _alike(linears: list[nn.Linear]) -> bool:
    first = linears[0]
    kinds = {
        (one.in_features, one.weight.dtype, one.weight.device, one.bias is None, type(one.weight)) for one in linears
    }
    plain = type(first.weight) is nn.Parameter or {parallel.split_along(one.weight) for one in linears} == {0}
    return len(kinds) == 1 and plain and first.weight.is_floating_point() and not any(map(_changed, linears))


def _changed(linear: nn.Linear) -> bool:
    own = linear.__dict__.get("forward")
    return bool(linear._forward_hooks or linear._forward_pre_hooks or (own is not None and not parallel.is_plan(own)))


def _splits_plainly(module: nn.Module) -> bool:
    """Whether ranks hold nothing of a module in parts but projections by their outputs or by their inputs."""
    parts = [weight for weight in module._parameters.values() if parallel.is_part(weight)]
    if not parts:
        own = module.__dict__.get("forward")
        return not parallel.is_plan(own) or parallel.is_for_gradients(own)
    return type(module) is nn.Linear and parallel.split_along(module.weight) in (0, 1) and not _changed(module)


def decoder_layers(model: Any) -> list[nn.Module]:
    """In their order. Raises `FusionError` where they are not found."""
    count = supported.text_config(model).num_hidden_layers
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not name.endswith("layers") or len(module) != count:
            continue
        if all(any(hasattr(part, "layer_idx") for part in layer.modules()) for layer in module):
            return list(module)
    raise FusionError(f"{type(model).__name__} has no list of {count} decoder layers")


_fused: "weakref.WeakKeyDictionary[Any, FusedLayers]" = weakref.WeakKeyDictionary()


def fused_layers(model: Any) -> FusedLayers:
    """The model's, made once and made anew when its weights are others."""
    have = _fused.get(model)
    if have is None or not have.holds():
        have = _fused[model] = FusedLayers(model)
    return have


def joined(model: Any) -> FusedLayers | None:
    """The model's, if they were made: while they are the same, its weights are where they were."""
    return _fused.get(model)


def _split(model: Any) -> None:
    have = _fused.pop(model, None)
    if have is not None and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        have.split()


attach.at_detach.append(_split)
