"""A prompt that is prefilled in one place and decoded in another: the same ids, and each block crosses once at most."""

from __future__ import annotations

import copy
import gc
import signal
import time

import pytest
import torch
from pools import LONG, until
from tiny import prompt, tiny

import oasis_hf
from oasis_hf import ConfigError, HostMemoryError, OasisCache
from oasis_hf.attach import cache_name
from oasis_hf.disagg import (
    Corrupt,
    PeerLost,
    PoolFull,
    PoolServer,
    PrefillClient,
    PrefillWorker,
    Refused,
    StagingPool,
    StaleLease,
)

SECRET = b"a secret of the tests"
DIM = 16
KNOBS = [
    {},
    {
        "lookahead": "previous",
        "scorer": "minmax",
        "reduction": "max",
        "summary_dtype": "model",
        "tokens_per_summary": 16,
    },
    {"lookahead": "on_demand"},
    {"speculate": True, "draft_tokens": 3},
    {"lookahead": {"draft": 1, "previous": 1}, "tokens_per_summary": 4, "fetch_ratio": 1.0},
]


class Node:
    """A prefill node, and a client of it, in one process; the pool server is its own."""

    def __init__(self, model, capacity=4000, checked=False, seconds=LONG, host_bytes=None, **knobs):
        self.model = model
        self.staging = StagingPool(capacity, DIM, torch.float32, ttl=20.0, quarantine=0.5)
        self.worker = PrefillWorker(model, self.staging, checked=checked, **knobs)
        self.server = PoolServer(self.staging, SECRET, self.worker.terms)
        self.client = PrefillClient(model, self.server.address, SECRET, seconds=seconds, host_bytes=host_bytes, **knobs)

    def cache(self, ids, **knobs):
        return OasisCache.from_prefill(self.client.fetch(self.worker.prefill(ids)), self.model, **knobs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.close()
        self.server.close()
        self.staging.close()


def within(seconds, ask, fits):
    """What `ask` gives once it fits; else the last after so many seconds."""
    end = time.monotonic() + seconds
    while not fits(found := ask()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def left(node):
    """Bytes of the client's memory in use, of late reads too."""
    return sum(node.client.memory().values())


def generate(model, ids, cache, count=60, **kwargs):
    how = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **kwargs}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, **how)


@pytest.mark.core
@pytest.mark.parametrize(
    "knobs", [KNOBS[0], *(pytest.param(one, marks=pytest.mark.newest) for one in KNOBS[1:])], ids=map(str, KNOBS)
)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_ids_are_those_of_a_single_process(family, knobs):
    model = tiny(family)
    with Node(model, budget=96, **knobs) as node:
        for length in (299, 304, 31):
            ids = prompt(1, length)
            own = OasisCache(model, budget=96, **knobs)
            want = generate(model, ids, own, 36)
            cache = node.cache(ids)
            assert torch.equal(generate(model, ids, cache, 36), want)
            assert all(torch.equal(value, own.stats()[name]) for name, value in cache.stats().items())


def test_each_block_crosses_once_and_only_what_was_selected():
    model, ids = tiny("llama"), prompt(1, 700)
    with Node(model, budget=96) as node:
        cache = node.cache(ids)
        traffic, near = node.client.link.peer.traffic, cache.state.store.pool
        admitted = near.read
        assert 0 < admitted < 0.5 * 3 * 2 * 44
        branch = copy.deepcopy(cache)
        first = generate(model, ids, cache)
        crossed = near.read
        assert admitted < crossed < 3 * 2 * 44
        assert torch.equal(generate(model, ids, branch), first)
        assert near.read == crossed, "a branch shares what has come"
        assert traffic.payload == crossed * near.page_bytes
        assert node.server.staging.page_bytes == near.page_bytes
        served = within(LONG, lambda: node.server.served.get("payload_bytes"), lambda n: n == traffic.payload)
        assert served == traffic.payload, "the server counted the same"


