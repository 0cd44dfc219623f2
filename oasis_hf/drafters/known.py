"""Heads that are known for a model: what `drafter=None` tries before n-gram matches.

`heads.json` lists them: a target's id on the hub, or the last part of its path, to a head's id, or to a folder beside
that file, written "./heads/NAME". Heads that travel with the package belong there.
"""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

from ..placing import placed
from .base import DrafterError
from .eagle3 import Eagle3Drafter

TABLE = Path(__file__).with_name("heads.json")

_loaded: "weakref.WeakKeyDictionary[Any, tuple[Any, ...]]" = weakref.WeakKeyDictionary()


def known_source(name: str) -> str | None:
    """What the table names for a target's id on the hub or its path: a head's id, or a folder beside the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table.get(name) or table.get(Path(name).name)


def known_head(model: Any) -> Eagle3Drafter | None:
    """A new drafter with the head that the table names for a model, None where it names none. A head is read once a
    model, for all caches; one that can't be had is warned of once."""
    source = known_source(getattr(model.config, "_name_or_path", "") or "")
    if source is None:
        return None
    where = source, *placed(model)
    have = _loaded.get(model)
    if have is None or have[:3] != where:
        have = _loaded[model] = (*where, *_load(source, model))
    head, label = have[3:]
    return None if head is None else Eagle3Drafter(head, model, name=label)


def _load(source: str, model: Any) -> tuple[Any, str]:
    try:
        drafter = Eagle3Drafter.from_pretrained(TABLE.parent / source if source.startswith("./") else source, model)
    except DrafterError as error:
        warnings.warn(
            f"The EAGLE-3 head {source!r} that is known for this model is not used, n-gram matches draft instead "
            f"(drafter='prompt_lookup' says so beforehand): {error}",
            stacklevel=2,
        )
        return None, ""
    return drafter.head, drafter.name
