"""Disaggregation with a `PrefixStore` where something does not fit: one sentence each, and nothing is left behind."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from letters import letter_tokenizer
from test_disagg_prefixes import COMMON, KNOBS, ROOM, SECRET, Pair
from test_prefixes import generate, joined
from tiny import prompt, tiny

from oasis_hf import ConfigError, OasisCache, PrefixStore, UnsupportedModelError, cli
from oasis_hf.disagg import PrefillClient, PrefillWorker, Refused, StagingPool
from oasis_hf.disagg.increment import Held
from oasis_hf.disagg.router import decode_process


def test_a_request_that_came_in_part_is_for_who_asked():
    model, ids = tiny("llama"), COMMON[:, :200]
    with Pair(model, checked=True) as pair:
        want = pair.answered(ids)[0]
        assert torch.equal(pair.answered(ids)[0], want), "checksums of what came in part"
        borrowed = pair.client.borrow(ids[0])
        request = pair.client.published(ids[0], borrowed=borrowed)
        with pytest.raises(Refused, match="came without its first 12 blocks"):
            pair.client.fetch(request)
        for held in ([13, borrowed.name.hex()], [-1, ""], [True, ""], "all", [1], [1, 2]):
            with pytest.raises(Refused, match="A prompt of 200 tokens can't be held as"):
                pair.node.submit("r", ids[0], held)
        whole = pair.node.worker.prefill(ids, held=Held(12, "0" * 32))
        assert pair.client.fetch(whole).handle.first == 0, "a hash of something else"
        prefilled = pair.client.prefill(ids[0])
        with pytest.raises(ValueError, match="keep it after from_prefill"):
            prefilled.keep()
        prefilled.close()
        borrowed.close()
        del prefilled
        pair.nothing_left()


def test_a_request_is_fetched_with_what_it_was_asked_for_with():
    """Else the beginning of another prompt, or places of another store, would stand before its own blocks."""
    model = tiny("llama")
    one, other = (prompt(1, 200, seed) for seed in (1, 2))
    with Pair(model) as pair:
        for ids in (one, other):
            pair.answered(ids, 2)
        own, elsewhere = pair.client.borrow(one[0]), PrefixStore(model, ROOM, **KNOBS)
        generate(model, one, elsewhere.cache(), 1)
        given_back = pair.client.borrow(one[0])
        given_back.close()
        for wrong in (pair.client.borrow(other[0]), elsewhere.borrow(one[0]), given_back):
            request = pair.client.published(one[0], borrowed=own)
            assert wrong.count == own.count
            with pytest.raises(Refused, match="fetch it where it was asked for, with what it was asked for"):
                pair.client.fetch(request, wrong)
            wrong.close()
        own.close()
        pair.nothing_left()


def test_a_request_that_is_over_is_neither_taken_nor_kept():
    """Its places may be another's, and what a cache has written since is another text's."""
    model, ids = tiny("llama"), COMMON[:, :208]
    with Pair(model) as pair:
        prefilled = pair.prefill(ids)
        cache = OasisCache.from_prefill(prefilled, model)
        prefilled.close()
        with pytest.raises(ValueError, match="is over: keep it before close"):
            prefilled.keep()
        pair.answered(ids)
        held = pair.prefill(ids)
        assert held.handle.first == 13, "nothing of it has to come"
        held.close()
        with pytest.raises(ValueError, match="is over: it can't be taken after close"):
            OasisCache.from_prefill(held, model)
        del cache
        pair.nothing_left()


def test_a_prompt_that_is_wholly_held_has_no_pages_to_check():
    model, ids = tiny("llama"), COMMON[:, :160]
    with Pair(model, checked=True) as pair:
        want = pair.answered(ids)[0]
        assert torch.equal(pair.answered(ids)[0], want) and pair.here.hits == 160
        pair.nothing_left()


@pytest.mark.parametrize("reads", [False, True])
def test_what_was_read_under_autocast_is_nobody_elses(reads):
    model, ids = tiny("llama"), COMMON[:, :200]
    with Pair(model, wire=False, reads=reads) as pair:
        with torch.autocast("cpu", torch.bfloat16):
            prefilled = pair.prefill(ids)
        cache = OasisCache.from_prefill(prefilled, model)
        generate(model, ids, cache, 4)
        assert prefilled.keep() == len(pair.here) == 0
        prefilled.close()
        del cache
        pair.nothing_left()


def test_a_prompt_is_one():
    model, ids = tiny("llama"), joined(COMMON[:, :160], prompt(1, 40, 1))
    with Pair(model) as pair:
        pair.answered(ids)
        prefilled = pair.client.prefill(ids)
        assert prefilled.handle.first == 12, "a row of ids is what they are"
        prefilled.close()
        with pytest.raises(ValueError, match=r"one prompt, of ids \[n\] or \[1, n\], not \[2, 200\]"):
            pair.client.prefill(ids.repeat(2, 1))
        del prefilled
        pair.nothing_left()


def test_what_does_not_go_together_is_said():
    model = tiny("llama")
    store, staging = PrefixStore(model, ROOM, **KNOBS), StagingPool(100, 16, torch.float32)

    def client(prefixes=store, **knobs):
        return PrefillClient(model, ("127.0.0.1", 1), SECRET, prefixes=prefixes, **knobs)

    with pytest.raises(ConfigError, match="host_bytes=4096 is not allowed with prefixes"):
        client(host_bytes=4096)
    with pytest.raises(ConfigError, match="tokens_per_summary=4 differs from its PrefixStore's 8"):
        client(tokens_per_summary=4)
    with pytest.raises(ConfigError, match="prefixes is a PrefixStore of another model"):
        client(PrefixStore(tiny("qwen3"), ROOM))
    with pytest.raises(ConfigError, match="prefixes is a PrefixStore of another model"):
        PrefillWorker(model, staging, prefixes=PrefixStore(tiny("qwen3"), ROOM))
    with pytest.raises(ConfigError, match="has its PrefixStore's knobs and drafter"):
        PrefillWorker(model, staging, prefixes=store, budget=96)
    for prefixes in (PrefixStore(model, ROOM, host_dtype="bfloat16"), PrefixStore(model, ROOM, sparsify="auto")):
        with pytest.raises(ConfigError, match="host_dtype|sparsify"):
            PrefillWorker(model, staging, prefixes=prefixes)
    with pytest.raises(ConfigError, match="keeps pages as they come: leave host_dtype"):
        client(PrefixStore(model, ROOM, host_dtype="bfloat16"))


@pytest.mark.parametrize("command", ["prefill-server", "serve-disagg"])
def test_the_commands_option(command, tmp_path, capsys):
    if command == "serve-disagg":
        pytest.importorskip("aiohttp")
    for gib in ("-1.0", "1e-10"):
        assert cli.main([command, "--prefix-gib", gib, "--secret-file", str(tmp_path / "secret")]) == 2
        assert f"--prefix-gib {gib} is not allowed: use a number of GiB, or 0." in capsys.readouterr().err


def test_a_decode_process_says_why_it_can_have_no_store(tmp_path):
    tiny("gemma3").save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    here, there = multiprocessing.Pipe()
    decode_process(there, str(tmp_path), {"threads": 1, "device": "cpu", "dtype": None, "prefix_bytes": ROOM})
    assert here.poll(0) and here.recv()[1:] == ("failed", str(_said(tiny("gemma3"))))


def _said(model):
    with pytest.raises(UnsupportedModelError) as error:
        PrefixStore(model, ROOM)
    return error.value
