"""What a cache tells about itself."""

from __future__ import annotations

import copy
import gc
import re
import weakref

import pytest
import torch
from matplotlib.figure import Figure
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache

from oasis_hf import OasisCache, OracleDrafter
from oasis_hf.attach import cache_name
from oasis_hf.stats import COUNTERS

pytestmark = pytest.mark.core
LAYERS, HEADS, DIM = 3, 2, 16
BLOCK_BYTES = 2 * 16 * DIM * 4


@pytest.fixture(scope="module")
def used():
    """A cache after 150 prompt tokens and 40 more, with room for 64: much is moved."""
    model = tiny("llama")
    cache = OasisCache(model, budget=64, drafter="previous", fetch_ratio=0.5)
    cache.watch(1)
    model.generate(prompt(2, 150), max_new_tokens=41, do_sample=False, **{cache_name(model): cache})
    return cache


def test_an_empty_cache_tells_that_it_is_empty():
    cache = OasisCache(tiny("llama"))
    assert cache.stats() == {} and cache.hit_rate().shape == (0,) and cache.residency().shape == (0, 0)
    assert cache.memory() == {"host": 0, "working_set": 0, "summaries": 0, "dense": 0}
    assert "OasisCache, empty" in cache.report() and isinstance(cache.plot(), Figure)
    assert "OasisCache, empty" in cache._repr_html_()


def test_a_drafters_name_is_plain_text(monkeypatch):
    cache = OasisCache(tiny("llama"), drafter="previous")
    monkeypatch.setattr(cache.drafter, "name", "mine [/x] :smile:")
    for text in (cache.report(), re.sub("<.*?>", "", cache._repr_html_())):
        assert "mine [/x] :smile:" in " ".join(text.split())


def test_stats_are_counts_by_layer_and_head(used):
    stats = used.stats()
    assert set(stats) == {*COUNTERS, "bytes"}
    for name, value in stats.items():
        assert value.shape == (LAYERS, HEADS) and value.dtype == torch.int64 and (value >= 0).all(), name
    moved = stats["fetched"] + stats["first"] + stats["reopened"] + stats["on_demand"]
    assert torch.equal(stats["bytes"], moved * BLOCK_BYTES) and (moved > 0).all()


def test_counts_add_up(used):
    stats = used.stats()
    # Per row: 150 tokens are 9 closed blocks and an open one. First selection: the open block and K = 3.
    assert (stats["first"] == 2 * (1 + 3)).all()
    # 40 steps, 2 rows, K = 3 predicted each time.
    predicted = stats["hits"] + stats["fetched"] + stats["capped"]
    assert (predicted == 40 * 2 * 3).all()
    assert (stats["fetched"] <= 40 * 2 * used.state.cap).all() and used.state.cap == 2
    assert not stats["on_demand"].any() and not stats["reopened"].any()


def test_hit_rate_is_the_share_of_predicted_blocks_that_were_there(used):
    stats, rates = used.stats(), used.hit_rate()
    for layer in range(LAYERS):
        hits, fetched, capped = (int(stats[name][layer].sum()) for name in ("hits", "fetched", "capped"))
        assert rates[layer].item() == pytest.approx(hits / (hits + fetched + capped))
    assert ((rates > 0) & (rates < 1)).all()


def test_without_a_prediction_the_hit_rate_is_not_a_number_and_the_table_says_so():
    model = tiny("llama")
    cache = OasisCache(model)
    model(prompt(1, 20), **{cache_name(model): cache})
    assert cache.hit_rate().isnan().all()
    line = next(line for line in cache.report().splitlines() if re.match(r"\W*all\b", line))
    assert "nan" not in cache.report() and "-" in line
    assert isinstance(cache.plot(), Figure)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_dense_is_what_a_dynamic_cache_holds(family):
    model = tiny(family)
    caches = DynamicCache(config=model.config), OasisCache(model, budget=64)
    for cache in caches:
        model(**left_padded([70, 40]), **{cache_name(model): cache})
        model(prompt(2, 1), **{cache_name(model): cache})
    dense, oasis = caches
    assert oasis.memory()["dense"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)


def test_memory_is_counted_where_it_lies(used):
    memory = used.memory()
    blocks = LAYERS * HEADS * 2 * 12  # 190 tokens a row are 12 blocks
    assert memory["host"] == blocks * BLOCK_BYTES
    assert memory["dense"] == LAYERS * HEADS * 2 * 190 * 2 * DIM * 4
    slots = LAYERS * HEADS * 2 * 4
    assert slots * BLOCK_BYTES < memory["working_set"] < 2 * slots * BLOCK_BYTES
    assert 0 < memory["summaries"] < memory["host"] / 4


