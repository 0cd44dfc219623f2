"""Stores: where the full KV lives. A new tier is one file that implements `BlockStore`."""

from .base import BlockStore, Move
from .host import HostStore
from .pages import HostMemoryError, PagePool
from .resident import ResidentStore

__all__ = ["BlockStore", "HostMemoryError", "HostStore", "Move", "PagePool", "ResidentStore"]
