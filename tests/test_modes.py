"""Modes: each is the policy it is named after, and differs from the others in that alone."""

from __future__ import annotations

import pytest
import torch
from heads import TAPS, TENSORS, ids, plain_config, target, write
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache

import oasis_hf
from oasis_hf import (
    MODES,
    PAPER_SCORE,
    ConfigError,
    Eagle3Drafter,
    OasisCache,
    OasisConfig,
    budget_for,
    gpu_bytes,
    mode_config,
)
from oasis_hf.attach import cache_name
from oasis_hf.config import BLOCK, TAIL
from oasis_hf.layers import OasisLayer
from oasis_hf.lookahead import turned
from oasis_hf.working_set import WorkingSet

LENGTHS = [150, 61, 97]


@torch.no_grad()
def decode(cache, lengths=LENGTHS, steps=40, seed=1):
    """Logits `[B, 1 + steps, V]` behind a left-padded prompt and of steps over given tokens."""
    model, inputs = getattr(cache, "model", None) or tiny("llama"), left_padded(lengths)
    name = cache_name(model)
    position = inputs["attention_mask"].cumsum(1) - 1
    out = [model(**inputs, position_ids=position.clamp(min=0), **{name: cache}).logits[:, -1:]]
    tokens, mask = prompt(len(lengths), steps, seed), inputs["attention_mask"]
    for at in range(steps):
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        position = mask.sum(1, keepdim=True) - 1
        call = dict(attention_mask=mask, position_ids=position, **{name: cache})
        out.append(model(tokens[:, at : at + 1], **call).logits)
    return torch.cat(out, 1)


def cache_of(mode, budget=80, family="llama", **knobs):
    return OasisCache(tiny(family), mode_config(mode, budget, **knobs))


# -- knobs ------------------------------------------------------------------------------------------------------------


def test_a_mode_sets_its_policy_and_leaves_the_rest():
    score = dict(**PAPER_SCORE, seed=3, smooth_queries=2)
    made = {mode: mode_config(mode, 1040, **score) for mode in MODES}
    for mode, config in made.items():
        assert all(getattr(config, knob) == value for knob, value in score.items()), mode
    assert {mode: (config.lookahead, config.store) for mode, config in made.items()} == {
        "dense": ("none", "host"), "quest": ("on_demand", "resident"), "on_demand": ("on_demand", "host"),
        "previous": ("previous", "host"), "oasis": ("auto", "host"), "window": ("none", "host"),
    }  # fmt: skip
    assert {config.budget for mode, config in made.items() if mode != "dense"} == {1040}
    assert made["dense"].budget > 10**7 and made["previous"].correct_below == 0.9
    assert (made["window"].sink_blocks, made["window"].recent_blocks) == (1, 63)
    assert mode_config("oasis") == OasisConfig() and mode_config("window").recent_blocks == 127
    assert mode_config("previous", correct_below=None) == OasisConfig(lookahead="previous")
    assert mode_config("oasis", budget_bytes=10**6).budget is None


@pytest.mark.parametrize(
    "mode, knobs, message",
    [
        ("streaming", {}, "mode='streaming' is not allowed: use one of 'dense', 'quest', 'on_demand', 'previous', "),
        (None, {}, "mode=None is not allowed"),
        (["quest"], {}, "mode=['quest'] is not allowed"),
        ("quest", {"lookahead": "draft"}, "mode='quest' sets lookahead='on_demand': leave lookahead='draft' out"),
        ("on_demand", {"store": "resident"}, "mode='on_demand' sets store='host'"),
        ("window", {"recent_blocks": 2}, "mode='window' sets recent_blocks=63: leave recent_blocks=2 out"),
        ("window", {"budget_bytes": 10**6}, "mode='window' takes no budget_bytes: give budget in tokens"),
        ("dense", {"budget_bytes": 10**6}, "mode='dense' takes no budget_bytes"),
        ("quest", {"correct_below": 0.9}, "OasisConfig.correct_below=0.9 is not allowed: use None, or lookahead="),
        ("previous", {"correct_below": 2}, "OasisConfig.correct_below=2 is not allowed: use a number from -1.0 to 1.0"),
        ("oasis", {"lookahead": {"draft": 1, "previous": 1}, "correct_below": 0.5}, "correct_below=0.5 is not allowed"),
        ("oasis", {"colour": 1}, "OasisConfig has no knob 'colour'"),
    ],
)
def test_what_a_mode_refuses(mode, knobs, message):
    with pytest.raises(ConfigError) as error:
        mode_config(mode, 1040, **knobs)
    assert str(error.value).startswith(message) or message in str(error.value)
    assert str(error.value).count(".") < 6 and "\n" not in str(error.value)


