"""Devices that are not there: tensors that say they lie on "pretend:0" or "pretend:1", hold their numbers on the CPU,
and refuse to meet another device's in an operation, as real ones do. For a process of its own: it changes torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten

INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""What takes indices on the host or on its own device."""

CROSSING = {aten._to_copy.default, aten.copy_.default, *INDEXING}
"""What may take tensors of several devices."""


class Lying(torch.Tensor):
    """inner: the numbers, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "Lying":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"Lying({self.inner!r}, {self.device})"


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, whose results lie where they would."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    lying = [one for one in tensors if isinstance(one, Lying)]
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    if not lying and (asked is None or asked.type != NAME):
        return func(*args, **kwargs)
    devices = {one.device for one in tensors if one.ndim or isinstance(one, Lying)}
    if len(devices) > 1 and func not in CROSSING and not str(func).startswith("oasis_hf."):
        raise RuntimeError(f"{func} was given tensors on {sorted(map(str, devices))}")
    if func in INDEXING and {one.device for one in lying} - {args[0].device}:
        raise RuntimeError(f"{func}: indices should be on the host or on the same device as the indexed tensor")
    target = asked or lying[0].device
    if func is aten.copy_.default:
        target = args[0].device
    if target.type == NAME and target.index is None:
        target = torch.device(NAME, 0)
    back = {id(one.inner): one for one in lying}
    plain = tree_map(lambda one: one.inner if isinstance(one, Lying) else one, (args, kwargs))
    if asked is not None:
        plain[1]["device"] = torch.device("cpu")
    out = func(*plain[0], **plain[1])
    if target.type != NAME:
        return out

    def wrapped(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or isinstance(one, Lying):
            return one
        return back[id(one)] if id(one) in back else Lying(one, target)

    return tree_map(wrapped, out)


class Pretending(TorchDispatchMode):
    """Tensors that are asked for on a device that is not there are made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def set_up() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is then a copy that is seen here
