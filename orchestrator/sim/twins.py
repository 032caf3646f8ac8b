"""The simulated task, environments, reward and trainer.

Guarantees: an environment is a function of its prompt and of the actions it got, never of the time or of its neighbours;
all durations come from the loop's clock; the trainer keeps the port's contract and checks what it is given with
:class:`orchestrator.sim.run_audit.RunAudit`, so that a wrong batch is found where it arrives. Success rises with the version that
wrote the first token, by a fixed curve: the twins show *when* things happen, they do not learn.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.api import (
    EnvironmentTemplate,
    Meeting,
    Observation,
    Prompt,
    PublishResult,
    RetryableError,
    StepResult,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    TrajectoryError,
)
from orchestrator.config import Config
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts, CaseTime
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.seeded_draws import END, PAD, VOCABULARY, lognormal, random_stream
from orchestrator.sim.simulated_cluster import trainer_costs
from orchestrator.sim.simulated_worker import MODEL_BYTES, SimWeights
from orchestrator.sim.task_mix import TaskMix

TASK = "sim"
HELDOUT_PROMPTS = 1000
_PROMPT_TOKENS = (8, 24)  # of the first observation; those after it have a quarter
_SKILL_START, _SKILL_END, _SKILL_VERSIONS = 0.1, 0.9, 40.0


class SimTask:
    """A multi-turn task. ``open_environments`` counts those that were created and not closed. With ``traces`` a prompt is a
    recorded group, and the k-th environment that is reset to it plays the group's k-th member."""

    name = TASK
    vocabulary: Sequence[str] = VOCABULARY
    pad_id = PAD
    end_id = END

    def __init__(self, config: Config, traces: EpisodeTraces | None = None) -> None:
        self.costs = config.sim
        self.traces = traces
        self.max_turns = config.sim.turns_max if traces is None else traces.turns_max
        self.max_response_tokens = config.sim.response_tokens_max if traces is None else traces.response_max
        self.workload = TaskMix(config) if config.sim.tasks and traces is None else None
        if self.workload is not None:
            self.max_turns, self.max_response_tokens = self.workload.turns_max, self.workload.response_max
        self._resets: dict[str, int] = {}
        self.tools: ToolHost = SimTools(config)
        self.max_context_tokens = config.rollout.engine.max_model_len
        if config.sim.templates:
            self.environment_template = self._template_of
        self.open_environments = 0
        self.epoch_prompts = config.sim.data_set

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        number = 0
        while split == "train" or number < HELDOUT_PROMPTS:
            place = number % self.epoch_prompts if self.epoch_prompts else number
            key = f"{split}-{seed}-{place}" if split == "train" else f"{split}-{number}"
            kind = number % self.costs.kinds
            task = f"{TASK}-{kind + 1}" if kind else TASK
            if self.traces is not None and self.traces.tasks:
                task = self.traces.tasks[place % len(self.traces.tasks)]
            task = task if self.workload is None else self.workload.assign_task(key)
            yield Prompt(key, task, zlib.crc32(key.encode()), "")
            number += 1

    def _template_of(self, prompt: Prompt) -> EnvironmentTemplate:
        return EnvironmentTemplate(setup=f"repository-{zlib.crc32(prompt.key.encode()) % self.costs.templates}")

    def environment(self) -> SimEnvironment:
        return SimEnvironment(self)

    def next_member(self, prompt: Prompt) -> int:
        """The number of the recorded episode that this environment plays."""
        assert self.traces is not None
        group = self.traces.groups[int(prompt.key.rsplit("-", 1)[1]) % len(self.traces.groups)]
        count = self._resets[prompt.key] = self._resets.get(prompt.key, -1) + 1
        return group[count % len(group)]


