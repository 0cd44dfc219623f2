"""Scorers against the sums they stand for."""

from __future__ import annotations

import pytest
import torch

from oasis_hf.scorers import SCORERS, MidrangeScorer, MinMaxScorer


def keys_and_query(seed=0, tokens=5, dim=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, tokens, dim, generator=generator), torch.randn(3, dim, generator=generator)


def dot(scorer, keys, query):
    return (scorer.expand(query) * scorer.summarize(keys)).sum((-1, -2))


def test_minmax_is_quests_bound_summed_by_hand():
    keys, query = keys_and_query()
    for row in range(3):
        high = [max(float(keys[row, t, d]) for t in range(5)) for d in range(12)]
        low = [min(float(keys[row, t, d]) for t in range(5)) for d in range(12)]
        bound = sum(max(float(q) * h, float(q) * lo) for q, h, lo in zip(query[row], high, low))
        assert dot(MinMaxScorer(), keys, query)[row].item() == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("half_range", [0.0, 0.5, 0.8])
def test_midrange_is_the_middle_and_a_share_of_the_half_range_summed_by_hand(half_range):
    keys, query = keys_and_query(1)
    for row in range(3):
        total = 0.0
        for d in range(12):
            channel = [float(keys[row, t, d]) for t in range(5)]
            middle, half = (max(channel) + min(channel)) / 2, (max(channel) - min(channel)) / 2
            total += float(query[row, d]) * middle + half_range * abs(float(query[row, d])) * half
        assert dot(MidrangeScorer(half_range), keys, query)[row].item() == pytest.approx(total, rel=1e-4, abs=1e-5)


def test_no_key_of_the_block_scores_above_the_bound():
    for seed in range(20):
        keys, query = keys_and_query(seed, tokens=16)
        best = (keys @ query.unsqueeze(-1)).squeeze(-1).amax(-1)
        for scorer in (MinMaxScorer(), MidrangeScorer(1.0)):
            assert (dot(scorer, keys, query) >= best - 1e-4).all()


def test_midrange_with_the_whole_half_range_is_minmax():
    keys, query = keys_and_query(2)
    torch.testing.assert_close(dot(MidrangeScorer(1.0), keys, query), dot(MinMaxScorer(), keys, query))


def test_one_key_scores_its_own_product():
    keys, query = keys_and_query(3, tokens=1)
    for scorer in (MinMaxScorer(), MidrangeScorer(0.3)):
        torch.testing.assert_close(dot(scorer, keys, query), (keys[:, 0] * query).sum(-1))


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtype(name, dtype):
    scorer = SCORERS[name](0.5)
    assert scorer.summarize(torch.zeros(2, 3, 8, 16, dtype=dtype)).shape == (2, 3, 2, 16)
    assert scorer.summarize(torch.zeros(2, 3, 8, 16, dtype=dtype)).dtype == dtype
    assert scorer.expand(torch.zeros(4, 5, 16, dtype=dtype)).shape == (4, 5, 2, 16)


def test_midrange_of_large_fp16_keys_does_not_overflow():
    keys = torch.tensor([[60000.0, -60000.0], [60000.0, 60000.0]], dtype=torch.float16)
    assert MidrangeScorer().summarize(keys).tolist() == [[60000.0, 0.0], [0.0, 60000.0]]
