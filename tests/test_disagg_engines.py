"""Every engine through the same tests: what arrives, and what happens when it does not."""

import os
import signal
import threading

import numpy as np
import pytest
from pools import LONG, PAGE, SECRET, TERMS, certificates, filled, lease, memory, needs_nixl, staging, stop, until

from oasis_hf.disagg import (
    Corrupt,
    DeadlineExceeded,
    InProcessEngine,
    Lease,
    Link,
    Memory,
    NixlEngine,
    PeerLost,
    PoolServer,
    Refused,
    Runs,
    StaleLease,
    TcpEngine,
    merged,
)
from oasis_hf.disagg.inprocess import offer
from oasis_hf.disagg.transport import checksums, verify

CAPACITY, PLACES = 4096, 4096


class InProcess:
    """A pool in this process, which a hook makes hang and fail."""

    checks = True

    def __init__(self):
        self.pool = staging(CAPACITY)
        self.pages, self.generation, self.content = filled(self.pool)
        self.memory = memory(PLACES)
        self.goes, self.dead = threading.Event(), False
        self.goes.set()
        self.engine = InProcessEngine(self.memory, self.hook)
        self.reconnect()

    def hook(self, runs):
        self.goes.wait()
        if self.dead:
            raise PeerLost("It was killed.")

    def lease(self):
        return lease(self.generation)

    def hang(self):
        self.goes.clear()

    def resume(self):
        self.goes.set()

    def kill(self):
        self.dead = True
        self.goes.set()

    def reconnect(self):
        self.dead = False
        self.peer = self.engine.connect(offer(self.pool.mapping))

    def close(self):
        self.peer.close()


class Remote:
    """A pool server in its own process."""

    def __init__(self, engine, tls=None):
        self.pool = staging(CAPACITY)
        self.pages, self.generation, self.content = filled(self.pool)
        self.memory = memory(PLACES)
        self.checks = engine == "tcp"
        self.server = PoolServer(self.pool, SECRET, TERMS, engines=(engine,), tls=tls, hung=60, silence=60)
        self.engine = TcpEngine(self.memory, SECRET, tls) if engine == "tcp" else NixlEngine(self.memory, SECRET)
        self.link = Link(self.server.address, SECRET, TERMS, self.engine, tls, silence=60)

    @property
    def peer(self):
        return self.link.peer

    def lease(self):
        return lease(self.generation)

    def hang(self):
        stop(self.server.pid)

    def resume(self):
        os.kill(self.server.pid, signal.SIGCONT)

    def kill(self):
        os.kill(self.server.pid, signal.SIGKILL)

    def reconnect(self):
        self.link.reconnect(LONG)

    def close(self):
        self.link.close()
        self.engine.close()
        self.server.close()


@pytest.fixture(scope="module", params=["inprocess", "tcp", "tls", pytest.param("nixl", marks=needs_nixl)])
def rig(request, tmp_path_factory):
    if request.param == "inprocess":
        rig = InProcess()
    elif request.param == "tls":
        rig = Remote("tcp", certificates(tmp_path_factory.mktemp("tls")))
    else:
        rig = Remote(request.param)
    yield rig
    rig.close()
    rig.pool.close()


def pages_of(rig):
    return rig.memory.array.reshape(PLACES, PAGE)


def right(rig, far, near):
    """Reads pages and compares them."""
    rig.peer.read(merged(rig.pages[far], near, PAGE), rig.lease()).wait(LONG)
    return np.array_equal(pages_of(rig)[near], rig.content[far])


def test_pages_go_where_they_should_and_nowhere_else(rig):
    draw = np.random.default_rng(1)
    for count in (1, 2, 17, 400):
        rig.memory.array[:] = 7
        far, near = draw.permutation(CAPACITY)[:count], draw.permutation(PLACES)[:count]
        assert right(rig, far, near)
        others = np.ones(PLACES, bool)
        others[near] = False
        assert (pages_of(rig)[others] == 7).all()


def test_runs_of_any_place_and_length(rig):
    whole, want = np.full(PLACES * PAGE, 7, np.uint8), np.zeros(CAPACITY * PAGE, np.uint8)
    want.reshape(CAPACITY, PAGE)[rig.pages] = rig.content
    draw = np.random.default_rng(2)
    size = draw.integers(1, 3 * PAGE, 50)
    far = draw.integers(0, CAPACITY * PAGE - size)
    near = np.cumsum(size + draw.integers(0, 2, 50) * 5) - size  # some are neighbours here, none there
    rig.memory.array[:] = 7
    rig.peer.read(Runs(far, near, size), rig.lease()).wait(LONG)
    for f, n, s in zip(far, near, size):
        whole[n : n + s] = want[f : f + s]
    assert np.array_equal(rig.memory.array, whole)