def test_admission_is_one_read_of_merged_neighbours_and_the_first_step_reads_nothing():
    model, ids = tiny("llama"), prompt(1, 500)
    with Node(model, budget=128) as node:
        cache = node.cache(ids)
        traffic = node.client.link.peer.traffic
        near = cache.state.store.pool
        assert traffic.reads == 2 and traffic.runs < near.read, "one is waited for, one goes on beside the first step"
        near.arrive()
        before = near.read
        with torch.no_grad():
            token = model(ids[:, -1:], **{cache_name(model): cache}).logits[:, -1:].argmax(-1)
            cache.first_select()
            assert near.read == before
            model(token, **{cache_name(model): cache})
        assert near.read - before <= 3 * 2 * cache.state.cap


@torch.no_grad()
def test_the_same_after_crops_turns_and_embeddings_of_the_past():
    model, text = tiny("llama"), prompt(1, 400)
    with Node(model, budget=96) as node:
        for ids in (text[:, :200], text[:, :208]):
            outs = []
            own = OasisCache(model, budget=96)
            model(ids, **{cache_name(model): own})
            for cache in (own, node.cache(ids)):
                n = ids.shape[1]
                cache.crop(-(cache.get_seq_length() - (n - 20)))
                out = [model(text[:, i : i + 1], **{cache_name(model): cache}).logits for i in range(n - 20, n + 30)]
                out.append(model(text[:, n + 30 : n + 90], **{cache_name(model): cache}).logits[:, -1:])
                out += [model(text[:, i : i + 1], **{cache_name(model): cache}).logits for i in range(n + 90, n + 120)]
                outs.append(torch.cat(out, 1))
            torch.testing.assert_close(*outs, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_a_longer_prompt_goes_on_from_it():
    """A second turn: the prompt and more of it."""
    model, text = tiny("llama"), prompt(1, 300)
    with Node(model, budget=96) as node:
        own = OasisCache(model, budget=96)
        model(text[:, :200], **{cache_name(model): own})
        want = model(text[:, 200:260], **{cache_name(model): own}).logits[:, -1]
        cache = node.cache(text[:, :200])
        got = model(text[:, 199:260], **{cache_name(model): cache}).logits[:, -1]
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        for at in range(260, 290):
            a, b = (model(text[:, at : at + 1], **{cache_name(model): one}).logits for one in (own, cache))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_sampling_is_the_decode_sides():
    model, ids = tiny("llama"), prompt(1, 120)
    with Node(model, budget=96) as node:
        outs = []
        for cache in (OasisCache(model, budget=96), node.cache(ids)):
            torch.manual_seed(3)
            outs.append(generate(model, ids, cache, do_sample=True, top_k=0))
        assert torch.equal(*outs)


@pytest.mark.parametrize("verify", [None, "full"])
def test_oasis_generate(verify):
    model, ids = tiny("llama"), prompt(1, 200)
    knobs = {"budget": 96, "speculate": verify is None}
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {} if verify is None else {"verify": verify}
    with Node(model, **knobs) as node:
        want = oasis_hf.generate(model, ids, past_key_values=OasisCache(model, **knobs), **how)
        assert torch.equal(oasis_hf.generate(model, ids, past_key_values=node.cache(ids), **how), want)


def test_the_decode_side_may_choose_another_budget():
    model, ids = tiny("llama"), prompt(1, 300)
    with Node(model, budget=96) as node:
        for knobs in (
            {"budget": 160, "fetch_ratio": 0.5},
            {"budget": 64, "smooth_queries": 8, "lookahead": "previous"},
        ):
            want = generate(model, ids, OasisCache(model, **knobs))
            assert torch.equal(generate(model, ids, node.cache(ids, **knobs)), want)


# -- limits and faults ------------------------------------------------------------------------------------------------


def test_a_full_pool_refuses_with_its_numbers_and_serves_again():
    model, ids = tiny("llama"), prompt(1, 200)
    with Node(model, capacity=2 * 3 * 2 * 13, budget=96) as node:
        held = [node.cache(ids), node.cache(ids)]
        with pytest.raises(PoolFull, match=r"78 .* 0 .*156"):
            node.worker.prefill(ids)
        want = generate(model, ids, held.pop())
        gc.collect()
        until(lambda: node.staging.stats()["free"] == 78)  # at once, but for the quarantine where a read was under way
        assert torch.equal(generate(model, ids, node.cache(ids)), want), "what was given back serves the next"


def test_nothing_is_left_of_requests_that_are_over():
    model, ids = tiny("llama"), prompt(1, 100)
    with Node(model, budget=64) as node:
        for _ in range(20):
            cache = node.cache(ids)
            generate(model, ids, cache, 3)
            del cache
        gc.collect()
        node.client.fetch(node.worker.prefill(ids))  # and one that was never used
        gc.collect()
        over = ("published", "filling", "in_use", "quarantined")  # the last for a while, where a read was under way
        stats = within(LONG, node.staging.stats, lambda told: not any(told[name] for name in over))
        assert stats["published"] == stats["filling"] == stats["in_use"] == stats["quarantined"] == 0
        assert within(LONG, lambda: left(node), lambda pages: pages == 0) == 0


def test_reads_under_way_keep_no_request_alive(monkeypatch):
    """A cache that goes before its blocks have come."""
    model, ids = tiny("llama"), prompt(1, 300)
    with Node(model, budget=96) as node:
        peer, begun = node.client.link.peer, []
        cache = node.cache(ids)
        cache.state.store.pool.arrive()
        plain = peer._begin
        monkeypatch.setattr(peer, "_begin", begun.append)  # it is not even sent
        missing = (cache.state.store.pool._place[: cache.state.store.table.numel()] < 0).nonzero()[:3, 0]
        cache.state.store.pool.begin(missing)
        assert len(begun) == 1 and node.client.pool.pages_in_use > 3
        del cache
        gc.collect()
        assert within(LONG, node.staging.stats, lambda told: told["published"] == 0)["published"] == 0
        told = {"host": 0, "late": 3 * node.client.pool.page_bytes}
        assert node.client.memory() == told, "their places are not used again before they are settled"
        plain(begun[0])
        within(LONG, lambda: begun[0].settled, bool)
        assert left(node) == node.client.pool.pages_in_use == 0, "told without places being asked for"


def test_a_client_that_may_hold_too_little_says_how_much():
    model, ids = tiny("llama"), prompt(1, 300)
    with Node(model, budget=96, host_bytes=20 * 2048) as node:
        with pytest.raises(HostMemoryError, match=r"needs \d+ more pages .* may take 20 in all \(pages in use: 0\)"):
            node.cache(ids)
        assert within(LONG, lambda: left(node), lambda size: size == 0) == 0
        assert generate(model, ids[:, :40], node.cache(ids[:, :40]), 4).shape == (1, 44), "the next one is served"


def test_a_prefill_that_fails_gives_its_pages_back(monkeypatch):
    model = tiny("llama")
    with Node(model, budget=64) as node:

        def broken(*args, **kwargs):
            raise RuntimeError("no")

        monkeypatch.setattr(node.worker, "_selected", broken)
        with pytest.raises(RuntimeError, match="no"):
            node.worker.prefill(prompt(1, 50))
        assert node.staging.free == node.staging.capacity
        for wrong in (torch.zeros((2, 5), dtype=torch.long), torch.zeros((1, 0), dtype=torch.long)):
            with pytest.raises(ValueError, match="one prompt of at least one token"):
                node.worker.prefill(wrong)


def test_a_corrupt_block_is_found_where_blocks_are_checked():
    model, ids = tiny("llama"), prompt(1, 400)
    with Node(model, checked=True, budget=96, fetch_ratio=1.0) as node:
        other = node.cache(ids)
        request = node.worker.prefill(ids)
        prefilled = node.client.fetch(request)
        cache = OasisCache.from_prefill(prefilled, model)
        near = cache.state.store.pool
        far = prefilled.handle.pages.flatten().long()
        node.staging.pool.pages[far[near._place[: len(far)] < 0]] += 1.0
        with pytest.raises(Corrupt, match="CRC-32"):
            generate(model, ids, cache, 200)
        assert generate(model, ids, other).shape == (1, 460), "others go on"


def test_another_model_or_other_summaries_are_refused():
    model = tiny("llama")
    with Node(model, budget=96) as node:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        with pytest.raises(Refused, match="model differs"):
            PrefillClient(other, node.server.address, SECRET, budget=96)
        with pytest.raises(Refused, match="tokens_per_summary"):
            PrefillClient(model, node.server.address, SECRET, budget=96, tokens_per_summary=4)
        with pytest.raises(Refused):
            PrefillClient(model, node.server.address, b"some other secret", budget=96)
        with pytest.raises(ConfigError, match="engine='rdma' is not allowed: use 'tcp' or 'nixl'"):
            PrefillClient(model, node.server.address, SECRET, engine="rdma")
        with pytest.raises(ValueError, match="the model that its PrefillClient was made with"):
            OasisCache.from_prefill(node.client.fetch(node.worker.prefill(prompt(1, 40))), other)
        with pytest.raises(Refused, match="summar"):
            node.cache(prompt(1, 40), tokens_per_summary=4)
        with pytest.raises(StaleLease, match="no published request 'nobody'"):
            node.client.fetch("nobody")
    with pytest.raises(ConfigError, match="head_dim 32"):
        PrefillWorker(model, StagingPool(10, 32, torch.float32))
    with pytest.raises(ConfigError, match="leave store"):
        PrefillWorker(model, StagingPool(10, DIM, torch.float32), store="file")
    with pytest.raises(ConfigError, match="sparsify='auto' is for caches that decode"):
        PrefillWorker(model, StagingPool(10, DIM, torch.float32), sparsify="auto")


def test_a_server_that_is_started_again_is_read_on():
    model, ids = tiny("llama"), prompt(1, 400)
    with Node(model, budget=96, fetch_ratio=1.0) as node:
        want = generate(model, ids, OasisCache(model, budget=96, fetch_ratio=1.0), 150)
        cache = node.cache(ids)
        node.server._child.send_signal(signal.SIGKILL)
        assert torch.equal(generate(model, ids, cache, 150), want)
        assert node.server.restarts == 1 and node.client.link.peer.traffic.reads > 0


def test_a_node_that_is_gone_is_an_error_in_time_and_the_cache_is_as_it_was():
    model, ids = tiny("llama"), prompt(1, 400)
    with Node(model, budget=96) as node:
        other, cache = OasisCache(model, budget=96), node.cache(ids)
        node.server.close()
        cache.state.store.pool.far.seconds = 1.0
        started = time.monotonic()
        with pytest.raises(PeerLost):
            generate(model, ids, cache, 150)
        assert time.monotonic() - started < LONG / 2
        assert generate(model, ids, other).shape == (1, 460)


@pytest.mark.parametrize("checked", [False, True])
def test_a_model_of_sliding_windows_alone_has_no_pages_to_fetch(checked):
    model = tiny("mistral")
    with Node(model, budget=96, checked=checked) as node:
        for length in (1, 299):
            ids = prompt(1, length)
            want = generate(model, ids, OasisCache(model, budget=96))
            assert torch.equal(generate(model, ids, node.cache(ids)), want)


@pytest.mark.parametrize("knobs", [{"store": "file"}, {"store": "resident"}, {"host_dtype": "bfloat16"}], ids=str)
def test_a_store_of_ones_own_is_refused(knobs):
    with Node(tiny("llama"), budget=96) as node, pytest.raises(ConfigError, match="leave store and host_dtype"):
        node.cache(prompt(1, 40), **knobs)


def test_blocks_that_would_all_have_to_come_are_refused():
    with Node(tiny("llama"), budget=96) as node, pytest.raises(ConfigError, match="sparsify='auto' would bring all"):
        node.cache(prompt(1, 40), sparsify="auto")


@pytest.mark.parametrize("length", [1, 40])
def test_other_rows_than_its_own_are_refused(length):
    """A prompt of one token, which is set aside, leaves no columns: its rows count all the same."""
    model, ids = tiny("llama"), prompt(1, length)
    with Node(model, budget=96) as node:
        cache = node.cache(ids)
        with pytest.raises(ValueError, match="holds 1 rows, the call has 2"):
            generate(model, ids.expand(2, -1), cache, 2)
