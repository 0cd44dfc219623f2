"""The pool server's process: restarts, dead readers, hung servers, leaks."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pools import LONG, PAGE, SECRET, TERMS, Clock, filled, has_nixl, memory, needs_nixl, staging, stop, until

from oasis_hf.config import ConfigError
from oasis_hf.disagg import (
    Control,
    DeadlineExceeded,
    Link,
    NixlEngine,
    PeerLost,
    PoolFull,
    PoolServer,
    Refused,
    StaleLease,
    TcpEngine,
    merged,
)
from oasis_hf.disagg import poolserver as module
from oasis_hf.disagg.nixl import NixlSettings

TTL, QUARANTINE = 10_000, 3_600
"""No test lasts as long: a lease or a quarantine ends where its pool's clock is set ahead, and not before."""


@pytest.fixture
def pool():
    pool = staging(64, ttl=TTL, quarantine=QUARANTINE, clock=Clock())
    yield pool
    pool.close()


@pytest.fixture
def server(pool):
    with PoolServer(pool, SECRET, TERMS, reader_grace=0.2) as server:
        yield server


def link(server, pages=64, **kwargs):
    return Link(server.address, SECRET, TERMS, TcpEngine(memory(pages), SECRET), beat=0.2, seconds=LONG, **kwargs)


def after_quarantine(pool):
    pool.clock.ahead += QUARANTINE + 1
    until(lambda: pool.stats()["quarantined"] == 0)


def reads(one, lease, pages, content):
    one.read(merged(pages, np.arange(len(pages)), PAGE), lease).wait(LONG)
    return np.array_equal(one.engine.memory.array.reshape(-1, PAGE)[: len(pages)], content)


def gone(pid):
    return not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_the_servers_process_is_small_and_holds_no_secret_in_sight(server):
    assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
    told = Path(f"/proc/{server.pid}/cmdline").read_bytes() + Path(f"/proc/{server.pid}/environ").read_bytes()
    assert SECRET not in told and SECRET.hex().encode() not in told


def test_a_killed_server_comes_back_at_its_address_with_the_kv_and_the_leases(server, pool):
    pages, generation, content = filled(pool, "r", 20)
    one = link(server)
    handle, lease = one.handle("r")
    assert reads(one, lease, pages, content)
    until(lambda: server.stats()["served"].get("payload_bytes") == 20 * PAGE)
    old, address = server.pid, server.address
    os.kill(old, signal.SIGKILL)
    until(lambda: one.lost)
    with pytest.raises(PeerLost):
        one.read(merged(pages, np.arange(20), PAGE), lease)
    one.reconnect(LONG)
    one.engine.memory.array[:] = 0
    assert reads(one, lease, pages, content) and lease.generation == generation
    assert server.address == address and server.pid != old and server.restarts == 1 and gone(old)
    one.release(lease)
    assert pool.free == pool.capacity
    until(lambda: server.stats()["served"].get("payload_bytes") == 2 * 20 * PAGE)  # counted over both
    one.close()


def test_a_lease_that_ended_before_the_reconnect_tells_so(server, pool):
    pages, generation, _ = filled(pool, "r", 3)
    one = link(server)
    _, lease = one.handle("r")
    pool.release("r", generation)
    one.reconnect(LONG)
    with pytest.raises(StaleLease):
        one.read(merged(pages, np.arange(3), PAGE), lease)
    one.close()


def test_a_reader_that_dies_frees_its_request_and_no_other(server, pool):
    pages, _, content = filled(pool, "mine", 20)
    other_pages, _, other_content = filled(pool, "other's", 20, seed=1)
    one, other = link(server), link(server)
    one.handle("mine")
    _, lease = other.handle("other's")
    one.close()
    until(lambda: pool.quarantined == 20)
    with pytest.raises(PoolFull):
        pool.reserve("next", 44)
    after_quarantine(pool)
    assert pool.free == 44 and pool.stats()["published"] == 1 and reads(other, lease, other_pages, other_content)
    other.close()


def test_a_silent_reader_is_a_dead_one(pool):
    filled(pool, "r", 20)
    with PoolServer(pool, SECRET, TERMS, silence=1.0, reader_grace=0.2) as server:
        one = link(server)
        one.handle("r")
        one.control._calls._stop.set()  # it beats no more
        until(lambda: pool.quarantined == 20)
        until(lambda: isinstance(one.lost, PeerLost))
        one.close()


