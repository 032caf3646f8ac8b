"""Runs a probe of the vLLM plugin (``vllm_rlplugin.NAME_probe``) in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.api import RunError

LIMIT = 900.0  # seconds a probe may take on a machine that does other things


def run_probe(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON object on the probe's last line. Raises RunError when it fails or takes longer than :data:`LIMIT`."""
    command = [sys.executable, "-m", f"vllm_rlplugin.{name}_probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the {name} probe took longer than {LIMIT:.0f} s") from error
    if done.returncode != 0:
        raise RunError(f"the {name} probe ended with exit code {done.returncode}: {done.stderr[-800:]}")
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise RunError(f"the {name} probe printed nothing")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
