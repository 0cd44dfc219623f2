"""Where, when and with what a result was made: stamped into every JSON of `eval/results/`."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy")


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Machine, versions, date, commit and command line; no host name and no path.

    Args:
        device: where the work ran; a GPU is described.
    """
    machine: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine["gpu"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        machine["cuda"] = torch.version.cuda
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "machine": machine,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def commit() -> str:
    """The repository's commit, `+changes` where a tracked file differs from it; on a machine that has only the files,
    the variable OASIS_COMMIT says it."""
    told = os.environ.get("OASIS_COMMIT")
    if told:
        return told
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True, timeout=20,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
