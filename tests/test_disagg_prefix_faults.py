"""Disaggregation with a `PrefixStore` where something does not fit: one sentence each, and nothing is left behind."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from letters import letter_tokenizer
from test_disagg_prefixes import COMMON, KNOBS, ROOM, SECRET, Pair
from tiny import tiny

from oasis_hf import ConfigError, PrefixStore, UnsupportedModelError, cli
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
    assert cli.main([command, "--prefix-gib", "-1", "--secret-file", str(tmp_path / "secret")]) == 2
    assert "--prefix-gib -1.0 is not allowed: use a number from 0 on" in capsys.readouterr().err


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
