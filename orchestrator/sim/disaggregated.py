"""Prefill and decode on different devices, simulated (RollArt 7.4, table 5).

A scenario of the simulator: the orchestrator sends a whole turn to one worker, and that worker has its prompt computed elsewhere.

``sim.prefill`` names engines that prefill only; the workers of the run then decode. Guarantees: a request is prefilled once,
by the engine that holds its trajectory's earlier prompts where one does (prefix cache there, nothing is ever dropped from
it); then the KV that the worker lacks crosses the clusters' link, and the request joins the worker's batch with its context
computed. What a worker loses (preemption, new weights) it prefills again by itself. One request a prefill step, in order of
arrival; transfers do not disturb each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.sim import batch, hardware
from orchestrator.sim.cluster import engine_costs
from orchestrator.sim.costs import LINK_EFFICIENCY, EngineCosts
from orchestrator.sim.worker import SimWorker

CLUSTER_LINK_GB_S = 25.0  # between the classes, a worker: 200 Gbit/s Ethernet (RollArt 7.1)


def check_prefill(config: Config) -> None:
    """Raises ConfigError where ``sim.prefill`` cannot be played."""
    if not config.sim.prefill:
        return
    if config.sim.costs != "roofline":
        fix = "needs a model's KV and its devices: set sim.costs to 'roofline', or leave it out"
        raise ConfigError("sim.prefill", dict(config.sim.prefill), fix)
    if config.rollout.planner.enabled or config.rollout.colocation.enabled:
        fix = "is not played with workers that change or are lent: leave out rollout.planner and rollout.colocation"
        raise ConfigError("sim.prefill", dict(config.sim.prefill), fix)


class PrefillPool:
    """The engines of ``sim.prefill``, those of a life."""

    def __init__(self, config: Config) -> None:
        self._engines: list[EngineCosts] = [
            engine_costs(config, name) for name, count in config.sim.prefill.items() for _ in range(count)
        ]
        self._free = [0.0] * len(self._engines)  # when each has done what it was given
        self._held: dict[str, tuple[int, int]] = {}  # trajectory -> engine, tokens of it whose KV it has
        self._reuse = {task: section.reuse for task, section in config.sim.tasks.items()}
        self._grain = config.sim.grain  # steps of the engine in one decode step; a prefill is one
        self._token_bytes = hardware.model(config.sim.model).kv_bytes * config.sim.grain
        self.busy_seconds = 0.0

    def prefill(self, trajectory: str, context: int, now: float, task: str = "") -> float:
        """When a context is computed, begun not before ``now``."""
        engine, held = self._held.get(trajectory, (-1, 0))
        if engine < 0:
            engine = min(range(len(self._free)), key=self._free.__getitem__)
        costs, tokens = self._engines[engine], max(1, context - held)
        seconds = costs.decode(0)[0] / self._grain + costs.prefill(tokens, tokens * (context - tokens / 2), 0)
        self._free[engine] = max(now, self._free[engine]) + seconds
        self._held[trajectory] = engine, int(max(context, held) * self._reuse.get(task, 1.0))
        self.busy_seconds += seconds
        return self._free[engine]

    def transfer(self, tokens: int) -> float:
        """Seconds for the KV of so many tokens."""
        return tokens * self._token_bytes / (CLUSTER_LINK_GB_S * 1e9 * LINK_EFFICIENCY)


class DecodeWorker(SimWorker):
    """A worker that gets its contexts computed; ``pool``: by whom."""

    def __init__(self, *arguments: Any, pool: PrefillPool, **keywords: Any) -> None:
        self._pool = pool
        super().__init__(*arguments, **keywords)

    def _admit(self, sequence: batch.Sequence) -> None:
        """It joins the batch when its KV is here."""
        loop, incarnation = asyncio.get_running_loop(), self.incarnation
        trajectory, context = sequence.request.trajectory_id, sequence.context
        computed = self._pool.prefill(trajectory, context, loop.time(), sequence.request.task)
        came = computed + self._pool.transfer(max(0, context - self._batch.held(trajectory)))

        def arrive() -> None:
            if incarnation == self.incarnation and not sequence.done:
                self._batch.receive(trajectory, context)
                self._batch.add(sequence)
                self._kick()

        loop.call_at(came, arrive)


def disaggregated(config: Config) -> Callable[..., SimWorker] | None:
    """Makes the workers of a life that has ``sim.prefill``; None: it has none."""
    return partial(DecodeWorker, pool=PrefillPool(config)) if config.sim.prefill else None