@pytest.mark.parametrize("first", ["is noticed", "is noticed late"])
def test_a_reader_that_comes_back_in_time_keeps_its_request(pool, monkeypatch, first):
    """Whether the end of its old connection is noticed before the new one or after."""
    pages, _, content = filled(pool, "r", 20)
    shortened, plain = [], pool.shorten
    monkeypatch.setattr(pool, "shorten", lambda *args: shortened.append(args) or plain(*args))
    with PoolServer(pool, SECRET, TERMS, reader_grace=100) as server:
        old, new = link(server), None
        _, lease = old.handle("r")
        if first == "is noticed":
            old.control.close()
            until(lambda: shortened)
            old.reconnect(LONG)
        else:
            new = link(server)
            new.control.renew(lease)
            open_now = descriptors(server.pid)
            old.control.close()
            until(lambda: descriptors(server.pid) == open_now - 2)  # the last that the server does for its connections
            assert not shortened
        pool.clock.ahead += 101
        assert pool.expire() == [] and reads(new or old, lease, pages, content)
        for one in (old, new) if new else (old,):
            one.close()


def test_pages_that_another_reads_are_not_free_at_once(server, pool):
    pages, _, content = filled(pool, "r", 20)
    one, other = link(server), link(server)
    _, lease = one.handle("r")
    _, others = other.handle("r")
    one.release(lease)
    assert pool.quarantined == 20
    with pytest.raises(StaleLease):
        reads(other, others, pages, content)
    after_quarantine(pool)
    assert pool.free == 64
    one.close()
    other.close()


def test_a_release_with_a_read_in_flight_is_not_clean(server, pool):
    pages, _, _ = filled(pool, "r", 20)
    one = link(server)
    _, lease = one.handle("r")
    read = one.peer._make(merged(pages, np.arange(20), PAGE), lease)  # as one that the server has not answered yet
    one.peer._reads.add(read)
    one.release(lease)
    assert pool.quarantined == 20
    one.peer._reads.clear()
    one.close()


def test_a_hung_server_is_killed_and_started_again(pool):
    pages, _, content = filled(pool, "r", 20)
    with PoolServer(pool, SECRET, TERMS, hung=4.5) as server:
        one = link(server, silence=2.0)  # a server that is well beats every second
        _, lease = one.handle("r")
        old = server.pid
        stop(old)
        read = one.read(merged(pages, np.arange(20), PAGE), lease)
        with pytest.raises(PeerLost, match="silent for 2 s"):  # the heartbeat knows before the engine does
            read.wait(LONG)
        with pytest.raises(DeadlineExceeded):
            one.reconnect(0.3)
        until(lambda: server.restarts == 1 and server.pid != old)
        one.reconnect(LONG)
        assert reads(one, lease, pages, content) and gone(old)
        one.close()


def test_a_server_that_can_not_start_is_given_up(pool, monkeypatch):
    monkeypatch.setattr(module, "_BOOT", "raise SystemExit(3)")
    with pytest.raises(PeerLost, match="ended 5 times before it was ready"):
        PoolServer(pool, SECRET, TERMS, seconds=120)


def test_closing_ends_the_process_and_gives_the_address_back(pool):
    before = threading.active_count()
    server = PoolServer(pool, SECRET, TERMS)
    pid = server.pid
    server.close()
    until(lambda: gone(pid))
    until(lambda: threading.active_count() <= before)
    PoolServer(pool, SECRET, TERMS, address=server.address).close()


