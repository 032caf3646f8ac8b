"""Both ends of turns whose generation is made up: the loop in front of workers (environment managers, ``LLMProxy``, ledger with
its journal on disk, all real), and a worker's process, which speaks the real messages and remembers contexts."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.api import Completion, GenerationRequest, Prompt, Sampling, TokenSequence
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.durable_files import JournalFile
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.transfer.turns import HeldContexts, decode_turns, encode_completions

NEW = 150  # tokens of an answer, and of an observation
VOCABULARY = 50_000
TOKEN = "turn-loop-0123456789"
_GENERATION = 0.02  # seconds

# -- the proxy's side ------------------------------------------------------------------------------------------------------


class TurnLoop:
    """Plays episodes of one task on these workers."""

    def __init__(self, workers: Sequence[HttpWorker], task: Any, folder: Path, step_timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._sinks = [JournalFile(folder / name) for name in ("events.jsonl", "ledger.jsonl")]
        events = EventLog(self._sinks[0], loop.time)
        self._ledger = Ledger(self._sinks[1], events.time)
        self._workers = workers
        self._task = task
        self._failed: asyncio.Future[None] = loop.create_future()
        limits, fatal = WorkerLimits(60.0), self._failed.set_exception
        self._proxy = LLMProxy(workers, events, limits=limits, restarts=0, on_fatal=fatal)
        self._manager = EnvManager(
            task, self._proxy, step_timeout=step_timeout, trajectory_timeout=600.0, is_stale=lambda version: False
        )
        self._playing: asyncio.Future[Any] = loop.create_future()

    async def episode(self, name: str, group: str, seed: int) -> None:
        """One trajectory to its end."""
        self._ledger.start(name, group)
        prompt = Prompt(name, self._task.name, seed, "")
        await self._manager.play(Episode(name, group, prompt, asyncio.get_running_loop().time()), Sampling(NEW))
        self._ledger.end(name, "trained")
        self._proxy.forget(name)

    def start(self, played: Sequence[Awaitable[None]]) -> None:
        """These at once."""
        self._proxy.start()
        self._playing = asyncio.gather(*played)

    async def wait(self, first: Awaitable[Any] | None = None, seconds: float | None = None) -> None:
        """Until ``first``, or all that plays, has ended, or so many seconds have passed. Raises what failed."""
        awaited = [self._failed, self._playing, *([asyncio.ensure_future(first)] if first else [])]
        done, _ = await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()

    def closes(self, ended: int) -> bool:
        """Whether as many were trained on, and nothing is in flight."""
        self._ledger.check()
        return self._ledger.counts.in_flight == 0 and self._ledger.counts.ended["trained"] == ended

    async def close(self) -> None:
        """End proxy and workers."""
        self._playing.cancel()
        await self._proxy.close()
        for worker in self._workers:
            await worker.close()
        for sink in self._sinks:
            sink.close()


@asynccontextmanager
async def turn_loop(workers: Sequence[HttpWorker], task: Any, step_timeout: float) -> AsyncIterator[TurnLoop]:
    """Closed at the end, its files gone."""
    with tempfile.TemporaryDirectory(prefix="rl-coserve-turns-") as folder:
        loop = TurnLoop(workers, task, Path(folder), step_timeout)
        try:
            yield loop
        finally:
            await loop.close()


# -- the worker's process --------------------------------------------------------------------------------------------------


class TurnWorker:
    """The wire's other end, with made-up generation."""

    def __init__(self) -> None:
        self._contexts = HeldContexts()
        self._ready: list[Completion] = []
        self._news = asyncio.Event()
        self._number = 0
        self._batch: list[Completion] = []
        self._headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL), wire.INSTANCE_HEADER: "1"}

    async def turns(self, request: web.Request) -> web.Response:
        requests, digests = self._contexts.take(decode_turns(await request.read()))
        self.begin(requests)
        return web.json_response({"contexts": digests}, headers=self._headers)

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """They came: each ends later by :meth:`finish`."""
        asyncio.get_running_loop().call_later(_GENERATION, self.finish, requests)

    def finish(self, requests: Sequence[GenerationRequest]) -> None:
        """Their answers can be asked for."""
        for request in requests:
            context = TokenSequence.of(request.token_ids)
            said = context[-NEW:]
            self._ready.append(Completion(request.request_id, said, (-0.25,) * len(said), ((0, len(said)),), "length"))
        self._news.set()

    async def completions(self, request: web.Request) -> web.Response:
        if request.query.get("acknowledged") == str(self._number):
            self._batch = []
        if not (self._batch or self._ready) and float(request.query["timeout"]):
            self._news.clear()
            await self._news.wait()
        if not self._batch:  # one that waits for a client that has gone may have made it
            self._batch, self._ready = self._ready[: wire.MAX_COMPLETIONS], self._ready[wire.MAX_COMPLETIONS :]
            self._number += bool(self._batch)
        body = encode_completions(self._number, self._batch)
        return web.Response(body=body, content_type=wire.TURNS_TYPE, headers=self._headers)

    async def other(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({}, headers=self._headers)


async def serve(worker: TurnWorker, host: str = "127.0.0.1") -> None:
    """Says where it listens, and stays until this process's input ends."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(wire.TURNS, worker.turns)
    app.router.add_get(wire.COMPLETIONS, worker.completions)
    app.router.add_route("*", "/{path:.*}", worker.other)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    print(f"http://{host}:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark's process is gone
