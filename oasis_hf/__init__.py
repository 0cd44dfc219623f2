"""A sparse working set in GPU memory, the full KV cache in host memory, for any transformers model."""

from .attach import detach
from .branching import from_dense
from .cache import OasisCache
from .config import ConfigError, OasisConfig
from .drafters import Drafter, DrafterError, Eagle3Drafter, OracleDrafter, PreviousDrafter, PromptLookupDrafter
from .generation import generate
from .modes import MODES, PAPER_SCORE, budget_for, gpu_bytes, mode_config
from .prefixes import PrefixFileError, PrefixStore
from .store import HostMemoryError
from .supported import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "MODES", "PAPER_SCORE", "ConfigError", "Drafter", "DrafterError", "Eagle3Drafter", "HostMemoryError", "OasisCache",
    "OasisConfig", "OracleDrafter", "PrefixFileError", "PrefixStore", "PreviousDrafter", "PromptLookupDrafter",
    "UnsupportedModelError", "__version__", "budget_for", "detach", "from_dense", "generate", "gpu_bytes",
    "mode_config",
]  # fmt: skip
