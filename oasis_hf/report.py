"""What a cache tells about itself: counters, memory, a table, pictures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from .layers import OasisLayer
from .sliding import SlidingLayer
from .stats import COUNTERS

if TYPE_CHECKING:
    from .graphs import StepGraphs
    from .state import State
    from .step import Stepper


class Report:
    """The reading half of `OasisCache`."""

    state: "State"
    stepper: "Stepper"
    layers: list[Any]
    drafter: Any
    graphs: "StepGraphs"
    _watched: int | None = None
    _snapshots: list[torch.Tensor]

    @property
    def sparse_layers(self) -> list[OasisLayer]:
        return [layer for layer in self.layers if isinstance(layer, OasisLayer)]

    def stats(self) -> dict[str, torch.Tensor]:
        """Counters, each `[sparse layers, KV heads]` int64 on the host (see `stats.COUNTERS`), and `bytes`, what was
        moved into the working set, likewise. Empty before the first forward."""
        layers = [layer for layer in self.sparse_layers if layer.is_initialized]
        if not layers:
            return {}
        values = torch.stack([layer.counters.values.cpu() for layer in layers], 1)
        out = dict(zip(COUNTERS, values))
        moved = out["fetched"] + out["first"] + out["reopened"] + out["on_demand"]
        out["bytes"] = moved * self.state.block_bytes
        return out

    def hit_rate(self) -> torch.Tensor:
        """Share of predicted blocks that were resident, `[sparse layers]` float; nan where nothing was predicted."""
        stats = self.stats()
        if not stats:
            return torch.zeros(0)
        hits = stats["hits"].sum(1).double()
        return hits / (hits + stats["fetched"].sum(1) + stats["capped"].sum(1))

    def correction_rate(self) -> torch.Tensor:
        """Share of KV heads, rows and steps in which the head was corrected before it attended (`correction`,
        `correct_below`), `[sparse layers]` float; nan where none was compared."""
        stats = self.stats()
        return stats["corrected"].sum(1).double() / stats["compared"].sum(1) if stats else torch.zeros(0)

    def layers_corrected(self, share: float = 0.8) -> tuple[int, ...]:
        """The fewest layers that make up `share` (above 0, up to 1) of all corrections so far: for `correct_layers`.

        Raises:
            ValueError: another share, or nothing was corrected.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share={share!r} is not allowed: use a number above 0 up to 1.")
        stats = self.stats()
        done = stats["corrected"].sum(1) if stats else torch.zeros(0)
        if not done.any():
            raise ValueError("No layer was corrected yet: run a text with correction='auto' first.")
        most, layers = done.sort(descending=True, stable=True)
        count = int((most.cumsum(0) < share * most.sum()).sum()) + 1
        return tuple(sorted(layers[:count].tolist()))

    def corrections(self) -> dict[str, int]:
        """What corrections did, of all layers: `heads` corrected, of `compared` ones (each counts rows and steps);
        `steps` of a row in which any head was, of `of_steps`; `blocks` and `bytes` that they moved before attention."""
        stats = self.stats()
        if not stats or not self.state.config.corrects:
            return dict.fromkeys(("heads", "compared", "steps", "of_steps", "blocks", "bytes"), 0)
        blocks = int(stats["on_demand"].sum())
        # Where a model's layers are on several devices, those of the device with the most.
        fired = max((int(have[0]) for have in self.state.fired.values()), default=0)
        return {
            "heads": int(stats["corrected"].sum()), "compared": int(stats["compared"].sum()),
            "steps": fired, "of_steps": int(stats["compared"].max()), "blocks": blocks,
            "bytes": blocks * self.state.block_bytes,
        }  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes: `host` (the full KV, or what host memory holds of it where another tier, `file` or `remote`, holds it
        all), `working_set` and `summaries` where the model runs, and `dense`, what a
        `DynamicCache` would hold there for the same tokens; `drafter`, where that is a head, which caches may share."""
        state = self.state
        sets, summaries = (sum(part) for part in zip(*(layer.device_bytes for layer in self.layers)))
        dense = 0
        if state.store is not None and state.rows is not None:
            heads = self.sparse_layers[0].working_set.table.shape[1]
            dense = state.sparse_layers * heads * state.rows.columns * len(state.rows) * (state.block_bytes // 16)
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                dense += layer.device_bytes[0] // layer.size * min(layer.get_seq_length(), layer.window - 1)
        store = state.store
        memory = {"host": 0 if store is None else store.near_bytes}
        if store is not None and store.beyond is not None:
            memory[store.beyond] = store.nbytes
        memory |= {"working_set": sets, "summaries": summaries, "dense": dense}
        return {**memory, "drafter": self.drafter.nbytes} if self.drafter.nbytes else memory

    def report(self, width: int = 100) -> str:
        """The counters by layer, memory, and what predicted, as a table."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=width, no_color=True).print(self._table())
        return text.getvalue()

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(record=True, file=io.StringIO(), width=100)
        console.print(self._table())
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        stats, rates, memory = self.stats(), self.hit_rate(), self.memory()
        headline = Text(self._headline(), style="table.title")  # a drafter's name may hold anything
        table = Table(
            title=headline, caption=_memory_line(memory, self._placement), title_justify="left", caption_justify="left"
        )
        table.add_column("layer", justify="right")
        table.add_column("hit rate", justify="right")
        names = [name for name in COUNTERS if stats and (name in COUNTERS[:3] or bool(stats[name].any()))]
        for name in [*names, "MiB moved"]:
            table.add_column(name, justify="right")
        for row in range(len(rates)):
            rate = "-" if rates[row].isnan() else f"{rates[row].item():.1%}"
            counts = [f"{int(stats[name][row].sum()):,}" for name in names]
            table.add_row(str(row), rate, *counts, f"{stats['bytes'][row].sum().item() / 2**20:.2f}")
        if len(rates):
            hits = stats["hits"].sum().item()
            predicted = hits + stats["fetched"].sum().item() + stats["capped"].sum().item()
            counts = [f"{int(stats[name].sum()):,}" for name in names]
            rate = f"{hits / predicted:.1%}" if predicted else "-"
            table.add_section()
            table.add_row("all", rate, *counts, f"{stats['bytes'].sum().item() / 2**20:.2f}")
        return table

    @property
    def _placement(self) -> str | None:
        return None if self.state.store is None else self.state.store.placement

    def _headline(self) -> str:
        state, stepper = self.state, self.stepper
        rows = state.rows.tokens if state.rows is not None else []
        held = f"{len(rows)} rows of {max(rows, default=0):,} tokens at most" if rows else "empty"
        cap = f"cap {state.cap} blocks"
        if state.shares is not None:
            cap = f"{int(state.shares.budget):,} blocks in all, at most {state.cap} a KV head,"
        line = f"OasisCache, {held}; {state.slots} slots a KV head, {cap} a step; "
        if state.sparsity is not None:
            line += "dense; " if state.dense else f"sparse ({state.sparsity.why}); "
        line += "lookahead "
        line += f"{state.config.lookahead} by drafter {self.drafter.name}; {stepper.forwards:,} forwards"
        if self.graphs.experts is not None:
            line += f"; experts {self.graphs.experts.told()}"
        if stepper.passes:
            line += f", {stepper.passed / stepper.passes:.2f} tokens a verified row"
        done = self.corrections()
        if done["compared"]:
            line += f", {done['steps']:,} of {done['of_steps']:,} steps of a row corrected"
            line += f" ({done['bytes'] / 2**20:,.2f} MiB)"
        told = {
            "skipped by accepted drafts": stepper.skipped, "with too many rows to verify drafts": stepper.unverified,
            "with too many rows to stack drafts": stepper.undrafted,
        }  # fmt: skip
        return line + "".join(f", {count:,} {what}" for what, count in told.items() if count)

    def watch(self, layer: int = 0) -> None:
        """From now on keep which blocks are resident in one sparse layer (row 0) after each decode step, for `plot`."""
        if not 0 <= layer < len(self.sparse_layers):
            raise ValueError(f"watch(layer={layer}): the cache has sparse layers 0 to {len(self.sparse_layers) - 1}.")
        self._watched, self._snapshots = layer, []

    def take_snapshot(self) -> None:
        """Called after each decode forward."""
        if self._watched is not None:
            table = self.sparse_layers[self._watched].working_set.table[0]
            self._snapshots.append(table.to("cpu", copy=True))  # the table itself goes on changing

    def residency(self) -> torch.Tensor:
        """`[steps, blocks]` float: share of the watched layer's KV heads in which a block was resident."""
        if self._watched is None or not self._snapshots:
            return torch.zeros((0, 0))
        blocks = max(int(table.max()) for table in self._snapshots) + 1
        rows = []
        for table in self._snapshots:
            count = torch.bincount(table[table >= 0], minlength=blocks)
            rows.append(count / table.shape[0])
        return torch.stack(rows)

    def plot(self) -> Any:
        """A matplotlib figure: hit rate by layer and, after `watch()`, the residency map of one layer over steps."""
        from .plots import plot_cache

        return plot_cache(self.hit_rate(), self.residency(), self._watched)


def _memory_line(memory: dict[str, int], placement: str | None) -> str:
    parts = {name: f"{size / 2**20:,.1f} MiB" for name, size in memory.items()}
    beyond = "".join(f" of {parts[name]} in the tier {name!r}" for name in ("file", "remote") if name in parts)
    drafter = f" + drafter {parts['drafter']}" if "drafter" in parts else ""
    pinned = f" ({placement})" if placement else ""
    return (
        f"full KV in the store {parts['host']}{pinned}{beyond}; working set {parts['working_set']} + summaries "
        f"{parts['summaries']}{drafter} on the device (a dense cache: {parts['dense']})"
    )
