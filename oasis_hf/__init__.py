"""A sparse working set in GPU memory, the full KV cache in host memory, for any transformers model."""

from .attach import detach
from .cache import OasisCache
from .config import ConfigError, OasisConfig
from .drafters import Drafter, DrafterError, Eagle3Drafter, OracleDrafter, PreviousDrafter, PromptLookupDrafter
from .generation import generate
from .store import HostMemoryError
from .supported import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "Drafter", "DrafterError", "Eagle3Drafter", "HostMemoryError", "OasisCache", "OasisConfig",
    "OracleDrafter", "PreviousDrafter", "PromptLookupDrafter", "UnsupportedModelError", "__version__", "detach",
    "generate",
]  # fmt: skip
