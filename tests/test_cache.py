"""crop, reorder, batch operations, reset and deepcopy reach every storage (promise 7); the memo; explicit modes."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generate import generate
from test_sparse import SPARSE, assert_residents_match
from tiny import FAMILIES, left_padded, prompt, tiny
from transformers import DynamicCache

from oasis_hf import OasisCache

pytestmark = pytest.mark.core


def feed(model, cache, ids):
    """Token by token; the logits of each."""
    with torch.no_grad():
        return [model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(ids.shape[1])]


def prefill(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, **kwargs).logits[:, -1]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back", [5, 17, *(pytest.param(n, marks=pytest.mark.newest) for n in (1, 16, 30))])
def test_crop_undoes_decode_steps(family, back):
    """Budget >= context: after a crop the cache is as if the tokens had never come."""
    model, ids = tiny(family), prompt(1, 90)
    cache = OasisCache(model, budget=256)
    wanted = feed(model, (fresh := DynamicCache(config=model.config)), ids[:, :60])
    wanted = feed(model, fresh, ids[:, 60:70])
    prefill(model, cache, ids[:, :20])
    feed(model, cache, ids[:, 20:60])
    feed(model, cache, prompt(1, back, seed=9))
    cache.crop(-back)
    assert cache.get_seq_length() == 60
    for a, b in zip(wanted, feed(model, cache, ids[:, 60:70])):
        close(a, b)


@pytest.mark.newest
@pytest.mark.parametrize("store", ["host", "resident"])
def test_crop_on_a_sparse_row_reopens_its_block(store):
    model = tiny("llama")
    cache = OasisCache(model, budget=64, store=store, lookahead="previous")
    prefill(model, cache, prompt(1, 150))
    feed(model, cache, prompt(1, 80, seed=1))
    cache.crop(-75)  # the block of token 155 was closed long ago, and is in no slot
    assert cache.get_seq_length() == 155
    assert cache.stats()["reopened"].sum() > 0
    assert_residents_match(cache)
    feed(model, cache, prompt(1, 20, seed=2))
    assert_residents_match(cache)


def test_crop_after_a_prefill_before_any_decode():
    model, ids = tiny("llama"), prompt(1, 120)
    for keep in (100, 96, 81):
        cache, dense = OasisCache(model, budget=256), DynamicCache(config=model.config)
        for c in (cache, dense):
            prefill(model, c, ids)
            c.crop(-(120 - keep))
        close(feed(model, dense, ids[:, keep : keep + 3])[-1], feed(model, cache, ids[:, keep : keep + 3])[-1])


def test_crop_of_nothing_too_much_and_to_a_length():
    model = tiny("llama")
    cache = OasisCache(model)
    cache.crop(-3)  # empty: nothing to do
    prefill(model, cache, prompt(1, 30))
    cache.crop(0)
    cache.crop(-0)
    assert cache.get_seq_length() == 30
    cache.crop(20)  # transformers 5.17 still takes the length to keep
    assert cache.get_seq_length() == 20
    cache.crop(25)
    assert cache.get_seq_length() == 20
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    close(prefill(model, cache, prompt(1, 9)), prefill(model, DynamicCache(config=model.config), prompt(1, 9)))


def test_crop_on_padded_rows_counts_columns():
    model, inputs = tiny("llama"), left_padded([30, 12])
    cache = OasisCache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    cache.crop(-20)
    assert cache.state.rows.tokens == [10, 0]
    assert cache.get_seq_length() == 10


@pytest.mark.newest
@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("budget", [48, 512])
def test_reorder_permutes_every_storage(family, budget):
    """Rows that were permuted go on as rows that always stood there."""
    model, ids = tiny(family), prompt(3, 100)
    order = torch.tensor([2, 0, 0])
    straight, permuted = (OasisCache(model, budget=budget) for _ in range(2))
    prefill(model, straight, ids[order])
    feed(model, straight, prompt(3, 30, seed=1)[order])
    prefill(model, permuted, ids)
    feed(model, permuted, prompt(3, 30, seed=1))
    permuted.reorder_cache(order)
    more = prompt(3, 40, seed=2)
    for a, b in zip(feed(model, straight, more), feed(model, permuted, more), strict=True):
        close(a, b)
    assert_residents_match(permuted)


@pytest.mark.newest
@pytest.mark.parametrize("budget", [48, 512])
def test_repeat_and_select_rows(budget):
    model, ids = tiny("llama"), prompt(2, 70)
    cache = OasisCache(model, budget=budget)
    prefill(model, cache, ids)
    feed(model, cache, ids[:, :9])
    pages = cache.state.store.nbytes, cache.state.store.pool.pages_in_use
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 6
    assert cache.state.store.pool.pages_in_use == pages[1]  # shared, not copied
    assert cache.state.store.bytes_copied == 0
    more = prompt(6, 10, seed=1)
    repeated = feed(model, cache, more)
    # Each of the six open blocks is its own now: four copies, and one more where 70 + 9 + 10 tokens opened a block.
    page = cache.state.store.pool.page_bytes
    assert 0 < cache.state.store.bytes_copied <= 6 * 3 * 2 * page
    cache.batch_select_indices(torch.tensor([4, 1]))
    straight = OasisCache(model, budget=budget)
    prefill(model, straight, ids[[1, 0]])
    feed(model, straight, ids[[1, 0], :9])
    for a, b in zip(repeated, feed(model, straight, more[[4, 1]])):
        close(a[[4, 1]], b)
    tail = prompt(2, 12, seed=3)
    for a, b in zip(feed(model, cache, tail), feed(model, straight, tail)):
        close(a, b)


@pytest.mark.newest
def test_branches_share_closed_pages_and_part_at_the_open_one():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    prefill(model, cache, prompt(1, 200))
    pool = cache.state.store.pool
    used = pool.pages_in_use
    branches = [copy.deepcopy(cache) for _ in range(4)]
    assert pool.pages_in_use == used
    for seed, branch in enumerate(branches):
        feed(model, branch, prompt(1, 5, seed=seed))
        assert_residents_match(branch)
    # 200 = 12.5 blocks: each branch copied its half-full open block only, 3 layers x 2 heads of it
    assert [branch.state.store.bytes_copied for branch in branches] == [6 * pool.page_bytes] * 4
    assert pool.pages_in_use == used + 4 * 6
    lone = OasisCache(model, budget=64)
    prefill(model, lone, prompt(1, 200))
    for a, b in zip(feed(model, lone, prompt(1, 5, seed=9)), feed(model, cache, prompt(1, 5, seed=9))):
        assert torch.equal(a, b)  # the trunk is untouched
    del branches, branch
    assert pool.pages_in_use == used  # every branch had its own by then, so the trunk wrote to the old one


def test_beam_search_moves_no_closed_page():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    generate(model, prompt(2, 120), cache, max_new_tokens=20, num_beams=3)
    store = cache.state.store
    # at most one open block a row, layer and head for each of 20 steps
    assert store.bytes_copied <= 20 * 6 * 3 * 2 * store.pool.page_bytes
    assert_residents_match(cache)


def test_reset_empties_everything_and_takes_another_batch():
    model = tiny("gemma3")
    cache = OasisCache(model, budget=64, speculate=True)
    generate(model, prompt(1, 120), cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.state.store.nbytes == 0
    assert all((counter == 0).all() for counter in cache.stats().values())
    again = generate(model, prompt(1, 80, seed=1), cache)
    fresh = generate(model, prompt(1, 80, seed=1), OasisCache(model, budget=64, speculate=True))
    assert all(torch.equal(a, b) for a, b in zip(again.logits, fresh.logits, strict=True))
    cache.reset()
    again = generate(model, prompt(3, 80, seed=1), cache)  # another batch size
    fresh = generate(model, prompt(3, 80, seed=1), OasisCache(model, budget=64, speculate=True))
    assert all(torch.equal(a, b) for a, b in zip(again.logits, fresh.logits, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_callers_own_verification_runs_over_the_working_set_and_is_undone(family):
    """Assisted decoding by hand: several tokens at once, then a crop; like feeding them one by one."""
    model, ids = tiny(family), prompt(1, 100)
    cache = OasisCache(model, budget=256)
    cache.activate_past_recording()
    prefill(model, cache, ids[:, :60])
    dense = DynamicCache(config=model.config)
    prefill(model, dense, ids[:, :60])
    wanted = feed(model, dense, ids[:, 60:])
    at = 60
    for count, keep in ((5, 2), (8, 8), (3, 0), (1, 1), (8, 3), (6, 6)):
        with torch.no_grad():
            logits = model(input_ids=ids[:, at : at + count], past_key_values=cache).logits
        for i in range(count):
            close(logits[:, i], wanted[at - 60 + i])
        cache.crop(-(count - keep))
        at += keep
        assert cache.get_seq_length() == at


def test_verification_is_sparse_up_to_eight_tokens_and_full_beyond():
    model, ids = tiny("llama"), prompt(1, 220)
    cache = OasisCache(model, budget=48)
    dense = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for c in (cache, dense):
        prefill(model, c, ids[:, :200])
    for count, full in ((8, False), (12, True)):
        with torch.no_grad():
            a, b = (model(input_ids=ids[:, 200 : 200 + count], past_key_values=c).logits for c in (cache, dense))
        assert torch.allclose(a, b, atol=1e-4) == full
        cache.crop(-count)
        dense.crop(-count)


def test_a_mode_can_be_said():
    model, ids = tiny("llama"), prompt(1, 110)
    dense = DynamicCache(config=model.config)
    prefill(model, dense, ids[:, :100])
    wanted = prefill(model, dense, ids[:, 100:104])
    cache = OasisCache(model, budget=32)
    prefill(model, cache, ids[:, :100])
    close(prefill(model, cache, ids[:, 100:104]), wanted)  # several tokens on a filled cache: a turn, dense
    cache.crop(-4)
    with cache.mode("verify"):
        assert not torch.allclose(prefill(model, cache, ids[:, 100:104]), wanted, atol=1e-3)
    cache.crop(-4)
    with cache.mode("prefill"):
        for t in range(100, 104):
            last = prefill(model, cache, ids[:, t : t + 1])
    close(last, wanted)
    with pytest.raises(ValueError, match="mode='guess' is not allowed: use 'prefill', 'decode' or 'verify'"):
        cache.mode("guess").__enter__()


def test_memo_accepts_then_rejects_then_accepts():
    """What a caller feeds decides; drafts that are not fed leave no trace."""
    from oasis_hf import OracleDrafter

    model, ids = tiny("gemma3"), prompt(1, 60)
    told = ids.clone()
    told[0, 45] = (told[0, 45] + 1) % 90 + 3  # a wrong guess in the middle
    cache = OasisCache(model, budget=256, speculate=True, draft_tokens=3, drafter=OracleDrafter(told))
    dense = DynamicCache(config=model.config)
    for c in (cache, dense):
        prefill(model, c, ids[:, :40])
    for a, b in zip(feed(model, dense, ids[:, 40:]), feed(model, cache, ids[:, 40:]), strict=True):
        close(a, b)
    assert cache.stepper.skipped == 14 and cache.stepper.forwards == 1 + 6
    assert cache.get_seq_length() == 60
    assert_residents_match(cache)


def test_commit_takes_a_path_of_drafts_and_refuses_others():
    from oasis_hf import OracleDrafter

    model, ids = tiny("llama"), prompt(1, 60)
    cache = OasisCache(model, budget=256, speculate=True, draft_tokens=3, drafter=OracleDrafter(ids))
    with pytest.raises(ValueError, match="no drafts to commit"):
        prefill(model, cache, ids[:, :40])
        cache.commit([0])
    feed(model, cache, ids[:, 40:41])
    with pytest.raises(ValueError, match="does not follow"):
        cache.commit([1])
    cache.commit([0, 1])
    assert cache.get_seq_length() == 43
    dense = DynamicCache(config=model.config)
    prefill(model, dense, ids[:, :43])
    close(feed(model, cache, ids[:, 43:44])[0], feed(model, dense, ids[:, 43:44])[0])


def test_finished_rows_count_as_matched():
    """A row that ended is fed padding: it must not stop the others' drafts from being taken."""
    from oasis_hf import OracleDrafter

    model, ids = tiny("llama"), prompt(2, 30)
    kwargs = dict(max_new_tokens=30, pad_token_id=0)
    plain = generate(model, ids, OasisCache(model), eos_token_id=None, **kwargs)
    end = int(plain.sequences[1, 34])  # row 1 ends after five tokens
    dense = generate(model, ids, DynamicCache(config=model.config), eos_token_id=end, **kwargs)
    cache = OasisCache(model, speculate=True, drafter=OracleDrafter(plain.sequences))
    oasis = generate(model, ids, cache, eos_token_id=end, **kwargs)
    assert torch.equal(dense.sequences, oasis.sequences)
    assert cache.stepper.skipped >= 0.4 * dense.sequences.shape[1] - 30 * 0.4


