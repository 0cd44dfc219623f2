"""Kept mass under the fetch cap: the package's own selection, step after step, without the model.

`cells.py` asks which blocks a setting wants; this asks which it has, when at most C blocks a KV head come in a step and
the rest of the working set is what earlier steps left. So settings can be compared at the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cells import Truth

from oasis_hf.config import BLOCK, TAIL, OasisConfig
from oasis_hf.ops import reference
from oasis_hf.sharing import Shares


@dataclass
class Capped:
    """missed: `[texts]`, mean of 1 - kept mass. fetched: blocks moved a KV head a layer a step, mean. wanted: predicted
    but over the cap, likewise."""

    missed: list[float]
    fetched: float
    wanted: float


def capped(
    truths: list[Truth], scores: list[torch.Tensor], first: list[torch.Tensor], prompt: int, budget: int,
    fetch_ratio: float, origins: list[torch.Tensor] | None = None, shares: Shares | None = None, rate: float = 1.0,
) -> Capped:  # fmt: skip
    """Walk through all steps of all texts at once (layers and texts are rows).

    Args:
        truths: one a text. scores: `[L, H, S, N]` a text, what step t's blocks are chosen by.
        first: `[L, H, N]` a text, scores of the prompt's last query, which choose the first working set with no cap.
        prompt: tokens before step 0.
        origins: `Passes.origin` a text, which says in which steps a working set changes; None: in all.
        shares: of one text, layers by one row: what a step moves is shared out by it (`fetch_ratio="auto"`), and not
            capped by the ratio. rate: what the latest score counts in a block's average; 1: all.
    """
    mass, score, start = torch.cat([t.mass for t in truths]), torch.cat(scores), torch.cat(first)
    rows, heads, steps, _ = mass.shape
    if origins is not None:  # inside a pass nothing is predicted, so nothing moves
        same = torch.stack([torch.cat((o[:1] != o[:1], o[1:] == o[:-1])) for o in origins])
        score = score.masked_fill(same.repeat_interleave(rows // len(origins), 0)[:, None, :, None], -torch.inf)
    config = OasisConfig(budget=budget, fetch_ratio=fetch_ratio)
    slots, cap = config.slots, config.fetch_cap(config.slots)
    means = torch.full_like(start, -1.0) if rate < 1 else None
    sharing: tuple[torch.Tensor | None, ...] = (None, None)
    if shares is not None:
        assert len(truths) == 1
        cap, sharing = shares.gains.shape[-1], (shares.caps.flatten(0, 1), shares.gains.flatten(0, 1))
    device = mass.device
    lengths = torch.full((rows,), prompt, device=device)
    order = torch.arange(slots, device=device)
    table = torch.full((rows, heads, slots), -1, dtype=torch.int64, device=device)
    if prompt % BLOCK:
        table[..., 0] = prompt // BLOCK
    age = torch.zeros_like(table)
    keys = torch.zeros((rows, heads, TAIL + slots * BLOCK, 1), device=device)
    values, new = torch.zeros_like(keys), torch.zeros((rows, heads, 1), device=device)
    reference.select(start, table, age, lengths, order, slots, torch.ones((), dtype=torch.int64, device=device))
    kept, moved = [], torch.zeros(3, dtype=torch.int64, device=device)
    for step in range(steps):
        closed = (prompt + step) // BLOCK
        now = mass[:, :, step]
        resident = (table >= 0) & (table < closed)
        kept.append((now.gather(2, table.clamp(min=0)) * resident).sum(-1) + now[..., closed])
        clock = torch.tensor(step + 2, device=device)
        reference.append(keys, values, table, age, lengths, order, new, new, clock)
        lengths = lengths + 1
        if step + 1 < steps:
            asked = score[:, :, step + 1], table, age, lengths, order, cap, clock
            moved += reference.select(*asked, *sharing, means, rate)[2].sum(1)
            if shares is not None:
                shares.share_out()
    missed = 1 - torch.stack(kept).double().mean((0, 2)).view(len(truths), -1).mean(1)
    each = moved.double() / (rows * heads * (steps - 1))
    return Capped(missed.tolist(), float(each[1]), float(each[2]))
