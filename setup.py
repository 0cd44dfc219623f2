"""Packaging; tool configuration is in pyproject.toml. Nothing is compiled on installation."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "oasis_hf" / "__init__.py").read_text(encoding="utf-8"))
assert version is not None

plot = ["matplotlib>=3.7"]
demo = ["gguf>=0.10", "accelerate>=1.0"]
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
    packages=find_packages(include=["oasis_hf", "oasis_hf.*"]),
    package_data={"oasis_hf": ["data/*.md", "py.typed"]},
    install_requires=["torch>=2.7", "transformers>=5.17,<5.25", "safetensors>=0.4", "rich>=13", "tqdm>=4.60"],
    extras_require={
        "plot": plot,
        "demo": demo,
        "test": test,
        "dev": [*test, "ruff>=0.6", "mypy>=1.10", "pip>=23"],
    },
    entry_points={"console_scripts": ["oasis-hf = oasis_hf.cli:main"]},
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
