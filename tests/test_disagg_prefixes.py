"""A decode side, or a prefill side, or both with a `PrefixStore`: what is held is neither read nor sent again, and what
comes out is what a cold run gives."""

from __future__ import annotations

import gc

import pytest
import torch
from heads import TENSORS, plain_config, target, write
from letters import letter_tokenizer
from pools import LONG, until
from test_disagg_node import BUDGET, Told, alone, node
from test_prefixes import Forwards, generate, joined
from tiny import prompt, tiny

from oasis_hf import OasisCache, PrefixStore
from oasis_hf.attach import cache_name
from oasis_hf.disagg import PeerLost, PrefillClient, PrefillNode, PrefillWorker, StagingPool
from oasis_hf.disagg.increment import Held
from oasis_hf.disagg.worker import DecodeWorker, Job

SECRET = b"a secret of the tests"
ROOM = 64 << 20
KNOBS = {"budget": 96, "fetch_ratio": 0.5}
COMMON = prompt(1, 300, 7)


class Pair:
    """A prefill node and a decode side in one process; blocks go over TCP."""

    def __init__(self, model, keeps=True, reads=False, room=ROOM, capacity=4000, wire=True, checked=False, **knobs):
        knobs = {**KNOBS, **knobs}
        self.model, self.wire = model, wire
        self.there = PrefixStore(model, ROOM, **knobs) if reads else None
        self.here = PrefixStore(model, room, **knobs) if keeps else None
        self.staging = StagingPool(capacity, 16, torch.float32, ttl=20.0, quarantine=0.2)
        own = {} if reads else knobs
        worker = PrefillWorker(model, self.staging, prefixes=self.there, checked=checked, **own)
        self.node = PrefillNode(worker, SECRET)
        knobs.pop("drafter", None)
        self.client = self.reader(**({} if keeps else knobs))

    def reader(self, **knobs):
        return PrefillClient(self.model, self.node.server.address, SECRET, prefixes=self.here, seconds=LONG, **knobs)

    def prefill(self, ids):
        """Asked for over the control channel, or of the worker itself."""
        if self.wire:
            return self.client.prefill(ids[0])
        borrowed = self.client.borrow(ids[0])
        return self.client.fetch(self.node.worker.prefill(ids, held=Held.of(borrowed)), borrowed)

    def answered(self, ids, count=24, **knobs):
        """The ids that follow; the prompt is kept. And bytes that crossed: handle, blocks before that and with it."""
        traffic = self.client.link.peer.traffic
        began = traffic.payload
        with Forwards(self.model) as seen:
            prefilled = self.prefill(ids)
        self.read = seen.read
        cache = OasisCache.from_prefill(prefilled, self.model, **knobs)
        out = generate(self.model, ids, cache, count)
        cache.settle()
        selected = traffic.payload - began
        prefilled.keep()
        prefilled.close()
        return out, prefilled.nbytes, selected, traffic.payload - began

    def nothing_left(self):
        gc.collect()
        until(lambda: self.staging.stats()["free"] == self.staging.capacity)
        for store in (self.here, self.there):
            if store is not None:
                assert not store.index.lent and store.nbytes <= store.host_bytes
                pages = len(store) * store.layout.layers * store.layout.heads
                until(lambda: store.pool.pages_in_use == pages and not store.pool.late)  # noqa: B023
                store.pool.allocate(0)  # late places that are settled are free from the next call on
                assert int(store.pool.references.sum()) == pages

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.close()
        self.node.close()


def cold(model, ids, count=24, **knobs):
    return generate(model, ids, OasisCache(model, **{**KNOBS, **knobs}), count)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write(tmp_path_factory.mktemp("head") / "one", plain_config(), TENSORS)


@pytest.mark.core
@pytest.mark.parametrize("wire", [False, True], ids=["direct", "wire"])
@pytest.mark.parametrize(("keeps", "reads"), [(True, False), (False, True), (True, True)])
def test_what_is_held_is_neither_read_nor_sent(keeps, reads, wire):
    model, block = tiny("llama"), 3 * 2 * 2048
    with Pair(model, keeps, reads, wire=wire) as pair:
        first = 0
        for seed in (1, 2, 3):
            ids = joined(COMMON, prompt(1, 45, seed))
            want = cold(model, ids)
            out, handle, selected, blocks = pair.answered(ids)
            assert torch.equal(out, want)
            # Beside the prompt the node runs one step, of a token and a draft, to tell what comes next.
            assert 0 < pair.read - (345 - (288 if reads and first else 0)) <= 2
            if keeps and first:
                # 18 of 21 closed blocks are held here: three come, and the open one.
                assert selected <= blocks <= 4 * block
                assert abs(first - handle - 18 * 3 * 2 * (64 + 8 + 4)) < 50, "summaries, and where the pages are"
            elif keeps:
                assert 21 * block <= blocks <= 22 * block, "what is kept comes whole"
                first = handle
            else:
                assert blocks == selected < 16 * block
                first = handle
        if keeps:
            assert pair.here.hits == 2 * 288 and pair.here.asked == 3 * 345
        pair.nothing_left()