# -- what modes have in common ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_dense_and_quest_with_a_budget_for_all_of_it_are_a_dense_cache(family):
    wanted = decode(Dense(family))
    for mode, budget in (("dense", 32), ("quest", 208), ("on_demand", 208), ("previous", 208)):
        cache = cache_of(mode, budget, family)
        torch.testing.assert_close(decode(cache), wanted, atol=2e-4, rtol=1e-4)
        stats = cache.stats()
        assert not any(stats[name].any() for name in ("hits", "fetched", "capped", "on_demand", "wasted", "compared"))
    # Slots come as they are needed, however large the budget.
    dense = cache_of("dense", family=family)
    decode(dense)
    assert {layer.working_set.allocated for layer in dense.sparse_layers} == {20}
    sparse = decode(cache_of("quest", 48, family))
    assert (sparse - wanted)[:, 5:].abs().max() > 1e-2  # a working set of a third is something else


class Dense(DynamicCache):
    def __init__(self, family):
        self.model = tiny(family)
        super().__init__(config=self.model.config)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_where_the_full_kv_lives_changes_nothing(family):
    quest, host = cache_of("quest", family=family), cache_of("on_demand", family=family)
    assert torch.equal(decode(quest), decode(host))
    assert all(torch.equal(value, host.stats()[name]) for name, value in quest.stats().items())
    assert host.stats()["on_demand"].sum() > 0 and not host.stats()["fetched"].any()


