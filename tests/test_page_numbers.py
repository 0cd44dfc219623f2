"""Pages are nobody's twice, whoever takes and gives back meanwhile."""

from __future__ import annotations

import sys
import threading

import torch

from oasis_hf.store import PagePool

DIM = 16


def pool(pages=4096):
    return PagePool(DIM, torch.float32, pin=False, reserve_bytes=pages * 2 * 16 * DIM * 4)


def test_threads_that_take_and_give_back_never_share_a_page():
    one, wrong, owner = pool(), [], torch.full((4096,), -1)

    def run(me):
        generator = torch.Generator().manual_seed(me)
        try:
            for _ in range(80):
                pages = one.allocate(int(torch.randint(1, 20, (), generator=generator)))
                if bool((owner[pages] >= 0).any()):
                    wrong.append(me)
                owner[pages] = me
                one.retain(pages)
                one.release(pages)
                owner[pages] = -1
                one.release(pages)
        except RuntimeError as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(me,)) for me in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert one.pages_in_use == 0 and not one.references.any() and len(one._free.unique()) == len(one._free) == one._used


def test_pages_given_back_in_the_middle_of_a_call_are_free_behind_it(monkeypatch):
    """As a collection does that finds a store which nobody has any more."""
    one, plain = pool(), PagePool.make_room
    gone = one.allocate(5)

    def collecting(self, used):
        nonlocal gone
        if gone is not None:
            back, gone = gone, None
            self.release(back)
        plain(self, used)

    free = one.allocate(3)
    one.release(free)
    monkeypatch.setattr(PagePool, "make_room", collecting)
    taken = one.allocate(4)
    assert sorted(taken.tolist()) == [5, 6, 7, 8], "not those that came back meanwhile"
    more = one.allocate(5)
    assert sorted(more.tolist()) == [0, 1, 2, 3, 4] and one.pages_in_use == 9


def test_places_of_late_reads_are_told_as_they_are():
    one, settled = pool(), []
    late = one.allocate(3)
    one.release_later(late, lambda: bool(settled))
    assert (one.pages_in_use, one.late) == (3, 3)
    assert not set(one.allocate(3).tolist()) & set(late.tolist())
    settled.append(True)
    assert (one.pages_in_use, one.late) == (3, 0), "without places being asked for"
    assert sorted(one.allocate(3).tolist()) == late.tolist()
