"""The reward function behind HTTP: the embedded host, a cloud function URL, or any server that speaks the same JSON.

    POST {"trajectory_id", "task", "prompt", "actions": [[token ids of a turn], ...]}  ->  {"reward": number, ...}

Of a task whose rewards read text there is also ``texts``: what each turn says, null for one that was not ended.
With adaptive timeouts there is also ``timeouts`` ({"cases": [seconds], "other": seconds, "whole": seconds}), and an answer may
say {"correct": bool, "cases": [{"seconds", "limit", "cut"}]} of the test cases that ran, in their order. Other numbers of an
answer (true is 1) are kept with the trajectory, at most :data:`MAX_METRICS`; what else it says is not.

Guarantees: those of :class:`~orchestrator.rewards.function_client.FunctionClient`, and: what ``score`` returns is a finite float
that the function computed; an infrastructure failure is never a reward. When no try reached the function: RetryableError,
or TrajectoryError "reward_timeout" when the last one took too long. What the function itself did wrong: TrajectoryError
"reward_error" (raised, exited, answered something else), "reward_timeout" (ran too long), "reward_not_finite". A refused
token or an unknown function is a RunError: every trajectory would meet it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from orchestrator.api import RetryableError, RunError, Score, Trajectory, TrajectoryError
from orchestrator.api.errors import shown
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts, CaseTime
from orchestrator.rewards.function_client import FunctionClient, FunctionFailed

MAX_METRICS = 32
_NAME, _MOST = 100, 1e300  # characters; a sum of as many as a batch has is finite
_OF_PROTOCOL = ("reward", "correct", "cases")
_KNOWN = (*_OF_PROTOCOL, "outcome")
Said = Callable[[tuple[int, ...]], str | None]
Played = Callable[[str, Sequence[tuple[int, ...]]], Sequence[tuple[int, ...]]]


class HttpReward(FunctionClient):
    """Implements :class:`orchestrator.api.RewardFunction`."""

    field = "reward.url"
    limited = True

    def __init__(
        self,
        url: str,
        *,
        played: Played | None = None,
        said: Said | None = None,
        scorers: Mapping[str, str] | None = None,
        timeouts: AdaptiveTimeouts | None = None,
        whole: float = 120.0,
        **options: Any,
    ) -> None:
        """``played``: which actions of a task's trajectory the function is sent, and how; None: all. ``said``: the text of an
        action, which it is sent besides; None: no text. ``scorers``: what a task names its own function, which is sent besides.
        ``options``: those of FunctionClient. ``timeouts``: the function is
        sent a limit for each test case, ``whole`` for all of a trajectory's, and what it says of their times is noted."""
        super().__init__(url, **options)
        self._played, self._said, self._scorers = played, said, scorers
        self._timeouts = timeouts
        self._whole = whole

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""
        event = reward_event(trajectory, self._played, self._said, self._scorers)
        timeouts, prompt = self._timeouts, f"{trajectory.task}/{trajectory.prompt.key}"
        if timeouts is not None:
            event["timeouts"] = {"cases": timeouts.limits(prompt), "other": timeouts.most, "whole": self._whole}
        answer = await call_reward(self, event)
        reward = reward_in(answer)
        if timeouts is not None and "cases" in answer:
            timeouts.record_times(prompt, _times(answer["cases"]), correct=answer.get("correct") is True)
        return Score(reward, metrics_in(answer))

    def stats(self) -> dict[str, Any]:
        """For the event log."""
        timeouts = {} if self._timeouts is None else {"timeouts": asdict(self._timeouts.counts)}
        return {**super().stats(), **timeouts}


class CountedReward(Protocol):
    """What scores, says how many calls it made, and is closed."""

    async def score(self, trajectory: Trajectory) -> float: ...

    def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class RewardByTask:
    """Several judges and a function in one run (RollPacker 4.3: maths, code and judge): a trajectory is scored by the judge of
    its task, and by the function where its task has none."""

    limited = True

    def __init__(self, judges: Mapping[str, CountedReward], function: HttpReward) -> None:
        self._judges = dict(judges)
        self._function = function
        self.resize = function.resize  # a judge's calls wait for the judge

    async def score(self, trajectory: Trajectory) -> float:
        """See those that score."""
        return await self._judges.get(trajectory.task, self._function).score(trajectory)

    def stats(self) -> dict[str, Any]:
        """The counters of all, added up."""
        total = Counter[str](self._function.stats())
        for judge in self._judges.values():
            total.update({"unreadable": 0, **judge.stats()})
        return dict(total)

    async def close(self) -> None:
        """Idempotent. Calls in flight fail."""
        for one in (*self._judges.values(), self._function):
            await one.close()


def reward_event(
    trajectory: Trajectory, played: Played | None, said: Said | None, scorers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a reward function is sent; ``played``, ``said`` and ``scorers`` as in :class:`HttpReward`."""
    actions = trajectory.actions if played is None else played(trajectory.task, trajectory.actions)
    event: dict[str, Any] = {
        "trajectory_id": trajectory.id,
        "task": trajectory.task,
        "prompt": trajectory.prompt.payload,
        "actions": [list(action) for action in actions],
    }
    if scorers and trajectory.task in scorers:
        event["scorer"] = scorers[trajectory.task]
    if said is not None:
        event["texts"] = [said(action) for action in trajectory.actions]
    return event


async def call_reward(client: FunctionClient, event: Any) -> Any:
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


def _times(cases: Any) -> list[CaseTime]:
    """How test cases went, as the function says. Raises TrajectoryError."""
    try:
        times = [CaseTime(float(case["seconds"]), float(case["limit"]), case["cut"] is True) for case in cases]
        if all(math.isfinite(time.seconds) and time.seconds >= 0 and time.limit > 0 for time in times):
            return times
    except (TypeError, ValueError, KeyError, OverflowError):
        pass
    raise TrajectoryError("reward_error", f'not run times under "cases": {shown(cases, 200)}')


def reward_in(answer: Any) -> float:
    """The reward in an answer. Raises TrajectoryError."""
    if not isinstance(answer, dict):
        raise TrajectoryError("reward_error", f"the answer is not an object: {shown(answer, 200)}")
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        raise TrajectoryError("reward_error", f'no number under "reward": {shown(answer, 200)}')
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise TrajectoryError("reward_not_finite", f"the reward is {value}")
    return value


def metrics_in(answer: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The numbers beside the reward, by name. Raises TrajectoryError for what cannot be kept of them."""
    found = {
        name: value for name, value in answer.items() if isinstance(value, int | float) and name not in _OF_PROTOCOL
    }
    for place, (name, value) in enumerate(found.items()):
        wrong = ""
        if place == MAX_METRICS:
            wrong = f"is one of {len(found)} numbers beside the reward, at most {MAX_METRICS} are kept"
        elif not (name.isprintable() and 0 < len(name) <= _NAME):
            wrong = f"a metric's name has 1 to {_NAME} printable characters"
        elif not abs(value) <= _MOST:
            wrong = f"a metric is a number of at most {_MOST:g} either way, not {shown(value, 50)}"
        if wrong:
            raise TrajectoryError("reward_error", f"{shown(name, _NAME)}: {wrong}")
    return tuple(sorted((name, float(value)) for name, value in found.items()))


def not_kept(answer: Mapping[str, Any]) -> list[str]:
    """What it says besides that is no number; texts named ``outcome``, which built-in functions give, left out."""
    return [name for name, value in answer.items() if not isinstance(value, int | float) and name not in _KNOWN]
