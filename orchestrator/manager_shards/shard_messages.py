"""What the head of a run and a shard of its environment managers say to each other: bytes, of a kind and its fields.

| kind | from | fields |
| --- | --- | --- |
| BEGIN | head | an episode: id, group, prompt, sampling, when it was started, whether it is held out |
| SCORE | head | id of one that is played, when it ended |
| END | head | id of one that nobody wants any more; answered by DONE like any other end |
| TAKEN | head | number of a TURNS message, and what :meth:`HeldContexts.take` answered to it |
| ANSWER | head | :func:`orchestrator.transfer.turns.encode_completions` |
| STALE | head | id of a request that is not served: its trajectory is too old |
| RESIZE | head | how many of what: "environments", or calls of "rewards" at a time |
| TURNS | shard | number, :func:`orchestrator.transfer.turns.encode_turns` |
| DROP | shard | id of a request that nobody waits for any more |
| PLAYED | shard | id, version of the environment, whether it was truncated |
| DONE | shard | :class:`EpisodeEnd` |
| TOLD | shard | an event for the log, as JSON |
| ALIVE | shard | counters, as JSON; every second |

Guarantees: nothing is unpickled; a message of another form, with a field of another type, or of over :data:`MAX_MESSAGE` bytes is
one ValueError before anything of it is used. Times are seconds of the event log. Who may say these things is settled by what they
are said over: a pipe that only the two have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from orchestrator.api import Prompt, Sampling
from orchestrator.api import http as wire
from orchestrator.api.errors import MAX_DETAIL, writable
from orchestrator.api.jsontext import parse_object
from orchestrator.shards.shard_folder import LaidTrajectory

MAX_MESSAGE = 256 << 20  # bytes; a trajectory that comes by value is the largest
BEGIN, SCORE, END, TAKEN, ANSWER, STALE, RESIZE = b"BSEACRZ"
TURNS, DROP, PLAYED, DONE, TOLD, ALIVE = b"TXPDVQ"
OUTCOMES = ("scored", "failed", "stale", "cancelled", "fatal")

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_MESSAGE


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= wire.MAX_ID_LENGTH


def _whole(value: Any) -> bool:
    return type(value) is int


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _bytes(value: Any) -> bool:
    return type(value) is bytes


def _row(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(map(lambda ok, item: ok(item), checks, value))
    )


def _rows(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _or_nothing(check: Check) -> Check:
    return lambda value: value is None or check(value)


_PROMPT = _row(_text, _text, _whole, _text)
_SAMPLING = _row(_whole, _number, _number, _rows(_whole), _or_nothing(_whole))
_FACTS = _row(_whole, _whole, _whole, _whole, _flag, _flag)
_CONTEXT = _row(_whole, _whole, _rows(_row(_whole, _whole)), _FACTS)
_LAID = _row(_or_nothing(_bytes), _text, _whole, _text, _rows(_CONTEXT))

_METRICS = _rows(_row(_text, _number))

_FIELDS: dict[int, tuple[Check, ...]] = {
    BEGIN: (_name, _text, _PROMPT, _SAMPLING, _number, _flag),
    SCORE: (_name, _number),
    END: (_name,),
    TAKEN: (_whole, _rows(_text)),
    ANSWER: (_bytes,),
    STALE: (_name,),
    RESIZE: (("environments", "rewards").__contains__, _whole),
    TURNS: (_whole, _bytes),
    DROP: (_name,),
    PLAYED: (_name, _text, _flag),
    DONE: (
        _name,
        OUTCOMES.__contains__,
        _text,
        _text,
        _text,
        _flag,
        _or_nothing(_number),
        _number,
        _METRICS,
        _or_nothing(_LAID),
    ),
    TOLD: (_text,),
    ALIVE: (_text,),
}


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How an episode ended. ``outcome`` is of :data:`OUTCOMES`; ``cause`` and ``detail`` as in
    :class:`~orchestrator.api.TrajectoryError`, of "fatal" the text of a RunError; ``laid``: what there is of it, None:
    nothing."""

    id: str
    outcome: str
    cause: str = ""
    detail: str = ""
    env_version: str = ""
    truncated: bool = False
    reward: float | None = None
    scored_at: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()
    laid: LaidTrajectory | None = None

    def message(self) -> bytes:
        """As it travels."""
        laid = None if self.laid is None else self.laid.row()
        said = (writable(text, MAX_DETAIL) for text in (self.cause, self.detail, self.env_version))  # others wrote it
        return pack(DONE, self.id, self.outcome, *said, self.truncated, self.reward, self.scored_at, self.metrics, laid)

    @classmethod
    def of(cls, fields: Sequence[Any]) -> EpisodeEnd:
        """Of a DONE's fields."""
        *said, metrics, laid = fields
        kept = tuple((name, value) for name, value in metrics)
        return cls(*said, kept, LaidTrajectory.of(laid) if laid else None)  # type: ignore[call-arg]


def pack(kind: int, *fields: Any) -> bytes:
    """A message."""
    packed: bytes = msgpack.packb(fields)
    return bytes((kind,)) + packed


def unpack(message: bytes) -> tuple[int, list[Any]]:
    """(its kind, its fields). Raises ValueError."""
    if not message or len(message) > MAX_MESSAGE or message[0] not in _FIELDS:
        raise ValueError(f"no message of a shard: {bytes(message[:20])!r}")
    kind = message[0]
    try:
        fields = msgpack.unpackb(memoryview(message)[1:])
    except Exception as error:  # whatever it raises for bytes that are no msgpack, it says of these bytes
        raise ValueError(f"a {chr(kind)} message is no msgpack: {error!s:.100}") from error
    if not _row(*_FIELDS[kind])(fields):
        raise ValueError(f"a {chr(kind)} message with other fields: {fields!r:.200}")
    return kind, fields


def told(text: str) -> dict[str, Any]:
    """The object of a TOLD or ALIVE message. Raises ValueError."""
    return parse_object(text, finite=True)


def tell(kind: int, record: Any) -> bytes:
    """A TOLD or ALIVE message."""
    return pack(kind, json.dumps(record, allow_nan=False))


def prompt_row(prompt: Prompt) -> tuple[Any, ...]:
    """As it travels; ``Prompt(*row)`` is equal."""
    return prompt.key, prompt.task, prompt.seed, prompt.payload


def sampling_row(sampling: Sampling) -> tuple[Any, ...]:
    """As it travels."""
    return sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop_token_ids, sampling.seed


def sampling_of(row: Sequence[Any]) -> Sampling:
    """Of what :func:`sampling_row` gave."""
    return Sampling(row[0], row[1], row[2], tuple(row[3]), row[4])
