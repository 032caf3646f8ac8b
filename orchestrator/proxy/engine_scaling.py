"""Engines that are added to a run and taken away while it goes on: the rollout pool grows and shrinks by itself, apart from the
environments and the rewards (RollArt 5.2).

Guarantees, beside those of :class:`orchestrator.proxy.membership.Membership`: nothing changes beside a weight update; an engine
that does not come up costs nothing, and is tried again after ``PAUSE`` seconds; one that is taken away leaves no process, its
devices are free for others, and the next one of its number is placed anew. What is started at once is started side by side. Of
those that are taken away the dead go first, then the newest. An engine that failed too often counts as one that is there: it is
not replaced by itself, which would make of its limit none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from orchestrator.api import ManagedWorker, PartLost, PlacedWorker
from orchestrator.config.rollout_keys import RolloutSection
from orchestrator.events import EventLog
from orchestrator.policies.routing.turn_routing import ANY, Seat
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.worker_state import LOST, WorkerState

_EVERY = 1.0  # seconds between two looks
PAUSE = 30.0


class EngineSource(Protocol):
    """Where a run's own engines come from (:mod:`orchestrator.runtime.own_engines`)."""

    def make(self, number: int) -> ManagedWorker:
        """The engine ``vllm-number``, not started."""

    async def let_go(self, worker: ManagedWorker) -> None:
        """End its process, and give its devices back."""


class EngineScaling:
    """Over the own engines of a proxy. :meth:`want` says how many, :meth:`run` sees to it."""

    def __init__(
        self,
        source: EngineSource,
        members: Membership,
        events: EventLog,
        rollout: RolloutSection,
        caps: Callable[[str], int] = lambda name: 0,
    ) -> None:
        """``caps``: turns that an engine of this name may have at once, 0: any number."""
        self._source, self._members, self._events, self._rollout = source, members, events, rollout
        self._caps = caps
        self._wanted = [group.count for group in rollout.engines] or [rollout.workers]
        self._coming: dict[int, asyncio.Task[None]] = {}  # by number
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._rest = [0.0] * len(self._wanted)  # when a group may try again

    def want(self, group: int, engines: int) -> None:
        """So many of a group."""
        self._wanted[group], self._rest[group] = engines, 0.0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(_EVERY)
                if not self._members.proxy.suspended and self._members.proxy.version >= 0:
                    for group in range(len(self._wanted)):
                        self._settle(group)
        finally:
            tasks = [*self._coming.values(), *self._leaving.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _settle(self, group: int) -> None:
        """Begin what brings a group to its size."""
        there = {number: state for number, state in self._states(group) if number not in self._leaving}
        mine = [number for number in self._coming if self._rollout.group_of(number) == group]
        coming = [number for number in mine if not self._coming[number].cancelling()]  # else it is being let go
        more = self._wanted[group] - len(there) - len(coming)
        if more > 0 and asyncio.get_running_loop().time() >= self._rest[group]:
            for number in self._free_numbers(group, more):
                self._begin(self._coming, number, self._add(number))
        for number in sorted(coming, reverse=True)[: max(0, -more)]:
            self._coming[number].cancel()
            more += 1
        for number in sorted(there, key=lambda one: (there[one].alive, -one))[: max(0, -more)]:
            self._begin(self._leaving, number, self._remove(number, there[number]))

    def _states(self, group: int) -> Iterator[tuple[int, WorkerState]]:
        """The engines of a group that the run has, by number."""
        for state in self._members.proxy.states:
            if not (state.borrowed or state.parked):
                number = int(state.worker.name.removeprefix("vllm-"))
                if self._rollout.group_of(number) == group:
                    yield number, state

    def _free_numbers(self, group: int, count: int) -> list[int]:
        taken = {number for number, _ in self._states(group)} | self._coming.keys() | self._leaving.keys()
        found: list[int] = []
        number = 0
        while len(found) < count:
            if number not in taken and self._rollout.group_of(number) == group:
                found.append(number)
            number += 1
        return found

    def _begin(self, tasks: dict[int, asyncio.Task[None]], number: int, steps: Coroutine[Any, Any, None]) -> None:
        tasks[number] = task = asyncio.create_task(steps, name=f"scaling vllm-{number}")

        def ended(done: asyncio.Task[None]) -> None:
            del tasks[number]
            if not done.cancelled() and (error := done.exception()) is not None:
                self._members.proxy.note_fault(f"scaling vllm-{number}", repr(error))

        task.add_done_callback(ended)

    async def _add(self, number: int) -> None:
        loop, proxy = asyncio.get_running_loop(), self._members.proxy
        begun, worker = loop.time(), self._source.make(number)
        try:
            try:
                placed = worker.hardware if isinstance(worker, PlacedWorker) else ""
                hardware = placed or self._rollout.routing.hardware.get(worker.name, ANY)
                state = await self._members.take_worker(worker, Seat(hardware, self._caps(worker.name), False))
            except BaseException:
                await self._source.let_go(worker)
                raise
        except PartLost as error:
            proxy.on_fatal(error)
        except (*LOST, TimeoutError) as error:
            self._rest[self._rollout.group_of(number)] = loop.time() + PAUSE
            proxy.note_fault(f"scaling {worker.name}", f"it did not come up: {error!r}")
        else:
            self._say(state, "added", loop.time() - begun)

    async def _remove(self, number: int, state: WorkerState) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            moved = await self._members.give_back(state)
        finally:
            await self._source.let_go(state.worker)
        self._say(state, "removed", loop.time() - begun, moved)

    def _say(self, state: WorkerState, what: str, seconds: float, moved: int = 0) -> None:
        group = self._rollout.group_of(int(state.worker.name.removeprefix("vllm-")))
        engines = sum(1 for _ in self._states(group))
        name = state.worker.name
        self._events.emit("scaled", worker=name, what=what, engines=engines, requests=moved, seconds=round(seconds, 3))
