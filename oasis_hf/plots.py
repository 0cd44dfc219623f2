"""Figures."""

from __future__ import annotations

from typing import Any

import torch


def plot_cache(hit_rate: torch.Tensor, residency: torch.Tensor, layer: int | None) -> Any:
    """Hit rate by layer `[layers]`, and the residency map `[steps, blocks]` of one layer where there is one.

    Returns:
        a `matplotlib.figure.Figure` (not shown).
    """
    from matplotlib.figure import Figure

    panels = 2 if residency.numel() else 1
    figure = Figure(figsize=(6 * panels, 3.6), layout="constrained")
    left = figure.add_subplot(1, panels, 1)
    left.bar(range(len(hit_rate)), (hit_rate * 100).nan_to_num(0).tolist(), color="#4878d0")
    left.set(xlabel="layer", ylabel="predicted blocks already resident, %", title="Hit rate by layer", ylim=(0, 100))
    if residency.numel():
        right = figure.add_subplot(1, panels, 2)
        image = right.imshow(residency.T.numpy(), aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=1)
        right.set(xlabel="decode step", ylabel="block", title=f"Resident blocks of layer {layer}")
        figure.colorbar(image, ax=right, label="share of KV heads")
    return figure
