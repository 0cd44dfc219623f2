"""Prompts that readers send to a prefill node, decode workers over several nodes, and the router before them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from letters import letter_tokenizer
from pools import LONG, until
from tiny import prompt, tiny

from oasis_hf import ConfigError, OasisCache, cli
from oasis_hf.attach import cache_name
from oasis_hf.disagg import (
    DisaggError,
    PeerLost,
    PoolFull,
    PrefillClient,
    PrefillNode,
    PrefillWorker,
    Refused,
    StagingPool,
)
from oasis_hf.disagg.command import _secret
from oasis_hf.disagg.router import Router, application, asked, parse_address
from oasis_hf.disagg.worker import DecodeWorker, Job

SECRET = b"a secret of the tests"
BUDGET = 64


def node(capacity=4000, **serving):
    model = tiny("llama")
    staging = StagingPool(capacity, 16, torch.float32, ttl=20.0, quarantine=0.5)
    return PrefillNode(PrefillWorker(model, staging, budget=BUDGET), SECRET, **serving)


def client(of, **kwargs):
    return PrefillClient(tiny("llama"), of.server.address, SECRET, budget=BUDGET, **kwargs)


def alone(ids, **options):
    """The ids that one process gives. ids: `[1, n]`."""
    model = tiny("llama")
    how = {"max_new_tokens": 12, "do_sample": False, **options}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{cache_name(model): OasisCache(model, budget=BUDGET)}, **how
    )
    return out[0, ids.shape[1] :].tolist()


class Told:
    """What a job tells, and the wait for its end."""

    def __init__(self):
        self.pieces, self.end, self.over = [], None, threading.Event()

    def __call__(self, what, value):
        if what == "text":
            self.pieces.append(value)
        elif what in ("done", "error"):
            self.end = (what, value)
            self.over.set()

    def result(self, seconds=5 * LONG):
        assert self.over.wait(seconds), "the job did not end"
        return self.end


# -- a node -----------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_there_and_its_cache_comes_back():
    model = tiny("llama")
    with node() as one:
        reader = client(one)
        for length in (200, 33):
            ids = prompt(1, length)
            prefilled = reader.prefill(ids[0])
            cache = OasisCache.from_prefill(prefilled, model)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_name(model): cache},
                max_new_tokens=12,
                do_sample=False,
            )
            assert out[0, length:].tolist() == alone(ids)
        reader.close()


@pytest.fixture(scope="module")
def reader():
    """Of a node that does nothing else."""
    with node() as one:
        reader = client(one)
        yield reader
        reader.close()


@pytest.mark.parametrize(
    "ids, said",
    [([], "0 tokens is not possible"), ([5, 96], "ids outside 0 to 95"), ([-1], "ids outside"),
     ([3] * 2048, "2,048 tokens is not possible: use 1 to 2,047")],
    ids=["empty", "large", "negative", "long"],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(reader, ids, said):
    with pytest.raises(Refused, match=said):
        reader.prefill(torch.tensor(ids, dtype=torch.int64))


def test_a_full_pool_is_waited_for_and_then_refused():
    ids = prompt(1, 200)[0]
    with node(capacity=3 * 2 * 13) as one:
        reader = client(one)
        held = reader.prefill(ids)
        started = time.monotonic()
        with pytest.raises(PoolFull, match="78"):
            reader.prefill(ids, seconds=0.3)
        assert 0.2 < time.monotonic() - started < LONG  # the default is 120
        del held
        assert reader.prefill(ids, seconds=LONG).ids.shape == (1, 200)
        reader.close()


def test_a_prefill_that_fails_says_why(monkeypatch):
    with node() as one:
        reader = client(one)

        def broken(*args):
            raise torch.OutOfMemoryError("no memory here")

        monkeypatch.setattr(one.worker, "_read", broken)
        with pytest.raises(DisaggError, match="failed: OutOfMemoryError: no memory here"):
            reader.prefill(prompt(1, 30)[0])
        assert one.staging.free == one.staging.capacity
        monkeypatch.undo()
        assert reader.prefill(prompt(1, 30)[0]).ids.shape == (1, 30)
        reader.close()


# -- decode workers ---------------------------------------------------------------------------------------------------


def worker(*nodes, **kwargs):
    addresses = [one.server.address for one in nodes]
    return DecodeWorker(tiny("llama"), letter_tokenizer(), addresses, SECRET, budget=BUDGET, **kwargs)


def test_many_requests_over_two_nodes_are_each_answered_with_their_own():
    with node() as one, node() as other:
        decoding = [worker(one, other), worker(other, one)]
        prompts = [prompt(1, 20 + 7 * i) for i in range(12)]
        jobs = [Told() for _ in prompts]
        for i, (ids, told) in enumerate(zip(prompts, jobs)):
            decoding[i % 2].add(Job(ids[0].tolist(), {"max_new_tokens": 12, "do_sample": False}, None, told))
        for ids, told in zip(prompts, jobs):
            what, value = told.result()
            assert what == "done" and value["ids"] == alone(ids), value
            assert "".join(told.pieces) == value["text"] and value["prompt_tokens"] == ids.shape[1]
        for one_worker in decoding:
            one_worker.close()
        for held in (one.staging, other.staging):
            until(lambda: held.stats()["in_use"] == 0)


def test_a_lost_node_is_replaced_by_another_and_a_wrong_request_harms_nobody():
    ids = prompt(1, 90)
    with node() as one:
        lost = node()
        decoding = worker(lost, one, seconds=4.0)
        options = {"max_new_tokens": 12, "do_sample": False}
        first, wrong, second = Told(), Told(), Told()
        decoding.add(Job(ids[0].tolist(), options, None, first))
        assert first.result()[0] == "done"
        lost.close()
        decoding.add(Job([999], options, None, wrong))
        decoding.add(Job(ids[0].tolist(), options, None, second))
        assert wrong.result()[0] == "error" and "outside 0 to 95" in wrong.end[1]
        assert second.result() == ("done", first.end[1])
        decoding.close()
    alone_worker = worker(one, seconds=0.5, limits={"seconds": 0.5})
    gone = Told()
    alone_worker.add(Job(ids[0].tolist(), options, None, gone))
    assert gone.result()[0] == "error" and gone.end[1].startswith(PeerLost.__name__)
    alone_worker.close()


# -- the router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, said",
    [
        ([], "must be a JSON object"), ({}, "prompt must be"), ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "not empty"), ({"prompt": ["a", "b"]}, "one a request"),
        ({"prompt": "a", "model": "other"}, "no model 'other'"), ({"prompt": "a", "n": 2}, "n=2 is not supported"),
        ({"prompt": "a", "max_tokens": 0}, "use 1 to"), ({"prompt": "a", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"prompt": "a", "temperature": 3}, "use 0 to 2"), ({"prompt": "a", "temperature": True}, "temperature=True"),
        ({"prompt": "a", "seed": "x"}, "use an integer"), ({"prompt": "a", "tools": []}, "no field 'tools'"),
        ({"prompt": "a", "seed": 1 << 70}, "an integer of 64 bits"), ({"prompt": [1 << 70]}, "prompt must be"),
        ({"prompt": "\ud800"}, "half a surrogate pair"), ({"prompt": "a", "stream": "false"}, "use true or false"),
    ],
)  # fmt: skip
def test_a_wrong_completion_is_told_in_a_sentence(body, said):
    with pytest.raises(Refused, match=said):
        asked(body, "tiny")


def test_a_completions_options():
    assert asked({"prompt": "a"}, "tiny") == (
        "a", {"max_new_tokens": 16, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}, None, False,
    )  # fmt: skip
    got = asked(
        {"prompt": [4], "temperature": 0, "max_tokens": 3, "seed": 7, "stream": True, "n": 1, "stop": None}, "tiny"
    )
    assert got == ([4], {"max_new_tokens": 3, "do_sample": False}, 7, True)
    assert parse_address("[::1]:80") == ("::1", 80) and parse_address("a.b:0") == ("a.b", 0)
    for wrong in ("host", ":80", "host:", "host:x", "host:70000"):
        with pytest.raises(ConfigError, match="use HOST:PORT"):
            parse_address(wrong)


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer, as other processes load them."""
    tiny("llama").save_pretrained(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_completions_over_http(folder):
    aiohttp = pytest.importorskip("aiohttp")
    from aiohttp.test_utils import TestClient, TestServer

    text = "the quick brown fox jumps over the lazy dog, " * 4
    ids = letter_tokenizer()(text, return_tensors="pt").input_ids

    async def session(router):
        async with TestClient(TestServer(application(router))) as http:
            body = {"prompt": text, "max_tokens": 12, "temperature": 0}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(3)))
            whole = [await answer.json() for answer in answers]
            streamed = await http.post("/v1/completions", json={**body, "stream": True})
            events = (await streamed.text()).strip().split("\n\n")
            wrong = await http.post("/v1/completions", json={**body, "n": 3})
            broken = [(await http.post("/v1/completions", data=data)).status for data in (b"{", b"\xf8")]
            early = await http.post("/v1/completions", json={"prompt": [500], "max_tokens": 2, "stream": True})
            process, sent = router._processes[0], []
            send, process.pipe.send = process.pipe.send, lambda job: (sent.append(job), send(job))
            left = router.complete(text, {"max_new_tokens": 1500, "do_sample": False}, None)
            await anext(left)
            await left.aclose()
            assert [job[1] for job in sent] == [text, None] and sent[0][0] == sent[1][0], "it is called off"
            late = await http.post("/v1/completions", json={"prompt": [500], "max_tokens": 2})
            waits = asyncio.create_task(http.post("/v1/completions", json={**body, "max_tokens": 1500}))
            while not router._processes[0].jobs:
                await asyncio.sleep(0.01)
            router._processes[0].child.kill()
            killed = await waits
            while not router.restarts or not router._processes[0].ready.is_set():
                await asyncio.sleep(0.05)
            os.kill(router._processes[0].child.pid, signal.SIGINT)  # as a terminal does, to all
            again = await http.post("/v1/completions", json=body)
            whole.append(await again.json())
            told = [await (await http.get(path)).json() for path in ("/v1/models", "/health", "/stats")]
            statuses = [wrong.status, *broken, early.status]
            return whole, events, statuses, (late.status, await late.json()), killed.status, told

    with node() as one:
        router = Router(
            folder, 1, addresses=[one.server.address], secret=SECRET, budget=BUDGET, device="cpu", dtype=torch.float32,
            threads=1,
        )  # fmt: skip
        whole, events, statuses, late, killed, told = asyncio.run(session(router))
    want = letter_tokenizer().decode(alone(ids), skip_special_tokens=True)
    for answer in whole:
        assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == want
        assert answer["usage"]["prompt_tokens"] == ids.shape[1]
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]) == want
    assert statuses == [400] * 4 and late[0] == 400 and "ids outside" in late[1]["error"]["message"]
    assert told[0]["data"][0]["id"] == folder and told[1] == {"status": "ok"} and told[2]["served"] == 5
    assert killed == 503 and told[2]["restarts"] == 1, "a decode process that dies is started again"
    assert aiohttp.__version__


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["prefill-server", "--listen", "nowhere"], "The address 'nowhere' is not allowed: use HOST:PORT"),
        (["prefill-server", "--pool-gib", "0"], "--pool-gib 0.0 is not allowed"),
        (["serve-disagg", "--workers", "0"], "--workers 0 is not allowed"),
        (["serve-disagg", "--prefill", "x"], "The address 'x' is not allowed"),
        (["serve-disagg", "--tls", "a", "b", "c"], "--tls can't be used"),
        (["serve-disagg", "--budget", "7"], "budget=7 is not allowed"),
        (["serve-disagg", "no/such/model/here", "--listen", "127.0.0.1:0"], "oasis-hf: Can't load no/such/model/here"),
        (["prefill-server", "--threads", "-1"], "--threads -1 is not allowed"),
        (["prefill-server", "--device", "gpu"], "--device 'gpu' can't be used"),
    ],
)
def test_mistakes_in_a_call(arguments, said, tmp_path, capsys):
    assert cli.main([*arguments, "--secret-file", str(tmp_path / "secret")]) == 2
    assert said in capsys.readouterr().err


