"""The process that shows a run: ``rl-coserve view RUN``, and the child that ``rl-coserve train --view`` starts; or all runs of a
folder: ``rl-coserve view RUNS``.

It is one program in both cases, and all that it knows comes from the run's folder: so a page of a run that has ended is the
page of before, and nothing that happens here (a slow browser, a scrape, an exporter that hangs) reaches the run. As a child it
prints ``{"port": P}`` when it answers, then ``{"say": TEXT}`` for people, and ends some time after its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from orchestrator.api import ConfigError, bearer
from orchestrator.api.listener_limits import EndOfInput
from orchestrator.observe.view.exporter_queue import Beside
from orchestrator.observe.view.exporters import config_to_share, start_exporters
from orchestrator.observe.view.runs_page import Runs
from orchestrator.observe.view.view_server import Hub, Server
from orchestrator.process_watcher import take_pipes
from orchestrator.run_folder import RunFolder

TOKEN_VARIABLE = "RL_COSERVE_VIEW_TOKEN"
DRAIN_SECONDS = 5.0  # to read the last events after the run is gone
_LEAST = 16  # characters of a token


def read_token(file: str, field: str = "view.token_file") -> str:
    """``file:PATH`` for the token in a file; a new one where none is named. Raises ConfigError."""
    if not file:
        return secrets.token_urlsafe(24)
    fix = f"give a readable file that holds a token of at least {_LEAST} letters, digits, - or _"
    token = bearer.read_file(file, field, fix)
    if len(token) < _LEAST or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(field, file, f"holds no such token; {fix}")
    return bearer.FILE + os.path.abspath(file)


@dataclass(frozen=True, slots=True)
class Parent:
    """The run whose child this is. ``since``: the time of the run from which on exporters get what happens. Standard input and
    output are ``stdin`` and ``stdout`` here: what an exporter prints goes to the log."""

    since: float
    stdin: TextIO
    stdout: TextIO

    def tell(self, what: Mapping[str, Any]) -> None:
        """One line."""
        print(json.dumps(what), file=self.stdout, flush=True)


async def serve_run(folder: Path, token: str, port: int = 0, *, parent: Parent | None = None) -> None:
    """Show the run until a signal, on loopback: nothing of its config matters, which may be of an older version. ``parent``: as a
    child of the run, until standard input ends, at the run's own ``view.host``. Raises ConfigError for a port that is taken."""
    run = RunFolder.open(folder)
    beside: list[Beside] = []

    def export(event: dict[str, Any]) -> None:
        if parent is not None and float(event.get("t", 0.0)) >= parent.since:
            for exporter in beside:
                exporter.take(event)

    hub = Hub(folder, export)
    server = Server(hub, token, port)
    if parent is not None:
        config = run.config()
        say = parent.tell
        beside += start_exporters(config.logging, folder, config_to_share(config), lambda text: say({"say": text}))
        server = Server(hub, token, port, config.view.host, config.tls.files())
    async with _following(server, hub.run()) as ended:
        try:
            if parent is not None:
                parent.tell({"port": server.port})
                await asyncio.get_running_loop().connect_read_pipe(lambda: EndOfInput(ended), parent.stdin)
            else:
                print(f"view: {server.url}", flush=True)
            await ended.wait()
            if parent is not None:
                await _drain(hub)
        finally:
            await asyncio.gather(*(asyncio.to_thread(exporter.close) for exporter in beside))


async def serve_runs(folder: Path, token: str, port: int = 0) -> None:
    """Show the runs of a folder, on loopback, until a signal. Raises ConfigError for a port that is taken."""
    runs = Runs(folder)
    server = Server(runs, token, port, hubs=lambda: runs.hubs)
    async with _following(server, runs.run()) as ended:
        print(f"view: {server.url}", flush=True)
        await ended.wait()


@asynccontextmanager
async def _following(server: Server, follow: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Event]:
    """The server, and what follows the files for it; the event is set by a signal, or when that ended. Raises what ended it."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    following = asyncio.create_task(follow, name="follow what is written")
    following.add_done_callback(lambda _: ended.set())
    try:
        await _listen(server)
        yield ended
        if following.done():
            following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.close()


async def _listen(server: Server) -> None:
    try:
        await server.start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error.strerror
        fix = f"cannot be listened on ({why}); choose another, or 0 for a free one"
        raise ConfigError("view.port", server.port, fix) from error


async def _drain(hub: Hub) -> None:
    """The run is gone: read what it said last."""
    for _ in range(int(DRAIN_SECONDS / 0.1)):
        await hub.look()
        if hub.state.figures.over and not hub.follower.behind:
            return
        await asyncio.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """As a child: ``FOLDER --port P --since T``, the token's digest or file in the environment. Returns 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.observe.view.view_program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--since", type=float, default=0.0)
    options = parser.parse_args(argv)
    given, taken = take_pipes()
    parent = Parent(options.since, os.fdopen(given), os.fdopen(taken, "w"))
    try:
        asyncio.run(serve_run(options.folder, os.environ[TOKEN_VARIABLE], options.port, parent=parent))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
