"""A cache from a dense prefill goes on as one that has read the whole prompt."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from heads import TENSORS, ids, plain_config, step, target, write
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache, StaticCache

import oasis_hf
from oasis_hf import Eagle3Drafter, OasisCache, OracleDrafter, from_dense, mode_config
from oasis_hf.attach import cache_name
from oasis_hf.branching import tapped

LENGTHS, STEPS = [150, 61, 97], 30

pytestmark = pytest.mark.core


@torch.no_grad()
def forward(model, cache, tokens, mask=None):
    """Logits of tokens `[B, n]`; mask: `[B, all columns]`."""
    call = {cache_name(model): cache}
    if mask is not None:
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        call.update(attention_mask=mask, position_ids=position)
    return model(tokens, **call).logits


def dense(model, tokens, mask=None, config=True):
    past = DynamicCache(config=model.config) if config else DynamicCache()
    forward(model, past, tokens, mask)
    return past


def texts(lengths=LENGTHS):
    inputs = left_padded(lengths)
    more = prompt(len(lengths), STEPS, 1)
    return torch.cat((inputs["input_ids"], more), 1), torch.nn.functional.pad(
        inputs["attention_mask"], (0, STEPS), value=1
    )


def decoded(model, cache, tokens, mask, start, length):
    """Logits of the prompt's last token and of steps: columns from `start` to `length` are the prompt's rest."""
    out = [forward(model, cache, tokens[:, start:length], mask[:, :length])[:, -1:]]
    for at in range(length, tokens.shape[1]):
        out.append(forward(model, cache, tokens[:, at : at + 1], mask[:, : at + 1]))
    return torch.cat(out, 1)


def same(model, config, rest, lengths=LENGTHS, with_config=True, **given):
    tokens, mask = texts(lengths)
    length, padded = max(lengths), len(set(lengths)) > 1
    cut = length - rest
    wanted = decoded(model, whole := OasisCache(model, config, **given), tokens, mask, 0, length)
    past = dense(model, tokens[:, :cut], mask[:, :cut], with_config)
    cache = from_dense(
        model, past, config, input_ids=tokens[:, :cut], attention_mask=mask[:, :cut] if padded else None, **given
    )
    assert cache.get_seq_length() == cut and cache.state.rows.tokens == [max(0, n - rest) for n in lengths]
    got = decoded(model, cache, tokens, mask, cut, length)
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)
    for name, value in whole.stats().items():
        assert torch.equal(value, cache.stats()[name]), name
    assert cache.memory()["host"] == whole.memory()["host"]
    return whole, cache


@pytest.mark.parametrize("mode", list(oasis_hf.MODES))
def test_it_goes_on_as_after_a_whole_prompt_in_every_mode(mode):
    whole, cache = same(tiny("llama"), mode_config(mode, 80), 9)
    moved = ("fetched", "on_demand")
    assert mode in ("dense", "window") or sum(int(cache.stats()[name].sum()) for name in moved) > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "mistral", "phi3", "gpt_oss"])
def test_it_goes_on_as_after_a_whole_prompt_in_every_family(family):
    """Those with sliding windows of 24 too, of which the dense cache keeps 23 tokens."""
    if family == "mistral":  # no layer is sparse
        model, (tokens, mask) = tiny(family), texts()
        wanted = decoded(model, OasisCache(model, budget=80), tokens, mask, 0, 150)
        cache = from_dense(model, dense(model, tokens[:, :141], mask[:, :141]), attention_mask=mask[:, :141], budget=80)
        torch.testing.assert_close(decoded(model, cache, tokens, mask, 141, 150), wanted, atol=2e-4, rtol=1e-4)
        return
    same(tiny(family), mode_config("oasis", 80), 9)


@pytest.mark.parametrize(
    "lengths, knobs",
    [
        ([150, 150], {"tokens_per_summary": 4}),
        ([150, 20, 33], {"scorer": "minmax", "summary_dtype": "model"}),
        ([12], {"tokens_per_summary": 16}),
    ],
)
def test_rows_and_summaries(lengths, knobs):
    """Rows that the dense part gave to the middle of a block, and rows that begin in the rest."""
    same(tiny("llama"), mode_config("previous", 64, **knobs), 8, lengths)
    if len(lengths) > 1:
        same(tiny("gemma3"), mode_config("oasis", 64, **knobs), 40, lengths, with_config=False)


@pytest.mark.parametrize("rest", [1, 22])
def test_as_few_tokens_as_one_may_be_left(rest):
    """One token is a prompt's too, though it stands alone; drafts come from the text that the dense cache read."""
    same(tiny("llama"), mode_config("on_demand", 80), rest)
    same(tiny("gemma3"), mode_config("previous", 80, speculate=True, draft_tokens=2), rest, drafter="prompt_lookup")