def test_inputs_embeds_and_hidden_states():
    model, ids = tiny("llama"), prompt(1, 50)
    cache = OasisCache(model, budget=32, speculate=True)
    dense = DynamicCache(config=model.config)
    outs = []
    with torch.no_grad():
        for c in (dense, cache):
            embeds = model.get_input_embeddings()(ids)
            model(inputs_embeds=embeds, past_key_values=c)
            out = model(input_ids=ids[:, :1], past_key_values=c, output_hidden_states=True)
            outs.append(out)
    assert [h.shape for h in outs[0].hidden_states] == [h.shape for h in outs[1].hidden_states]
    assert outs[0].logits.shape == outs[1].logits.shape


def test_tuple_outputs():
    model, ids = tiny("llama"), prompt(1, 60)
    cache = OasisCache(model, budget=32)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, return_dict=False)
        logits, kept = model(input_ids=ids[:, :1], past_key_values=cache, return_dict=False)[:2]
    assert logits.shape == (1, 1, 96) and kept is cache


def test_inference_mode_then_no_grad():
    model, ids = tiny("llama"), prompt(1, 60)
    cache = OasisCache(model, budget=48)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
        model(input_ids=ids[:, :1], past_key_values=cache)
    feed(model, cache, ids[:, 1:3])
    assert cache.get_seq_length() == 63


