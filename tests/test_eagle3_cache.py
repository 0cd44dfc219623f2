"""`Eagle3Drafter` follows its cache: after whatever that does, its proposals are those over the tokens that remain; and
it stands in captured steps."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from heads import (
    KEPT,
    TAPS,
    TENSORS,
    H,
    agree,
    ids,
    noted,
    opened,
    plain_config,
    run,
    speculators_config,
    speculators_name,
    states,
    step,
    straight,
    target,
    wanted,
    weights,
    write,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replays import fake_cuda, replays  # noqa: F401
from tiny import tiny

from oasis_hf import DrafterError, OasisCache, detach
from oasis_hf.capturable import hooked
from oasis_hf.drafters import Eagle3Drafter
from oasis_hf.drafters.eagle3 import fused
from oasis_hf.drafters.taps import Tap
from oasis_hf.fused import fused_layers

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


# -- whatever else a cache does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, KEPT - 1])
def test_crop_by_a_few_goes_on_at_once(folder, count):
    prompt, more = ids(2, 20), ids(2, 9, 1)
    cache = opened(folder, prompt)
    step(cache, more)
    cache.crop(-count)
    texts = [text[: 29 - count] for text in torch.cat((prompt, more), 1).tolist()]
    agree(cache, texts)
    step(cache, ids(2, 2, 3))
    agree(cache, [text + new for text, new in zip(texts, ids(2, 2, 3).tolist())])


def test_crop_by_more_finds_nothing_once(folder):
    prompt = ids(2, 60)
    cache = opened(folder, prompt)
    cache.crop(-40)
    texts = prompt[:, :20].tolist()
    agree(cache, texts, found=[False, False])
    step(cache, ids(2, 1, 3))
    agree(cache, [text + new for text, new in zip(texts, ids(2, 1, 3).tolist())], missing=[19])
    cache.crop(-21)
    run(cache, prompt[:, :9])
    agree(cache, prompt[:, :9].tolist())


def test_tokens_that_a_mask_hides_at_the_end(folder):
    """A finished row's padding, before the next turn."""
    prompt, more, turn = ids(2, 18), ids(2, 6, 1), ids(2, 4, 2)
    cache = opened(folder, prompt)
    step(cache, more)
    mask = torch.ones(2, 28, dtype=torch.int64)
    mask[1, 20:24] = 0
    position = (mask.cumsum(1) - 1)[:, -4:]
    run(cache, turn, attention_mask=mask, position_ids=position)
    whole = torch.cat((prompt, more, turn), 1)
    agree(cache, [row[kept.bool()].tolist() for row, kept in zip(whole, mask)])


def test_tokens_that_a_mask_hides_in_the_middle(folder):
    prompt = ids(2, 18)
    cache = opened(folder, prompt)
    cache.drafter.hide(1, 7, torch.tensor([False, True] + [True] * 9))
    draft = cache.drafter.propose(torch.tensor([7, 8]), torch.tensor([18, 17]), 2)
    assert draft.found.tolist() == [True, False]
    assert draft.tokens[0].tolist() == wanted(prompt[0].tolist() + [7], 2)
    past = cache.drafter.past
    assert int(past.at[1, : past.ring].max()) == 5 and int(past.state_at[1].max()) <= 6


def test_rows_are_chosen_repeated_and_dropped(folder):
    prompt, more = ids(3, 20), ids(3, 3, 1)
    cache = opened(folder, prompt)
    step(cache, more)
    texts = torch.cat((prompt, more), 1).tolist()
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    texts = [texts[2], texts[2], texts[0]]
    agree(cache, texts)
    step(cache, more)
    texts = [text + new for text, new in zip(texts, more.tolist())]
    cache.batch_repeat_interleave(2)
    texts = [text for text in texts for _ in range(2)]
    agree(cache, texts)
    cache.batch_select_indices(torch.tensor([4, 1]))
    agree(cache, [texts[4], texts[1]])
    step(cache, ids(2, 2, 6))
    agree(cache, [texts[4] + ids(2, 2, 6)[0].tolist(), texts[1] + ids(2, 2, 6)[1].tolist()])


def test_reset_and_another_batch(folder):
    cache = opened(folder, ids(2, 30))
    held = cache.drafter.past
    for rows in (2, 3):
        cache.reset()
        assert cache.drafter.propose(torch.tensor([5] * 2), torch.tensor([30] * 2), 1).found.tolist() == [False] * 2
        prompt = ids(rows, 9, rows)
        run(cache, prompt)
        agree(cache, prompt.tolist())
        assert (cache.drafter.past is held) == (rows == 2), "buffers stay for the same number of rows"


