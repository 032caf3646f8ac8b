"""Evaluation on held-out prompts, greedy or of several samples each, with a 95 % Wilson interval.

EvaluationResult episodes are not trajectories of the ledger: they are never trained on. One that fails (environment, reward)
counts as not solved, and how many did is reported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean, variance
from typing import Any

from orchestrator.api import (
    Prompt,
    RetryableError,
    RewardFunction,
    RunError,
    Sampling,
    Task,
    TrajectoryError,
    parts_of,
    stop_ids_of,
)
from orchestrator.envs import Episode, EpisodePlayer, StaleTrajectory, reward_of_episode


@dataclass(frozen=True)
class EvaluationResult:
    """``success``: the share of episodes whose reward is above :data:`SOLVED`, ``low`` and ``high`` its bounds at 95 %;
    ``successes`` and ``failed`` count episodes, of which each of ``prompts`` has ``samples``. ``solved``: the share of prompts
    with at least one success, pass@k for k = ``samples``. ``reward``: the mean of those that have one, None without any;
    ``tokens``: generated in an episode, their mean; ``truncated``: the share that ran into a limit. ``tasks``: success by task,
    of a mixture.
    """

    success: float
    successes: int
    prompts: int
    failed: int
    low: float
    high: float
    samples: int
    solved: float
    reward: float | None
    tokens: float
    truncated: float
    tasks: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For the event log."""
        return asdict(self)


SOLVED = 0.5


def wilson(successes: float, total: float, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion."""
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def interval_of(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """At 95 %, of the mean of each prompt's share of successes in ``samples``: answers to one prompt are alike, so that Wilson's
    interval is taken for as many answers as would vary like this if they were independent (Korn and Graubard's effective size).
    """
    total, mean = len(shares), fmean(shares) if shares else 0.0
    size, alone = float(total), mean * (1 - mean)  # the variance of one answer
    if samples > 1 and total > 1 and alone:  # where all or none are right, prompts alone count
        size = max(size, alone * total / max(variance(shares), alone / samples))
    return wilson(mean * size, size)


@dataclass(frozen=True, slots=True)
class _Played:
    """What came of an episode; ``reward`` None: it failed."""

    prompt: int
    task: str
    reward: float | None
    tokens: int
    truncated: bool

    @property
    def success(self) -> bool:
        return self.reward is not None and self.reward > SOLVED


class Evaluator:
    """Plays held-out prompts in the run's environments: ``prompts`` of the stream of ``seed``, ``samples`` times each, at most
    ``slots`` episodes at a time; ``temperature`` 0: greedily; ``timeout``: seconds for a reward; ``forget``: told the id of each
    episode that is over, of which nobody need know any more.
    ``waiting_for``: how far it is, in words; "" while none is played."""

    def __init__(
        self,
        environments: EpisodePlayer,
        task: Task,
        reward: RewardFunction,
        *,
        seed: int,
        prompts: int,
        slots: int,
        timeout: float,
        forget: Callable[[str], None],
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        self._environments, self._task, self._reward = environments, task, reward
        self._seed, self._prompts, self._slots, self._timeout = seed, prompts, slots, timeout
        self._parts, self._forget = parts_of(task), forget
        self._samples, self._temperature, self._top_p = samples, temperature, top_p
        self.waiting_for = ""

    async def evaluate(self, label: str) -> EvaluationResult:
        """Play each held-out prompt as often as it says. ``label`` makes request ids unique."""
        prompts = list(islice(self._task.prompts("heldout", self._seed), self._prompts))
        slots, ended, total = asyncio.Semaphore(self._slots), 0, len(prompts) * self._samples
        what = "held-out prompts" if self._samples == 1 else "episodes of held-out prompts"

        async def play(index: int, sample: int) -> _Played:
            nonlocal ended
            name = f"{label}-{index}" if self._samples == 1 else f"{label}-{index}-{sample}"
            async with slots:
                played = await self._play(name, label, index, prompts[index])
            ended += 1
            self.waiting_for = f"the evaluation: {ended} of {total} {what} played"
            return played

        self.waiting_for = f"the evaluation: 0 of {total} {what} played"
        try:
            # cancelled, it ends when all have ended; gather ends with the first
            async with asyncio.TaskGroup() as group:
                plays = [
                    group.create_task(play(index, sample))
                    for index in range(len(prompts))
                    for sample in range(self._samples)
                ]
        except BaseExceptionGroup as group_of_errors:
            fatal = group_of_errors.subgroup(RunError)
            if fatal is None:
                raise
            first: BaseException = fatal
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            self.waiting_for = ""
        return self._result([task.result() for task in plays], len(prompts))

    def _result(self, played: Sequence[_Played], prompts: int) -> EvaluationResult:
        wins = [0] * prompts
        tasks: dict[str, list[bool]] = {}
        for one in played:
            wins[one.prompt] += one.success
            tasks.setdefault(one.task, []).append(one.success)
        low, high = interval_of([won / self._samples for won in wins], self._samples)
        rewards = [one.reward for one in played if one.reward is not None]
        return EvaluationResult(
            success=_share([one.success for one in played]),
            successes=sum(wins),
            prompts=prompts,
            failed=len(played) - len(rewards),
            low=round(low, 6),
            high=round(high, 6),
            samples=self._samples,
            solved=_share([won > 0 for won in wins]),
            reward=round(fmean(rewards), 6) if rewards else None,
            tokens=round(fmean(one.tokens for one in played), 3) if played else 0.0,
            truncated=_share([one.truncated for one in played]),
            tasks={name: _share(found) for name, found in sorted(tasks.items())} if len(tasks) > 1 else {},
        )

    async def _play(self, name: str, label: str, index: int, prompt: Prompt) -> _Played:
        """One episode of the prompt of that number."""
        tokens = self._parts.get(prompt.task, self._task).max_response_tokens
        sampling = Sampling(tokens, self._temperature, self._top_p, stop_ids_of(self._task))
        episode = Episode(name, label, prompt, 0.0, heldout=True)
        reward = None
        try:
            await self._environments.play(episode, sampling)
            reward = await reward_of_episode(self._reward, episode, 0.0, self._timeout)
        except (TrajectoryError, RetryableError, StaleTrajectory, TimeoutError):
            pass
        except asyncio.CancelledError:  # an environment may raise it
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
        finally:
            self._forget(name)
        generated = sum(len(turn.action_ids) for turn in episode.turns)
        return _Played(index, prompt.task, reward, generated, episode.truncated)


def _share(found: Sequence[bool]) -> float:
    return round(sum(found) / max(1, len(found)), 6)
