"""A model whose layers lie on all GPUs there are (accelerate's `device_map`): each layer's working set is where it is.

    python examples/several_gpus.py

It takes the bundled small model and needs `pip install accelerate`. On a machine with one GPU, or none, all of it lies
there; steps that span several run eagerly. To split every layer instead, see `tp_plan` in transformers' documentation.
"""

import torch
from transformers import AutoModelForCausalLM

from oasis_hf import OasisCache, models


def main():
    model = AutoModelForCausalLM.from_pretrained(**models.source(None), device_map="auto", dtype=torch.bfloat16).eval()
    tokenizer = models.load_tokenizer()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    cache = OasisCache(model, budget=2064)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
    print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    places = [str(layer.device) for layer in cache.layers]
    print("layers:", ", ".join(f"{places.count(place)} on {place}" for place in dict.fromkeys(places)))
    print("one graph a step:", cache.graphs.refused or "yes")


if __name__ == "__main__":
    main()
