"""Mixtures of experts in captured steps, and batches that turn from dense to sparse between replays."""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_generate import generate
from test_model import on_gpu
from tiny import left_padded, prompt
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oasis_hf import OasisCache, experts, sparsify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = dict(
    vocab_size=96, hidden_size=384, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, num_experts_per_tok=2,
)  # fmt: skip
MADE = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, num_experts=8, moe_intermediate_size=128)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZE, num_local_experts=8, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MADE)
def model(request):
    torch.manual_seed(0)
    made = MADE[request.param]().eval().to("cuda", torch.bfloat16)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    for mine, theirs in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("name", experts.CANDIDATES)
@pytest.mark.parametrize("knobs", [{}, {"speculate": True, "draft_tokens": 2}], ids=["plain", "speculate"])
def test_captured_is_eager(model, name, knobs, monkeypatch):
    """Both with the same implementation: generate itself would decode with another than it is set to."""
    monkeypatch.setattr(model, "_optimize_model_for_decode", contextlib.nullcontext)
    inputs = on_gpu(left_padded([150, 200, 171]))
    knobs = {"budget": 112, "compile_after": None, "experts": "own", **knobs}
    captured, eager = (OasisCache(model, graphs=graphs, **knobs) for graphs in (True, False))
    with experts.standing(experts.modules_of(model), name):
        same(*(generate(model, inputs, cache, max_new_tokens=60) for cache in (captured, eager)))
    assert captured.graphs.refused is None and captured.graphs.replays > 15
    assert captured.graphs.experts is None and eager.graphs.replays == 0


def test_the_fastest_is_measured_and_captured(model):
    inputs = on_gpu(left_padded([150, 200, 171]))
    own = {module.config._experts_implementation for module in experts.modules_of(model)}
    chosen, eager = (OasisCache(model, budget=112, compile_after=None, graphs=graphs) for graphs in (True, False))
    got, want = (generate(model, inputs, cache, max_new_tokens=40) for cache in (chosen, eager))
    choice = chosen.graphs.experts
    assert chosen.graphs.refused is None and chosen.graphs.replays > 15
    assert choice is not None and choice.fastest in experts.CANDIDATES and choice.tokens == 6
    assert "grouped_mm" in choice.ms, choice.refused
    assert own == {module.config._experts_implementation for module in experts.modules_of(model)}
    assert f"experts {choice.fastest} for 6 tokens" in " ".join(chosen.report().split())
    for a, b in zip(got.logits[:4], want.logits[:4]):  # both round, and what is routed otherwise differs from there on
        assert (a.float() - b.float()).abs().median() < 0.05


def test_eager_experts_cannot_be_captured_and_the_others_can(model):
    choice = experts.measured(model, 4, experts.captured_ms(torch.device("cuda")))
    assert choice.ms and not choice.refused and min(choice.ms.values()) > 0
    modules, timer = experts.modules_of(model), experts.captured_ms(torch.device("cuda"))
    hidden = torch.randn(4, 384, device="cuda", dtype=torch.bfloat16)
    index = torch.tensor([[0, 1]] * 4, device="cuda")
    with experts.standing(modules, "eager"), torch.no_grad(), pytest.raises(RuntimeError):
        timer(lambda: modules[0](hidden, index, torch.full((4, 2), 0.5, device="cuda", dtype=torch.bfloat16)))
    assert torch.rand(3, device="cuda").shape == (3,)


def test_compiled_layers_with_experts(model):
    """Or why they can't be: then they are captured as they are."""
    cache = OasisCache(model, budget=112, compile_after=2)
    generate(model, prompt(2, 200).cuda(), cache, max_new_tokens=40)
    assert cache.graphs.refused is None and cache.graphs.replays > 15
    print(type(model).__name__, "unfused:", cache.graphs.unfused)


@pytest.mark.parametrize("at", [None, 30])
def test_dense_steps_are_captured_and_so_are_those_behind_a_turn(model, at, monkeypatch):
    """As eager ones; where everything fits the working set a turn changes nothing but rounding."""
    inputs = on_gpu(left_padded([150, 200, 171]))
    monkeypatch.setattr(
        sparsify.Sparsity, "turn_for", lambda self, state, *rest: "asked" if state.number == at else None
    )
    knobs = dict(budget=112, sparsify="auto", compile_after=None, experts="batched_mm")
    captured, eager = (OasisCache(model, graphs=graphs, **knobs) for graphs in (True, False))
    same(*(generate(model, inputs, cache, max_new_tokens=80) for cache in (captured, eager)))
    assert captured.graphs.refused is None and captured.graphs.replays > 50
    assert captured.state.dense == (at is None)
    assert at is not None or not captured.stats()["bytes"].any()


def test_times_are_learnt_without_waiting(model, monkeypatch):
    monkeypatch.setattr(sparsify, "_times", type(sparsify._times)())
    cache = OasisCache(model, budget=112, sparsify="auto", compile_after=None)
    generate(model, prompt(2, 200).cuda(), cache, max_new_tokens=60)
    torch.cuda.synchronize()
    sparsity = cache.state.sparsity
    sparsity.collect()
    times = sparsity.times
    assert times.timed("dense", 2) and 0 < times.ms("dense", 2, 500) < 1000
    assert sparsify.free_bytes(torch.device("cuda", 0)) < torch.cuda.get_device_properties(0).total_memory


def test_a_batch_turns_when_the_device_is_full(model, monkeypatch):
    cache = OasisCache(model, budget=112, sparsify="auto", compile_after=None)
    first = generate(model, prompt(2, 200).cuda(), cache, max_new_tokens=20)
    assert cache.state.dense
    monkeypatch.setattr(sparsify, "free_bytes", lambda device: 0)
    more = torch.cat((first.sequences, prompt(2, 400, 5).cuda()), 1)  # beyond the slots that growth has ready
    generate(model, more, cache, max_new_tokens=40)
    assert not cache.state.dense and cache.sparse_layers[0].working_set.allocated == 7
    assert cache.stats()["fetched"].sum() > 0