def test_generate_takes_it_from_there():
    model, tokens = tiny("qwen3"), prompt(1, 200)
    call = dict(max_new_tokens=24, do_sample=False)
    past = dense(model, tokens[:, :-4])
    runs = [(model.generate, {}), (functools.partial(oasis_hf.generate, model), {"speculate": True})]
    for run, knobs in runs:
        whole = OasisCache(model, budget=96, **knobs)
        branch = from_dense(model, past, budget=96, input_ids=tokens[:, :-4], **knobs)
        wanted, got = (run(tokens, **{cache_name(model): cache}, **call) for cache in (whole, branch))
        assert torch.equal(got, wanted) and branch.stepper.forwards == whole.stepper.forwards


def test_one_past_serves_many_and_stays_as_it_was():
    model, (tokens, mask) = tiny("gemma3"), texts()
    past = dense(model, tokens[:, :140], mask[:, :140])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    given = dict(attention_mask=mask[:, :140], input_ids=tokens[:, :140])
    caches = [from_dense(model, past, mode_config(mode, 64), **given) for mode in ("quest", "window", "quest")]
    branch = copy.deepcopy(caches[2])
    outs = [decoded(model, cache, tokens, mask, 140, 150) for cache in (*caches, branch)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[0], outs[3]) and not torch.equal(outs[0], outs[1])
    for layer, (keys, values) in zip(past.layers, before):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    with torch.inference_mode():
        inside = from_dense(model, dense(model, tokens[:, :140], mask[:, :140]), mode_config("quest", 64), **given)
        assert torch.equal(decoded(model, inside, tokens, mask, 140, 150), outs[0])


def test_the_rest_of_the_prompt_comes_first():
    model, tokens = tiny("llama"), prompt(1, 100)
    cache = from_dense(model, dense(model, tokens), budget=48)
    for mode in ("decode", "verify"):
        with (
            cache.mode(mode),
            pytest.raises(ValueError, match=r"holds 100 tokens whose prompt is not yet at its end: give it"),
        ):
            forward(model, cache, prompt(1, 1, 3))
    cache.crop(-20)
    out = forward(model, cache, prompt(1, 1, 3))
    wanted = forward(model, DynamicCache(), torch.cat((tokens[:, :80], prompt(1, 1, 3)), 1))[:, -1:]
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    assert cache.state.first_due
    forward(model, cache, prompt(1, 1, 4))
    assert not cache.state.first_due and cache.stats()["first"].sum() == 3 * 2 * 3
    cache.reset()
    assert cache.get_seq_length() == 0 and forward(model, cache, tokens).isfinite().all()


def test_a_sliding_layer_is_not_cropped_behind_what_it_was_given():
    model, tokens = tiny("gemma3"), prompt(1, 130)
    cache = from_dense(model, dense(model, tokens[:, :100]), budget=48)
    forward(model, cache, tokens[:, 100:120])
    cache.crop(-20)
    with pytest.raises(ValueError, match="reaches behind what a sliding-window layer keeps"):
        cache.crop(-1)
    got = forward(model, cache, tokens[:, 100:130])
    torch.testing.assert_close(got, forward(model, DynamicCache(), tokens)[:, 100:], atol=2e-4, rtol=1e-4)
    whole = from_dense(model, dense(model, tokens[:, :100], config=False), budget=48)
    forward(model, whole, tokens[:, 100:120])
    whole.crop(-40)
    torch.testing.assert_close(forward(model, whole, tokens[:, 80:130])[:, -30:], got, atol=2e-4, rtol=1e-4)


# -- drafters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


