"""What a call of `oasis_hf.generate` may ask for, and what it waits for."""

from __future__ import annotations

import sys

import pytest
import torch
from test_generation import INPUTS, Sometimes, truth
from test_syncs import SYNCS
from tiny import left_padded, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, SynthIDTextWatermarkingConfig
from transformers.generation import LogitsProcessor, LogitsProcessorList

import oasis_hf
from oasis_hf import OasisCache


class Letters:
    """A tokenizer as far as stop strings need one: an id is a letter."""

    def get_vocab(self):
        return {chr(32 + token): token for token in range(96)}

    def _convert_id_to_token(self, token):
        return chr(32 + token)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(letter) - 32 for letter in text]}


@pytest.mark.parametrize("where", ["argument", "generation_config", "model"])
@pytest.mark.parametrize("verify", ["sparse", "full"])
def test_stop_strings(where, verify, monkeypatch):
    import copy

    model, inputs = tiny("llama"), INPUTS["padded"]()
    free, known = truth(model, inputs)
    stops = ["".join(chr(32 + int(token)) for token in free[row, 60 + row : 62 + row]) for row in range(2)]
    want = model.generate(
        **inputs,
        max_new_tokens=40,
        do_sample=False,
        stop_strings=stops,
        tokenizer=Letters(),
        pad_token_id=0,
        eos_token_id=1,
    )
    assert (want[:2, 63:] == 0).all() and want.shape[1] <= 90
    kwargs = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 1}
    config = copy.deepcopy(model.generation_config)
    if where == "argument":
        kwargs["stop_strings"] = stops
    elif where == "model":
        config.stop_strings = stops
        monkeypatch.setattr(model, "generation_config", config)
    else:
        config.update(stop_strings=stops, **kwargs)
        kwargs = {"generation_config": config}
    cache = OasisCache(model, speculate=True, draft_tokens=3, drafter=Sometimes(known))
    with pytest.raises(ValueError, match=r"needs tokenizer="):
        oasis_hf.generate(model, **inputs, past_key_values=cache, verify=verify, **kwargs)
    got = oasis_hf.generate(model, **inputs, past_key_values=cache, verify=verify, tokenizer=Letters(), **kwargs)
    assert torch.equal(got, want)


def test_a_prompt_of_embeddings():
    model, inputs = tiny("llama"), INPUTS["padded"]()
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    want = model.generate(
        **inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=40, do_sample=False
    )
    for verify in ("sparse", "full"):
        cache = OasisCache(model, speculate=True, draft_tokens=2)
        got = oasis_hf.generate(
            model, **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, verify=verify
        )
        assert torch.equal(got, want) and got.shape == (3, 40) and cache.get_seq_length() == 89


REFUSED = {
    "assistant_model": lambda model: {"assistant_model": model},
    "prompt_lookup_num_tokens": lambda model: {"prompt_lookup_num_tokens": 3},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda model: {"guidance_scale": 1.5},
    "SynthIDTextWatermarkLogitsProcessor": lambda model: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True,
    },
    "contrastive_search": lambda model: {"penalty_alpha": 0.6, "top_k": 4},
    "dola_generation": lambda model: {"dola_layers": "low"},
    "token_type_ids": lambda model: {"token_type_ids": torch.zeros(1, 50, dtype=torch.long)},
}  # fmt: skip


@pytest.mark.parametrize("verify", ["sparse", "full"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_it_would_give_wrong_or_leave_out_is_refused_before_the_prompt_runs(what, verify, monkeypatch):
    model, inputs = tiny("llama"), INPUTS["one"]()
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda kwargs: None)
    cache = OasisCache(model, speculate=True)
    with pytest.raises(ValueError, match=f"can't give or use {what}: use model.generate"):
        oasis_hf.generate(
            model, **inputs, past_key_values=cache, max_new_tokens=4, verify=verify, **REFUSED[what](model)
        )
    assert cache.get_seq_length() == 0


def test_gpus_that_must_stay_in_step_are_noticed_as_transformers_does(monkeypatch):
    from transformers.generation import utils

    model, inputs = tiny("llama"), INPUTS["one"]()
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2)
    oasis_hf.generate(model, **inputs, max_new_tokens=2)
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda module: True)
    oasis_hf.generate(model, **inputs, max_new_tokens=2, synced_gpus=False)
    with pytest.raises(ValueError, match="synced_gpus"):
        oasis_hf.generate(model, **inputs, max_new_tokens=2)


class Streamer:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        pass


@pytest.mark.parametrize("how", ["rows", "positional", "embeddings", "num_return_sequences", "generation_config"])
def test_one_row_is_streamed_and_no_more(how):
    model, ids, kwargs, args, streamer = tiny("llama"), prompt(2, 20), {}, (), Streamer()
    if how == "rows":
        kwargs["input_ids"] = ids
    elif how == "positional":
        args = (ids,)
    elif how == "embeddings":
        kwargs["inputs_embeds"] = model.get_input_embeddings()(ids)
    elif how == "num_return_sequences":
        args, kwargs = (ids[:1],), {"num_return_sequences": 2, "do_sample": True}
    else:
        config = type(model.generation_config)(num_return_sequences=2, do_sample=True)
        args, kwargs = (ids[:1],), {"generation_config": config}
    with pytest.raises(ValueError, match="streams one row, not 2"):
        oasis_hf.generate(model, *args, streamer=streamer, **kwargs)
    assert streamer.got == []


