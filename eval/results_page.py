"""`docs/results.md` and the README's tables of results, made from the JSON in `eval/results/`: `make results`.

    python eval/results_page.py [--check]

A section a result: its table, its bars, its figure (drawn where it is missing), the command, the machine and the
commit. What nobody has measured yet is listed with the command that would. Nothing is measured here. `--check` writes
nothing and exits 1 where a page differs from its JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fetch_sweep
import file_tier
import k_sweep
import moe
import overhead
import reasoning
import report_agreement
import report_hit_rate
import report_tables as tables
import results_readme
import results_tables as of
import rows
import tensor_parallel
from report_tables import Lines, Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
HEADS = ROOT / "oasis_hf" / "drafters" / "heads"
ROOFLINE = "roofline.png"


@dataclass(frozen=True)
class Section:
    """One result.

    Args:
        name: of its JSON in `eval/results/`. command: what makes it, from the clone. about: what it is, in a sentence.
        tables: of the result; None: those of the page that its script writes beside the JSON, `name.md`.
        bars: as `report_tables.bar`. draw: makes `name.png`, where there is a figure. in_tables: the tables tell of the
            bars already. at: another place of its JSON, from the clone.
    """

    name: str
    title: str
    command: str
    about: str
    tables: Callable[[Row], list[Lines]] | None = None
    bars: Callable[[Row], list[Row]] = of.given
    draw: Callable[[Row, Path], None] | None = None
    in_tables: bool = False
    at: str = ""

    def path(self, folder: Path) -> Path:
        return ROOT / self.at if self.at else folder / f"{self.name}.json"

    @property
    def there(self) -> bool:
        """Whether this clone has its script."""
        script = re.search(r"eval/\w+\.py", self.command)
        return script is None or (ROOT / script[0]).exists()


def _heat(result: Row, path: Path) -> None:
    report_hit_rate.plot(result["rows"], (20, result["k"]), path)


def _sweep(module: Callable[[Row], list[Lines]]) -> Callable[[Row], list[Lines]]:
    """Of a sweep's tables all but its bars, which every section shows alike."""
    return lambda result: [one for one in module(result) if one[0] != "Bars"]


