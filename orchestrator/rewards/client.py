"""The reward function behind HTTP: the embedded host, a cloud function URL, or any server that speaks the same JSON.

    POST {"trajectory_id", "task", "prompt", "actions": [[token ids of a turn], ...]}  ->  {"reward": number, ...}

Guarantees: what ``score`` returns is a finite float that the function computed; an infrastructure failure is never a
reward. Transport failures (no connection, no answer in time, HTTP 408, 429, 5xx) are tried again ``retries`` times with
exponential back-off and seeded jitter, then end in RetryableError, or in TrajectoryError "reward_timeout" when the last
one was a timeout. What the function itself did wrong is not retried: TrajectoryError "reward_error" (raised, exited,
answered something else), "reward_timeout" (ran too long), "reward_not_finite". A refused token or an unknown function is
a RunError: every trajectory would meet it. At most ``concurrency`` calls are in flight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.api import Trajectory, TrajectoryError
from orchestrator.rewards.calls import Endpoint
from orchestrator.rewards.protocol import COLD_HEADER, ERROR_HEADER, NOT_FINITE, TIMED_OUT


@dataclass
class ColdStarts:
    """What scaling to zero costs, as the host says it: how many answered calls waited for a process to start, and how long."""

    calls: int = 0
    cold: int = 0
    seconds: float = 0.0

    def count(self, header: str | None) -> None:
        """One answered call; ``header`` is absent where no process had to start, or the endpoint does not say."""
        self.calls += 1
        try:
            seconds = float(header) if header is not None else 0.0
        except ValueError:
            return
        if 0.0 < seconds < math.inf:
            self.cold += 1
            self.seconds += seconds


class HttpReward:
    """Implements :class:`orchestrator.api.RewardFunction`."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        concurrency: int = 32,
        timeout: float = 10.0,
        retries: int = 3,
        seed: int = 0,
    ) -> None:
        self._endpoint = Endpoint(
            "reward.url", url, token=token, concurrency=concurrency, timeout=timeout, retries=retries, seed=seed
        )
        self.cold = ColdStarts()

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""
        payload = {
            "trajectory_id": trajectory.id,
            "task": trajectory.task,
            "prompt": trajectory.prompt.payload,
            "actions": [list(turn.action_ids) for turn in trajectory.turns],
        }
        return await self._endpoint.call(json.dumps(payload, allow_nan=False).encode(), self._read)

    async def close(self) -> None:
        """Idempotent. Calls in flight fail."""
        await self._endpoint.close()

    def _read(self, headers: Mapping[str, str], body: bytes) -> float:
        self.cold.count(headers.get(COLD_HEADER))
        return _reward(ERROR_HEADER in headers, body)


def _reward(failed: bool, body: bytes) -> float:
    """The reward in an answer. Raises TrajectoryError."""
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError("reward_error", f"the answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise TrajectoryError("reward_error", f"the answer is not an object: {answer!r:.200}")
    if failed:
        kind = str(answer.get("errorType", ""))
        cause = {TIMED_OUT: "reward_timeout", NOT_FINITE: "reward_not_finite"}.get(kind, "reward_error")
        raise TrajectoryError(cause, f"{kind}: {answer.get('errorMessage', '')}"[:500])
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