def test_many_reads_in_flight_each_get_their_own(rig):
    before = rig.peer.traffic.told()
    far = np.random.default_rng(3).permutation(CAPACITY)[: 16 * 64].reshape(16, 64)
    near = np.arange(16 * 64).reshape(16, 64)
    reads = [rig.peer.read(merged(rig.pages[f], n, PAGE), rig.lease()) for f, n in zip(far, near)]
    for read in reversed(reads):
        read.wait(LONG)
        assert read.done() and read.settled
    assert np.array_equal(pages_of(rig)[near], rig.content[far])
    now = rig.peer.traffic.told()
    assert now["reads"] - before["reads"] == 16 and now["payload_bytes"] - before["payload_bytes"] == 16 * 64 * PAGE
    assert now["busy_s"] > before["busy_s"] and not rig.peer.in_flight


def test_no_pages_are_read_at_once(rig):
    read = rig.peer.read(merged([], [], PAGE), rig.lease())
    assert read.done() and read.settled
    read.wait(0)


@pytest.mark.parametrize(
    "far, near, size", [(CAPACITY * PAGE - 10, 0, 11), (-1, 0, 5), (0, PLACES * PAGE, 1), (0, -5, 2), (0, 0, 0)]
)
def test_runs_that_leave_pool_or_memory_never_start(rig, far, near, size):
    runs = Runs(*(np.array([0, number]) for number in (far, near)), np.array([1, size]))
    with pytest.raises(ValueError, match="Run 1 of a read is"):
        rig.peer.read(runs, rig.lease())
    assert not rig.peer.in_flight


def test_a_server_that_can_checks_bounds_and_generation_itself(rig):
    if not rig.checks:
        pytest.skip("NIXL's targets check nothing")
    far = rig.peer.pool_bytes
    rig.peer.pool_bytes += PAGE
    try:
        with pytest.raises(Refused) as error:
            rig.peer.read(Runs(np.array([far]), np.array([0]), np.array([8])), rig.lease()).wait(LONG)
    finally:
        rig.peer.pool_bytes -= PAGE
    assert error.value.what == "bounds"
    with pytest.raises(StaleLease, match="given back"):
        rig.peer.read(merged(rig.pages[:3], [0, 1, 2], PAGE), lease(rig.generation + 1)).wait(LONG)
    with pytest.raises(StaleLease):  # what nobody has published
        rig.peer.read(merged(rig.pages[:3], [0, 1, 2], PAGE), lease(0)).wait(LONG)
    assert right(rig, np.arange(5), np.arange(5))  # the connection is as good as before


def test_a_lease_that_has_ended_reads_nothing(rig):
    ended = Lease("r", rig.generation, 1.0, 0.0, 0.0)
    with pytest.raises(StaleLease, match="'r' has ended"):
        rig.peer.read(merged(rig.pages[:1], [0], PAGE), ended)


def test_what_ends_long_after_its_lease_is_not_believed(rig):
    late = rig.lease()
    rig.hang()
    try:
        read = rig.peer.read(merged(rig.pages, np.arange(CAPACITY), PAGE), late)
        late.until, late.grace = 0.0, 1.0
    finally:
        rig.resume()
    with pytest.raises(StaleLease):
        read.wait(LONG)
    assert read.settled


def test_a_hung_peer_is_a_deadline_and_its_read_ends_late(rig):
    rig.hang()
    try:
        read = rig.peer.read(merged(rig.pages, np.arange(CAPACITY)[::-1], PAGE), rig.lease())
        with pytest.raises(DeadlineExceeded, match=r"16,777,216 bytes .* within 0\.2 s"):
            read.wait(0.2)
        assert not read.done() and not read.settled and rig.peer.quarantined == [read]
        assert not read.wait_settled(0.05)
    finally:
        rig.resume()
    until(lambda: not rig.peer.quarantined)  # nobody waits for it: it moves on by itself
    assert read.settled and np.array_equal(pages_of(rig)[::-1], rig.content)
    read.wait(0)  # it came after all


def test_a_peer_that_is_killed_in_mid_read_is_lost_and_a_new_one_has_the_same_pages(rig):
    rig.hang()
    reads = [rig.peer.read(merged(rig.pages, np.arange(CAPACITY), PAGE), rig.lease()) for _ in range(2)]
    rig.kill()
    for read in reads:
        with pytest.raises(PeerLost):
            read.wait(LONG)
        assert read.wait_settled(LONG)
    with pytest.raises(PeerLost):
        rig.peer.read(merged(rig.pages[:1], [0], PAGE), rig.lease()).wait(LONG)
    rig.reconnect()
    rig.memory.array[:] = 7
    assert right(rig, np.arange(100), np.arange(100)[::-1])