def test_a_secret_that_is_short_or_missing(tmp_path, capsys):
    (tmp_path / "short").write_text("guess me")
    assert cli.main(["serve-disagg", "--secret-file", str(tmp_path / "short")]) == 2
    assert "has 8 bytes: use 16 at least" in capsys.readouterr().err
    assert cli.main(["serve-disagg", "--secret-file", str(tmp_path / "new"), "--tls", "a", "b", "c"]) == 2
    made = tmp_path / "new"
    assert not made.exists() or (made.stat().st_mode & 0o777) == 0o600


def test_commands_started_at_once_make_one_secret(tmp_path, monkeypatch):
    """Each finds no file, and none may read half of another's."""
    path, count, old, drawn = tmp_path / "deep" / "secret", 8, os.umask(0), os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: (time.sleep(0.1), drawn(size))[1])
    try:
        start = threading.Barrier(count)

        def one(_):
            start.wait()
            return _secret(path)

        with ThreadPoolExecutor(count) as pool:
            found = set(pool.map(one, range(count)))
    finally:
        os.umask(old)
    assert len(found) == 1 and len(found.pop()) == 64
    assert [made.name for made in path.parent.iterdir()] == ["secret"] and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_64_requests_over_two_and_two_processes(folder, tmp_path):
    """The two commands, as a user runs them."""
    import urllib.request

    command, secret = [sys.executable, "-m", "oasis_hf.cli"], str(tmp_path / "secret")
    how = [folder, "--secret-file", secret, "--device", "cpu", "--threads", "1", "--budget", str(BUDGET)]
    running = []
    try:
        places = []
        for keeps in ("0", "0.01"):  # GiB of what prompts begin with
            serve = [*command, "prefill-server", *how, "--listen", "127.0.0.1:0", "--pool-gib", "0.05"]
            serve += ["--prefix-gib", keeps]
            child = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
            running.append(child)
            places.append(child.stdout.readline().rsplit(" ", 1)[1].strip())
        with socket.socket() as free:  # serve-disagg says the port that it was given, not one that it takes
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        child = subprocess.Popen(
            [*command, "serve-disagg", *how, "--prefill", *places, "--workers", "2", "--listen", place,
             "--prefix-gib", "0.01"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(child)
        assert f"http://{place}" in child.stdout.readline()

        def one(i):
            ids = prompt(1, 8 * (i + 1) - 3)
            body = json.dumps({"prompt": ids[0].tolist(), "max_tokens": 12, "temperature": 0}).encode()
            call = urllib.request.Request(f"http://{place}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(call, timeout=300) as answer:
                return json.load(answer)["choices"][0]["text"]

        with ThreadPoolExecutor(64) as pool:
            got = list(pool.map(one, range(64)))
        for i, text in enumerate(got):
            want = letter_tokenizer().decode(alone(prompt(1, 8 * (i + 1) - 3)), skip_special_tokens=True)
            assert text == want, i
    finally:
        for child in running:
            child.terminate()
        for child in running:
            assert child.wait(LONG) in (0, -15)
