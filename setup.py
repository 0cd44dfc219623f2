"""Packaging; tool configuration is in pyproject.toml.

Nothing is compiled on installation: the CUDA operators are built on first use. OASIS_BUILD=1 builds them now, for the
architectures in OASIS_ARCHS ("80;90a"; default: the devices here), which needs torch in the building environment:

    OASIS_BUILD=1 pip install --no-build-isolation .
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).resolve().parent
AHEAD_OF_TIME = os.environ.get("OASIS_BUILD") == "1"


class BuildWithOperators(build_py):
    """The operators' sources travel inside the package, since they are compiled where it is used."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # a clone has them beside the package
        package = Path(self.build_lib) / "oasis_hf"
        (package / "csrc").mkdir(parents=True, exist_ok=True)
        for file in (here / "csrc").iterdir():
            shutil.copy(file, package / "csrc" / file.name)
        if AHEAD_OF_TIME:
            sys.path.insert(0, str(here))
            from oasis_hf.ops import build

            archs = tuple(filter(None, os.environ.get("OASIS_ARCHS", "").split(";")))
            archs = archs or build.architectures()
            shutil.copy(build.build(archs), package / "ops" / f"{build.NAME}.so")
            (package / "ops" / f"{build.NAME}.archs").write_text(" ".join(archs))


class MaybeBinary(Distribution):
    """A wheel with compiled operators is for one platform and one Python."""

    def has_ext_modules(self):
        return AHEAD_OF_TIME


version = re.search(r'__version__ = "(.+?)"', (here / "oasis_hf" / "__init__.py").read_text(encoding="utf-8"))
assert version is not None

plot = ["matplotlib>=3.7"]
demo = ["gguf>=0.10", "accelerate>=1.0"]
# nltk and wonderwords are what lm-eval's RULER tasks import and it doesn't install.
evaluate = ["lm-eval>=0.4.13,<0.5", "accelerate>=1.0", "nltk>=3.9.1", "wonderwords>=3.0", "peft>=0.18"]
# Exactly this one: two versions of it on one link crash. Wheels are for Linux only.
nixl = ["nixl-cu13==1.3.0; platform_system == 'Linux'"]
serve = ["aiohttp>=3.9"]
notebook = ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6"]
test = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", *notebook, *plot, *demo]

setup(
    name="oasis-hf",
    version=version.group(1),
    description="A sparse working set in GPU memory, the full KV cache in host memory, for any transformers model",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    distclass=MaybeBinary,
    cmdclass={"build_py": BuildWithOperators},
    packages=find_packages(include=["oasis_hf", "oasis_hf.*"]),
    package_data={"oasis_hf": ["data/*.json", "data/*.md", "drafters/heads.json", "drafters/heads/*/*", "py.typed"]},
    install_requires=[
        "torch>=2.7",
        "transformers>=5.17,<5.25",
        "safetensors>=0.4",
        "rich>=13",
        "tqdm>=4.60",
        "ninja>=1.11",
        "filelock>=3.12",
    ],
    extras_require={
        "plot": plot,
        "demo": demo,
        "eval": evaluate,
        "nixl": nixl,
        "serve": serve,
        "test": test,
        "dev": [*test, *evaluate, *nixl, *serve, "ruff>=0.6", "mypy>=1.10", "pip>=23"],
    },
    entry_points={
        "console_scripts": ["oasis-hf = oasis_hf.cli:main"],
        "lm_eval.models": ["oasis = oasis_hf.lm_eval:OasisLM"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
