"""A proxy whose borrowed workers come and go while a run goes on (ROSE 4.3): servers are taken and given back between two turns.

Guarantees, beside those of :class:`orchestrator.proxy.gateway.LLMProxy`: a worker that is taken gets the present
weights before its first request; one that is given back gets nothing more, and what it had goes on elsewhere with the
tokens that it has. What a borrowed worker hands back by itself (its pages or its time were taken, ROSE 4.1) is counted,
and told as an event ``handed_back``: how many requests, and how many tokens they kept.

Whoever places trajectories (:class:`Fleet`) hears of every worker that takes turns from now on, before it gets one, and of every
worker that takes none any more, given back or lost, before anything that it had is sent again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from orchestrator.api import BorrowedWorker, Completion, GenerationRequest
from orchestrator.policies.routing.turn_routing import Seat
from orchestrator.proxy.gateway import _LOST, LLMProxy
from orchestrator.proxy.worker_state import Lane, Pending


class Fleet(Protocol):
    """Who is told that workers come and leave, by their place."""

    def came(self, worker: int) -> None:
        """It takes turns from now on."""

    def left(self, worker: int) -> None:
        """It takes none any more."""


class ElasticProxy(LLMProxy):
    """An LLMProxy, with :meth:`take` and :meth:`give_back`. ``fleet``: who hears of workers, None: nobody."""

    fleet: Fleet | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._most_turns = 0
        self._handed_back: dict[str, list[int]] = {}  # server -> requests, tokens, not told yet

    async def generate(self, request: GenerationRequest) -> Completion:
        """See :meth:`LLMProxy.generate`."""
        self._most_turns = max(self._most_turns, len(self._pending) + 1)
        return await super().generate(request)

    def peak(self) -> int:
        """The most turns that were under way or waited at once since this was last asked."""
        most, self._most_turns = self._most_turns, len(self._pending)
        return max(most, self._most_turns)

    def dedicated_turns(self) -> int | None:
        """That the run's own workers may have at once; None: any number."""
        caps = [self.router.cap(lane.index) for lane in self.lanes if not lane.borrowed and not lane.removed]
        return sum(caps) if all(caps) else None

    @property
    def patience(self) -> float:
        """Seconds that it waits for a borrowed worker when there is no other, as for one that is away."""
        return 4 * self._stall_timeout

    @property
    def updating(self) -> bool:
        """Whether the workers stand still for new weights: no time to exchange any."""
        return self._suspended

    def lane_of(self, name: str) -> Lane | None:
        """Of the borrowed server of this name, taken or not."""
        return next((lane for lane in self.lanes if lane.borrowed and lane.worker.name == name), None)

    async def take(self, worker: BorrowedWorker, seat: Seat) -> Lane:
        """Take up a server, under the name of one that was given back or a new one, and open it. Raises what ``restart`` and the
        commands of a weight update raise, and TimeoutError; then it is as if it had not been taken."""
        lane = self.lane_of(worker.name)
        if lane is None:
            lane = Lane(worker, self.router.join(seat), alive=False, parked=True)
            self.lanes.append(lane)
            if self._heartbeat.caps is not None:
                self._heartbeat.caps.join(lane)
        assert lane.parked
        if lane.removed:  # it was given up, and is there after all
            lane.removed = False
            self.router.regain(lane.index)
        lane.worker, lane.restarts, lane.full = worker, 0, False
        lane.lives += 1
        try:
            await self._bring_up(lane)
        except BaseException:
            lane.version = -1
            raise
        lane.parked = False
        self._open_lane(lane)
        lane.wake.set()
        self._dispatch()
        return lane

    async def give_back(self, lane: Lane) -> int:
        """Take its requests away from a server; how many. It is ours no more, and its worker may be closed."""
        if lane.reviver is not None and not lane.reviver.done():
            lane.reviver.cancel()
            await asyncio.gather(lane.reviver, return_exceptions=True)
        moved, lane.lent = len(lane.sent), True  # nothing is sent there, and nobody brings it up anew
        self._seat(lane)
        self._left(lane)
        try:
            if lane.alive:
                async with asyncio.timeout(self._stall_timeout), lane.sending:
                    moved = await self._move_requests(lane)
        except (*_LOST, TimeoutError) as error:
            self.note_fault(f"worker {lane.worker.name}", f"its requests were not given back: {error}")
        finally:
            lane.moving = lane.lent = lane.alive = False
            lane.parked, lane.version = True, -1
            lane.lives += 1
            self.router.close(lane.index, cache_lost=True)
            for pending in lane.give_up():
                self._requeue(pending)
            self._dispatch()
        return moved

    def _open_lane(self, lane: Lane) -> None:
        if not lane.parked:
            super()._open_lane(lane)
            if self.fleet is not None:
                self.fleet.came(lane.index)

    def _lost(self, lane: Lane, why: str) -> None:
        if lane.alive:
            self.router.close(lane.index)
            self._left(lane)
        super()._lost(lane, why)

    def _left(self, lane: Lane) -> None:
        if self.fleet is not None:
            self.fleet.left(lane.index)

    def _move(self, pending: Pending, part: Completion) -> None:
        if (lane := pending.worker) is not None and lane.borrowed and not lane.moving:
            if not self._handed_back:
                asyncio.get_running_loop().call_soon(self._tell_handed_back)
            counts = self._handed_back.setdefault(lane.worker.name, [0, 0])
            counts[0] += 1
            counts[1] += len(part.token_ids)
        super()._move(pending, part)

    def _tell_handed_back(self) -> None:
        """One event for all that came at once."""
        told, self._handed_back = self._handed_back, {}
        for name, (requests, tokens) in told.items():
            self._events.emit("handed_back", worker=name, requests=requests, tokens=tokens)