def test_a_number_of_drafts_is_no_truth_value():
    with pytest.raises(ValueError, match="full_drafts=True"):
        oasis_hf.generate(tiny("llama"), prompt(1, 5), verify="full", full_drafts=True)


@pytest.mark.parametrize("verify", ["sparse", "full"])
def test_sampled_rows_that_end_at_their_own_time(verify):
    """Rows that are left out, or that draft less than others, give probabilities too, which nothing is drawn from."""
    model, inputs = tiny("llama"), INPUTS["padded"]()
    torch.manual_seed(2)
    cache = OasisCache(model, budget=48, speculate=True, draft_tokens=3)
    out = oasis_hf.generate(
        model, **inputs, past_key_values=cache, max_new_tokens=60, do_sample=True, temperature=0.5, verify=verify,
        eos_token_id=list(range(3, 9)), pad_token_id=0,
    )  # fmt: skip
    assert len({int((row[50:] != 0).sum()) for row in out}) > 1
    real = (inputs["attention_mask"].sum(1) + (out[:, 50:] != 0).sum(1)).tolist()
    longest = max((out[row, 50:] != 0).sum() for row in range(3))
    held = [n - int((out[row, 50:] != 0).sum() == longest) for row, n in enumerate(real)]
    assert cache.state.rows.tokens == held


@pytest.mark.parametrize("drafts", [1, 6, 50])
def test_full_drafts_are_no_more_than_could_follow(drafts):
    model, inputs = tiny("llama"), INPUTS["padded"]()
    end = int(truth(model, inputs)[0][1, 58])
    want, _ = truth(model, inputs, max_new_tokens=30, eos_token_id=end)
    longest, steps = [], []
    cache = OasisCache(model, budget=48, host_capacity_tokens=79)
    make_room = OasisCache._make_room
    cache._make_room = lambda *args: longest.append(max(make_room(cache, *args))) or [longest[-1]] * 3
    run = cache.stepper.run
    cache.stepper.run = lambda inner, call, *args: steps.append(call["input_ids"].shape[1]) or run(inner, call, *args)
    got = oasis_hf.generate(
        model, **inputs, past_key_values=cache, max_new_tokens=30, do_sample=False, verify="full", full_drafts=drafts,
        eos_token_id=end,
    )  # fmt: skip
    assert torch.equal(got, want) and max(longest) <= 5
    assert drafts < 50 or max(steps[1:]) == 29  # a first round that drafts all there is room for


# -- what it waits for -------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Where this package reads what only the device knows. Pages and the rows' masks are the host's own."""

    HOST = ("/store/", "/rows.py", "/ops/")

    def __init__(self, patch):
        super().__init__()
        self.seen, mode = [], self
        for name in ("tolist", "cpu", "numpy"):
            plain = getattr(torch.Tensor, name)

            def counted(tensor, *args, plain=plain, name=name, **kwargs):
                mode.note(name)
                return plain(tensor, *args, **kwargs)

            patch.setattr(torch.Tensor, name, counted)

    def note(self, name):
        frame = sys._getframe(1)
        while frame is not None and "/oasis_hf/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and not any(part in frame.f_code.co_filename for part in self.HOST):
            self.seen.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in args[1]
        )
        if name in (*SYNCS, "multinomial") or masks:  # which reads whether it was given probabilities
            self.note(name)
        return func(*args, **(kwargs or {}))


class NotAgain(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


def reads_of(name, monkeypatch):
    """What the host reads in each call of a function of `generation`: a list that fills."""
    from oasis_hf import generation

    calls, plain = [], getattr(generation, name)

    def counted(*args):
        with monkeypatch.context() as patch, Reads(patch) as reads:
            out = plain(*args)
        calls.append(reads.seen)
        return out

    monkeypatch.setattr(generation, name, counted)
    return calls


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"do_sample": True, "temperature": 0.5}, {"logits_processor": LogitsProcessorList([NotAgain()])}],
    ids=["greedy", "sampled", "a processor"],
)
def test_a_round_reads_once(kwargs, monkeypatch):
    model, inputs = tiny("llama"), left_padded([100, 40, 71])
    end = int(truth(model, inputs)[0][1, 108])
    rounds = reads_of("_round", monkeypatch)
    cache = OasisCache(model, budget=64, speculate=True, draft_tokens=2)
    oasis_hf.generate(
        model, **inputs, past_key_values=cache, **{"max_new_tokens": 60, "do_sample": False, **kwargs},
        eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    assert len(rounds) > 15 and cache.stats()["fetched"].sum() > 0
    for seen in rounds:
        assert len(seen) == 1 and "tolist" in seen[0] and "text.py" in seen[0], seen


@pytest.mark.parametrize("sample", [False, True])
def test_a_full_round_reads_once(sample, monkeypatch):
    model, inputs = tiny("llama"), left_padded([100, 40, 71])
    monkeypatch.setattr(Reads, "HOST", (*Reads.HOST, "/cache.py", "/padding.py", "/state.py"))  # the rows' masks too
    rounds = reads_of("verified", monkeypatch)
    cache = OasisCache(model, budget=64)
    oasis_hf.generate(
        model, **inputs, past_key_values=cache, verify="full", full_drafts=4, max_new_tokens=40, do_sample=sample
    )
    assert len(rounds) > 4
    for seen in rounds:
        assert len(seen) == 1 and "text.py" in seen[0], seen
