"""KV that moves in an environment gap, to the worker that a trajectory was placed on anew (Heddle 5.3).

Guarantees: what was sent is known to the router, so that the next turn finds it; a move that fails, or that takes longer than
``rollout.kv_transfer.limit``, is an answer and an event like any other (:mod:`orchestrator.proxy.kv_moves`), and the
prefix is computed anew. Contexts are remembered of the trajectories that had a turn last, so many as a fleet has in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.policies.routing.turn_routing import TurnRouter
from orchestrator.proxy.kv_moves import KvMoves
from orchestrator.proxy.worker_state import WorkerState


class GapMover:
    """A :class:`~orchestrator.placement.placer.Mover` over the workers' own ports."""

    def __init__(self, kv: KvMoves, states: Sequence[WorkerState], router: TurnRouter) -> None:
        self._kv, self._lanes, self._router = kv, states, router
        kv.remember()

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        """See the protocol."""
        return self._kv.expected(self._lanes[source], self._lanes[target], tokens)

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        """See the protocol. Never raises: what went wrong is an event."""
        life = self._lanes[target].lives
        arrived = await self._kv.bring(trajectory, self._lanes[source], self._lanes[target])
        if arrived and self._lanes[target].lives == life:
            self._router.brought(trajectory, target)
            return True
        return False
