"""Greedy evaluation on held-out prompts, with a 95 % Wilson interval.

EvaluationResult episodes are not trajectories of the ledger: they are never trained on. One that fails (environment, reward)
counts as not solved, and how many did is reported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
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
    """``low`` and ``high`` bound the success rate at 95 %."""

    success: float
    successes: int
    prompts: int
    failed: int
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """For the event log."""
        return asdict(self)


def wilson(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion."""
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


class Evaluator:
    """Plays held-out prompts in the run's environments: ``prompts`` of the stream of ``seed``, at most ``slots`` at a time;
    ``timeout``: seconds for a reward; ``forget``: told the id of each episode that is over, of which nobody need know any more.
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
    ) -> None:
        self._environments, self._task, self._reward = environments, task, reward
        self._seed, self._prompts, self._slots, self._timeout = seed, prompts, slots, timeout
        self._parts, self._forget = parts_of(task), forget
        self.waiting_for = ""

    async def evaluate(self, label: str) -> EvaluationResult:
        """Play each held-out prompt once, greedily. ``label`` makes request ids unique."""
        prompts = list(islice(self._task.prompts("heldout", self._seed), self._prompts))
        slots, ended = asyncio.Semaphore(self._slots), 0

        async def play(index: int, prompt: Prompt) -> float | None:
            nonlocal ended
            async with slots:
                score = await self._play(f"{label}-{index}", label, prompt)
            ended += 1
            self.waiting_for = f"the evaluation: {ended} of {len(prompts)} held-out prompts played"
            return score

        self.waiting_for = f"the evaluation: 0 of {len(prompts)} held-out prompts played"
        try:
            # cancelled, it ends when all have ended; gather ends with the first
            async with asyncio.TaskGroup() as group:
                plays = [group.create_task(play(index, prompt)) for index, prompt in enumerate(prompts)]
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
        scores = [task.result() for task in plays]
        successes = sum(score is not None and score > 0.5 for score in scores)
        low, high = wilson(successes, len(scores))
        return EvaluationResult(
            round(successes / max(1, len(scores)), 6),
            successes,
            len(scores),
            sum(s is None for s in scores),
            round(low, 6),
            round(high, 6),
        )

    async def _play(self, name: str, label: str, prompt: Prompt) -> float | None:
        """The score of one episode; None: it failed."""
        tokens = self._parts.get(prompt.task, self._task).max_response_tokens
        sampling = Sampling(max_tokens=tokens, temperature=0.0, stop_token_ids=stop_ids_of(self._task))
        episode = Episode(name, label, prompt, 0.0, heldout=True)
        try:
            await self._environments.play(episode, sampling)
            return await reward_of_episode(self._reward, episode, 0.0, self._timeout)
        except (TrajectoryError, RetryableError, StaleTrajectory, TimeoutError):
            return None
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            return None  # an environment raised it
        finally:
            self._forget(name)
