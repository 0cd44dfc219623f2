"""Budget < context: where a block lives never changes a result, traffic stays under the cap, and a block's copy in the
store exists before its slot is given away (promises 2, 3 and 5)."""

from __future__ import annotations

import pytest
import torch
from test_generate import generate
from tiny import FAMILIES, left_padded, prompt, tiny

from oasis_hf import OasisCache, OracleDrafter
from oasis_hf.config import BLOCK, TAIL

pytestmark = pytest.mark.core
SPARSE = [name for name in FAMILIES if name != "mistral"]  # all of its layers slide
KNOBS = [
    {},
    {"lookahead": "previous", "scorer": "minmax", "reduction": "max", "summary_dtype": "model"},
    {"lookahead": {"draft": 1, "previous": 1}, "tokens_per_summary": 4, "reduction": "mean"},
    {"lookahead": "on_demand"},
    {"speculate": True, "draft_tokens": 3},
    {"sink_blocks": 1, "recent_blocks": 1, "seed": 5},
]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize(
    "knobs", [KNOBS[0], *(pytest.param(one, marks=pytest.mark.newest) for one in KNOBS[1:])], ids=map(str, KNOBS)
)
def test_host_and_resident_stores_give_bit_identical_logits(family, knobs):
    model = tiny(family)
    for inputs in (prompt(1, 120), left_padded([120, 30, 77])):
        host, resident = (
            generate(model, inputs, OasisCache(model, budget=80, store=store, **knobs), max_new_tokens=28)
            for store in ("host", "resident")
        )
        assert torch.equal(host.sequences, resident.sequences)
        assert all(torch.equal(a, b) for a, b in zip(host.logits, resident.logits, strict=True))


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_differs_from_dense(family):
    """Otherwise the tests above would show nothing."""
    from transformers import DynamicCache

    model = tiny(family)
    dense = generate(model, prompt(1, 200), DynamicCache(config=model.config))
    sparse = generate(model, prompt(1, 200), OasisCache(model, budget=32))
    assert not torch.equal(dense.logits[1], sparse.logits[1])


@pytest.mark.newest
@pytest.mark.parametrize("knobs", [{}, {"lookahead": "previous"}, {"speculate": True, "draft_tokens": 2}], ids=str)
@pytest.mark.parametrize("fetch_ratio", [0.05, 0.34, 1.0])
def test_pipelined_fetches_never_exceed_the_cap(knobs, fetch_ratio):
    model = tiny("llama")
    cache = OasisCache(model, budget=112, fetch_ratio=fetch_ratio, **knobs)
    assert cache.state.config.fetch_cap(7) == max(1, round(fetch_ratio * 6))
    before = torch.zeros(())
    inputs = left_padded([300, 150, 33])
    with torch.no_grad():
        token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(40):
            token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
            fetched = cache.stats()["fetched"]
            # layers x KV heads, summed over 3 rows
            assert ((fetched - before) <= 3 * cache.state.cap).all()
            before = fetched
    assert before.sum() > 0
    stats = cache.stats()
    assert torch.equal(stats["bytes"], (stats["fetched"] + stats["first"]) * 2 * BLOCK * 16 * 4)


@pytest.mark.newest
@pytest.mark.parametrize("store", ["host", "resident"])
def test_every_resident_block_equals_its_copy_in_the_store(store):
    """After every step, in every layer: slots hold what the store holds, so a slot can be given away at any time."""
    model = tiny("llama")
    cache = OasisCache(model, budget=80, store=store, speculate=True, draft_tokens=2)
    inputs = left_padded([100, 40, 9])
    with torch.no_grad():
        token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(60):
            token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
            assert_residents_match(cache)


def assert_residents_match(cache):
    rows = cache.state.rows
    for layer in cache.sparse_layers:
        table = layer.working_set.table
        for row, length in enumerate(rows.tokens):
            keys, values = layer.store.read(layer.index, row, 0, length)
            for head in range(table.shape[1]):
                resident = table[row, head][table[row, head] >= 0].tolist()
                assert len(set(resident)) == len(resident)
                if length % BLOCK:
                    assert length // BLOCK in resident  # the open block always is
                for slot, block in enumerate(table[row, head].tolist()):
                    if block >= 0:
                        assert block * BLOCK < length
                        low, high = block * BLOCK, min(length, (block + 1) * BLOCK)
                        at = TAIL + slot * BLOCK
                        for full, buffer in ((keys, layer.working_set.keys), (values, layer.working_set.values)):
                            assert torch.equal(buffer[row, head, at : at + high - low], full[head, low:high])


