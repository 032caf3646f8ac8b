"""The reward function behind HTTP: the embedded host, a cloud function URL, or any server that speaks the same JSON.

    POST {"trajectory_id", "task", "prompt", "actions": [[token ids of a turn], ...]}  ->  {"reward": number, ...}

Guarantees: those of :class:`~orchestrator.rewards.functions.FunctionClient`, and: what ``score`` returns is a finite float
that the function computed; an infrastructure failure is never a reward. When no try reached the function: RetryableError,
or TrajectoryError "reward_timeout" when the last one took too long. What the function itself did wrong: TrajectoryError
"reward_error" (raised, exited, answered something else), "reward_timeout" (ran too long), "reward_not_finite". A refused
token or an unknown function is a RunError: every trajectory would meet it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.api import RetryableError, RunError, Trajectory, TrajectoryError
from orchestrator.rewards.functions import FunctionClient, FunctionFailed

Played = Callable[[str, Sequence[tuple[int, ...]]], Sequence[tuple[int, ...]]]


class HttpReward(FunctionClient):
    """Implements :class:`orchestrator.api.RewardFunction`."""

    field = "reward.url"

    def __init__(self, url: str, *, played: Played | None = None, **options: Any) -> None:
        """``played``: which actions of a task's trajectory the function is sent, and how; None: all. ``options``: those of
        FunctionClient."""
        super().__init__(url, **options)
        self._played = played

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""
        actions = trajectory.actions if self._played is None else self._played(trajectory.task, trajectory.actions)
        event = {
            "trajectory_id": trajectory.id,
            "task": trajectory.task,
            "prompt": trajectory.prompt.payload,
            "actions": [list(action) for action in actions],
        }
        return _reward(await scored(self, event))


async def scored(client: FunctionClient, event: Any) -> Any:
    """A call whose failures are a reward's. Raises RetryableError, RunError or TrajectoryError; see the module."""
    try:
        return await client.call(event)
    except FunctionFailed as error:
        match error.kind:
            case "unavailable" | "burst":
                raise RetryableError(error.detail) from error
            case "refused":
                raise RunError(f"the reward endpoint refuses to score: {error.detail}") from error
            case "no_answer" | "timeout":
                raise TrajectoryError("reward_timeout", error.detail) from error
            case "not_finite":
                raise TrajectoryError("reward_not_finite", error.detail) from error
            case "error":
                raise TrajectoryError("reward_error", error.detail) from error


def _reward(answer: Any) -> float:
    """The reward in an answer. Raises TrajectoryError."""
    if not isinstance(answer, dict):
        raise TrajectoryError("reward_error", f"the answer is not an object: {answer!r:.200}")
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        raise TrajectoryError("reward_error", f'no number under "reward": {answer!r:.200}')
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise TrajectoryError("reward_not_finite", f"the reward is {value}")
    return value
