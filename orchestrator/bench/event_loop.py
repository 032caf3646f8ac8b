"""Delay of the orchestrator's event loop with 2,000 environments of mixed speed: 99th percentile, in milliseconds.

:mod:`orchestrator.bench.soak` runs; :mod:`orchestrator.bench.loop_delay` measures. The value is the delay that is the
program's own: less the time for which the kernel let the loop's thread wait for a processor that somebody else had; the
delay with that time is beside it. The full run takes 20 minutes, with 64 environments in real sandboxes, and also says
whether memory stays flat over the last 15 and whether a process is left; ``--quick`` takes 35 seconds.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from orchestrator.bench.loop_delay import WatchedSelector
from orchestrator.bench.soak import ENVIRONMENTS, SANDBOXED, Soaked, config_of, marked_processes, slope, soak
from orchestrator.runfolder import describe_machine

NAME = "event-loop"
_BAR = 5.0  # ms
_FULL, _QUICK = 1200.0, 26.0  # seconds of the run
_LAST = 900.0  # of which memory is judged
_MEAN, _MEAN_QUICK = 8.0, 4.0  # seconds of an environment's step
_FLAT = 60.0  # MiB an hour that a slope may have: 1 GiB after 17 hours


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises ConfigError where there is no sandbox, RunError when the run fails."""
    begun, load = datetime.datetime.now(datetime.UTC).isoformat(), os.getloadavg()
    mark = f"rl-coserve-soak-{os.getpid()}-{zlib.crc32(nonce.encode()):08x}"
    seconds = _QUICK if quick else _FULL
    selector = WatchedSelector()
    with tempfile.TemporaryDirectory(prefix="rl-coserve-soak-") as folder:
        config = config_of(_MEAN_QUICK if quick else _MEAN, zlib.crc32(nonce.encode()))
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            found = runner.run(soak(config, Path(folder), selector, mark, seconds))
    gc.collect()
    return result(found, quick, {"started": begun, "load_average": [load, os.getloadavg()], "nonce": nonce}, mark)


def result(found: Soaked, quick: bool, detail: dict[str, Any], mark: str) -> dict[str, Any]:
    """The figure from a finished run."""
    orphans = marked_processes(mark)
    value = found.delay["own_ms"]["p99"]
    judged = [point for point in found.memory if point[0] > found.memory[-1][0] - _LAST]
    rise = None if quick else slope(judged)
    clean = not orphans and found.closes and not found.tasks_left and found.descriptors[0] == found.descriptors[1]
    flat = rise is None or rise[1] <= 0 or rise[0] <= _FLAT
    return {
        "name": NAME,
        "kind": "real",
        "value": value,
        "unit": "ms, p99 of the event loop's delay, waiting for a processor not included",
        "reference": "the same with waiting for a processor",
        "reference_value": found.delay["delay_ms"]["p99"],
        "bar": f"<= {_BAR:g} ms; ledger closed, nothing left behind; full: memory rises by <= {_FLAT:g} MiB/h or not at all",
        "holds": value <= _BAR and clean and flat,
        **describe_machine(),
        "detail": {
            "quick": quick,
            "what": f"{ENVIRONMENTS} environments, of which {SANDBOXED} with a bubblewrap sandbox a step; engines, trainer "
            "and reward simulated; asyncio, pipeline, journal, store, checkpoints and sandboxes real",
            **found.delay,
            "memory_slope_mib_per_hour": rise,
            "memory_mib": [[round(at), round(mib, 1)] for at, mib in found.memory],
            "in_flight": spread(found.in_flight),
            "sandboxes_at_once": spread(found.sandboxes),
            "sandbox_runs": found.sandbox_runs,
            "orphans": len(orphans),
            "tasks_left": found.tasks_left,
            "descriptors": found.descriptors,
            "ledger_closes": found.closes,
            "ledger": found.ledger,
            "steps": found.steps,
            "seconds": round(found.seconds, 1),
            "processor_share": round(found.processor_seconds / found.seconds, 3),
            "niceness": os.nice(0),
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid()],
            **detail,
        },
    }


def spread(values: list[int]) -> dict[str, int]:
    """Least, median, most."""
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
