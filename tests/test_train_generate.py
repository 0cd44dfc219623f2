"""The target's own responses: the tokens that `model.generate` gives, whatever the batch."""

import pytest
import torch
from tiny import prompt, tiny
from transformers import DynamicCache

from oasis_hf.train import generate as made
from oasis_hf.train.config import TrainError
from oasis_hf.train.generate import Generator, Sample, loop_start


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_greedy_is_generates_greedy_in_rows_that_are_refilled(family):
    model = tiny(family)
    prompts = [prompt(1, n, seed=n)[0].tolist() for n in (2, 30, 9, 17, 40, 3, 12)]
    samples = Generator(model, rows=3, places=72, new=20).run(prompts, [0.0] * len(prompts))
    for ids, sample in zip(prompts, samples):
        cache = DynamicCache(config=model.config)
        want = model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert sample == Sample(want[0].tolist(), len(ids))


def test_an_end_ends_a_row(monkeypatch):
    model = tiny("llama")
    prompts = [prompt(1, 9, seed=n)[0].tolist() for n in range(5)]
    whole = Generator(model, rows=5, places=40, new=20).run(prompts, [0.0] * 5)
    end = whole[0].ids[9 + 3]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    cut = Generator(model, rows=2, places=40, new=20).run(prompts, [0.0] * 5)
    for a, b in zip(whole, cut):
        response = a.ids[9:]
        assert b.ids[9:] == (response[: response.index(end) + 1] if end in response else response)


def test_sampling_is_by_temperature_and_seed():
    model, ids = tiny("llama"), prompt(1, 6)[0].tolist()
    with torch.no_grad():
        share = (model(torch.tensor([ids])).logits[0, -1] / 0.7).softmax(-1)

    def first(seed):
        torch.manual_seed(seed)
        runs = Generator(model, rows=500, places=8, new=2).run([ids] * 500, [0.7] * 499 + [0.0])
        return torch.tensor([run.ids[6] for run in runs])

    drawn = first(0)
    assert torch.equal(drawn, first(0)) and not torch.equal(drawn, first(1))
    assert drawn[-1] == share.argmax()
    top = share.argmax()
    got = float((drawn[:-1] == top).float().mean())
    assert abs(got - float(share[top])) < 0.07, (got, float(share[top]))


def test_loops_are_cut_after_a_round():
    text = list(range(100, 150))
    assert loop_start(text + [7, 8, 9] * 40) == 50 + 32
    assert loop_start(text * 2) == 100, "twice is no loop"
    assert loop_start([5] * 95) == 95
    model, ids = tiny("llama"), prompt(1, 6)[0].tolist()
    generator = Generator(model, rows=1, places=206, new=200)
    always = torch.tensor([11])
    generator._forward, step = lambda: step(), generator._forward

    def loops():
        step_out = step_forward()
        return step_out

    def step_forward():
        made_before = generator.slots.made.clone()
        real()
        generator.slots.out.scatter_(1, made_before[:, None], always[:, None])

    real, step = step, loops
    (sample,) = generator.run([ids], [0.0])
    assert sample.ids == ids + [11] * 32
    assert int(generator.slots.made) < 120, "it went on"


def test_what_is_late_is_cut_or_not_begun():
    model = tiny("llama")
    prompts = [prompt(1, 6, seed=n)[0].tolist() for n in range(4)]
    seen = []
    samples = Generator(model, rows=2, places=106, new=100).run(prompts, [0.0] * 4, lambda: True, seen.append)
    assert samples == [None] * 4 and seen == []


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(TrainError, match="does not fit a slot of 20"):
        Generator(tiny("llama"), 1, 20, 10).run([[1] * 11], [0.0])


def test_repeats_says_every_period():
    assert all(made.repeats(torch.arange(made.LOOP)[None] % period) for period in range(1, made.LOOP // 3 + 1))
    assert not made.repeats(torch.arange(made.LOOP)[None] % (made.LOOP // 3 + 1))
