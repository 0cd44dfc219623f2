"""No draft: the current token's own query predicts (paper's baseline; FreeKV-like)."""

from .base import Drafter


class PreviousDrafter(Drafter):
    """Stacks nothing; `lookahead="draft"` then means the current query."""

    name = "previous"
    proposes = False