@pytest.mark.parametrize("reads", [False, True])
def test_a_heads_states_go_along(reads, head):
    """What is kept of a prompt that came is what is kept of one that was read here, for the head too."""
    model, knobs = target(), {"speculate": True, "draft_tokens": 3, "drafter": head}
    with Pair(model, reads=reads, **knobs) as pair:
        for seed in (1, 2):
            ids = joined(COMMON[:, :150], prompt(1, 50, seed))
            want = cold(model, ids, 12, **knobs)
            prefilled = pair.prefill(ids)
            assert prefilled.handle.first == (9 if seed > 1 else 0)
            cache = OasisCache.from_prefill(prefilled, model)
            # The positions' keys come as they are, whatever is held: what is kept of the states is for the store.
            assert torch.equal(cache.drafter.past.at, node_past(model, ids, {**KNOBS, **knobs}))
            assert torch.equal(generate(model, ids, cache, 12), want)
            assert prefilled.keep() == (3 if seed > 1 else 12)
            prefilled.close()
            local = PrefixStore(model, ROOM, **KNOBS, **knobs)
            generate(model, ids, local.cache(), 1)
            there, here = (one.borrow(ids[0]) for one in (pair.here, local))
            assert there.name == here.name and there.count == here.count == 12
            torch.testing.assert_close(there.part("states"), here.part("states"), rtol=1e-4, atol=1e-5)
            assert torch.equal(there.part("vectors"), here.part("vectors"))
            there.close()
            # And a cache of the store's own goes on from it.
            assert torch.equal(generate(model, ids, pair.here.cache(), 12), want)
        again = pair.prefill(ids)
        assert again.handle.first == 12, "nothing is missing but the open block"
        cache = OasisCache.from_prefill(again, model)
        assert torch.equal(generate(model, ids, cache, 12), want) and again.keep() == 0
        again.close()
        del cache
        pair.nothing_left()


def node_past(model, ids, knobs):
    """Where a head's keys stand behind a prompt."""
    cache = OasisCache(model, **knobs)
    with torch.no_grad():
        model(ids, **{cache_name(model): cache}, logits_to_keep=1)
    return cache.drafter.past.at


def test_blocks_of_another_drafter_serve_nobody(head):
    """The node's head has states for the store, which was made for none: nothing matches, and all of it comes."""
    model = target()
    with Pair(model, keeps=False, drafter=head) as pair:
        pair.here = PrefixStore(model, ROOM, **KNOBS)
        pair.client.close()
        pair.client = pair.reader()
        ids, without = COMMON[:, :200], PrefillClient(model, pair.node.server.address, SECRET, **KNOBS)
        want = generate(model, ids, OasisCache.from_prefill(without.prefill(ids[0]), model))
        without.close()
        generate(model, ids, pair.here.cache(), 1)
        assert len(pair.here) == 12
        prefilled = pair.prefill(ids)
        assert prefilled.borrowed.count == 12 and prefilled.handle.first == 0
        cache = OasisCache.from_prefill(prefilled, model)
        assert torch.equal(generate(model, ids, cache), want) and prefilled.keep() == 0
        del cache
        prefilled.close()
        pair.nothing_left()


def test_adapters_have_their_own_blocks_here_too():
    peft = pytest.importorskip("peft")
    import copy

    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(4)
    tuned = peft.get_peft_model(copy.deepcopy(tiny("llama")), lora).eval()
    model, ids = tuned.get_base_model(), COMMON[:, :200]
    with Pair(model, reads=True) as pair:
        for again in (0, 12):
            with tuned.disable_adapter():
                want = cold(model, ids)
                prefilled = pair.prefill(ids)
                assert prefilled.handle.first == again
                assert torch.equal(generate(model, ids, OasisCache.from_prefill(prefilled, model)), want)
                prefilled.keep()
            assert prefilled.keep() == 0, "and what was read without it is kept as such"
            prefilled.close()
            assert pair.answered(ids)[0].equal(cold(model, ids)) and not torch.equal(cold(model, ids), want)
        assert len(pair.here) == len(pair.there) == 24
        pair.nothing_left()


# -- what happens meanwhile -------------------------------------------------------------------------------------------


def texts(count, length=160):
    return [prompt(1, length, 100 + seed) for seed in range(count)]


def test_what_a_request_counts_on_stays_until_it_is_over():
    model, block = tiny("llama"), PrefixStore(tiny("llama"), ROOM, **KNOBS).layout.nbytes
    with Pair(model, room=24 * block) as pair:
        ids = joined(COMMON[:, :160], prompt(1, 40, 1))
        pair.answered(COMMON[:, :160])
        prefilled = pair.prefill(ids)
        assert prefilled.handle.first == 10 and sum(pair.here.index.lent.values()) == 10
        for other in texts(4):  # of which each alone fills what is left of the store
            pair.answered(other, 2)
            assert len(pair.here) <= 24 and pair.here.nbytes <= pair.here.host_bytes
        cache = OasisCache.from_prefill(prefilled, model)
        for other in texts(4):
            pair.answered(other, 2)
        assert torch.equal(generate(model, ids, cache), cold(model, ids))
        assert prefilled.keep() == 2, "behind what it had borrowed"
        prefilled.close()
        del cache
        for other in texts(4):
            pair.answered(other, 2)
        assert pair.here.borrow(ids[0]).count == 0, "then it goes like any other"
        pair.nothing_left()


