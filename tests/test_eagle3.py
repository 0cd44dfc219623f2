"""`Eagle3Drafter` beside a cache: its proposals are those of the published forward over the tokens that are there,
computed in a straight line (tests/heads.py): prompts, chunks, steps, accepted drafts, sparse steps."""

from __future__ import annotations

import pytest
import torch
from heads import (
    KEPT,
    TAPS,
    TENSORS,
    agree,
    ids,
    noted,
    opened,
    plain_config,
    run,
    states,
    step,
    straight,
    target,
    wanted,
    write,
)  # fmt: skip

from oasis_hf import Drafter, OasisCache
from oasis_hf.drafters import Eagle3Drafter

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


# -- prompts, chunks, turns -------------------------------------------------------------------------------------------


def test_a_prompt_and_steps(folder):
    prompt, more = ids(2, 20), ids(2, 6, 1)
    cache = opened(folder, prompt)
    texts = prompt.tolist()
    agree(cache, texts)
    for at in range(6):
        step(cache, more[:, at : at + 1])
        texts = [text + [token] for text, token in zip(texts, more[:, at].tolist())]
        agree(cache, texts)


@pytest.mark.parametrize("sizes", [[1], [1, 1, 5], [7, 2, 16, 1, 3], [30, 40]], ids=str)
def test_chunks_and_turns_go_on(folder, sizes):
    prompt = ids(2, sum(sizes), 4)
    cache = opened(folder, None)
    with cache.mode("prefill"):
        for part in prompt.split(sizes, 1):
            run(cache, part)
    agree(cache, prompt.tolist())


def test_a_batch_with_padding_is_one_row_at_a_time(folder):
    prompt, mask = ids(3, 24), torch.ones(3, 24, dtype=torch.int64)
    mask[1, :9] = 0
    mask[2, :17] = 0
    mask[0, 20:] = 0  # on the right, and a hole
    mask[0, 4:6] = 0
    texts = [row[kept.bool()].tolist() for row, kept in zip(prompt, mask)]
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = opened(folder, None)
    run(cache, prompt, attention_mask=mask, position_ids=position)
    agree(cache, texts)
    more = ids(3, 5, 2)
    mask = torch.cat((mask, torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1] * 5])), 1)
    position = (mask.cumsum(1) - 1)[:, -5:].clamp(min=0)
    run(cache, more, attention_mask=mask, position_ids=position)
    texts = [text + row[kept.bool()].tolist() for text, row, kept in zip(texts, more, mask[:, -5:])]
    agree(cache, texts)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_a_window_that_the_text_outgrows(folder, window):
    cache = OasisCache(target(), drafter=Eagle3Drafter.from_pretrained(folder, target(), window=window), graphs=False)
    prompt, mask = ids(2, 90, 6), torch.ones(2, 90, dtype=torch.int64)
    mask[1, :13] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)
    run(cache, prompt, attention_mask=mask, position_ids=position)  # far more than the ring holds
    texts = [prompt[0].tolist(), prompt[1, 13:].tolist()]
    agree(cache, texts)
    more = ids(2, window + 30, 7)
    for at in range(more.shape[1]):
        run(cache, more[:, at : at + 1], position_ids=torch.tensor([[90 + at], [77 + at]]))
    texts = [text + row for text, row in zip(texts, more.tolist())]
    agree(cache, texts)
    cache.crop(-(KEPT - 1))
    agree(cache, [text[: 1 - KEPT] for text in texts])


def test_what_a_cache_does_not_tell(folder):
    """Embeddings, and rows that were not seen: nothing is found, and then only what was seen counts."""
    prompt = ids(2, 12)
    cache = opened(folder, None)
    with torch.no_grad():
        cache.model(inputs_embeds=target().get_input_embeddings()(prompt), past_key_values=cache)
    texts = prompt.tolist()
    agree(cache, texts, found=[False, False])
    more = ids(2, 3, 1)
    step(cache, more)
    texts = [text + tokens for text, tokens in zip(texts, more.tolist())]
    agree(cache, texts, missing=range(12))


# -- speculation ------------------------------------------------------------------------------------------------------


def all_agree(seen, texts, drafter):
    """texts: each row's whole text in the end. Returns in how many rows a draft was right."""
    right = 0
    for lengths, tokens, drafts in seen:
        for row, text in enumerate(texts):
            assert text[lengths[row]] == tokens[row]
            assert drafts[row] == wanted(text[: lengths[row] + 1], len(drafts[row]), drafter.window)
            right += drafts[row][0] == text[lengths[row] + 1] if lengths[row] + 1 < len(text) else 0
    return right


