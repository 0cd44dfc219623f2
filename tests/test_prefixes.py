"""`PrefixStore`: prompts that begin alike are read once, and what comes out is what a cold run gives."""

from __future__ import annotations

import copy
import gc
import json
from collections import Counter

import pytest
import torch
from heads import TENSORS, plain_config, target, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reach import longrope
from tiny import left_padded, prompt, tiny

import oasis_hf
from oasis_hf import ConfigError, OasisCache, PrefixFileError, PrefixStore, UnsupportedModelError
from oasis_hf.attach import cache_name

pytestmark = pytest.mark.core

ROOM = 64 << 20
KNOBS = {"budget": 96, "fetch_ratio": 0.5}


def generate(model, inputs, cache, count=24, **kwargs):
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    how = {"max_new_tokens": count, "do_sample": False, **kwargs}
    return model.generate(**inputs, **{cache_name(model): cache}, **how)


class Forwards:
    """Counts the tokens that a model's forwards read."""

    def __init__(self, model):
        self.read = 0
        self.hook = model.model.layers[0].register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.read += hidden.shape[0] * hidden.shape[1]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.hook.remove()


def joined(first, *more):
    return torch.cat((first, *more), 1)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("shared", [16, 167])
def test_a_second_prompt_reads_only_what_is_new(family, shared):
    model, common = tiny(family), prompt(1, shared)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    for seed in (1, 2):
        ids = joined(common, prompt(1, 40, seed))
        want = generate(model, ids, OasisCache(model, **KNOBS))
        cache = prefixes.cache()
        with Forwards(model) as seen:
            assert torch.equal(generate(model, ids, cache, 1), want[:, : ids.shape[1] + 1])
        assert seen.read == ids.shape[1] - (shared // 16 * 16 if seed == 2 else 0)
        assert torch.equal(generate(model, ids, prefixes.cache()), want)


@pytest.mark.parametrize(
    "knobs",
    [
        {"lookahead": "on_demand", "budget": 64},
        {"smooth_queries": 8, "lookahead": "previous", "budget": 64},
        {"scorer": "minmax", "summary_dtype": "model", "tokens_per_summary": 16, "budget": 96},
        {"speculate": True, "draft_tokens": 3, "drafter": "prompt_lookup", "budget": 96},
        {"budget": 4000},
    ],
)
def test_it_is_a_cold_run_whatever_the_knobs(knobs):
    model = tiny("llama")
    prefixes = PrefixStore(model, ROOM, **knobs)
    for seed, rest in ((1, 30), (2, 5), (3, 0), (1, 31)):
        ids = joined(prompt(1, 170), prompt(1, rest, seed))
        want = generate(model, ids, OasisCache(model, **knobs))
        assert torch.equal(generate(model, ids, prefixes.cache()), want)


def test_a_head_goes_on_as_if_it_had_seen_the_prefix(head):
    model, knobs = target(), {"speculate": True, "draft_tokens": 3, "budget": 96, "drafter": head}
    prefixes = PrefixStore(model, ROOM, **knobs)
    for seed in (1, 2, 3):
        ids = joined(prompt(1, 150), prompt(1, 20, seed))
        cold, warm = OasisCache(model, **knobs), prefixes.cache()
        want = generate(model, ids, cold)
        assert torch.equal(generate(model, ids, warm), want)
        assert torch.equal(warm.drafter.past.at, cold.drafter.past.at)
        torch.testing.assert_close(warm.drafter.past.keys, cold.drafter.past.keys, rtol=1e-4, atol=1e-5)
        assert warm.stats().keys() == cold.stats().keys()


@pytest.mark.parametrize("kind", ["plain", "head"])
def test_rows_padded_on_the_left(kind, head):
    model = target() if kind == "head" else tiny("llama")
    knobs = {**KNOBS, **({"drafter": head} if kind == "head" else {})}
    prefixes = PrefixStore(model, ROOM, **knobs)
    batch = left_padded([190, 130, 50])
    want = generate(model, batch, OasisCache(model, **knobs))
    assert torch.equal(generate(model, batch, prefixes.cache()), want)
    cache = OasisCache.from_prefix(prefixes, **batch)
    # All rows hold as many columns: so many as whole blocks of the first one reach.
    assert cache.get_seq_length() == 176 and cache.state.rows.tokens == [176, 116, 36]
    assert torch.equal(generate(model, batch, cache), want)


def test_beams_and_several_sequences_share_a_prompt():
    model, ids = tiny("llama"), prompt(1, 150)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    want = generate(model, ids, OasisCache(model, **KNOBS), num_beams=3)
    for _ in range(2):
        assert torch.equal(generate(model, ids, prefixes.cache(), num_beams=3), want)
    assert len(prefixes) == 150 // 16


def test_own_loop_takes_a_store():
    model, ids = tiny("llama"), prompt(2, 150)
    knobs = {**KNOBS, "speculate": True, "draft_tokens": 3, "drafter": "prompt_lookup"}
    prefixes = PrefixStore(model, ROOM, **knobs)
    how = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = oasis_hf.generate(model, ids, **{cache_name(model): OasisCache(model, **knobs)}, **how)
    for _ in range(2):
        assert torch.equal(oasis_hf.generate(model, ids, prefixes=prefixes, **how), want)
    assert prefixes.hits == 2 * 144
    with pytest.raises(ValueError, match="prefixes= or a cache"):
        oasis_hf.generate(model, ids, prefixes=prefixes, **{cache_name(model): prefixes.cache()}, **how)


def test_by_hand():
    model, ids = tiny("llama"), prompt(1, 100)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    cache = OasisCache.from_prefix(prefixes, ids)
    assert cache.get_seq_length() == 0
    model(ids, **{cache_name(model): cache})
    assert prefixes.keep(cache, ids) == 6 and prefixes.keep(cache, ids) == 0
    again = OasisCache.from_prefix(prefixes, ids)
    assert again.get_seq_length() == 96
    want = model(ids, **{cache_name(model): OasisCache(model, **KNOBS)}).logits[:, 96:]
    torch.testing.assert_close(model(ids[:, 96:], **{cache_name(model): again}).logits, want, rtol=1e-3, atol=1e-4)
    model(ids[:, :1], **{cache_name(model): again})
    padded, batch = prefixes.cache(), left_padded([30, 20])
    model(**batch, **{cache_name(model): padded})
    for wrong, columns in (
        (padded, batch["input_ids"]),
        (again, joined(ids, ids[:, :1])),
        (OasisCache(model, **KNOBS), ids),
        (cache, ids[:, 1:]),
    ):
        with pytest.raises(ValueError, match="takes a cache of its own"):
            prefixes.keep(wrong, columns)


def test_a_text_behind_the_prefix_of_another_is_not_kept():
    model, ids = tiny("llama"), prompt(1, 100)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    generate(model, ids, prefixes.cache(), 1)
    other = joined(prompt(1, 96, 7), prompt(1, 40, 8))
    generate(model, other, OasisCache.from_prefix(prefixes, ids), 1)
    assert len(prefixes) == 6
    assert torch.equal(generate(model, other, prefixes.cache()), generate(model, other, OasisCache(model, **KNOBS)))


def test_what_a_working_set_has_written_is_not_kept():
    model, ids = tiny("llama"), prompt(1, 100)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    cache = prefixes.cache()
    out = generate(model, ids, cache, 30)
    generate(model, joined(out, prompt(1, 40, 9)), cache)
    assert len(prefixes) == 100 // 16
    assert prefixes.admit(prefixes.cache(), joined(out, prompt(1, 40, 9))) == 96


def test_other_caches_never_change_what_is_kept():
    """Crop into shared blocks, write over them, branch, and drop the cache that read them."""
    model, ids = tiny("llama"), prompt(1, 100)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    cache = prefixes.cache()
    generate(model, ids, cache, 8)
    pages = prefixes.pool.pages[prefixes.index.pages[list(prefixes.index.entry.values())]].clone()
    cache.crop(-50)
    other = copy.deepcopy(cache)
    for one in (cache, other):
        seen = joined(ids[:, : one.get_seq_length()], prompt(1, 60, 3))
        generate(model, seen, one, 8)
    del cache, other, one
    gc.collect()
    assert torch.equal(prefixes.pool.pages[prefixes.index.pages[list(prefixes.index.entry.values())]], pages)
    assert torch.equal(generate(model, ids, prefixes.cache()), generate(model, ids, OasisCache(model, **KNOBS)))


def test_a_byte_limit_and_nothing_left_behind():
    """A hundred requests over ten prefixes, of which a few fit."""
    model = tiny("llama")
    one = PrefixStore(model, ROOM, **KNOBS).layout.nbytes
    prefixes = PrefixStore(model, 25 * one, **KNOBS)
    wants, seen = {}, Counter()
    generator = torch.Generator().manual_seed(0)
    for request in range(100):
        which = int(torch.randint(0, 10, (), generator=generator) ** 2 / 9)
        ids = joined(prompt(1, 96, which), prompt(1, 9, 100 + which % 3))
        if which not in wants:
            wants[which] = generate(model, ids, OasisCache(model, **KNOBS), 4)
        before = prefixes.hits
        assert torch.equal(generate(model, ids, prefixes.cache(), 4), wants[which]), request
        seen[which] += prefixes.hits > before
        assert prefixes.nbytes <= prefixes.host_bytes
    assert seen[0] > 5 and prefixes.asked == 100 * 105
    assert prefixes.nbytes > 20 * one
    gc.collect()
    assert prefixes.pool.pages_in_use == len(prefixes) * 3 * 2
    prefixes.clear()
    assert prefixes.pool.pages_in_use == len(prefixes) == 0
    pool = prefixes.pool
    generate(model, ids, prefixes.cache(), 4)
    del prefixes
    gc.collect()
    assert pool.pages_in_use == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70), st.integers(0, 2)), min_size=1, max_size=8))
