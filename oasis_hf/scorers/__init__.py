"""Scorers: what a block's summary stores and how a query turns it into a number.

A new scorer is one small file with a `Scorer` subclass, and one line in `SCORERS`.
"""

from .base import Scorer
from .midrange import MidrangeScorer
from .minmax import MinMaxScorer

SCORERS: dict[str, type[Scorer]] = {"minmax": MinMaxScorer, "midrange": MidrangeScorer}

__all__ = ["SCORERS", "MidrangeScorer", "MinMaxScorer", "Scorer"]
