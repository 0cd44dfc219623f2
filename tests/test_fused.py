"""Compiled decoder layers: one graph for all, the same results, and a model that is as before afterwards."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny import prompt, tiny
from torch import nn

from oasis_hf import OasisCache, fused
from oasis_hf.fused import FusedLayers, FusionError, fused_layers


@pytest.fixture
def model():
    import copy

    return copy.deepcopy(tiny("qwen3"))


@torch.no_grad()
def steps(model, around, count=4):
    """Logits of `count` decode steps, each inside `around()`."""
    cache, ids = OasisCache(model, budget=64), prompt(2, 100)
    model(ids, past_key_values=cache)
    out = []
    for token in range(5, 5 + count):
        with around():
            out.append(model(ids[:, :1] * 0 + token, past_key_values=cache).logits)
    return torch.cat(out, 1), cache


def test_layers_share_one_graph_and_give_the_same(model):
    from torch._dynamo.utils import counters

    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted, eager = steps(model, contextlib.nullcontext)
    counters.clear()
    got, compiled = steps(model, lambda: fused_layers(model).placed())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, compiled.stats()[name]) for name, value in eager.stats().items())
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for layer in model.model.layers:
        assert "forward" not in layer.__dict__ and type(layer.self_attn.q_proj) is nn.Linear
        assert not any("_oasis_layer" in module.__dict__ for module in layer.modules())


def test_a_model_that_was_once_asked_for_its_hidden_states_still_compiles(model):
    with torch.no_grad():
        model(prompt(2, 8), output_hidden_states=True, output_attentions=True)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    assert any(hooks)
    wanted, _ = steps(model, contextlib.nullcontext)
    layers = fused_layers(model)
    got, _ = steps(model, layers.placed)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    steps(model, layers.tried, count=1)
    assert layers.failed is None
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert len(model(prompt(2, 8), output_hidden_states=True).hidden_states) == len(model.model.layers) + 1


def test_projections_of_one_input_share_one_tensor_and_one_product(model):
    fused_layers(model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    starts = [module.weight.untyped_storage().data_ptr() for module in (attention.q_proj, attention.k_proj)]
    assert len(set(starts)) == 1 and attention.k_proj.weight.storage_offset() == attention.q_proj.weight.numel()
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    products = [graph.call_function(torch.ops.aten.mm.default, (x, w)) for _ in range(3)]
    graph.output(tuple(products))
    fused._Once()(graph)
    assert sum(node.op == "call_function" for node in graph.nodes) == 1


def test_weights_that_were_loaded_anew_are_joined_anew(model):
    first = fused_layers(model)
    assert fused_layers(model) is first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.data = torch.randn_like(model.model.layers[1].mlp.up_proj.weight)
    second = fused_layers(model)
    assert second is not first and second.holds()
    wanted, _ = steps(model, contextlib.nullcontext, 2)
    got, _ = steps(model, second.placed, 2)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_projection_that_was_wrapped_stays_wrapped(model):
    first = fused_layers(model)
    attention = model.model.layers[0].self_attn
    wrapped = nn.Sequential(attention.q_proj)
    attention.q_proj = wrapped
    second = fused_layers(model)
    assert second is not first
    with second.placed():
        pass
    assert attention.q_proj is wrapped


def test_detach_gives_every_projection_its_own_weight_again(model):
    from oasis_hf import detach

    before = {name: value.clone() for name, value in model.state_dict().items()}
    cache = OasisCache(model, budget=64)
    fused_layers(model)
    assert len({part.weight.untyped_storage().data_ptr() for part in (model.model.layers[0].self_attn.q_proj,
                model.model.layers[0].self_attn.v_proj)}) == 1  # fmt: skip
    detach(model)
    del cache
    weights = [value.untyped_storage().data_ptr() for name, value in model.named_parameters() if "proj" in name]
    assert len(set(weights)) == len(weights)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_full_device_does_not_stop_detach(model, monkeypatch):
    from oasis_hf import detach

    ids = torch.arange(12)[None]
    before = model(ids).logits
    cache = OasisCache(model, budget=64)
    fused_layers(model)

    def full(self):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        detach(model)
    del cache
    assert "forward" not in model.__dict__ and torch.equal(model(ids).logits, before)
    assert fused_layers(model).holds()


def test_the_next_cache_finds_its_layers_compiled(model):
    from torch._dynamo.utils import counters

    from oasis_hf import detach

    first, _ = steps(model, fused_layers(model).placed, 2)
    counters.clear()
    detach(model)
    again, _ = steps(model, fused_layers(model).placed, 2)
    assert counters["stats"]["unique_graphs"] == 0 and torch.equal(first, again)


def test_what_stands_alone_is_left_alone(model):
    class Other(nn.Linear):
        pass

    attention = model.model.layers[0].self_attn
    attention.k_proj.__class__ = Other  # quantised, adapted: anything but a plain projection
    hooked = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: None)
    pointers = attention.q_proj.weight.data_ptr(), model.model.layers[1].mlp.gate_proj.weight.data_ptr()
    FusedLayers(model)
    hooked.remove()
    assert pointers == (attention.q_proj.weight.data_ptr(), model.model.layers[1].mlp.gate_proj.weight.data_ptr())


@pytest.mark.parametrize("words", ["no such backend\nmore words", ""])
def test_a_layer_that_cannot_be_compiled_runs_as_it_is_and_says_why(model, monkeypatch, words):
    def broken(*args, **kwargs):
        def call(*args, **kwargs):
            raise RuntimeError(words)

        return call

    monkeypatch.setattr(torch, "compile", broken)
    fused._compiled.cache_clear()
    layers = fused_layers(model)
    wanted, eager = steps(model, contextlib.nullcontext, 2)
    got, tried = steps(model, layers.tried, 2)
    fused._compiled.cache_clear()
    assert layers.failed == f"RuntimeError: {words.splitlines()[0] if words else 'no reason given'}"
    assert torch.equal(got, wanted)
    assert all(torch.equal(value, tried.stats()[name]) for name, value in eager.stats().items())


def test_trying_leaves_the_step_as_it_is(model):
    wanted, eager = steps(model, contextlib.nullcontext, 2)
    got, tried = steps(model, lambda: fused_layers(model).tried(), 2)
    assert fused_layers(model).failed is None and torch.equal(got, wanted)
    assert all(torch.equal(value, tried.stats()[name]) for name, value in eager.stats().items())


def test_models_whose_layers_are_not_found_or_not_their_own(model):
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(FusionError, match="stands in for a layer's forward"):
        FusedLayers(model)
    del model.model.layers[0].forward
    model.config.num_hidden_layers += 1
    with pytest.raises(FusionError, match="has no list of [0-9]+ decoder layers"):
        FusedLayers(model)