# -- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, lengths", [("llama", [150, 20, 97]), ("gemma3", [33, 5]), ("qwen3", [96, 80, 64])])
def test_window_attends_to_the_first_block_and_the_last_ones(family, lengths, monkeypatch):
    """S = 5 slots: past the prompt by several blocks, and from within the budget to beyond it."""
    seen, attend = [], WorkingSet.attend

    def look(self, query, lengths, *rest):
        seen.append((self.table.clone(), lengths.tolist()))
        return attend(self, query, lengths, *rest)

    monkeypatch.setattr(WorkingSet, "attend", look)
    cache = cache_of("window", family=family)
    decode(cache, lengths, steps := 70)
    layers = len(cache.sparse_layers)
    assert len(seen) == steps * layers
    for at, (table, lengths) in enumerate(seen):
        for row, length in enumerate(lengths):
            blocks = -(-length // BLOCK)
            # Behind a prompt of whole blocks the last slot stands empty until the next token's block opens.
            recent = 3 if at < layers and blocks > 5 and length % BLOCK == 0 else 4
            wanted = {0, *range(max(0, blocks - recent), blocks)}
            assert all({block for block in head if block >= 0} == wanted for head in table[row].tolist())
    stats = cache.stats()
    assert not any(stats[name].any() for name in ("fetched", "on_demand", "hits", "capped", "reopened"))


# -- correction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, knobs, lengths, steps",
    [
        ("llama", {}, [145, 65, 97], 15),  # no block closes
        ("gemma3", PAPER_SCORE, [145, 65, 97], 15),
        # At a border K of S = K + 1 blocks are chosen, and the last slot keeps what is left of older ones. Where the
        # closed block is always chosen, that is the same too.
        ("qwen3", {"recent_blocks": 1}, LENGTHS, 40),
        ("gpt_oss", {"sink_blocks": 1, "recent_blocks": 1}, LENGTHS, 40),
    ],
)
def test_every_head_corrected_is_on_demand(family, knobs, lengths, steps):
    previous = cache_of("previous", family=family, correct_below=1.0, **knobs)
    on_demand = cache_of("on_demand", family=family, **knobs)
    torch.testing.assert_close(decode(previous, lengths, steps), decode(on_demand, lengths, steps), atol=0, rtol=0)
    stats = previous.stats()
    assert torch.equal(stats["corrected"], stats["compared"]) and (stats["compared"] == len(lengths) * steps).all()
    if steps == 15:  # nothing is left to prefetch by a query that has chosen already
        assert not stats["fetched"].any() and torch.equal(stats["on_demand"], on_demand.stats()["on_demand"])
    assert previous.correction_rate().tolist() == [1.0] * len(previous.sparse_layers)
    assert on_demand.correction_rate().isnan().all()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_no_head_corrected_is_plain_previous(family):
    never, plain = (cache_of("previous", family=family, correct_below=below) for below in (-1.0, None))
    assert torch.equal(decode(never), decode(plain))
    for name, value in plain.stats().items():
        assert torch.equal(value, never.stats()[name]) or name == "compared", name
    assert (never.stats()["compared"] == 40 * len(LENGTHS)).all() and plain.stats()["fetched"].any()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_is_corrected_where_its_query_has_turned_away(family, monkeypatch):
    """Against a straight computation over all queries of the prompt and the steps, head by head."""
    below, steps, queries, told = 0.1, 40, {}, []
    fetch_now, prefill = OasisLayer._fetch_now, OasisLayer._prefill

    def read(self, step, query, *rest):
        kept = [step.kept(row, query.device) for row in range(len(query))]
        last = [-1 if one is None else int(one[-1]) for one in kept]
        queries[self.index] = torch.stack([own[:, at] for own, at in zip(query, last)])
        return prefill(self, step, query, *rest)

    def look(self, step, query, lengths):
        before, now = queries[self.index], query[:, :, 0]
        queries[self.index] = now
        own = self.working_set
        table, age = own.table.clone(), own.last_selected.clone()
        fetch_now(self, step, query, lengths)
        wanted = self.summaries.score(
            query, lengths // BLOCK, torch.ones(len(query), 1), self.scaling, max(step.ends) // BLOCK
        )
        group = query.shape[1] // self.heads
        for row in range(len(query)):
            for head in range(self.heads):
                pairs = [(before[row, one], now[row, one]) for one in range(head * group, (head + 1) * group)]
                cosine = sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / group
                if cosine >= below:
                    assert torch.equal(own.table[row, head], table[row, head])
                    assert torch.equal(own.last_selected[row, head], age[row, head])
                else:
                    best = wanted[row, head].topk(min(own.allocated - 1, int(lengths[row]) // BLOCK)).indices.tolist()
                    assert set(best) <= set(own.table[row, head].tolist())
                told.append((self.index, head, cosine < below, not torch.equal(own.table[row, head], table[row, head])))

    monkeypatch.setattr(OasisLayer, "_prefill", read)
    monkeypatch.setattr(OasisLayer, "_fetch_now", look)
    cache = cache_of("previous", family=family, correct_below=below)
    decode(cache, LENGTHS, steps)
    stats = cache.stats()
    for layer in range(len(cache.sparse_layers)):
        for head in range(2):
            mine = [one for one in told if one[:2] == (layer, head)]
            assert stats["corrected"][layer, head] == sum(one[2] for one in mine)
            assert stats["compared"][layer, head] == len(mine) == steps * len(LENGTHS)
    share = sum(one[2] for one in told) / len(told)
    assert 0.1 < share < 0.9 and sum(one[3] for one in told) > 30
    assert float(cache.correction_rate().mean()) == pytest.approx(share)
    moved = stats["on_demand"].sum()
    assert moved > 0 and torch.equal(
        stats["bytes"], (stats["fetched"] + stats["first"] + stats["on_demand"]) * cache.state.block_bytes
    )
    assert "corrected" in cache.report(200)


def test_the_cosine_is_the_mean_over_a_group_and_less_than_the_threshold_counts():
    before = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]])
    query = torch.tensor([[[5.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 9.0]]])  # cosines 1, 0 and 1, 1
    for below, wanted in ((0.5, [False, False]), (0.51, [True, False]), (1.0, [True, False])):
        assert turned(query, before, 2, below).tolist() == [wanted]
    assert turned(query, torch.zeros_like(before), 2, 0.1).all()


