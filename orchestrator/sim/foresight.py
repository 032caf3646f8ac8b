"""What the simulator has in place of the predictor's process and of a profile of the engines.

The predictor is the run's own policy, asked with the latency that Heddle printed; its oracle plays an episode to its end in its
head, as environments and speech are functions of what they are asked.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from orchestrator.config import Config
from orchestrator.foresight import make_predictor
from orchestrator.parts import Parts
from orchestrator.policies.features import Progress
from orchestrator.policies.placement import Speed
from orchestrator.policies.prediction import Forecast, LengthPredictor, Outcome
from orchestrator.sim.cluster import engine_costs, kv_bytes
from orchestrator.sim.draws import stream
from orchestrator.sim.worker import SimWorker
from orchestrator.sim.workload import Workload


def equip(parts: Parts, config: Config, workers: Sequence[SimWorker]) -> None:
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
    parts.foresight.predictor = LatePredictor(policy, config.sim.prediction_seconds)
    if config.rollout.placement.enabled and config.sim.tasks:
        parts.foresight.speeds = partial(Speeds(config).of_worker, workers)


class Speeds:
    """What the cost model says of so many sequences at once, halfway through what they have before them: the profiler's twin.
    Beyond what slots and KV hold the others wait: whole rounds of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made: dict[tuple[str, int, int, int], Speed] = {}
        tasks = list(config.sim.tasks.values())
        total, grain = sum(task.weight for task in tasks), config.sim.grain
        self._prompt = sum(task.weight * task.prompt_tokens for task in tasks) / total / grain
        heard = sum(task.weight * task.observation_tokens for task in tasks)
        self._grows = 1.0 + heard / sum(
            task.weight * task.response_tokens for task in tasks
        )  # context for a token said
        turns = sum(task.weight * (task.turns_min + task.turns_max) / 2 * task.response_tokens for task in tasks)
        self.tokens = turns / total / grain  # of a trajectory, in the mean

    def of_worker(self, workers: Sequence[SimWorker], worker: int, most: int, tokens: float) -> Speed:
        """See :class:`orchestrator.placing.Placing`."""
        return self.of(workers[worker].hardware, workers[worker].degree, most, tokens)

    def of(self, hardware_class: str, degree: int, most: int, tokens: float) -> Speed:
        """Up to ``most`` sequences on a worker of that many devices, each with so many tokens before it."""
        size, step = 1 << max(0, most - 1).bit_length(), round(2 * math.log2(max(1.0, tokens)))
        found = self._made.get((hardware_class, degree, size, step))
        if found is None:
            costs = engine_costs(self._config, hardware_class, degree)
            context, slots = self._prompt + self._grows * 2 ** (step / 2) / 2, self._config.rollout.engine.max_num_seqs
            if costs.kv_tokens is not None:
                slots = max(1, min(slots, int(costs.kv_tokens / context)))

            def seconds(number: int) -> float:
                running = min(number, slots)
                fixed, growing = costs.decode(running)
                return (fixed + growing * running * context) * max(1.0, number / slots)

            alone = seconds(1)
            table = [seconds(number) / alone for number in range(1, size + 1)]
            found = self._made[hardware_class, degree, size, step] = Speed(alone, tuple(accumulate(table, max)))
        return found


class LatePredictor:
    """Answers after so many seconds."""

    def __init__(self, policy: LengthPredictor, seconds: float) -> None:
        self._policy = policy
        self._seconds = seconds

    async def forecast(self, progress: Progress) -> Forecast:
        """See the protocol."""
        await asyncio.sleep(self._seconds)
        return self._policy.forecast(progress)

    def learn(self, outcome: Outcome) -> None:
        """See the protocol."""
        self._policy.learn(outcome)


class SimOracle:
    """Knows what ``sim.tasks`` will draw, but for contexts that run out of room."""

    def __init__(self, config: Config) -> None:
        self._workload = Workload(config)
        self._said: dict[str, tuple[int, ...]] = {}

    def forecast(self, progress: Progress) -> Forecast:
        """See the protocol."""
        said = self._said.get(progress.trajectory)
        if said is None:
            said = self._said[progress.trajectory] = self._play(progress)
        left = said[progress.turns :]
        tokens = float(sum(left))
        return Forecast(tokens, tokens, tokens, float(len(left)), "oracle")

    def learn(self, outcome: Outcome) -> None:
        """It forgets."""
        self._said.pop(outcome.before[0].trajectory, None)

    def _play(self, progress: Progress) -> tuple[int, ...]:
        workload, seed = self._workload, zlib.crc32(progress.prompt.encode())
        task, said, history, turn = workload.of(progress.task), [], seed, 0
        while True:
            spoken = workload.response(progress.prompt_ids, progress.trajectory, turn, workload.response_max)
            said.append(len(spoken))
            history, turn = zlib.crc32(array("i", spoken).tobytes(), history), turn + 1
            rng = stream(seed, "step", turn, history)
            if task.step_seconds:
                workload.seconds(task, rng, task.step_seconds, task.step_sigma)
            if turn >= task.turns_max or (turn >= task.turns_min and rng.random() * (task.turns_max - turn + 1) < 1.0):
                return tuple(said)
