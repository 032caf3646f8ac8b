"""How a version gets from the trainer to the rollout workers: over the relay, and straight to the run's own workers.

``weights = "relay"``: the version is published, then every worker fetches it while it generates, stops, loads it, goes on.

``weights = "collective"`` (RollArt 6.3, ROSE 4.2): as soon as a step is trained, the trainer sends the version to the run's
own workers by a collective, which they receive while they generate, and publishes it on the relay at the same time. Those
that received it stop, load it and go on (:meth:`WeightSync.lead`) without waiting for the relay; served workers, workers that
were restarted, and those that did not receive it whole and in time take it from there (:meth:`WeightSync.follow`).

``weights = "nccl"``: the same with vLLM's own weight-transfer engines. Workers only join the trainer beside generation; what it
sends they write into the live weights while they stand still, and nobody compares a digest.

``weights_overlap`` (over the relay): the trainer holds the version, and trains on while it is published and fetched
(:meth:`WeightSync.hold`, :meth:`WeightSync.publish_held`, :meth:`WeightSync.follow`); one version is under way at a time.

Guarantees: a version is one thing: what a worker received has the checksum that the relay publishes, else the worker is brought
up anew. A worker that dies or stalls while it receives costs the time limit at most, and holds up neither the trainer nor the
relay; the groups are then formed anew for the next version, and so they are when workers come or go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

from orchestrator.api import (
    CollectiveTrainer,
    CollectiveWorker,
    CommandError,
    ConfigError,
    HoldingTrainer,
    Meeting,
    PartLost,
    ProcessDied,
    PublishResult,
    RetryableError,
    RunError,
    Trainer,
    UpdateResult,
)
from orchestrator.events import EventLog
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import STORE_AWAY, WorkerState
from orchestrator.transfer.announcement import STOCK_BACKEND

_PAUSE_FIRST, _PAUSE_LIMIT = 1.0, 15.0  # seconds between tries to publish; leases of Mooncake end after 5
# seconds for the first version of a run: what cannot be published then is a mistake, not an outage
_FIRST_PATIENCE = 10.0
_GRACE = 5.0  # seconds over the time limit in which a worker must answer


class TrainerCall(Protocol):
    """A call of the trainer under its time limit; ``what`` is said while it runs."""

    def __call__(self, what: str, call: Coroutine[Any, Any, Any], /) -> Awaitable[Any]: ...


@runtime_checkable
class MortalTrainer(Protocol):
    """A trainer that comes back with what it had published (:mod:`orchestrator.runtime.revived_trainer`)."""

    async def stand_up(self) -> bool:
        """Whether it had died since this was last asked; it is back when this returns."""

    async def life(self) -> int:
        """Which of its lives this is; it is back when this returns."""


class WeightSync:
    """One run's. ``limit``: seconds for the collective to deliver a version; None: everything over the relay. ``patience``:
    seconds that a version which cannot be published is tried again for."""

    def __init__(
        self,
        trainer: Trainer,
        proxy: LLMProxy,
        events: EventLog,
        call: TrainerCall,
        limit: float | None,
        patience: float = 300.0,
    ) -> None:
        self._trainer = trainer
        self._proxy = proxy
        self._events = events
        self._call = call
        self._limit = limit
        self._patience = patience
        if isinstance(trainer, MortalTrainer):
            proxy.trainer_life = trainer.life
        self._members: tuple[
            tuple[int, int], ...
        ] = ()  # (worker, life) of those that received the last version, all well
        self._publishing: asyncio.Task[PublishResult] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._received: dict[int, tuple[int, str]] = {}  # worker -> (its life, content)
        self._content = ""  # of the version that was published last
        self._digested = True  # what was received was; not so by vLLM's own engines
        self.waiting_for = ""

    async def begin_publishing(self, step: int, version: int) -> None:
        """The trainer is at ``version``: publish it, and let it be received meanwhile. Over the relay alone, it is published
        when this returns; else :meth:`finish_publishing` waits for it. Raises RunError when it cannot be published."""
        await self._send(version)
        if self._receiving is None:
            self._content = (await self._publish(step)).content
        else:
            self._proxy.unpublished = version
            self._publishing = asyncio.create_task(self._publish(step), name=f"publish {version}")

    async def finish_publishing(self) -> None:
        """Wait until the version is published. Raises as :meth:`begin_publishing`. Again: nothing."""
        if self._publishing is not None:
            self._content = (await self._publishing).content
            self._publishing = None
            self._proxy.unpublished = -1

    async def hold(self, version: int) -> None:
        """The trainer is at ``version``: fix what :meth:`publish_held` publishes. Raises PartLost."""
        if not isinstance(self._trainer, HoldingTrainer):
            raise ConfigError("rollout.weights_overlap", True, "this trainer cannot hold a version: leave it out")
        try:
            await self._call("hold", self._trainer.hold())
        except RetryableError as error:
            raise PartLost(f"the trainer failed in hold of version {version}: {error}") from error

    async def publish_held(self, step: int) -> None:
        """Until what is held is on the relay; the trainer may train meanwhile. Raises as :meth:`begin_publishing`."""
        self._content = (await self._publish(step, held=True)).content

    async def lead(self, step: int, version: int) -> None:
        """Bring the workers that receive ``version`` from the trainer to it. They stand still only while they load it."""
        if self._receiving is None:
            return
        self.waiting_for = f"weights of version {version} from the trainer"
        try:
            with self._events.stage("prepare", step) as note:
                note.waiting_for = self.waiting_for
                await self._receiving
        finally:
            self.waiting_for = ""
        self._receiving = None
        self._forget_restarted()
        if self._received:
            await self._load(step, version, tuple(self._received))

    async def follow(self, step: int, version: int) -> None:
        """Bring all others to it, from the relay; then say how all workers are."""
        if self._publishing is not None:
            with self._events.stage("wait_train", step) as note:
                note.waiting_for = f"weights of version {version} to be on the relay"
                await self.finish_publishing()
        proxy = self._proxy
        self._forget_restarted()
        for index, (_, content) in self._received.items():
            if self._digested and self._content and content != self._content:
                why = f"received weights of version {version} are not those of the relay: {content}, {self._content}"
                proxy.distrust(index, why)
        self._received = {}
        if proxy.version != version:
            with self._events.stage("prepare", step) as note:
                note.waiting_for = f"weights of version {version} from the relay"
                await self._prepare(version)
            await self._load(step, version)
        elif proxy.behind:
            await self._prepare(version)
            loans = await proxy.take_back()
            self._report(version, [loan.update for loan in loans if loan.update is not None])
        for name, stats in await proxy.stats():
            self._events.emit(
                "worker",
                name=name,
                running=stats.running,
                waiting=stats.waiting,
                kv_used=stats.kv_used,
                kv_capacity=stats.kv_capacity,
                preemptions=stats.preemptions,
                outranked=stats.outranked,
                prefix_queries=stats.prefix_queries,
                prefix_hits=stats.prefix_hits,
                oldest_wait=round(stats.oldest_wait, 3),
                tokens_per_s=round(stats.tokens_per_s, 3),
                version=stats.version,
            )

    async def close(self) -> None:
        """The run ends: stop what is under way."""
        tasks = [task for task in (self._publishing, self._receiving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _prepare(self, version: int) -> None:
        """Workers fetch the version while they generate. While the metadata store is away, or the trainer whose memory it was
        in, they go on doing so: told to load it now, they would stand still, or be taken for dead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        try:
            while (failed := await self._proxy.prepare(version)) and loop.time() < deadline:
                if any(STORE_AWAY in why for why in failed):
                    self.waiting_for = f"the metadata store to come back, for weights of version {version}"
                    await asyncio.sleep(_PAUSE_FIRST)
                elif isinstance(self._trainer, MortalTrainer):
                    self.waiting_for = f"the trainer to come back, with weights of version {version}"
                    if not await self._call("stand_up", self._trainer.stand_up()):
                        return
                else:
                    return
        finally:
            self.waiting_for = ""

    async def _publish(self, step: int, *, held: bool = False) -> PublishResult:
        """A failed publication left nothing behind, so it may be tried again: a full relay frees itself when leases end
        (back-pressure), a server that is away may come back."""
        loop, pause = asyncio.get_running_loop(), _PAUSE_FIRST
        deadline = loop.time() + (self._patience if self._content else min(self._patience, _FIRST_PATIENCE))
        with self._events.stage("publish", step) as note:
            try:
                while True:
                    try:
                        return await self._published(held)
                    except ProcessDied as error:
                        raise PartLost(f"the trainer failed in publish: {error}") from error
                    except RetryableError as error:
                        if loop.time() >= deadline:
                            raise RunError(f"the trainer failed in publish: {error}") from error
                        self.waiting_for = f"the relay to take the version: {str(error).splitlines()[0]}"
                        note.waiting_for = self.waiting_for
                        self._proxy.note_fault("publish", str(error))
                    await asyncio.sleep(min(pause, max(deadline - loop.time(), 0.0)))
                    pause = min(2 * pause, _PAUSE_LIMIT)
            finally:
                if note.waiting_for:
                    self.waiting_for = ""

    async def _published(self, held: bool) -> PublishResult:
        trainer: Any = self._trainer
        result: PublishResult = await self._call("publish", trainer.publish_held() if held else trainer.publish())
        return result

    async def _send(self, version: int) -> None:
        """Form the groups and let the workers receive, where there is somebody to send to."""
        states = [state for state in self._proxy.states if state.usable and isinstance(state.worker, CollectiveWorker)]
        if self._limit is None or not states or not isinstance(self._trainer, CollectiveTrainer):
            return
        members = tuple((state.index, state.lives) for state in states)
        receivers = sum(_ranks(state) for state in states)
        sending = self._trainer.send(receivers, self._limit, members != self._members)
        self._members = ()
        try:
            meetings: tuple[Meeting, ...] = await self._call("send", sending)
            self._digested = any(meeting.backend != STOCK_BACKEND for meeting in meetings)
        except RetryableError as error:
            self._proxy.note_fault("send", str(error))
            return
        self._receiving = asyncio.create_task(
            self._receive(version, states, meetings, members), name=f"receive {version}"
        )

    async def _receive(
        self,
        version: int,
        states: Sequence[WorkerState],
        meetings: Sequence[Meeting],
        members: tuple[tuple[int, int], ...],
    ) -> None:
        begun, limit = self._events.time(), self._limit or 0.0

        async def one(state: WorkerState, place: int) -> None:
            life, why = state.lives, ""
            try:
                async with asyncio.timeout(limit + _GRACE):
                    worker: Any = state.worker
                    self._received[state.index] = life, await worker.receive(version, meetings, place, limit)
            except (RetryableError, CommandError) as error:
                why = str(error)
            except TimeoutError:
                why = f"no answer for {limit + _GRACE:g} s"
            if why:
                self._proxy.note_fault(f"receive {state.worker.name}", why)

        places = [1 + sum(_ranks(other) for other in states[:index]) for index in range(len(states))]
        await asyncio.gather(*(one(state, place) for state, place in zip(states, places, strict=True)))
        if len(self._received) == len(states):
            self._members = members
        seconds = round(self._events.time() - begun, 6)
        self._events.emit("collective", version=version, workers=len(self._received), of=len(states), seconds=seconds)

    async def _load(self, step: int, version: int, only: Sequence[int] | None = None) -> None:
        """Steps 2 to 4 of RollArt 6.2, on all workers or on some."""
        proxy, events = self._proxy, self._events
        with events.stage("suspend", step) as note:
            note.waiting_for = "the engine step in progress"
            await proxy.suspend(only)
        with events.stage("update", step) as note:
            note.waiting_for = f"weights of version {version} to be loaded"
            results = await proxy.update(version, only)
        with events.stage("resume", step):
            await proxy.resume(only)
        self._report(version, results)

    def _report(self, version: int, results: Sequence[UpdateResult]) -> None:
        for result in results:
            seconds, preempted = result.seconds, result.preempted
            self._events.emit("update", version=version, bytes=result.bytes, seconds=seconds, preempted=preempted)
            if result.past_cache:
                self._proxy.note_fault("site_cache", f"weights of version {version}: {result.past_cache}")

    def _forget_restarted(self) -> None:
        """A worker that was brought up anew has nothing of what it received."""
        states = self._proxy.states
        kept = {
            index: got
            for index, got in self._received.items()
            if states[index].usable and states[index].lives == got[0]
        }
        self._received = kept


def _ranks(state: WorkerState) -> int:
    worker: Any = state.worker
    return int(worker.ranks)
