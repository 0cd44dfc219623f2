"""`Eagle3Drafter`: an EAGLE-3 head beside a cache, fed by taps of the target's hidden states."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ... import parallel, supported
from ...config import TAIL
from ...fingerprint import weights
from ...placing import placed, plain_weight
from .. import taps as hooks
from ..base import Draft, Drafter, DrafterError
from . import checkpoint, files, fused
from .head import Eagle3Head
from .past import Past

if TYPE_CHECKING:
    from ...state import Step

LONGEST = 4096
"""Window where none is asked for, at most: no public recipe trains at longer texts, whatever a head's config says."""


class Eagle3Drafter(Drafter):
    """Proposes by an EAGLE-3 head (arXiv 2503.01840).

    Its row t is made of the target's hidden states of position t and the token behind it, and proposes the one after
    that. So of a row of n tokens it holds the keys and values of positions 0 to n - 2, and the fused state of n - 1,
    which waits for the next token: `propose` is given it.

    A row has no proposal in the first step after a crop by `past.KEPT` tokens or more, after tokens were hidden in its
    middle, and after embeddings came instead of ids; what was missed stays a hole in what its queries see.

    Args:
        head: an `Eagle3Head`; it is moved to the model's device and dtype.
        model: the target that it was made for.
        window: positions that a draft's query sees; None: the length that the head's config names, `LONGEST` at most.
        name: what a report calls it.
    """

    always = True
    several = True
    # As much is kept as by the draft alone under the cap, more without one, and fewer blocks are moved: a wrong draft
    # costs less (eval/hit_rate.py). There is no further query to score: the current one is kept anyway.
    lookahead = MappingProxyType({"draft": 0.5, "previous": 0.5})

    def __init__(self, head: Eagle3Head, model: Any, window: int | None = None, name: str = "eagle3") -> None:
        if window is not None and window < 1:
            raise DrafterError(f"Eagle3Drafter needs a window of at least 1 position, not {window}.")
        device, dtype = placed(model)
        self.head, self.model, self.name = head.to(device=device, dtype=dtype), model, name
        self.taps = head.config.taps
        self.window = window or min(head.config.max_position_embeddings, LONGEST)
        self.past: Past | None = None
        self.tapped: torch.Tensor | None = None  # [taps, B, TAIL, Ht], of the last decode step
        self._tail_tapped = False  # `tapped` holds the states of the last step's tail, of which any may be accepted
        self._wrote = False  # `propose` has written the keys and values that `note` would
        self._prompt: dict[int, torch.Tensor] = {}  # of the prompt or chunk under way, by tap
        self._picked: _Picked | None = None
        self.pieces = fused.Pieces()

    @classmethod
    def from_pretrained(
        cls, source: Any, model: Any, *, taps: tuple[int, ...] | None = None, revision: str | None = None,
        window: int | None = None,
    ) -> "Eagle3Drafter":  # fmt: skip
        """A head's files, in any public layout, as a drafter for `model`.

        Args:
            source: a folder, or a repository's id on the hub. revision: its branch, tag or commit.
            taps: layers whose input is read, instead of those that the head's config means.
            window: as the class has it.

        Raises:
            DrafterError: no such head, one that contradicts itself, or one that was made for another model.
        """
        model = supported.plain_model(model)
        folder = files.find(source, revision)
        config, tensors = checkpoint.parse(*files.read(folder), supported.text_config(model), taps)
        name = (
            source if isinstance(source, str) and folder.name != str(source).rstrip("/").split("/")[-1] else folder.name
        )
        return cls(checkpoint.build(config, tensors), model, window, f"eagle3 ({name})")

    def check(self, model: Any) -> None:
        if model is not self.model:
            raise DrafterError("This Eagle3Drafter was made for another model: make one with this model.")
        hooks.places(model, self.taps)

    @property
    def nbytes(self) -> int:
        parts = [*self.head.parameters(), *([] if self.tapped is None else [self.tapped])]
        return sum(part.nbytes for part in parts) + (self.past.nbytes if self.past is not None else 0)

    def bytes_for(self, rows: int) -> tuple[int, int]:
        weight, config = self.head.fc.weight, self.head.config
        past = Past(rows, config, self.window, weight.dtype, torch.device("meta"))
        tapped = len(self.taps) * rows * TAIL * config.target_hidden_size * weight.itemsize
        return sum(part.nbytes for part in self.head.parameters()), past.nbytes + tapped

    def _room(self, rows: int) -> tuple[Past, torch.Tensor]:
        """Buffers for so many rows: the same ones while their number is."""
        config, weight = self.head.config, self.head.fc.weight
        if self.past is None or len(self.past) != rows:
            self.past = Past(rows, config, self.window, weight.dtype, weight.device)
        if self.tapped is None or self.tapped.shape[1] != rows:
            self.tapped = weight.new_zeros((len(self.taps), rows, TAIL, config.target_hidden_size))
        return self.past, self.tapped

    def _project(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        module, own = self.model.get_input_embeddings(), self.head.config.own_embeddings
        weight = None if own else self._weight(module)
        if own or weight is not None:
            return self.pieces.run(fused.project, self.head, tokens, hidden, positions, weight)
        return self.head.project(module(tokens).to(self.head.fc.weight), hidden, positions)

    def _finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the state for the next of a chain."""
        module, own = self.model.get_output_embeddings(), self.head.config.own_lm_head
        weight = None if own else self._weight(module)
        if own or weight is not None:
            return self.pieces.run(fused.finish, self.head, attended, residual, weight)
        output = self.head.finish(attended, residual)
        return module(self.head.norm(output)), self.head.state(output)

    def compiled(self) -> AbstractContextManager[None]:
        return self.pieces.compiled()

    def _weight(self, module: Any) -> torch.Tensor | None:
        """A module's weight, if it may be read past the module."""
        weight = getattr(module, "weight", None)
        return parallel.whole(self.model, weight) if parallel.is_part(weight) else plain_weight(module)

    # -- a forward ------------------------------------------------------------------------------------------------

    def tap(self, layer: int, hidden: torch.Tensor, step: "Step") -> None:
        rows, count = hidden.shape[:2]
        past, tapped = self._room(rows)
        if step.mode != "prefill":
            tapped[self.taps.index(layer), :, :count].copy_(hidden)
            return
        if layer == self.taps[0]:
            self._tail_tapped, self._picked = False, None
            if self.recorded is None:  # else all are wanted
                self._picked = _Picked.of(step.valid, rows, count, past.ring)
        picked = self._picked
        self._prompt[layer] = hidden if picked is None else picked.take(hidden)

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> Draft:
        return self.propose_several(tokens, lengths, count, 0)

    def propose_several(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int, others: int) -> Draft:
        past, head = self._room(len(tokens))[0], self.head
        token, position = tokens[:, None], lengths[:, None] - 1
        state, known = past.state(lengths - 1)
        hidden, drafts = state[:, None], []
        rivals = probabilities = None
        past.forget_chain()
        for step in range(count):
            query, keys, values, residual = self._project(token, hidden, position + step)
            if step == 0:
                past.write(keys, values, position, torch.ones_like(position, dtype=torch.bool))
            else:
                past.chain(keys, values, position + step, step - 1)
            held = past.keys, past.values, past.at
            attended = self.pieces.run(fused.attend, query, *held, position + step, past.window)
            logits, hidden = self._finish(attended, residual)
            if step == 0 and others:
                probabilities, index = logits[:, 0].float().softmax(-1).topk(1 + others, -1)
                token, rivals = head.target_ids(index).split((1, others), 1)
            else:
                token = self.pieces.run(fused.best, head, logits)
            drafts.append(token)
        past.mark(position, known[:, None])
        self._wrote = True
        return Draft(torch.cat(drafts, 1), known, rivals, probabilities)

    def observe(self, tokens: torch.Tensor | None, starts: torch.Tensor, valid: torch.Tensor | None) -> None:
        past, _ = self._room(len(starts))
        prompt, picked = dict(self._prompt), self._picked
        self._prompt.clear()
        self._picked = None
        weight = self.head.fc.weight
        if tokens is not None and len(prompt) == len(self.taps):
            joined = self.head.fuse([prompt[layer].to(weight) for layer in self.taps])
            if picked is not None:
                tokens = picked.take(tokens)
            if self.recorded is None:
                self._read(tokens, joined, starts, picked)
            else:
                self.recorded.append((joined.cpu(), valid))
                self._read_whole(tokens, joined, starts, valid)
        else:
            past.crop(starts)  # what stands there now is not known

    def _read(
        self, tokens: torch.Tensor, fused: torch.Tensor, starts: torch.Tensor, picked: "_Picked | None"
    ) -> None:  # fmt: skip
        """A prompt's or chunk's tokens and fused states, those that were picked of them."""
        real = None
        if picked is not None:
            starts, real = starts + picked.skipped.to(starts.device), picked.real.to(fused.device, non_blocking=True)
        self._extend(tokens, fused, starts, real)

    def _read_whole(
        self, tokens: torch.Tensor, fused: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None
    ) -> None:  # fmt: skip
        picked = _Picked.of(valid, tokens.shape[0], tokens.shape[1], self._room(len(tokens))[0].ring)
        if picked is not None:
            tokens, fused = picked.take(tokens), picked.take(fused)
        self._read(tokens, fused, starts, picked)

    @property
    def state_width(self) -> int:
        return self.head.config.hidden_size

    def reread(self, tokens: torch.Tensor, valid: torch.Tensor | None, states: torch.Tensor | None) -> None:
        assert states is not None
        starts = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        self._read_whole(tokens, states.to(self.head.fc.weight), starts, valid)

    def states_of(self) -> str:
        return f"{self.taps} {weights(self.head)}"

    def accept(
        self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None, entries: torch.Tensor
    ) -> None:
        if not self._tail_tapped or self.tapped is None:
            return self.observe(tokens, starts, valid)
        self.note(tokens, starts, None if valid is None else valid.to(self.tapped.device), entries)

    def hold(self, lengths: torch.Tensor, count: int) -> list[torch.Tensor] | None:
        past, tapped = self._room(len(lengths))
        self._prompt.clear()  # of a turn that was interrupted
        self._tail_tapped, self._wrote = False, False
        return [*past.tensors, tapped]

    def note(
        self, tokens: torch.Tensor, starts: torch.Tensor, valid: torch.Tensor | None = None,
        entries: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert self.tapped is not None
        wrote, self._wrote = self._wrote and tokens.shape[1] == 1 and entries is None, False
        tapped = self.tapped[:, :, : tokens.shape[1]]
        if entries is not None:
            index = entries[None, ..., None].expand(*self.tapped.shape[:2], -1, self.tapped.shape[3])
            tapped = self.tapped.gather(2, index)
        self._extend(tokens, self.pieces.run(fused.fuse, self.head, list(tapped)), starts, valid, wrote)

    def noted(self, count: int) -> None:
        self._tail_tapped = True

    def _extend(
        self, tokens: torch.Tensor, joined: torch.Tensor, starts: torch.Tensor, real: torch.Tensor | None,
        wrote: bool = False,
    ) -> None:  # fmt: skip
        """Tokens `[B, q]` and the fused states of their positions `[B, q, H]`, the first at `starts` `[B]`, those where
        `real` `[B, q]`. wrote: the keys and values of the position before them are there."""
        past = self.past
        assert past is not None
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)
        if not wrote:
            state, known = past.state(starts - 1)
            hidden = torch.cat((state[:, None], joined[:, :-1]), 1)
            _, keys, values, _ = self._project(tokens, hidden, positions - 1)
            known = torch.cat((known[:, None], torch.ones_like(positions[:, 1:], dtype=torch.bool)), 1)
            past.write(keys, values, positions - 1, known, real)
        past.remember(joined, positions, real)

    # -- what a cache does ----------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._prompt.clear()
        self._tail_tapped, self._picked, self.recorded = False, None, None

    def crop(self, lengths: list[int]) -> None:
        self._forget()
        if self.past is not None:
            self.past.crop(torch.tensor(lengths))

    def hide(self, row: int, first: int, stays: torch.Tensor) -> None:
        """What stays behind `first` moves up, and its states with it would be those of another text: they go."""
        self._forget()
        if self.past is not None and not bool(stays.all()):
            lengths = torch.full((len(self.past),), torch.iinfo(torch.int64).max)
            lengths[row] = first
            self.past.crop(lengths)

    def select_rows(self, index: list[int]) -> None:
        self._forget()
        if self.past is not None:
            self.past.select(index)

    def reset(self) -> None:
        self._forget()
        if self.past is not None:
            self.past.clear()

    def shipped(self) -> dict[str, torch.Tensor]:
        return self._room(1)[0].shipped()

    def admit(self, tokens: torch.Tensor, shipped: dict[str, torch.Tensor]) -> None:
        """Without state of a head like this one it begins with what comes next."""
        self._room(1)[0].admit(shipped)

    def fork(self) -> "Eagle3Drafter":
        other = Eagle3Drafter(self.head, self.model, self.window, self.name)
        other.past = None if self.past is None else self.past.fork()
        return other


class _Picked:
    """Which columns of a prompt are looked at: its real ones, the last of them where they are many.

    Attributes:
        index: `[B, w]` columns, real ones first. real: `[B, w]` bool. skipped: `[B]` real ones before them; all on the
            host.
    """

    def __init__(self, valid: torch.Tensor, most: int) -> None:
        width, number = min(valid.shape[1], most), valid.sum(1)
        order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
        self.skipped = (number - width).clamp(min=0)
        at = torch.arange(width)
        self.index = order.gather(1, self.skipped[:, None] + at)
        self.real = at < (number - self.skipped)[:, None]

    @classmethod
    def of(cls, valid: torch.Tensor | None, rows: int, count: int, most: int) -> "_Picked | None":
        """None: all of them. valid: `[B, q]` bool on the host, None for all."""
        if valid is None and count <= most:
            return None
        return cls(torch.ones((rows, count), dtype=torch.bool) if valid is None else valid, most)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Those columns of `[B, q]` or `[B, q, H]`."""
        index = self.index.to(x.device, non_blocking=True)
        return x.gather(1, index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[2]))
