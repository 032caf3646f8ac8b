"""Borrowed workers that come and go while a run goes on (ROSE 4.3): servers are taken and given back between two turns.

Guarantees, beside those of :class:`orchestrator.proxy.gateway.LLMProxy`: a worker that is taken gets the present
weights before its first request; one that is given back gets nothing more, and what it had goes on elsewhere with the
tokens that it has.
"""

from __future__ import annotations

import asyncio

from orchestrator.api import BorrowedWorker
from orchestrator.policies.routing.turn_routing import Seat
from orchestrator.proxy.gateway import LOST, LLMProxy
from orchestrator.proxy.worker_state import Lane


class Membership:
    """Over the borrowed workers of a proxy."""

    def __init__(self, proxy: LLMProxy) -> None:
        self.proxy = proxy

    def dedicated_turns(self) -> int | None:
        """That the run's own workers may have at once; None: any number."""
        proxy = self.proxy
        caps = [proxy.router.cap(lane.index) for lane in proxy.lanes if not lane.borrowed and not lane.removed]
        return sum(caps) if all(caps) else None

    @property
    def patience(self) -> float:
        """Seconds that the proxy waits for a borrowed worker when there is no other, as for one that is away."""
        return 4 * self.proxy.stall_timeout

    def lane_of(self, name: str) -> Lane | None:
        """Of the borrowed server of this name, taken or not."""
        return next((lane for lane in self.proxy.lanes if lane.borrowed and lane.worker.name == name), None)

    async def take_server(self, worker: BorrowedWorker, seat: Seat) -> Lane:
        """Take up a server, under the name of one that was given back or a new one, and open it. Raises what ``restart`` and the
        commands of a weight update raise, and TimeoutError; then it is as if it had not been taken."""
        proxy, lane = self.proxy, self.lane_of(worker.name)
        if lane is None:
            lane = Lane(worker, proxy.router.join(seat), alive=False, parked=True)
            proxy.lanes.append(lane)
            proxy.caps.join(lane)
        assert lane.parked
        if lane.removed:  # it was given up, and is there after all
            lane.removed = False
            proxy.router.regain(lane.index)
        lane.worker, lane.restarts, lane.full = worker, 0, False
        lane.lives += 1
        try:
            await proxy.bring_up(lane)
        except BaseException:
            lane.version = -1
            raise
        lane.parked = False
        proxy.open_worker(lane)
        lane.wake.set()
        proxy.dispatch()
        return lane

    async def give_back(self, lane: Lane) -> int:
        """Take its requests away from a server; how many. It is ours no more, and its worker may be closed."""
        proxy = self.proxy
        if lane.reviver is not None and not lane.reviver.done():
            lane.reviver.cancel()
            await asyncio.gather(lane.reviver, return_exceptions=True)
        moved, lane.lent = len(lane.sent), True  # nothing is sent there, and nobody brings it up anew
        proxy.seat(lane)
        proxy.tell_left(lane)
        try:
            if lane.alive:
                async with asyncio.timeout(proxy.stall_timeout), lane.sending:
                    moved = await proxy.move_requests(lane)
        except (*LOST, TimeoutError) as error:
            proxy.note_fault(f"worker {lane.worker.name}", f"its requests were not given back: {error}")
        finally:
            lane.moving = lane.lent = lane.alive = False
            lane.parked, lane.version = True, -1
            lane.lives += 1
            proxy.router.close(lane.index, cache_lost=True)
            for pending in lane.give_up():
                proxy.requeue(pending)
            proxy.dispatch()
        return moved
