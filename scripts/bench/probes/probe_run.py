"""Runs a probe of an engine (``vllm/NAME_probe.py``, ``megatron/NAME_probe.py`` beside this file) in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import RunError

_OURS = "orchestrator.api.errors."
CHECKOUT = Path(__file__).resolve().parents[3]  # whose packages `scripts` and `tests` are
LIMIT = 900.0  # seconds a probe may take on a machine that does other things


def run_probe(
    name: str,
    arguments: Sequence[str],
    *,
    package: str = "scripts.bench.probes.vllm",
    path: Path | None = None,
    limit: float = LIMIT,
) -> dict[str, Any]:
    """The JSON object on the probe's last line. Raises RunError when it fails or takes longer than ``limit`` seconds.

    ``path``: a folder whose packages come before the installed ones.
    """
    command = [sys.executable, "-m", f"{package}.{name}_probe", *arguments]
    before = [str(path)] if path else []
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*before, str(CHECKOUT), *given])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the {name} probe took longer than {limit:.0f} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        if last.startswith(_OURS):  # one clear error; the traceback above it says nothing more
            raise RunError(f"the {name} probe: {last.partition(': ')[2]}")
        raise RunError(f"the {name} probe ended with exit code {done.returncode}: {done.stderr[-800:]}")
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise RunError(f"the {name} probe printed nothing")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
