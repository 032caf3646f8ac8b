"""Plays one real run with ``rl-coserve train``, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.api import RunError


def train(config: Path, folder: Path, name: str, overrides: Sequence[str]) -> Path:
    """The folder of the run, which has ended. Raises RunError when it fails."""
    given = [f'run.folder="{folder}"', f"run.name={name}", *overrides]
    command = [sys.executable, "-m", "orchestrator.cli", "train", str(config), *given]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"the run {name} ended with exit code {done.returncode}: {done.stderr[-800:]}")
    return max(folder.glob(f"{name}-*"))
