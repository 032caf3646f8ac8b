"""The embedded function host: functions of this installation behind the AWS Lambda Invoke REST API, on loopback.

    python -m orchestrator.rewards.host --function module:fn [--function name=module:fn ...] --token-env NAME [--port P]

    POST /2015-03-31/functions/{name}/invocations    JSON in, JSON out; X-Amz-Function-Error when the function failed
    PUT  /2019-09-30/functions/{name}/provisioned-concurrency   {"ProvisionedConcurrentExecutions": processes kept ready}
    GET  /stats                                      processes of every function, now

Guarantees: it answers nobody without the bearer token (read from the environment variable NAME, never an argument, and
taken out of the environment; ``sha256:HEX`` there, or in a file that it names as ``file:PATH``, is the token's digest, so that no
function can read the token); it listens on loopback, elsewhere only with TLS (or told to do without); bodies are limited; a
function that raises, hangs, exits, prints or returns garbage costs its caller an error and nobody else anything
(:mod:`orchestrator.rewards.process_pool`). When it is ready it prints ``{"port": P}``. With ``--die-with-stdin`` it ends when its
standard input does, so it never outlives the process that holds the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from orchestrator.api import ConfigError, bearer, tls
from orchestrator.api.listener_limits import (
    LISTENERS,
    SERVER_OPTIONS,
    BodyRefused,
    HttpListener,
    read_body,
    serve_until_told,
)
from orchestrator.rewards.function_service import FunctionService, refusal_reply, too_large
from orchestrator.rewards.process_pool import FunctionPool

LIMITS = LISTENERS["function host"]


def make_application(functions: Mapping[str, FunctionPool], token: str, listener: HttpListener) -> web.Application:
    """The HTTP side, for who has the token. Raises ConfigError for a file that holds none."""
    service = FunctionService(functions, token)

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = service.refuse_caller(request.headers.get("Authorization", ""))
        if reply is None:
            try:
                reply = await service.answer(request.method, request.path, await read_body(request, LIMITS))
            except BodyRefused as error:
                known = error.status == 413
                reply = too_large() if known else refusal_reply(error.status, "InvalidRequestException", str(error))
        return web.json_response(reply.value, status=reply.status, headers=reply.headers)

    application = web.Application(middlewares=[listener.middleware])
    application.router.add_route("*", "/{path:.*}", handle)
    return application


async def serve_functions(options: argparse.Namespace, token: str) -> None:
    """Until SIGTERM, SIGINT or the end of standard input. Raises ConfigError for an address that needs TLS, or files of it."""
    context = tls.check_listener(options.host, tls.of_arguments(options), "--host", options.allow_plain_http)
    functions = {
        name: FunctionPool(
            target,
            concurrency=options.concurrency,
            timeout=options.timeout,
            idle_seconds=options.idle_seconds,
        )
        for name, target in options.function
    }
    listener = HttpListener(LIMITS)
    application = make_application(functions, token, listener)
    # Cancelled handlers kill the workers they hold.
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5, **SERVER_OPTIONS)
    address = {"host": options.host, "port": options.port, "context": context}
    try:
        await serve_until_told(runner, listener, address, options.die_with_stdin)
    finally:
        for function in functions.values():
            await function.close()


def _function(text: str) -> tuple[str, str]:
    name, separator, target = text.rpartition("=")
    module, colon, function = target.partition(":")
    if not (module and colon and function):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as module:function or name=module:function")
    return (name if separator else function), target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.rewards.host", description=__doc__)
    parser.add_argument("--function", type=_function, action="append", required=True, metavar="[NAME=]MODULE:FN")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but loopback needs --tls-certificate"
    )
    parser.add_argument("--allow-plain-http", action="store_true", help="listen unencrypted where others can reach it")
    tls.add_arguments(parser)
    parser.add_argument("--port", type=int, default=0, help="0: a free one, which is printed")
    parser.add_argument(
        "--token-env", required=True, help="environment variable with the bearer token, or with file:PATH"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="worker processes per function")
    parser.add_argument("--timeout", type=float, default=10.0, help="time limit of a call, in seconds")
    parser.add_argument(
        "--idle-seconds", type=float, default=30.0, help="an idle worker process ends after this many seconds"
    )
    parser.add_argument("--die-with-stdin", action="store_true", help="end when standard input ends")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """0: told to stop. 2: wrong arguments, no token, or the port is taken."""
    options: Any = _parser().parse_args(arguments)
    bearer.take_variables([options.token_env])
    if not (token := bearer.variable(options.token_env)):
        print(f"{options.token_env} is empty: it must hold the bearer token, or file:PATH", file=sys.stderr)
        return 2
    try:
        asyncio.run(serve_functions(options, token))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