@pytest.mark.newest
def test_a_page_is_complete_before_its_slot_is_reused(monkeypatch):
    """The order itself: at every eviction the evicted block's page already holds the slot's content."""
    from oasis_hf import working_set

    model = tiny("llama")
    cache = OasisCache(model, budget=64, lookahead="previous")
    plain, checked = working_set.WorkingSet.append_from_tail, []

    def spied(self, entry, lengths, *rest):
        layer = next(layer for layer in cache.sparse_layers if layer.working_set is self)
        before = self.table.clone(), self.keys.clone()
        slot, wasted = plain(self, entry, lengths, *rest)
        for head, place in enumerate(slot[0].tolist()):
            old = int(before[0][0, head, place])
            if old >= 0 and old != int(self.table[0, head, place]):
                page = layer.store.read(layer.index, 0, old * BLOCK, (old + 1) * BLOCK)[0][head]
                at = TAIL + place * BLOCK
                checked.append(torch.equal(page, before[1][0, head, at : at + BLOCK]))
        return slot, wasted

    monkeypatch.setattr(working_set.WorkingSet, "append_from_tail", spied)
    generate(model, prompt(1, 90), cache, max_new_tokens=60)
    assert checked and all(checked)


def test_rows_turn_sparse_one_by_one_in_a_mixed_batch():
    """A short row stays dense beside a long sparse one, gives the dense result, and turns sparse when it grows."""
    from transformers import DynamicCache

    model = tiny("llama")
    inputs = left_padded([300, 40])
    dense = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=60)
    cache = OasisCache(model, budget=96)
    oasis = generate(model, inputs, cache, max_new_tokens=60)
    for step in range(55):  # row 1 fits in 96 tokens until then
        torch.testing.assert_close(dense.logits[step][1], oasis.logits[step][1], atol=1e-4, rtol=0)
    assert not torch.allclose(dense.logits[5][0], oasis.logits[5][0], atol=1e-3)
    table = cache.sparse_layers[0].working_set.table
    assert (table[1] >= 0).all()  # 99 tokens, 7 blocks: one had to leave
    assert cache.state.rows.tokens == [359, 99]


def test_a_row_of_exactly_the_budget_is_still_dense():
    from transformers import DynamicCache

    model = tiny("llama")
    for length in (95, 96, 97):
        dense = generate(model, prompt(1, length), DynamicCache(config=model.config), max_new_tokens=2)
        oasis = generate(model, prompt(1, length), OasisCache(model, budget=96), max_new_tokens=2)
        same = torch.allclose(dense.logits[1], oasis.logits[1], atol=1e-4)
        assert same == (length <= 96)


@pytest.mark.newest
def test_device_memory_does_not_grow_with_the_context_but_for_summaries():
    model = tiny("llama")
    sizes = []
    for length in (300, 1200):
        cache = OasisCache(model, budget=128)
        generate(model, prompt(1, length), cache, max_new_tokens=4)
        sizes.append(cache.memory())
    assert sizes[0]["working_set"] == sizes[1]["working_set"]
    assert sizes[1]["host"] > 3 * sizes[0]["host"]
    # int8, two parts: 2 x 2 x (16 + 2) bytes where a block of float32 K and V takes 2048; doubling may leave half spare
    assert sizes[1]["summaries"] <= 2 * sizes[1]["host"] * 72 / 2048 + 4096


@pytest.mark.newest
def test_budget_in_bytes():
    model = tiny("llama")
    slot = 3 * 2 * 2 * 2 * BLOCK * 16 * 4  # layers x rows x heads x block bytes
    cache = OasisCache(model, budget_bytes=5 * slot + slot // 2)
    generate(model, prompt(2, 150), cache, max_new_tokens=3)
    assert cache.state.slots == 5
    set_bytes = sum(layer.working_set.keys.nbytes + layer.working_set.values.nbytes for layer in cache.sparse_layers)
    assert set_bytes - 3 * 2 * 2 * 2 * TAIL * 16 * 4 == 5 * slot


@pytest.mark.newest
def test_oracle_lookahead_predicts_what_the_next_step_selects_itself():
    """With the true next token as draft and no cap, the residents are the next query's own top-K."""
    model, ids = tiny("llama"), prompt(1, 200)
    cache = OasisCache(
        model, budget=80, lookahead="oracle", drafter=OracleDrafter(ids), fetch_ratio=1.0, reduction="max"
    )
    layer = cache.sparse_layers[0]
    agreement, residents, closed = [], None, None
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for t in range(150, 190):
            model(ids[:, t : t + 1], past_key_values=cache)
            if residents is not None:
                query = layer.recent[:, :, -1:]
                scores = layer.summaries.score(query, closed, torch.ones(1, 1), layer.scaling, int(closed))
                for head, held in enumerate(residents):
                    agreement.append(len(held & set(scores[0, head].topk(4).indices.tolist())) / 4)
            closed = torch.tensor([(t + 1) // BLOCK])
            residents = [set(table.tolist()) for table in layer.working_set.table[0]]
    assert sum(agreement) / len(agreement) > 0.99