def test_branches_go_their_own_ways(folder):
    prompt = ids(2, 20)
    cache = opened(folder, prompt)
    step(cache, ids(2, 2, 1))
    branch = copy.deepcopy(cache)
    texts = [text + new for text, new in zip(prompt.tolist(), ids(2, 2, 1).tolist())]
    for seed in (3, 5):  # in turns
        step(cache, ids(2, 2, seed))
        step(branch, ids(2, 2, seed + 1))
    for each, seeds in ((cache, (3, 5)), (branch, (4, 6))):
        agree(
            each, [t + ids(2, 2, seeds[0])[i].tolist() + ids(2, 2, seeds[1])[i].tolist() for i, t in enumerate(texts)]
        )
    assert branch.drafter.head is cache.drafter.head


@pytest.mark.newest
@settings(max_examples=15)
@given(st.data())
def test_it_follows_everything_a_cache_does(folder_of_module, data):
    texts = ids(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), 1).tolist()
    cache = opened(folder_of_module, torch.tensor(texts))
    for number in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["step", "turn", "crop", "select", "fork", "reset"]))
        if kind in ("step", "turn"):
            new = ids(len(texts), 1 if kind == "step" else data.draw(st.integers(2, 9)), 20 + number)
            step(cache, new) if kind == "step" else run(cache, new)
            texts = [text + tokens for text, tokens in zip(texts, new.tolist())]
        elif kind == "crop":
            count = data.draw(st.integers(1, min(KEPT - 1, len(texts[0]))))
            if count == len(texts[0]):
                continue
            cache.crop(-count)
            texts = [text[:-count] for text in texts]
        elif kind == "select":
            index = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=3))
            cache.batch_select_indices(torch.tensor(index))
            texts = [texts[i] for i in index]
        elif kind == "fork":
            other, cache = cache, copy.deepcopy(cache)
            step(other, ids(len(texts), 2, 40))
        else:
            cache.reset()
            texts = ids(len(texts), 5, 50 + number).tolist()
            run(cache, torch.tensor(texts))
        if data.draw(st.booleans()):
            agree(cache, texts, count=2)
    agree(cache, texts)


@pytest.fixture(scope="module")
def folder_of_module(folder):
    return folder


def test_an_interrupted_step_leaves_no_trace(folder):
    prompt = ids(2, 20)
    cache = opened(folder, prompt, speculate=True)
    step(cache, ids(2, 1, 1))
    layer = target().model.layers[6]

    def stop(*args):
        raise KeyboardInterrupt

    for tokens in (ids(2, 1, 9), ids(2, 5, 9)):  # a step, and a turn
        handle = layer.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            step(cache, tokens) if tokens.shape[1] == 1 else run(cache, tokens)
        handle.remove()
        agree(cache, [text + new for text, new in zip(prompt.tolist(), ids(2, 1, 1).tolist())])
    step(cache, ids(2, 1, 4))  # after the turn, and what it left of its prompt
    drafts = cache.stepper.tail.tokens[:, 1:2]
    cache.commit([0])
    agree(cache, torch.cat((prompt, ids(2, 1, 1), ids(2, 1, 4), drafts), 1).tolist())
    run(cache, ids(2, 3, 2))
    agree(cache, torch.cat((prompt, ids(2, 1, 1), ids(2, 1, 4), drafts, ids(2, 3, 2)), 1).tolist())


def test_what_an_undone_replay_noted_is_not_taken_for_embeddings(folder):
    """A replay that is interrupted behind its end has noted a token that is not there."""
    prompt = ids(2, 12)
    cache = opened(folder, prompt)
    cache.drafter.hold(torch.tensor([12, 12]), 1)
    cache.drafter.note(ids(2, 1, 3), torch.tensor([12, 12]))
    with torch.no_grad(), cache.mode("prefill"):
        cache.model(inputs_embeds=target().get_input_embeddings()(ids(2, 1, 4)), past_key_values=cache)
    texts = torch.cat((prompt, ids(2, 1, 4)), 1).tolist()
    agree(cache, texts, found=[False, False])


# -- a captured step --------------------------------------------------------------------------------------------------


