"""Dense attention of a prompt against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oasis_hf import attention
from oasis_hf.attention import dense_attention

ROWS, HEADS, GROUP, DIM = 2, 2, 3, 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(count, before=0, dtype=torch.float32):
    query = randn(ROWS, HEADS * GROUP, count, DIM).to(dtype)
    new = [randn(ROWS, HEADS, count, DIM, seed=s).to(dtype) for s in (1, 2)]
    past = [randn(ROWS, HEADS, before, DIM, seed=s).to(dtype) for s in (3, 4)] if before else None
    return query, new, past


def by_hand(query, new, past, past_seen, valid, scaling, sinks, window):
    """Positions: the past ends just before the first new token. A padding query's output is not defined: nan."""
    count = query.shape[2]
    before = 0 if past is None else past[0].shape[2]
    out = np.full(query.shape, np.nan)
    for b, hq, t in np.ndindex(*query.shape[:3]):
        if valid is not None and not valid[b, t]:
            continue
        h = hq // GROUP
        seen = []
        for at in range(-before, count):
            exists = past_seen[b, before + at] if at < 0 else valid is None or valid[b, at]
            if at <= t and exists and (window is None or t - at < window):
                source = past if at < 0 else new
                seen.append([x[b, h, before + at if at < 0 else at].double().numpy() for x in source])
        logits = [scaling * float(query[b, hq, t].double().numpy() @ k) for k, _ in seen]
        extra = [] if sinks is None else [float(sinks[hq])]
        total = sum(map(math.exp, logits + extra))
        out[b, hq, t] = sum(math.exp(x) / total * v for x, (_, v) in zip(logits, seen))
    return out


def check(count, before=0, past_seen=None, valid=None, sinks=False, window=None):
    query, new, past = case(count, before)
    if past is not None and past_seen is None:
        past_seen = torch.ones(ROWS, before, dtype=torch.bool)
    sinks = randn(HEADS * GROUP, seed=9) if sinks else None
    got = dense_attention(query, *new, past and tuple(past), past_seen, valid, 0.6, sinks, window).numpy()
    want = by_hand(query, new, past, past_seen, valid, 0.6, sinks, window)
    assert np.isfinite(got).all()
    real = ~np.isnan(want)
    assert real.any()
    np.testing.assert_allclose(got[real], want[real], rtol=1e-4, atol=1e-5)


def left_padded(count, *pads):
    return torch.arange(count) >= torch.tensor(pads)[:, None]


@pytest.fixture(params=[False, True], ids=["whole", "chunked"])
def chunked(request, monkeypatch):
    """The same in runs of one to three queries."""
    if request.param:
        monkeypatch.setattr(attention, "CHUNK_BYTES", 300)


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("sinks", [False, True])
def test_causal(chunked, count, sinks):
    check(count, sinks=sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_with_a_past(chunked, sinks):
    check(5, before=7, sinks=sinks)


def test_rows_whose_past_is_shorter(chunked):
    check(4, before=6, past_seen=torch.arange(6) < torch.tensor([6, 2])[:, None])
    check(4, before=6, past_seen=torch.arange(6) < torch.tensor([0, 6])[:, None])


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_is_not_seen_and_gives_finite_numbers(chunked, sinks):
    check(8, valid=left_padded(8, 0, 5), sinks=sinks)
    check(8, valid=left_padded(8, 8, 3), sinks=sinks)
    holes = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]]).bool()
    check(6, valid=holes, sinks=sinks)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 20])
def test_window(chunked, window):
    check(9, window=window)
    check(9, window=window, sinks=True)
    check(4, before=6, window=window)


def test_everything_at_once(chunked):
    seen = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    check(7, before=5, past_seen=seen, valid=left_padded(7, 2, 0), sinks=True, window=4)


def test_chunks_respect_the_limit(monkeypatch):
    sizes = []
    real = attention.masked_attention

    def spy(query, keys, values, allowed, *rest):
        sizes.append(allowed.numel())
        return real(query, keys, values, allowed, *rest)

    monkeypatch.setattr(attention, "masked_attention", spy)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 2000)
    check(30, valid=left_padded(30, 0, 3))
    assert len(sizes) > 1 and all(5 * size <= 2000 for size in sizes)


@pytest.mark.parametrize("sinks", [False, True])
def test_half_precision_stays_half_precision(sinks):
    query, new, _ = case(6, dtype=torch.bfloat16)
    valid = left_padded(6, 0, 2)
    sinks = randn(HEADS * GROUP, seed=9).bfloat16() if sinks else None
    got = dense_attention(query, *new, None, None, valid, 0.6, sinks)
    assert got.dtype == torch.bfloat16
    want = by_hand(query, new, None, None, valid, 0.6, sinks, None)
    real = ~np.isnan(want)
    np.testing.assert_allclose(got.float().numpy()[real], want[real], atol=0.03)
