"""Which of a row's drafts are accepted, and the token that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import logits_process

if TYPE_CHECKING:
    from .text import Text

BY_SCORES_ALONE = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)  # fmt: skip
"""Processors that look at nothing but the scores: all positions of all rows go through them at once."""

STATEFUL = tuple(
    getattr(logits_process, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    )
)  # fmt: skip
"""Processors that take every call for the next token's: asked at several positions, they would give other tokens."""


def greedy(drafts: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """chain `[B, k + 1]` and count `[B]`, as `Choice` gives them, by the highest of scores `[B, 1 + k, V]`."""
    chain = scores.argmax(-1)
    return chain, 1 + (chain[:, :-1] == drafts).long().cumprod(1).sum(1)


def among(
    chain: torch.Tensor, count: torch.Tensor, others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Where another candidate for the first draft's place is what was chosen there: which of `others` `[B, r]`, and in
    which rows, both `[B]`."""
    hit = (others == chain[:, :1]) & (count == 1)[:, None]
    return hit.long().argmax(1), hit.any(1)


def behind_other(
    chain: torch.Tensor, count: torch.Tensor, token: torch.Tensor, took: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """chain and count with `token` `[B]` behind the other candidate, in rows that `took` `[B]` one."""
    second = torch.where(took, token, chain[:, 1])
    return torch.cat((chain[:, :1], second[:, None], chain[:, 2:]), 1), count + took


def _drawn(probability: torch.Tensor) -> torch.Tensor:
    """A token `[B]` by probabilities `[B, V]` or multiples of them: what `torch.multinomial` draws, which also reads
    back whether they are any."""
    return (probability / torch.empty_like(probability).exponential_(1)).argmax(-1)


class Choice:
    """Chooses tokens as `model.generate` does, and accepts the drafts that are so chosen.

    Args:
        processors: generate's logits processors. do_sample: as its configuration says.

    Attributes:
        at_once: whether all positions can go through the processors at once. greedily: `greedy` says all.
    """

    def __init__(self, processors: Any, do_sample: bool) -> None:
        self.processors, self.do_sample = processors, do_sample
        self.at_once = all(type(one) in BY_SCORES_ALONE for one in processors)
        self.greedily = not do_sample and not len(processors)

    def __call__(
        self, text: "Text", drafts: torch.Tensor, logits: torch.Tensor, drawn_from: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that come next.

        Args:
            text: what the rows hold. drafts: `[B, k]`, a chain. logits: `[B, 1 + k, V]` float32, behind the row's last
                token and behind each draft.
            drawn_from: `[B, k, V]`, the probabilities that drafts were drawn from; None: they were certain.

        Returns:
            chain `[B, k + 1]` and count `[B]`: a row's first `count` are chosen, all but the last of them drafts.
        """
        scores = self._processed(text, drafts, logits)
        return self._sampled(drafts, scores, drawn_from) if self.do_sample else greedy(drafts, scores)

    def beside(
        self, text: "Text", chain: torch.Tensor, count: torch.Tensor, others: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `__call__` chose, where another candidate for the first draft's place may have been: what is drawn there
        without regard to them is any of them with its own probability, and the token behind it is chosen too.

        Args:
            others: `[B, r]` ids. logits: `[B, r, V]` float32, behind each.

        Returns:
            chain and count as there, and `[B]` which of the others a row took, -1 for none.
        """
        which, took = among(chain, count, others)
        token, _ = self.draw(text, chain[:, :1], logits[torch.arange(len(logits), device=logits.device), which])
        return *behind_other(chain, count, token, took), torch.where(took, which, -1)

    def draw(
        self, text: "Text", drafts: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token `[B]` behind a row's drafts `[B, k]` from logits `[B, V]`, and the probabilities `[B, V]` that it was
        drawn from, None where it was certain."""
        places = logits[:, None].expand(-1, drafts.shape[1] + 1, -1)
        scores = self._processed(text, drafts, places)[:, -1]
        if not self.do_sample:
            return scores.argmax(-1), None
        probability = scores.softmax(-1)
        return _drawn(probability), probability

    def _processed(self, text: "Text", drafts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not len(self.processors):
            return logits
        if self.at_once:
            return self.processors(drafts[:, :0], logits.flatten(0, 1)).view_as(logits)
        scores, rows, most = logits.clone(), torch.arange(len(logits), device=logits.device), drafts.shape[1]
        for places, before in text.with_drafts(drafts):
            # All rows, since some processors know the batch; those of another length are not looked at.
            at, has = places.clamp(0, most), (places >= 0) & (places <= most)
            processed = self.processors(before, logits[rows, at])
            scores[rows, at] = torch.where(has[:, None], processed, scores[rows, at])
        return scores

    def _sampled(
        self, drafts: torch.Tensor, scores: torch.Tensor, drawn_from: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leviathan et al. (2211.17192), algorithm 1: a draft is accepted with the ratio of its probability to the one
        it was drawn with, and behind the first that is not, a token is drawn from what the first distribution has more
        of than the second. A drafter that was certain drew with probability 1."""
        probability = scores.softmax(-1)
        if drawn_from is None:
            drawn_from = torch.zeros_like(scores[:, :-1]).scatter_(2, drafts.unsqueeze(-1), 1)
        wanted, drawn = (one.gather(2, drafts.unsqueeze(-1)).squeeze(-1) for one in (probability[:, :-1], drawn_from))
        accepted = (torch.rand_like(wanted) * drawn < wanted).long().cumprod(1).sum(1)
        rows = torch.arange(len(drafts), device=drafts.device)
        # Behind the last draft nothing was drawn: the whole distribution is left.
        drawn_from = torch.cat((drawn_from, drawn_from.new_zeros((len(drafts), 1, scores.shape[-1]))), 1)
        left = (probability[rows, accepted] - drawn_from[rows, accepted]).clamp(min=0)
        # All taken but for rounding: such a draft was as likely as it was drawn.
        left = torch.where(left.sum(1, keepdim=True) > 0, left, probability[rows, accepted])
        last = _drawn(left)[:, None]
        chain = torch.cat((drafts, last), 1).scatter(1, accepted[:, None], last)
        return chain, accepted + 1
