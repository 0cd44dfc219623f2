"""Prompts that begin alike are read once (issue G)."""

from .files import PrefixFileError
from .store import PrefixStore

__all__ = ["PrefixFileError", "PrefixStore"]
