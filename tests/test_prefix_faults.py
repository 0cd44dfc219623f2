"""`PrefixStore` where things go wrong or beside the usual way: nothing is reused that a cold run differs from."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import threading

import pytest
import torch
from heads import TENSORS, plain_config, target, write
from test_prefixes import KNOBS, ROOM, generate, joined
from tiny import left_padded, prompt, tiny
from weights import Packed, made

from oasis_hf import ConfigError, OasisCache, PrefixFileError, PrefixStore
from oasis_hf.attach import cache_name
from oasis_hf.prefixes import keeping
from oasis_hf.summaries import Summaries

pytestmark = pytest.mark.core

IDS = prompt(1, 100)


def cold(model, ids, **kwargs):
    return generate(model, ids, OasisCache(model, **KNOBS), **kwargs)


def known(model, *texts):
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    for ids in texts:
        generate(model, ids, prefixes.cache(), 1)
    return prefixes


def test_a_copy_of_an_empty_cache_has_the_pages_of_its_store():
    model, other = tiny("llama"), joined(prompt(1, 96, 7), IDS[:, :4])
    prefixes = known(model, IDS)
    assert torch.equal(generate(model, IDS, copy.deepcopy(prefixes.cache())), cold(model, IDS))
    generate(model, other, copy.deepcopy(prefixes.cache()), 1)
    assert torch.equal(generate(model, other, prefixes.cache()), cold(model, other)) and prefixes.hits == 2 * 96


def test_positions_of_the_callers_own():
    model, at = tiny("llama"), torch.arange(100)[None] * 3
    prefixes = known(model, IDS)
    assert torch.equal(generate(model, IDS, prefixes.cache(), position_ids=at), cold(model, IDS, position_ids=at))
    fresh = PrefixStore(model, ROOM, **KNOBS)
    generate(model, IDS, fresh.cache(), 1, position_ids=at)
    assert len(fresh) == 0 and prefixes.hits == 0
    generate(model, IDS, prefixes.cache(), 1, position_ids=torch.arange(100)[None])
    assert prefixes.hits == 96


def test_what_followed_hidden_tokens_is_not_kept():
    model, more = tiny("llama"), joined(IDS, prompt(1, 40, 5))
    prefixes, mask = PrefixStore(model, ROOM, **KNOBS), torch.ones_like(more)
    cache = prefixes.cache()
    generate(model, IDS, cache, 1)
    mask[:, 30:40] = 0
    generate(model, {"input_ids": more, "attention_mask": mask}, cache, 1)
    assert prefixes.admit(prefixes.cache(), joined(more[:, :30], more[:, 40:])) == 16


@pytest.mark.parametrize("kind", ["embeddings", "padding", "a branch"])
def test_what_a_loop_of_ones_own_has_read_is_not_kept_by_generate(kind):
    model = tiny("llama")
    prefixes, batch = PrefixStore(model, ROOM, **KNOBS), left_padded([190, 90])
    cache, name = prefixes.cache(), cache_name(model)
    if kind == "padding":
        model(**batch, **{name: cache})
    else:
        model(inputs_embeds=model.get_input_embeddings()(prompt(2, 190, 55)), **{name: cache})
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    cache = copy.deepcopy(cache) if kind == "a branch" else cache
    more = {"input_ids": joined(batch["input_ids"], prompt(2, 40, 5))}
    more["attention_mask"] = joined(batch["attention_mask"], torch.ones(2, 40, dtype=torch.long))
    generate(model, more, cache, 1)
    assert len(prefixes) == 0


def test_autocast_and_none_do_not_serve_each_other():
    model = tiny("llama")
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = cold(model, IDS)
        for _ in range(2):
            assert torch.equal(generate(model, IDS, prefixes.cache()), want)
        cache = OasisCache.from_prefix(prefixes, IDS)
        model(IDS, **{cache_name(model): cache})
    with pytest.raises(ValueError, match="without padding or autocast"):
        prefixes.keep(cache, IDS)
    assert len(prefixes) == 0
    prefixes = known(model, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(generate(model, IDS, prefixes.cache()), want)


def test_made_and_emptied_in_inference_mode():
    model = tiny("llama")
    with torch.inference_mode():
        prefixes = known(model, IDS)
    generate(model, IDS, prefixes.cache(), 1)
    with torch.inference_mode():
        prefixes.clear()
    generate(model, IDS, prefixes.cache(), 1)
    assert prefixes.hits == 96 and len(prefixes) == 6


def test_rows_with_adapters_of_their_own():
    peft = pytest.importorskip("peft")
    model, name = copy.deepcopy(tiny("llama")), cache_name(tiny("llama"))
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, lora).eval()
    prefixes = PrefixStore(model, ROOM, **KNOBS)

    def say(cache, **which):
        how = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS), name: cache}
        return tuned.generate(input_ids=IDS, **how, **which)

    base, own = say(OasisCache(model, **KNOBS), adapter_names=["__base__"]), say(OasisCache(model, **KNOBS))
    assert not torch.equal(base, own)
    say(prefixes.cache(), adapter_names=["__base__"])
    assert torch.equal(say(prefixes.cache()), own) and len(prefixes) == 6
    assert torch.equal(say(prefixes.cache(), adapter_names=["__base__"]), base)


def test_weights_that_are_elsewhere():
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny("llama"))
    there = PrefixStore(model, ROOM, **KNOBS).identity()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    prefixes = known(model, IDS)
    assert torch.equal(generate(model, IDS, prefixes.cache()), cold(tiny("llama"), IDS)) and prefixes.hits == 96
    assert prefixes.identity() == there


def test_packed_weights_count():
    model = made("4 bits packed (as GPTQ and AWQ layers are)")
    other = copy.deepcopy(model)
    prefixes, others = PrefixStore(model, ROOM, **KNOBS), PrefixStore(other, ROOM, **KNOBS)
    assert prefixes.identity() == others.identity()
    with torch.no_grad():
        for part in (part for part in other.modules() if isinstance(part, Packed)):
            for own in part.buffers():
                own.copy_(own.flip(0))
    others.clear()
    assert prefixes.identity() != others.identity()


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    others = {name: x + 0.3 if x.is_floating_point() else x for name, x in TENSORS.items()}
    return [write(folder / name, plain_config(), own) for name, own in (("one", TENSORS), ("two", others))]


def test_states_of_a_head(tmp_path, heads):
    model, one, two = target(), *({"budget": 96, "drafter": head} for head in heads)
    prefixes = PrefixStore(model, ROOM, **one)
    generate(model, IDS, prefixes.cache(), 1)
    prefixes.save(tmp_path / "kept")
    with pytest.raises(PrefixFileError, match="another model, adapter or layout"):
        PrefixStore(model, ROOM, **two).load(tmp_path / "kept")
    longer = joined(IDS, prompt(1, 60, 2))
    cache = OasisCache.from_prefix(prefixes, longer)
    prefixes.clear()  # as if others had taken their place
    assert torch.equal(generate(model, longer, cache), generate(model, longer, OasisCache(model, **one)))
    assert len(prefixes) == 0
    generate(model, longer, prefixes.cache(), 1)
    assert len(prefixes) == 10


@pytest.mark.parametrize("what", ["_part", "share"])
def test_nothing_is_found_of_what_was_not_kept_whole(monkeypatch, what):
    model = tiny("llama")
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    cache = prefixes.cache()
    model(IDS, **{cache_name(model): cache})

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(keeping if what == "_part" else cache.state.store, what, fails)
        with pytest.raises(MemoryError):
            prefixes.keep(cache, IDS)
    assert len(prefixes) == 0 and torch.equal(generate(model, IDS, prefixes.cache()), cold(model, IDS))
    del cache
    gc.collect()
    assert prefixes.pool.pages_in_use == len(prefixes) * 6


def test_an_attempt_that_failed_leaves_no_references(monkeypatch):
    model = tiny("llama")
    prefixes = known(model, IDS)
    cache = prefixes.cache()

    def fails(*args):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as broken, pytest.raises(torch.OutOfMemoryError):
        broken.setattr(Summaries, "ensure", fails)
        prefixes.admit(cache, IDS)
    assert torch.equal(generate(model, IDS, cache), cold(model, IDS))
    del cache
    gc.collect()
    prefixes.clear()
    assert prefixes.pool.pages_in_use == 0


def test_loading_without_memory(tmp_path):
    model = tiny("llama")
    known(model, IDS).save(tmp_path / "kept")
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    most, prefixes.pool.capacity = prefixes.pool.capacity, 13
    with pytest.raises(MemoryError):
        prefixes.load(tmp_path / "kept")
    prefixes.pool.capacity = most
    assert len(prefixes) == 2 and torch.equal(generate(model, IDS, prefixes.cache()), cold(model, IDS))


def test_what_is_loaded_goes_before_what_it_stands_on(tmp_path):
    model, other = tiny("llama"), prompt(1, 49, 8)
    known(model, IDS[:, :33]).save(tmp_path / "two")
    prefixes = PrefixStore(model, 4 * PrefixStore(model, ROOM, **KNOBS).layout.nbytes, **KNOBS)
    generate(model, IDS[:, :17], prefixes.cache(), 1)
    assert prefixes.load(tmp_path / "two") == 1
    generate(model, other, prefixes.cache(), 1)  # of four blocks it takes three
    prefixes.save(tmp_path / "four")
    again = PrefixStore(model, ROOM, **KNOBS)
    assert again.load(tmp_path / "four") == 4
    mix = joined(other[:, :16], IDS[:, 16:32], prompt(1, 9, 3))
    assert again.admit(again.cache(), mix) == 16, "nobody has read the second block behind this first one"
    assert again.admit(again.cache(), IDS) == 16


def test_folders_of_others_are_left_alone(tmp_path, monkeypatch):
    model = tiny("llama")
    prefixes = known(model, IDS)
    prefixes.save(tmp_path / "kept.part")
    prefixes.save(tmp_path / "missing" / "kept")
    dumps = json.dumps

    def meanwhile(*args, **kwargs):  # another process saves to the same folder
        monkeypatch.setattr(json, "dumps", dumps)
        prefixes.save(tmp_path / "kept")
        return dumps(*args, **kwargs)

    prefixes.identity()
    monkeypatch.setattr(json, "dumps", meanwhile)
    with pytest.raises(PrefixFileError, match="exists"):
        prefixes.save(tmp_path / "kept")
    for name in ("kept.part", "kept", "missing/kept"):
        assert PrefixStore(model, ROOM, **KNOBS).load(tmp_path / name) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.part", "missing"]


def test_threads_share_a_store():
    """One looks a prompt up; before it has the pages, another empties the store and has them for its own."""
    model, fill = tiny("llama"), PrefixStore._fill
    prefixes = known(model, IDS)

    def other():
        prefixes.clear()
        generate(model, prompt(1, 100, 9), prefixes.cache(), 1)

    thread = threading.Thread(target=other)

    def slow(*args):
        thread.start()
        thread.join(1)
        fill(prefixes, *args)

    cache = prefixes.cache()
    prefixes._fill = slow
    prefixes.admit(cache, IDS)
    del prefixes._fill
    thread.join()
    assert torch.equal(generate(model, IDS, cache), cold(model, IDS))


def test_loops_of_ones_own_leave_room_for_each_other():
    model = tiny("llama")
    prefixes = PrefixStore(model, 8 * PrefixStore(model, ROOM, **KNOBS).layout.nbytes, **KNOBS)
    for seed in (0, 1):
        ids, cache = prompt(1, 100, seed), prefixes.cache()
        model(ids, **{cache_name(model): cache})
        assert prefixes.keep(cache, ids) == 6


def test_a_reset_cache_keeps_its_buffers():
    model = tiny("llama")
    prefixes = known(model, IDS)
    cache = prefixes.cache()
    generate(model, IDS, cache, 4)
    buffers = [layer.working_set.keys for layer in cache.sparse_layers]
    cache.reset()
    assert prefixes.admit(cache, IDS) == 96
    assert all(layer.working_set.keys is one for layer, one in zip(cache.sparse_layers, buffers))
    assert torch.equal(generate(model, IDS, cache), cold(model, IDS))


@pytest.mark.parametrize("wrong", ["1GB", 2e9, True])
def test_wrong_input(wrong):
    model = tiny("llama")
    with pytest.raises(ConfigError, match=f"host_bytes={wrong!r} is not allowed"):
        PrefixStore(model, wrong)
    with contextlib.suppress(MemoryError):
        assert len(PrefixStore(model, 1 << 60)) == 0
    with pytest.raises(ValueError, match=r"ids of shape \[rows, tokens\], not \[100\]"):
        OasisCache.from_prefix(PrefixStore(model, ROOM), IDS[0])


def test_a_list_of_files_that_is_none(tmp_path):
    prefixes = known(tiny("llama"), IDS)
    prefixes.save(tmp_path / "kept")
    index = tmp_path / "kept" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "files": 3}))
    with pytest.raises(PrefixFileError, match="holds no saved prefix store"):
        prefixes.load(tmp_path / "kept")
