"""The unrolled training step, held against a drafter that keeps its keys and values and drafts one token at a time."""

import pytest
import torch
from tiny import VOCAB

from oasis_hf.drafters.eagle3 import fused
from oasis_hf.drafters.eagle3.head import Eagle3Head, HeadConfig
from oasis_hf.drafters.eagle3.past import Past
from oasis_hf.train import attention
from oasis_hf.train.unroll import Batch, Teacher, Unroll

STEPS = 4


def make_head(**kwargs):
    torch.manual_seed(3)
    config = HeadConfig(
        hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, draft_vocab_size=40, taps=(1, 2, 3), **kwargs,
    )  # fmt: skip
    head = Eagle3Head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, 0.3)
    return head


def make_batch(lengths=(40, 9, 70), share=0.6, fill=10):
    ids, positions, starts, rows, last = [], [], [], [], []
    start = 0
    generator = torch.Generator().manual_seed(0)
    for n in lengths:
        ids.append(torch.randint(3, VOCAB, (n,), generator=generator))
        positions.append(torch.arange(n))
        starts.append(torch.full((n,), start))
        own = torch.arange(n - 2)
        own = own[torch.rand(len(own), generator=generator) < share] + start
        rows.append(own)
        last.append(torch.full((len(own),), start + n - 1))
        start += n
    rows, last = torch.cat(rows), torch.cat(last)
    real = torch.arange(len(rows) + fill) < len(rows)
    rows, last = (torch.cat((x, x[-1:].repeat(fill))) for x in (rows, last))
    return Batch(torch.cat(ids), torch.cat(positions), torch.cat(starts), rows, last, real)


def make_teacher(batch, head):
    n = len(batch.ids)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(n, 96, generator=generator)
    logits = torch.randn(n, head.config.draft_vocab_size, generator=generator)
    return Teacher(taps, torch.randint(-1, 40, (n,), generator=generator), logits)


def one_at_a_time(head, embeddings, batch, taps, window, row):
    """The outputs of `STEPS` drafts behind position `row`, the way `Eagle3Drafter.propose` makes them."""
    start, t = int(batch.starts[row]), int(batch.positions[row])
    past = Past(1, head.config, window, torch.float32, torch.device("cpu"))
    for at in range(t + 1):  # the ring forgets what is too old by itself
        joined = head.fuse(list(taps[start + at].chunk(3)))[None, None]
        token = batch.ids[None, None, start + at + 1]
        position = torch.tensor([[at]])
        query, keys, values, residual = head.project(embeddings[token], joined, position)
        past.write(keys, values, position, torch.ones(1, 1, dtype=torch.bool))
    outs = []
    for step in range(STEPS):
        if step:
            token = batch.ids[None, None, min(start + t + 1 + step, int(batch.last[batch.rows == row][0]))]
            position = torch.tensor([[t + step]])
            query, keys, values, residual = head.project(embeddings[token], head.state(outs[-1]), position)
            past.chain(keys, values, position, step - 1)
        seen = fused.attend(query, past.keys, past.values, past.at, torch.tensor([[t + step]]), window)
        outs.append(head.finish(seen, residual))
    return torch.cat(outs)[:, 0]


@pytest.mark.parametrize("window", [1000, 12, 5])
@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "fc_norm": True, "norm_before_residual": True}])
def test_every_step_is_that_of_a_drafter_with_a_cache(window, flags):
    head = make_head(**flags)
    embeddings, batch = torch.randn(VOCAB, 32), make_batch()
    taps = make_teacher(batch, head).taps
    with torch.no_grad():
        got = torch.stack(Unroll(head, embeddings, window, STEPS, 0.8).outputs(batch, taps))
        for index in range(0, len(batch.rows), 7):
            want = one_at_a_time(head, embeddings, batch, taps, window, int(batch.rows[index]))
            torch.testing.assert_close(got[:, index], want, atol=1e-5, rtol=1e-5)


