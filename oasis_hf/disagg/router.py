"""One HTTP address before several decode processes: OpenAI-style completions, for trying disaggregation (issue E)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import signal
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import Refused
from .wire import Address

UNSUPPORTED = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "stop": None, "logit_bias": None}
"""Fields of a completion that are taken with this value only."""

_MOST = (1 << 63) - 1

TAKEN = ("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "user")


def asked(body: Any, name: str) -> tuple[Any, dict[str, Any], int | None, bool]:
    """A completion's prompt, options of `generate`, seed, and whether it is streamed.

    Raises:
        Refused: a field that is missing, wrong or not supported.
    """
    if not isinstance(body, dict):
        raise Refused("request", "The body must be a JSON object.")
    for key, value in body.items():
        if key in UNSUPPORTED:
            if value not in (UNSUPPORTED[key], None):
                raise Refused("request", f"{key}={value!r:.40} is not supported: leave it out.")
        elif key not in TAKEN:
            raise Refused("request", f"There is no field {key!r:.40}: use {', '.join(TAKEN)}.")
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and bool(prompt) and all(type(one) is int and abs(one) <= _MOST for one in prompt)
    if not ids and not (isinstance(prompt, str) and prompt):
        raise Refused("request", "prompt must be a text or a list of token ids, and not empty; one a request.")
    if isinstance(prompt, str) and not prompt.isascii() and any("\ud800" <= one <= "\udfff" for one in prompt):
        raise Refused("request", "prompt has half a surrogate pair, which is no text.")
    if body.get("model") not in (None, name):
        raise Refused("request", f"There is no model {body['model']!r:.80}: this is {name!r}.")
    numbers = {"max_tokens": (16, 1, 1 << 20), "temperature": (1.0, 0, 2), "top_p": (1.0, 0, 1)}
    values: dict[str, Any] = {}
    for key, (default, low, high) in numbers.items():
        value = values[key] = default if body.get(key) is None else body[key]
        kind = int if key == "max_tokens" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise Refused("request", f"{key}={value!r:.40} is not allowed: use {low} to {high}.")
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or abs(seed) > _MOST):
        raise Refused("request", f"seed={seed!r:.40} is not allowed: use an integer of 64 bits.")
    if body.get("stream") not in (None, True, False):
        raise Refused("request", f"stream={body['stream']!r:.40} is not allowed: use true or false.")
    options: dict[str, Any] = {"max_new_tokens": values["max_tokens"], "do_sample": values["temperature"] > 0}
    if options["do_sample"]:
        options |= {"temperature": float(values["temperature"]), "top_p": float(values["top_p"]), "top_k": 0}
    return prompt, options, seed, bool(body.get("stream"))


def decode_process(pipe: Any, model: str | None, settings: dict[str, Any]) -> None:
    """What a decode process runs: jobs come over `pipe`, and what is to be told goes back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the router too, which ends this process
    import torch

    from ..config import ConfigError, OasisConfig
    from ..models import ModelError, load
    from ..prefixes import PrefixStore
    from ..supported import UnsupportedModelError
    from .worker import DecodeWorker, Job

    torch.set_num_threads(settings.pop("threads"))
    most, knobs = settings.pop("prefix_bytes", 0), settings.keys() & {one.name for one in fields(OasisConfig)}
    try:
        loaded, tokenizer = load(model, settings.pop("device"), settings.pop("dtype"))
        if most:
            own = {name: settings.pop(name) for name in knobs}  # a client takes them from it
            settings["prefixes"] = PrefixStore(loaded, most, **own)
    except (ModelError, ConfigError, UnsupportedModelError) as error:
        pipe.send((-1, "failed", str(error)))
        return
    worker = DecodeWorker(loaded, tokenizer, **settings)
    sending = threading.Lock()

    def tell(number: int, what: str, value: Any) -> None:
        with sending, contextlib.suppress(OSError):  # the router is gone
            pipe.send((number, what, value))

    tell(-1, "ready", None)
    jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
    while (job := _received(pipe)) is not None:
        number, prompt, options, seed = job
        if prompt is not None:
            jobs[number] = one = Job(prompt, options, seed, functools.partial(tell, number))
            worker.add(one)
            del one
        elif number in jobs:
            jobs[number].gone = True
    worker.close()


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@dataclass(eq=False)
class _Process:
    """jobs: by number, where what is told of them goes. why: it ended before it was ready."""

    child: Any
    pipe: Any
    ready: asyncio.Event
    jobs: dict[int, "asyncio.Queue[tuple[str, Any]]"] = field(default_factory=dict)
    alive: bool = True
    why: str = "A decode process ended before it was ready; see its messages."


