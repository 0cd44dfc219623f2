"""What `model_args` say: the knobs of the cache, and what the harness's own adapter takes."""

from __future__ import annotations

import json
import logging
from dataclasses import Field, fields
from typing import Any

import torch
from lm_eval.utils import handle_arg_string

from ..config import ConfigError, OasisConfig
from ..modes import mode_config

logger = logging.getLogger(__name__)

OWN = ("pretrained", "device", "dtype", "batch_size", "drafter", "mode", "sparse_loglikelihood")
"""Named arguments of `OasisLM`."""

HARNESS = (
    "tokenizer", "truncation", "max_length", "softmax_dtype", "max_batch_size", "add_bos_token", "prefix_token_id",
    "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
"""Arguments of `HFLM` that mean something for a model that is loaded already."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


def split(arguments: dict[str, Any], mode: Any = None) -> tuple[OasisConfig, dict[str, Any]]:
    """The cache's config, that of a mode where one is named, and what is left for `HFLM`. Strings become what a knob's
    type says.

    Raises:
        ConfigError: an argument that nobody takes, an unknown mode, or a knob's wrong value.
    """
    knobs = {field.name: field for field in fields(OasisConfig)}
    for name in arguments:
        if name not in knobs and name not in HARNESS:
            raise ConfigError(
                f"OasisLM has no argument {name!r}: it takes {', '.join(OWN)}; the knobs {', '.join(sorted(knobs))}; "
                f"and of the harness {', '.join(HARNESS)}."
            )
    own = {name: _value(knobs[name], value) for name, value in arguments.items() if name in knobs}
    config = OasisConfig(**own) if mode is None else mode_config(mode, **own)
    harness = {name: value for name, value in arguments.items() if name in HARNESS}
    if harness.get("max_length") is not None:
        harness["max_length"] = _count("max_length", harness["max_length"])
    return config, harness


def _value(knob: Field, value: Any) -> Any:
    if isinstance(value, str) and knob.type != "str":
        value = _mapping(value) if value.startswith("{") else handle_arg_string(value)
    # The harness has read `lookahead=none` as None before it comes here.
    return "none" if knob.name == "lookahead" and value is None else value


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # the config says what is allowed


def switch(name: str, value: Any) -> bool:
    """True or False, also by their names. Raises `ConfigError` for anything else."""
    value = handle_arg_string(value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise ConfigError(f"OasisLM's {name}={value!r} is not allowed: use True or False.")
    return value


def rows(batch_size: Any) -> int:
    """Rows of a batch. Raises `ConfigError` for none, and for `auto`: the harness probes with a forward that no cache
    takes part in."""
    return _count("batch_size", batch_size)


def _count(name: str, value: Any) -> int:
    count = handle_arg_string(value) if isinstance(value, str) else value
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"OasisLM's {name}={value!r} is not allowed: use an integer >= 1.")
    return count


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """None: the model's own. Raises `ConfigError` for an unknown name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"OasisLM's dtype={dtype!r} is not allowed: use one of {', '.join(map(repr, DTYPES))}.")
    return None if dtype == "auto" else getattr(torch, dtype)


def torch_device(device: Any) -> str | None:
    """None: the GPU if there is one. The harness's command asks for "cuda:0" where nobody said anything, so that a
    machine without one takes the CPU. Raises `ConfigError` for what is no device."""
    if device is None:
        return None
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"OasisLM's device={device!r} is not allowed: use 'cpu', 'cuda' or 'cuda:0'.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        logger.warning("There is no GPU here: the model runs on the CPU.")
        return "cpu"
    return str(device)