def both_kernels(device, gradients):
    torch.manual_seed(0)
    nq, nk = 256, 640
    high = torch.randint(0, nk, (nq,), device=device).sort().values
    reach = attention.Reach((high - 150).clamp(min=0), high)
    made = [torch.randn(n, h, 16, device=device, requires_grad=gradients) for n, h in ((nq, 4), (nk, 2), (nk, 2))]
    results = []
    for attend, given in ((attention.plain, reach), (attention.flex, attention.prepare(reach, nk))):
        out, total = attend(*made, given, 0.3)
        more = attention.merge(made[0], out, total, [made[1][:nq]], [made[2][:nq]], 0.3)
        results.append([out, total, more])
        if gradients:
            results[-1] += torch.autograd.grad((more * torch.arange(16, device=device)).sum() + total.sum(), made)
    return results


def test_the_kernel_for_gpus_gives_the_same():
    """Uncompiled on a CPU, where it has no gradients; which tiles it skips is ours."""
    for a, b in zip(*both_kernels("cpu", False)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_for_gpus_has_the_same_gradients():
    for a, b in zip(*both_kernels("cuda", True)):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_merged_attention_is_attention_over_all_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    reach = attention.Reach(torch.tensor([0, 0, 2, 3, 3]), torch.tensor([0, 4, 5, 8, 3]))
    own = [torch.randn(5, 2, 8) for _ in range(4)]
    got = attention.merge(q, *attention.plain(q, k, v, reach, 0.4), own[:2], own[2:], 0.4)
    for i in range(5):
        run = slice(int(reach.low[i]), int(reach.high[i]) + 1)
        keys = torch.cat((k[run], own[0][i][None], own[1][i][None])).repeat_interleave(2, 1)
        values = torch.cat((v[run], own[2][i][None], own[3][i][None])).repeat_interleave(2, 1)
        weights = (torch.einsum("hd,khd->hk", q[i], keys) * 0.4).softmax(-1)
        torch.testing.assert_close(got[i], torch.einsum("hk,khd->hd", weights, values))


def test_loss_is_over_what_is_learned_from_alone():
    head, batch = make_head(), make_batch(fill=10)
    teacher, embeddings = make_teacher(batch, head), torch.randn(VOCAB, 32)
    unroll = Unroll(head, embeddings, 30, STEPS, 0.8)
    got = unroll(batch, teacher)
    outs = unroll.outputs(batch, teacher.taps)
    total = 0.0
    for step in range(STEPS):
        losses, right, seen = [], 0, 0
        for i, (row, last) in enumerate(zip(batch.rows.tolist(), batch.last.tolist())):
            if not batch.real[i] or row + step + 2 > last:
                continue
            at, guess = row + step + 1, head.logits(outs[step][i])
            seen += 1
            right += int(guess.argmax() == teacher.best[at])
            if teacher.best[at] >= 0:
                losses.append(-(teacher.logits[at].softmax(-1) * guess.log_softmax(-1)).sum())
        mean = torch.stack(losses).mean()
        torch.testing.assert_close(got.losses[step], mean.detach(), atol=1e-4, rtol=1e-5)
        assert abs(float(got.right[step]) - right / seen) < 1e-6
        total = total + 0.8**step * mean
    torch.testing.assert_close(got.loss, total, atol=1e-4, rtol=1e-5)
    assert int(got.count) == int(batch.real.sum())
    assert 1 <= float(got.tau) <= 1 + STEPS


def test_nothing_depends_on_other_texts_or_on_what_fills_up():
    head, embeddings = make_head(), torch.randn(VOCAB, 32)
    batch = make_batch(lengths=(20, 30), share=1.0, fill=0)
    taps = make_teacher(batch, head).taps
    unroll = Unroll(head, embeddings, 100, STEPS, 0.8)
    before = unroll.outputs(batch, taps)[-1]
    first = batch.rows < 20
    changed = taps.clone()
    changed[:20] = 0
    batch.ids[:20] = 5
    after = unroll.outputs(batch, changed)[-1]
    assert torch.equal(before[~first], after[~first]) and not torch.allclose(before[first], after[first])
