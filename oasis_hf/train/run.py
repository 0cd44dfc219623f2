"""`oasis-hf train-drafter`: from a model and files of prompts to a folder with a head."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from .. import __version__, models, supported
from ..drafters.eagle3.drafter import LONGEST
from ..drafters.eagle3.head import Eagle3Head
from . import collect, data, evaluate, loop, made, prompts, seam
from .card import card
from .config import TrainConfig, TrainError
from .features import Target

console = Console(highlight=False)


def train(
    model_name: str | None, files: list[Path], out: Path, config: TrainConfig, resume: Path | None = None,
    data_folder: Path | None = None, keep_state: bool = True, compact: bool = False, stop_after: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Makes a head. Everything it writes is in `out`.

    Args:
        files: prompts and documents; none are needed where samples are at hand.
        resume: a folder of an earlier run. With its `state.pt` the run goes on exactly; else its head is the start,
            with its samples.
        data_folder: take the samples of another run's folder instead of generating.
        keep_state: leave `state.pt` in the folder at the end. compact: a smaller one, as `Trainer.state` has it.
        stop_after: minutes of training in this run, after which `resume` goes on; nothing is evaluated until the end.

    Returns:
        What is in `metrics.json`.

    Raises:
        TrainError, ModelError, DrafterError: one sentence each.
    """
    source = data_folder or resume
    have = source is not None and (source / data.FILE).is_file()
    told = _told(source) if have and source is not None else {}  # by the run that generated, before it is written over
    state = None if resume is None else loop.read_state(resume)
    if resume is not None and state is None and not (resume / "config.json").is_file():
        raise TrainError(f"There is nothing to resume in {resume}: neither {loop.STATE} nor a head.")
    if not have and not files:
        raise TrainError("Name files of prompts with --data, or a folder that has samples with --resume or --samples.")
    if out.exists() and any(out.iterdir()) and (resume is None or out.resolve() != resume.resolve()):
        raise TrainError(f"The folder {out} is not empty: name another one, or go on with --resume {out}.")
    if config.minutes is None and config.steps is None:
        raise TrainError("Say how long to train: --minutes or --steps.")
    texts = None if have else prompts.read(files)
    model, tokenizer = load(model_name)
    longest = limit(model, config)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if have:
        assert source is not None
        parts = data.load(source)
    else:
        assert texts is not None
        parts = collect.collect(model, tokenizer, texts, config, longest, console.print)
    if source is None or source.resolve() != out.resolve():
        data.save(out, parts)
    generated = time.monotonic() - started
    learned = [parts["train"], parts["documents"]]
    samples = data.Samples.joined(learned)
    if not len(samples):
        raise TrainError("No response was generated: give it more --generate-minutes.")
    head = _start(model, config, longest, learned, resume, state)
    target = Target(model, head.config.taps, made.draft_ids(head))
    _describe(parts, head)
    _keep(target, samples, config)
    trainer = loop.Trainer(head, target, samples, config)
    if state is not None:
        trainer.load(state)
        console.print(f"goes on from step {trainer.step:,}")
    _train(trainer, out, compact, stop_after)
    made.save(head, out, model)
    if keep_state:
        trainer.save(out, compact)
    elif (out / loop.STATE).is_file():
        (out / loop.STATE).unlink()
    if target.device.type == "cuda":
        console.print(f"most GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    target.store = None
    metrics = {
        "target": model_name or models.BUNDLED,
        "data": told.get("data") or [file.name for file in files],
        "settings": config.to_dict(),
        "steps": trainer.step,
        "positions_learned_from": trainer.tokens_seen,
        "train_samples": len(parts["train"]),
        "train_response_tokens": parts["train"].response_tokens,
        "document_tokens": len(parts["documents"].ids),
        "generate_seconds": told.get("generate_seconds", round(generated, 1)),
        "train_seconds": round(trainer.seconds, 1),
        "parameters": sum(p.numel() for p in head.parameters()),
        "evaluation": {} if trainer.done() < 1 else _final(out, model, parts, config),
        "versions": versions(target.device),
        "history": trainer.history[:: max(1, len(trainer.history) // 50)],
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card(metrics, head.config), encoding="utf-8")
    console.print(f"the head is in {out}")
    return metrics


def _told(folder: Path) -> dict[str, Any]:
    """What an earlier run wrote of its samples; nothing where it did not come to that."""
    file = folder / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def measure_only(
    model_name: str | None, files: list[Path], head_folder: Path, out: Path | None, config: TrainConfig,
    data_folder: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measures a head that is there, on the held-out texts of `data_folder` or else those of the files. Writes
    `metrics.json` in `out`, if given. Returns what is in it."""
    if data_folder is None and not files:
        raise TrainError("Name files of prompts with --data, or a folder with a run's samples with --samples.")
    texts = prompts.read(files) if data_folder is None else None
    parts = data.load(data_folder) if data_folder is not None else {}
    model, tokenizer = load(model_name)
    head = made.load(head_folder, model, model.dtype)
    if texts is not None:
        parts = collect.held_out(model, tokenizer, texts, config, limit(model, config), console.print)
    metrics = {
        "head": head_folder.name, "target": model_name or models.BUNDLED, "settings": config.to_dict(),
        "evaluation": evaluate_all(head, model, parts, config),
        "versions": versions(model.device),
    }  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return metrics


def load(model_name: str | None) -> tuple[Any, Any]:
    """The target; in float32 on a CPU, where 16 bits are slow."""
    model, tokenizer = models.load(model_name, dtype=None if torch.cuda.is_available() else torch.float32)
    model.requires_grad_(False)
    seam.check(model)
    return model, tokenizer


def limit(model: Any, config: TrainConfig) -> int:
    """Longest text: what the target can read, a batch holds and the knob says."""
    reach = getattr(supported.text_config(model), "max_position_embeddings", None) or config.tokens
    return min(reach, config.tokens, config.longest or reach)


def evaluate_all(head: Eagle3Head, model: Any, parts: dict[str, data.Samples], config: TrainConfig) -> dict[str, Any]:
    """Every kind of held-out text."""
    results = {}
    window = min(config.window, head.config.max_position_embeddings, LONGEST)  # as `Eagle3Drafter` has it
    for name, samples in parts.items():
        if name not in ("train", "documents"):
            tokens = max(config.tokens, -(-int(samples.lengths.max()) // 128) * 128)
            results[name] = found = evaluate.measure(head, model, samples, window, 5, tokens, config.rows)
            console.print(
                f"{name}: top-1 {found['next_top1']:.3f}, steps {found['step_acc']}, tau {found['tau']:.2f}, "
                f"coverage {found['draft_vocab_coverage']:.3f} ({found['tokens']:,} tokens)"
            )
    return results


def _final(out: Path, model: Any, parts: dict[str, data.Samples], config: TrainConfig) -> dict[str, Any]:
    """Of the head as it was saved, in the target's dtype: as it will draft."""
    return evaluate_all(made.load(out, model, model.dtype), model, parts, config)


def versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "oasis_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": name,
    }


def _start(
    model: Any, config: TrainConfig, longest: int, learned: list[data.Samples], resume: Path | None, state: Any
) -> Eagle3Head:
    if state is not None:
        changed = _changed(state["config"], config)
        if changed:
            raise TrainError(f"A run can't go on with other settings: {', '.join(changed)} changed.")
    if resume is not None and state is None:
        console.print(f"starts from the head in {resume}, whose optimizer is not there")
        return made.load(resume, model, torch.float32)
    shape = made.head_config(model, config, longest)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    ids = data.vocabulary(learned, shape.vocab_size, shape.draft_vocab_size, ends)
    return made.new_head(model, replace(shape, draft_vocab_size=len(ids)), ids, config.seed)


_FREE = {"minutes", "steps", "checkpoint_minutes", "evaluate", "cache_gib", "generate_minutes", "generate_tokens"}


def _changed(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """Settings that may not change in a run."""
    now = json.loads(json.dumps(config.to_dict()))
    before = json.loads(json.dumps(before))
    return [f.name for f in fields(config) if f.name not in _FREE and before.get(f.name) != now[f.name]]


def _describe(parts: dict[str, data.Samples], head: Eagle3Head) -> None:
    train, size = parts["train"], sum(p.numel() for p in head.parameters())
    console.print(
        f"{len(train):,} samples with {train.response_tokens:,} response tokens, {len(parts['documents']):,} document "
        f"texts of {len(parts['documents'].ids):,} tokens; head of {size:,} parameters, {2 * size / 1e6:.1f} MB"
    )


def _keep(target: Target, samples: data.Samples, config: TrainConfig) -> None:
    from tqdm.auto import tqdm

    size = len(samples.ids) * target.bytes_each()
    if size > config.cache_gib * 2**30:
        console.print(f"the target's states would take {size / 2**30:.1f} GiB: they are made anew in each step")
        return
    with tqdm(total=len(samples.ids), desc="the target reads", unit="token", unit_scale=True) as bar:
        target.keep(samples, config.tokens, bar.update)


def _train(trainer: loop.Trainer, out: Path, compact: bool, stop_after: float | None) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=1000, desc="training", bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:

        def tell(line: dict[str, Any]) -> None:
            bar.n = int(1000 * min(trainer.done(), 1))
            right = " ".join(f"{share:.2f}" for share in line["right"])
            bar.set_postfix_str(
                f"step {line['step']:,}, loss {line['loss']:.3f}, right {right}, tau {line['tau']:.2f}", refresh=True
            )

        trainer.train(tell, lambda: trainer.save(out, compact), stop_after=stop_after)
