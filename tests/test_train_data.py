"""Files to prompts, samples to packs, and what the target says of packed texts."""

import gzip
import json

import numpy as np
import pytest
import torch
from tiny import VOCAB, prompt, tiny

from oasis_hf.train import data, evaluate, made, prompts
from oasis_hf.train.config import TrainConfig, TrainError
from oasis_hf.train.features import Target
from oasis_hf.train.generate import Generator, Sample


def samples(lengths=((5, 40), (20, 33), (0, 60), (7, 12)), share=1.0):
    return data.Samples.of([Sample(prompt(1, n, seed=n)[0].tolist(), s) for s, n in lengths], share)


def test_lines_of_every_kind(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    lines = [{"t": "abcdefgh"}, {"p": "Say."}, {"p": "{DOC}?", "d": [0, 2, 3]}, {"messages": talk}]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    text = tmp_path / "b.txt"
    text.write_text("plain")
    texts = prompts.read([text, file])
    assert texts.documents == ["plain", "abcdefgh"]
    assert [texts.messages(p)[-1]["content"] for p in texts.prompts] == ["Say.", "cde?", "Hi"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"x": 1}', "line 1 is not a line of data"),
        ("[", "line 1"),
        ("", "no prompts"),
        ('{"p": "a", "d": [3, 0, 1]}', "document 3"),
    ],
)
def test_what_is_no_data_is_said(tmp_path, content, reason):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(TrainError, match=reason):
        prompts.read([file])


def test_held_out_texts_are_never_trained_on():
    passages = [prompts.Prompt([], (i % 40, 0, 1)) for i in range(200)]
    texts = prompts.Texts(passages, [str(i) for i in range(40)])
    train, held = texts.prompts_of(False), texts.prompts_of(True)
    assert len(held) == 4 and not {id(p) for p in train} & {id(p) for p in held}
    assert all(p.passage[0] % 20 for p in train)
    assert texts.documents_of(True) == ["0", "20"] and len(texts.documents_of(False)) == 38


def test_samples_come_back_from_disk(tmp_path):
    parts = {"train": samples(), "documents": samples(((0, 9),), 0.5), "context_1000": samples(((3, 8),))}
    data.save(tmp_path, parts)
    back = data.load(tmp_path)
    assert back.keys() == parts.keys()
    for name, part in parts.items():
        assert [part.get(i) for i in range(len(part))] == [back[name].get(i) for i in range(len(part))]
        assert np.array_equal(part.share, back[name].share)
    (tmp_path / data.FILE).write_bytes(b"no")
    with pytest.raises(TrainError, match="Can't read the samples"):
        data.load(tmp_path)


def test_packs_hold_every_row_once_and_fit():
    many = data.Samples.joined([samples(), samples(((1, 50), (30, 64)))] * 5)
    packs = data.packs(many, 128, 128, epoch=1, seed=0)
    found = sorted((i, int(t)) for pack in packs for i, own in zip(pack.samples, pack.rows) for t in own)
    assert found == [(i, int(t)) for i in range(len(many)) for t in many.rows(i)]
    again, other = (data.packs(many, 128, 128, epoch=e, seed=0) for e in (1, 2))
    assert [p.samples for p in again] == [p.samples for p in packs] != [p.samples for p in other]
    for pack in packs:
        batch, origin = data.batch(many, pack, 128, 128)
        real = sum(int(many.lengths[i]) for i in pack.samples)
        assert np.array_equal(many.ids[origin[:real]], batch.ids[:real])
        assert torch.equal(batch.starts + batch.positions, torch.arange(128))
        assert (batch.last[batch.real] - batch.rows[batch.real] >= 2).all()
        assert (batch.rows.diff() >= 0).all()
    (index,) = [i for i in range(len(many)) if many.lengths[i] == 33][:1]
    assert many.rows(index).tolist() == list(range(18, 31)), "token t + 2 belongs to the response, and is there"


def test_a_share_of_a_documents_rows():
    rows = sum(len(own) for pack in data.packs(samples(((0, 2000),), 0.25), 2048, 2048, 0, 0) for own in pack.rows)
    assert 400 < rows < 600


def test_the_draft_vocabulary_is_what_responses_use():
    part = data.Samples.of([Sample([9, 9, 9, 5, 5, 7], 3), Sample([4, 7, 3], 0)])
    assert data.vocabulary([part], VOCAB, 3, [2]).tolist() == [2, 5, 7]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_packed_texts_are_read_as_each_by_itself(family):
    model, texts = tiny(family), samples()
    ids = torch.arange(5, 65)
    target = Target(model, (1, 2, 3), ids)
    (pack,) = data.in_order(texts, 256, 128)
    batch, origin = data.batch(texts, pack, 256, 128)
    got = target.teach(batch)
    at = 0
    for i in range(len(texts)):
        one = torch.tensor([texts.get(i).ids])
        with torch.no_grad():
            out = model(one, output_hidden_states=True)
        run = slice(at, at + one.shape[1])
        want = torch.cat([out.hidden_states[layer][0] for layer in (1, 2)], -1)
        torch.testing.assert_close(got.taps[run, : want.shape[1]], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.logits[run], out.logits[0][:, ids], atol=1e-3, rtol=1e-3)
        best = out.logits[0].argmax(-1)
        assert torch.equal(got.best[run], torch.where((best >= 5) & (best < 65), best - 5, -1))
        at += one.shape[1]
    target.keep(texts, 64)
    kept = target.teach(batch, origin)
    for name in ("taps", "logits"):
        torch.testing.assert_close(getattr(kept, name)[:at], getattr(got, name)[:at], atol=1e-4, rtol=1e-4)
    assert torch.equal(kept.best[:at], got.best[:at])