@pytest.mark.parametrize("how", ["plain", "chunked", "left padding", "beams", "samples", "a second turn"])
def test_generate_with_speculation(folder, how):
    model, prompt, mask = target(), ids(2, 21, 8), torch.ones(2, 21, dtype=torch.int64)
    kwargs = dict(max_new_tokens=14, do_sample=False)
    if how == "chunked":
        kwargs["prefill_chunk_size"] = 8
    if how == "left padding":
        mask[1, :8] = 0
        prompt = prompt * mask
    if how == "beams":
        kwargs["num_beams"] = 3
    if how == "samples":
        kwargs.update(do_sample=True, temperature=0.7, num_return_sequences=2)
    torch.manual_seed(1)
    want = model.generate(prompt, attention_mask=mask, **kwargs)
    cache = OasisCache(model, drafter=folder, speculate=True, draft_tokens=3)
    seen = noted(cache.drafter)
    torch.manual_seed(1)
    got = model.generate(prompt, attention_mask=mask, past_key_values=cache, **kwargs)
    assert torch.equal(got, want)
    if how == "a second turn":
        turn = torch.cat((got, ids(2, 4, 9)), 1)
        kwargs["attention_mask"] = torch.ones_like(turn)  # generate would take a token 0 for padding
        got = model.generate(turn, past_key_values=cache, **kwargs)
        assert torch.equal(got, model.generate(turn, **kwargs))
        assert cache.get_seq_length() == got.shape[1] - 1
    assert len(seen) > 8
    if how not in ("beams", "samples"):
        pads = [0, 8 if how == "left padding" else 0]
        all_agree(seen, [row[pad:] for row, pad in zip(got.tolist(), pads)], cache.drafter)


class Right(Eagle3Drafter):
    """Says of some tokens what is true, so that they are accepted; what its head would propose is noted."""

    def propose(self, tokens, lengths, count):
        draft = super().propose(tokens, lengths, count)
        self.seen.append((lengths.tolist(), tokens.tolist(), draft.tokens.tolist()))
        told = draft.tokens.clone()
        for row, text in enumerate(self.texts):
            after = text[int(lengths[row]) + 1 :][:count]
            told[row, : len(after)] = torch.tensor(after)
            if int(lengths[row]) % 5 == 4:
                told[row, 1:] = 3  # wrong from the second on
        return draft._replace(tokens=told)


def test_accepted_drafts_leave_their_own_states(folder):
    model, prompt = target(), ids(2, 15, 3)
    want = model.generate(prompt, max_new_tokens=24, do_sample=False)
    drafter = Right.from_pretrained(folder, model)
    drafter.seen, drafter.texts = [], want.tolist()
    cache = OasisCache(model, drafter=drafter, speculate=True, draft_tokens=3)
    got = model.generate(prompt, past_key_values=cache, max_new_tokens=24, do_sample=False)
    assert torch.equal(got, want) and cache.stepper.skipped > 10 and len(drafter.seen) > 5
    all_agree(drafter.seen, want.tolist(), drafter)


def test_a_draft_committed_by_hand_and_another_token_after_it(folder):
    prompt = ids(2, 15, 3)
    cache = opened(folder, prompt, speculate=True, draft_tokens=2)
    step(cache, ids(2, 1, 5))
    drafts = cache.stepper.tail.tokens[:, 1:].tolist()
    cache.commit([0, 1])
    texts = [a + b + c[:2] for a, b, c in zip(prompt.tolist(), ids(2, 1, 5).tolist(), drafts)]
    agree(cache, texts)
    cache.crop(-1)
    agree(cache, [text[:-1] for text in texts])
    step(cache, ids(2, 1, 6))
    agree(cache, [text[:-1] + new for text, new in zip(texts, ids(2, 1, 6).tolist())])


def test_assisted_decoding_verifies_several_at_once(folder):
    model, prompt = target(), ids(1, 12).repeat(1, 3)
    kwargs = dict(max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    cache = OasisCache(model, drafter=folder)
    got = model.generate(prompt, past_key_values=cache, **kwargs)
    assert torch.equal(got, model.generate(prompt, **kwargs))
    agree(cache, [got[0, : cache.get_seq_length()].tolist()])


# -- a working set ----------------------------------------------------------------------------------------------------


class Recorder(Drafter):
    """The same taps, kept by position of one row; what is stacked are the head's own drafts."""

    always = True

    def __init__(self, inner):
        self.inner, self.taps, self.states, self.at, self.seen = inner, inner.taps, {}, 0, []

    def tap(self, layer, hidden, step):
        self.inner.tap(layer, hidden, step)
        for column in range(hidden.shape[1]):
            self.states[layer, self.at + column] = hidden[0, column].clone()

    def propose(self, tokens, lengths, count):
        draft = self.inner.propose(tokens, lengths, count)
        self.seen.append((int(lengths), int(tokens), draft.tokens[0].tolist()))
        return draft

    def hold(self, lengths, count):
        self.at = int(lengths)
        return self.inner.hold(lengths, count)

    def note(self, tokens, starts):
        self.inner.note(tokens, starts)

    def noted(self, count):
        self.inner.noted(count)

    def observe(self, *args):
        self.inner.observe(*args)


def test_taps_of_a_sparse_step(folder):
    """Hidden states are those of the working set; the drafts are made of exactly them."""
    recorder = Recorder(Eagle3Drafter.from_pretrained(folder, target()))
    cache = OasisCache(target(), drafter=recorder, budget=32, graphs=False)
    text = ids(1, 120, 2)
    run(cache, text[:, :80])
    step(cache, text[:, 80:])
    assert len(recorder.seen) == 40 and cache.stats()["fetched"].sum() > 0
    whole = states(target(), text[0].tolist(), TAPS)
    mine = torch.stack([torch.stack([recorder.states[i, t] for t in range(120)]) for i in TAPS])
    torch.testing.assert_close(mine[:, :80], whole[:, :80], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(mine[:, 100:], whole[:, 100:], atol=1e-2), "as if it were dense"
    for length, token, drafts in recorder.seen[::6]:
        tokens = text[0, :length].tolist() + [token]
        assert drafts == straight().drafts(tokens, mine[:, :length], 1)[0]