def test_a_store_that_forgets_meanwhile():
    model, ids = tiny("llama"), joined(COMMON[:, :160], prompt(1, 40, 1))
    with Pair(model) as pair:
        pair.answered(COMMON[:, :160])
        prefilled = pair.prefill(ids)
        pair.here.clear()
        assert len(pair.here) == 0
        pair.answered(texts(1)[0])  # its entries stand where the others were
        cache = OasisCache.from_prefill(prefilled, model)
        assert torch.equal(generate(model, ids, cache), cold(model, ids))
        assert prefilled.keep() == 12, "its pages and summaries are at hand, and all of them go there"
        assert torch.equal(pair.answered(ids)[0], cold(model, ids))
        prefilled.close()
        del cache, prefilled
        pair.nothing_left()


@torch.no_grad()
def test_what_a_cache_does_meanwhile_reaches_no_block_of_the_store():
    """It is cropped into the prefix, and goes on with another text."""
    model, ids, other, knobs = tiny("llama"), COMMON[:, :208], prompt(1, 60, 9), {"fetch_ratio": 1.0}

    def turned(cache):
        generate(model, ids, cache, 4)
        cache.crop(-(cache.get_seq_length() - 90))
        for at in range(60):
            logits = model(other[:, at : at + 1], **{cache_name(model): cache}).logits[:, -1]
        return logits

    want, after = turned(OasisCache(model, **{**KNOBS, **knobs})), cold(model, ids, **knobs)
    with Pair(model, **knobs) as pair:
        # What is written over came over the wire, then from the store, then nobody else remembers the request.
        for held in ("nothing", "all", "all, closed"):
            prefilled = pair.prefill(ids)
            assert prefilled.handle.first == (0 if held == "nothing" else 13)
            cache = OasisCache.from_prefill(prefilled, model)
            if held == "all, closed":
                prefilled.close()
            torch.testing.assert_close(turned(cache), want, atol=2e-5, rtol=1e-5)
            if held != "all, closed":
                assert prefilled.keep() == (13 if held == "nothing" else 0), "the prompt's blocks, as they were"
            prefilled.close()
            del cache
            assert torch.equal(generate(model, ids, pair.here.cache()), after)
        pair.nothing_left()


def test_two_requests_of_one_text_at_the_same_time():
    model, ids = tiny("llama"), COMMON[:, :200]
    with Pair(model, reads=True) as pair:
        two = [pair.prefill(ids) for _ in range(2)]
        caches = [OasisCache.from_prefill(one, model) for one in two]
        for cache in caches:
            assert torch.equal(generate(model, ids, cache), cold(model, ids))
        assert [one.keep() for one in two] == [12, 0] and len(pair.here) == 12
        for one in two:
            one.close()
        del caches, cache
        pair.nothing_left()


def test_a_node_that_is_lost_in_between():
    model, ids = tiny("llama"), joined(COMMON[:, :160], prompt(1, 40, 1))
    with Pair(model) as pair:
        pair.answered(COMMON[:, :160])
        kept = len(pair.here)
        prefilled = pair.prefill(ids)
        cache = OasisCache.from_prefill(prefilled, model)
        cache.settle()
        never = pair.prefill(joined(ids, texts(1)[0]))
        pair.node.server.close()
        with pytest.raises(PeerLost):
            pair.prefill(ids)
        with pytest.raises(PeerLost):
            prefilled.increment.near.bring(prefilled.increment.numbers.flatten())
            OasisCache.from_prefill(never, model)
        with pytest.raises(PeerLost):
            never.far.link.restore(0.1)
        for one in (prefilled, never):
            one.close()
        del cache
        gc.collect()
        assert len(pair.here) == kept and not pair.here.index.lent
        until(lambda: pair.here.pool.pages_in_use == kept * 6)


def test_workers_keep_what_they_have_answered_and_a_lost_node_costs_time_alone():
    """Two nodes, one store: what came from the first need not come from the second."""
    model, options = tiny("llama"), {"max_new_tokens": 12, "do_sample": False}
    with Pair(model, budget=BUDGET, fetch_ratio=0.05) as pair, node() as other:
        lost = pair.node
        decoding = DecodeWorker(
            model, letter_tokenizer(), [lost.server.address, other.server.address], SECRET, prefixes=pair.here,
            seconds=4.0,
        )  # fmt: skip
        for seed in range(4):
            ids, told = joined(COMMON[:, :160], prompt(1, 30, seed)), Told()
            decoding.add(Job(ids[0].tolist(), options, None, told))
            assert told.result() == ("done", {**told.end[1], "ids": alone(ids)})
            until(lambda seed=seed: len(pair.here) == 11 + seed and not pair.here.index.lent)
            if seed == 1:
                lost.close()
        assert pair.here.hits == 3 * 160
        decoding.close()
        pair.client.close()
        until(lambda: other.staging.stats()["in_use"] == 0)
