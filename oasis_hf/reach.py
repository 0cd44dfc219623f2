"""How far drafts may be stacked: their positions must not change what the tokens before them get."""

from __future__ import annotations

from typing import Any


class Reach:
    """What a model's positions allow.

    A table of positions ends. Two kinds of RoPE scale every position of a forward: "longrope" by whether the furthest
    stands beyond a length, "dynamic" by how far beyond.

    Attributes:
        most: positions within which drafts change nothing; None: anywhere.
        dynamic: beyond `most` there are no drafts any more. longrope: there are again, once a token stands there.
        own: a call without `position_ids` must leave them to the model. With RoPE they are columns, padding included,
            unless images take fewer; a table of positions may begin anywhere.
    """

    def __init__(self, model: Any, config: Any) -> None:
        rope = getattr(config, "rope_parameters", None) or {}
        ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        kinds = {part.get("rope_type") for part in ropes}
        self.dynamic, self.longrope = "dynamic" in kinds, "longrope" in kinds
        self.own = not rope or hasattr(getattr(model, "base_model", model), "rope_deltas")
        self.most: int | None = None
        if self.dynamic or self.longrope:
            lengths = [part.get("original_max_position_embeddings") for part in ropes]
            self.most = min(n for n in (*lengths, config.max_position_embeddings) if n)
        elif not rope:
            self.most = getattr(config, "max_position_embeddings", None)

    def holds(self, columns: int, tokens: int, drafts: int) -> bool:
        """Whether `drafts` may stand behind the longest row's `columns`, of which `tokens` are real (its last position
        counts one or the other)."""
        if self.most is None or columns + drafts <= self.most:
            return True
        return self.longrope and not self.dynamic and tokens > self.most

    def check_chunks(self, chunk: int | None, tokens: int) -> None:
        """Raise ValueError where a prompt's first chunk would be read as a short text's and its later ones as a long
        one's."""
        if self.longrope and chunk and self.most is not None and chunk <= self.most < tokens:
            raise ValueError(
                f"prefill_chunk_size={chunk} would rotate the first chunk of {tokens:,} tokens as if all were that few "
                f"(longrope has other factors beyond {self.most:,}): use chunks above {self.most:,}, or none."
            )
