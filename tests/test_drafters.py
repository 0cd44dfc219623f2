"""Drafters: what they propose, what they remember, and what is refused when a cache is made."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import FAMILIES, VOCAB, tiny

from oasis_hf import Drafter, DrafterError, OasisCache, OasisConfig, OracleDrafter, PreviousDrafter, PromptLookupDrafter
from oasis_hf.attach import cache_name
from oasis_hf.drafters import make_drafter

pytestmark = pytest.mark.core


def lookup_by_hand(tokens: list[int | None], new: int, count: int, ngram: int, shortest: int) -> list[int] | None:
    """tokens: a row's past, None where it is not known. The continuation of the latest earlier match of the longest
    run of last tokens, the new one included, going round again past the end; None where there is no match."""
    text = [*tokens, new]
    for length in range(ngram, shortest - 1, -1):
        last = text[len(text) - length :]
        if length > len(text) or None in last:
            continue
        for end in range(len(text) - 1, length - 1, -1):  # exclusive end of an earlier match
            if text[end - length : end] == last:
                follow = [text[end:][j % len(text[end:])] for j in range(count)]
                return follow if None not in follow else None
    return None


def observed(rows, pad=0, **kwargs):
    """A drafter that has seen these rows (python lists), left-padded with `pad` more columns than the longest has."""
    drafter = PromptLookupDrafter(**kwargs)
    width = max(map(len, rows)) + pad
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens, dtype=torch.int64)
        valid[row, width - len(tokens) :] = True
    drafter.observe(ids, torch.zeros(len(rows), dtype=torch.int64), None if valid.all() else valid)
    return drafter


def proposals(drafter, rows, new, count):
    """None or the tokens, per row."""
    draft = drafter.propose(torch.tensor(new), torch.tensor([len(row) for row in rows]), count)
    assert draft.tokens.shape == (len(rows), count) and draft.found.shape == (len(rows),)
    assert ((draft.tokens >= 0) & (draft.tokens < VOCAB)).all(), "always valid ids"
    return [t if f else None for t, f in zip(draft.tokens.tolist(), draft.found.tolist())]


# -- prompt look-up ---------------------------------------------------------------------------------------------------

few = st.integers(1, 3)  # few different tokens: many matches
texts = st.lists(st.lists(few, min_size=1, max_size=24), min_size=1, max_size=3)


@pytest.mark.newest
@settings(max_examples=150)
@given(texts, st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_prompt_lookup_finds_what_a_search_by_hand_finds(rows, data, count, ngram, pad):
    shortest = data.draw(st.integers(1, ngram))
    new = [data.draw(few) for _ in rows]
    drafter = observed(rows, pad, ngram=ngram, shortest=shortest)
    want = [lookup_by_hand(row, token, count, ngram, shortest) for row, token in zip(rows, new)]
    assert proposals(drafter, rows, new, count) == want


@pytest.mark.newest
@given(st.data())
def test_prompt_lookup_follows_everything_a_cache_does(data):
    rows = [data.draw(st.lists(few, min_size=1, max_size=9)) for _ in range(data.draw(st.integers(1, 3)))]
    drafter, known = observed(rows), [list(row) for row in rows]
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["observe", "chunk", "embeddings", "crop", "hide", "select", "fork", "reset"]))
        starts = torch.tensor([len(row) for row in known])
        if kind == "observe":
            new = [data.draw(few) for _ in known]
            drafter.observe(torch.tensor(new)[:, None], starts, None)
            known = [[*row, token] for row, token in zip(known, new)]
        elif kind == "chunk":
            new = [data.draw(st.lists(few, min_size=5, max_size=5)) for _ in known]
            valid = [data.draw(st.lists(st.booleans(), min_size=5, max_size=5)) for _ in known]
            drafter.observe(torch.tensor(new), starts, torch.tensor(valid))
            known = [row + [t for t, v in zip(n, ok) if v] for row, n, ok in zip(known, new, valid)]
        elif kind == "embeddings":
            count = data.draw(st.integers(1, 40))
            drafter.observe(None, starts, None)
            known = [row + [None] * count for row in known]
        elif kind == "crop":
            known = [row[: data.draw(st.integers(0, len(row)))] for row in known]
            drafter.crop([len(row) for row in known])
        elif kind == "hide":
            at = data.draw(st.integers(0, len(known) - 1))
            if known[at]:
                first = data.draw(st.integers(0, len(known[at]) - 1))
                size = len(known[at]) - first
                stays = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
                drafter.hide(at, first, torch.tensor(stays))
                known[at] = known[at][:first] + [t for t, s in zip(known[at][first:], stays) if s]
        elif kind == "select":
            index = data.draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=3))
            drafter.select_rows(index)
            known = [list(known[i]) for i in index]
        elif kind == "fork":
            other, drafter = drafter, drafter.fork()
            other.crop([0] * len(known))
        else:
            drafter.reset()
            known = [[] for _ in known]
        new = [data.draw(few) for _ in known]
        want = [lookup_by_hand(row, token, 1, 3, 2) for row, token in zip(known, new)]
        assert proposals(drafter, known, new, 1) == want


def test_the_longest_match_wins_and_among_equals_the_latest():
    row = [1, 2, 3, 7, 9, 2, 3, 8, 9, 2, 3, 6, 1, 2]
    assert proposals(observed([row]), [row], [3], 1) == [[7]]
    row = [1, 2, 7, 1, 2, 8, 1]
    assert proposals(observed([row]), [row], [2], 1) == [[8]]


def test_other_candidates_are_what_else_followed_the_same_tokens():
    drafter = PromptLookupDrafter(ngram=3, shortest=2)
    history = torch.tensor([[1, 2, 9, 5, 1, 2, 7, 1, 2, 9, 1, 2, 8, 6, 1], [3, 4] * 7 + [3], list(range(30, 45))])
    drafter.observe(history, torch.zeros(3, dtype=torch.int64), None)
    new, lengths = torch.tensor([2, 4, 99]), torch.tensor([15, 15, 15])
    draft = drafter.propose_several(new, lengths, 2, 3)
    assert torch.equal(draft.tokens, drafter.propose(new, lengths, 2).tokens) and draft.tokens[0].tolist() == [8, 6]
    assert draft.found.tolist() == [True, True, False]
    assert draft.others[0].tolist() == [9, 7, 8], "later ones first, then the chain's own again"
    torch.testing.assert_close(draft.probabilities[0], torch.tensor([0.25, 0.5, 0.25, 0]))
    assert draft.others[1].tolist() == [3] * 3 and draft.probabilities[1].tolist() == [1, 0, 0, 0]
    assert draft.others[2].tolist() == [99] * 3, "always valid ids"
    empty = PromptLookupDrafter().propose_several(new, lengths, 1, 2)
    assert empty.others.tolist() == [[2] * 2, [4] * 2, [99] * 2] and empty.probabilities.tolist() == [[0] * 3] * 3


def test_nothing_is_found_before_anything_was_seen():
    assert proposals(PromptLookupDrafter(), [[], []], [3, 4], 2) == [None, None]


def test_tokens_that_are_not_known_match_nothing():
    drafter = observed([[5, 6]])
    known = [[5, 6]]
    for more in ([None, 7, 8], [None, None]):  # two stretches of embeddings, the first followed by 7 and 8
        drafter.observe(None, torch.tensor([len(known[0])]), None)
        known[0] += [token for token in more if token is None]
        for token in more:
            if token is not None:
                drafter.observe(torch.tensor([[token]]), torch.tensor([len(known[0])]), None)
                known[0].append(token)
    assert proposals(drafter, known, [7], 1) == [None], "'unknown, 7' is not known to be the same twice"


@pytest.mark.parametrize("how", ["crop", "hide"])
def test_what_was_dropped_is_never_found_again(how):
    drafter = observed([[5, 6, 7, 5, 6]])
    drafter.crop([2]) if how == "crop" else drafter.hide(0, 2, torch.tensor([False] * 3))
    drafter.observe(None, torch.tensor([2]), None)  # three embeddings where 7, 5, 6 stood
    drafter.observe(torch.tensor([[5]]), torch.tensor([5]), None)
    assert proposals(drafter, [[5, 6, None, None, None, 5]], [6], 1) == [None]


def test_a_fork_of_prompt_lookup_goes_its_own_way():
    drafter = observed([[9]])
    drafter.observe(torch.tensor([[5, 6]]), torch.tensor([1]), None)  # from here there is room: written in place
    other = drafter.fork()
    for which, token in ((drafter, 7), (other, 8)):
        which.observe(torch.tensor([[token, 5]]), torch.tensor([3]), None)
    assert proposals(drafter, [[9, 5, 6, 7, 5]], [6], 1) == [[7]]
    assert proposals(other, [[9, 5, 6, 8, 5]], [6], 1) == [[8]]


def test_cropping_again_and_again_needs_no_more_room():
    drafter = observed([[1, 2, 3] * 10])
    for _ in range(50):
        drafter.observe(torch.ones(1, 20, dtype=torch.int64), torch.tensor([30]), None)
        drafter.crop([30])
    assert drafter.history.shape[1] <= 150


@pytest.mark.parametrize("ngram, shortest", [(2, 3), (3, 0), (0, 0)])
def test_prompt_lookup_refuses_impossible_lengths(ngram, shortest):
    with pytest.raises(ValueError, match=f"1 <= shortest <= ngram, not shortest={shortest}, ngram={ngram}"):
        PromptLookupDrafter(ngram, shortest)


# -- oracle -----------------------------------------------------------------------------------------------------------


def test_the_oracle_tells_what_stands_behind_the_new_token():
    oracle = OracleDrafter(torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, -1, -1]]))
    assert proposals(oracle, [[0] * 1, [0] * 0], [0, 0], 2) == [[7, 8], [2, 3]]
    assert proposals(oracle, [[0] * 2, [0] * 1], [0, 0], 2) == [[8, 9], None], "the second row's text has ended"
    assert proposals(oracle, [[0] * 3, [0] * 9], [0, 0], 2) == [None, None], "past the end of what it was told"


def test_the_oracle_follows_chosen_rows_and_forks():
    oracle = OracleDrafter(torch.tensor([[5, 6, 7], [1, 2, 3]]))
    other = oracle.fork()
    oracle.select_rows([1, 1, 0])
    assert proposals(oracle, [[], [], []], [0, 0, 0], 2) == [[2, 3], [2, 3], [6, 7]]
    assert proposals(other, [[], []], [0, 0], 2) == [[6, 7], [2, 3]]


def test_the_oracle_refuses_another_number_of_rows():
    with pytest.raises(DrafterError, match="knows 3 rows, but the batch has 2"):
        OracleDrafter(torch.ones(3, 9, dtype=torch.int64)).propose(torch.zeros(2).long(), torch.zeros(2).long(), 1)


@pytest.mark.parametrize(
    "tokens, match",
    [
        (torch.zeros(4).long(), "shape .rows, length. and dtype int64"),
        (torch.zeros(2, 4), "dtype int64"),
        ([[1, 2]], "dtype int64"),
        (torch.zeros(1, 0).long(), r"no tokens: their shape is \[1, 0\]"),
    ],
)
def test_the_oracle_refuses_what_are_no_tokens(tokens, match):
    with pytest.raises(DrafterError, match=match):
        OracleDrafter(tokens)


# -- which drafter is meant -------------------------------------------------------------------------------------------


def head(folder, hidden=96, vocab=VOCAB, taps=3, **config):
    """A tiny EAGLE-3 head's files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden, "vocab_size": vocab, **config}))
    save_file(
        {"fc.weight": torch.zeros(hidden, taps * hidden), "norm.weight": torch.zeros(hidden)},
        folder / "model-00001-of-00002.safetensors",
    )
    save_file({"lm_head.weight": torch.zeros(32, hidden)}, folder / "model-00002-of-00002.safetensors")
    names = {
        "fc.weight": "model-00001-of-00002.safetensors",
        "norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@functools.cache
def untouched():
    return FAMILIES["llama"]()


def refuse(drafter, match, **knobs):
    """A cache is not made, and the model stays untouched."""
    model = untouched()
    with pytest.raises(DrafterError, match=match):
        OasisCache(model, drafter=drafter, **knobs)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    "given, kind", [(None, PromptLookupDrafter), ("auto", PromptLookupDrafter), ("prompt_lookup", PromptLookupDrafter),
                    ("previous", PreviousDrafter)],
)  # fmt: skip
def test_names(given, kind):
    assert type(make_drafter(given, tiny("llama"), OasisConfig())) is kind