class Router:
    """Gives each completion to the decode process with the fewest, and starts one again that has died.

    Args:
        model: id or path; None: the bundled one. workers: decode processes. settings: of `DecodeWorker`, with
            `device`, `dtype` and `threads`, and `prefix_bytes`, of a `PrefixStore` of each process (0: none).
    """

    def __init__(self, model: str | None, workers: int, **settings: Any) -> None:
        self.model, self.settings, self.count = model, settings, workers
        self.name = model or "SmolLM2-135M-Instruct"
        self.restarts = self.served = self.failed = 0
        self._processes: list[_Process] = []
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False

    async def start(self, seconds: float = 600.0) -> None:
        """Returns when every decode process has its model."""
        self._loop = asyncio.get_running_loop()
        self._processes = [self._started() for _ in range(self.count)]
        for process in self._processes:
            await asyncio.wait_for(process.ready.wait(), seconds)
            if not process.alive:
                await self.close()
                raise RuntimeError(process.why)

    def _started(self) -> _Process:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(target=decode_process, args=(there, self.model, dict(self.settings)), daemon=True)
        child.start()
        there.close()
        process = _Process(child, here, asyncio.Event())
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: _Process) -> None:
        while (told := _received(process.pipe)) is not None:
            self._call(self._told, process, *told)
        self._call(self._ended, process)

    def _call(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(function, *args)

    def _told(self, process: _Process, number: int, what: str, value: Any) -> None:
        if what == "ready":
            process.ready.set()
        elif what == "failed":
            process.why = value
        elif number in process.jobs:
            process.jobs[number].put_nowait((what, value))

    def _ended(self, process: _Process) -> None:
        process.alive = False
        was_ready = process.ready.is_set()
        process.ready.set()
        for waiting in process.jobs.values():
            waiting.put_nowait(("error", "PeerLost: the decode process of this request ended."))
        if not self._closing and was_ready:
            self.restarts += 1
            self._processes[self._processes.index(process)] = self._started()

    async def complete(
        self, prompt: Any, options: dict[str, Any], seed: int | None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """What a decode process tells of one completion: pieces of text, then how it ended."""
        process = min(self._processes, key=lambda one: (not one.alive, not one.ready.is_set(), len(one.jobs)))
        number, told, what = next(self._numbers), asyncio.Queue[tuple[str, Any]](), ""
        process.jobs[number] = told
        try:
            await process.ready.wait()  # one that loads its model reads nothing, and a full pipe would stop this loop
            process.pipe.send((number, prompt, options, seed))
            while True:
                what, value = await told.get()
                self.served += what == "done"
                self.failed += what == "error"
                yield what, value
                if what in ("done", "error"):
                    return
        except OSError as error:
            yield "error", f"PeerLost: the decode process ended: {error}"
        finally:
            process.jobs.pop(number, None)
            if what not in ("done", "error"):  # who asked has gone
                with contextlib.suppress(OSError):
                    process.pipe.send((number, None, None, None))

    async def close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.pipe.close()
            process.child.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.child.join, 10)

    def stats(self) -> dict[str, Any]:
        waiting = [len(process.jobs) for process in self._processes]
        return {"served": self.served, "failed": self.failed, "restarts": self.restarts, "waiting": waiting}


def application(router: Router) -> Any:
    """The router as an aiohttp application: `/v1/completions`, `/v1/models`, `/health`, `/stats`."""
    from aiohttp import web

    def refused(message: str, status: int = 400) -> Any:
        kind = "invalid_request_error" if status == 400 else "server_error"
        return web.json_response({"error": {"message": message, "type": kind}}, status=status)

    def choice(text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}

    async def completions(request: Any) -> Any:
        try:
            prompt, options, seed, streams = asked(await request.json(), router.name)
        except Refused as error:
            return refused(str(error))
        except (ValueError, LookupError, RecursionError) as error:  # bytes that are no text, a charset that is none
            return refused(f"The body is no JSON: {error}.")
        head = {"id": f"cmpl-{time.time_ns():x}", "object": "text_completion", "created": int(time.time()),
                "model": router.name}  # fmt: skip
        async with contextlib.aclosing(router.complete(prompt, options, seed)) as told:
            async for what, value in told:
                if what == "error":
                    return refused(value, 400 if value.startswith("Refused") else 503)
                if streams:
                    return await _streamed(web, request, head, (what, value), told, choice)
                if what == "done":
                    count = len(value["ids"])
                    usage = {"prompt_tokens": value["prompt_tokens"], "completion_tokens": count,
                             "total_tokens": value["prompt_tokens"] + count}  # fmt: skip
                    choices = [choice(value["text"], value["finish"])]
                    return web.json_response({**head, "choices": choices, "usage": usage})
        return refused("The completion did not end.", 503)

    async def models(request: Any) -> Any:
        return web.json_response({"object": "list", "data": [{"id": router.name, "object": "model"}]})

    async def health(request: Any) -> Any:
        return web.json_response({"status": "ok"})

    async def stats(request: Any) -> Any:
        return web.json_response(router.stats())

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([
        web.post("/v1/completions", completions), web.get("/v1/models", models), web.get("/health", health),
        web.get("/stats", stats),
    ])  # fmt: skip

    async def running(app: Any) -> AsyncIterator[None]:
        await router.start()
        yield
        await router.close()

    app.cleanup_ctx.append(running)
    return app


async def _streamed(
    web: Any, request: Any, head: dict[str, Any], first: tuple[str, Any], told: AsyncIterator[tuple[str, Any]],
    choice: Any,
) -> Any:  # fmt: skip
    """Server-sent events, as OpenAI's clients read them, of `first` and what is told after it."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await answer.prepare(request)
    said, skip = 0, 0
    what, value = first

    async def send(value: Any) -> None:
        await answer.write(f"data: {json.dumps(value)}\n\n".encode())

    with contextlib.suppress(ConnectionResetError):  # the client has gone
        while True:
            if what == "again":  # it is decoded anew elsewhere: what the client has is not said twice
                skip, said = max(skip, said), 0
            elif what == "text":
                new = value[max(0, skip - said) :] if said < skip else value
                said += len(value)
                if new:
                    await send({**head, "choices": [choice(new, None)]})
            elif what == "error":
                await send({"error": {"message": value, "type": "server_error"}})
            else:
                await send({**head, "choices": [choice("", value["finish"])]})
            if what in ("done", "error"):
                break
            what, value = await anext(told)
        await answer.write(b"data: [DONE]\n\n")
    return answer


def parse_address(text: str) -> Address:
    """HOST:PORT. Raises ConfigError."""
    from ..config import ConfigError

    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"The address {text!r} is not allowed: use HOST:PORT, such as 127.0.0.1:7000.")
    return host.strip("[]"), int(port)


def addresses(texts: Sequence[str]) -> list[Address]:
    return [parse_address(text) for text in texts]
