"""What every benchmark returns, in one form: figure, what it is compared with, commit, machine and versions, how it was measured.

It is what ``docs/results/NAME.json`` holds.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.run_folder import describe_machine
from scripts.bench.measured_sources import ROOT, digest_of, sources_of


def now() -> str:
    """Of the wall clock, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def source(name: str = "") -> dict[str, Any]:
    """What was measured: ``commit`` ("" outside of a git checkout), whether the sources of benchmark ``name`` are as they are
    there (``clean``; all tracked files, where it is none), and the hash of these ``sources``."""
    files = sources_of(name)
    sources = digest_of(files)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        untracked = f"--untracked-files={'all' if files else 'no'}"  # a source that nobody committed is a change
        clean = not git("status", "--porcelain", untracked, "--", *(str(ROOT / file) for file in files))
        return {"commit": git("rev-parse", "HEAD"), "clean": clean, "sources": sources}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "", "clean": False, "sources": sources}


def frame(
    name: str,
    kind: str,
    *,
    value: float | None,
    unit: str,
    reference: str,
    reference_value: float,
    bar: str,
    holds: bool | None,
    detail: dict[str, Any],
    quick: bool,
    nonce: str = "",
    begun: str = "",
    pids: Sequence[int] = (),
) -> dict[str, Any]:
    """The result, ended now. ``kind``: real or simulated. ``value``: None where nothing could be compared. ``holds``: None where
    nothing is claimed, as in a quick form, which shows that the measurement works and may fail, but claims no bar. ``begun``:
    see :func:`now`. ``nonce`` comes back as it was given. ``pids``: of processes that took part beside this one. ``detail`` may
    say all these itself, where parts are put together."""
    return {
        "name": name,
        "kind": kind,
        "value": value,
        "unit": unit,
        "reference": reference,
        "reference_value": reference_value,
        "bar": bar,
        "holds": None if quick and holds else holds,
        "source": source(name),
        **describe_machine(),
        "detail": {
            "quick": quick,
            "started": begun,
            "ended": now(),
            "pids": [os.getpid(), *pids],
            "nonce": nonce,
            **detail,
        },
    }