def test_a_drafter_of_ones_own_is_taken_as_it_is():
    class Mine(Drafter):
        def check(self, model):
            self.checked = model

    mine = Mine()
    assert OasisCache(tiny("llama"), drafter=mine).drafter is mine and mine.checked is tiny("llama")


def test_previous_proposes_nothing():
    assert PreviousDrafter().proposes is False


@pytest.mark.parametrize("given", [3, 1.5, ["auto"], PromptLookupDrafter, object()], ids=lambda one: type(one).__name__)
def test_a_wrong_type_is_refused(given):
    refuse(given, "is not a drafter: use 'previous', 'prompt_lookup', 'auto', a folder, or a Drafter")


def test_an_unknown_name_is_refused():
    refuse("promt_lookup", "'promt_lookup' is neither the name of a drafter nor a folder with a config.json")


def test_an_oracle_must_be_given_its_tokens():
    refuse("oracle", "pass OracleDrafter")
    refuse("previous", "lookahead='oracle' needs the true tokens", lookahead="oracle")
    OasisCache(tiny("llama"), drafter=OracleDrafter(torch.zeros(1, 4).long()), lookahead="oracle")


def test_oracle_tokens_of_another_vocabulary_are_refused():
    refuse(OracleDrafter(torch.tensor([[3, VOCAB]])), f"go up to {VOCAB}, but the model has {VOCAB} ids")


