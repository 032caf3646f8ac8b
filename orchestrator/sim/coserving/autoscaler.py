"""Bidirectional autoscaling of a serving cluster in virtual time: what ROSE 6.1 compares with, in ServerlessLLM's place.

While serving's load is low, engines stop and their devices are rollouts' alone; when it rises, rollouts are evicted and the model
is loaded again, which takes ``reload`` seconds. Reactive, as such autoscalers are: by how busy the engines of a role were in the
last ten seconds. ASSUMED, since none of it is printed: the thresholds below.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.sim.coserving.serving_engine import Role, ServingEngine
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker

if TYPE_CHECKING:
    from orchestrator.sim.coserving.serving_cluster import ServingCluster

LOOK = 1.0  # seconds between two looks
WINDOW = 10  # looks that count
UP, DOWN = 0.6, 0.3  # share of the time that engines of a role compute
CALM = 30.0  # seconds since the last change of a role, before an engine of it stops


class Autoscaler:
    """Of one cluster; ``workers``: the rollout worker of each engine, in order. One engine of each role always serves."""

    def __init__(self, cluster: ServingCluster, workers: Sequence[BorrowedSimWorker], reload: float) -> None:
        self._cluster, self._reload = cluster, reload
        self._worker = {engine.name: worker for engine, worker in zip(cluster.engines, workers, strict=False)}
        self._busy: dict[Role, deque[float]] = {
            "prefill": deque(maxlen=WINDOW + 1),
            "decode": deque(maxlen=WINDOW + 1),
        }
        self._changed: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self._loading: dict[str, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.changes = 0

    def start(self) -> None:
        """All engines serve; no device is rollouts' yet."""
        for worker in self._worker.values():
            worker.lose_device()
        self._review_load()

    def _stopped(self, engine: ServingEngine) -> None:
        """It serves no more: its device is rollouts' alone."""
        self._worker[engine.name].gain_device()

    def _wanted(self, engine: ServingEngine) -> None:
        """It is about to load its model."""
        self._worker[engine.name].lose_device()

    def _serves(self, engine: ServingEngine) -> None:
        """It has."""

    def close(self) -> None:
        """The simulation ends."""
        for timer in [self._timer, *self._loading.values()]:
            if timer is not None:
                timer.cancel()

    def _review_load(self) -> None:
        for role in ("prefill", "decode"):
            self._scale(role)
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._review_load)

    def _scale(self, role: Role) -> None:
        now = asyncio.get_running_loop().time()
        mine = [engine for engine in self._cluster.engines if engine.role == role]
        up = [engine for engine in mine if engine.up]
        seen = self._busy[role]
        seen.append(sum(engine.busy_seconds for engine in mine))
        busy = (seen[-1] - seen[0]) / (max(1, len(seen) - 1) * LOOK * len(up))
        down = [engine for engine in mine if not engine.up and engine.name not in self._loading]
        if busy > UP and down:
            self._reclaim_device(down[0])
            self._changed[role] = now
        elif busy < DOWN and len(up) > 1 and now - self._changed[role] >= CALM and not self._loading:
            self._lend_device(min(up, key=lambda engine: engine.load))
            self._changed[role] = now

    def _lend_device(self, engine: ServingEngine) -> None:
        if engine.name not in self._worker:
            return
        self.changes += 1
        self._cluster.requeue_requests(engine, engine.stop())
        self._stopped(engine)

    def _reclaim_device(self, engine: ServingEngine) -> None:
        self.changes += 1
        self._wanted(engine)

        def ready() -> None:
            del self._loading[engine.name]
            engine.start()
            self._serves(engine)

        self._loading[engine.name] = asyncio.get_running_loop().call_later(self._reload, ready)
