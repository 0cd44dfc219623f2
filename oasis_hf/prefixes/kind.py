"""What blocks can serve each other: of which model and adapters they are, and what is kept of each."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from .. import parallel, supported
from ..config import BLOCK, OasisConfig
from ..drafters import Drafter
from ..fingerprint import adapters, fingerprint, mixed
from ..placing import autocast_to, placed
from ..summaries import Summaries
from .index import Layout


def apart(model: Any, device: torch.device) -> bool:
    """Whether what the call under way reads serves no other request: under autocast, or with an adapter of each row's
    own."""
    return autocast_to(device) is not None or mixed(model)


class Kind:
    """Of a model's blocks.

    Args:
        model: plain. config: whose summaries and pages. drafter: whose states go with them.

    Attributes:
        layout: of a block. dtype: of its pages. head_dim: D.
    """

    def __init__(self, model: Any, config: OasisConfig, drafter: Drafter) -> None:
        self.model, self.config, self.drafter = model, config, drafter
        device, own = placed(model)
        heads, self.head_dim = supported.kv_shape(supported.text_config(model))
        self.dtype = own if config.host_dtype == "model" else getattr(torch, config.host_dtype)
        layers, page_bytes = len(supported.layer_windows(model)), 2 * BLOCK * self.head_dim * self.dtype.itemsize
        meta = torch.device("meta")
        sums = Summaries(config, 1, parallel.local_heads(model, heads), self.head_dim, own, meta)
        self.layout = Layout.of(layers, sums, page_bytes, drafter.state_width, own)
        self._prints: dict[tuple[str, ...], str] = {}

    def identity(self) -> str:
        """Hex, of the model and the adapters at work in it, and of what is kept of a block."""
        at_work = adapters(self.model)
        if at_work not in self._prints:
            told = [
                fingerprint(self.model), at_work, self.config.scorer, self.config.tokens_per_summary,
                [str(one) for one in self.layout.parts.values()], str(self.dtype), self.drafter.states_of(),
            ]  # fmt: skip
            self._prints[at_work] = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        return self._prints[at_work]

    def forget(self) -> None:
        """The model's weights have changed."""
        self._prints.clear()
