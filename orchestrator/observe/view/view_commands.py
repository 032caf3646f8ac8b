"""The commands that look at a run: ``rl-coserve view | top | trace``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FindRun = Callable[[str], Path]


def add_view_commands(commands: Any, find: FindRun) -> None:
    """Add them to the command line. ``find``: a run's folder by its name."""
    view = commands.add_parser(
        "view", help="a live web page of a run, of one that has ended, or of all runs of a folder"
    )
    view.add_argument(
        "name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest), or a folder of runs"
    )
    view.add_argument("--port", type=_port, default=0, help="on loopback (a free one)")
    view.add_argument("--token-file", default="", metavar="FILE", help="holds the page's token (a new one)")
    view.set_defaults(run=lambda arguments: _view(arguments, find))

    top = commands.add_parser("top", help="the same in the terminal")
    top.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    top.add_argument("--once", action="store_true", help="one picture, then end")
    top.add_argument("--json", action="store_true", help="one picture as JSON, then end")
    top.set_defaults(run=lambda arguments: _top(arguments, find))

    trace = commands.add_parser("trace", help="write what a run did as a trace for Perfetto (ui.perfetto.dev)")
    trace.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    trace.add_argument("--out", default="trace.json", metavar="FILE", help="trace.json; .gz is compressed")
    trace.add_argument("--steps", default="", metavar="FIRST-LAST", help="only these training steps")
    trace.set_defaults(run=lambda arguments: _trace(arguments, find))


def _port(text: str) -> int:
    """A port, 0 for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give one of 1 to 65535, or 0 for a free one")
    return int(text)


def _view(arguments: argparse.Namespace, find: FindRun) -> int:
    from orchestrator.observe.view.runs_page import runs_in
    from orchestrator.observe.view.view_program import read_token, serve_run, serve_runs

    token, folder = read_token(arguments.token_file, "--token-file"), Path(arguments.name)
    if not (folder / "config.json").exists() and runs_in(folder):
        asyncio.run(serve_runs(folder.resolve(), token, arguments.port))
    else:
        asyncio.run(serve_run(find(arguments.name), token, arguments.port))
    return 0


def _top(arguments: argparse.Namespace, find: FindRun) -> int:
    from rich.console import Console

    from orchestrator.observe.view.top import screen
    from orchestrator.observe.view.view_server import Hub

    hub = Hub(find(arguments.name))
    asyncio.run(hub.look())
    if arguments.json:
        print(hub.picture.decode())
        return 0
    console = Console(soft_wrap=False)
    if arguments.once or not sys.stdout.isatty():
        console.print(screen(json.loads(hub.picture)))
        return 0
    asyncio.run(_follow(hub, console))
    return 0


async def _follow(hub: Any, console: Any) -> None:
    """Redraw until the run ends, or a key stroke (Ctrl-C) does."""
    from rich.live import Live

    from orchestrator.observe.view.top import screen
    from orchestrator.observe.view.view_server import LOOK_SECONDS

    with Live(screen(json.loads(hub.picture)), console=console, auto_refresh=False, screen=True) as live:
        while not hub.state.figures.over:
            await asyncio.sleep(LOOK_SECONDS)
            number = hub.number
            await hub.look()
            if hub.number != number:
                live.update(screen(json.loads(hub.picture)), refresh=True)
    console.print(screen(json.loads(hub.picture)))


def _trace(arguments: argparse.Namespace, find: FindRun) -> int:
    from orchestrator.observe.view.run_trace import write_trace

    found = write_trace(find(arguments.name), Path(arguments.out), arguments.steps)
    print(
        f"trace: {arguments.out} ({found.events:,} events, {found.trajectories:,} trajectories); open it in ui.perfetto.dev"
    )
    if found.note:
        print(found.note)
    return 0
