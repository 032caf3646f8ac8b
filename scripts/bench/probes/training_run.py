"""Plays one real run with ``rl-coserve train``, in a process of its own: whole, or in sessions that each resume it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.api import RunError

_ENDS_WITHIN = 300.0  # seconds that an interrupted run has to write down where it was


def train(config: Path, folder: Path, name: str, overrides: Sequence[str]) -> Path:
    """The folder of the run, which has ended. Raises RunError when it fails."""
    given = [f'run.folder="{folder}"', f"run.name={name}", *overrides]
    command = [sys.executable, "-m", "orchestrator.cli", "train", str(config), *given]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"the run {name} ended with exit code {done.returncode}: {done.stderr[-800:]}")
    return max(folder.glob(f"{name}-*"))


def train_for(seconds: float, config: Path, folder: Path, name: str, overrides: Sequence[str]) -> tuple[Path, bool]:
    """The folder of the run, and whether it is complete: begun, or resumed where there is one, and interrupted as by Ctrl-C after
    so many seconds. The same call continues it. Raises RunError when it fails."""
    found = sorted(folder.glob(f"{name}-*"))
    command = [sys.executable, "-m", "orchestrator.cli", "train"]
    if not found:
        command += [str(config), f'run.folder="{folder}"', f"run.name={name}", *overrides]
    elif is_complete(found[-1]):
        return found[-1], True
    else:
        command += ["--resume", str(found[-1])]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("ab") as log:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            code = run.wait(_ENDS_WITHIN)
        finally:
            run.kill()
            run.wait()
    path = max(folder.glob(f"{name}-*"), default=None)
    if path is None or code not in (0, 130):
        said = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-800:]
        raise RunError(f"the run {name} ended with exit code {code}: {said}")
    return path, is_complete(path)


def is_complete(run: Path) -> bool:
    """Whether its last life ended by itself."""
    file = run / "summary.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8"))["status"] == "completed"
