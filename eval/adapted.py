"""LoRA adapters: on a model for training, in files, and merged into a model for use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "adapter" / "smollm2-135m-retrieval"
"""The adapter that ships with the evaluations."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def wrapped(model: Any, rank: int, alpha: int, seed: int, base: str = BASE) -> Any:
    """A peft model with a new adapter on every linear layer, in the model's dtype. It changes nothing yet: B is zero.

    Raises:
        SystemExit: peft is not installed.
    """
    peft = _peft()
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=LINEAR, task_type="CAUSAL_LM"
    )
    out = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    out.peft_config["default"].base_model_name_or_path = base
    return out


def weights(peft_model: Any) -> list[torch.nn.Parameter]:
    """The adapter's, always in one order."""
    return [p for name, p in sorted(peft_model.named_parameters()) if "lora_" in name]


def save(peft_model: Any, folder: Path) -> int:
    """Standard peft files, in bfloat16. Returns the bytes of the weights."""
    from safetensors.torch import save_file

    peft = _peft()
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    small = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}
    unfinished = folder / (WEIGHTS + ".part")
    save_file(small, str(unfinished), metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)
    config = peft_model.peft_config["default"]
    before, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = before
    told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    told["target_modules"] = LINEAR  # peft holds a set, whose order is another one each time
    (folder / CONFIG).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


def merged(model: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """`model` with an adapter's change added to its weights: again a plain model, in `dtype` (None: as before). The
    sum is made in float32.

    Raises:
        SystemExit: there is no adapter, or peft is not installed.
    """
    check(folder)
    dtype = dtype or model.dtype
    loaded = _peft().PeftModel.from_pretrained(_cast(model, torch.float32), str(folder))
    return _cast(loaded.merge_and_unload(), dtype).eval()


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """In place; transformers refuses `model.to(dtype)` where the weights came from a GGUF file."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    model.config.dtype = dtype
    return model


def check(folder: Path) -> None:
    """Raise `SystemExit` unless there is an adapter in the folder."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise SystemExit(f"--adapter: the folder {folder.name} has no file {name}; eval/adapter.py makes one.")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise SystemExit("The adapter needs peft: pip install 'oasis-hf[eval]'.") from error
    return peft