CHANGES = {
    "crop": lambda cache: cache.crop(-5),
    "crop over blocks": lambda cache: cache.crop(-20),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
    "commit": lambda cache: cache.commit([0]),
    "branch": copy.deepcopy,
}


@pytest.mark.parametrize("inside", [True, False], ids=["goes on inside", "goes on outside"])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_change_inside_inference_mode_as_outside(change, inside):
    """Nothing that outlives the change becomes an inference tensor, which no step could write to."""
    from oasis_hf import OracleDrafter

    model, ids = tiny("gemma3"), prompt(2, 120)
    outs = []
    for mode in (False, True):
        cache = OasisCache(model, budget=48, speculate=True, drafter=OracleDrafter(ids))
        with torch.inference_mode(mode):
            prefill(model, cache, ids[:, :79])
            feed(model, cache, ids[:, 79:80])
            cache = CHANGES[change](cache) or cache
        with torch.inference_mode(mode and inside):
            more = prompt(cache.batch_size, 20, seed=2)  # a turn, then steps
            outs.append([prefill(model, cache, more[:, :5]), *feed(model, cache, more[:, 5:])])
        assert_residents_match(cache)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_early_initialization_inside_inference_mode():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    with torch.inference_mode():
        cache.early_initialization(2, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    prefill(model, cache, prompt(2, 30))
    feed(model, cache, prompt(2, 3))


def test_early_initialization():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.is_initialized and cache.batch_size == 2
    close(prefill(model, cache, prompt(2, 30)), prefill(model, DynamicCache(config=model.config), prompt(2, 30)))
