"""What the simulated policy says: drawn, or of recorded lengths. Engines say it, and the audit knows it."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import Config
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.seeded_draws import draw_response
from orchestrator.sim.task_mix import TaskMix


class Speech:
    """``most``: tokens that a response can have at most, whatever is asked for."""

    def __init__(self, config: Config, traces: EpisodeTraces | None) -> None:
        self._seed = config.run.seed
        self._mean = config.sim.response_tokens_mean
        self._traces = traces
        self._workload = TaskMix(config) if config.sim.tasks and traces is None else None
        self.most = config.sim.response_tokens_max if traces is None else traces.response_max
        if self._workload is not None:
            self.most = self._workload.response_max

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """The tokens of a turn, at most ``limit`` of them. A function of its arguments and of the run's seed."""
        if self._traces is not None:
            return self._traces.response(context, turn, limit)
        if self._workload is not None:
            return self._workload.response(context, trajectory_id, turn, limit)
        return draw_response(self._seed, trajectory_id, turn, self._mean, limit)


class SplitSpeech(Speech):
    """What a policy says whose first token another engine draws: turns that are served in two parts (RollArt 6.3), by the
    production's own :mod:`orchestrator.proxy.prefill_decode`."""

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """See :class:`Speech`. However short ``limit`` is, the first token is that of the longest response."""
        whole = super().response(context, trajectory_id, turn, limit)
        first = super().response(context, trajectory_id, turn, self.most)[0]
        return (first, *whole[1:])


def speech_of(config: Config, traces: EpisodeTraces | None) -> Speech:
    """What the policy of a run says."""
    return (SplitSpeech if config.rollout.disaggregation.enabled else Speech)(config, traces)
