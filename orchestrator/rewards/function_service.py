"""What a function host answers, whatever it listens with: the AWS Lambda Invoke REST API over :class:`FunctionPool`.

Guarantees: a request without the bearer token is answered 401 and nothing else happens; a body that is too large or is no
JSON never reaches a function; what a function does wrong is an answer with X-Amz-Function-Error, never a status of 5xx.
The token itself is not kept, only its digest, so that whoever can read this object's arguments cannot call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api import bearer, jsontext
from orchestrator.rewards.function_protocol import (
    COLD_START_HEADER,
    ERROR_HEADER,
    INVOKE_PATH,
    MAX_BODY_BYTES,
    PROVISION_PATH,
    STATS_PATH,
)
from orchestrator.rewards.process_pool import FunctionError, FunctionPool, Invocation, Throttled

_ERROR_TYPE = "x-amzn-ErrorType"


@dataclass(frozen=True, slots=True)
class FunctionReply:
    """``value`` is JSON."""

    status: int
    value: Any
    headers: Mapping[str, str] = field(default_factory=dict)


class FunctionService:
    """Answers requests to ``functions``, by name. ``token``: see :class:`orchestrator.api.bearer.Token`."""

    def __init__(self, functions: Mapping[str, FunctionPool], token: str) -> None:
        self._functions = functions
        self._token = bearer.Token(token)

    def refuse_caller(self, authorization: str) -> FunctionReply | None:
        """What a caller with this Authorization header is told; None: it may go on."""
        if self._token.admits(authorization):
            return None
        return refusal_reply(401, "UnrecognizedClientException", "send the bearer token")

    async def answer(self, method: str, path: str, body: bytes) -> FunctionReply:
        """The reply to a request of somebody who may call."""
        if (method, path) == ("GET", STATS_PATH):
            return FunctionReply(200, {"functions": {name: pool.stats() for name, pool in self._functions.items()}})
        for wanted, pattern in (("POST", INVOKE_PATH), ("PUT", PROVISION_PATH)):
            head, _, tail = pattern.partition("{name}")
            if method == wanted and path.startswith(head) and path.endswith(tail):
                break
        else:
            return refusal_reply(404, "ResourceNotFoundException", "no such request")
        pool = self._functions.get(path.removeprefix(head).removesuffix(tail))
        if pool is None:
            return refusal_reply(
                404, "ResourceNotFoundException", f"no function; there are: {', '.join(self._functions)}"
            )
        if len(body) > MAX_BODY_BYTES:
            return too_large()
        return await _invoke(pool, body) if method == "POST" else _provision(pool, body)


async def _invoke(pool: FunctionPool, body: bytes) -> FunctionReply:
    try:
        event = jsontext.parse(body or b"{}", finite=True)
    except ValueError as error:
        return refusal_reply(400, "InvalidRequestContentException", f"the body is not JSON: {error}")
    note = Invocation()
    try:
        return FunctionReply(200, await pool.invoke(event, note), _cold(note))
    except FunctionError as error:
        failed = {"errorType": error.kind, "errorMessage": error.message}
        return FunctionReply(200, failed, {ERROR_HEADER: "Unhandled", **_cold(note)})
    except Throttled:
        return refusal_reply(429, "TooManyRequestsException", "too many calls wait already")


def _provision(pool: FunctionPool, body: bytes) -> FunctionReply:
    try:
        count = jsontext.parse(body)["ProvisionedConcurrentExecutions"]
    except (ValueError, TypeError, KeyError):
        count = None
    if type(count) is not int or count < 0:
        return refusal_reply(400, "InvalidParameterValueException", "ProvisionedConcurrentExecutions must be 0 or more")
    return FunctionReply(
        202, {"RequestedProvisionedConcurrentExecutions": pool.provision(count), "Status": "IN_PROGRESS"}
    )


def too_large() -> FunctionReply:
    """What a caller with a body over the limit is told."""
    return refusal_reply(413, "RequestTooLargeException", f"the body has more than {MAX_BODY_BYTES} B")


def refusal_reply(status: int, kind: str, message: str) -> FunctionReply:
    """A request that is not carried out."""
    return FunctionReply(status, {"Type": "User", "Message": message}, {_ERROR_TYPE: kind})


def _cold(note: Invocation) -> dict[str, str]:
    return {} if note.cold_seconds is None else {COLD_START_HEADER: str(round(1000 * note.cold_seconds))}
