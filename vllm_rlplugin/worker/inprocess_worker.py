"""``EngineWorker``: the command-driven inference worker of RollArt 6.1 around a stock vLLM engine in this process.

One asyncio task owns the engine: it takes the commands that have arrived, hands the engine the requests that can run soon,
runs one engine step, hands out what finished, and gives the event loop a turn. ADD, ABORT, PRIORITIZE, SUSPEND, UPDATE and
RESUME therefore act between two steps, in the order in which they were given. An ADD itself only writes a line into the
:class:`~vllm_rlplugin.worker.request_book.RequestBook`. Idle or suspended, the task sleeps on an event; it never spins.

Guarantees (``orchestrator.api.RolloutWorker`` says what the methods mean):

* Every added request ends in exactly one completion: finished, aborted (with the tokens it had) or refused by the engine
  (finish reason ``error``). ADD or ABORT of an id that was seen before changes nothing. Completions go to the latest call
  of ``completions``; an earlier one that still waits (its caller was cancelled in another process) returns nothing.
* When ``abort`` returns, the completions of what it named are queued: no further token of them is generated.
* An unexpected exception in the engine makes the worker broken: every pending and later call raises RetryableError with
  the cause. So does a call after ``close``.
* A refused command is a CommandError and changed nothing. A failed UPDATE that did not touch the model (RetryableError)
  leaves the old version, and RESUME goes on with it. One that failed half-way leaves the worker suspended, and RESUME
  refused, until another UPDATE succeeds.
* While memory is released (RELEASE, RECLAIM) requests are accepted and aborted as ever; what needs the device is refused.
  After RECLAIM and RESUME each request goes on as if nothing had been: tokens kept, KV recomputed.
* While weights are fetched or received the engine goes on stepping (PREPARE, RECEIVE), or the worker goes on answering (UPDATE).
* Only plain records of ``orchestrator.api`` cross this border, errors included: all of them survive pickling.

No locks: all methods belong to one event loop. Threads only where KV is handed out (:mod:`vllm_rlplugin.kv.mover`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    GenerationRequest,
    KvMove,
    KvMoved,
    Meeting,
    ReleaseResult,
    RetryableError,
    RunError,
    UpdateResult,
    WorkerStats,
)
from vllm_rlplugin.kv.mover import KvMover, KvOptions
from vllm_rlplugin.options import PluginOptions, is_priority
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine
from vllm_rlplugin.worker.request_book import RequestBook
from vllm_rlplugin.worker.stats_window import StatsWindow
from vllm_rlplugin.worker.update_cycle import POLL_GROWTH

PREPARE_POLL_SECONDS = (
    0.02  # between two looks at weights that are being fetched; the first come sooner, late ones later
)


@dataclass(slots=True)
class _Command:
    """Something to do between two engine steps, and who waits for it."""

    run: Callable[[float], Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """One call of ``update``."""

    version: int


class EngineWorker:
    """Implements :class:`orchestrator.api.RolloutWorker`. Making one blocks for the seconds vLLM needs to start.

    The keywords are those of :class:`~vllm_rlplugin.worker.inprocess_engine.EngineOptions`. Raises ConfigError for
    wrong options and for an untested vLLM.
    """

    def __init__(self, *, name: str = "worker-0", kv: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.name = name
        self._mover: KvMover | None = None
        if kv is not None:  # where this worker hands out KV; needs plugin = {"kv_transfer": true}
            self._mover = KvMover(KvOptions.from_dict(kv), self._kv_command)
        settings = EngineOptions.from_dict(options)
        self.ranks = settings.ranks
        self._engine = InprocessEngine(
            settings,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        if self._mover is not None:
            self._mover.load_carrier()
        plugin = PluginOptions.from_dict(settings.plugin)
        self._book = RequestBook(plugin.lookahead)
        self._held_limit = plugin.max_wait / 2  # seconds; the scheduler counts the wait anew
        self._fed: tuple[int, int] | None = None  # moves in engine and book when there was nobody to feed
        self._commands: deque[_Command] = deque()
        self._finished: deque[Completion] = deque()
        self._reader = 0  # the latest call of completions()
        self._suspended = False
        self._update: _Update | None = None  # the one in progress
        self._closed = False
        self._broken: BaseException | None = None
        self._wake = asyncio.Event()  # something for the engine task to do
        self._news = asyncio.Event()  # something for completions() to return or raise
        self._task: asyncio.Task[None] | None = None
        self._waited: dict[asyncio.Future[Any], None] = {}
        self._window = StatsWindow()

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        self._start()
        if self._book.add(requests, asyncio.get_running_loop().time()):
            self._wake.set()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        self._check()
        if names := self._book.select(
            request_ids, trajectories, groups
        ):  # now: those that are added later are not meant
            await self._run_command(lambda now: self._abort(names, now))

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        self._check()
        for name, priority in priorities.items():
            if not is_priority(priority):
                raise CommandError("invalid_request", f"priority of {name}: {priority!r} is not a 64-bit integer")
        inside = self._book.prioritize(priorities)
        if inside:
            known = [entry.request.trajectory_id for name in inside if (entry := self._book.get(name)) is not None]
            changed = {name: priorities[name] for name in known}
            await self._run_command(lambda now: self._engine.prioritize(changed))

    async def completions(self) -> list[Completion]:
        self._check()
        self._reader += 1
        reader = self._reader
        self._news.set()  # an earlier call that still waits lost its caller, else it would not be repeated
        while not self._finished:
            self._news.clear()
            await self._news.wait()
            self._check()
            if reader != self._reader:
                return []
        completions = list(self._finished)
        self._finished.clear()
        return completions

    async def suspend(self) -> None:
        await self._run_command(self._suspend)

    async def prepare(self, version: int) -> None:
        await self._run_command(lambda now: self._prepare(version))
        await self._wait_fetched(version)

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """See :class:`orchestrator.api.CollectiveWorker`."""

        def begin(_: float) -> None:
            self._require_fetchable(version)
            self._engine.receive(version, meetings, place, limit)

        await self._run_command(begin)
        await self._wait_fetched(version)
        content: str = await self._run_command(lambda now: self._engine.prepared_checksum(version))
        return content

    async def update(self, version: int) -> UpdateResult:
        loop = asyncio.get_running_loop()
        started = loop.time()
        update = _Update(version)
        try:
            await self._run_command(lambda now: self._begin_update(update))
            await self._wait_fetched(version)
            result: UpdateResult = await self._run_command(lambda now: self._engine.update(version))
        finally:
            if self._update is update:
                self._update = None
        return replace(result, seconds=loop.time() - started)

    async def resume(self) -> None:
        await self._run_command(self._resume)

    async def release(self, level: str) -> ReleaseResult:
        """See :class:`orchestrator.api.ReleasingWorker`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        result: ReleaseResult = await self._run_command(lambda now: self._release(level))
        return replace(result, seconds=loop.time() - started)

    async def reclaim(self) -> None:
        """See :class:`orchestrator.api.ReleasingWorker`."""
        await self._run_command(lambda now: self._engine.reclaim())

    async def kv_place(self) -> str:
        """See :class:`orchestrator.api.KvWorker`."""
        self._check()
        return "" if self._mover is None else self._mover.start_listener()

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """See :class:`orchestrator.api.KvWorker`."""
        self._check()
        if self._mover is None:
            return KvMoved(0, 0, 0, 0.0, "off: this worker was started without KV transfer")
        return await self._mover.fetch(move)

    async def _kv_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._run_command(lambda now: self._engine.kv_command(command, arguments))
        return answer

    async def stats(self) -> WorkerStats:
        self._check()
        now = asyncio.get_running_loop().time()
        counts = self._engine.counts()
        return self._window.complete(
            counts,
            now,
            computed=counts.generated + self._engine.computed,
            idle=self._suspended or not self._book,
            held=self._book.held_count,
            oldest=self._book.oldest(),
            suspended=self._suspended,
            version=self._engine.version,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._mover is not None:
            self._mover.close()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._fail_pending()
        self._engine.close()

    async def status(self) -> dict[str, Any]:
        """Which hooks are live in this process, and how this worker is. Answers on a broken worker too."""
        return {
            **self._engine.status(),
            "worker": self.name,
            "suspended": self._suspended,
            "closed": self._closed,
            "broken": "" if self._broken is None else repr(self._broken),
            "weights_unusable": self._engine.unusable,
        }

    async def checksums(self) -> dict[str, str]:
        """Digests of the loaded weights by rank and parameter, for verification."""
        checksums: dict[str, str] = await self._run_command(lambda now: self._checksums())
        return checksums

    # The commands, run by the engine task between two steps.

    def _abort(self, request_ids: list[str], now: float) -> None:
        for request_id in request_ids:
            entry = self._book.get(request_id)
            if entry is not None and not entry.fed:
                timing = CompletionTiming(max(0.0, now - entry.added_at))
                self._deliver([Completion(request_id, (), (), (), "abort", timing)])
            elif (completion := self._engine.abort(request_id, now)) is not None:
                self._deliver([completion])

    def _suspend(self, now: float) -> None:
        if not self._suspended:
            self._deliver(self._engine.pause(now))
            self._suspended = True

    def _release(self, level: str) -> ReleaseResult:
        if not self._suspended:
            raise CommandError("not_suspended", f"release {level}: call suspend first")
        if self._update is not None:
            raise CommandError("update_in_progress", f"release: version {self._update.version} is being loaded")
        return self._engine.release(level)

    def _require_memory(self, what: str) -> None:
        if self._engine.released:
            raise CommandError("released", f"{what}: its memory ({self._engine.released}) is released; reclaim first")

    def _checksums(self) -> dict[str, str]:
        self._require_memory("checksums")
        return self._engine.checksums()

    def _prepare(self, version: int) -> None:
        self._require_fetchable(version)
        self._engine.prepare(version)

    def _require_fetchable(self, version: int) -> None:
        self._require_memory(f"prepare {version}")  # it compares with the live weights, and verifies on the device
        if self._update is not None and self._update.version != version:
            raise CommandError("update_in_progress", f"prepare {version}: {self._update.version} is being loaded")
        self._engine.check_update(version)

    def _begin_update(self, update: _Update) -> None:
        if not self._suspended:
            raise CommandError("not_suspended", f"update to version {update.version}: call suspend first")
        self._require_memory(f"update to version {update.version}")
        if self._update is not None:
            raise CommandError(
                "update_in_progress", f"update to {update.version}: {self._update.version} is being loaded"
            )
        self._engine.check_update(update.version)
        self._engine.prepare(update.version)
        self._update = update

    async def _wait_fetched(self, version: int) -> None:
        """Wait until ``version`` is at hand, while the engine task goes on. Raises RetryableError."""
        pause = PREPARE_POLL_SECONDS / 16
        while True:
            if await self._run_command(lambda now: self._engine.is_prepared(version)):
                return
            await asyncio.sleep(pause)
            pause *= 2 if pause < PREPARE_POLL_SECONDS else POLL_GROWTH

    def _resume(self, now: float) -> None:
        if self._update is not None:
            raise CommandError("update_in_progress", f"resume: version {self._update.version} is being loaded")
        self._require_memory("resume")
        if self._engine.unusable:
            raise CommandError("weights_unusable", f"{self._engine.unusable}; update again, or restart the worker")
        if self._suspended:
            self._engine.resume()
            self._suspended = False

    # The engine task.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._commands:
                self._execute_command(self._commands.popleft(), loop.time())
            if self._suspended or not self._book:
                self._wake.clear()
                await self._wake.wait()
                continue
            now = loop.time()
            self._feed(now)
            if self._engine.has_work:
                self._deliver(self._engine.step(now))
            await asyncio.sleep(0)

    def _feed(self, now: float) -> None:
        """Hand the engine what can run soon, or outranks what waits in it, or was held for too long."""
        best = self._book.best_held
        if best is None:
            return
        moves, overdue = (self._engine.moves, self._book.moves), now - self._held_limit
        oldest = self._book.oldest()
        if moves == self._fed and oldest is not None and oldest >= overdue:
            return
        ahead, free = self._engine.queue_room(best)
        fed = self._book.next_to_feed(ahead, free, None, overdue=overdue)
        self._fed = None if fed else moves
        for entry in fed:
            refused = self._engine.add(entry.request, entry.added_at)
            if refused is not None:
                self._deliver([refused])

    def _execute_command(self, command: _Command, now: float) -> None:
        if command.done.done():
            return  # its caller went away before it began
        try:
            result = command.run(now)
        except (RetryableError, CommandError) as error:  # told to the caller; anything else ends the engine task
            command.done.set_exception(error)
        else:
            command.done.set_result(result)

    def _deliver(self, completions: list[Completion]) -> None:
        if completions:
            for completion in completions:
                self._book.finish(completion.request_id)
            self._finished.extend(completions)
            self._news.set()

    async def _run_command(self, run: Callable[[float], Any]) -> Any:
        self._check()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waited[done] = None
        self._post_command(_Command(run, done))
        try:
            return await done
        finally:
            del self._waited[done]

    def _post_command(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()
        self._start()

    def _start(self) -> None:
        if self._task is None:  # the worker may be made outside of its event loop
            self._window.begin(asyncio.get_running_loop().time())
            self._task = asyncio.create_task(self._run(), name=f"{self.name} engine")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._closed:
            self._broken = RunError("the engine task was cancelled") if task.cancelled() else task.exception()
            self._fail_pending()

    def _fail_pending(self) -> None:
        error = self._error()
        for done in self._waited:
            if not done.done():
                done.set_exception(error)
        self._commands.clear()
        self._news.set()

    def _check(self) -> None:
        if self._broken is not None or self._closed:
            raise self._error() from self._broken

    def _error(self) -> RetryableError:
        if self._broken is not None:
            cause = self._broken if isinstance(self._broken, RunError) else repr(self._broken)
            return RetryableError(f"{self.name} is broken: {cause}")
        return RetryableError(f"{self.name} is closed")