def test_a_peer_closed_with_a_read_in_flight_keeps_its_destination_in_quarantine(rig):
    rig.hang()
    peer = rig.peer
    try:
        read = peer.read(merged(rig.pages, np.arange(CAPACITY), PAGE), rig.lease())
        peer.close()
        with pytest.raises(PeerLost, match="was closed"):
            read.wait(0)
        if isinstance(rig.engine, NixlEngine):  # the others give up a connection, and with it whatever would write
            assert not read.settled and peer.quarantined == [read]
    finally:
        rig.resume()
    assert read.wait_settled(LONG) and not peer.quarantined
    with pytest.raises(PeerLost):
        peer.read(merged(rig.pages[:1], [0], PAGE), rig.lease())
    rig.reconnect()
    assert right(rig, np.arange(10), np.arange(10))


def test_a_new_connection_does_not_depend_on_the_old_ones_quarantine(rig):
    """As after a link that was cut: the server is the same, and the old read still under way."""
    if not isinstance(rig.engine, NixlEngine):
        pytest.skip("the others have a connection of its own for each peer")
    offer = rig.link.control.offer()
    rig.hang()
    try:
        read = rig.peer.read(merged(rig.pages, np.arange(CAPACITY), PAGE), rig.lease())
        rig.peer.close()
        rig.link.peer = rig.engine.connect(offer)
        assert not read.settled
    finally:
        rig.resume()
    assert read.wait_settled(LONG)
    until(lambda: len(rig.engine._peers) == 1)
    assert right(rig, np.arange(10), np.arange(10))


def test_neighbours_on_both_sides_are_one_run():
    runs = merged([7, 3, 4, 5, 8, 9], [1, 10, 11, 13, 2, 4], 100)
    assert runs.far.tolist() == [300, 500, 700, 900]
    assert runs.near.tolist() == [1000, 1300, 100, 400]
    assert runs.size.tolist() == [200, 100, 200, 100] and runs.nbytes == 600
    assert len(merged(np.arange(50), np.arange(50) + 9, 10)) == 1 and len(merged([], [], 10)) == 0
    with pytest.raises(ValueError, match="2 pages of the pool can't go to 1 places"):
        merged([1, 2], [0], 10)


def test_memory_is_what_can_be_written_in_place():
    import torch

    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    place = Memory(tensor)
    assert place.nbytes == 64 and place.address == tensor.data_ptr()
    place.array[:2] = (0x80, 0x3F)
    assert tensor[0, 0] == 1.0
    for wrong in (np.zeros((4, 4))[:, ::2], np.frombuffer(b"abcd", np.uint8)):
        with pytest.raises(ValueError, match="contiguous, writable"):
            Memory(wrong)
    with pytest.raises(ValueError, match="contiguous and on the CPU"):
        Memory(torch.zeros(4, 4)[:, ::2])


def test_blocks_that_differ_from_their_checksums_are_found():
    place = memory(4)
    place.array[:] = np.random.default_rng(0).integers(0, 256, place.nbytes)
    sums = checksums(place.array, PAGE)
    verify(place, [0, 3], sums[[0, 3]], PAGE)
    place.array[3 * PAGE + 5] ^= 1
    with pytest.raises(Corrupt, match="place 3"):
        verify(place, [0, 3], sums[[0, 3]], PAGE)


def test_traffic_tells_idle_time_and_peaks(monkeypatch):
    from oasis_hf.disagg import traffic

    now = [0.0]
    monkeypatch.setattr(traffic.time, "monotonic", lambda: now[0])
    link = traffic.Traffic()

    def at(time, event, *args):
        now[0] = time
        event(*args)

    at(1.0, link.began, 3)
    at(2.0, link.began, 1)
    at(3.0, link.ended, 100)
    at(4.0, link.ended, 50)
    at(8.0, link.began, 1)
    now[0] = 9.0
    assert link.busy == 4.0 and link.idle_share(0, 10) == pytest.approx(0.6) and link.idle_share(4, 8) == 1
    at(10.0, link.ended, 0)
    assert link.told() == {"reads": 3, "runs": 5, "payload_bytes": 150, "busy_s": 5.0}
    assert link.peak(0.5) == 200 and link.peak(2) == 75