def test_tau_is_that_of_real_speculative_decoding():
    """Chains of the head's own drafts, each verified by a forward of the target; in all 150 tokens of 3 prompts."""
    model, drafts = tiny("llama"), 3
    asked = [prompt(1, n, seed=n)[0].tolist() for n in (6, 11, 30)]
    texts = data.Samples.of(Generator(model, 3, 81, 51).run(asked, [0.0] * 3))
    ids = data.vocabulary([texts], VOCAB, 60, [])
    shape = made.head_config(model, TrainConfig(draft_vocab=60, taps=(1, 2, 3)), 2048)
    head = made.new_head(model, shape, ids, seed=1).requires_grad_(False)
    got = evaluate.measure(head, model, texts, 1000, drafts, 256, 128)
    passes = sum(speculated(model, head, texts.get(i), drafts) for i in range(3))
    assert (got["tokens"], got["passes"]) == (150, passes)
    assert 75 < passes < 150, "some drafts are right, some not"
    assert got["tau"] == round(150 / passes, 4)


def speculated(model, head, sample, drafts):
    """Passes of the target that a decoder needs for a response, its first token given."""
    from transformers import DynamicCache  # noqa: F401

    embeddings, config = model.get_input_embeddings().weight, head.config
    text, at, passes = sample.ids[: sample.start + 1], sample.start - 1, 0
    while len(text) < len(sample.ids):
        hidden = model(torch.tensor([text[: at + 1]]), output_hidden_states=True).hidden_states
        raw = {}
        hook = model.model.norm.register_forward_pre_hook(lambda module, args: raw.update(x=args[0]))
        model(torch.tensor([text[: at + 1]]))
        hook.remove()
        state = head.fuse([hidden[1][0], hidden[2][0], raw["x"][0]])
        chain = []
        tokens, keys, values = text[1 : at + 2], [], []
        for step in range(drafts):
            rows = state if step == 0 else state[-1:]
            position = torch.arange(at + 1) if step == 0 else torch.tensor([at + step])
            last = torch.tensor(tokens if step == 0 else chain[-1:])
            q, k, v, residual = head.project(embeddings[last], rows, position)
            keys.append(k)
            values.append(v)
            groups = config.num_attention_heads // config.num_key_value_heads
            key, value = (torch.cat(x).repeat_interleave(groups, 1) for x in (keys, values))
            weights = (torch.einsum("hd,khd->hk", q[-1], key) * config.head_dim**-0.5).softmax(-1)
            out = head.finish(torch.einsum("hk,khd->hd", weights, value).flatten()[None], residual[-1:])
            chain.append(int(head.target_ids(head.logits(out).argmax(-1))))
            state = out
        true = model(torch.tensor([text + chain])).logits[0, len(text) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(chain, true)) if a != b), drafts)
        text, at, passes = text + true[: accepted + 1], at + accepted + 1, passes + 1
    assert text[: len(sample.ids)] == sample.ids
    return passes


def test_a_walk_counts_tokens_and_passes():
    hits = np.array([[1, 1], [0, 1], [1, 0], [1, 1], [1, 0], [0, 0]], bool)
    tokens, passes, accepted = evaluate.walk(hits)
    assert (tokens, passes, accepted.tolist()) == (6, 2, [2, 2])
    assert evaluate.walk(hits[1:])[:2] == (5, 3)
    assert evaluate.walk(np.zeros((4, 2), bool))[:2] == (4, 4)


def test_continuations_are_runs_of_documents():
    documents = [list(range(n, n + 700)) for n in (0, 700, 1400)]
    made = prompts.continuations(documents, 400, 4000, 0)
    assert len(made) == 400 and made == prompts.continuations(documents, 400, 4000, 0)
    assert made != prompts.continuations(documents, 400, 4000, 1)
    lengths = sorted(map(len, made))
    assert all(run == list(range(run[0], run[0] + len(run))) and run[-1] < 2100 for run in made)
    assert lengths[0] >= 64 and 900 < lengths[-1] <= 1024 and 200 < lengths[200] < 320
    assert max(map(len, prompts.continuations(documents, 50, 100, 0))) <= 100
    assert prompts.continuations([[1] * 40], 50, 100, 0) == prompts.continuations([], 50, 100, 0) == []
