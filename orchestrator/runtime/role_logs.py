"""What the processes of a run print: a file per role in its folder's ``logs/``, and what of it belongs into an error.

The trainer's ranks and the engines write theirs themselves, from whatever node (``LOGS`` in :mod:`orchestrator.cluster.actor`):
the run's folder is on a file system that all of them see. Guarantees: a file has at most about :data:`LIMIT` bytes, and
``NAME.log.1`` as many from before; what a process wrote is there after it died, but for what it writes in the moment in which a
full file is moved aside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.observe.report.page_text import printable

LIMIT = 64 << 20  # bytes
EVERY = 30.0  # seconds between two looks
_TAIL_LINES, _TAIL_BYTES, _WIDTH = 15, 16 << 10, 200
_logger = logging.getLogger("rl-coserve")


@contextmanager
def orchestrator_log(logs: Path) -> Iterator[None]:
    """This process's own warnings go to ``logs/orchestrator.log``, too."""
    file = logging.FileHandler((logs / "orchestrator").with_suffix(".log"), delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    # Without a handler Python writes to stderr; with one it would be silent there.
    console = [] if root.handlers or logging.lastResort is None else [logging.lastResort]
    for handler in (file, *console):
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, *console):
            root.removeHandler(handler)
        file.close()


async def rotate_forever(logs: Path) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(EVERY)
        await asyncio.to_thread(rotate, logs)


def rotate(logs: Path, limit: int = LIMIT) -> None:
    """Move what is in a file beyond ``limit`` to ``NAME.log.1``. Its writers append: they continue at its new end."""
    for file in _logs_of(logs):
        try:
            if file.stat().st_size > limit:
                shutil.copyfile(file, file.with_suffix(".log.1"))
                os.truncate(file, 0)
        except OSError as error:  # a full disk: the run has more to say about that
            _logger.warning("%s is not rotated: %s", file, error)


def _logs_of(logs: Path) -> list[Path]:
    try:
        return [logs / name for name in os.listdir(logs) if name.endswith(".log")]
    except OSError as error:  # a file server that is away: the next look may find it
        _logger.warning("%s is not rotated: %s", logs, error)
        return []


def tail_of(logs: Path, error: str) -> str:
    """The end of the log of the first process that the error names, where it has one; "": it names none. The trainer is its first
    rank, unless another is named."""
    named = [match[0] for match in re.finditer(r"[\w-]{1,64}", error[:4096])]
    file = next((logs / f"{name}.log" for name in named if (logs / f"{name}.log").is_file()), None)
    if file is None:
        return ""
    with file.open("rb") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = stream.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"the end of {file}:", *(f"  | {printable(line)[:_WIDTH]}" for line in lines)]) if lines else ""
