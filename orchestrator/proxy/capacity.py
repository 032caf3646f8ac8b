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
from orchestrator.proxy.worker_state import Lane


class BorrowedCaps:
    """Over the lanes of a proxy, of which ``lanes`` are borrowed and have a cap. ``seat``: tells the router anew whether a lane
    is open; ``dispatch``: sends what waits."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        router: TurnRouter,
        seat: Callable[[Lane], None],
        dispatch: Callable[[], None],
        *,
        patience: float,
    ) -> None:
        self._most = {lane.index: router.cap(lane.index) for lane in lanes if lane.borrowed and router.cap(lane.index)}
        self.lanes = [lane for lane in lanes if lane.index in self._most]
        self._router, self._seat, self._dispatch = router, seat, dispatch
        self._patience = patience
        self._contexts: dict[int, float] = {}  # blocks of a turn, when it last had some

    def join(self, lane: Lane) -> None:
        """One more, whose cap the router knows already."""
        if cap := self._router.cap(lane.index):
            self._most[lane.index] = cap
            self.lanes.append(lane)

    async def look(self) -> None:
        """Ask every borrowed worker what it has room for, all at once."""
        changed = await asyncio.gather(*(self._one(lane) for lane in self.lanes if lane.usable))
        if any(changed):
            self._dispatch()

    async def _one(self, lane: Lane) -> bool:
        life = lane.lives
        try:
            async with asyncio.timeout(self._patience):
                stats = await lane.worker.stats()
        except (TimeoutError, RetryableError, CommandError, ConfigError):
            return False
        if lane.lives != life or not lane.usable:
            return False
        if stats.running:
            self._contexts[lane.index] = stats.kv_used / stats.running
        turns = turns_within(stats.kv_capacity, self._contexts.get(lane.index, 0.0), self._most[lane.index])
        full = turns == 0
        if not full:
            self._router.recap(lane.index, turns)
        if full != lane.full:
            lane.full = full
            self._seat(lane)
        return True
