"""Workers that come and go while a run goes on: borrowed ones (ROSE 4.3) are taken and given back between two turns, own engines
are added and taken away (:mod:`orchestrator.proxy.engine_scaling`).

Guarantees, beside those of :class:`orchestrator.proxy.gateway.LLMProxy`: a worker that is taken gets the present
weights before its first request; one that is given back gets nothing more, and what it had goes on elsewhere with the
tokens that it has.
"""

from __future__ import annotations

from orchestrator.api import ManagedWorker
from orchestrator.policies.routing.turn_routing import Seat
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerState


class Membership:
    """Over the workers of a proxy."""

    def __init__(self, proxy: LLMProxy) -> None:
        self.proxy = proxy

    def dedicated_turns(self) -> int | None:
        """That the run's own workers may have at once; None: any number."""
        proxy = self.proxy
        own = [state for state in proxy.states if not (state.borrowed or state.removed or state.parked)]
        caps = [proxy.router.cap_of(state.index) for state in own]
        return sum(caps) if all(caps) else None

    @property
    def patience(self) -> float:
        """Seconds that the proxy waits for a borrowed worker when there is no other, as for one that is away."""
        return self.proxy.limits.restart

    def find_worker(self, name: str) -> WorkerState | None:
        """Of the worker of this name, taken or not."""
        return next((state for state in self.proxy.states if state.worker.name == name), None)

    async def take_worker(self, worker: ManagedWorker, seat: Seat) -> WorkerState:
        """Take up a worker, under the name of one that was given back or a new one, and open it. Raises what ``restart`` and the
        commands of a weight update raise, and TimeoutError; then it is as if it had not been taken."""
        proxy, state = self.proxy, self.find_worker(worker.name)
        if state is None:
            state = WorkerState(worker, proxy.router.add_worker(seat), alive=False, parked=True)
            proxy.states.append(state)
            if state.borrowed:
                proxy.caps.join(state)
        assert state.parked
        if state.removed:  # it was given up, and is there after all
            state.removed = False
            proxy.router.readmit_worker(state.index)
        proxy.tell_stranded(proxy.router.reseat_worker(state.index, seat.hardware))  # it may have another class now
        state.have_worker(worker)
        state.full = False
        state.restarts.clear()
        state.lives += 1
        try:
            await proxy.bring_up(state)
        except BaseException:
            state.version = -1
            raise
        state.parked = False
        proxy.open_worker(state)
        state.wake.set()
        proxy.dispatch()
        return state

    async def give_back(self, state: WorkerState) -> int:
        """Take its requests away from a worker; how many. It is ours no more, and may be closed."""
        proxy, state.lent = self.proxy, True  # nothing is sent there, and nobody brings it up anew
        proxy.seat(state)
        proxy.tell_left(state)
        try:
            return await proxy.empty_worker(state, "its requests were not given back", suspend=False)
        finally:
            state.lent, state.parked, state.version = False, True, -1
            state.lives += 1
            proxy.dispatch()