SECTIONS = (
    Section("accuracy", "Accuracy by mode", "python eval/accuracy.py --device cuda",
            "Tasks over long contexts, every mode of the cache against dense at several budgets."),
    Section("fidelity", "Fidelity by mode", "python eval/fidelity.py --device cuda",
            "Teacher-forced agreement, KL and perplexity of every mode."),
    Section("adapter", "The evaluation adapter", "python eval/adapter.py --device cuda",
            "What SmolLM2 answers, densely, with the adapter that lets the tasks tell modes apart.",
            of.adapter, at="eval/adapter/smollm2-135m-retrieval/metrics.json"),
    Section("agreement", "Agreement and kept mass", "python eval/agreement.py --device cuda --out eval/results",
            "What the selected blocks keep of the attention, over scores, lookaheads and budgets; `agreement.md` "
            "beside the JSON has the other tables.", of.agreement, draw=report_agreement.draw),
    Section("fetch_cap", "What the fetch cap costs",
            "python eval/fetch_cap.py --device cuda --out eval/results/fetch_cap.json",
            "SmolLM2 over real texts of 7,000 tokens, budget 2064, against a dense cache.", of.fetch_cap),
    Section("adaptive", "A budget that is shared out", "python eval/adaptive.py --out eval/results/adaptive.json",
            "SmolLM2 over real texts of 7,000 tokens: missed attention mass with one fetch cap for all, and with the "
            "same bytes shared out (`fetch_ratio=\"auto\"`)."),
    Section("adaptive_held_out", "A budget that is shared out, on text nothing was chosen by",
            "python eval/adaptive.py --skip 7300 --out eval/results/adaptive_held_out.json",
            "The same texts from their 7,300th token on: what is averaged was chosen by what comes before."),
    Section("tail_estimate", "An estimate of what is not selected",
            "python eval/tail_estimate.py --out eval/results/tail_estimate.json",
            "KL to dense where the other blocks take part by a mean value a run or block, and where they don't: it "
            "does not fall on every text, and the memory of the values serves better as slots, so the cache has none."),
    Section("hit_rate", "Which lookahead foretells the next step",
            "python eval/hit_rate.py --device cuda --out eval/results",
            "Six documents that SmolLM2 goes on with by itself, budget 1040. Agreement is with the 20 blocks that "
            "the next query itself chooses; kept mass is attention on all chosen blocks as a share of what the next "
            "query's own keep, without a fetch cap.", of.hit_rate, of.hit_rate_bars, _heat),
    Section("acceptance", "Tokens a pass", "python eval/acceptance.py --device cuda --out eval/results",
            "`oasis_hf.generate` over real documents, by context, rows and drafts.", of.acceptance),
    Section("lossless", "`verify=\"full\"` against dense",
            "python eval/lossless.py --device cuda --dtype float32 bfloat16 --out eval/results",
            "Every place where the text is not dense's.", of.lossless, of.lossless_bars),
    Section("disagg_traffic", "Traffic of prefill and decode on two machines",
            "python eval/disagg_traffic.py --out eval/results",
            "What crosses the network for a request, by fetch ratio (the paper's Fig. 14)."),
    Section("disagg_traffic_bfloat16", "The same in bfloat16",
            "python eval/disagg_traffic.py --dtype bfloat16 --texts reference --out eval/results",
            "Pages of half the size beside summaries that are int8 all the same."),
    Section("disagg_traffic_namespaces_tcp", "The same over two network namespaces, tcp",
            "python eval/disagg_traffic.py --namespaces --texts reference --parts 16 --new 64 --out eval/results",
            "What was counted against what the reader's device received."),
    Section("disagg_traffic_namespaces_nixl", "The same over two network namespaces, NIXL",
            "python eval/disagg_traffic.py --namespaces --engine nixl --texts reference --parts 16 --new 64 "
            "--out eval/results",
            "What was counted against what the reader's device received."),
    Section("engines", "The engines on one host", "python eval/engines.py --out eval/results",
            "Reads of random blocks over each engine, beside plain sockets and bare NIXL in the same run."),
    Section("engines_link", "The engines over a link of 1 Gbit/s",
            "python eval/engines.py --link 1gbit --out eval/results",
            "Two network namespaces whose link is held to the rate: how much of it each engine fills."),
    Section("file_tier", file_tier.TITLE, "python eval/file_tier.py --out eval/results",
            "SmolLM2 over a real text, its KV in a file and a quarter of it in memory, against all of it in memory.",
            file_tier.lines),
    Section("ttft", "Time to the next token behind a prefill elsewhere", "python eval/ttft.py --out eval/results",
            "Measured over links of known speed, against bytes / rate (the paper's Fig. 15)."),
    Section("prefix", "A prompt that begins like another", "python eval/prefix.py --out eval/results",
            "Time to the first token where the beginning is in a `PrefixStore`."),
    Section("increment", "A prompt that begins like another, prefilled elsewhere",
            "python eval/increment.py --out eval/results",
            "What crosses, and when the first token is there, where the beginning is held by neither side, one or "
            "both."),
    Section("jump", "Where attention jumps", "python eval/jump.py --device cuda --out eval/results",
            "Eight documents and questions that switch between them: what the correction lane recovers of what the "
            "fetch cap loses against selection on demand, and how often it fires."),
    Section("lane_layers", "Which layers the lane corrects", "python eval/lane_layers.py --out eval/results",
            "Each layer's share of the corrections while tasks of the family that nothing is evaluated on are "
            "answered, which `correct_layers` is chosen by."),
    Section("decode", "Decode steps", "python eval/decode.py --out eval/results/decode.json",
            "Qwen3-8B's shape, random weights, exactly C random blocks fetched a KV head, layer and step.",
            of.decode, of.decode_bars, in_tables=True),
    Section("bench", "Decode steps that fetch what a real model fetches",
            "oasis-hf bench --rows 16 44 --trace eval/results/traces.json --json eval/results/bench.json",
            "The same shape; blocks move as often as the trace of SmolLM2 says.", of.bench),
    Section("rows", rows.TITLE, "python eval/rows.py --out eval/results",
            "The paper's Fig. 11, with its points and dense vLLM's on the chart.", _sweep(rows.lines), draw=rows.draw),
    Section("tensor_parallel", tensor_parallel.TITLE,
            "torchrun --nproc-per-node 2 eval/tensor_parallel.py --out eval/results",
            "A model split over two GPUs of one host with NCCL in the captured step, against one of them; and rows of "
            "one GPU whose full KV is all in host memory.", _sweep(tensor_parallel.lines), draw=tensor_parallel.draw),
    Section("moe", moe.TITLE, "python eval/moe.py --out eval/results",
            "Steps that stay dense, are sparse, or turn when that pays.", _sweep(moe.lines), draw=moe.draw),
    Section("reasoning", reasoning.TITLE, "python eval/reasoning.py --out eval/results",
            "The paper's Fig. 13: steps timed at chosen lengths and summed up, checked by a real run.",
            _sweep(reasoning.lines), draw=reasoning.draw),
    Section("fetch_sweep", fetch_sweep.TITLE, "python eval/fetch_sweep.py --out eval/results",
            "The paper's Table 2.", _sweep(fetch_sweep.lines), draw=fetch_sweep.draw),
    Section("k_sweep", k_sweep.TITLE, "python eval/k_sweep.py --out eval/results",
            "The paper's K sweep.", _sweep(k_sweep.lines), draw=k_sweep.draw),
    Section("overhead", overhead.TITLE, "python eval/overhead.py --out eval/results",
            "What each part of the cache's work adds to a step.", _sweep(overhead.lines), draw=overhead.draw),
    Section("speculation", "What speculation gains by the clock", "python eval/speculation.py "
            "--out eval/results/speculation.json", "Acceptance is forced to what the shipped head has.",
            of.speculation, of.speculation_bars),
    Section("prefill", "A prompt", "python eval/prefill.py --out eval/results/prefill.json",
            "32,768 tokens of Qwen3-8B's shape, time and peak memory.", of.prefill, of.prefill_bars),
    Section("operators", "The CUDA operators", "python eval/operators.py --out eval/results/operators.json",
            "Replayed graphs of several launches over inputs larger than the L2 cache.", of.operators,
            of.operators_bars, in_tables=True),
    Section("interference", "What a gather slows", "python eval/interference.py --out eval/results/interference.json",
            "Beside a gather that runs all the time.", of.interference, of.interference_bars),
    Section("step_time", "A decode step on a CPU", "python eval/step_time.py --out eval/results/step_time.json",
            "The reference path, SmolLM2 at 7,000 tokens, alternating with a dense cache.", of.step_time),
    Section("traces", "Blocks fetched a step", "python eval/traces.py --out eval/results/traces.json",
            "How often a KV head of SmolLM2 fetched 0, 1, ... C blocks.", of.traces),
)  # fmt: skip


