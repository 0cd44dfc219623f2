"""Many requests through the whole of disaggregation, some of which nobody sees through: nothing is left of them."""

from __future__ import annotations

import copy
import gc
import os
import threading

import pytest
import torch
from pools import needs_nixl, until
from test_disagg_decode import SECRET, generate
from test_disagg_server import descriptors, resident
from test_disagg_stalls import At
from tiny import prompt, tiny

from oasis_hf import OasisCache
from oasis_hf.disagg import PoolServer, PrefillClient, PrefillWorker, StagingPool, nixl

KNOBS = {"budget": 48, "fetch_ratio": 1.0}
WARM, MANY = 20, 200


class Gone(Exception):
    """Who asked has gone."""


class System:
    """All of it for one engine."""

    def __init__(self, engine):
        self.model, self.engine = copy.deepcopy(tiny("llama")), engine
        self.model.model.layers, self.model.config.num_hidden_layers = self.model.model.layers[:1], 1  # quick
        self.staging = StagingPool(1200, 16, torch.float32, ttl=3.0, quarantine=0.3)
        self.worker = PrefillWorker(self.model, self.staging, **KNOBS)
        self.server = PoolServer(self.staging, SECRET, self.worker.terms, engines=(engine,), reader_grace=0.3)
        self.client = self.connected()

    def connected(self):
        return PrefillClient(self.model, self.server.address, SECRET, self.engine, **KNOBS)

    def request(self, i):
        ids, client = prompt(1, 70 + i % 23, seed=i), self.client
        name = self.worker.prefill(ids)
        if i % 10 == 3:
            return  # never fetched
        if i % 10 == 9:
            client = self.connected()
        prefilled = client.fetch(name)
        if i % 10 == 5:
            return  # never taken
        cache = OasisCache.from_prefill(prefilled, self.model)
        if i % 10 in (1, 9):
            with pytest.raises(Gone):
                generate(self.model, ids, cache, 3, logits_processor=[At(2, self.leave)])
        else:
            assert generate(self.model, ids, cache, 3).shape == (1, ids.shape[1] + 3)
        if client is not self.client:
            client.close()  # whose cache, and reads ahead, are still there

    def leave(self):
        raise Gone

    def left(self):
        """What there is once all requests are over."""
        gc.collect()
        until(lambda: self.staging.stats()["in_use"] == self.staging.stats()["quarantined"] == 0, 20)
        until(lambda: self.client.memory() == {"host": 0, "late": 0})
        until(lambda: len(nixl._engines) == (self.engine == "nixl") and not self.client.link._leases)
        assert self.client.link.peer.in_flight == [] and len(self.staging._requests) == 0
        pids = [os.getpid(), self.server.pid]
        return [*map(descriptors, pids), threading.active_count()], list(map(resident, pids))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tcp", pytest.param("nixl", marks=needs_nixl)])
def test_nothing_is_left_of_200_requests(engine):
    gc.collect()
    until(lambda: not nixl._engines)
    system = System(engine)
    try:
        for i in range(WARM):
            system.request(i)
        counts, sizes = system.left()
        for i in range(WARM, MANY):
            system.request(i)
        until(lambda: all(new <= old for new, old in zip(system.left()[0], counts)))
        mine, its = (new - old for new, old in zip(system.left()[1], sizes))
        assert mine < 24 << 20 and its < 4 << 20
        assert system.server.restarts == 0 and system.staging.free == 1200
    finally:
        system.client.close()
        system.server.close()
        system.staging.close()