def test_a_head_that_watched_the_dense_prefill(head):
    """Its keys, values and states are those of a whole prompt."""
    model, tokens, more = target(), ids(2, 70), ids(2, 20, 1)
    drafter = Eagle3Drafter.from_pretrained(head, model)
    past, at = DynamicCache(config=model.config), 0
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    with tapped(model, drafter) as hidden:
        for count in (25, 35):
            forward(model, past, tokens[:, at : at + count])
            at += count
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    whole = OasisCache(model, budget=48, drafter=head)
    forward(model, whole, tokens)
    caches = [
        from_dense(model, past, budget=48, drafter=drafter, input_ids=tokens[:, :60], hidden=given)
        for given in (hidden, hidden, None)
    ]
    assert drafter.past is None and len({id(cache.drafter) for cache in caches}) == 3
    assert all(cache.drafter.head is drafter.head for cache in caches)
    for cache in caches:
        forward(model, cache, tokens[:, 60:])
    for at, cache in enumerate((whole, *caches)):
        known = cache.drafter.past.at
        assert (known >= 0).sum(1).tolist() == ([69, 69] if at < 3 else [9, 9])
        step(cache, more)
    for cache in caches[:2]:
        for have, wanted in zip(cache.drafter.past.tensors, whole.drafter.past.tensors):
            torch.testing.assert_close(have, wanted, atol=1e-4, rtol=1e-4)
    # What it has not seen is missing, and all it has seen since is there.
    assert (caches[2].drafter.past.at >= 0).sum(1).tolist() == [29, 29]


def test_n_grams_are_looked_up_in_what_the_dense_cache_read():
    """The rest's tokens stand in the part before them, and nowhere else."""
    model, past_ids, rest = tiny("llama"), prompt(2, 60), prompt(2, 60)[:, 20:26]
    past, new = dense(model, past_ids), prompt(2, 60)[:, 26]
    caches = [from_dense(model, past, drafter="prompt_lookup", input_ids=ids) for ids in (past_ids, None)]
    found = []
    for cache in (*caches, whole := OasisCache(model, drafter="prompt_lookup")):
        forward(model, cache, rest if cache is not whole else torch.cat((past_ids, rest), 1))
        found.append(cache.drafter.propose(new, cache.state.rows.lengths(cache.device), 2))
    assert found[0].found.all() and not found[1].found.any()
    assert torch.equal(found[0].tokens, past_ids[:, 27:29]) and torch.equal(found[0].tokens, found[2].tokens)


def test_drafters_of_the_caller():
    model, tokens = tiny("llama"), prompt(2, 140)
    past, told = dense(model, tokens[:, :90]), OracleDrafter(tokens)
    outs = []
    for cache in (
        OasisCache(model, budget=64, lookahead="oracle", drafter=told),
        from_dense(model, past, budget=64, lookahead="oracle", drafter=told, input_ids=tokens[:, :90]),
    ):
        start = cache.get_seq_length()
        out = [forward(model, cache, tokens[:, start:100])[:, -1:]]
        outs.append(torch.cat([*out, *(forward(model, cache, tokens[:, at : at + 1]) for at in range(100, 140))], 1))
    torch.testing.assert_close(*outs, atol=2e-4, rtol=1e-4)
    with tapped(model, told) as hidden:
        forward(model, DynamicCache(), tokens)
    assert hidden == {}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_it_does_not_take(head):
    model, tokens = tiny("llama"), prompt(2, 40)
    past = dense(model, tokens)

    def refused(message, model=model, past=past, **given):
        with pytest.raises(ValueError, match=message) as error:
            from_dense(model, past, **given)
        assert "\n" not in str(error.value)

    refused(
        "takes a DynamicCache that is not offloaded, not StaticCache", past=StaticCache(model.config, max_cache_len=64)
    )
    refused("takes a DynamicCache that is not offloaded, not DynamicCache", past=DynamicCache(offloading=True))
    refused("takes a DynamicCache that is not offloaded, not OasisCache", past=OasisCache(model))
    refused("past holds 0 tokens in 0 layers, but the model has 3", past=DynamicCache())
    refused("past holds 40 tokens in 3 layers, but the model has 4", model=tiny("gemma3"))
    odd = copy.deepcopy(past)
    odd.layers[1].keys = odd.layers[1].keys[:, :, :30]
    refused("past has a DynamicLayer of 30 tokens as layer 1, and layer 0 holds 40", past=odd)
    short = dense(tiny("mistral"), tokens)
    refused("past keeps 23 of 40 tokens in layer 0, and the model's attention needs 40", past=short)
    refused(r"attention_mask has shape \[2, 41\], but past holds 2 rows of 40", attention_mask=torch.ones(2, 41))
    refused(r"input_ids has shape \[1, 40\], but past holds 2 rows of 40", input_ids=tokens[:1])
    own = target()
    refused(
        r"hidden must have layers \[", model=own, past=dense(own, tokens), drafter=head, hidden={}, input_ids=tokens
    )
    refused("OasisConfig.budget=1 is not allowed", budget=1)