def test_the_server_ends_with_the_prefill_process(tmp_path):
    """In a process that is killed; it starts the server's half alone, so that nothing large is imported."""
    code = f"""
import socket, subprocess, sys, time
mine, its = socket.socketpair()
child = subprocess.Popen([sys.executable, "-c", {module._BOOT!r}, {str(Path(module.__file__).parents[1])!r},
    str(its.fileno())], pass_fds=[its.fileno()])
its.close()
print(child.pid, flush=True)
mine.recv(1)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    time.sleep(0.3)
    assert not gone(pid)
    owner.kill()
    owner.communicate()
    until(lambda: gone(pid))


def test_reads_may_have_an_address_of_their_own(pool):
    pages, _, content = filled(pool, "r", 20)
    with PoolServer(pool, SECRET, TERMS, data_address=("127.0.0.2", 0)) as server:
        assert server.data_address[0] == "127.0.0.2" and server.address[0] == "127.0.0.1"
        one = link(server)
        _, lease = one.handle("r")
        assert one.peer.name == "127.0.0.2:" + str(server.data_address[1]) and reads(one, lease, pages, content)
        one.close()


@pytest.mark.parametrize("engines", [(), ("rdma",), ("tcp", "inprocess")])
def test_engines_are_named(pool, engines):
    with pytest.raises(ConfigError, match="use some of tcp, nixl"):
        PoolServer(pool, SECRET, TERMS, engines=engines)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        PoolServer(pool, b"short", TERMS)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_left_behind_by_many_requests(server, pool, count):
    def run(many):
        for i in range(many):
            pages, _, content = filled(pool, f"r{i}", 32, bytes(100_000))
            one = link(server)
            _, lease = one.handle(f"r{i}")
            assert reads(one, lease, pages, content)
            one.release(lease)
            one.close()
            one.engine.close()
        gc.collect()

    run(10)
    until(lambda: descriptors(server.pid) < 15)
    mine, its = descriptors(os.getpid()), descriptors(server.pid)
    threads, rss = threading.active_count(), [resident(os.getpid()), resident(server.pid)]
    run(count)
    until(lambda: descriptors(server.pid) <= its and descriptors(os.getpid()) <= mine)
    until(lambda: threading.active_count() <= threads)
    assert resident(server.pid) - rss[1] < 4 << 20 and resident(os.getpid()) - rss[0] < 16 << 20
    assert pool.free == 64 and not server.restarts


@pytest.fixture(scope="module")
def nixl_server():
    pool = staging(64, quarantine=0.3)
    with PoolServer(pool, SECRET, TERMS, engines=("nixl", "tcp")) as server:
        yield server
    pool.close()


@needs_nixl
def test_nixl_settings_must_be_equal_and_metadata_signed(nixl_server):
    ours = NixlSettings().wire()
    for name, value in (("UCX_TLS", "tcp,cma"), ("UCX_TCP_RX_SEG_SIZE", "8k"), ("nixl-cu13", "1.5.1")):
        other = replace(TERMS, wire={"nixl": {**ours, name: value}})
        with pytest.raises(Refused, match=f"wire differs in '{name}': '{ours[name]}' on .* '{value}'") as error:
            Control(nixl_server.address, SECRET, other, "nixl")
        assert error.value.what == "wire"
    link(nixl_server).close()  # for another engine of the same server these are nobody's business
    engine = NixlEngine(memory(64), SECRET)
    with pytest.raises(ValueError, match="has a NIXL agent with UCX_TLS=tcp; it can't have tcp,cma too"):
        NixlEngine(memory(64), SECRET, NixlSettings(transports="tcp,cma"))
    one = Link(nixl_server.address, SECRET, TERMS, engine)
    offer = one.control.offer()
    for wrong in ({"data": offer.data[:-1] + b"x"}, {"fields": {**offer.fields, "agent": "another"}}):
        with pytest.raises(Refused, match="not made by someone who knows the shared secret"):
            engine.connect(replace(offer, **wrong))
    with pytest.raises(Refused, match="settings differ"):
        engine.connect(replace(offer, fields={**offer.fields, "wire": {}}))
    one.close()
    engine.close()


@needs_nixl
def test_nixl_leaves_nothing_behind_either(nixl_server):
    def run(many):
        for i in range(many):
            pages, _, content = filled(nixl_server.staging, f"r{i}", 32)
            engine = NixlEngine(memory(64), SECRET)
            one = Link(nixl_server.address, SECRET, TERMS, engine)
            _, lease = one.handle(f"r{i}")
            assert reads(one, lease, pages, content)
            one.release(lease)
            one.close()
            engine.close()
        gc.collect()

    threads = threading.active_count()  # of other tests of this process too
    run(3)
    until(lambda: threading.active_count() <= threads)
    mine, its = descriptors(os.getpid()), descriptors(nixl_server.pid)
    run(8)
    until(lambda: threading.active_count() <= threads)
    until(lambda: descriptors(os.getpid()) <= mine + 2)
    until(lambda: descriptors(nixl_server.pid) <= its + 2)
    assert nixl_server.restarts == 0


@needs_nixl
def test_a_write_by_nixl_never_reaches_the_kv(nixl_server):
    """Its targets take writes from anybody; here that ends the server's process, which is started again."""
    pool = nixl_server.staging
    pages, _, content = filled(pool, "w", 32)
    engine = NixlEngine(memory(64), SECRET)
    one = Link(nixl_server.address, SECRET, TERMS, engine)
    _, lease = one.handle("w")
    far, near = np.zeros((32, 3), np.uint64), np.zeros((32, 3), np.uint64)
    far[:, 0], near[:, 0] = pages * PAGE + one.peer.base, np.arange(32) * PAGE + engine.memory.address
    far[:, 1] = near[:, 1] = PAGE
    agent, restarts = engine.agent, nixl_server.restarts
    descriptions = [agent.get_xfer_descs(places, "DRAM") for places in (near, far)]
    with pytest.raises(Exception, match="REMOTE_DISCONNECT"):
        handle = agent.initialize_xfer("WRITE", *descriptions, one.peer.agent_name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
    until(lambda: nixl_server.restarts == restarts + 1)
    one.reconnect(LONG)
    assert reads(one, lease, pages, content)
    one.release(lease)
    one.close()
    engine.close()


def test_without_nixl_the_engine_says_how_to_get_it(pool, monkeypatch):
    from oasis_hf.disagg import nixl

    monkeypatch.setattr(nixl, "version", lambda name: "1.5.1")
    with pytest.raises(ImportError, match=r"needs nixl-cu13==1\.3\.0, installed is 1\.5\.1"):
        NixlEngine(memory(1), SECRET)
    with pytest.raises(ImportError, match="oasis-hf"):
        PoolServer(pool, SECRET, TERMS, engines=("nixl",))
    if not has_nixl():
        assert "nixl_cu13" not in sys.modules