@settings(max_examples=25)
def test_any_sequence_of_prompts_gives_what_cold_runs_give(requests):
    model = tiny("llama")
    one = PrefixStore(model, ROOM, **KNOBS).layout.nbytes
    prefixes = PrefixStore(model, 9 * one, **KNOBS)
    for which, length, tail in requests:
        ids = joined(prompt(1, length, which % 2), prompt(1, 3, tail), prompt(1, length, which))
        name = {cache_name(model): prefixes.cache()}
        want = model(ids, **{cache_name(model): OasisCache(model, **KNOBS)}).logits[:, -1]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **name,
        )  # fmt: skip
        torch.testing.assert_close(out.logits[0], want, rtol=1e-3, atol=1e-4)
        assert prefixes.nbytes <= prefixes.host_bytes


def test_calls_that_are_more_than_ids_reuse_nothing():
    model, ids = tiny("llama"), prompt(1, 100)
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    embeds = model.get_input_embeddings()(ids)
    for _ in range(2):
        cache = prefixes.cache()
        model.generate(
            inputs_embeds=embeds, attention_mask=torch.ones_like(ids), max_new_tokens=2, **{cache_name(model): cache}
        )
    holes = torch.ones_like(ids)
    holes[:, 40:50] = 0
    generate(model, ids, prefixes.cache())
    assert prefixes.admit(prefixes.cache(), ids, holes) == 0 and prefixes.hits == 0
    want = generate(model, ids, OasisCache(model, **KNOBS))
    assert torch.equal(generate(model, ids, prefixes.cache(), prefill_chunk_size=32), want)


