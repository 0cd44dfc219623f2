"""Every knob is checked once, and the message names it and what it may be."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from oasis_hf import ConfigError, OasisConfig

WRONG = {
    "budget": [0, 31, -5, 64.0, True, "64"],
    "budget_bytes": [0, -1, 1.5],
    "block_size": [8, 32, 16.0, None],
    "fetch_ratio": [0, -0.1, 1.01, float("nan"), "0.1", True, None],
    "fetch_bytes": [0, 1.5, True, 1 << 20],  # the last: with a ratio that is a number
    "lookahead": ["drafts", None, 3, {}, {"draft": 1.0}, {"draft": 1, "oracle": 1}, {"draft": 0, "previous": 1},
                  ["draft"], {"draft": float("inf"), "previous": 1.0}, {"draft": float("nan"), "previous": 1.0}],
    "smooth_queries": [0, 65, 2.0, None],
    "correct_below": [0.9, -1.1, 1.01, float("nan"), "0.9", True],  # 0.9: with the default lookahead
    "correction": ["on", None, True],
    "correct_above": [-0.1, 1.1, float("nan"), None],
    "correct_blocks": [0, 2.0, None], "correct_layers": [(), 3, (1, 1), (-1,), ("1",)],
    "scorer": ["quest", None],
    "half_range": [-0.1, 1.1, float("nan"), True],
    "reduction": ["sum", None],
    "summary_dtype": ["int4", None],
    "tokens_per_summary": [2, 32, 8.0, None],
    "sink_blocks": [-1, 1.0],
    "recent_blocks": [-1, None],
    "host_dtype": ["int8", None],
    "host_capacity_tokens": [0, 1.5],
    "store": ["disk", None],
    "host_bytes": [0, 1.5, 64],
    "file_dir": [3, "/tmp"],
    "sparsify": ["later", None, True],
    "speculate": [1, None, "yes"],
    "progress": [0],
    "graphs": [0],
    "compile_after": [-1, 1.0, "never"],
    "experts": ["eager", None],
    "draft_tokens": [0, 7, 1.0],
    "candidates": [0, 5, 2.0, None, True],
    "verify_up_to": [0, 1.0, True],
    "draft_up_to": [0, "8"],
    "sliding_slack": [7, None],
    "seed": [-1, 0.5],
}  # fmt: skip
RIGHT = {
    "budget": [32, 33, 2064],
    "budget_bytes": [1],
    "block_size": [16],
    "fetch_ratio": [1, 1e-6, "auto"],
    "fetch_bytes": [None],
    "lookahead": [
        "auto",
        "draft",
        "previous",
        "smoothed",
        "oracle",
        "on_demand",
        "none",
        {"draft": 0.7, "previous": 0.3},
    ],
    "smooth_queries": [1, 64],
    "correct_below": [None],
    "correction": ["off", "auto", "always"],
    "correct_above": [0, 1],
    "correct_blocks": [1, 4096],
    "correct_layers": [None],
    "scorer": ["minmax", "midrange"],
    "half_range": [0, 1],
    "reduction": ["max", "mean", "softmax-mean"],
    "summary_dtype": ["model", "int8"],
    "tokens_per_summary": [16, 8, 4],
    "sink_blocks": [0, 128],
    "recent_blocks": [128],
    "host_dtype": ["model", "float32", "float16", "bfloat16"],
    "host_capacity_tokens": [None, 1],
    "store": ["host", "resident", "file"],
    "host_bytes": [None],
    "file_dir": [None],
    "sparsify": ["always", "never", "auto"],
    "speculate": [True],
    "progress": [True],
    "graphs": [True],
    "compile_after": [0, None],
    "experts": ["auto", "own", "grouped_mm", "batched_mm"],
    "draft_tokens": [1, 6],
    "candidates": [1, 4],
    "verify_up_to": [None, 1, 64],
    "draft_up_to": [None, 1],
    "sliding_slack": [8],
    "seed": [0, 12],
}


def cases(table):
    return [pytest.param(knob, value, id=f"{knob}={value}") for knob, values in table.items() for value in values]


@pytest.mark.parametrize("knob, value", cases(WRONG))
def test_a_wrong_value_names_the_knob_the_value_and_what_is_allowed(knob, value):
    with pytest.raises(ConfigError) as error:
        OasisConfig(**{knob: value})
    assert str(error.value).startswith(f"OasisConfig.{knob}={value!r} is not allowed: use ")


@pytest.mark.parametrize("knob, value", cases(RIGHT))
def test_a_value_at_the_edge_is_taken(knob, value):
    assert getattr(OasisConfig(**{knob: value}), knob) == value


@pytest.mark.parametrize("below", [-1, 0, 0.9, 1.0])
def test_a_threshold_belongs_to_previous_queries(below):
    assert OasisConfig(lookahead="previous", correct_below=below).correct_below == below
    for lookahead in ("draft", "smoothed", "on_demand", "none", {"draft": 1, "previous": 1}):
        with pytest.raises(ConfigError, match="is not allowed: use None, or lookahead='previous'"):
            OasisConfig(lookahead=lookahead, correct_below=below)
    with pytest.raises(ConfigError, match="use a number from -1.0 to 1.0 or None"):
        OasisConfig(lookahead="previous", correct_below=below + 2.1)


def test_a_correction_belongs_to_predicted_blocks():
    for lookahead in ("auto", "draft", "previous", "smoothed", "oracle", {"draft": 1, "previous": 1}):
        assert OasisConfig(lookahead=lookahead, correction="always").corrects
        assert OasisConfig(lookahead=lookahead, correction="auto").watches_mass
        by_cosine = OasisConfig(lookahead=lookahead, correction="auto", correct_below=0.8)
        assert by_cosine.corrects and not by_cosine.watches_mass
    for lookahead in ("on_demand", "none"):
        for correction in ("auto", "always"):
            with pytest.raises(ConfigError, match=f"correction={correction!r} .* use 'off' with lookahead="):
                OasisConfig(lookahead=lookahead, correction=correction)
    with pytest.raises(ConfigError, match="correct_below=0.8 is not allowed: use None with correction='always'"):
        OasisConfig(lookahead="previous", correction="always", correct_below=0.8)
    assert not OasisConfig().corrects and OasisConfig(lookahead="previous", correct_below=0.8).corrects


def test_the_tables_above_name_every_knob():
    assert set(WRONG) == set(RIGHT) == {field.name for field in dataclasses.fields(OasisConfig)}


def test_the_message_gives_the_range():
    with pytest.raises(ConfigError, match="an integer from 1 to 6"):
        OasisConfig(draft_tokens=7)
    with pytest.raises(ConfigError, match="an integer >= 32 or None"):
        OasisConfig(budget=16)
    with pytest.raises(ConfigError, match=r"a number above 0.0 up to 1.0 or 'auto'"):
        OasisConfig(fetch_ratio=0)
    with pytest.raises(ConfigError, match="one of 'minmax', 'midrange'"):
        OasisConfig(scorer="x")


def test_the_default_budget_is_the_papers():
    assert OasisConfig().budget == 2064 and OasisConfig().slots == 129


def test_both_budgets_at_once_are_refused():
    with pytest.raises(ConfigError, match="not both"):
        OasisConfig(budget=64, budget_bytes=1000)


@pytest.mark.parametrize("budget, slots", [(32, 2), (33, 3), (48, 3), (2064, 129)])
def test_slots_are_the_budget_in_whole_blocks_rounded_up(budget, slots):
    assert OasisConfig(budget=budget).slots == slots


@pytest.mark.parametrize("tokens, parts", [(16, 1), (8, 2), (4, 4)])
def test_parts(tokens, parts):
    assert OasisConfig(tokens_per_summary=tokens).parts == parts


@pytest.mark.parametrize(
    "ratio, slots, cap", [(0.05, 129, 6), (0.05, 2, 1), (1.0, 9, 8), (0.01, 11, 1), (0.25, 9, 2), (0.3, 6, 2)]
)
def test_fetch_cap_is_a_share_of_the_selectable_slots_and_at_least_one(ratio, slots, cap):
    assert OasisConfig(fetch_ratio=ratio).fetch_cap(slots) == cap


def test_budget_bytes_become_whole_slots_of_all_layers_rows_and_heads():
    one = 2 * 3 * 4 * 512
    assert OasisConfig(budget_bytes=5 * one).slots_for(2, 3, 4, 512) == 5
    assert OasisConfig(budget_bytes=6 * one - 1).slots_for(2, 3, 4, 512) == 5
    assert OasisConfig(budget=100).slots_for(2, 3, 4, 512) == 7


def test_budget_bytes_below_two_slots_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match="24,576 bytes: two slots x 2 layers x 3 rows x 4 KV heads x 512 bytes"):
        OasisConfig(budget_bytes=2 * 2 * 3 * 4 * 512 - 1).slots_for(2, 3, 4, 512)


def test_rows_beyond_budget_bytes_are_refused_with_the_arithmetic():
    config = OasisConfig(budget_bytes=5 * 2 * 3 * 4 * 512)
    config.check_rows(5, 2, 3, 4, 512)
    with pytest.raises(ConfigError, match="5 slots each, and 4 rows of as many would take 81,920 bytes"):
        config.check_rows(5, 2, 4, 4, 512)
    OasisConfig(budget=80).check_rows(5, 2, 400, 4, 512)


def test_a_capacity_is_the_host_stores():
    OasisConfig(host_capacity_tokens=60, store="host")
    with pytest.raises(ConfigError, match="host_capacity_tokens=60 is not allowed: use None with store='resident'"):
        OasisConfig(host_capacity_tokens=60, store="resident")


def test_candidates_and_drafts_share_the_tail():
    OasisConfig(speculate=True, draft_tokens=3, candidates=4)
    OasisConfig(draft_tokens=6, candidates=4)  # not verified: one draft is stacked
    with pytest.raises(ConfigError, match="candidates=4 is not allowed: use at most 3 with draft_tokens=4, or fewer"):
        OasisConfig(speculate=True, draft_tokens=4, candidates=4)


def test_protected_blocks_must_fit_among_the_selectable():
    OasisConfig(budget=64, sink_blocks=1, recent_blocks=2)
    with pytest.raises(ConfigError, match="sink_blocks [+] recent_blocks=4 is not allowed: use at most K = 3"):
        OasisConfig(budget=64, sink_blocks=2, recent_blocks=2)
    with pytest.raises(ConfigError, match="at most K = 2"):
        OasisConfig(budget_bytes=3 * 512, sink_blocks=3).slots_for(1, 1, 1, 512)


def test_replace_changes_only_what_it_names():
    config = OasisConfig(budget=64, scorer="minmax")
    other = config.replace(seed=3)
    assert other.seed == 3 and other.scorer == "minmax" and other.budget == 64 and config.seed == 0


def test_replace_by_the_other_budget_drops_the_first():
    assert OasisConfig(budget=64).replace(budget_bytes=10).budget is None
    assert OasisConfig(budget_bytes=10).replace(budget=64).budget_bytes is None
    with pytest.raises(ConfigError, match="not both"):
        OasisConfig().replace(budget=64, budget_bytes=10)


def test_replace_checks_like_the_constructor():
    with pytest.raises(ConfigError, match="seed"):
        OasisConfig().replace(seed=-1)
    with pytest.raises(ConfigError, match="no knob 'bugdet': the knobs are block_size, budget,"):
        OasisConfig().replace(bugdet=3)


def test_a_config_is_frozen_hashable_and_copies():
    mix = OasisConfig(lookahead={"draft": 0.7, "previous": 0.3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        mix.seed = 1
    for change in (
        lambda: mix.lookahead.update(draft=1),
        lambda: mix.lookahead.__setitem__("draft", 1),
        lambda: mix.lookahead.pop("draft"),
        lambda: mix.lookahead.clear(),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert mix.lookahead == {"draft": 0.7, "previous": 0.3}
    for same in (copy.copy(mix), copy.deepcopy(mix), pickle.loads(pickle.dumps(mix)), mix.replace()):
        assert same == mix and hash(same) == hash(mix)
    assert len({mix, OasisConfig(), OasisConfig()}) == 2


def test_the_callers_mapping_is_not_kept():
    mine = {"draft": 0.5, "previous": 0.5}
    config = OasisConfig(lookahead=mine)
    mine["draft"] = 9
    assert config.lookahead["draft"] == 0.5
