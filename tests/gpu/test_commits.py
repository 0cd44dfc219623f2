"""Accepting drafts by a captured graph is accepting them eagerly."""

from __future__ import annotations

import pytest
import torch
from test_model import model, on_gpu  # noqa: F401
from tiny import left_padded

import oasis_hf
from oasis_hf import OasisCache, OracleDrafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "temperature": 0.5}, {"repetition_penalty": 1.1}], ids=str)
@pytest.mark.parametrize("oracle, candidates", [(False, 1), (True, 1), (False, 3)])
def test_it_gives_what_the_eager_commit_gives(model, kwargs, oracle, candidates):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    kwargs = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": [95, 94], "pad_token_id": 0, **kwargs}
    free = model.generate(**inputs, **{**kwargs, "do_sample": False, "eos_token_id": None})
    known = torch.nn.utils.rnn.pad_sequence(
        [row[200 - n :] for row, n in zip(free, (150, 200, 171))], batch_first=True, padding_value=0
    )
    texts, caches = [], []
    for graphs in (False, True):
        torch.manual_seed(1)
        cache = OasisCache(
            model, budget=112, speculate=True, draft_tokens=3, candidates=candidates, graphs=graphs, compile_after=None,
            drafter=OracleDrafter(known) if oracle else "prompt_lookup",
        )  # fmt: skip
        texts.append(oasis_hf.generate(model, **inputs, past_key_values=cache, **kwargs))
        caches.append(cache)
    eager, cache = caches
    assert cache.graphs.refused is None and cache.graphs.unaccepted is None
    assert any(one.accepting for one in cache.graphs.captured.values())
    assert torch.equal(*texts) and cache.state.rows.tokens == eager.state.rows.tokens
    assert cache.stepper.passed == eager.stepper.passed
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name
    rows = cache.state.rows
    assert rows.lengths(cache.device).tolist() == rows.tokens
    for one, two in zip(eager.sparse_layers, cache.sparse_layers):
        for row, n in enumerate(rows.tokens):
            for a, b in zip(one.store.read(one.index, row, 0, n), two.store.read(two.index, row, 0, n)):
                assert torch.equal(a, b)


@pytest.mark.parametrize("candidates", [1, 3])
def test_one_token_a_call_is_committed_by_a_graph(model, candidates):  # noqa: F811
    """transformers' own loop."""
    inputs = on_gpu(left_padded([150, 200, 171]))
    call = {**inputs, "max_new_tokens": 80, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    free = model.generate(**call)
    known = torch.nn.utils.rnn.pad_sequence(
        [row[200 - n :] for row, n in zip(free, (150, 200, 171))], batch_first=True, padding_value=0
    )
    texts, caches = [], []
    for graphs in (False, True):
        cache = OasisCache(
            model, budget=1040, speculate=True, draft_tokens=3, candidates=candidates, graphs=graphs,
            compile_after=None, drafter=OracleDrafter(known),
        )  # fmt: skip
        texts.append(model.generate(**call, past_key_values=cache))
        caches.append(cache)
    eager, cache = caches
    assert cache.graphs.refused is None and cache.graphs.unaccepted is None and cache.stepper.skipped > 20
    assert any("one" in one.accepting for one in cache.graphs.captured.values())
    assert torch.equal(*texts) and cache.state.rows.tokens == eager.state.rows.tokens
    for name, value in eager.stats().items():
        assert torch.equal(value, cache.stats()[name]), name


def test_a_heads_steps_are_compiled_with_the_layers(model):  # noqa: F811
    from oasis_hf.drafters import Eagle3Drafter
    from oasis_hf.drafters.eagle3 import fused
    from oasis_hf.drafters.eagle3.head import Eagle3Head
    from oasis_hf.train.config import TrainConfig
    from oasis_hf.train.made import head_config

    torch.manual_seed(0)
    head = Eagle3Head(head_config(model, TrainConfig(minutes=1), 64), "cuda").to(model.dtype)
    drafter, ran = Eagle3Drafter(head, model), []
    run = drafter.pieces.run

    def both(piece, *args):
        plain = piece(*args)
        out = run(piece, *args)
        if drafter.pieces._on and not torch.cuda.is_current_stream_capturing():
            ran.append(piece)
            if piece is not fused.best:  # where two are as high, rounding decides
                for a, b in zip(*((one,) if isinstance(one, torch.Tensor) else one for one in (out, plain))):
                    torch.testing.assert_close(a.float(), b.float(), atol=0.03, rtol=0.02)
        return out

    drafter.pieces.run = both
    inputs = on_gpu(left_padded([150, 200, 171]))
    cache = OasisCache(model, budget=112, compile_after=4, drafter=drafter)
    model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=None, past_key_values=cache)
    assert cache.graphs.refused is cache.graphs.unfused is drafter.pieces.failed is None
    assert {fused.project, fused.attend, fused.finish, fused.best, fused.fuse} <= set(ran)