@torch.no_grad()
@pytest.mark.parametrize("below", [1.0, -1.0])
def test_a_callers_own_candidates_are_corrected_together(below):
    """Several tokens that are verified in one forward: the first of them is compared, and all of them choose."""
    model, text, out = tiny("llama"), prompt(2, 140), []
    other = {"mode": "on_demand"} if below == 1 else {"mode": "previous", "correct_below": None}
    for knobs in ({"mode": "previous", "correct_below": below}, other):
        cache = cache_of(**knobs, recent_blocks=1)
        model(text[:, :100], **{cache_name(model): cache})
        with cache.mode("verify"):
            out.append(
                torch.cat([model(text[:, at : at + 3], **{cache_name(model): cache}).logits for at in (100, 103)])
            )
    torch.testing.assert_close(*out, atol=1e-4, rtol=1e-4)  # the same blocks, in other slots


def test_speculation_is_corrected_by_its_committed_tokens():
    """Drafts are verified over what the token before them chose; which rows take no part is not counted."""
    model, inputs = tiny("llama"), left_padded(LENGTHS)
    knobs = dict(speculate=True, draft_tokens=2, drafter="prompt_lookup")
    drafter = knobs.pop("drafter")
    cache = OasisCache(model, mode_config("previous", 80, correct_below=0.3, **knobs), drafter=drafter)
    texts = oasis_hf.generate(
        model, **inputs, **{cache_name(model): cache}, max_new_tokens=60, do_sample=False, eos_token_id=None
    )
    stats = cache.stats()
    assert texts.shape == (3, max(LENGTHS) + 60)
    assert 0 < stats["corrected"].sum() < stats["compared"].sum()
    assert cache.stepper.passes and (stats["compared"] <= cache.stepper.passes).all()


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


@torch.no_grad()
def behind_a_prompt(model, config, rows, context, drafter="previous"):
    """A cache with its working set, right behind a prompt."""
    cache = OasisCache(model, config, drafter=drafter)
    tokens = ids(rows, context) if model is target() else prompt(rows, context)
    model(tokens, **{cache_name(model): cache})
    with torch.inference_mode(False):
        cache.first_select()
    return cache


@pytest.mark.parametrize("family, dtype", [("llama", torch.float32), ("gemma3", torch.bfloat16)])
@pytest.mark.parametrize("knobs", [{}, PAPER_SCORE], ids=str)
def test_bytes_are_those_of_a_cache(family, dtype, knobs):
    model = tiny(family, dtype)
    for budget, context, rows in ((80, 300, 1), (512, 201, 2), (64, 160, 3)):
        for mode in MODES:
            told = gpu_bytes(model, mode, budget, context, drafter="previous", rows=rows, **knobs)
            cache = behind_a_prompt(model, mode_config(mode, budget, **knobs), rows, context)
            memory = cache.memory()
            assert told["total"] == sum(told.values()) - told["total"]
            assert told["drafter_weights"] == told["drafter_kv"] == 0
            assert told["summaries"] == (0 if mode in ("dense", "window") else memory["summaries"])
            if mode not in ("dense", "quest"):
                assert told["working_set"] + told["sliding"] == memory["working_set"] and told["full_kv"] == 0
                continue
            rings = sum(layer.device_bytes[0] for layer in cache.layers if layer.is_sliding)
            assert told["working_set"] == 0 and told["sliding"] == rings
            if mode == "quest":
                assert told["full_kv"] == memory["host"]
            else:
                slots = [layer.working_set.keys[:, :, TAIL:].nbytes * 2 for layer in cache.sparse_layers]
                assert told["full_kv"] == sum(slots)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_sliding_windows_alone_has_nothing_to_choose_from(mode):
    model = tiny("mistral")
    told = gpu_bytes(model, mode, 64, 300, drafter="previous")
    cache = OasisCache(model, mode_config(mode, 64))
    with torch.no_grad():
        model(prompt(1, 300), **{cache_name(model): cache})
    assert told["total"] == told["sliding"] == cache.memory()["working_set"] > 0
    assert budget_for(model, mode, told["total"], 300, drafter="previous") == 304


