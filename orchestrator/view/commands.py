"""The commands that look at a run: ``rl-coserve view``."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FindRun = Callable[[str], Path]


def add(commands: Any, find: FindRun) -> None:
    """Add them to the command line. ``find``: a run's folder by its name."""
    view = commands.add_parser("view", help="a live web page of a run, or of one that has ended")
    view.add_argument("name", nargs="?", default="latest", metavar="RUN", help="run folder (default: the newest)")
    view.add_argument("--port", type=int, default=0, help="on loopback (a free one)")
    view.add_argument("--token-file", default="", metavar="FILE", help="holds the page's token (a new one)")
    view.set_defaults(run=lambda arguments: _view(arguments, find))


def _view(arguments: argparse.Namespace, find: FindRun) -> int:
    from orchestrator.view.program import read_token, serve

    token = read_token(arguments.token_file, "--token-file")
    asyncio.run(serve(find(arguments.name), token, arguments.port))
    return 0


def no_colour() -> bool:
    """Whether people or their terminal want plain text."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
