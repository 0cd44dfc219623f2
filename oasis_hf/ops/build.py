"""Compiles the CUDA operators, once a machine: `.cu` files by nvcc, the bindings by torch, both through ninja.

The result is kept in torch's extension folder under a hash of the sources, the architectures and the versions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

NAME = "oasis_hf_C"
BUILT_WITHOUT_A_DEVICE = ("80", "90a")
"""Architectures compiled where no device says which: the oldest that runs and the one that is tuned for."""

NVCC_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "-Xptxas=-v")


class BuildError(RuntimeError):
    """The operators could not be compiled; the message says why and where the log is."""


def source_folder() -> Path:
    """`csrc`: beside the modules in an installed package, beside the package in a clone."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "oasis.h").is_file():
            return folder
    raise BuildError(
        f"The operators' sources are missing: there is no csrc folder beside {package}; reinstall oasis_hf."
    )


def toolchain() -> Path:
    """CUDA's home.

    Raises:
        BuildError: nvcc, ninja or a C++ compiler is missing.
    """
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    home = _cuda_home(CUDA_HOME)
    missing = []
    if home is None:
        missing.append("nvcc (install the CUDA toolkit, or set CUDA_HOME)")
    if not is_ninja_available():
        missing.append("ninja (pip install ninja)")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing.append("a C++ compiler (g++, or set CXX)")
    if missing or home is None:
        raise BuildError(f"The CUDA operators can't be compiled here: missing {'; '.join(missing)}.")
    return home


def _cuda_home(told: str | None) -> Path | None:
    """The folder with CUDA's compiler and headers. On some machines the nvcc in the path is only a script that runs
    another: that one says where it is."""
    found = shutil.which("nvcc")
    homes = [Path(told)] if told else []
    if found:
        homes.append(Path(found).resolve().parent.parent)
        words = subprocess.run([found, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
        homes += [Path(line.split("=", 1)[1]).parent for line in words.splitlines() if line.startswith("#$ _HERE_=")]
    for home in homes:
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home
    return None


def architectures() -> tuple[str, ...]:
    """Of the devices here; features of the exact chip are asked for where the sources use them (90a)."""
    if not torch.cuda.is_available():
        return BUILT_WITHOUT_A_DEVICE
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(sorted(f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "") for major, minor in found))


def sources() -> list[Path]:
    return sorted(source_folder().glob("*.cu"))


def _digest(archs: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(source_folder().iterdir()):
        if file.suffix in (".cu", ".cuh", ".h", ".cpp"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    versions = (torch.__version__, torch.version.cuda, sys.version_info[:2], tuple(archs), NVCC_FLAGS)
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:16]


def folder(archs: Sequence[str]) -> Path:
    """Where this version's build is kept (below `TORCH_EXTENSIONS_DIR` or torch's default)."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(root) / f"{NAME}-{_digest(archs)}"


def _write_ninja(home: Path, archs: Sequence[str], to: Path) -> list[Path]:
    """The ninja file of the kernels; returns the objects it makes."""
    codes = " ".join(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs)
    objects = [to / f"{file.stem}.o" for file in sources()]

    def escaped(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        f"nvcc = {home / 'bin' / 'nvcc'}",
        f"flags = {' '.join(NVCC_FLAGS)} {codes}",
        "rule nvcc",
        "  command = $nvcc $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    lines += [f"build {escaped(out)}: nvcc {escaped(file)}" for file, out in zip(sources(), objects)]
    (to / "build.ninja").write_text("\n".join(lines) + "\n")
    return objects


def compile_kernels(to: Path, archs: Sequence[str]) -> list[Path]:
    """The objects of all `.cu` files, made in parallel in the folder `to`; what the compilers said is in its
    `kernels.log` (registers, shared memory and spills included).

    Raises:
        BuildError: a compiler failed.
    """
    home = toolchain()
    to.mkdir(parents=True, exist_ok=True)
    objects = _write_ninja(home, archs, to)
    log = to / "kernels.log"
    with log.open("w") as out:
        failed = subprocess.run(["ninja", "-v", "-C", str(to)], stdout=out, stderr=subprocess.STDOUT).returncode
    if failed:
        raise BuildError(f"nvcc could not compile the operators for {', '.join(archs)}; its words are in {log}.")
    return objects


def build(archs: Sequence[str] | None = None, to: Path | None = None) -> Path:
    """Compile and link; returns the extension. What is there already, for these sources and versions, is taken.

    Args:
        archs: such as `("80", "90a")`; default: of the devices here. to: another folder than torch's.

    Raises:
        BuildError: no toolchain, or a compiler failed; the message names the log.
    """
    from filelock import FileLock
    from torch.utils.cpp_extension import load

    archs = tuple(archs) if archs else architectures()
    to = to or folder(archs)
    built = to / f"{NAME}.so"
    if built.is_file():
        return built
    home = toolchain()
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "building").touch()
    except OSError as error:
        raise BuildError(
            f"The CUDA operators can't be kept in {to} ({error.strerror}): set TORCH_EXTENSIONS_DIR to a folder that "
            "can be written."
        ) from error
    with FileLock(str(to / "building")):
        if built.is_file():
            return built
        print("oasis_hf: compiling operators, once, ~60 s ...", file=sys.stderr, flush=True)
        objects = compile_kernels(to / "kernels", archs)
        libraries = next((home / lib for lib in ("lib64", "lib") if (home / lib).is_dir()), home / "lib64")
        bindings = to / "bindings"
        shutil.rmtree(bindings, ignore_errors=True)
        bindings.mkdir()
        try:
            load(
                NAME,
                [str(source_folder() / "bindings.cpp")],
                extra_include_paths=[str(home / "include")],
                extra_ldflags=[*map(str, objects), f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"],
                build_directory=str(bindings),
                with_cuda=False,
                is_python_module=False,
            )
        except Exception as error:
            log = to / "bindings.log"
            log.write_text(str(error))
            raise BuildError(
                f"The operators' bindings could not be built; the compiler's words are in {log}."
            ) from error
        # torch adds a version to the name where a process builds twice.
        os.replace(next(bindings.glob(f"{NAME}*.so")), built)
    return built


def ahead_of_time() -> Path:
    """The extension that `setup.py` built into the package (it may not be there)."""
    return Path(__file__).resolve().parent / f"{NAME}.so"


def _ahead_architectures() -> set[str]:
    """What the extension in the package was built for; nothing where there is none."""
    named = ahead_of_time().with_suffix(".archs")
    return set(named.read_text().split()) if ahead_of_time().is_file() and named.is_file() else set()


def existing() -> Path | None:
    """The extension for the devices here, if it is built already: in the package, or by an earlier first use."""
    archs = architectures()
    if set(archs) <= _ahead_architectures():
        return ahead_of_time()
    built = folder(archs) / f"{NAME}.so"
    return built if built.is_file() else None


def load_extension() -> ModuleType:
    """The compiled operators as a module.

    Raises:
        BuildError: they can't be compiled, or what was compiled can't be imported.
    """
    path = existing() or build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"The compiled operators can't be imported ({error}): delete {path} to build them anew."
        ) from error
    return module
