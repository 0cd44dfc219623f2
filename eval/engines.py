"""Reads of random blocks out of a staging pool, over every engine: against plain sockets and bare NIXL (issue E).

    python eval/engines.py [--rounds 9] [--out eval/results]
    python eval/engines.py --link 1gbit [--out eval/results]
    python eval/engines.py --quick

Our engines as the product uses them: a pool server's process, a link, runs of blocks, a read, its end. Beside them, in
the same run and in turn, read for read: a request and its answer over plain sockets, and NIXL's own calls without our
wrapper. Every byte of every read is compared. `--link` goes over two network namespaces whose link is held to that
rate; without, everything is on one host's loopback, and NIXL's `tcp,cma` copies between the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator
from statistics import median
from typing import Any

import namespaces
import outs
import report_engines as report
from engine_ways import (
    BARE,
    NIXL,
    SOCKETS,
    TCP,
    Way,
    own_pool,
    read_blocks,
    serve_bare,
    serve_sockets,
)
from provenance import provenance
from report_tables import Row

from oasis_hf.disagg.nixl import NixlSettings

TRANSPORTS = ("tcp", "tcp,cma")
SECONDS = 300
"""A process that says nothing for so long is given up."""


def cells(link: bool) -> list[tuple[int, int]]:
    """(KiB a block, blocks) of a read."""
    if link:
        return [(4, 1000), (64, 1000)]
    return [(kib, min(count, (512 << 10) // kib)) for kib in (4, 16, 64) for count in (100, 1000, 10000)]


def ways(link: bool) -> list[Way]:
    """Without NIXL, those that need none. Over a link the kernel's copy would not cross it."""
    out = [Way(SOCKETS), Way(TCP)]
    try:
        NixlSettings().wire()
    except ImportError as error:
        print(f"without NIXL: {error}")
        return out
    for transports in TRANSPORTS[:1] if link else TRANSPORTS:
        out += [Way(BARE, transports), Way(NIXL, transports)]
    return out


@contextlib.contextmanager
def readers(
    nbytes: int, most: int, some: list[Way], ends: tuple[namespaces.End, namespaces.End]
) -> Iterator[dict[Way, Any]]:
    """A pool of `nbytes`, its servers, and a reader of each way, of at most `most` bytes a read: its pipe."""
    node, here = ends
    own = [way.transports for way in some if way.what == NIXL]
    pipes = []  # one that nobody refers to is closed
    with contextlib.ExitStack() as stack:

        def start(end: namespaces.End, work: Any, *args: Any) -> Any:
            pipe, process = namespaces.start(end, work, *args)
            stack.callback(namespaces.stop, process)
            pipes.append(pipe)
            return pipe

        owner = start(node, own_pool, nbytes, node.address, node.device, own)
        pool, servers = namespaces.heard(owner, SECONDS)
        out = {}
        for way in some:
            if way.what == SOCKETS:
                told = namespaces.heard(start(node, serve_sockets, pool, node.address), SECONDS)
            elif way.what == BARE:
                told = namespaces.heard(
                    start(node, serve_bare, pool, NixlSettings(node.device, way.transports)), SECONDS
                )
            else:
                told = servers[way.transports]
            out[way] = start(here, read_blocks, way, pool, *told, here.device, most)
        yield out
        for pipe in reversed(pipes):  # readers before their servers
            with contextlib.suppress(OSError):  # it has ended with its reader
                pipe.send(None)
                pipe.poll(10)  # until it has


def cell(pipes: dict[Way, Any], kib: int, count: int, rounds: int, seed: int) -> list[Row]:
    """Every way reads in turn, once more than counts: the first connects and touches its memory."""
    seen: dict[Way, list[Row]] = {way: [] for way in pipes}
    for turn in range(rounds + 1):
        order = list(pipes)
        for way in order[turn % len(order) :] + order[: turn % len(order)]:
            pipes[way].send((kib << 10, count, seed + turn))
            told = namespaces.heard(pipes[way], SECONDS)
            if not told.pop("right"):
                raise RuntimeError(f"{way.name}: bytes of {count:,} blocks of {kib} KiB are not those of the pool.")
            if turn:
                seen[way].append(told)
    nbytes = kib * 1024 * count
    return [
        {
            "way": way.what, "transports": way.transports, "kib": kib, "count": count, "bytes": nbytes,
            "rounds": len(told), "best_s": min(one["s"] for one in told), "median_s": median(one["s"] for one in told),
            **{f"{side}_cpu_s_a_gb": sum(one[f"{side}_cpu_s"] for one in told) / len(told) / nbytes * 1e9
               for side in ("client", "server")},
        }
        for way, told in seen.items()
    ]  # fmt: skip


def measure(args: argparse.Namespace, mbit: int) -> list[Row]:
    rows: list[Row] = []
    some = ways(bool(mbit))
    with namespaces.joined() if mbit else contextlib.nullcontext((namespaces.LOOPBACK,) * 2) as ends:
        if mbit:
            namespaces.hold_to(ends[0], mbit)
        wanted = [(4, 20), (64, 50)] if args.quick else cells(bool(mbit))
        most = max(kib * count for kib, count in wanted) << 10
        with readers(args.pool_mib << 20, most, some, ends) as pipes:
            for kib, count in wanted:
                rounds = args.rounds if args.quick else max(args.rounds, 3000 // count)
                rows += cell(pipes, kib, count, rounds, seed=len(rows))
                for row in rows[-len(some) :]:
                    print(report.line(row), flush=True)
    return rows


def rate(text: str) -> int:
    """Mbit/s of `1gbit` or `400mbit`. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([1-9]\d*)(m|g)bit", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a rate such as 1gbit or 400mbit")
    return int(found[1]) * (1000 if found[2] == "g" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small reads of a small pool")
    parser.add_argument("--link", type=rate, default=0, metavar="RATE", help="1gbit: over a link held to it (root)")
    parser.add_argument("--rounds", type=int, default=9, help="reads of each way in a cell, more of small ones")
    parser.add_argument("--out", type=outs.folder, help="folder for engines.json and .md; engines_link.json and .md")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not allowed: use an integer >= 1")
    args.pool_mib = 512
    if args.quick:
        args.pool_mib, args.rounds = 8, 2
    result = {"provenance": provenance(), "mbit": args.link, "pool_mib": args.pool_mib,
              "rows": measure(args, args.link)}  # fmt: skip
    result["bars"] = report.bars(result)
    print(report.markdown(result))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "engines_link" if args.link else "engines"
        (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(report.markdown(result))


if __name__ == "__main__":
    main()