def test_a_heads_bytes_count_where_it_drafts(head):
    model = target()
    for rows in (1, 3):
        cache = behind_a_prompt(model, mode_config("oasis", 64), rows, 100, head)
        told = gpu_bytes(model, "oasis", 64, 100, drafter=head, rows=rows)
        weights = sum(part.nbytes for part in cache.drafter.head.parameters())
        assert told["drafter_weights"] == weights
        assert told["drafter_weights"] + told["drafter_kv"] == cache.memory()["drafter"]
    same = gpu_bytes(model, "oasis", 64, 100, drafter=Eagle3Drafter.from_pretrained(head, model), rows=3)
    assert same == told and len(TAPS) == 3
    for mode in ("dense", "quest", "on_demand", "previous", "window"):
        told = gpu_bytes(model, mode, 64, 100, drafter=head)
        assert told["drafter_weights"] == told["drafter_kv"] == 0


@pytest.mark.parametrize("mode", ["on_demand", "previous", "oasis", "window"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_largest_budget_for_some_bytes(mode, family):
    model, context = tiny(family), 1000
    asked = dict(drafter="previous", rows=2)
    for budget in (32, 80, 496):
        total = gpu_bytes(model, mode, budget, context, **asked)["total"]
        assert budget_for(model, mode, total, context, **asked) == budget
        assert budget_for(model, mode, total + 1, context, **asked) == budget
        if budget > 32:
            assert budget_for(model, mode, total - 1, context, **asked) == budget - BLOCK
    most = budget_for(model, mode, 1 << 40, context, **asked)
    assert most == 1008 and gpu_bytes(model, mode, most + 160, context, **asked)["total"] == total_of(model, mode, most)
    with pytest.raises(ConfigError, match=f"nbytes=100 is not allowed: mode='{mode}' needs at least [0-9,]+ bytes"):
        budget_for(model, mode, 100, context)


def total_of(model, mode, budget):
    return gpu_bytes(model, mode, budget, 1000, drafter="previous", rows=2)["total"]


def test_equal_bytes_give_the_window_more_blocks_and_quest_none():
    model = tiny("llama", torch.bfloat16)
    asked = dict(context=1500, drafter="previous")
    total = gpu_bytes(model, "oasis", 160, **asked)["total"]
    assert budget_for(model, "window", total, **asked) > budget_for(model, "on_demand", total, **asked) == 160
    for mode in ("quest", "dense"):
        with pytest.raises(ConfigError, match=f"mode='{mode}' needs at least"):
            budget_for(model, mode, total, **asked)
        full = gpu_bytes(model, mode, None, **asked)["total"]
        assert budget_for(model, mode, full, **asked) == 1504


@pytest.mark.parametrize(
    "given, message",
    [
        ({"context": 0}, "context=0 is not allowed: use an integer >= 1"),
        ({"rows": 1.5}, "rows=1.5 is not allowed"),
        ({"mode": "best"}, "mode='best' is not allowed"),
        ({"budget": 8}, "OasisConfig.budget=8 is not allowed"),
    ],
)
def test_bytes_of_nothing_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        gpu_bytes(tiny("llama"), **{"mode": "quest", "budget": 64, "context": 100, **given})
