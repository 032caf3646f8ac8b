"""Real runs in a process group of their own, which tests kill, resume and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.events import read_events

ROOT = Path(__file__).parents[2]


def start(*arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    """``rl-coserve train`` from the repository's root; ``path``: a folder of modules that it may import besides."""
    found = os.pathsep.join(one for one in (str(path or ""), os.environ.get("PYTHONPATH", "")) if one)
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "train", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", **({"PYTHONPATH": found} if found else {})},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """With its children, at once: as a machine that loses power."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind so far."""
    file = run / "events.jsonl"
    return [event for event in read_events(file) if event["kind"] == kind] if file.exists() else []
