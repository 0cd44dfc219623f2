"""`oasis-hf roofline`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ..config import ConfigError
from . import report
from .formulas import Load
from .hardware import check_number, hardware
from .shape import ModelShape


def main(args: argparse.Namespace) -> int:
    """Print a table and what goes with it, or JSON, and draw. Returns 0.

    Raises:
        ConfigError: an argument that is not allowed, or a model that can't be read.
        ModelError: there is no such model.
    """
    from rich.console import Console

    machine = hardware(args.hardware).times(args.devices)
    load = Load(args.rows, args.context, args.active, args.fetch)
    check_number("hit", args.hit, 0, 1, low_ok=True)
    check_number("extra-ms", args.extra_ms, 0, math.inf, low_ok=True)
    name, config = _config(args.model)
    shape = ModelShape.of(config, args.weight_bits)
    told = report.plan(shape, machine, load, args.hit, args.extra_ms / 1e3)
    if args.plot is not None:
        _draw(args.plot, shape, machine, load, name)
    if args.json:
        print(json.dumps({"model": name, **told}, indent=1))
        return 0
    console = Console()
    console.print(report.table(told, name))
    for line in report.lines(told):
        console.print(line, highlight=False)
    return 0


def _config(model: str | None) -> tuple[str, Any]:
    from transformers import AutoConfig

    from ..bench import SHAPES
    from ..models import BUNDLED, load_config

    if model not in SHAPES:
        return model or BUNDLED, load_config(model)
    sizes = dict(SHAPES[model])
    return model, AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def _draw(path: Path, shape: ModelShape, machine: Any, load: Load, name: str) -> None:
    try:
        report.figure(shape, machine, load, name).savefig(path)
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'oasis-hf[plot]' ({error}).") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't write the figure {path}: {error}.") from error
