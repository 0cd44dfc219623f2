"""`oasis-hf prefill-server` and `oasis-hf serve-disagg`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from ..config import BLOCK, ConfigError, OasisConfig
from .errors import DisaggError
from .router import Router, addresses, application, parse_address
from .wire import Tls

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parsers(commands: Any) -> None:
    """Adds both to the subparsers of `oasis-hf`."""
    prefill = commands.add_parser("prefill-server", help="read prompts here, for decode processes elsewhere")
    _shared(prefill)
    prefill.add_argument("--listen", default="127.0.0.1:7000", metavar="HOST:PORT", help="(default: 127.0.0.1:7000)")
    prefill.add_argument("--pool-gib", type=float, default=1.0, help="host memory of the staging pool (default: 1)")
    prefill.add_argument("--checked", action="store_true", help="publish a checksum of each block")
    prefill.set_defaults(run=prefill_server)
    serve = commands.add_parser("serve-disagg", help="OpenAI-style completions, decoded from prefill servers' KV")
    _shared(serve)
    serve.add_argument("--prefill", nargs="+", default=["127.0.0.1:7000"], metavar="HOST:PORT",
                       help="prefill servers (default: 127.0.0.1:7000)")  # fmt: skip
    serve.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="(default: 127.0.0.1:8000)")
    serve.add_argument("--workers", type=int, default=1, help="decode processes (default: 1)")
    serve.add_argument("--fetch-ratio", type=float, help="as the knob")
    serve.set_defaults(run=serve_disagg)


def _shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model id or path (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--secret-file", type=Path, required=True,
                        help="holds what both sides know, 16 bytes at least; made where it is missing")  # fmt: skip
    parser.add_argument("--engine", default="tcp", choices=["tcp", "nixl"], help="(default: tcp)")
    parser.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help="PEM files; both sides or neither")
    parser.add_argument("--budget", type=int, help="working set in tokens, as the knob")
    parser.add_argument("--tokens-per-summary", type=int, help="as the knob")
    parser.add_argument("--prefix-gib", type=float, default=0.0,
                        help="host memory for what prompts begin with, read or sent once; of each decode process "
                        "(default: none is kept)")  # fmt: skip
    parser.add_argument("--device", help="(default: the GPU if there is one)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="(default: the model's own)")
    parser.add_argument("--threads", type=int, default=0, help="of each process's torch (default: torch's own)")


def _secret(path: Path) -> bytes:
    try:
        if not path.exists():
            _make_secret(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"The secret file {str(path)!r} can't be used: {error.strerror}.") from error
    if len(secret) < 16:
        raise ConfigError(f"The secret in {str(path)!r} has {len(secret)} bytes: use 16 at least.")
    return secret


def _make_secret(path: Path) -> None:
    """Whole or not at all, and only where none is: of several commands that are started at once one makes it, and all
    have the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-") as file:  # 0600
        file.write(os.urandom(32).hex().encode())
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
            print(f"made the secret {path}", file=sys.stderr)


def _prepared(args: argparse.Namespace) -> tuple[bytes, Tls | None, dict[str, Any]]:
    import torch

    tls = Tls(*args.tls) if args.tls else None
    if tls is not None:
        try:
            tls.context(server=True)
        except OSError as error:
            raise ConfigError(f"--tls can't be used: {error}") from error
    if args.prefix_gib and not 2**-30 <= args.prefix_gib < 2**20:
        raise ConfigError(f"--prefix-gib {args.prefix_gib} is not allowed: use a number of GiB, or 0.")
    if args.threads < 0:
        raise ConfigError(f"--threads {args.threads} is not allowed: use an integer >= 0.")
    if args.device is not None:
        try:
            torch.empty(0, device=args.device)
        except (RuntimeError, AssertionError) as error:  # what torch raises where it was built without it
            raise ConfigError(f"--device {args.device!r} can't be used: {str(error).splitlines()[0]}") from error
    if args.threads:
        torch.set_num_threads(args.threads)
    knobs = {
        name: getattr(args, name)
        for name in ("budget", "fetch_ratio", "tokens_per_summary")
        if getattr(args, name, None) is not None
    }
    return _secret(args.secret_file), tls, knobs


def prefill_server(args: argparse.Namespace) -> int:
    """Runs until it is interrupted."""
    import torch

    from ..models import load
    from ..placing import placed
    from ..prefixes import PrefixStore
    from .handle import head_dim
    from .node import PrefillNode
    from .prefill import PrefillWorker
    from .staging import StagingPool

    address = parse_address(args.listen)
    secret, tls, knobs = _prepared(args)
    if not args.pool_gib > 0:
        raise ConfigError(f"--pool-gib {args.pool_gib} is not allowed: use a number above zero.")
    model, _ = load(args.model, args.device, args.dtype and getattr(torch, args.dtype))
    device, dtype = placed(model)
    page = 2 * BLOCK * head_dim(model) * dtype.itemsize
    staging = StagingPool(int(args.pool_gib * 2**30) // page, head_dim(model), dtype, device.type == "cuda")
    if args.prefix_gib:
        prefixes = PrefixStore(model, int(args.prefix_gib * 2**30), **knobs)
        worker = PrefillWorker(model, staging, checked=args.checked, prefixes=prefixes)
    else:
        worker = PrefillWorker(model, staging, checked=args.checked, **knobs)
    try:
        node = PrefillNode(worker, secret, address=address, engines=(args.engine,), tls=tls)
    except OSError as error:
        raise ConfigError(f"Can't listen at {args.listen}: {error.strerror}.") from error
    with node:
        _warn(address[0], tls)
        print(f"prefill server ready at {node.server.address[0]}:{node.server.address[1]}", flush=True)
        _until_interrupted()
    return 0


def serve_disagg(args: argparse.Namespace) -> int:
    """Runs until it is interrupted."""
    try:
        from aiohttp import web
    except ImportError:
        raise ConfigError("serve-disagg needs aiohttp: run `pip install 'oasis-hf[serve]'`.") from None
    import torch

    listen, prefill = parse_address(args.listen), addresses(args.prefill)
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers} is not allowed: use an integer >= 1.")
    secret, tls, knobs = _prepared(args)
    OasisConfig(**knobs)  # before a decode process meets them in its first request
    router = Router(
        args.model, args.workers, addresses=prefill, secret=secret, engine=args.engine, tls=tls, device=args.device,
        dtype=args.dtype and getattr(torch, args.dtype), threads=args.threads or torch.get_num_threads(),
        prefix_bytes=int(args.prefix_gib * 2**30), **knobs,
    )  # fmt: skip
    _warn(listen[0], None)
    try:
        web.run_app(
            application(router), host=listen[0], port=listen[1], handler_cancellation=True,
            shutdown_timeout=5,  # then completions under way are left
            print=lambda *text: print(f"completions at http://{listen[0]}:{listen[1]}/v1/completions", flush=True),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"Can't listen at {args.listen}: {error.strerror}.") from error
    except (RuntimeError, DisaggError) as error:
        raise ConfigError(str(error)) from error
    return 0


def _warn(host: str, tls: Tls | None) -> None:
    if host not in LOOPBACK and tls is None:
        print(f"Listening at {host} without encryption: prompts and KV can be read on the way. Use a private network.",
              file=sys.stderr)  # fmt: skip


def _until_interrupted() -> None:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()
