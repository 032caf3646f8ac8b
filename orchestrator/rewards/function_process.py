"""One worker process of the function host: reads JSON lines, calls the function, writes JSON lines. Single-threaded.

Guarantees: the pipe to the host carries nothing but replies, whatever the function prints (its stdout is stderr, its
stdin is empty); every request is answered once, in order, by its id; an exception is an answer, not an end. The process
and all that the function started end when the host closes the pipe or is gone, even in the middle of a call
(:mod:`orchestrator.process_watcher`). A function that exits or hangs is the host's business.

    python -m orchestrator.rewards.function_process module:function
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from orchestrator.api.errors import MAX_CAUSE, MAX_DETAIL, writable
from orchestrator.process_watcher import fork_under_watch, take_pipes
from orchestrator.rewards.function_protocol import BAD_RESULT, IMPORT_FAILED, NOT_FINITE


def load_function(target: str) -> Callable[[Any], Any]:
    """The function, as one of a single argument. AWS handlers (event, context) get None as context."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 2:
        return lambda event: function(event, None)
    return function  # type: ignore[no-any-return]


def answer_request(function: Callable[[Any], Any], request: dict[str, Any]) -> bytes:
    """One reply line."""
    reply: dict[str, Any]
    try:
        reply = {"id": request["id"], "result": function(request["event"])}
    except Exception as error:  # noqa: BLE001  whatever user code raises is its answer
        reply = _error(request["id"], type(error).__name__, str(error))
    try:
        text = json.dumps(reply, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # NaN, infinity, or a circular reference
        kind = NOT_FINITE if "JSON compliant" in str(error) else BAD_RESULT
        text = json.dumps(_error(request["id"], kind, f"the result is not JSON: {error}"))
    except (TypeError, RecursionError) as error:
        text = json.dumps(_error(request["id"], BAD_RESULT, f"the result is not JSON: {error}"))
    return text.encode() + b"\n"


def main(target: str) -> None:
    """Serve until the host closes the pipe."""
    fork_under_watch()
    given, taken = take_pipes()
    requests, replies = os.fdopen(given, "rb"), os.fdopen(taken, "wb", buffering=0)
    try:
        function = load_function(target)
    except Exception as error:  # noqa: BLE001  whatever user code raises is its answer
        replies.write(json.dumps(_error(-1, IMPORT_FAILED, f"{target}: {error!r}")).encode() + b"\n")
        return
    replies.write(b'{"ready":true}\n')
    for line in requests:
        replies.write(answer_request(function, json.loads(line)))


def _error(request: int, kind: str, message: str) -> dict[str, Any]:
    return {"id": request, "errorType": writable(kind, MAX_CAUSE), "errorMessage": writable(message, MAX_DETAIL)}


if __name__ == "__main__":
    main(sys.argv[1])
