"""`correct`, as `reference.py` specifies the other operators: who selects again before it attends."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def missed(scores: torch.Tensor, table: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
    """Predicted attention mass `[B, H]` float32 that the best K = S - 1 blocks hold beyond the resident ones. Blocks
    that always score +inf are resident, and left out. Arguments as in `correct`."""
    blocks, slots = scores.shape[2], table.shape[2]
    exists = torch.arange(blocks, device=scores.device) < closed[:, None]
    mass = scores.masked_fill(~exists.unsqueeze(1) | scores.isinf(), 0.0)
    best = mass.gather(2, scores.topk(min(slots - 1, blocks), -1).indices).sum(-1)
    # A slot whose block is not closed (or empty) reads the column of zeros behind the last block.
    held = F.pad(mass, (0, 1)).gather(2, torch.where(table < 0, blocks, table.clamp(max=blocks)))
    return (best - held.sum(-1)).clamp(min=0)


def correct(
    scores: torch.Tensor,
    heads: torch.Tensor | None,
    table: torch.Tensor,
    closed: torch.Tensor,
    above: float,
    step: torch.Tensor,
    counts: torch.Tensor,
    fired: torch.Tensor,
) -> None:
    """Which KV heads select again before they attend (FreeKV's correction, arXiv 2505.13109): the scores of the others
    become -inf, so that `select` leaves their working sets as they are.

    Args:
        scores: `[B, H, N]` of the step's own query, changed in place; by `"softmax-mean"` where they decide.
        heads: `[B, H]` bool, which; None: those in which `missed` is above `above`.
        table: `[B, H, S]`. closed: `[B]`, closed blocks a row; a row of none is not asked.
        above: a share of the mass over all closed blocks, 0 to 1. step: this step's number, an int64 scalar.
        counts: `[2, H]` int64, added to: rows asked, rows in which the head is corrected.
        fired: `[1 + B]` int64: the first, added to, counts rows and steps in which a head of any layer was corrected;
            the others become `step` where one is.
    """
    heads = missed(scores, table, closed) > above if heads is None else heads & (closed > 0)[:, None]
    scores.masked_fill_(~heads.unsqueeze(-1), -torch.inf)
    counts += torch.stack(((closed > 0).sum().expand(heads.shape[1]), heads.sum(0)))
    any_head = heads.any(1)
    fired[:1] += (any_head & (fired[1:] != step)).sum()
    fired[1:] = torch.where(any_head, step, fired[1:])
