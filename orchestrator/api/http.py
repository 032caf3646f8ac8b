"""What client and server of the HTTP carrier agree on: paths, headers, limits, and the records as JSON objects.

The client is ``orchestrator.borrowing.http_worker.HttpWorker``, the server the endpoint plugin of ``vllm_rlplugin``. Guarantees:
a record that crosses comes back equal (floats too: JSON carries their shortest exact decimal form); the two sides refuse
each other when :data:`PROTOCOL` differs. Bodies and answers are JSON, but for turns and their completions, which are binary
(:mod:`orchestrator.transfer.turns`; clients of other kinds may send and get these as JSON). An error is vLLM's
``ErrorResponse``, ``{"error": {"message", "type", "param", "code"}}``, whose ``type`` is a key of COMMAND_STATUS or one of the
words below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from orchestrator.api.capabilities import KvMoved
from orchestrator.api.errors import shown
from orchestrator.api.types import (
    Completion,
    SharedDevice,
    UpdateResult,
    WorkerStats,
)

PROTOCOL = 9  # raised with every change that the other side would notice
PROTOCOL_HEADER = "RL-Coserve-Protocol"  # in every call of the client and every answer of a control endpoint
# In every answer: another value means that the server was started anew, or was given another relay, and has no requests
# of before. A call that names another value than the present one is refused.
INSTANCE_HEADER = "RL-Coserve-Instance"
LEASE_HEADER = "RL-Coserve-Lease"  # the key of the caller's lease; who has none sends none

ADD = "/rl/add"
TURNS = "/rl/turns"  # ADD in binary, of what is new; also the answers, of COMPLETIONS, for who accepts TURNS_TYPE
TURNS_TYPE = "application/x-rl-coserve-turns"
ABORT = "/rl/abort"
PRIORITIZE = "/rl/prioritize"
COMPLETIONS = "/rl/completions"
SUSPEND = "/rl/suspend"
PREPARE = "/rl/prepare"
UPDATE = "/rl/update"
RESUME = "/rl/resume"
STATS = "/rl/stats"
STATUS = "/rl/status"
ACTIVATE = "/rl/activate"
DEACTIVATE = "/rl/deactivate"
LEASE = "/rl/lease"
GIVE_BACK = "/rl/lease/give_back"
CLAIM = "/rl/lease/claim"
KV_PLACE = "/rl/kv/place"
KV_FETCH = "/rl/kv/fetch"
CONNECT = "/init_weight_transfer_engine"  # vLLM's own name

# Of a model, as named in its config.json: what a server says of the one that it serves.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)

MAX_REQUESTS = 1024  # of one ADD
MAX_IDS = 65536  # of one ABORT or PRIORITIZE
MAX_ID_LENGTH = 256  # characters
MAX_PROMPT_TOKENS = 1 << 20  # of one request; the model's own limit is smaller
MAX_STOP_TOKENS = 256
MAX_ERROR_LENGTH = 1 << 16  # characters of a completion's error
MAX_COMPLETIONS = 1024  # of one answer
MAX_ANSWER_TOKENS = 1 << 14  # of its completions; more only where a single one has more
MAX_POLL_SECONDS = 60.0  # that an ask for completions may wait
# That a lease may run without being renewed: so long users may wait for an engine that a dead run has stopped.
MAX_LEASE_SECONDS = 300.0
MAX_CLAIM_SECONDS = 3600.0  # that a claim may run without being said again

# Types of errors that are not commands' (those are in COMMAND_STATUS), with their statuses.
UNAUTHORIZED = "unauthorized"  # 401: no bearer token, or a wrong one
FORBIDDEN = "forbidden"  # 403: this client's address may not
TOO_LARGE = "body_too_large"  # 413
PROTOCOL_MISMATCH = "protocol_mismatch"  # 400
INSTANCE_MISMATCH = "instance_mismatch"  # 409: the call was meant for what the server was before
RETRYABLE = "retryable"  # 503: RetryableError


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """A completion as JSON-safe data, without its routed experts: those are bytes, and travel in the binary form only."""
    data = {**_fields_of(completion), "timing": asdict(completion.timing)}
    del data["experts"]
    return data


def _fields_of(record: Any) -> dict[str, Any]:
    """(Not ``asdict``: it copies every token.)"""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def stats_from_json(data: Mapping[str, Any]) -> WorkerStats:
    """What ``dataclasses.asdict`` made of a snapshot. Raises TypeError or ValueError for a missing or unknown field, or a
    value of another kind."""
    return WorkerStats(**_of_kind(WorkerStats, data))


def kv_moved_from_json(data: Mapping[str, Any]) -> KvMoved:
    """What ``dataclasses.asdict`` made of a move's outcome. Raises TypeError or ValueError, as above."""
    return KvMoved(**_of_kind(KvMoved, data))


def update_result_from_json(data: Mapping[str, Any]) -> UpdateResult:
    """What ``dataclasses.asdict`` made of an update's result. Unknown fields are ignored."""
    return UpdateResult(
        **_of_kind(UpdateResult, {i.name: data[i.name] for i in fields(UpdateResult) if i.name in data})
    )


def _of_kind(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each of the kind that the record's field is annotated with (annotations are texts in those modules)."""
    kinds = {item.name: _KINDS[str(item.type)] for item in fields(record)}
    return {name: kinds[name](value) if name in kinds else value for name, value in data.items()}


def _whole(value: Any) -> int:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise ValueError(f"{shown(value, 40)} is not a whole number of 64 bits")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < _LARGEST:
        raise ValueError(f"{shown(value, 40)} is not a finite number")
    return float(value)


def _finite_or_none(value: Any) -> float | None:
    return None if value is None else _finite(value)


def _shared(value: Any) -> SharedDevice | None:
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{shown(value, 40)} is no record")
    return None if value is None else SharedDevice(**_of_kind(SharedDevice, value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value, 40)} is not text")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{shown(value, 40)} is neither true nor false")
    return value


_INT64 = 1 << 63
_LARGEST = 1e300  # far beyond what anybody measures; integers above it have no float
_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": _whole, "float": _finite, "float | None": _finite_or_none, "str": _text, "bool": _truth,
    "SharedDevice | None": _shared,
}  # fmt: skip
