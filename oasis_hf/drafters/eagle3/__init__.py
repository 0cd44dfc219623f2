"""EAGLE-3 heads as drafters."""

from .drafter import Eagle3Drafter
from .head import Eagle3Head, HeadConfig

__all__ = ["Eagle3Drafter", "Eagle3Head", "HeadConfig"]
