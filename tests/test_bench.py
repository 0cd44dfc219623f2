"""The bench's cache without a prompt, and its forced misses: what they promise can be counted on a CPU."""

from __future__ import annotations

import pytest
import torch

from oasis_hf import OasisConfig, bench


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return bench.random_model("tiny", "cpu", torch.float32)


@torch.no_grad()
def steps(model, cache, count):
    token = torch.full((len(cache.state.need_rows()), 1), 7)
    for _ in range(count):
        at = torch.full_like(token, cache.get_seq_length())
        out = model(input_ids=token, position_ids=at, past_key_values=cache, logits_to_keep=1)
    return out.logits


@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_every_head_of_every_layer_fetches_exactly_the_cap(model, ratio):
    cache = bench.filled(model, OasisConfig(budget=160, fetch_ratio=ratio), 2, 2000, 0.01)
    with bench.forced_misses(True):
        logits = steps(model, cache, 5)
    assert torch.isfinite(logits).all() and cache.get_seq_length() == 2005
    assert (cache.stats()["fetched"] == 5 * 2 * cache.state.cap).all()
    for layer in cache.sparse_layers:
        table = layer.working_set.table
        assert all(len(set(slots)) == len(slots) for slots in table.flatten(0, 1).tolist())


def test_parts_leave_out_what_they_say_and_come_back(model):
    config = OasisConfig(budget=160)
    with bench.forced_misses(True), bench.parts(predict=False, transfer=False):
        cache = bench.filled(model, config, 1, 1000, 0.01)
        steps(model, cache, 2)
    assert not cache.stats()["fetched"].any()
    with bench.forced_misses(True):
        cache = bench.filled(model, config, 1, 1000, 0.01)
        steps(model, cache, 2)
    assert cache.stats()["fetched"].any()


def test_what_is_left_out_is_not_done(model):
    """Scores without selection; a step that never touches keys and values."""

    def after(**left):
        with bench.forced_misses(True), bench.parts(**left):
            cache = bench.filled(model, OasisConfig(budget=160), 1, 1000, 0.01)
            before = cache.sparse_layers[0].working_set.table.clone(), cache.sparse_layers[0].working_set.keys.clone()
            logits = steps(model, cache, 2)
        own = cache.sparse_layers[0].working_set
        return cache, torch.equal(before[0], own.table), torch.equal(before[1], own.keys), logits

    cache, same_table, same_keys, whole = after()
    assert cache.stats()["fetched"].all() and not same_table and not same_keys
    cache, same_table, same_keys, _ = after(select=False)
    assert not cache.stats()["fetched"].any() and same_table and not same_keys
    cache, same_table, same_keys, bare = after(working_set=False, predict=False)
    assert same_table and same_keys and cache.get_seq_length() == 1002
    assert torch.isfinite(bare).all() and not torch.allclose(bare, whole)


def test_forced_misses_of_rows_that_grow(model):
    """Blocks that close after the first step are predicted too, where the draw is wide enough."""

    def youngest(blocks):
        torch.manual_seed(0)
        cache = bench.filled(model, OasisConfig(budget=64, fetch_ratio=1.0), 1, 160, 0.02)
        with bench.forced_misses(True, blocks):
            steps(model, cache, 62)
        table = cache.sparse_layers[0].working_set.table
        open_block = cache.get_seq_length() // 16
        return table[table < open_block].max()

    assert youngest(0) < 10 <= youngest(40)


def test_times_of_a_cpu_are_those_of_its_calls(model):
    (one,) = bench.bench(model, 1, 600, steps=3, pool_gib=0.01, parts_of=("whole",), budget=160)
    assert one.ms == one.call_ms > 0 and one.graph.startswith("none: ") and one.bytes == 4 * 2 * 2 * 16 * 64 * 4
    (predicted,) = bench.bench(model, 1, 600, steps=3, pool_gib=0.01, parts_of=("prediction",), budget=160)
    assert predicted.bytes == 0  # chosen, not moved
    dense = bench.dense(model, 2, 600, steps=3, pool_gib=0.01)
    assert dense.bytes == 0 and dense.ms > 0


def test_a_reading_divides_rightly():
    one = bench.Reading("step", rows=10, ms=5.0, call_ms=6.0, bytes=100_000_000, graph="")
    assert one.tokens_per_second == 2000 and one.link == 20e9


def test_the_floor_is_the_slower_of_memory_and_link():
    ceilings = bench.Ceilings(hbm=4e12, link=50e9)
    one = bench.Reading("step", rows=10, ms=5.0, call_ms=6.0, bytes=100_000_000, graph="", hbm_bytes=4_000_000_000)
    assert one.floor_ms(ceilings) == pytest.approx(2.0)
    assert bench.Reading("step", 10, 5.0, 6.0, 100_000_000, "", 8_000_000_000_000).floor_ms(ceilings) == 2000


def test_bytes_that_a_step_must_read(model):
    cache = bench.filled(model, OasisConfig(budget=160), 2, 1000, 0.01)
    weights = sum(weight.nbytes for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        weights -= embedding.nbytes
    layers, heads, dim = len(cache.sparse_layers), 2, 64
    slots = 2 * layers * 2 * heads * (8 + 160) * dim * 4
    assert bench.hbm_bytes(model, cache, 1000, predicts=False) == weights + slots
    assert bench.hbm_bytes(model, cache, 1000, predicts=False, attends=False) == weights
    (bare,) = bench.bench(model, 2, 1000, steps=1, pool_gib=0.01, parts_of=("bare",), budget=160)
    assert bare.hbm_bytes == weights
    vectors = layers * 2 * heads * (1000 // 16) * 2 * 2 * (dim + 2)
    assert bench.hbm_bytes(model, cache, 1000, predicts=True) == pytest.approx(weights + slots + vectors, rel=1e-6)


def test_a_trace_says_how_many_of_the_selected_blocks_move(model, monkeypatch):
    from oasis_hf.store import HostStore

    plain, moved = HostStore.gather_layers, []

    def seen(self, moves):
        moved.extend((block >= 0).sum(2) for *_, block, _ in moves)
        plain(self, moves)

    monkeypatch.setattr(HostStore, "gather_layers", seen)
    shares = [0.25, 0.5, 0.0, 0.25]
    cache = bench.filled(model, OasisConfig(budget=160, fetch_ratio=3 / 9), 16, 2000, 0.01)
    with bench.forced_misses(True), bench.fetches_of(shares):
        steps(model, cache, 8)
    counts = torch.cat(moved).flatten().bincount(minlength=4)
    assert counts[2] == 0 and counts.sum() == 16 * 8 * 4 * 2
    assert (counts / counts.sum() - torch.tensor(shares)).abs().max() < 0.1
    assert bench.mean_fetched(shares) == 1.25


def test_a_trace_without_this_cap_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"rows": [{"cap": 3, "shares": [0.5, 0.2, 0.2, 0.1]}]}')
    assert bench.traced(path, 3) == [0.5, 0.2, 0.2, 0.1]
    with pytest.raises(bench.ConfigError, match="no trace with a cap of 6"):
        bench.traced(path, 6)
