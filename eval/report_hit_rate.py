"""The tables, bars and heat maps of `hit_rate.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from report_agreement import note
from result_agreement import sha256

Row = dict[str, Any]
__all__ = ["bars", "describe", "note", "plot", "show"]
ENOUGH = 0.0005
"""Kept mass that is no difference."""
DRAWN = ("draft", "prompt_lookup", "smoothed", "previous")


def describe(name: str, prompt: int, tokens: torch.Tensor) -> Row:
    """tokens: `[T]`, the document and the model's continuation."""
    return {"name": name, "prompt": prompt, "sha256_of_ids": sha256(tokens)}


def find(rows: list[Row], prompt: int, predictor: str, k: int, speculation: str = "off", score: str = "default") -> Row:
    wanted = {"prompt": prompt, "predictor": predictor, "k": k, "speculation": speculation, "score": score}
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def bars(rows: list[Row], most: int) -> list[Row]:
    """Each bar of the default score at each length, with speculation off (what a bar is about) and on. most: the
    budget's K."""
    out = []
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        for on in ("off", "on"):
            draft, previous = (find(rows, prompt, name, 20, on) for name in ("draft", "previous"))
            grids = [torch.tensor(r["agreement_by_layer_and_head"]).mean(1) for r in (draft, previous)]
            better = float((grids[0] - grids[1]).min())
            wide = find(rows, prompt, "draft", most, on)
            found: list[tuple[str, float, float]] = [
                ("draft, top-20 agreement", draft["agreement"], 0.955),
                ("draft, top-20 agreement, worst layer", draft["worst_layer"], 0.92),
                (f"draft, top-{most} agreement", wide["agreement"], 0.97),
                ("draft less previous, top-20 agreement, least of layers", better, 0.0),
                (f"draft, kept mass of what the true query's own top-{most} keeps", wide["of_own"], 0.998),
            ]
            mixed = find(rows, prompt, "draft_previous", most, on)
            found.append((f"the default, draft and previous, the same, top-{most}", mixed["of_own"], 0.998))
            several = find(rows, prompt, "draft_top_4", most, on)
            found.append((f"the same of its top 4, weighted, top-{most}", several["of_own"], 0.998))
            other = find(rows, prompt, "previous", most, on)
            for name, row in (("draft", wide), ("the default", mixed)):
                one = next(one for one in row["capped"] if one["fetch_ratio"] == 0.05)
                less = one["kept"] - kept_at(other["capped"], one["fetched"])
                found.append((f"{name} less previous, kept mass at the same bytes, 5% a step", less, 0.0))
            out += [
                {"prompt": prompt, "speculation": on, "what": what, "measured": x, "bar": bar, "met": x >= bar}
                for what, x, bar in found
            ]
    return out


def kept_at(capped: list[Row], fetched: float) -> float:
    """Kept mass by the blocks fetched, read between the nearest two of `hit_rate.under_the_cap`; beyond the last: its
    own."""
    points = sorted((one["fetched"], one["kept"]) for one in capped)
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if fetched <= x1:
            return y0 + (y1 - y0) * max(fetched - x0, 0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def cheaper(rows: list[Row], most: int) -> list[str]:
    """What lookaheads without a head keep beside the head's draft, in words."""
    out = []
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        for on in ("off", "on"):
            found = {name: find(rows, prompt, name, most, on) for name in DRAWN}
            told = ", ".join(f"{name} {row['of_own']:.2%}" for name, row in found.items())
            best = max((name for name in DRAWN if name != "draft"), key=lambda name: found[name]["kept"])
            gain = found["draft"]["kept"] - found[best]["kept"]
            word = "as good by mass without a head" if gain < ENOUGH else "the head's draft keeps more"
            out.append(
                f"{prompt:,} tokens, speculation {on}: of the true query's own kept mass at K={most}, {told}; {best}, "
                f"the best without a head, keeps {-gain * 100:+.3f} points to the draft's: {word}."
            )
    return out


def show(result: Row) -> None:
    rows, most = result["rows"], result["k"]
    print(f"\n{'':29s}speculation off                                      | on")
    print(f"{'tokens score':15s}{'predictor':15s}  K   agree (layer, head)    if right wrong  missed  of own | "
          "agree (layer)    missed  of own  tok/pass")  # fmt: skip
    for row in rows:
        if row["speculation"] == "on":
            continue
        on = find(rows, row["prompt"], row["predictor"], row["k"], "on", row["score"])
        if row["score"] == "paper" and row["k"] != 20:
            continue
        split = [f"{row[name]:.3f}" if row[name] is not None else "  -  " for name in
                 ("agreement_right", "agreement_wrong")]  # fmt: skip
        print(f"{row['prompt']:6d} {row['score']:8s}{row['predictor']:14s} {row['k']:3d}   {row['agreement']:.4f} "
              f"({row['worst_layer']:.3f}, {row['worst_head']:.3f})   {split[0]}  {split[1]}  {1 - row['kept']:.4f}  "
              f"{row['of_own']:.4f} | {on['agreement']:.4f} ({on['worst_layer']:.3f})  {1 - on['kept']:.4f}  "
              f"{on['of_own']:.4f}  {on['tokens_a_pass']:.3f}")  # fmt: skip
    print(f"\nkept mass under the cap, K={most}, default score: missed / blocks fetched a KV head a token")
    for row in rows:
        if row["k"] == most and row["capped"]:
            cells = "  ".join(f"{c['fetch_ratio']:.4g}: {1 - c['kept']:.4f}/{c['fetched']:.2f}" for c in row["capped"])
            print(f"{row['prompt']:6d} {row['predictor']:14s} {row['speculation']:3s}  {cells}")
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        for name in ("draft", "prompt_lookup"):
            print(f"{prompt:6d} {name:13s} first drafts right: {find(rows, prompt, name, 20)['right']:.3f}")
    print("\n" + "\n".join(cheaper(rows, most)) + "\n")
    for bar in result["bars"]:
        print(f"{'met   ' if bar['met'] else 'MISSED'} {bar['prompt']:6d} {bar['speculation']:3s} {bar['what']}: "
              f"{bar['measured']:.4f} (bar {bar['bar']})")  # fmt: skip


def plot(rows: list[Row], ks: tuple[int, int], path: Path) -> None:
    """A heat map a predictor, K and length: agreement by layer and KV head, speculation off, mean over texts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [(prompt, k) for prompt in dict.fromkeys(row["prompt"] for row in rows) for k in dict.fromkeys(ks)]
    size = (3 * len(DRAWN) + 1, 4.5 * len(lines))
    figure, axes = plt.subplots(len(lines), len(DRAWN), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for (prompt, k), line in zip(lines, axes):
        for axis, name in zip(line, DRAWN):
            grid = find(rows, prompt, name, k)["agreement_by_layer_and_head"]
            image = axis.imshow(grid, vmin=0.5, vmax=1, aspect="auto", cmap="viridis")
            axis.set(title=f"{name}, top {k}, {prompt:,} tokens", xlabel="KV head")
            axis.title.set_fontsize(9)
        line[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="agreement with the next query's own choice", shrink=0.5)
    figure.savefig(path, dpi=100)
    plt.close(figure)
