"""What the orchestrator and an environment's process say to each other: JSON lines, one reply to each request, in order.

    {"id": 1, "call": "start", "target": "module:name", "arguments": {...}, "limits": {...}}
    {"id": 1, "result": {"protocol": 1, "distribution": "...", "version": "..."}}
    {"id": 2, "call": "reset", "prompt": {...}}      {"id": 2, "result": {"version": "...", "observation": [2, 3]}}
    {"id": 3, "call": "step", "action": [5, 1]}      {"id": 3, "error": {"cause": "environment_error", "detail": "..."}}

Also ``recycle`` and ``ping``. A reply, failed or not, may say in ``tools`` how often its process has called tools so far, by
tool. Guarantees: nothing is unpickled; a line that is no strict JSON object (NaN included), has
another id or lacks a field is a TrajectoryError, whoever wrote it; what is sent has passed :mod:`.checks`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.api import Observation, Prompt, StepResult, TrajectoryError, jsontext
from orchestrator.environments.reply_checks import error_text, observation_of, step_of

PROTOCOL = 1
MAX_LINE = 8 << 20  # bytes; RollArt 7.5 saw 2.7 MB at most in one call
_DETAIL = 2000  # characters
_STEP = ("reward", "done", "truncated", "invalid_action")  # fields of a StepResult, beside the observation
_CAUSE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def encode_line(message: Mapping[str, Any]) -> bytes:
    """One line. Raises ValueError for what JSON cannot say."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


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
        raise TrajectoryError("environment_protocol", f"not a line of JSON ({error}): {_shown(line)}") from error


def reply_of(line: bytes, number: int, note: Callable[[object], None] | None = None) -> dict[str, Any]:
    """The result in a reply; ``note`` is told what it says of tools. Raises the TrajectoryError that it holds, or that it is."""
    message = decode_line(line)
    if message.get("id") != number:
        raise TrajectoryError("environment_protocol", f"a reply to {message.get('id')!r:.40}, not to {number}")
    if note is not None and "tools" in message:
        note(message["tools"])
    failed, result = message.get("error"), message.get("result")
    if isinstance(failed, dict):
        cause = str(failed.get("cause", ""))
        raise TrajectoryError(
            cause if _CAUSE.fullmatch(cause) else "environment_error", str(failed.get("detail", ""))[:_DETAIL]
        )
    if not isinstance(result, dict):
        raise TrajectoryError("environment_protocol", f"a reply without a result: {_shown(line)}")
    return result


def failure_reply(number: object, error: BaseException) -> dict[str, Any]:
    """The reply that says what an environment raised."""
    if isinstance(error, TrajectoryError):
        cause, detail = error.cause, error.detail
    else:
        cause, detail = "environment_error", error_text(error)
    return {"id": number, "error": {"cause": cause, "detail": detail[:_DETAIL]}}


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """For a request."""
    return asdict(prompt)


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


def _shown(line: bytes) -> str:
    return repr(line[:100])
