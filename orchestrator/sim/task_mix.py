"""A workload of several tasks with published distributions: ``[sim.tasks]``.

Guarantees: all draws are functions of the run's seed and of what they are for, as in
:mod:`orchestrator.sim.seeded_draws`, so that two policies are compared on the same workload. Which task a trajectory is
of and how long its prompt's answers tend to be stand in the first two tokens of its first observation, so that
environment, engine and audit know it without knowing of each other; in the third, which batch of prompts it is of (its
stage), where responses grow from batch to batch. Sizes are given in the engine's tokens; here one token stands for
``sim.grain`` of them, rounded at random to either side, so that means are kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from orchestrator.api import Prompt
from orchestrator.config import Config
from orchestrator.config.sim_keys import SimTaskSection
from orchestrator.sim.seeded_draws import END, VOCABULARY, draw_words, lognormal, random_stream

_WORDS = len(VOCABULARY) - 2
_QUANTILES = [NormalDist().inv_cdf((place + 0.5) / _WORDS) for place in range(_WORDS)]


class TaskMix:
    """The tasks of a config, in order."""

    def __init__(self, config: Config) -> None:
        self.names = tuple(config.sim.tasks)
        self.tasks = tuple(config.sim.tasks.values())
        self.grain = config.sim.grain
        self._seed = config.run.seed
        self._batch = config.rollout.groups_per_step
        self._weights = [task.weight for task in self.tasks]
        self._draw = lru_cache(maxsize=1 << 12)(self._response)  # of turns that are sent again; each worker has one
        self.beginning = lru_cache(maxsize=1 << 10)(self._beginning)  # the members of a group have the same

    @property
    def turns_max(self) -> int:
        """Of all tasks."""
        return max(task.turns_max for task in self.tasks)

    @property
    def response_max(self) -> int:
        """Of all tasks, in simulated tokens."""
        return max(-(-task.response_max // self.grain) for task in self.tasks)

    def assign_task(self, key: str) -> str:
        """The task of a prompt."""
        return str(random_stream("task", key).choices(self.names, self._weights)[0])

    def task_named(self, name: str) -> SimTaskSection:
        """A task by name."""
        return self.tasks[self.names.index(name)]

    def simulated_tokens(self, rng: random.Random, tokens: float) -> int:
        """So many tokens of the engine in simulated ones."""
        return max(1, int(tokens / self.grain + rng.random()))

    def batch_stage(self, prompt: Prompt) -> int:
        """The batch that a training prompt is of, as far as a token can say it; 0 where responses do not grow."""
        if not (self.task_named(prompt.task).response_growth and prompt.key.startswith("train-")):
            return 0
        return min(int(prompt.key.rsplit("-", 1)[1]) // self._batch, _WORDS - 1)

    def _beginning(self, name: str, seed: int, stage: int = 0) -> tuple[float | None, tuple[int, ...]]:
        """Of a prompt: seconds that a reset takes, None: no time at all, and the first observation."""
        task, rng = self.task_named(name), random_stream(seed, "reset")
        seconds = self.draw_seconds(task, rng, task.reset_seconds, task.reset_sigma) if task.reset_seconds else None
        return seconds, self.opening(name, rng, stage)

    def opening(self, name: str, rng: random.Random, stage: int = 0) -> tuple[int, ...]:
        """The first observation of a prompt; ``rng`` is the prompt's own."""
        prompt: tuple[int, ...] = (2 + self.names.index(name), 2 + rng.randrange(_WORDS))
        if self.task_named(name).response_growth:
            prompt += (2 + stage,)
        return prompt + (2,) * (self.simulated_tokens(rng, self.task_named(name).prompt_tokens) - len(prompt))

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """What the policy says in a turn, see :mod:`orchestrator.sim.simulated_speech`."""
        number = context[0] - 2
        stage = context[2] - 2 if self.tasks[number].response_growth else 0
        return self._draw(number, context[1] - 2, stage, trajectory_id, turn, limit)

    def _response(
        self, number: int, quantile: int, stage: int, trajectory_id: str, turn: int, limit: int
    ) -> tuple[int, ...]:
        task = self.tasks[number]
        usual = task.response_tokens + stage * task.response_growth
        rng = random_stream(self._seed, "response", trajectory_id, turn)
        own = task.response_sigma * max(0.0, 1.0 - task.prompt_share - task.trajectory_share) ** 0.5
        shared = task.response_sigma * task.prompt_share**0.5
        mean = usual * 2.718281828459045 ** (shared * _QUANTILES[quantile] - shared * shared / 2)
        if task.trajectory_share:  # a stream of its own, so that a turn's own part is drawn as it is without it
            kept = task.response_sigma * task.trajectory_share**0.5
            mean = lognormal(random_stream(self._seed, "trajectory", trajectory_id), mean, kept)
        length = self.simulated_tokens(rng, lognormal(rng, mean, own))
        limit = min(limit, -(-task.response_max // self.grain))
        said = draw_words(rng, min(length, limit))
        return (*said[:-1], END) if length <= limit else said

    def draw_seconds(self, task: SimTaskSection, rng: random.Random, mean: float, sigma: float) -> float:
        """A draw of an environment's time."""
        return max(0.0, rng.gauss(mean, sigma * mean)) if task.normal else lognormal(rng, mean, sigma)
