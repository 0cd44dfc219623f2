"""What generate can be asked for, each with an `OasisCache` through `model.generate` and `oasis_hf.generate`, against
`DynamicCache`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from byte_tokenizer import model as byte_model
from byte_tokenizer import tokenizer as byte_tokenizer
from letters import letter_tokenizer
from matrix import LONG, SMALL, dense
from tiny import left_padded, prompt, tiny
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextGenerationPipeline,
    TextStreamer,
    WatermarkingConfig,
)

import oasis_hf
from oasis_hf import OasisCache

ROW = {"input_ids": prompt(1, 30).repeat(1, 2)}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}


class Ban(LogitsProcessor):
    """Never a token that is among the last three."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


class Sum(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -3:].sum(1) % 7 == 0


class Seen(TextStreamer):
    """The text that a streamer was given."""

    def __init__(self) -> None:
        super().__init__(letter_tokenizer(), skip_special_tokens=False)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


def by_hand(model: Any, *args: Any, streamer: Any = None, **kwargs: Any) -> Any:
    """A loop that a user hands in as `custom_generate`."""
    kwargs["generation_config"].output_logits = False
    return type(model)._sample(model, *args, **kwargs)


ASKED: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": lambda: {},
    "sampling, seeded": lambda: SAMPLED,
    "beam search": lambda: {"num_beams": 3},
    "beam sampling": lambda: {"num_beams": 2, **SAMPLED},
    "several sequences (`num_return_sequences`)": lambda: {"num_return_sequences": 3, **SAMPLED},
    "left-padded batch": lambda: left_padded([21, 50, 33]),
    "a batch whose rows end apart": lambda: {
        **left_padded([21, 50, 33]), "eos_token_id": list(range(3, 12)), "pad_token_id": 0,
    },
    "embeddings (`inputs_embeds`)": lambda: {
        "inputs_embeds": tiny("llama").get_input_embeddings()(ROW["input_ids"]), "input_ids": None,
    },
    "chunked prefill (`prefill_chunk_size`)": lambda: {"prefill_chunk_size": 13},
    "an assistant (`assistant_model`)": lambda: {"assistant_model": tiny("qwen3")},
    "early exit (`assistant_early_exit`)": lambda: {"assistant_early_exit": 1},
    "prompt lookup (`prompt_lookup_num_tokens`)": lambda: {"prompt_lookup_num_tokens": 3},
    "penalties and bans": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]]},
    "a processor of one's own": lambda: {"logits_processor": LogitsProcessorList([Ban()])},
    "a prefix function": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3, 40))},
    "a criterion of one's own": lambda: {"stopping_criteria": StoppingCriteriaList([Sum()])},
    "watermarking": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "SynthID": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True,
    },
    "classifier-free guidance, negative prompt": lambda: {
        "guidance_scale": 1.5, "negative_prompt_ids": prompt(1, 9, seed=4),
    },
    "logits and hidden states of each step": lambda: {
        "return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True,
    },
    "attention weights (`output_attentions`)": lambda: {"return_dict_in_generate": True, "output_attentions": True},
    "a time limit (`max_time`)": lambda: {"max_time": 600.0},
    "`compile_config`": lambda: {"compile_config": CompileConfig()},
    "`use_cache=False`": lambda: {"use_cache": False},
    '`cache_implementation="static"` too': lambda: {"cache_implementation": "static"},
    "continuous batching": lambda: {"cache_implementation": "paged"},
    "a loop of one's own (`custom_generate`)": lambda: {"custom_generate": by_hand},
    "multi-token heads (`use_mtp`)": lambda: {"use_mtp": True},
    "contrastive search": lambda: {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": lambda: {"dola_layers": "low"},
    "group beam search": lambda: {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam search": lambda: {"force_words_ids": [[5, 6]], "num_beams": 2},
}  # fmt: skip
"""Arguments of one call each, over a row of 60 tokens where they bring no other."""


def asked(what: str, ours: bool) -> None:
    """One of `ASKED` through `model.generate`, or through `oasis_hf.generate`, where what is drawn is the likeliest: it
    draws in another order."""
    model, given = tiny("llama"), {**ROW, "do_sample": False, "max_new_tokens": 10, **ASKED[what]()}
    if ours and given["do_sample"]:
        given["top_k"] = 1

    def run(cache: Any) -> Any:
        torch.manual_seed(3)
        made = dict(given, past_key_values=cache)
        alone = ours and isinstance(cache, OasisCache)
        return oasis_hf.generate(model, **made) if alone else model.generate(**made)

    # Ours first: what transformers refuses anyway is its own sentence either way, what we refuse needs no truth.
    got = run(OasisCache(model, speculate=ours, draft_tokens=2 if ours else 1))
    same(run(dense(model)), got)


def same(want: Any, got: Any) -> None:
    if torch.is_tensor(want):
        assert torch.equal(want, got)
        return
    assert torch.equal(want.sequences, got.sequences)
    for a, b in zip(want.logits or (), got.logits or (), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    for step, other in zip(want.hidden_states or (), got.hidden_states or (), strict=True):
        for a, b in zip(step, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def _generate(model: Any, ours: bool) -> Callable[..., Any]:
    return functools.partial(oasis_hf.generate, model) if ours else model.generate


def _both(model: Any, ours: bool, run: Callable[[Any, Callable[..., Any]], Any]) -> None:
    """What `run(cache, generate)` gives is the same with either cache."""
    want = run(dense(model), model.generate)
    got = run(OasisCache(model, speculate=ours), _generate(model, ours))
    assert torch.equal(want, got) if torch.is_tensor(want) else want == got


def next_turns(ours: bool) -> None:
    def run(cache: Any, generate: Any) -> torch.Tensor:
        ids = prompt(1, 30)
        for turn in range(3):
            out = generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
            ids = torch.cat((out, prompt(1, 7, seed=turn)), 1)
        return ids

    _both(tiny("llama"), ours, run)


def branches(ours: bool) -> None:
    """A prompt that was read once, and copies of its cache for each question (transformers' own recipe)."""
    model = tiny("llama")

    def run(cache: Any, generate: Any) -> torch.Tensor:
        with torch.no_grad():
            model(prompt(1, 40), past_key_values=cache)
        questions = [torch.cat((prompt(1, 40), prompt(1, 9, seed=seed)), 1) for seed in (1, 2)]
        kwargs = dict(max_new_tokens=6, do_sample=False)
        return torch.cat([generate(ids, past_key_values=copy.deepcopy(cache), **kwargs) for ids in questions])

    _both(model, ours, run)


def _text(model: Any, text: str = "the sea is wide and ") -> torch.Tensor:
    return letter_tokenizer()(text * 3, return_tensors="pt")["input_ids"]


def stop_strings(ours: bool) -> None:
    model = tiny("llama")
    whole = model.generate(_text(model), max_new_tokens=20, do_sample=False)
    stop = letter_tokenizer().decode(whole[0, -12:-9], skip_special_tokens=False)

    def run(cache: Any, generate: Any) -> torch.Tensor:
        words = {"stop_strings": [stop], "tokenizer": letter_tokenizer()}
        out = generate(_text(model), past_key_values=cache, max_new_tokens=20, do_sample=False, **words)
        assert out.shape[1] < whole.shape[1]
        return out

    _both(model, ours, run)


def streamer(ours: bool) -> None:
    model = tiny("llama")

    def run(cache: Any, generate: Any) -> str:
        seen = Seen()
        out = generate(_text(model), past_key_values=cache, streamer=seen, max_new_tokens=20, do_sample=False)
        assert seen.text.strip() == letter_tokenizer().decode(out[0]).strip()
        return seen.text

    _both(model, ours, run)


def pipeline(ours: bool = False) -> None:
    model = tiny("llama")

    def run(cache: Any, generate: Any) -> str:
        pipe = TextGenerationPipeline(model=model, tokenizer=letter_tokenizer())
        made = pipe("the sea is wide", past_key_values=cache, max_new_tokens=12, do_sample=False)
        return made[0]["generated_text"]

    _both(model, ours, run)


def universal(ours: bool) -> None:
    """An assistant with a tokenizer of its own."""
    model, helper = tiny("llama"), byte_model()
    words = {"tokenizer": letter_tokenizer(), "assistant_tokenizer": byte_tokenizer()}

    def run(cache: Any, generate: Any) -> torch.Tensor:
        kwargs = dict(max_new_tokens=10, do_sample=False, assistant_model=helper, **words)
        return generate(_text(model), past_key_values=cache, **kwargs)

    got = run(OasisCache(model, speculate=ours), _generate(model, ours))
    assert torch.equal(got, run(dense(model), model.generate))


def by_steps(ours: bool = False) -> None:
    """A loop written by hand, over a budget that does not hold the text: the same where blocks live elsewhere."""
    model, logits = tiny("llama"), []
    for store in ("host", "resident"):
        cache, steps = OasisCache(model, budget=SMALL, speculate=ours, store=store), []
        with torch.no_grad():
            out = model(prompt(1, LONG), past_key_values=cache)
            for _ in range(6):
                steps.append(out.logits[:, -1])
                out = model(steps[-1].argmax(-1, keepdim=True), past_key_values=cache)
        logits.append(torch.stack(steps))
    assert torch.equal(*logits)


ALONE = {'`pipeline("text-generation")`': pipeline, "a loop by hand (`model(...)`)": by_steps}
"""Those that `oasis_hf.generate` has no part in."""

CALLS: dict[str, Callable[[bool], None]] = {
    **{what: functools.partial(asked, what) for what in ASKED},
    "turns on one cache": next_turns,
    "branches (`copy.deepcopy`)": branches,
    "stop strings": stop_strings,
    "a streamer": streamer,
    "an assistant with another tokenizer": universal,
}
"""Each takes whether `oasis_hf.generate` runs it."""