def test_adapters_have_their_own_blocks():
    peft = pytest.importorskip("peft")
    model, ids = copy.deepcopy(tiny("llama")), prompt(1, 100)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    wants = []
    for _ in range(2):
        wants.append(generate(model, ids, prefixes.cache()))
        with tuned.disable_adapter():
            wants.append(generate(model, ids, prefixes.cache()))
    assert torch.equal(wants[0], wants[2]) and torch.equal(wants[1], wants[3])
    assert not torch.equal(wants[0], wants[1]) and len(prefixes) == 12


def test_saved_and_loaded(tmp_path, head):
    model, ids, knobs = target(), prompt(1, 150), {"budget": 96, "drafter": head}
    prefixes = PrefixStore(model, ROOM, **knobs)
    want = generate(model, ids, prefixes.cache())
    generate(model, joined(ids[:, :64], prompt(1, 40, 4)), prefixes.cache())
    prefixes.save(tmp_path / "kept")
    with pytest.raises(PrefixFileError, match="exists"):
        prefixes.save(tmp_path / "kept")
    again = PrefixStore(model, ROOM, **knobs)
    assert again.load(tmp_path / "kept") == len(prefixes) == 9 + 2
    assert again.load(tmp_path / "kept") == 0
    with Forwards(model) as seen:
        assert torch.equal(generate(model, ids, again.cache()), want)
    assert seen.read < 60
    small = PrefixStore(model, 5 * prefixes.layout.nbytes, **knobs)
    assert small.load(tmp_path / "kept") == 5 and small.nbytes <= small.host_bytes
    assert torch.equal(generate(model, ids, small.cache()), want)


