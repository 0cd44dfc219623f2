"""Several questions about one long document that is read once.

    python examples/long_document.py [MODEL]

The document goes through the model a single time. Each question then continues a branch of the cache: `copy.deepcopy`
shares the document's pages in host memory and copies only what is on the model's device.
"""

import copy
import os
import sys

import torch

from oasis_hf import OasisCache
from oasis_hf.demo import handbook
from oasis_hf.models import load

QUESTIONS = ("How long does the canary stage last?", "Who is this handbook for?")


def main(name: str | None = None) -> None:
    model, tokenizer = load(name)
    document = handbook()

    def prompt(question: str) -> list[int]:
        messages = [{"role": "user", "content": f"{document}\n\nQuestion: {question}"}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    prompts = [prompt(question) for question in QUESTIONS]
    shared = os.path.commonprefix(prompts)

    cache = OasisCache(model, budget=1552, progress=True)
    with torch.no_grad():
        model(torch.tensor([shared], device=model.device), past_key_values=cache, logits_to_keep=1)

    for question, ids in zip(QUESTIONS, prompts):
        branch = copy.deepcopy(cache)
        inputs = torch.tensor([ids], device=model.device)
        out = model.generate(inputs, past_key_values=branch, max_new_tokens=24, do_sample=False)
        print(f"{question}\n  {tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)}")
        memory = ", ".join(f"{place} {size / 2**20:.0f} MiB" for place, size in branch.memory().items())
        print(f"  {len(ids):,} tokens, {len(ids) - len(shared)} of them read for this question; {memory}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
