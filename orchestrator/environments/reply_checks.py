"""What an environment may answer. The same checks in the orchestrator and in the process that an environment runs in.

Guarantee: what passes is a record with fields of the right types and finite numbers; what does not raises one
TrajectoryError that says what was wrong: ``environment_output`` (types), ``environment_not_finite`` (NaN, infinity).
Whether tokens are of the vocabulary and fit the context is the manager's to check: it knows the task.
"""

from __future__ import annotations

import asyncio
import math

from orchestrator.api import Observation, StepResult, TrajectoryError

THIRD_PARTY = (
    Exception,
    SystemExit,
    asyncio.CancelledError,
)  # what code of others may raise; not what ends this process


def error_text(error: BaseException) -> str:
    """What an exception says, even when saying it fails."""
    try:
        return repr(error)
    except THIRD_PARTY:
        return type(error).__name__


def observation_of(answer: object, what: str) -> Observation:
    """``answer`` as an observation with a tuple of token ids. ``what`` names the call. Raises TrajectoryError."""
    if not isinstance(answer, Observation):
        raise TrajectoryError("environment_output", f"{what} returned {type(answer).__name__}, not an Observation")
    ids: object = answer.token_ids
    if not isinstance(ids, tuple | list) or any(kind is not int for kind in set(map(type, ids))):
        raise TrajectoryError("environment_output", f"{what}: token_ids must be a tuple of int, is {ids!r:.100}")
    return answer if isinstance(ids, tuple) else Observation(tuple(ids))


def step_of(answer: object, what: str = "step") -> StepResult:
    """``answer`` as the result of a step. Raises TrajectoryError."""
    if not isinstance(answer, StepResult):
        raise TrajectoryError("environment_output", f"{what} returned {type(answer).__name__}, not a StepResult")
    reward: object = answer.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TrajectoryError("environment_output", f"{what}: the reward must be a number, is {reward!r:.100}")
    try:
        finite = math.isfinite(reward)
    except OverflowError:  # an int beyond every float
        finite = False
    if not finite:
        raise TrajectoryError("environment_not_finite", f"{what}: the reward is {reward!r:.40}")
    flags: tuple[object, ...] = (answer.done, answer.truncated, answer.invalid_action)
    if not all(isinstance(flag, bool) for flag in flags):
        raise TrajectoryError(
            "environment_output", f"{what}: done, truncated and invalid_action must be bool: {flags!r:.100}"
        )
    seen = observation_of(answer.observation, what)
    if seen is answer.observation and type(reward) is float:
        return answer
    return StepResult(seen, float(reward), answer.done, answer.truncated, answer.invalid_action)
