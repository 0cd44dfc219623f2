"""What a collection gives back while pages of a `Near` are on their way."""

from __future__ import annotations

import torch

from oasis_hf.store.near import Far, Near, Pending
from oasis_hf.store.pages import PagePool


class _Pages(Far):
    """Page i is full of i. meanwhile: called in the middle of a read, as a collection may be, of any thread."""

    name = "far"
    meanwhile = staticmethod(lambda at: None)

    def begin(self, numbers, memory, at):
        self.meanwhile("begin")
        return _Arriving(self, numbers.clone(), memory, at.clone())

    def write(self, numbers, memory, at):
        raise AssertionError("nothing is sent away")


class _Arriving(Pending):
    def __init__(self, *read):
        self.far, self.numbers, self.memory, self.at = read

    def wait(self):
        self.far.meanwhile("wait")
        self.memory[self.at] = self.numbers[:, None, None, None].float()

    def settling(self):
        return lambda: False  # the peer may write to those places yet


def test_pages_are_given_back_while_others_of_their_read_arrive():
    pool, far = PagePool(16, torch.float32, False, 1 << 20), _Pages()
    near = Near(pool, far)
    pages = near.allocate(4)
    other = []

    def collected(at):
        if at == "wait":
            near.release(pages[2:])
            other.append(pool.allocate(2))  # another request's
            pool.pages[other[0]] = -1.0

    far.meanwhile = collected
    places = near.bring(pages)
    assert torch.equal(pool.pages[places[:2], 0, 0, 0], torch.tensor([0.0, 1.0]))
    assert bool((pool.pages[other[0]] == -1.0).all()), "what arrives late is nobody else's"
    assert near.held == 2 and pool.pages_in_use == 4
    near.release(pages[:2])
    assert near.held == 0 and pool.pages_in_use == 2


def test_a_page_that_is_asked_for_does_not_go_with_another_of_its_read():
    """Two pages came under way together; one goes while the other is asked for."""
    pool, far = PagePool(16, torch.float32, False, 1 << 20), _Pages()
    near = Near(pool, far)
    pages = near.allocate(3)
    near.begin(pages[:2])
    far.meanwhile = lambda at: near.release(pages[:1]) if at == "begin" else None
    places = near.bring(pages[1:])
    assert torch.equal(pool.pages[places, 0, 0, 0], torch.tensor([1.0, 2.0]))
    assert near.held == 2
