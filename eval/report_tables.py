"""Tables for the terminal and for markdown alike, and the lines that say where a result came from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Lines = tuple[str, list[str], list[list[str]]]
"""A title, a head and rows of text."""

console = Console(width=150, soft_wrap=False)


def show(tables: Iterable[Lines]) -> None:
    for title, head, rows in tables:
        table = Table(title=title, title_justify="left")
        for place, name in enumerate(head):
            table.add_column(name, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def markdown(tables: Iterable[Lines], level: int = 2) -> list[str]:
    """Headings and tables, a page's parts. A table without a title has no heading."""
    parts = []
    for title, head, rows in tables:
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        parts += [*([f"{'#' * level} {title}"] if title else []), "\n".join(lines)]
    return parts


def made(provenance: Row | list[Row]) -> list[str]:
    """A sentence a run."""
    told = []
    for one in provenance if isinstance(provenance, list) else [provenance]:
        machine = one["machine"].get("gpu", one["machine"]["processor"])
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        told.append(f"`{one['command']}` on {machine}, {one['date']}, commit {one['commit']}; {versions}.")
    return told


def bar(what: str, measured: float, at: float, at_most: bool = False) -> Row:
    """A bar of the results' `bars`: at least `at`, or at most."""
    return {"what": what, "measured": measured, "bar": at, "met": measured <= at if at_most else measured >= at}


def bars(rows: list[Row]) -> Lines:
    """The table of `bar`s; a bar that something just happens is 1 where it does."""
    return "Bars", ["what", "measured", "bar", ""], [
        [str(one["what"]), number(one["measured"]), number(one["bar"]), "met" if one["met"] else "**missed**"]
        for one in rows
    ]  # fmt: skip


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def keep(path: Path, result: Row) -> None:
    """A result's JSON, in a folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write(path: Path, title: str, result: Row, tables: Iterable[Lines], about: str = "") -> None:
    """A result's own page."""
    parts = [f"# {title}", *made(result["provenance"]), *([about] if about else []), *markdown(tables)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