@pytest.mark.newest
@pytest.mark.parametrize("knobs", [{"budget": 64}, {"budget": 64, "speculate": True, "draft_tokens": 2}], ids=str)
def test_a_replayed_step_proposes_what_the_eager_one_does(folder, replays, knobs):  # noqa: F811
    text, outs, seen, caches = ids(2, 160, 2), [], [], []
    for graphs in (False, True):
        cache = OasisCache(target(), drafter=folder, graphs=graphs, compile_after=None, **knobs)
        seen.append(noted(cache.drafter))
        run(cache, text[:, :90])
        buffers = [tensor.data_ptr() for tensor in (*cache.drafter.past.tensors, cache.drafter.tapped)]
        logits = [run(cache, text[:, t : t + 1], position_ids=torch.full((2, 1), t)).logits for t in range(90, 120)]
        cache.crop(-4)
        more = [run(cache, text[:, t : t + 1], position_ids=torch.full((2, 1), t)).logits for t in range(116, 150)]
        assert buffers == [tensor.data_ptr() for tensor in (*cache.drafter.past.tensors, cache.drafter.tapped)]
        outs.append(torch.cat(logits + more, 1))
        caches.append(cache)
    assert caches[1].graphs.refused is None and caches[1].graphs.replays > 40 and caches[1].graphs.captures <= 3
    assert torch.equal(*outs) and seen[0] == seen[1]
    assert all(torch.equal(value, caches[1].stats()[name]) for name, value in caches[0].stats().items())


def test_what_is_used_in_a_captured_step_is_told(folder):
    cache = opened(folder, ids(2, 20))
    held = cache.drafter.hold(torch.tensor([20, 20]), 1)
    again = cache.drafter.hold(torch.tensor([21, 21]), 1)
    assert all(a is b for a, b in zip(held, again)) and len(held) == 6


def test_compiled_layers_are_tapped(folder):
    """Of a model of its own: its projections are joined."""
    model, text = copy.deepcopy(target()), ids(2, 24)
    cache = OasisCache(model, drafter=str(folder), graphs=False)
    run(cache, text[:, :20])
    with fused_layers(model).placed():
        step(cache, text[:, 20:])
    agree(cache, text.tolist())


def test_taps_do_not_keep_a_step_from_being_captured(folder):
    cache = opened(folder, ids(1, 5))
    assert hooked(cache.model) is None
    handle = cache.model.model.layers[1].register_forward_pre_hook(lambda *args: None)
    assert "model.layers.1 has a forward hook" in hooked(cache.model)
    handle.remove()


# -- hooks ------------------------------------------------------------------------------------------------------------


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def test_hooks_are_one_a_layer_and_go_with_the_last_cache(folder):
    model = target()
    gc.collect()
    detach(model)
    caches = [opened(folder, ids(1, 6)) for _ in range(2)] + [OasisCache(model)]
    assert sorted(hook.index for hook in hooks(model)) == list(TAPS) and all(type(hook) is Tap for hook in hooks(model))
    gone = [weakref.ref(thing) for cache in caches for thing in (cache, cache.drafter)]
    gc.disable()
    try:
        del caches
        assert all(ref() is None for ref in gone), "kept by a cycle"
    finally:
        gc.enable()
    assert hooks(model) == [] and "forward" not in model.__dict__
    cache = opened(folder, ids(1, 6))
    detach(model)
    assert hooks(model) == [] and not any(module._forward_pre_hooks_with_kwargs for module in model.modules())
    del cache


def test_each_cache_gets_its_own_states(folder):
    one, two = opened(folder, ids(2, 20)), opened(folder, ids(2, 14, 1))
    third = OasisCache(target(), drafter="previous")
    for seed in range(2, 5):
        for cache in (one, two, third):
            step(cache, ids(2, 1, seed)) if cache.get_seq_length() else run(cache, ids(2, 8, seed))
        target()(ids(2, 11, seed))  # and what carries no cache passes by
    more = torch.cat([ids(2, 1, seed) for seed in range(2, 5)], 1)
    agree(one, torch.cat((ids(2, 20), more), 1).tolist())
    agree(two, torch.cat((ids(2, 14, 1), more), 1).tolist())


