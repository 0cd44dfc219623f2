"""The staging pool: what is reserved, published, ended and used again."""

import os
import time

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import DIM, LONG, PAGE, filled, memory, staging, until

from oasis_hf.config import ConfigError
from oasis_hf.disagg import InProcessEngine, LocalLink, PoolFull, StagingPool, StaleLease, merged
from oasis_hf.disagg import staging as module
from oasis_hf.disagg.errors import Refused
from oasis_hf.disagg.mapping import Mapping
from oasis_hf.store import HostMemoryError, HostStore, PagePool


class Clock:
    """Stands still unless it is set."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_pages_are_reserved_published_and_released(clock):
    pool = staging(10, ttl=5, quarantine=2, clock=clock)
    pages, generation = pool.reserve("a", 4)
    assert pages.tolist() == [0, 1, 2, 3] and pool.free == 6
    assert (pool.mapping.generations == 0).all()  # unpublished: nobody may read
    pool.publish("a", b"handle")
    assert pool.mapping.generations.tolist() == [generation] * 4 + [0] * 6
    assert pool.handle("a") == (b"handle", generation)
    pool.release("a", generation)
    assert (pool.mapping.generations == 0).all() and (pool.free, pool.quarantined) == (6, 4)
    clock.now += 1.9
    assert pool.expire() == [] and pool.free == 6
    clock.now += 0.2
    pool.expire()
    assert (pool.free, pool.quarantined) == (10, 0)


def test_a_clean_release_and_one_before_publishing_free_at_once(clock):
    pool = staging(10, clock=clock)
    _, first = pool.reserve("a", 4)
    pool.publish("a", b"")
    _, second = pool.reserve("b", 6)
    assert second > first > 0
    pool.release("a", first, clean=True)
    pool.release("b", second)
    assert pool.free == 10
    with pytest.raises(StaleLease, match="'a' was released"):
        pool.release("a", first)


def test_a_lease_runs_out_unless_it_is_renewed(clock):
    ends = []
    pool = staging(10, ttl=5, quarantine=3, clock=clock, on_end=lambda *end: ends.append(end))
    _, generation = pool.reserve("a", 4)
    clock.now += 1000  # a prompt may take its time
    pool.publish("a", b"")
    clock.now += 4
    assert pool.renew("a", generation) == 5
    clock.now += 4
    pool.handle("a")
    clock.now += 4
    assert pool.expire() == [] and pool.stats()["published"] == 1
    clock.now += 1.5
    for call in (lambda: pool.handle("a"), lambda: pool.renew("a", generation)):
        with pytest.raises(StaleLease):
            call()
    assert (pool.free, pool.quarantined) == (6, 4)
    clock.now += 3
    _, second = pool.reserve("b", 10)
    assert second == generation + 1  # what has ended makes room by itself
    pool.release("b", second)
    assert ends == [("a", "expired"), ("b", "released")]


def test_a_dead_readers_lease_ends_sooner_unless_it_comes_back(clock):
    pool = staging(10, ttl=50, clock=clock)
    held = {}
    for name in "ab":
        held[name] = pool.reserve(name, 2)[1]
        pool.publish(name, b"")
        pool.shorten(name, held[name], 5)
    pool.shorten("a", held["a"], 500)  # never longer
    pool.shorten("c", 3, 5)
    pool.shorten("b", held["a"], 0)  # another generation's
    clock.now += 4
    pool.renew("b", held["b"])
    clock.now += 2
    assert pool.expire() == ["a"] and pool.renew("b", held["b"]) == 50


def test_a_full_pool_says_so_with_the_numbers(clock):
    pool = staging(10, ttl=5, quarantine=3, clock=clock)
    _, a = pool.reserve("a", 4)
    pool.publish("a", b"")
    pool.reserve("b", 3)
    pool.release("a", a)
    with pytest.raises(PoolFull) as error:
        pool.reserve("c", 5)
    told = error.value
    assert (told.needed, told.free, told.quarantined, told.capacity, told.requests) == (5, 3, 4, 10, 1)
    assert str(told).startswith(
        "The staging pool is full: 5 pages are needed, 3 of 10 are free (1 requests hold pages; 4"
    )
    assert pool.free == 3 and pool.stats()["more_in_s"] == 3
    pool.reserve("c", 3)  # and nothing was lost by it


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda pool: pool.reserve("r", 1), ValueError, "'r' is in the staging pool already"),
        (lambda pool: pool.reserve("x", 0), ValueError, "can't reserve 0 pages"),
        (lambda pool: pool.publish("r", b""), ValueError, "'r' was published before"),
        (lambda pool: pool.publish("x", b""), StaleLease, "'x' was released"),
        (lambda pool: pool.pages_of("x"), StaleLease, "'x' was released"),
        (lambda pool: pool.release("r", 5), StaleLease, "'r' was released"),
        (lambda pool: pool.renew("r", 5), StaleLease, "'r' was released"),
    ],
)
def test_wrong_calls_are_one_sentence(call, error, message):
    pool = staging(10)
    filled(pool, "r", 3)
    with pytest.raises(error, match=message):
        call(pool)
    assert pool.free == 7


def test_what_a_pool_must_be_given(monkeypatch):
    for wrong in ({"ttl": 0}, {"quarantine": -1}):
        with pytest.raises(ConfigError, match=f"StagingPool.{next(iter(wrong))}="):
            staging(4, **wrong)
    with pytest.raises(ConfigError, match="StagingPool.capacity=0"):
        staging(0)
    monkeypatch.setattr(module, "available_host_bytes", lambda: 5 * PAGE)
    with pytest.raises(HostMemoryError, match="8 pages x 4,096 bytes needs 0.00 GiB .* 0.00 GiB are available"):
        staging(8)


def test_a_store_lives_on_reserved_pages_and_another_process_sees_them():
    pool = staging(100)
    pool.reserve("other", 10)
    pages, _ = pool.reserve("r", 2 * 2 * 3)
    store = HostStore(2, 1, 2, DIM, torch.float32, torch.device("cpu"), pool=pool.pages_of("r"))
    store.ensure([0], [40])
    keys, values = torch.randn(2, 40, DIM), torch.randn(2, 40, DIM)
    for layer in range(2):
        store.write(layer, 0, 0, keys + layer, values - layer)
    assert set(store.table.flatten().tolist()) == set(pages.tolist())
    with pytest.raises(HostMemoryError, match="4 more pages, but of the 12 that it reserved in the staging pool 0"):
        store.ensure([40], [49])
    pool.publish("r", b"")
    seen = Mapping(pool.fd, pool.capacity, pool.page_bytes, writable=False)
    block = np.frombuffer(seen.view, np.float32).reshape(100, 2, 16, DIM)[store.table[1, 0, 0, 1]]
    assert np.array_equal(block[0], (keys + 1)[0, 16:32]) and np.array_equal(block[1], (values - 1)[0, 16:32])
    with pytest.raises(TypeError):
        seen.view[0] = 1
    table = store.table.clone()
    del store  # its pages stay as they are until the lease ends
    assert pool.free == 78 and torch.equal(pool.pool.pages[table[0, 0, 1, 2]][0, :8], keys[1, 32:])


def test_pages_that_were_not_needed_are_free_after_publishing():
    pool = staging(20)
    pages, generation = pool.reserve("r", 12)
    lent = pool.pages_of("r")
    used = lent.allocate(5)
    assert lent.pages_in_use == 5 and pool.free == 8
    for wrong in (torch.tensor([19]), torch.tensor([3, 19])):
        with pytest.raises(ValueError, match="can't keep pages that it has not reserved"):
            pool.publish("r", b"", keep=wrong)
    pool.publish("r", b"", keep=used[[0, 1, 2, 3, 4, 4]])
    assert pool.free == 15 and (pool.mapping.generations == generation).sum() == 5
    with pytest.raises(HostMemoryError, match="can't grow"):
        lent.allocate(1)
    lent.release(used)  # the store goes: nothing changes
    assert pool.free == 15
    with pytest.raises(HostMemoryError):
        lent.allocate(1)
    assert not set(pool.reserve("s", 15)[0].tolist()) & set(used.tolist())


def test_a_pool_of_pages_on_given_memory_asks_the_system_for_nothing(monkeypatch):
    from oasis_hf.store import pages

    monkeypatch.setattr(pages, "available_host_bytes", lambda: 0)
    fd = Mapping.create(8, PAGE)
    mapping = Mapping(fd, 8, PAGE, writable=True)
    pool = PagePool(DIM, torch.float32, False, mapping.pool_bytes, memory=mapping.memory)
    assert pool.capacity == 8 and pool.pages.shape == (8, 2, 16, DIM)
    pool.pages[pool.allocate(8)] = 3.0
    with pytest.raises(HostMemoryError, match="1 more pages"):
        pool.allocate(1)
    assert os.pread(fd, 4, 7 * PAGE) == np.float32(3).tobytes() and (mapping.generations == 0).all()
    os.close(fd)


@pytest.mark.parametrize("far, size", [([0, 5 * PAGE - 3], [1, 4]), ([-1], [2]), ([0], [0]), ([2**62], [2**62])])
def test_runs_out_of_bounds_are_refused(far, size):
    pool = staging(5)
    with pytest.raises(Refused) as error:
        pool.mapping.check(np.array(far), np.array(size), 1)
    assert error.value.what == "bounds"


def test_every_page_of_every_run_must_be_of_the_generation():
    pool = staging(10)
    _, generation, _ = filled(pool, "a", 4)
    filled(pool, "b", 4)
    check = pool.mapping.check
    check(np.array([0, PAGE + 1]), np.array([4 * PAGE, 3 * PAGE - 1]), generation)
    for far, size in (([0], [4 * PAGE + 1]), ([0, 4 * PAGE], [1, 1]), ([8 * PAGE], [1])):
        with pytest.raises(StaleLease):
            check(np.array(far), np.array(size), generation)
    with pytest.raises(StaleLease):
        check(np.array([9 * PAGE]), np.array([1]), 0)
    with pytest.raises(Refused, match="more than the pool"):
        check(np.zeros(3, np.int64), np.full(3, 4 * PAGE), generation)


def test_a_link_within_the_process_is_used_like_any_other():
    ended = []
    pool = staging(64, ttl=1.5, quarantine=60, on_end=lambda *end: ended.append(end))
    pages, generation, content = filled(pool, "r", 20, b"the handle")
    filled(pool, "s", 4)
    place = memory(20)
    link = LocalLink(pool, InProcessEngine(place))
    handle, lease = link.handle("r")
    assert handle == b"the handle" and lease.generation == generation and link.lost is None
    until(lambda: pool.stats()["published"] == 1)  # "s" has no reader
    time.sleep(0.5)
    assert pool.stats()["published"] == 1 and ended == [("s", "expired")]
    for _ in range(2):
        link.read(merged(pages, np.arange(20), PAGE), lease).wait(LONG)
        assert np.array_equal(place.array.reshape(20, PAGE), content)
        place.array[:] = 0
        link.reconnect()
    link.release(lease)
    assert pool.free == 60 and pool.quarantined == 4 and ended == [("s", "expired"), ("r", "released")]
    with pytest.raises(StaleLease):
        link.read(merged(pages, np.arange(20), PAGE), lease)
    _, generation, _ = filled(pool, "t", 4)
    _, lease = link.handle("t")
    pool.release("t", generation)
    until(lambda: lease.until < 0)
    link.close()


def test_closing_ends_everything():
    pool = staging(10)
    _, generation, _ = filled(pool, "a", 4)
    fd = pool.fd
    pool.close()
    assert (pool.mapping.generations == 0).all()
    with pytest.raises(StaleLease):
        pool.renew("a", generation)
    with pytest.raises(OSError):
        os.fstat(fd)
    pool.close()


def test_pools_of_two_processes_share_no_generation():
    assert len({staging(1).reserve("a", 1)[1] >> 20 for _ in range(5)}) == 5


class Life(RuleBasedStateMachine):
    """Against a plain account: which page is whose, and until when nobody else may have it."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.pool = StagingPool(24, DIM, torch.float32, ttl=10, quarantine=4, clock=self.clock)
        self.live = {}  # name -> [pages, generation, end or None]
        self.closed = {}  # page -> time until which it must not be handed out
        self.generations = set()
        self.names = 0

    def settle(self):
        for name, (pages, _, end) in list(self.live.items()):
            if end is not None and self.clock.now > end:
                del self.live[name]
                # At the latest now, when the pool is asked.
                self.closed |= dict.fromkeys(pages, self.clock.now + 4)

    @rule(count=st.integers(1, 12))
    def reserve(self, count):
        self.settle()
        taken = {page for pages, _, _ in self.live.values() for page in pages}
        held = {page for page, end in self.closed.items() if end > self.clock.now}
        self.names += 1
        name = f"r{self.names}"
        try:
            pages, generation = self.pool.reserve(name, count)
        except PoolFull as full:
            assert full.free == 24 - len(taken) - len(held) < count
            assert full.quarantined == len(held) and full.requests == len(self.live)
            return
        pages = set(pages.tolist())
        assert len(pages) == count and not pages & (taken | held) and generation not in self.generations
        self.generations.add(generation)
        self.live[name] = [pages, generation, None]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        pages, _, end = self.live[name]
        if end is None:
            keep = data.draw(st.sets(st.sampled_from(sorted(pages)), min_size=1))
            self.pool.publish(name, b"", torch.tensor(sorted(keep)))
            self.live[name][0], self.live[name][2] = keep, self.clock.now + 10

    @precondition(lambda self: self.live)
    @rule(data=st.data(), clean=st.booleans())
    def release(self, data, clean):
        name = data.draw(st.sampled_from(sorted(self.live)))
        pages, generation, end = self.live.pop(name)
        try:
            self.pool.release(name, generation, clean)
        except StaleLease:
            assert end is not None and self.clock.now > end
            return
        if not clean and end is not None:
            self.closed |= dict.fromkeys(pages, self.clock.now + 4)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def renew(self, data):
        self.settle()
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.pool.renew(name, self.live[name][1])
            if self.live[name][2] is not None:
                self.live[name][2] = self.clock.now + 10

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.5, 11.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.pool.expire()
        self.settle()

    @invariant()
    def only_published_pages_may_be_read(self):
        want = np.zeros(24, np.int64)
        for pages, generation, end in self.live.values():
            if end is not None:
                want[sorted(pages)] = generation
        assert np.array_equal(self.pool.mapping.generations, want)

    def teardown(self):
        self.pool.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30)
