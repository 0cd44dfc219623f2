"""What a machine can move, hold and compute: presets, and files of one's own."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import ConfigError

MOST = 1 << 40
"""Of rows, tokens or devices."""


def check_number(name: str, value: object, low: float, high: float, low_ok: bool = False) -> None:
    """Raises `ConfigError` unless value is a finite number above `low` (or, with `low_ok`, it) and up to `high`."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (value == low and not low_ok):  # type: ignore[operator]
        top = "" if high == math.inf else f" up to {high:g}"
        raise ConfigError(
            f"{name}={value!r} is not allowed: use a number {'from' if low_ok else 'above'} {low:g}{top}."
        )


def check_count(name: str, value: object) -> None:
    """Raises `ConfigError` unless value is an integer from 1 to `MOST`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise ConfigError(f"{name}={value!r} is not allowed: use an integer from 1 to {MOST}.")


@dataclass(frozen=True)
class Hardware:
    """One GPU, or `devices` equal ones that share a model by tensor parallelism.

    Args:
        name: what it is called in tables.
        hbm: bytes a second that the GPU memory is read with.
        capacity: bytes of GPU memory.
        link: bytes a second from host memory to the GPU, one way.
        flops: dense bfloat16 operations a second.
        host: bytes of host memory for the full KV.
        network: bytes a second from another machine.
        devices: how many GPUs; `hbm`, `capacity`, `link` and `flops` are sums over them.
        source: where the numbers are from.

    Raises:
        ConfigError: a number is not finite and above 0.
    """

    name: str
    hbm: float
    capacity: float
    link: float
    flops: float
    host: float = 1e12
    network: float = 50e9
    devices: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("hbm", "capacity", "link", "flops", "host", "network"):
            check_number(f"Hardware.{name}", getattr(self, name), 0, math.inf)
        check_count("Hardware.devices", self.devices)

    def times(self, devices: int) -> Hardware:
        """So many of it in one machine: the host's memory and network stay what they are."""
        check_count("devices", devices)
        sums = {name: getattr(self, name) * devices for name in ("hbm", "capacity", "link", "flops")}
        name = self.name if devices == 1 else f"{devices} x {self.name}"
        return dataclasses.replace(self, name=name, devices=self.devices * devices, **sums)


_PCIE4, _PCIE5 = 32e9, 64e9  # x16, one way, as data sheets and the paper count it; 128b/130b leaves 98.5%

PRESETS = {
    one.name: one
    for one in (
        Hardware("h200", 4.8e12, 141e9, _PCIE5, 989e12, source="NVIDIA H200 data sheet, SXM"),
        Hardware(
            "h200-measured", 4.273e12, 139 * 2**30, 51.2e9, 989e12, host=125 * 2**30,
            source="our readings: a copy on the device, a gather of 8 KiB blocks (PCIe 5); flops from the data sheet",
        ),
        Hardware("h100", 3.35e12, 80e9, _PCIE5, 989e12, source="NVIDIA H100 data sheet, SXM; the paper's card"),
        Hardware("a100", 2.039e12, 80e9, _PCIE4, 312e12, source="NVIDIA A100 data sheet, 80 GB SXM"),
        Hardware("b200", 8e12, 180e9, _PCIE5, 2250e12, source="NVIDIA DGX B200 data sheet, an eighth of it"),
        Hardware(
            "gh200", 4e12, 96e9, 450e9, 989e12, host=480e9,
            source="NVIDIA GH200 data sheet, 96 GB; NVLink-C2C, half of its 900 GB/s",
        ),
        Hardware("l40s", 864e9, 48e9, _PCIE4, 362e12, source="NVIDIA L40S data sheet"),
        Hardware("rtx4090", 1008e9, 24e9, _PCIE4, 165e12, host=128e9, source="NVIDIA Ada white paper; host assumed"),
        Hardware("rtx3090", 936e9, 24e9, _PCIE4, 71e12, host=128e9, source="NVIDIA GA102 white paper; host assumed"),
    )
}  # fmt: skip
"""By name. Host memory (1 TB, the paper's section 3.3, where nothing is said) and network (400 Gbit/s, its test bed)
are the machine's and not the card's: give your own in a file."""


def here(device: torch.device) -> Hardware:
    """The preset of a GPU by its name, measured before data sheets; else what its memory's clock and width give. A CPU
    has a guess."""
    if device.type != "cuda":
        return Hardware("cpu", 2e10, 64e9, 2e10, 1e11, source="a guess")
    card = torch.cuda.get_device_properties(device)
    name = card.name.lower().replace(" ", "")
    known = [one for one in PRESETS.values() if one.name.removesuffix("-measured") in name]
    if known:
        return max(known, key=lambda one: (len(one.name.removesuffix("-measured")), len(one.name)))
    read = 2e3 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0) / 8
    return Hardware(card.name, read or 1e12, card.total_memory, 25e9, 1e14, source="clock and width of its memory")


def hardware(name: str | Path) -> Hardware:
    """A preset by its name, or a JSON file with the fields of `Hardware`; with `"base"`, a preset, the others are its.

    Raises:
        ConfigError: no such preset or file, or a field that is not allowed.
    """
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    if Path(name).suffix != ".json":
        raise ConfigError(f"hardware={str(name)!r} is not known: use one of {', '.join(PRESETS)}, or a .json file.")
    try:
        fields = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't read the hardware file {name}: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"The hardware file {name} holds a {type(fields).__name__}: write an object of fields.")
    base = fields.pop("base", None)
    known = [field.name for field in dataclasses.fields(Hardware)]
    odd = sorted(set(fields) - set(known))
    if odd:
        raise ConfigError(f"The hardware file {name} has the field {odd[0]!r}: allowed are base, {', '.join(known)}.")
    fields.setdefault("name", Path(name).stem)
    if base is not None:
        if not isinstance(base, str) or base not in PRESETS:
            raise ConfigError(f"base={base!r} in {name} is not known: use one of {', '.join(PRESETS)}.")
        return dataclasses.replace(PRESETS[base], **fields)
    missing = [field for field in ("hbm", "capacity", "link", "flops") if field not in fields]
    if missing:
        raise ConfigError(f"The hardware file {name} lacks {', '.join(missing)}: give them, or a base.")
    return Hardware(**fields)