def test_the_input_of_the_final_norm_is_a_tap(tmp_path):
    taps = (1, 4, 8)
    folder = write(tmp_path, plain_config(eagle_aux_hidden_state_layer_ids=list(taps)), TENSORS)
    prompt = ids(1, 11)
    cache = opened(folder, prompt)
    draft = cache.drafter.propose(torch.tensor([7]), torch.tensor([11]), 3)
    tokens = prompt[0].tolist() + [7]
    assert draft.tokens[0].tolist() == straight().drafts(tokens, states(target(), tokens[:-1], taps), 3)[0]


def test_another_model_is_refused(folder):
    drafter = Eagle3Drafter.from_pretrained(folder, target())
    with pytest.raises(DrafterError, match="made for another model: make one with this model"):
        OasisCache(tiny("llama"), drafter=drafter)


def test_dtypes(folder):
    model = copy.deepcopy(target()).to(torch.bfloat16)
    cache = OasisCache(model, drafter=folder, speculate=True)
    model.generate(ids(2, 20), past_key_values=cache, max_new_tokens=5, do_sample=False)
    past = cache.drafter.past
    assert past.keys.dtype == past.states.dtype == cache.drafter.tapped.dtype == torch.bfloat16
    assert cache.drafter.head.inv_freq.dtype == torch.float32
    exact = Eagle3Drafter.from_pretrained(folder, target()).head.inv_freq
    assert torch.equal(cache.drafter.head.inv_freq, exact), "positions are large: nothing is rounded"


def test_memory_is_told(folder):
    cache = opened(folder, ids(2, 20))
    head = sum(value.nbytes for name, value in TENSORS.items() if name not in ("d2t", "t2d"))
    state = (cache.drafter.window + KEPT + 8) * 2 * (2 * 2 * 32 * 4 + 8) + 2 * 17 * (H * 4 + 8) + 3 * 2 * 8 * H * 4
    assert cache.memory()["drafter"] == head + state and "+ drafter" in cache.report()


def test_a_speculators_head_in_a_cache(tmp_path):
    tensors = weights(embeddings=True, fc_norm=True, qk_norm=True)
    config = speculators_config({"model_type": "qwen3"}, norm_before_residual=True, fc_norm=True, norm_output=True)
    folder = write(tmp_path, config, tensors, rename=speculators_name)
    prompt = ids(1, 13)
    cache = opened(folder, prompt)
    step(cache, ids(1, 2, 1))
    tokens = torch.cat((prompt, ids(1, 2, 1)), 1)[0].tolist() + [9]
    draft = cache.drafter.propose(torch.tensor([9]), torch.tensor([15]), 4)
    like = straight(tensors=tensors, before_residual=True, norm_output=True)
    assert draft.tokens[0].tolist() == like.drafts(tokens, states(target(), tokens[:-1], TAPS), 4)[0]


@pytest.mark.newest
def test_rows_that_commit_their_own_number_of_drafts(folder):
    prompt, new = ids(3, 20), ids(3, 1, 1)
    cache = opened(folder, prompt, speculate=True, draft_tokens=2)
    texts, rows = [text + own for text, own in zip(prompt.tolist(), new.tolist())], cache.state.rows
    with rows.pacing(cache.device):
        step(cache, new)
        drafts = cache.stepper.memo.tokens.tolist()
        cache.commit_rows(torch.tensor([2, 0, 1]))
        texts = [text + chain[:count] for text, chain, count in zip(texts, drafts, (2, 0, 1))]
        agree(cache, texts)
        rows.leave_out(torch.tensor([True, True, False]))
        more = ids(3, 1, 2)
        positions = rows.lengths(cache.device)[:, None].clone()
        run(cache, more, position_ids=positions)
        draft = int(cache.stepper.memo.tokens[1, 0])
        cache.commit_rows(torch.tensor([0, 1, 0]))
    assert rows.tokens == [24, 23, 22]
    agree(cache, [texts[0] + more[0].tolist(), texts[1] + more[1].tolist() + [draft], texts[2]])


# -- several candidates -----------------------------------------------------------------------------------------------


@pytest.mark.newest
def test_candidates_are_the_likeliest_of_the_first_logits(folder):
    prompt = ids(2, 20)
    cache = opened(folder, prompt)
    draft = cache.drafter.propose_several(torch.tensor([7, 8]), torch.tensor([20, 20]), 3, 2)
    for row, text in enumerate(prompt.tolist()):
        text = [*text, 7 + row]
        chain, logits = straight().drafts(text, states(target(), text[:-1], TAPS), 3)
        chances, index = logits[0].softmax(-1).topk(3)
        assert draft.tokens[row].tolist() == chain, "the chain goes on from the first"
        assert draft.others[row].tolist() == [int(i) + int(TENSORS["d2t"][i]) for i in index[1:]]
        torch.testing.assert_close(draft.probabilities[row], chances)
    assert draft.probabilities.dtype == torch.float32


