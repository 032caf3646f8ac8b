"""How many turns the borrowed workers of a run may have: as many as the budgets of their devices leave room for (ROSE 4.1, 4.3).

What a borrowed worker has to give is said by its serving neighbours, at any time. Guarantees: one without a budget gets no turn,
and is asked again until it has one; no cap is above the configured one (``rollout.routing.served_cap``; without a cap nothing is
asked, and nothing is limited); a worker that cannot be asked keeps its cap, since whether it lives is the heartbeat's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.api import CommandError, ConfigError, RetryableError
from orchestrator.policies.routing.turn_routing import TurnRouter
from orchestrator.policies.serving.server_borrowing import turns_within
from orchestrator.proxy.worker_state import WorkerState


class BorrowedCaps:
    """Over the workers of a proxy, of which ``states`` are borrowed and have a cap. ``seat``: tells the router anew whether one
    is open; ``dispatch``: sends what waits."""

    def __init__(
        self,
        states: Sequence[WorkerState],
        router: TurnRouter,
        seat: Callable[[WorkerState], None],
        dispatch: Callable[[], None],
        *,
        patience: float,
    ) -> None:
        self._most = {
            state.index: router.cap_of(state.index) for state in states if state.borrowed and router.cap_of(state.index)
        }
        self.states = [state for state in states if state.index in self._most]
        self._router, self._seat, self._dispatch = router, seat, dispatch
        self._patience = patience
        self._contexts: dict[int, float] = {}  # blocks of a turn, when it last had some

    def join(self, state: WorkerState) -> None:
        """One more, whose cap the router knows already."""
        if cap := self._router.cap_of(state.index):
            self._most[state.index] = cap
            self.states.append(state)

    async def refresh_caps(self) -> None:
        """Ask every borrowed worker what it has room for, all at once."""
        changed = await asyncio.gather(*(self._one(state) for state in self.states if state.usable))
        if any(changed):
            self._dispatch()

    async def _one(self, state: WorkerState) -> bool:
        life = state.lives
        try:
            async with asyncio.timeout(self._patience):
                stats = await state.worker.stats()
        except (TimeoutError, RetryableError, CommandError, ConfigError):
            return False
        if state.lives != life or not state.usable:
            return False
        if stats.running:
            self._contexts[state.index] = stats.kv_used / stats.running
        turns = turns_within(stats.kv_capacity, self._contexts.get(state.index, 0.0), self._most[state.index])
        full = turns == 0
        if not full:
            self._router.set_cap(state.index, turns)
        if full != state.full:
            state.full = full
            self._seat(state)
        return True
