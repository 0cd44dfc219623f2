"""Stores: where the full KV lives. A new tier is one file that implements `BlockStore`."""

from .base import BlockStore, Move
from .file import PageFile, StoreFileError, file_pages
from .host import HostStore
from .near import Far, Near, Pending
from .pages import HostMemoryError, PagePool
from .resident import ResidentStore
from .split import SplitStore
from .tiered import TieredStore

__all__ = [
    "BlockStore", "Far", "HostMemoryError", "HostStore", "Move", "Near", "PageFile", "PagePool", "Pending",
    "ResidentStore", "SplitStore", "StoreFileError", "TieredStore",
    "file_pages",
]  # fmt: skip
