"""Simulated workers of turns that are served in two parts (RollArt 6.3): :mod:`orchestrator.proxy.prefill_decode` on
virtual time.

The proxy is the production one: it sends a turn's context and one token to a worker of the prefill class, has the KV copied to
one of the decode class (:meth:`SimWorker.fetch_kv`, at the link's rate), and the rest of the turn there. That the two say
together what one would have said is :mod:`orchestrator.sim.movable_worker`; here is what it needs: the first token of a
turn does not depend on how many were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.proxy.router_setup import planned_router
from orchestrator.sim.movable_worker import MovableSimWorker, TurnMoves
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.simulated_cluster import fleet
from orchestrator.sim.simulated_speech import Speech
from orchestrator.sim.simulated_worker import SimWorker


class SplitSpeech(Speech):
    """What a policy says whose first token another engine draws."""

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """See :class:`Speech`. However short ``limit`` is, the first token is that of the longest response."""
        whole = super().response(context, trajectory_id, turn, limit)
        first = super().response(context, trajectory_id, turn, self.most)[0]
        return (first, *whole[1:])


def speech_of(config: Config, traces: EpisodeTraces | None) -> Speech:
    """What the policy of a run says."""
    return (SplitSpeech if config.rollout.disaggregation.enabled else Speech)(config, traces)


def check_disaggregation(config: Config) -> None:
    """Raises ConfigError where the two parts of a turn cannot be played."""
    if not config.rollout.disaggregation.enabled:
        return
    if config.sim.grain > 1:
        fix = (
            "a turn's first token is made apart, and would stand for several: set it to 1, or leave out disaggregation"
        )
        raise ConfigError("sim.grain", config.sim.grain, fix)
    classes = fleet(config)
    names, borrowed = [f"sim-{index}" for index in range(len(classes))], [False] * len(classes)
    planned_router(config.rollout.routing, names, classes, borrowed, config.rollout.disaggregation)


def disaggregated(config: Config) -> Callable[..., SimWorker] | None:
    """Makes the workers of a life whose turns are served in two parts; None: they are not."""
    return partial(MovableSimWorker, moves=TurnMoves()) if config.rollout.disaggregation.enabled else None
