"""What the orchestrator and an environment's process say to each other: JSON lines, one reply to each request, in order.

    {"id": 1, "call": "start", "target": "module:name", "arguments": {...}, "limits": {...}, "setup": ""}
    {"id": 1, "result": {"protocol": 1, "distribution": "...", "version": "..."}}
    {"id": 2, "call": "reset", "prompt": {...}}      {"id": 2, "result": {"version": "...", "observation": [2, 3]}}
    {"id": 3, "call": "step", "action": [5, 1]}      {"id": 3, "error": {"cause": "environment_error", "detail": "..."}}

Also ``recycle`` and ``ping``. A reply, failed or not, may say in ``tools`` how often its process has called tools so far, by
tool. Guarantees: nothing is unpickled; a line that is no strict JSON object (NaN included), has
another id or lacks a field is a TrajectoryError, whoever wrote it. What an environment may answer is checked by the same code on
both sides (:func:`observation_of`, :func:`step_of`): what passes is a record with fields of the right types and finite numbers;
what does not raises one TrajectoryError that says what was wrong: ``environment_output`` (types), ``environment_not_finite``
(NaN, infinity). Whether tokens are of the vocabulary and fit the context is the manager's to check: it knows the task.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api import Observation, StepResult, Task, TrajectoryError, jsontext, parts_of
from orchestrator.api.errors import shown, writable

PROTOCOL = 1
MAX_LINE = 8 << 20  # bytes; RollArt 7.5 saw 2.7 MB at most in one call
_BESIDE = 1 << 16  # bytes of an answer beside its token ids
MAX_VERSION = 200  # characters of what an environment says that it is
_DETAIL = 2000  # characters
_STEP = ("reward", "done", "truncated", "invalid_action")  # fields of a StepResult, beside the observation
# What code of others may raise; not what ends this process.
THIRD_PARTY = (Exception, SystemExit, asyncio.CancelledError)
_CAUSE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def encode_line(message: Mapping[str, Any]) -> bytes:
    """One line. Raises ValueError for what JSON cannot say."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def longest_answer(task: Task) -> int:
    """Bytes of a line that an environment of this task may answer with: more token ids fit no context, and to read them takes the
    loop 12 ms per MiB."""
    tokens = max(part.max_context_tokens for part in (task, *parts_of(task).values()))
    return min(MAX_LINE, _BESIDE + tokens * len(f"{len(task.vocabulary)},"))


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line, from a reader whose own limit may be smaller; empty or without its end: there is no more. Raises ValueError
    for one of over MAX_LINE."""
    line = bytearray()
    while len(line) <= MAX_LINE:
        try:
            return bytes(line + await reader.readuntil(b"\n"))
        except asyncio.IncompleteReadError as error:
            return bytes(line + error.partial)
        except asyncio.LimitOverrunError as error:
            line += await reader.readexactly(error.consumed)
    raise ValueError(f"a line of over {MAX_LINE} B")


def decode_line(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises TrajectoryError."""
    try:
        return jsontext.parse_object(line, finite=True)
    except ValueError as error:
        raise TrajectoryError("environment_protocol", f"not a line of JSON ({error}): {line[:100]!r}") from error


def reply_of(line: bytes, number: int, note: Callable[[object], None] | None = None) -> dict[str, Any]:
    """The result in a reply; ``note`` is told what it says of tools. Raises the TrajectoryError that it holds, or that it is."""
    message = decode_line(line)
    if message.get("id") != number:
        raise TrajectoryError("environment_protocol", f"a reply to {shown(message.get('id'), 40)}, not to {number}")
    if note is not None and "tools" in message:
        note(message["tools"])
    failed, result = message.get("error"), message.get("result")
    if isinstance(failed, dict):
        cause = str(failed.get("cause", ""))
        raise TrajectoryError(
            cause if _CAUSE.fullmatch(cause) else "environment_error", str(failed.get("detail", ""))[:_DETAIL]
        )
    if not isinstance(result, dict):
        raise TrajectoryError("environment_protocol", f"a reply without a result: {line[:100]!r}")
    return result


def failure_reply(number: object, error: BaseException) -> dict[str, Any]:
    """The reply that says what an environment raised."""
    if isinstance(error, TrajectoryError):
        cause, detail = error.cause, error.detail
    else:
        cause, detail = "environment_error", error_text(error)
    return {"id": number, "error": {"cause": cause, "detail": detail[:_DETAIL]}}


def step_fields(result: StepResult) -> dict[str, Any]:
    """For a reply."""
    return {**{name: getattr(result, name) for name in _STEP}, "observation": result.observation.token_ids}


def read_observation(fields: Mapping[str, Any], what: str) -> Observation:
    """Of a reply. Raises TrajectoryError."""
    return observation_of(Observation(fields.get("observation")), what)  # type: ignore[arg-type]  # checked there


def read_step(fields: Mapping[str, Any]) -> StepResult:
    """Of a reply. Raises TrajectoryError."""
    seen = read_observation(fields, "step")
    values: list[Any] = [fields.get(name) for name in _STEP]
    return step_of(StepResult(seen, *values))


def error_text(error: BaseException) -> str:
    """What an exception says, even when saying it fails."""
    try:
        return repr(error)
    except THIRD_PARTY:
        return type(error).__name__


def version_of(answer: object) -> str:
    """What an environment says that it is, which is kept with each of its trajectories. Raises TrajectoryError."""
    if not isinstance(answer, str) or answer != writable(answer, MAX_VERSION):
        raise TrajectoryError(
            "environment_protocol",
            f"the version must be text of at most {MAX_VERSION} characters, is {shown(answer, 40)}",
        )
    return answer


def observation_of(answer: object, what: str) -> Observation:
    """``answer`` as an observation with a tuple of token ids. ``what`` names the call. Raises TrajectoryError."""
    if not isinstance(answer, Observation):
        raise TrajectoryError("environment_output", f"{what} returned {type(answer).__name__}, not an Observation")
    ids: object = answer.token_ids
    if not isinstance(ids, tuple | list) or any(kind is not int for kind in set(map(type, ids))):
        raise TrajectoryError("environment_output", f"{what}: token_ids must be a tuple of int, is {shown(ids, 100)}")
    return answer if isinstance(ids, tuple) else Observation(tuple(ids))


def step_of(answer: object, what: str = "step") -> StepResult:
    """``answer`` as the result of a step. Raises TrajectoryError."""
    if not isinstance(answer, StepResult):
        raise TrajectoryError("environment_output", f"{what} returned {type(answer).__name__}, not a StepResult")
    reward: object = answer.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TrajectoryError("environment_output", f"{what}: the reward must be a number, is {shown(reward, 100)}")
    try:
        finite = math.isfinite(reward)
    except THIRD_PARTY:  # an int beyond every float, or one of a kind of its own
        finite = False
    if not finite:
        raise TrajectoryError("environment_not_finite", f"{what}: the reward is {shown(reward, 40)}")
    flags: tuple[object, ...] = (answer.done, answer.truncated, answer.invalid_action)
    if not all(isinstance(flag, bool) for flag in flags):
        raise TrajectoryError(
            "environment_output", f"{what}: done, truncated and invalid_action must be bool: {shown(flags, 100)}"
        )
    seen = observation_of(answer.observation, what)
    if seen is answer.observation and type(reward) is float:
        return answer
    return StepResult(seen, float(reward), answer.done, answer.truncated, answer.invalid_action)
