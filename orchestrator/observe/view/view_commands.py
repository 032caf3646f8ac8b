"""The commands that look at a run: ``rl-coserve view | top | trace | show``."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError

FindRun = Callable[[str], Path]


def add_view_commands(commands: Any, find: FindRun) -> None:
    """Add them to the command line. ``find``: a run's folder by its name."""
    view = commands.add_parser(
        "view", help="serve a live web page of a run, running or finished, or of all runs in a folder"
    )
    view.add_argument(
        "name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest), or a folder of runs"
    )
    view.add_argument("--port", type=_port, default=0, help="port on loopback (default: a free one)")
    view.add_argument(
        "--token-file", default="", metavar="FILE", help="file with the page's token (default: a new token)"
    )
    view.set_defaults(run=lambda arguments: _view(arguments, find))

    top = commands.add_parser("top", help="watch a run in the terminal")
    top.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    top.add_argument("--once", action="store_true", help="print once and exit")
    top.add_argument("--json", action="store_true", help="print once as JSON and exit")
    top.set_defaults(run=lambda arguments: _top(arguments, find))

    trace = commands.add_parser("trace", help="write what a run did as a trace for Perfetto (ui.perfetto.dev)")
    trace.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    trace.add_argument(
        "--out",
        default="trace.json",
        metavar="FILE",
        help="file to write (default: trace.json; .gz compresses it)",
    )
    trace.add_argument("--steps", default="", metavar="FIRST-LAST", help="only these training steps")
    trace.set_defaults(run=lambda arguments: _trace(arguments, find))

    show = commands.add_parser(
        "show", help="show what the agent saw and said: a list of trajectories, or one turn by turn"
    )
    show.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    show.add_argument("id", nargs="?", default="", metavar="ID", help="the trajectory to show in full")
    one = show.add_mutually_exclusive_group()
    for pick, order in (("best", "highest reward"), ("worst", "lowest reward"), ("longest", "most generated tokens")):
        help_ = f"show the selected trajectory with the {order}"
        one.add_argument(f"--{pick}", dest="pick", action="store_const", const=pick, default="", help=help_)
    one.add_argument("--failed", action="store_true", help="show the latest one that failed")
    show.add_argument("--step", type=int, metavar="N", help="only trajectories of this training step")
    show.add_argument("--task", default="", metavar="NAME", help="only trajectories of this task")
    show.add_argument(
        "--cause", default="", metavar="END", help="only those that ended this way: trained, failed, 'failed: ...'"
    )
    show.add_argument(
        "--reward", type=_rewards, default=(None, None), metavar="LOW:HIGH", help="only rewards from LOW to HIGH"
    )
    show.add_argument("--most", type=_count, default=20, metavar="N", help="lines to list (default: 20)")
    show.add_argument("--json", action="store_true", help="print as JSON")
    show.set_defaults(run=lambda arguments: _show(arguments, find))


def _port(text: str) -> int:
    """A port, 0 for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 1 to 65535, or 0 for a free one")
    return int(text)


def _rewards(text: str) -> tuple[float | None, float | None]:
    """``LOW:HIGH``, either of which may be left out."""
    try:
        low, high = (float(part) if part else None for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of rewards; write 0.5:1, 0.5: or :0") from None
    return low, high


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; give 1 to 10,000")
    return int(text)


def _show(arguments: argparse.Namespace, find: FindRun) -> int:
    from rich.console import Console

    from orchestrator.observe.trajectory_reader import TrajectoryChoice, TrajectoryReader
    from orchestrator.observe.view.trajectory_screen import list_screen, trajectory_screen

    reader = TrajectoryReader(find(arguments.name))
    cause = "failed" if arguments.failed else arguments.cause
    chosen = TrajectoryChoice(
        arguments.task, arguments.step, cause, least=arguments.reward[0], most=arguments.reward[1]
    )
    if arguments.id or arguments.pick or arguments.failed:
        if arguments.id:
            line = reader.find(arguments.id)
        else:
            order = arguments.pick or "newest"
            found, _ = reader.lines(chosen, order, 0, 1)
            if not found:
                wanted = ", ".join([*filter(None, [arguments.pick]), *chosen.words()])
                raise ConfigError("show", wanted, f"no such trajectory in {reader.folder.name}")
            line = found[0]
        shown = reader.read(line)
        if arguments.json:
            print(json.dumps(asdict(shown)))
        else:
            Console(soft_wrap=True).print(trajectory_screen(shown, reader.tokens.missing))
        return 0
    lines, total = reader.lines(chosen, most=arguments.most)
    if arguments.json:
        print(json.dumps({"trajectories": lines, "total": total}))
        return 0
    asked = "".join(f", {one}" for one in chosen.words())
    Console(soft_wrap=True).print(list_screen(lines, total, f" of {reader.folder.name}{asked}"))
    if lines:
        print(f"\nshow one: rl-coserve show {shlex.join([arguments.name, lines[0]['trajectory_id']])}")
    return 0


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

    class Pictures(Hub):
        """Each picture is shown at once, those of half a log included."""

        show = staticmethod(_say_percent)

        async def draw(self, shown: Mapping[str, Any]) -> None:
            await super().draw(shown)
            self.show(shown)

    hub = Pictures(find(arguments.name))
    console = Console(soft_wrap=False)
    if arguments.once or arguments.json or not sys.stdout.isatty():
        asyncio.run(hub.look())
        if arguments.json:
            print(hub.picture.decode())
        else:
            console.print(screen(json.loads(hub.picture)))
        return 0
    asyncio.run(_follow(hub, console))
    return 0


def _say_percent(shown: Mapping[str, Any]) -> None:
    """A script reads only the picture."""
    if "reading" in shown:
        print(f"reading the log, {shown['reading']} %", file=sys.stderr, flush=True)


async def _follow(hub: Any, console: Any) -> None:
    """Redraw until the run ends, or a key stroke (Ctrl-C) does."""
    from rich.live import Live

    from orchestrator.observe.view.top import screen
    from orchestrator.observe.view.view_server import LOOK_SECONDS

    with Live("reading the log", console=console, auto_refresh=False, screen=True) as live:
        live.refresh()
        hub.show = lambda shown: live.update(screen(shown), refresh=True)
        await hub.look()
        while not hub.state.figures.over:
            await asyncio.sleep(LOOK_SECONDS)
            await hub.look()
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
