"""What the simulator has in place of the predictor's process.

The predictor is the run's own policy, asked with the latency that Heddle printed; its oracle plays an episode to its end in its
head, as environments and speech are functions of what they are asked.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import partial

from orchestrator.components import Components
from orchestrator.config import Config
from orchestrator.placement.forecast_setup import InProcessPredictor, make_predictor
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthForecast, LengthOutcome, LengthPredictor
from orchestrator.sim.resizable_worker import SimRates
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_cluster import kv_bytes
from orchestrator.sim.simulated_worker import SimWorker
from orchestrator.sim.task_mix import TaskMix


def equip(parts: Components, config: Config, workers: Sequence[SimWorker]) -> None:
    """Give a simulated run its predictor, and what placement knows of workers, where its config asks for them. Raises
    ConfigError."""
    parts.kv_bytes = kv_bytes(config)
    settings = config.rollout.prediction
    if not settings.enabled:
        return
    policy: LengthPredictor
    if settings.predictor == "oracle":
        policy = SimOracle(config)
    else:
        policy = make_predictor(settings, float(parts.task.max_response_tokens), config.run.seed)
    parts.foresight.predictor = InProcessPredictor(policy, config.sim.prediction_seconds)
    if config.rollout.placement.enabled and config.sim.tasks and not config.rollout.placement.profile:
        parts.foresight.rates = partial(SimRates(config).of_worker, workers)


class SimOracle:
    """Knows what ``sim.tasks`` will draw, but for contexts that run out of room."""

    def __init__(self, config: Config) -> None:
        self._workload = TaskMix(config)
        self._said: dict[str, tuple[int, ...]] = {}

    def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        said = self._said.get(progress.trajectory)
        if said is None:
            said = self._said[progress.trajectory] = self._play(progress)
        left = said[progress.turns :]
        tokens = float(sum(left))
        return LengthForecast(tokens, tokens, tokens, float(len(left)), "oracle")

    def learn(self, outcome: LengthOutcome) -> None:
        """It forgets."""
        self._said.pop(outcome.before[0].trajectory, None)

    def _play(self, progress: TrajectoryProgress) -> tuple[int, ...]:
        workload, seed = self._workload, zlib.crc32(progress.prompt.encode())
        task, said, history, turn = workload.task_named(progress.task), [], seed, 0
        while True:
            spoken = workload.response(progress.prompt_ids, progress.trajectory, turn, workload.response_max)
            said.append(len(spoken))
            history, turn = zlib.crc32(array("i", spoken).tobytes(), history), turn + 1
            rng = random_stream(seed, "step", turn, history)
            if task.step_seconds:
                workload.draw_seconds(task, rng, task.step_seconds, task.step_sigma)
            if turn >= task.turns_max or (turn >= task.turns_min and rng.random() * (task.turns_max - turn + 1) < 1.0):
                return tuple(said)
