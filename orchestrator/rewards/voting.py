"""Majority voting for checks that flake: a reward function asked several times.

Guarantees: the reward is a value that more than half of all ``votes`` gave (or, for a ``median``, their middle); votes that
failed count as votes for nothing; once a majority is certain, or impossible, the rest is not waited for and is cancelled.
When too many votes failed, the error of one of them is raised; when they answered but do not agree, TrajectoryError
"reward_disagreement". An error that is fatal to the run (RunError) is never outvoted.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from orchestrator.api import ConfigError, LimitedReward, RetryableError, RewardFunction, Trajectory, TrajectoryError


class MajorityVote:
    """Implements ``RewardFunction``. ``votes`` is odd; ``by`` says how numbers become one: "majority" for verdicts, "median"
    for scores, which differ a little each time."""

    def __init__(self, reward: RewardFunction, votes: int, by: Literal["majority", "median"] = "majority") -> None:
        if votes < 1 or votes % 2 == 0:
            raise ConfigError("reward.votes", votes, "must be odd, so that there is a majority")
        self._reward = reward
        self.limited = isinstance(reward, LimitedReward) and reward.limited
        self._votes = votes
        self._by = by

    async def score(self, trajectory: Trajectory) -> float:
        """The reward that most votes give."""
        voters = [asyncio.ensure_future(self._reward.score(trajectory)) for _ in range(self._votes)]
        try:
            return await self._counted(voters)
        finally:
            for voter in voters:
                voter.cancel()
            await asyncio.gather(*voters, return_exceptions=True)

    async def _counted(self, voters: Sequence[asyncio.Future[float]]) -> float:
        given: list[float] = []
        failures: list[RetryableError | TrajectoryError] = []
        for ended in asyncio.as_completed(voters):
            try:
                given.append(await ended)
            except (RetryableError, TrajectoryError) as error:
                failures.append(error)
            if len(failures) * 2 > self._votes:
                raise failures[-1]
            if self._by == "majority" and given:
                value, count = Counter(given).most_common(1)[0]
                if count * 2 > self._votes:
                    return value
        if self._by == "median":
            return float(statistics.median_low(given))
        raise TrajectoryError("reward_disagreement", f"{self._votes} votes: {sorted(given)}, {len(failures)} failed")
