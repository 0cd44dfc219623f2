"""A captured step is the eager step: same tokens, same logits, whatever happens to the cache between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generate import generate
from test_model import KNOBS, model, on_gpu  # noqa: F401
from tiny import left_padded, prompt

from oasis_hf import OasisCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    for mine, theirs in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_captured_is_eager(model, knobs):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = {"budget": 112, "compile_after": None, **knobs}
    captured, eager = (OasisCache(model, graphs=graphs, **knobs) for graphs in (True, False))
    same(*(generate(model, inputs, cache, max_new_tokens=80) for cache in (captured, eager)))
    assert captured.graphs.refused is None and captured.graphs.replays > 20
    assert captured.graphs.captures <= (8 if knobs.get("speculate") else 4)  # mixed calls are a shape of their own
    assert eager.graphs.refused == "graphs=False" and eager.graphs.replays == 0
    for name, value in captured.stats().items():
        assert torch.equal(value, eager.stats()[name]), name


@pytest.mark.parametrize("blocks", [1, 9])
def test_a_shared_budget_is_captured_and_never_passed(model, blocks):  # noqa: F811
    inputs, caches = on_gpu(left_padded([150, 200, 171])), []
    for graphs in (True, False):
        cache = OasisCache(
            model, budget=112, graphs=graphs, compile_after=None, fetch_ratio="auto", fetch_bytes=1 << 30
        )
        with torch.no_grad():
            token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
            cache.state.shares.allow(blocks)
            cache.state.shares.share_out()
            before, at = 0, inputs["attention_mask"].sum(1, keepdim=True)
            for step in range(40):
                token = model(token, position_ids=at + step, past_key_values=cache).logits[:, -1:].argmax(-1)
                moved = int(cache.stats()["fetched"].sum())
                assert moved - before <= blocks
                before = moved
        assert before > 0
        caches.append(cache)
    captured, eager = caches
    assert captured.graphs.refused is None and captured.graphs.replays > 20
    for name, value in captured.stats().items():
        assert torch.equal(value, eager.stats()[name]), name
    for one, other in zip(captured.state.shares.place(), eager.state.shares.place(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(captured.sparse_layers, eager.sparse_layers, strict=True):
        means = one.summaries.means, other.summaries.means
        known = min(each.shape[2] for each in means)  # room is made in other steps
        assert torch.equal(*(each[..., :known] for each in means))


def test_the_link_sets_the_pace(model):  # noqa: F811
    cache = OasisCache(model, budget=112, fetch_ratio="auto")
    generate(model, on_gpu(left_padded([150, 200])), cache, max_new_tokens=40)
    assert cache.state.pace is not None and 1e9 < cache.state.pace.rate < 1e12
    assert int(cache.state.shares.budget) >= 1 and cache.graphs.refused is None


def test_a_replay_follows_what_happened_to_the_cache(model):  # noqa: F811
    """Crop, branch, new rows, a second turn: the addresses change, and the step is captured anew."""

    def live(graphs):
        cache = OasisCache(model, budget=112, graphs=graphs, compile_after=None)
        ids = prompt(2, 200).cuda()
        out = [generate(model, ids, cache, max_new_tokens=30)]
        branch = copy.deepcopy(cache)
        more = torch.cat((out[0].sequences, prompt(2, 40, 5).cuda()), 1)
        out.append(generate(model, more, cache, max_new_tokens=30))
        out.append(generate(model, more, branch, max_new_tokens=30))
        cache.crop(-20)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = out[1].sequences[[1, 0], : cache.get_seq_length() + 1]
        out.append(generate(model, again, cache, max_new_tokens=30))
        return out, cache

    (one, cache), (two, _) = live(True), live(False)
    for a, b in zip(one, two):
        same(a, b)
    assert cache.graphs.replays > 60


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_compiled_layers_give_the_same_within_rounding(model, knobs):  # noqa: F811
    inputs = on_gpu(left_padded([150, 200, 171]))
    weights = [weight.clone() for weight in model.parameters()]
    eager, compiled = (
        OasisCache(model, budget=112, compile_after=2, graphs=graphs, **knobs) for graphs in (False, True)
    )
    wanted, got = (generate(model, inputs, cache, max_new_tokens=60) for cache in (eager, compiled))
    assert compiled.graphs.refused is None and compiled.graphs.unfused is None and compiled.graphs.replays > 15
    for step, (a, b) in enumerate(zip(wanted.logits, got.logits, strict=True)):
        width = inputs["input_ids"].shape[1] + step
        if not torch.equal(wanted.sequences[:, :width], got.sequences[:, :width]):
            assert step > 10  # a score that rounds otherwise swaps two blocks, and from there on texts may part
            break
        assert (a.float() - b.float()).abs().mean() < 0.05
        torch.testing.assert_close(a.float(), b.float(), atol=0.3, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)


def test_steps_with_sliding_layers_are_captured():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=384, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    sliding = Gemma3ForCausalLM(config).eval().to("cuda", torch.bfloat16)
    sliding.generation_config.eos_token_id = None
    inputs = on_gpu(left_padded([150, 200, 171]))
    captured, eager = (OasisCache(sliding, budget=112, compile_after=None, graphs=graphs) for graphs in (True, False))
    same(*(generate(sliding, inputs, cache, max_new_tokens=80) for cache in (captured, eager)))
    assert captured.graphs.refused is None and captured.graphs.replays > 40


def test_dense_steps_are_captured_too(model):  # noqa: F811
    inputs = on_gpu(left_padded([21, 50, 33]))
    eager, captured = (OasisCache(model, compile_after=None, graphs=graphs) for graphs in (False, True))
    same(*(generate(model, inputs, cache, max_new_tokens=60) for cache in (eager, captured)))
    assert captured.graphs.replays > 30 and not captured.stats()["fetched"].any()


def test_many_steps_keep_memory_and_graphs_bounded(model):  # noqa: F811
    cache = OasisCache(model, budget=112, compile_after=100)
    generate(model, prompt(1, 200).cuda(), cache, max_new_tokens=600)
    before = torch.cuda.memory_reserved()
    ids = torch.cat((prompt(1, 200), prompt(1, 600, 3)), 1).cuda()
    cache.reset()
    generate(model, ids, cache, max_new_tokens=300)
    assert len(cache.graphs.captured) <= 2
    assert torch.cuda.memory_reserved() <= before + (64 << 20)


def test_rows_that_open_blocks_by_and_by_never_wait_for_the_device(model):  # noqa: F811
    """What a replayed step makes ready for the next: pages and their entries in the operators' table."""
    cache = OasisCache(model, budget=112, compile_after=None)
    generate(model, on_gpu(left_padded([200 - row for row in range(16)])), cache, max_new_tokens=12)
    store, rows = cache.state.store, cache.state.need_rows()
    table = store.device_table
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            cache.prepare_ahead(0)
            rows.advance(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    known = store.table >= 0
    assert store.device_table is table and torch.equal(table.cpu()[known], store.table[known])


def test_what_cannot_be_captured_runs_eagerly_and_says_why(model):  # noqa: F811
    cache = OasisCache(model, budget=112, store="resident")
    generate(model, prompt(1, 150).cuda(), cache, max_new_tokens=5)
    assert cache.graphs.refused == "store='resident'"
    cache = OasisCache(model, budget=112)
    generate(model, prompt(1, 150).cuda(), cache, max_new_tokens=8, output_hidden_states=True)
    assert "output_hidden_states" in cache.graphs.refused


def test_a_capture_that_fails_leaves_the_generator_as_it_was(model):  # noqa: F811
    """A module that reads a value back; sampling goes on by the eager step."""
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: float(args[0].sum()) and None)
    try:
        cache = OasisCache(model, budget=112)
        model.generate(prompt(1, 150).cuda(), past_key_values=cache, max_new_tokens=16, do_sample=True)
        assert cache.graphs.captures == 0 and cache.graphs.refused
        assert torch.rand(3, device="cuda").shape == (3,)
    finally:
        handle.remove()


def test_a_cache_gives_everything_back_at_once(model):  # noqa: F811
    """Graphs hold no cycle through the cache: without a collection its pages are unpinned and its memory is free."""
    import gc
    import weakref

    def live():
        cache = OasisCache(model, budget=112)
        generate(model, prompt(1, 150).cuda(), cache, max_new_tokens=20)
        assert cache.graphs.replays > 10
        return weakref.ref(cache), weakref.ref(cache.state.store.pool)

    live()
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        assert [one() for one in live()] == [None, None]
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
    finally:
        gc.enable()