def test_the_report_has_a_line_a_layer_and_their_sum(used):
    text, stats = used.report(), used.stats()
    head = " ".join(text.split())
    assert "2 rows of 190 tokens at most; 4 slots a KV head, cap 2 blocks a step; lookahead draft by" in head
    assert "drafter previous; 41 forwards" in head
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│┃|]", line) if cell.strip()]
        if cells and re.fullmatch(r"\d+|all|layer", cells[0]):
            rows[cells[0]] = cells
    assert rows["layer"][:5] == ["layer", "hit rate", "hits", "fetched", "capped"] and rows["layer"][-1] == "MiB moved"
    assert "reopened" not in rows["layer"], "only what happened is shown"
    assert set(rows) == {"layer", "all", "0", "1", "2"}
    for layer in range(LAYERS):
        assert rows[str(layer)][2:4] == [str(int(stats[name][layer].sum())) for name in ("hits", "fetched")]
        assert rows[str(layer)][1] == f"{used.hit_rate()[layer].item():.1%}"
    assert rows["all"][2] == str(int(stats["hits"].sum()))
    assert rows["all"][-1] == f"{int(stats['bytes'].sum()) / 2**20:.2f}"


def test_skipped_forwards_are_told():
    model, text = tiny("llama"), prompt(1, 30)
    known = model.generate(text, max_new_tokens=20, do_sample=False)
    cache = OasisCache(model, speculate=True, drafter=OracleDrafter(known))
    out = model.generate(text, max_new_tokens=20, do_sample=False, **{cache_name(model): cache})
    assert torch.equal(out, known) and cache.stepper.skipped >= 8
    assert cache.stepper.forwards + cache.stepper.skipped == 20
    assert f"{cache.stepper.skipped} skipped by accepted drafts" in " ".join(cache.report().split())


def test_the_notebook_gets_a_table(used):
    html = used._repr_html_()
    assert html.startswith("<pre>") and html.endswith("</pre>") and "hit rate" in html


def test_watching_a_layer_keeps_its_residents_after_every_step(used):
    map_ = used.residency()
    assert map_.shape[0] == 40 and map_.shape[1] == 12
    assert ((map_ >= 0) & (map_ <= 1)).all()
    # At most S = 4 blocks a head, and the open one, the newest, in every head.
    assert (map_.sum(1) <= 4 + 1e-6).all()
    for step in range(40):
        tokens = 150 + step + 1
        if tokens % 16:
            assert map_[step, tokens // 16] == 1
    table = used.sparse_layers[1].working_set.table[0]
    for block in range(12):
        assert map_[-1, block].item() == (table == block).any(-1).float().mean().item()


def test_only_sparse_layers_can_be_watched():
    cache = OasisCache(tiny("llama"))
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=f"layer={layer}.*sparse layers 0 to 2"):
            cache.watch(layer)


def test_a_branch_keeps_its_own_record(used):
    branch = copy.deepcopy(used)
    model, steps = tiny("llama"), len(used.residency())
    before = used.stats()
    model(prompt(2, 1), **{cache_name(model): branch})
    assert len(used.residency()) == steps and len(branch.residency()) == steps + 1
    assert all(torch.equal(used.stats()[name], before[name]) for name in before)


def test_the_plot_has_hit_rates_and_with_watch_a_map(used):
    left, right, *_ = used.plot().axes
    heights = [bar.get_height() for bar in left.patches]
    assert heights == pytest.approx((100 * used.hit_rate()).tolist())
    assert right.get_title() == "Resident blocks of layer 1" and right.images[0].get_array().shape == (12, 40)


def test_a_cache_gives_its_memory_back_as_soon_as_nobody_holds_it():
    model = tiny("llama")
    known = model.generate(prompt(1, 30), max_new_tokens=6, do_sample=False)
    gc.disable()
    try:
        for knobs in ({}, {"speculate": True, "drafter": OracleDrafter(known)}):
            cache = OasisCache(model, **knobs)
            model.generate(known[:, :30], max_new_tokens=5, do_sample=False, **{cache_name(model): cache})
            watched = weakref.ref(cache), weakref.ref(cache.state.store)
            del cache
            assert [what() for what in watched] == [None, None]
    finally:
        gc.enable()


def test_a_reset_cache_starts_counting_anew():
    model = tiny("llama")
    cache = OasisCache(model, budget=64)
    for _ in range(2):
        model.generate(prompt(1, 100), max_new_tokens=4, do_sample=False, **{cache_name(model): cache})
        seen = cache.stats()
        cache.reset()
        assert not any(value.any() for value in cache.stats().values())
    assert (seen["first"] == 1 + 3).all()
