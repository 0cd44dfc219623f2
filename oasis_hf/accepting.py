"""Accepting drafts behind a replayed step, by a second CUDA graph: verification where it is greedy, and the commit.

Eagerly a commit is a few launches a layer and draft, most of them for rows that take none. Here the host makes room for
all drafts that could be accepted, while the device is still busy with the step, and replays; which were, it learns with
what else it has to be told of the round. Both graphs stand or fall together: this one hangs on the step's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .choice import among, behind_other, greedy
from .fused import first_line
from .graphs import Captured
from .spans import span
from .text import Chosen, Text, cut

if TYPE_CHECKING:
    from .cache import OasisCache

logger = logging.getLogger(__name__)


@dataclass
class Accepting:
    """One graph.

    Attributes:
        counts: `[B]` int64, drafts that each row commits: its input, or what it found out itself.
        first: `[B]` likewise, the entry of the tail that stands for a row's first draft; None where there is one only.
        left: `[B]`, ends: `[E]`, its inputs where it verifies; chosen: what came of that, overwritten by every replay;
            else None.
        notes: whether the drafter is told in it. graph: None until it is captured.
    """

    counts: torch.Tensor
    first: torch.Tensor | None = None
    left: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    chosen: Chosen | None = None
    notes: bool = False
    graph: Any = None

    def replay(self, told: tuple[torch.Tensor, torch.Tensor | None] | None) -> None:
        """told: counts and first; None: it finds out itself."""
        if told is not None:
            self.counts.copy_(told[0])
            if self.first is not None and told[1] is not None:
                self.first.copy_(told[1])
        with span("accept"):
            self.graph.replay()

    def verified(self, step: Captured, drafts: int, going: torch.Tensor) -> Chosen:
        """What follows by the highest logit, in rows where `going` `[B]`."""
        assert self.left is not None and self.ends is not None
        tokens, logits = step.tokens, step.output["logits"]
        chain, count = greedy(tokens[:, 1 : 1 + drafts], logits[:, : 1 + drafts])
        right = count - 1
        if self.first is not None:
            entry = drafts + 2  # behind the chain's last draft, which nobody verifies
            others = tokens.shape[1] - entry
            which, took = among(chain, count, tokens[:, entry:])
            after = logits[:, -others:].argmax(-1).gather(1, which[:, None]).squeeze(1)
            chain, count = behind_other(chain, count, after, took)
            self.first.copy_(torch.where(took, entry + which, 1))
        return cut(chain, count, self.left, going, self.ends, right)

    def run(self, cache: "OasisCache", step: Captured, drafts: int) -> Chosen | None:
        """All of it, on the device alone: what is captured, and what runs once before that."""
        rows, chosen = cache.state.need_rows(), None
        if self.left is not None:
            assert rows.taking is not None
            chosen = self.verified(step, drafts, rows.taking)
            self.counts.copy_((chosen.kept - 1).clamp(min=0))
        entries = cache.draft_entries(drafts, self.first)
        cache.append_entries(entries, self.counts, None)
        lengths = rows.lengths(cache.device)
        if step.notes:
            follow = torch.arange(drafts, device=cache.device) < self.counts[:, None]
            index, tokens = cache.stacked_at(entries, step.tokens)
            cache.drafter.note(tokens, lengths, follow, index)
        lengths.add_(self.counts)
        rows.columns_on(cache.device).add_(self.counts.max())
        return chosen

    def capture(self, cache: "OasisCache", step: Captured, drafts: int) -> None:
        """As it is; before that it runs once for no draft, so that libraries set themselves up."""
        Accepting(torch.zeros_like(self.counts), self.first).run(cache, step, drafts)
        if self.left is not None:
            self.verified(step, drafts, self.left > 0)
        self.notes = step.notes
        self.graph, self.chosen = cache.graphs.capture(cache.device, lambda: self.run(cache, step, drafts))


def accepting(cache: "OasisCache", text: Text, greedily: bool) -> Accepting | None:
    """The graph that accepts the drafts of the step that just ran, and room for all of them; None: it is to be done
    eagerly, since the step was.

    Args:
        greedily: choose by the highest logit and end where `text` says, if that is all there is to it.
    """
    memo = cache.stepper.memo
    if memo is None or text.ids.device != cache.device:
        return None
    drafts, greedily = memo.drafts, greedily and text.plain

    def make() -> Accepting:
        counts = torch.zeros(len(text.tokens), dtype=torch.int64, device=cache.device)
        have = Accepting(counts, torch.ones_like(counts) if memo.others else None)
        if greedily:
            have.left, have.ends = text.left.clone(), text.ends.clone()
        return have

    key = drafts, memo.others, len(text.ends) if greedily else None
    have = _behind(cache, text.ahead(drafts), key, drafts, make)
    if have is not None and have.left is not None and have.ends is not None:
        have.left.copy_(text.left)
        have.ends.copy_(text.ends)
    return have


def entering(cache: "OasisCache") -> Accepting | None:
    """The graph that commits one entry of the last step's tail in every row, each its own, which `first` tells: for
    loops that feed a token a call. None: as `accepting` has it; layers with a sliding window hang on the host."""
    rows = cache.state.need_rows()
    if len(cache.sparse_layers) < len(cache.layers) or rows.taking is not None:
        return None

    def make() -> Accepting:
        counts = torch.ones(len(rows), dtype=torch.int64, device=cache.device)
        return Accepting(counts, torch.ones_like(counts))

    return _behind(cache, [1] * len(rows), "one", 1, make)


def _behind(
    cache: "OasisCache", room: list[int], key: Any, drafts: int, make: Callable[[], Accepting]
) -> Accepting | None:
    """The graph under `key` of the step that just ran, captured if it is not there, and room for so many tokens more a
    row."""
    graphs = cache.graphs
    if graphs.last is None or graphs.unaccepted is not None:
        return None
    try:
        cache.make_room_for(room)
    except (MemoryError, torch.OutOfMemoryError):  # as many as are accepted may find room
        return None
    step = graphs.behind(cache)
    if step is None:
        return None
    with torch.inference_mode(False), torch.no_grad():  # it outlives the call
        have = step.accepting.get(key)
        if have is None:
            have = make()
            try:
                have.capture(cache, step, drafts)
            except (RuntimeError, ValueError) as error:
                graphs.unaccepted = first_line(error)
                logger.warning("drafts are accepted without a CUDA graph: it could not be captured (%s)", error)
                return None
            step.accepting[key] = have
    return have