def test_a_folder_without_a_config_is_refused(tmp_path):
    refuse(tmp_path, "nor a folder with a config.json")


@pytest.mark.parametrize("keep", [0, 4, 60, -8])
def test_a_truncated_file_is_named(tmp_path, keep):
    folder = head(tmp_path / "head")
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(folder, "'model-00002-of-00002.safetensors' is truncated or not safetensors")


def test_a_missing_file_is_named(tmp_path):
    folder = head(tmp_path / "head")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuse(folder, "truncated: 'lm_head.weight' should be in 'model-00002-of-00002.safetensors'")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_truncated_json_is_named(tmp_path, name):
    folder = head(tmp_path / "head")
    (folder / name).write_text((folder / name).read_text()[:20])
    refuse(folder, f"'{name}' is truncated or not JSON")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"embed.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    refuse(tmp_path, "no EAGLE-3 head: it has no tensor 'fc.weight'")


@pytest.mark.parametrize("hidden", [64, 192, 32])
def test_a_head_of_another_hidden_size_is_refused(tmp_path, hidden):
    refuse(head(tmp_path / "head", hidden=hidden), f"taps 3 hidden states {3 * hidden} wide together, but this model's")


def test_a_head_of_another_vocabulary_is_refused(tmp_path):
    refuse(head(tmp_path / "head", vocab=VOCAB + 1), f"another vocabulary: {VOCAB + 1} ids, this model has {VOCAB}")


# -- in a cache -------------------------------------------------------------------------------------------------------


def test_a_prompt_of_embeddings_then_tokens():
    model = tiny("llama")
    ids = torch.randint(3, VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))
    want = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 70:]
    embeddings = model.get_input_embeddings()(ids).detach()
    for knobs in ({}, {"speculate": True}):
        cache = {cache_name(model): OasisCache(model, **knobs)}
        got = model.generate(inputs_embeds=embeddings, max_new_tokens=6, do_sample=False, **cache)
        assert torch.equal(got, want)
