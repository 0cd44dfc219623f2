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


def test_a_reading_divides_rightly():
    one = bench.Reading("step", rows=10, ms=5.0, call_ms=6.0, bytes=100_000_000, graph="")
    assert one.tokens_per_second == 2000 and one.link == 20e9