def section(one: Section, folder: Path) -> tuple[list[str], list[Row]]:
    """Parts of the page, and the bars that are missed.

    Args:
        folder: of the JSON files; a figure that is missing there is drawn.
    """
    result = json.loads(one.path(folder).read_text(encoding="utf-8"))
    picture = folder / f"{one.name}.png"
    if one.draw is not None and not picture.exists():
        one.draw(result, picture)
    parts = [f"## {one.title}", one.about, *_made(one, result)]
    if picture.exists():
        parts.append(f"![{one.title}](../eval/results/{picture.name})")
    parts += _own_page(folder / f"{one.name}.md") if one.tables is None else tables.markdown(one.tables(result), 3)
    bars = one.bars(result)
    missed = [{**bar, "section": one.title} for bar in bars if not bar["met"]]
    if bars and not one.in_tables:
        parts += tables.markdown([tables.bars(bars)], 3)
    return parts, missed


def _made(one: Section, result: Row) -> list[str]:
    """The command, and where and when it ran. What only a GPU's command line wrote says less."""
    ran = result.get("provenance", result if "machine" in result else None)
    if ran is None:
        said = f"{result['gpu']}, {result['date']}; torch {result['torch']}, oasis_hf {result['oasis_hf']}."
        return [f"`{one.command}`", f"Measured on {said}"]
    return [f"`{one.command}`", *(f"Measured as {line}" for line in tables.made(ran))]