class SimEnvironment:
    """One episode: each step takes a lognormal time, and may be the last one with the prompt's own probability."""

    version = "sim-1"

    def __init__(self, task: SimTask) -> None:
        self._task = task
        self._prompt: Prompt | None = None
        self._history = 0  # checksum of all actions so far
        self._turn = 0
        self._last_turn = 0.0  # chance that a turn is the last
        self._closed = False
        self._trace: EpisodeTrace | None = None
        self._setup = ""
        task.open_environments += 1

    async def prepare(self, setup: str) -> None:
        """Takes as long as a reset."""
        self._check()
        await self._work(random_stream(setup, "prepare"))
        self._setup = setup

    async def reset(self, prompt: Prompt) -> Observation:
        self._check()
        if self._task.costs.templates and self._task._template_of(prompt).setup != self._setup:
            raise RuntimeError(f"prompt {prompt.key} has an environment of {self._setup or 'no template'}")
        if self._task.traces is not None:
            return await self._reset_to(self._task.traces, prompt)
        if self._task.workload is not None:
            return await self._reset_of(self._task.workload, prompt)
        rng = random_stream(prompt.seed, "reset")
        await self._work(rng)
        self._begin(prompt)
        self._last_turn = 1.0 / rng.uniform(1.0, max(1.0, self._task.max_turns))
        return Observation(tuple(2 + byte % 62 for byte in rng.randbytes(rng.randint(*_PROMPT_TOKENS))))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        self._check()
        if self._prompt is None:
            raise TrajectoryError("environment_protocol", "step before reset, or after the end")
        self._history = zlib.crc32(array("i", action_ids).tobytes(), self._history)
        self._turn += 1
        if self._trace is not None:
            return await self._step_of(self._trace)
        if self._task.workload is not None:
            return await self._step_in(self._task.workload, self._prompt)
        rng = random_stream(self._prompt.seed, "step", self._turn, self._history)
        await self._work(rng)
        if self._task.costs.tools and rng.random() < self._task.costs.tools:
            await self._task.tools.call()
            self._check()
        if rng.random() < self._last_turn:
            return self._over()
        observation = tuple(2 + byte % 62 for byte in rng.randbytes(rng.randint(*_PROMPT_TOKENS) // 4))
        return StepResult(Observation(observation), 0.0, False)

    async def _reset_to(self, traces: EpisodeTraces, prompt: Prompt) -> Observation:
        number = self._task.next_member(prompt)
        self._trace = traces.episodes[number]
        await asyncio.sleep(self._trace.reset_seconds)
        self._check()
        self._begin(prompt)
        opening = traces.opening(number)
        return Observation(opening + (2,) * (self._trace.turns[0].observation - len(opening)))

    async def _step_of(self, trace: EpisodeTrace) -> StepResult:
        await asyncio.sleep(trace.turns[self._turn - 1].environment_seconds)
        self._check()
        if self._turn == len(trace.turns):
            return self._over()
        return StepResult(Observation((2,) * max(1, trace.turns[self._turn].observation)), 0.0, False)

    async def _reset_of(self, workload: TaskMix, prompt: Prompt) -> Observation:
        seconds, opening = workload.beginning(prompt.task, prompt.seed, workload.batch_stage(prompt))
        if seconds is not None:
            await asyncio.sleep(seconds)
            self._check()
        self._begin(prompt)
        return Observation(opening)

    async def _step_in(self, workload: TaskMix, prompt: Prompt) -> StepResult:
        """Every number of turns from ``turns_min`` to ``turns_max`` is as likely, for each member by itself."""
        task = workload.task_named(prompt.task)
        if not task.step_seconds and task.turns_min <= self._turn == task.turns_max:  # nothing is left to draw
            return self._over()
        rng = random_stream(prompt.seed, "step", self._turn, self._history)
        if task.step_seconds:
            await asyncio.sleep(workload.draw_seconds(task, rng, task.step_seconds, task.step_sigma))
            self._check()
        if self._turn >= task.turns_min and rng.random() * (task.turns_max - self._turn + 1) < 1.0:
            return self._over()
        return StepResult(Observation((2,) * workload.simulated_tokens(rng, task.observation_tokens)), 0.0, False)

    async def close(self) -> None:
        await asyncio.sleep(0)
        if not self._closed:
            self._closed = True
            self._task.open_environments -= 1

    def _begin(self, prompt: Prompt) -> None:
        self._prompt, self._history, self._turn = prompt, prompt.seed, 0

    def _over(self) -> StepResult:
        self._prompt = None
        return StepResult(Observation(()), 0.0, True)

    async def _work(self, rng: random.Random) -> None:
        costs = self._task.costs
        await asyncio.sleep(lognormal(rng, costs.environment_seconds_mean, costs.environment_seconds_sigma))
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise TrajectoryError("environment_protocol", "used after close")


class ToolHost(Protocol):
    """What environments call in the middle of a step."""

    async def call(self) -> None:
        """One call. Raises TrajectoryError when the tool is not reached."""


class SimTools:
    """One tool as :class:`orchestrator.environments.tool_functions.ToolClient` reaches it: so many calls at once, so
    many may wait, one beyond fails at once."""

    def __init__(self, config: Config) -> None:
        self._seconds = config.sim.tool_seconds
        self._slots = asyncio.Semaphore(config.sim.tool_concurrency)
        self._room = config.sim.tool_concurrency + config.sim.tool_burst
        self._calls = 0

    async def call(self) -> None:
        if self._calls >= self._room:
            raise TrajectoryError("tool_unavailable", f"{self._calls} calls of it are under way")
        self._calls += 1
        try:
            async with self._slots:
                await asyncio.sleep(self._seconds)
        finally:
            self._calls -= 1


class SimReward:
    """1.0 for a success, else 0.0; the chance is that of the version of the first token. With ``traces``: what was earned
    when it was recorded, where that is known. Tasks of ``[sim.tasks]`` have their own times. With ``reward.timeout =
    "adaptive"`` a task with a time limit (``reward_max``) has the run's own policy for it, an answer being one test case; what is
    cut off earns 0."""

    def __init__(self, config: Config, traces: EpisodeTraces | None = None) -> None:
        self._traces = traces
        self._seconds = config.sim.reward_seconds
        self._tasks = config.sim.tasks
        self._seed = config.run.seed
        self._slots = asyncio.Semaphore(config.sim.reward_slots) if config.sim.reward_slots else None
        self.limited = self._slots is not None
        rules = config.reward.adaptive
        self._timeouts = (
            AdaptiveTimeouts(rules.factor, rules.least, rules.most) if config.reward.timeout == "adaptive" else None
        )

    async def score(self, trajectory: Trajectory) -> float:
        if self._slots is None:
            return await self._judge(trajectory)
        async with self._slots:
            return await self._judge(trajectory)

    async def _judge(self, trajectory: Trajectory) -> float:
        seconds, limit = self._duration(trajectory)
        cut = seconds > limit
        await asyncio.sleep(min(seconds, limit))
        reward = self._reward(trajectory)
        if self._timeouts is not None and limit < math.inf:
            reward = 0.0 if cut else reward
            time = CaseTime(min(seconds, limit), limit, cut)
            self._timeouts.record_times(trajectory.prompt.key, [time], correct=reward > 0.0)
        return reward

    def _reward(self, trajectory: Trajectory) -> float:
        if self._traces is not None and trajectory.turns:
            recorded = self._traces.episode_of(trajectory.turns[0].observation_ids).reward
            if recorded is not None:
                return recorded
        version = trajectory.first_version if trajectory.turns else 0
        skill = _SKILL_END - (_SKILL_END - _SKILL_START) * math.exp(-max(0, version) / _SKILL_VERSIONS)
        return float(random_stream(self._seed, "reward", trajectory.id, trajectory.prompt.key).random() < skill)

    def _duration(self, trajectory: Trajectory) -> tuple[float, float]:
        """Seconds that scoring takes by itself, and after which it is cut off."""
        task = self._tasks.get(trajectory.task)
        if task is None:
            return self._seconds, math.inf
        rng = random_stream(self._seed, "scoring", trajectory.id, trajectory.prompt.key)
        seconds, limit = lognormal(rng, task.reward_seconds, task.reward_sigma), task.reward_max or math.inf
        if self._timeouts is not None and limit < math.inf:
            limit = min(limit, *(self._timeouts.limits(trajectory.prompt.key) or [limit]))
        return seconds, limit


class SimTrainer:
    """A Trainer whose step takes time in proportion to its tokens, less those that were fed before. As in the real one,
    what was fed counts only where it is a prefix of the batch; otherwise the step starts anew. ``die`` is for the fault
    injector: the state is gone until a new trainer loads what was saved."""

    def __init__(self, config: Config, weights: SimWeights, audit: RunAudit) -> None:
        self._costs = trainer_costs(config)
        self._share = 1.0  # of its devices that compute
        self._weights = weights
        self._audit = audit
        self._stream = config.trainer.stream
        self._once = round(config.sim.feed_once * config.batch_trajectories)
        self._dead = False
        self._fed: list[TrainSample] = []  # at the present version
        self._held = 0  # the version that is published beside the next step
        self.version = 0

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        self._check()
        if self._once:
            samples = () if self._fed else samples[: self._once]
        if version == self.version:
            self._fed += samples
            await self._compute(samples)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        self._check()
        self._audit.check_batch(batch, self.version)
        fed, self._fed = self._fed, []
        streamed = len(fed) if fed == list(batch.samples[: len(fed)]) else 0
        await self._compute(batch.samples[streamed:])
        self.version += 1
        self._audit.record_training(batch)
        rewards = [sample.reward for sample in batch.samples]
        values = {
            "loss": 0.0,
            "tokens": float(sum(len(sample.token_ids) for sample in batch.samples)),
            "reward": round(sum(rewards) / len(rewards), 6),
        }
        if self._stream:
            values["stream_fed"] = round(streamed / len(batch.samples), 6)
            values["stream_restarts"] = float(len(fed) != streamed)
        return TrainMetrics(batch.step, self.version, values)

    async def _compute(self, samples: Sequence[TrainSample]) -> None:
        """Forward and backward."""
        await asyncio.sleep(self._costs.train((len(sample.token_ids) for sample in samples), self._share))
        self._check()

    async def publish(self) -> PublishResult:
        return await self._put(self.version)

    async def hold(self) -> None:
        """See :class:`orchestrator.api.HoldingTrainer`."""
        self._check()
        await asyncio.sleep(self._costs.hold_seconds)
        self._check()
        self._held = self.version

    async def publish_held(self) -> PublishResult:
        """See :class:`orchestrator.api.HoldingTrainer`."""
        return await self._put(self._held)

    async def _put(self, version: int) -> PublishResult:
        self._check()
        await asyncio.sleep(self._costs.publish_seconds)
        self._check()
        self._weights.put(version)
        return PublishResult(version, MODEL_BYTES, 1, self._costs.publish_seconds, self._weights.content(version))

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`. ``anew`` makes no difference here."""
        self._check()
        await asyncio.sleep(0)
        self._weights.sent = self.version
        return (Meeting(f"sim-{self.version}", "sim", "", receivers),)

    async def save(self, folder: str) -> None:
        self._check()
        state = json.dumps({"version": self.version, "trained": self._audit.trained_ids})
        await asyncio.sleep(0)
        self._check()
        (Path(folder) / "trainer.json").write_text(state, encoding="utf-8")

    async def saved(self) -> None:
        """It is at once."""

    async def load(self, folder: str) -> int:
        self._check()
        await asyncio.sleep(0)
        state = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))
        self.version = int(state["version"])
        self._audit.roll_back(dict(state["trained"]))
        self._weights.put(self.version)
        return self.version

    async def close(self) -> None:
        self.die()
        await asyncio.sleep(0)

    def die(self) -> None:
        """The process is gone, and with it every weight that was not saved."""
        self._dead = True

    def _check(self) -> None:
        if self._dead:
            raise RetryableError("the trainer is dead")


class SimDisplay:
    """Shows nothing. ``watched``: whether the pipeline is to put into words what it waits for, as it does in a real run."""

    def __init__(self, watched: bool = True) -> None:
        self.watched = watched

    def stage(self, name: str, detail: str = "") -> None:
        """See the pipeline's Display."""

    def waiting(self, reason: str) -> None:
        """See the pipeline's Display."""

    def update(self, **numbers: Any) -> None:
        """See the pipeline's Display."""

    def message(self, text: str) -> None:
        """See the pipeline's Display."""
