"""Drafters: whose proposal of the next token asks for the next blocks.

A new drafter is one small file with a `Drafter` subclass, and one line in `DRAFTERS`.
"""

from __future__ import annotations

from typing import Any

from ..config import OasisConfig
from ..lookahead import wants_drafts
from .base import Draft, Drafter, DrafterError
from .eagle3 import Eagle3Drafter
from .known import known_head
from .oracle import OracleDrafter
from .previous import PreviousDrafter
from .prompt_lookup import PromptLookupDrafter

DRAFTERS: dict[str, type[Drafter]] = {
    "previous": PreviousDrafter,
    "prompt_lookup": PromptLookupDrafter,
    "auto": PromptLookupDrafter,
}


def make_drafter(drafter: Any, model: Any, config: OasisConfig) -> Drafter:
    """The drafter that `OasisCache(model, drafter=...)` means.

    Args:
        drafter: None or `"auto"` (an EAGLE-3 head that `heads.json` names for the model, where it can be had, else
            n-gram matches, else recent queries), a name in `DRAFTERS`, a `Drafter`, or an EAGLE-3 head: its folder or
            its repository on the hub.

    Raises:
        DrafterError: unknown name, a head that is truncated or made for another model, an oracle without tokens.
    """
    if drafter is None:
        drafter = "auto"
    if isinstance(drafter, Drafter):
        made = drafter
    elif drafter == "auto":
        known = known_head(model) if wants_drafts(config) and config.lookahead != "oracle" else None
        made = known or DRAFTERS["auto"]()
    elif isinstance(drafter, str) and drafter in DRAFTERS:
        made = DRAFTERS[drafter]()
    elif isinstance(drafter, str) and drafter == "oracle":
        raise DrafterError("drafter='oracle' must be told the true tokens: pass OracleDrafter(tokens).")
    elif isinstance(drafter, str) or hasattr(drafter, "__fspath__"):
        made = Eagle3Drafter.from_pretrained(drafter, model)
    else:
        names = ", ".join(map(repr, DRAFTERS))
        raise DrafterError(f"drafter={drafter!r} is not a drafter: use {names}, a folder, or a Drafter.")
    if config.lookahead == "oracle" and not isinstance(made, OracleDrafter):
        raise DrafterError("lookahead='oracle' needs the true tokens: pass drafter=OracleDrafter(tokens).")
    made.check(model)
    return made


__all__ = [
    "DRAFTERS", "Draft", "Drafter", "DrafterError", "Eagle3Drafter", "OracleDrafter", "PreviousDrafter",
    "PromptLookupDrafter", "make_drafter",
]  # fmt: skip
