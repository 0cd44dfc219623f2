"""Token-KV intensity and its three roofs, and what else can be told of decoding from sizes and bandwidths alone."""

from .formulas import (
    METHODS,
    Load,
    Step,
    admission,
    block_budget,
    budget_tokens,
    first_token,
    fits,
    host_rows,
    largest_context,
    largest_rows,
    on_demand,
    row_bytes,
    step,
    token_budget,
)
from .hardware import PRESETS, Hardware, hardware
from .shape import ModelShape

__all__ = [
    "METHODS", "PRESETS", "Hardware", "Load", "ModelShape", "Step", "admission", "block_budget", "budget_tokens",
    "first_token", "fits", "hardware", "host_rows", "largest_context", "largest_rows", "on_demand", "row_bytes", "step",
    "token_budget",
]  # fmt: skip
