"""``ControlRoute``: what every control endpoint does, whatever its handler is. A route class, so that none can forget it.

In this order: the caller's address and token (403, 401), the protocol version and the server instance if the caller names
them (400, 409), whether another job has the GPU (409), the size of the body (413, before it is read whole, chunked bodies too),
its shape (400). Every error is
vLLM's ``ErrorResponse``; a CommandError has the status of COMMAND_STATUS, a RetryableError is 503. Every answer says
protocol and server instance, which is another one after a restart and in another history of weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException  # the base of FastAPI's own, which its routing raises

from orchestrator.api import CommandError, RetryableError
from orchestrator.api import http as wire
from orchestrator.api.http import (
    INSTANCE_HEADER,
    INSTANCE_MISMATCH,
    LEASE_HEADER,
    PROTOCOL,
    PROTOCOL_HEADER,
    PROTOCOL_MISMATCH,
    RETRYABLE,
    TOO_LARGE,
)
from vllm_rlplugin.server.bearer_auth import AccessDenied, BearerGuard

STATE = "rl_coserve_door"  # in the app's state, set before the server takes connections
# What is refused to everybody but the job that has the lease, while one has it. Who has the token may look at a server, activate
# it, and end requests: they come back to their run, which goes on with them elsewhere.
LEASED = frozenset(
    {
        *(
            wire.ADD,
            wire.TURNS,
            wire.PRIORITIZE,
            wire.COMPLETIONS,
            wire.SUSPEND,
            wire.PREPARE,
            wire.UPDATE,
            wire.RESUME,
            wire.CONNECT,
        ),
        *("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/update_weight_version", "/weight_checker", "/shutdown_weight_transfer_engine"),
    }
)
_SHOWN = 5  # mistakes of one body
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteContext:
    """What the routes need to know."""

    guard: BearerGuard
    max_body: int  # bytes
    server: str  # of this process
    history: Callable[[], int]  # the present one of its weights
    leased: Callable[[str], str] = lambda key: ""  # why who shows this key may not use the engine; "": it may

    @property
    def instance(self) -> str:
        """What a client's requests belong to."""
        return f"{self.server}.{self.history()}"


class ControlRoute(APIRoute):
    """See the module."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            door: RouteContext | None = getattr(request.app.state, STATE, None)
            if door is None:
                return error_response(503, RETRYABLE, "the control endpoints are not ready")
            response = await _answer(handler, request, door, self.path)
            response.headers[PROTOCOL_HEADER] = str(PROTOCOL)
            response.headers[INSTANCE_HEADER] = door.instance
            return response

        return guarded


async def _answer(handler: Handler, request: Request, door: RouteContext, path: str) -> Response:
    """``path``: of the route, whatever prefix the server has (``--root-path``)."""
    try:
        client = None if request.client is None else request.client.host
        door.guard.check_caller(request.headers.get("authorization"), client)
        theirs = request.headers.get(PROTOCOL_HEADER)
        if theirs is not None and theirs != str(PROTOCOL):
            message = f"this server speaks protocol {PROTOCOL}, the client {theirs:.20}: install the same rl-coserve"
            return error_response(400, PROTOCOL_MISMATCH, message)
        meant = request.headers.get(INSTANCE_HEADER)
        if meant is not None and meant != door.instance:
            message = "this server was restarted, or was given another relay: its earlier requests are gone"
            return error_response(409, INSTANCE_MISMATCH, message)
        if path in LEASED and (taken := door.leased(request.headers.get(LEASE_HEADER, ""))):
            return error_response(409, "leased", taken)
        return await handler(_limited(request, door.max_body))
    except AccessDenied as denied:
        response = error_response(denied.status, denied.kind, str(denied))
        if denied.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    except _TooLarge:
        response = error_response(413, TOO_LARGE, f"the body has more than {door.max_body} B (--rl-max-body-mb)")
        response.headers["Connection"] = "close"  # the rest of the body is not read
        return response
    except RequestValidationError as error:
        return error_response(400, "invalid_request", _mistakes(error), _where(error.errors()[0]))
    except CommandError as error:
        return error_response(error.status, error.code, error.detail)
    except RetryableError as error:
        return error_response(503, RETRYABLE, str(error))
    except HTTPException as error:  # FastAPI's own, for a body that is no JSON
        return error_response(error.status_code, "invalid_request", str(error.detail))


def error_response(status: int, kind: str, message: str, param: str | None = None) -> JSONResponse:
    """vLLM's ``ErrorResponse``."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)


class _TooLarge(HTTPException):
    """Passes through FastAPI's reading of a body, which makes a 400 of everything else."""

    def __init__(self) -> None:
        super().__init__(413)


def _limited(request: Request, limit: int) -> Request:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _TooLarge
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _TooLarge
        return message

    return Request(request.scope, receive)


def _mistakes(error: RequestValidationError) -> str:
    found = error.errors()
    shown = [f"{_where(item)}: {item['msg']}" for item in found[:_SHOWN]]  # never the input: it may be large
    return "; ".join(shown) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _where(item: Any) -> str:
    return ".".join(str(part) for part in item["loc"] if part != "body")[:200] or "body"
