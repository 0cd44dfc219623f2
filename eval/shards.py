"""Parts of the result of `accuracy.py`, a file each: what a task at a length on a model has scored so far."""

from __future__ import annotations

import json
from pathlib import Path

from result_accuracy import Row, Setting


def add(shard: Row, setting: Setting, scores: list[float], decoded: list[int], budget: int) -> None:
    have = shard["scores"].setdefault(setting.key, [])
    before = shard["decoded"].get(setting.key, 0.0) * len(have)
    have += [round(one, 4) for one in scores]
    shard["decoded"][setting.key] = (before + sum(decoded)) / len(have)
    shard["budgets"][setting.key] = budget


def new(model: str, length: int, task: str, told: Row) -> Row:
    return {"model": model, "length": length, "task": task, "scores": {}, "decoded": {}, "budgets": {},
            "seconds": 0.0, "screened": False, "done": False, "run": told, "provenance": []}  # fmt: skip


def file_of(folder: Path, shard: Row) -> Path:
    return folder / f"{shard['model']}-{shard['length']}-{shard['task']}.json"


def save(folder: Path, shard: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, shard)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(shard) + "\n", encoding="utf-8")
    unfinished.replace(file)


def load(folder: Path) -> list[Row]:
    """All shards there."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def runs(shards: list[Row]) -> list[Row]:
    """What the shards were made by, each commit and machine once: processes that share the work differ in their command
    alone."""
    found: dict[str, Row] = {}
    for one in sorted((one for shard in shards for one in shard["provenance"]), key=lambda one: one["date"]):
        found.setdefault(json.dumps([one["commit"], one["machine"], one["versions"]]), one)
    return list(found.values())
