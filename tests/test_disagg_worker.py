"""Decode workers: what they hold while they wait, whom they stop working for, whose mistake an error is."""

from __future__ import annotations

from letters import letter_tokenizer
from pools import until
from test_disagg_node import Told, node, worker
from tiny import prompt, tiny

from oasis_hf.disagg.worker import DecodeWorker, Job


def test_what_a_worker_has_answered_leaves_the_node():
    """An idle worker holds nothing: another's prompts need the room."""
    with node() as one:
        decoding, told = worker(one), Told()
        decoding.add(Job(prompt(1, 90)[0].tolist(), {"max_new_tokens": 3, "do_sample": False}, None, told))
        assert told.result()[0] == "done"
        until(lambda: one.staging.stats()["in_use"] == 0)
        decoding.close()


def test_a_job_that_nobody_waits_for_ends():
    with node() as one:
        decoding = worker(one)
        begun, never = Told(), Told()
        ids, options = prompt(1, 40)[0].tolist(), {"max_new_tokens": 2000, "do_sample": False}
        first = Job(ids, options, None, begun)
        decoding.add(first)
        until(lambda: begun.pieces)
        unread = Job(ids, options, None, never, gone=True)
        decoding.add(unread)
        first.gone = True
        assert begun.result()[0] == "done" and len(begun.end[1]["ids"]) < 2000
        decoding.close()
        assert never.end is None


def test_whose_mistake_an_error_is():
    with node() as one:
        told = Told()
        decoding = worker(one)
        decoding.add(Job([5] * 40, {"max_new_tokens": 2009}, None, told))
        assert told.result()[1].startswith(
            "Refused: A prompt of 40 tokens and max_tokens=2,009 are more than the 2,048"
        )
        decoding.close()
        told = Told()
        stranger = DecodeWorker(tiny("llama"), letter_tokenizer(), [one.server.address], b"another secret of theirs")
        stranger.add(Job([5] * 40, {"max_new_tokens": 2}, None, told))
        assert told.result() == ("error", "DisaggError: The shared secrets of the two sides differ.")
        stranger.close()
