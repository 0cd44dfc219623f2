"""Which experts stand in captured steps: measured once, and nowhere else in force."""

from __future__ import annotations

import gc

import pytest
import torch
from test_generate import generate
from tiny import prompt, tiny

from oasis_hf import OasisCache, OasisConfig, experts, graphs, supported
from oasis_hf.experts import CANDIDATES, Choice, capturing, choice_for, host_ms, measured, modules_of, standing

pytestmark = pytest.mark.core
mixtures = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
AUTO = OasisConfig()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(experts, "_chosen", type(experts._chosen)())


def setting(model):
    return {module.config._experts_implementation for module in modules_of(model)}


@mixtures
def test_all_candidates_are_timed_with_each_in_force_and_give_the_same(family):
    model, seen = tiny(family), []
    own = setting(model)

    def timer(run):
        seen.append(setting(model))
        return host_ms(run)

    choice = measured(model, 2, timer)
    assert seen == [{name} for name in CANDIDATES] and setting(model) == own
    assert set(choice.ms) == set(CANDIDATES) and min(choice.ms.values()) > 0 and not choice.refused
    logits = []
    for name in (None, *CANDIDATES):
        with standing(modules_of(model), name), torch.no_grad():
            logits.append(model(prompt(2, 7)).logits)
    for one in logits[1:]:
        torch.testing.assert_close(logits[0], one, atol=1e-4, rtol=0)


@mixtures
def test_neither_candidate_reads_a_value_back(family, request):
    """What a capture does not allow, and what "eager" does."""
    from test_syncs import CountSyncs

    model, syncs = tiny(family), {}
    gc.collect()
    request.addfinalizer(gc.enable)
    gc.disable()  # else what others left is counted where it ends
    for name in ("eager", *CANDIDATES):
        with standing(modules_of(model), name), torch.no_grad(), CountSyncs() as counter:
            hidden = torch.randn(4, supported.text_config(model).hidden_size)
            for module in modules_of(model):
                module(hidden, torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
        syncs[name] = counter.seen
    assert syncs["eager"] and not syncs["batched_mm"] and not syncs["grouped_mm"], syncs


def test_the_fastest_is_kept_for_a_number_of_tokens(monkeypatch):
    model, times = tiny("qwen3_moe"), iter([3.0, 1.0, 5.0, 7.0])
    first = choice_for(model, AUTO, 2, lambda run: next(times))
    assert first.fastest == "batched_mm" and first.ms == {"grouped_mm": 3.0, "batched_mm": 1.0}
    assert choice_for(model, AUTO, 2, lambda run: pytest.fail("measured twice")) is first
    assert choice_for(model, AUTO, 4, lambda run: next(times)).fastest == "grouped_mm"
    own = setting(model)
    with capturing(model, AUTO, first):
        assert setting(model) == {"batched_mm"}
    assert setting(model) == own


def test_what_cannot_be_captured_is_told_and_left_out():
    def timer(run):
        if setting(model) == {"batched_mm"}:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return 2.0

    model = tiny("qwen3_moe")
    choice = measured(model, 1, timer)
    assert choice.fastest == "grouped_mm"
    assert choice.told() == (
        "grouped_mm for 1 tokens (grouped_mm 2 ms, batched_mm not (operation not permitted when stream is capturing))"
    )
    many = measured(model, 5, lambda run: 1.0)  # 5 tokens x 2 experts of 4
    assert many.refused == {"batched_mm": "it would copy more than twice all experts"}
    with capturing(model, AUTO, Choice(1)):  # none can: the model's own
        assert setting(model) == {"grouped_mm"}


def test_the_knob_and_a_users_own_setting_are_respected(monkeypatch):
    model, timer = tiny("qwen3_moe"), lambda run: pytest.fail("measured")
    assert choice_for(tiny("llama"), AUTO, 1, timer) is None
    assert choice_for(model, OasisConfig(experts="own"), 1, timer) is None
    with capturing(model, OasisConfig(experts="own"), None):
        assert setting(model) == {"grouped_mm"}
    with capturing(model, OasisConfig(experts="batched_mm"), None):
        assert setting(model) == {"batched_mm"}
    with standing(modules_of(model), "sonicmoe"):
        assert choice_for(model, AUTO, 1, timer) is None
    monkeypatch.setattr(experts.parallel, "size", lambda model: 2)
    assert choice_for(model, AUTO, 1, timer) is None


def test_a_setting_is_put_back_when_what_runs_inside_fails():
    model = tiny("gpt_oss")
    own = setting(model)
    with pytest.raises(KeyError), standing(modules_of(model), "batched_mm"):
        raise KeyError
    assert setting(model) == own


def test_the_choice_is_in_force_while_a_step_is_captured(monkeypatch):
    """The capture itself needs a GPU: here it is refused once it has been seen."""
    model, seen = tiny("qwen3_moe"), []
    own = setting(model)

    def capture(self, *args):
        seen.append((setting(model), self.experts.tokens))
        raise RuntimeError("no GPU")

    monkeypatch.setattr(experts, "captured_ms", lambda device: lambda run: float(setting(model) == {"grouped_mm"}))
    monkeypatch.setattr(graphs.StepGraphs, "_capture", capture)
    monkeypatch.setattr(graphs.StepGraphs, "_refuses", lambda *args: None)
    monkeypatch.setattr(graphs, "cannot_hold", lambda cache: None)
    cache = OasisCache(model, budget=48, compile_after=None)
    generate(model, prompt(2, 100), cache, max_new_tokens=5)
    assert ({"batched_mm"}, 4) in seen and setting(model) == own  # two rows and a draft each


def test_the_report_says_which():
    cache = OasisCache(tiny("qwen3_moe"), budget=48)
    cache.graphs.experts = Choice(2, {"grouped_mm": 0.5, "batched_mm": 0.25})
    told = " ".join(cache.report().split())
    assert "experts batched_mm for 2 tokens (batched_mm 0.25 ms, grouped_mm 0.5 ms)" in told
