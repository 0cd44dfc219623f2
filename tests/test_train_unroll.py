"""The unroll of a head over whole texts is what the drafter computes, row by row, when its chain is the text."""

from __future__ import annotations

import pytest
import torch
from heads import TAPS, H, ids, states, target
from test_hit_rate import drafter  # noqa: F401

from oasis_hf.train import unroll as train


def chain(drafter, tokens, fused, at, steps, window):  # noqa: F811
    """Outputs `[steps, H]` of row `at`: its keys and values come from the rows before it, then from its own chain."""
    head, past = drafter.head, type(drafter.past)(1, drafter.head.config, window, torch.float32, torch.device("cpu"))
    embeddings = target().get_input_embeddings().weight
    for row in range(at):
        _, k, v, _ = head.project(head.embed(tokens[None, row + 1], embeddings)[None], fused[None, None, row],
                                  torch.tensor([[row]]))  # fmt: skip
        past.write(k, v, torch.tensor([[row]]), torch.ones((1, 1), dtype=torch.bool))
    hidden, out = fused[None, None, at], []
    for step in range(steps):
        position = torch.tensor([[at + step]])
        query, k, v, residual = head.project(
            head.embed(tokens[None, at + 1 + step], embeddings)[None], hidden, position
        )
        if step:
            past.chain(k, v, position, step - 1)
        else:
            past.write(k, v, position, torch.ones((1, 1), dtype=torch.bool))
        output = head.finish(past.attend(query, position), residual)
        hidden = head.state(output)
        out.append(output[0, 0])
    return torch.stack(out)


@pytest.mark.parametrize("window", [1000, 6, 2])
@torch.no_grad()
def test_every_row_is_what_the_drafter_computes(drafter, window):  # noqa: F811
    steps, lengths = 4, (17, 12)
    tokens = ids(1, sum(lengths))
    texts = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    model, fused, start = target(), [], 0
    for length in lengths:
        fused.append(drafter.head.fuse(list(states(model, tokens[0, start : start + length].tolist(), TAPS))))
        start += length
    drafter._room(1)
    embeddings = model.get_input_embeddings().weight
    outputs = train.unroll(drafter.head, embeddings, tokens, torch.cat(fused)[None], texts, steps, window)
    start = 0
    for length, own in zip(lengths, fused):
        for at in range(length - steps - 1):
            want = chain(drafter, tokens[0, start : start + length], own, at, steps, window)
            got = torch.stack([output[0, start + at] for output in outputs])
            torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-5)  # of values up to 7
        start += length


def test_what_counts():
    texts = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1]])
    answers = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert train.counts(texts, answers, 0)[0].nonzero().flatten().tolist() == [0, 1, 4]
    assert train.counts(texts, answers, 1)[0].nonzero().flatten().tolist() == [0]


def test_padding_gives_no_nan_and_takes_no_gradient(drafter):  # noqa: F811
    tokens, texts = ids(1, 12), torch.tensor([[0] * 8 + [-1] * 4])
    fused = torch.randn(1, 12, H, requires_grad=True)
    embeddings = target().get_input_embeddings().weight
    outputs = train.unroll(drafter.head, embeddings, tokens, fused, texts, 3, 5)
    assert all(bool(output.isfinite().all()) for output in outputs)
    counted = train.counts(texts, torch.ones_like(texts, dtype=torch.bool), 2)
    outputs[2][counted].sum().backward()
    assert bool((fused.grad[0, :4] != 0).any()) and bool((fused.grad[0, 4:] == 0).all())


def test_the_loss_by_hand():
    logits, teacher = torch.randn(3, 5), torch.randn(3, 5)
    best, counted = torch.tensor([int(logits[0].argmax()), -1, 2]), torch.tensor([True, True, False])
    got, right = train.loss(logits, teacher, best, counted)
    p = torch.exp(teacher[0]) / torch.exp(teacher[0]).sum()
    q = torch.exp(logits[0]) / torch.exp(logits[0]).sum()
    assert float(got) == pytest.approx(float(-(p * q.log()).sum()), abs=1e-5) and int(right) == 1
