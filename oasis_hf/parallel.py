"""Tensor parallelism, as transformers' `tp_plan` makes it (issue F): which KV heads a rank keeps, and what ranks share.

Each rank's cache holds the store, the working set and the pipeline of its own KV heads, which nobody else needs. What
all ranks must do alike, they do by the same numbers: hidden states and logits are equal on all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

KEYS = ("k_proj", "qkv_proj", "query_key_value", "qkv")
"""Projections whose output holds the keys."""


def size(model: Any) -> int:
    """Ranks that the model is split over."""
    return getattr(model, "_tp_size", None) or 1


def _splits_heads(model: Any) -> bool:
    plan = getattr(model, "tp_plan", None) or {}
    return any(name.rsplit(".", 1)[-1] in KEYS and style == "colwise" for name, style in plan.items())


def refusals(model: Any, kv_heads: int) -> Iterator[str]:
    """Reasons why a rank would not hold its own share of a layer's KV heads, each with the way out."""
    ranks = size(model)
    if ranks == 1:
        return
    if kv_heads % ranks:
        yield f"{kv_heads} KV heads do not divide over tensor-parallel size {ranks}; choose a size that divides them."
    elif not _splits_heads(model):
        yield (
            f"its tp_plan leaves all {kv_heads} KV heads on each of {ranks} ranks, which would keep the whole KV each; "
            "use device_map instead, or a plan with 'colwise' for its q_proj, k_proj and v_proj."
        )


def local_heads(model: Any, kv_heads: int) -> int:
    """KV heads a rank keeps, of all of a layer's."""
    return kv_heads // size(model)


def same_draws(group: dist.ProcessGroup, device: torch.device) -> None:
    """All ranks of a group draw on `device` what the first one does from now on, however they were seeded: rows that
    are sampled, and the drafts that they accept, are then the same everywhere."""
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    sent = state.to(device)
    dist.broadcast(sent, dist.get_global_rank(group, 0), group)
    if cuda:
        torch.cuda.set_rng_state(sent.cpu(), device)
    else:
        torch.set_rng_state(sent)


_gathered: "weakref.WeakKeyDictionary[Any, dict[int, torch.Tensor]]" = weakref.WeakKeyDictionary()


def is_part(weight: Any) -> bool:
    """Whether ranks hold parts of a weight."""
    return hasattr(weight, "full_tensor")


def local(weight: Any) -> torch.Tensor:
    """This rank's part of a weight, or all of one that ranks hold alike."""
    return weight.to_local() if is_part(weight) else weight


def put(weight: Any, part: torch.Tensor) -> None:
    """A weight's content, or of one that ranks hold parts of this rank's, is `part` from now on."""
    if is_part(weight):
        weight._local_tensor = part
    else:
        weight.data = part


def split_along(weight: Any) -> int | None:
    """The one dimension along which ranks hold equal parts of a weight `[out, in]`; None: they don't."""
    if not is_part(weight) or len(weight.placements) != 1 or type(weight.placements[0]) is not Shard:
        return None
    return weight.placements[0].dim % weight.ndim


PLANS = "transformers.distributed.tensor_parallel"
"""Where what a plan hangs on modules comes from."""


def is_plan(forward: Any) -> bool:
    """Whether a module's forward is what a plan put in its place."""
    return getattr(forward, "__module__", None) == PLANS


def is_for_gradients(forward: Any) -> bool:
    """Whether it is one that a plan put there for training alone."""
    return is_plan(forward) and forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")


groups: dict[str, dist.ProcessGroup] = {}
"""By name, those that compiled layers sum over."""


def named(group: dist.ProcessGroup) -> str:
    """Its name in `groups`."""
    groups[group.group_name] = group
    return group.group_name


def whole(model: Any, weight: Any) -> torch.Tensor:
    """A weight that ranks hold parts of, gathered once a model. All ranks must ask."""
    have = _gathered.setdefault(model, {})
    if id(weight) not in have:
        have[id(weight)] = weight.full_tensor().detach()
    return have[id(weight)]
