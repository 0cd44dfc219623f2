"""A batch of prompts of different lengths: padding is squeezed out, so it costs nothing and changes nothing.

python examples/batch_left_padding.py [MODEL]
"""

import sys

import torch
from transformers import DynamicCache

from oasis_hf import OasisCache
from oasis_hf.models import load

PROMPTS = (
    "What is the capital of France?",
    "I have three apples, I eat one of them, and then a friend brings me five more. How many apples do I have now?",
    "Name a color.",
)


def main(name: str | None = None) -> None:
    model, tokenizer = load(name, dtype=torch.float32)  # exact enough to compare tokens
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in PROMPTS
    ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(model.device)

    cache = OasisCache(model, budget=1040)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)
    dense = model.generate(**inputs, past_key_values=DynamicCache(), max_new_tokens=24, do_sample=False)

    columns = inputs["input_ids"].shape[1]
    for row, prompt in enumerate(PROMPTS):
        real = int(inputs["attention_mask"][row].sum())
        print(f"{prompt}  [{real} of {columns} columns]")
        print(f"  {tokenizer.decode(out[row, columns:], skip_special_tokens=True).strip()}")
    # All of it fits the budget, so nothing is sparse.
    print(f"same tokens as a dense cache: {out.tolist() == dense.tolist()}")
    print(f"tokens stored by row: {cache.state.rows.tokens}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
