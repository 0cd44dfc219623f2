"""A bar for long prefills."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def prefill_bar(show: bool, tokens: int, layers: int) -> Iterator[Callable[[], None] | None]:
    """Yields what to call after each layer, or None."""
    if not show:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=layers, desc=f"prefill, {tokens:,} tokens", unit="layer", leave=False) as bar:
        yield lambda: bar.update(1)