@pytest.mark.newest
def test_a_candidate_that_is_accepted_leaves_its_own_state(folder):
    prompt, new = ids(2, 15, 3), ids(2, 1, 5)
    cache = opened(folder, prompt, speculate=True, draft_tokens=2, candidates=3)
    step(cache, new)
    tail = cache.stepper.tail
    assert tail.parents == (-1, 0, 1, 2, 0, 0) and tail.tokens.shape == (2, 6)
    with pytest.raises(ValueError, match="Draft 4 does not follow entry 1"):
        cache.commit([0, 4])
    cache.crop(-1)
    step(cache, (more := ids(2, 1, 6)))
    taken = cache.stepper.tail.tokens[:, 5:].tolist()
    cache.commit([4])
    texts = [a + b + c + d for a, b, c, d in zip(prompt.tolist(), new.tolist(), more.tolist(), taken)]
    agree(cache, texts)


@pytest.mark.newest
def test_rows_that_take_other_candidates_each_at_its_own_pace(folder):
    prompt, new = ids(3, 20), ids(3, 1, 1)
    cache = opened(folder, prompt, speculate=True, draft_tokens=2, candidates=3)
    rows = cache.state.rows
    with rows.pacing(cache.device):
        step(cache, new)
        stacked = cache.stepper.tail.tokens.tolist()
        cache.commit_rows(torch.tensor([1, 2, 1]), first=torch.tensor([5, 1, 4]))
    texts = [text + own for text, own in zip(prompt.tolist(), new.tolist())]
    texts = [texts[0] + [stacked[0][5]], texts[1] + stacked[1][1:3], texts[2] + [stacked[2][4]]]
    assert rows.tokens == [22, 23, 22]
    agree(cache, texts)


@pytest.mark.newest
def test_a_head_in_mixed_calls(folder):
    model, prompt = target(), ids(3, 15, 3)
    want = model.generate(prompt, max_new_tokens=30, do_sample=False)
    drafter = Told.from_pretrained(folder, model)
    drafter.texts = want.tolist()
    cache = OasisCache(model, drafter=drafter, speculate=True, draft_tokens=2, candidates=2)
    got = model.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert torch.equal(got, want) and cache.stepper.left_out > 5
    agree(cache, [text[:-1] for text in want.tolist()])


class Told(Eagle3Drafter):
    """Says what is true at some places, first or second; its own state is what its head says."""

    def propose_several(self, tokens, lengths, count, others):
        draft = super().propose_several(tokens, lengths, count, others)
        told, rivals = draft.tokens.clone(), None if draft.others is None else draft.others.clone()
        for row, text in enumerate(self.texts):
            length = int(lengths[row])
            after, place = text[length + 1 :][:count], (length * length + row) % 7 % 3
            if others and place == 1 and after:
                rivals[row, 0] = after[0]
            elif others and place == 0:
                told[row, : len(after)] = torch.tensor(after)
        return draft._replace(tokens=told, others=rivals)


@pytest.mark.parametrize("fails", [False, True])
def test_its_steps_are_compiled_where_layers_are(folder, monkeypatch, fails):
    """Those that can't be stay as they are, for good."""
    asked = []

    def compiled(piece):
        asked.append(piece)
        if fails:
            raise RuntimeError("no compiler\nhere")
        return piece

    monkeypatch.setattr(fused, "_compiled", compiled)
    cache = opened(folder, ids(2, 20))
    token, lengths = torch.tensor([3, 5]), torch.tensor([20, 20])
    plain = cache.drafter.propose(token, lengths, 3)
    assert not asked
    for _ in range(2):
        with cache.drafter.compiled():
            assert torch.equal(cache.drafter.propose(token, lengths, 3).tokens, plain.tokens)
    if fails:
        assert len(asked) == 1 and cache.drafter.pieces.failed == "RuntimeError: no compiler"
    else:
        assert set(asked) == {fused.project, fused.attend, fused.finish, fused.best}
        assert cache.drafter.pieces.failed is None
