"""The model card that travels with a head."""

from __future__ import annotations

from typing import Any

from ..drafters.eagle3.head import HeadConfig


def card(metrics: dict[str, Any], config: HeadConfig) -> str:
    """README.md of a head, from its `metrics.json`."""
    settings, results = metrics["settings"], metrics["evaluation"]
    lines = [
        f"# EAGLE-3 head for {metrics['target']}", "",
        "One decoder layer that drafts tokens for its target (EAGLE-3, arXiv 2503.01840), in the plain layout that",
        "SpecForge writes and SGLang, vLLM and oasis_hf read. It has no embeddings: the target's are used.", "",
        "| | |", "|---|---|",
        f"| taps | inputs of layers {', '.join(map(str, config.taps))} |",
        f"| parameters | {metrics['parameters']:,} |",
        f"| draft vocabulary | {config.draft_vocab_size:,} of {config.vocab_size:,} ids |",
        f"| trained positions | up to {config.max_position_embeddings:,}; drafts see {settings['window']:,} |",
        f"| data | {', '.join(metrics['data']) or 'samples of an earlier run'} |",
        f"| responses | {metrics['train_samples']:,} by the target, {metrics['train_response_tokens']:,} tokens |",
        f"| documents | {metrics['document_tokens']:,} tokens |",
        f"| training | {metrics['steps']:,} steps, {metrics['positions_learned_from']:,} positions, "
        f"{settings['steps_ahead']} steps ahead, AdamW, learning rate {settings['lr']:g}, seed {settings['seed']} |",
        f"| made on | {metrics['versions']['device']}, torch {metrics['versions']['torch']}, transformers "
        f"{metrics['versions']['transformers']} |", "",
        "Held out, against the target's own greedy text; tau is tokens a target pass of a greedy chain of 5:", "",
        "| texts | top-1 | steps 1 to 5 | tau | draft vocabulary covers | tokens |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, found in results.items():
        steps = " ".join(f"{share:.3f}" for share in found["step_acc"])
        lines.append(
            f"| {name.replace('_', ' ')} | {found['next_top1']:.3f} | {steps} | {found['tau']:.2f} | "
            f"{found['draft_vocab_coverage']:.3f} | {found['tokens']:,} |"
        )
    return "\n".join([*lines, "", "Every setting is in `metrics.json`.", ""])
