"""Links that stall and nodes that stay away: who waits for them, how long, and that nobody else is harmed."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import threading
import time

import pytest
import torch
from pools import needs_nixl, stop, until
from test_disagg_decode import SECRET, generate
from test_disagg_node import Told, alone
from test_disagg_node import node as prefill_node
from test_disagg_node import worker as decode_worker
from tiny import prompt, tiny
from transformers import LogitsProcessor

from oasis_hf import OasisCache
from oasis_hf.disagg import DeadlineExceeded, PeerLost, PoolServer, PrefillClient, PrefillWorker, StagingPool, link
from oasis_hf.disagg.worker import Job

KNOBS = {"budget": 64, "fetch_ratio": 1.0}
COUNT = 40


class Proxy:
    """Forwards connections to 127.0.0.1, at the same port of 127.0.0.2, while `open` is set."""

    def __init__(self, port):
        self.open, self.over, self.port = threading.Event(), False, port
        self.open.set()
        self.listener = socket.create_server(("127.0.0.2", port))
        self.address = ("127.0.0.2", port)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                threading.Thread(target=self._forward, args=(here,), daemon=True).start()

    def _forward(self, here):
        with here, socket.create_connection(("127.0.0.1", self.port)) as there, contextlib.suppress(OSError):
            while not self.over:
                self.open.wait()
                for one in select.select((here, there), (), (), 0.02)[0]:
                    data = one.recv(1 << 16)
                    self.open.wait()
                    (there if one is here else here).sendall(data)
                    if not data:
                        return

    def close(self):
        self.over = True
        self.open.set()
        self.listener.close()


class Node:
    """A prefill node whose link can be stalled: that of `tcp` by a proxy, that of `nixl` by stopping its server."""

    def __init__(self, engine, silence, away):
        self.model = tiny("llama")
        self.staging = StagingPool(2000, 16, torch.float32, ttl=20.0, quarantine=0.5)
        self.prefill = PrefillWorker(self.model, self.staging, **KNOBS)
        # 5 s of grace, as usual, and 5 of silence would end in the middle of a stall of 10.
        self.server = PoolServer(
            self.staging, SECRET, self.prefill.terms, engines=(engine,), silence=silence, reader_grace=20.0
        )
        self.proxy = Proxy(self.server.address[1]) if engine == "tcp" else None
        self.client = PrefillClient(
            self.model, self.proxy.address if self.proxy else self.server.address, SECRET, engine, away=away,
            limits={"silence": silence, "beat": silence / 5}, **KNOBS,
        )  # fmt: skip

    def stall(self, seconds):
        """From now on, for so long."""
        if self.proxy is not None:
            self.proxy.open.clear()
            go_on = self.proxy.open.set
        else:
            stop(pid := self.server.pid)
            go_on = lambda: os.kill(pid, signal.SIGCONT)  # noqa: E731
        self.began = time.monotonic()
        timer = threading.Timer(seconds, go_on)
        timer.start()
        return timer

    def cache(self, ids):
        return OasisCache.from_prefill(self.client.fetch(self.prefill.prefill(ids)), self.model)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.close()
        self.server.close()
        if self.proxy is not None:
            self.proxy.close()
        self.staging.close()


class At(LogitsProcessor):
    """Calls a function behind a step."""

    def __init__(self, step, call):
        self.left, self.call = step, call

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            self.call()
        return scores


LONG = pytest.mark.slow
CASES = [  # seconds: of silence, until a lost node is given up, of the stall; whether the request outlives it
    pytest.param("tcp", 2.0, 0.3, 0.8, True),
    pytest.param("tcp", 1.5, 0.3, 6.0, False),
    pytest.param("tcp", 1.5, 10.0, 2.5, True),
    pytest.param("tcp", 5.0, 1.0, 10.0, False, marks=LONG),
    pytest.param("tcp", 5.0, 10.0, 10.0, True, marks=LONG),
    pytest.param("nixl", 2.0, 0.3, 0.8, True, marks=[LONG, needs_nixl]),
    pytest.param("nixl", 1.5, 0.3, 6.0, False, marks=needs_nixl),
    pytest.param("nixl", 5.0, 1.0, 10.0, False, marks=[LONG, needs_nixl]),
    pytest.param("nixl", 5.0, 10.0, 10.0, True, marks=[LONG, needs_nixl]),
]


@pytest.mark.parametrize("engine, silence, away, stall, outlives", CASES)
def test_a_link_that_stalls_in_mid_decode(engine, silence, away, stall, outlives, monkeypatch):
    monkeypatch.setattr(link, "ABSENT", (0.2, 0.2))
    model, ids = tiny("llama"), prompt(1, 250)
    want = generate(model, ids, OasisCache(model, **KNOBS), COUNT)
    with Node(engine, silence, away) as node, Node("tcp", 5.0, 1.0) as other:
        cache, timers = node.cache(ids), []
        beside = []
        thread = threading.Thread(target=lambda: beside.append(generate(model, ids, other.cache(ids), COUNT)))
        thread.start()
        begin = At(4, lambda: timers.append(node.stall(stall)))
        before = cache.state.store.pool.read
        if outlives:
            assert torch.equal(generate(model, ids, cache, COUNT, logits_processor=[begin]), want)
        else:
            with pytest.raises((PeerLost, DeadlineExceeded)):
                generate(model, ids, cache, COUNT, logits_processor=[begin])
            took = time.monotonic() - node.began
            assert took < silence + away + 4 and timers[0].is_alive(), "sooner than the stall's end"
        assert cache.state.store.pool.read > before, "there were blocks to wait for"
        thread.join()
        assert torch.equal(beside[0], want), "a request of another node is unharmed"
        timers[0].join()
        del cache
        until(lambda: works(node, ids, want))
        until(lambda: nothing_left(node))
        assert node.server.restarts == 0


def nothing_left(node):
    gc.collect()  # what was raised keeps its frames in a cycle
    return node.client.memory() == {"host": 0, "late": 0}


def works(node, ids, want):
    try:
        return torch.equal(generate(node.model, ids, node.cache(ids), COUNT), want)
    except PeerLost:  # who asks so soon is not waited for
        time.sleep(0.1)
        return False


# -- who needs a lost node --------------------------------------------------------------------------------------------


def test_a_node_that_stays_away_is_waited_for_once():
    ids = prompt(1, 400)
    with Node("tcp", silence=1.5, away=1.0) as node:
        prefilled = node.client.fetch(node.prefill.prefill(ids))
        timer = node.stall(60)
        until(lambda: node.client.link.lost is not None)
        took = []

        def ask(call):
            began = time.monotonic()
            with pytest.raises(PeerLost, match="was lost and did not come back"):
                call()
            took.append(time.monotonic() - began)

        def take():
            OasisCache.from_prefill(prefilled, node.model)

        threads = [threading.Thread(target=ask, args=(take,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0.9 < max(took) < 2.5, "four at once wait together"
        took.clear()
        ask(take)
        ask(lambda: node.client.prefill(ids[0]))
        assert max(took) < 0.2, "who comes soon after fails at once"
        timer.cancel()
        node.proxy.open.set()


def test_a_node_whose_process_is_gone_is_not_waited_for():
    model, ids = tiny("llama"), prompt(1, 400)
    with Node("tcp", silence=5.0, away=30.0) as node:
        direct = PrefillClient(model, node.server.address, SECRET, away=30.0, **KNOBS)
        prefilled = direct.fetch(node.prefill.prefill(ids))
        node.server.close()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerLost, match="Nobody answers"):
                OasisCache.from_prefill(prefilled, model)
        assert time.monotonic() - began < 2
        direct.close()


def test_a_closed_client_stays_closed():
    ids = prompt(1, 400)
    with Node("tcp", silence=5.0, away=5.0) as node:
        prefilled, threads = node.client.fetch(node.prefill.prefill(ids)), threading.active_count()
        node.client.close()
        for call in (lambda: OasisCache.from_prefill(prefilled, node.model), lambda: node.client.prefill(ids[0])):
            with pytest.raises(PeerLost, match="closed on this side"):
                call()
        assert threading.active_count() < threads


def test_others_do_not_wait_for_a_lost_node(monkeypatch):
    """A decode worker, one of whose two nodes hangs while its request is decoded: that one is read on the other node
    and decoded behind the next, and of those that come later one waits for the lost node."""
    waited, plain = [], link.Link._reconnect
    monkeypatch.setattr(link.Link, "_reconnect", lambda self, seconds: (waited.append(seconds), plain(self, seconds)))
    order, want = [], alone(prompt(1, 250), max_new_tokens=30)
    with prefill_node(silence=1.5) as one, prefill_node(silence=1.5) as hung:
        pid = hung.server.pid
        decoding = decode_worker(hung, one, away=0.5, limits={"silence": 1.5, "beat": 0.1})

        class Named(Told):
            def __call__(self, what, value):
                if what == "text" and not self.pieces and not order and self is told[0]:
                    stop(pid)
                if what in ("done", "again"):
                    order.append((told.index(self), what))
                super().__call__(what, value)

        told = [Named() for _ in range(8)]
        for each in told:
            job = Job(prompt(1, 250)[0].tolist(), {"max_new_tokens": 30, "do_sample": False}, None, each)
            decoding.add(job)
        assert all(each.result()[1]["ids"] == want for each in told)
        assert order[0] == (1, "done") and (0, "again") in order and len(order) == 9
        assert 1 <= len(waited) <= 3
        os.kill(pid, signal.SIGCONT)
        decoding.close()