def test_files_that_can_not_be_used(tmp_path):
    model = tiny("llama")
    prefixes = PrefixStore(model, ROOM, **KNOBS)
    generate(model, prompt(1, 150), prefixes.cache(), 1)
    prefixes.save(tmp_path / "kept")
    index, (blocks,) = tmp_path / "kept" / "index.json", (tmp_path / "kept").glob("blocks*")
    told, data = index.read_text(), blocks.read_bytes()

    def refused(sentence, store=prefixes):
        fresh = PrefixStore(store.model, ROOM, **KNOBS) if store is prefixes else store
        with pytest.raises(PrefixFileError, match=sentence) as error:
            fresh.load(tmp_path / "kept")
        assert len(fresh) == 0 and "\n" not in str(error.value)

    for broken in (data[:-100], data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :], b""):
        blocks.write_bytes(broken)
        refused("can't be used: it has")
    blocks.write_bytes(data)
    for broken in (told[:-20], "[]", "{}", told.replace('"format": 1', '"format": 2')):
        index.write_text(broken)
        refused("holds no saved prefix store|has format 2")
    lies = json.loads(told)
    lies["files"][0]["name"] = "../other.safetensors"
    index.write_text(json.dumps(lies))
    refused("can't be used")
    index.write_text(told)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    refused("another model, adapter or layout", PrefixStore(other, ROOM, **KNOBS))
    refused("another model, adapter or layout", PrefixStore(model, ROOM, tokens_per_summary=4, **KNOBS))
    with pytest.raises(PrefixFileError, match="holds no saved"):
        prefixes.load(tmp_path / "nothing")


def test_a_cache_serves_prompt_after_prompt(head):
    model, knobs = target(), {"budget": 96, "drafter": head}
    prefixes = PrefixStore(model, ROOM, **knobs)
    cache = prefixes.cache()
    for seed in (1, 2):
        ids = joined(prompt(1, 64), prompt(1, 50, seed))
        assert torch.equal(generate(model, ids, cache), generate(model, ids, OasisCache(model, **knobs)))
        cache.reset()
    assert len(prefixes) == 7 + 3
    model(ids[:, :30], **{cache_name(model): cache})
    cache.crop(-5)
    model(ids[:, 60:100], **{cache_name(model): cache})
    assert prefixes.keep(cache, joined(ids[:, :25], ids[:, 60:100])) == 0, "its states are not those of these tokens"


def test_what_is_refused():
    with pytest.raises(UnsupportedModelError, match="sliding-window layers"):
        PrefixStore(tiny("gemma3"), ROOM)
    with pytest.raises(UnsupportedModelError, match="by how far the whole text goes"):
        PrefixStore(longrope().eval(), ROOM)
    with pytest.raises(ConfigError, match="host_bytes=1,000 is not allowed: one block of this model takes"):
        PrefixStore(tiny("llama"), 1000)
    with pytest.raises(ConfigError, match="not with store='file'"):
        PrefixStore(tiny("llama"), ROOM, store="file")