def _own_page(path: Path) -> list[str]:
    """A script's own page without title and bars, headings a level down; nothing where there is none."""
    if not path.exists():
        return []
    text = re.sub(r"\A# .*\n", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"^## Bars$.*?(?=^## |\Z)", "", text, flags=re.M | re.S)
    return [re.sub(r"^(#+) ", r"#\1 ", text.strip(), flags=re.M)]


def heads() -> list[str]:
    """The EAGLE-3 heads that travel with the package."""
    parts = []
    for path in sorted(HEADS.glob("*/metrics.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        ran = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        parts += [
            f"## The head {path.parent.name}",
            f"`oasis-hf train-drafter {told['target']}`, {told['steps']:,} steps, "
            f"{told['train_response_tokens'] / 1e6:.1f} million tokens of responses, "
            f"{told['generate_seconds'] / 60:.1f} minutes for those and {told['train_seconds'] / 60:.1f} of training; "
            f"{ran}. Its card is `{path.parent.relative_to(ROOT).as_posix()}/README.md`.",
            *tables.markdown(of.head(told), 3),
        ]
    return parts


def roofline(folder: Path) -> list[str]:
    """What arithmetic allows, with the measured points on it."""
    from oasis_hf.bench import SHAPES
    from oasis_hf.roofline import PRESETS, Load, ModelShape, report

    sizes = dict(SHAPES["qwen3-8b"])
    if not (folder / ROOFLINE).exists():
        from transformers import AutoConfig

        shape = ModelShape.of(AutoConfig.for_model(sizes.pop("model_type"), **sizes))
        report.figure(shape, PRESETS["h200-measured"], Load(44, 16384), "qwen3-8b").savefig(folder / ROOFLINE)
    rows = [
        [point["what"], "the paper" if point["who"] == "paper" else "ours", point["roof"],
         f"{point['rows'] / point['bytes'] * 1e9:,.1f}", f"{point['tokens_per_second']:,.0f}",
         f"{point['rows'] / point['bytes'] * getattr(PRESETS[point['hardware']], point['roof']):,.0f}"]
        for point in report.measured()
    ]  # fmt: skip
    head = ["measured", "by", "roof", "tokens a GB of KV", "tokens/s", "tokens/s under the roof"]
    return [
        "## Under the roofs",
        "Token-KV intensity with the paper's points and ours (`oasis_hf/data/roofline.json`, from `decode.json`).",
        "`oasis-hf roofline qwen3-8b --hardware h200-measured --rows 44 --context 16384 --plot roofline.png`",
        f"![Three roofs](../eval/results/{ROOFLINE})",
        *tables.markdown([("", head, rows)]),
    ]


def page(folder: Path = RESULTS) -> str:
    """All of `docs/results.md`."""
    have = [one for one in SECTIONS if one.path(folder).exists()]
    made = [section(one, folder) for one in have]
    missed = [[bar["section"], str(bar["what"]), tables.number(bar["measured"]), tables.number(bar["bar"])]
              for _, bars in made for bar in bars]  # fmt: skip
    lacking = [[one.title, f"`{one.command}`"] for one in SECTIONS if one not in have and one.there]
    parts = [
        "# Results",
        "Made by `make results` from the JSON files in `eval/results/`: don't edit. Every number was measured by the "
        "command above it, on the machine that it names. Figures of speed are of random weights in a real model's "
        "shape; figures of accuracy are of SmolLM2-135M-Instruct.",
        *tables.markdown([("Bars that are missed", ["result", "what", "measured", "bar"], missed)] if missed else []),
        *tables.markdown([("Not measured yet", ["what", "command"], lacking)] if lacking else []),
        *(part for parts, _ in made for part in parts), *roofline(folder), *heads(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, tell what differs")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    pages = {ROOT / "docs" / "results.md": page(), readme: results_readme.filled(readme.read_text("utf-8"), RESULTS)}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'differs from the results' if args.check else 'written'}")
        if not args.check:
            path.write_text(pages[path], encoding="utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
