"""Delay of the orchestrator's event loop with 2,000 environments of mixed speed: 99th percentile, in milliseconds.

:mod:`scripts.bench.micro.soak` runs; :mod:`scripts.bench.micro.loop_delay` measures. The value is the delay that is the
program's own: less the time for which the kernel let the loop's thread wait for a processor that somebody else had; the
delay with that time is beside it. On a busy machine the own part grows, too, as work piles up while the thread waits: give it
priority (``chrt --reset-on-fork --fifo 1 rl-coserve bench event-loop --quick``); ``detail`` says what it had. The full run adds
a soak of 30 minutes at niceness 10: whether memory stays flat over the last 20, when the buffer has long been full, and whether
anything is left behind.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from scripts.bench.micro.loop_delay import WatchedSelector
from scripts.bench.micro.soak import ENVIRONMENTS, SANDBOXED, config_of, marked_processes, slope, soak
from scripts.bench.result import frame, now

NAME = "event-loop"
_BAR = 5.0  # ms
_FULL, _QUICK = 1800.0, 26.0  # seconds of the run
_LAST = 1200.0  # of which memory is judged
_MEAN, _MEAN_QUICK = 8.0, 4.0  # seconds of an environment's step
_RESET_ON_FORK = 0x40000000  # a flag of the scheduler's policy
_FLAT = 60.0  # MiB an hour that a slope may have: 1 GiB after 17 hours


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises ConfigError where there is no sandbox, RunError when the run fails."""
    begun = now()
    first = part(_QUICK, _MEAN_QUICK, nonce)
    last = None
    if not quick:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.nice(10)
        last = part(_FULL, _MEAN, nonce)
    return result(first, last, {"started": begun, "pids": [os.getpid()], "nonce": nonce})


def part(seconds: float, mean: float, nonce: str) -> dict[str, Any]:
    """One run, and what it says of itself."""
    load = os.getloadavg()
    mark = f"rl-coserve-soak-{os.getpid()}-{zlib.crc32(nonce.encode()):08x}"
    selector = WatchedSelector()
    with tempfile.TemporaryDirectory(prefix="rl-coserve-soak-") as folder:
        config = config_of(mean, zlib.crc32(nonce.encode()))
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            found = runner.run(soak(config, Path(folder), selector, mark, seconds))
    orphans = marked_processes(mark)
    policies = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}
    return {
        **found.delay,
        "memory_slope_mib_per_hour": rise_of(found.memory),
        "memory_mib": [[round(at), round(mib, 1)] for at, mib in found.memory],
        "in_flight": spread(found.in_flight),
        "sandboxes_at_once": spread(found.sandboxes),
        "sandbox_runs": found.sandbox_runs,
        "orphans": len(orphans),
        "tasks_left": found.tasks_left,
        "descriptors": list(found.descriptors),
        "ledger_closes": found.closes,
        "ledger": found.ledger,
        "steps": found.steps,
        "seconds": round(found.seconds, 1),
        "processor_share": round(found.processor_seconds / found.seconds, 3),
        "niceness": os.nice(0),
        "scheduler": policies.get(os.sched_getscheduler(0) & ~_RESET_ON_FORK, "unknown"),
        "load_average": [load, os.getloadavg()],
    }


def rise_of(memory: list[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Slope of the last 20 minutes with its interval; None where there are not so many."""
    if memory[-1][0] - memory[0][0] < _LAST:
        return None
    return slope([point for point in memory if point[0] > memory[-1][0] - _LAST])


def is_clean(found: dict[str, Any]) -> bool:
    """Nothing is left behind, and everything accounted for."""
    before, after = found["descriptors"]
    return found["ledger_closes"] and not found["orphans"] and not found["tasks_left"] and before == after


def is_flat(found: dict[str, Any]) -> bool:
    """Memory does not rise, or by little."""
    rise = found["memory_slope_mib_per_hour"]
    return rise is not None and (rise[1] <= 0 or rise[0] <= _FLAT)


def result(first: dict[str, Any], last: dict[str, Any] | None, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from the part that measures the delay, and from the soak (None: there was none)."""
    value = first["own_ms"]["p99"]
    soaked = last is None or (is_clean(last) and is_flat(last))
    return frame(
        NAME,
        "real",
        value=value,
        unit="ms, p99 of the event loop's delay, waiting for a processor not included",
        reference="the same with waiting for a processor",
        reference_value=first["delay_ms"]["p99"],
        bar=f"<= {_BAR:g} ms; ledger closed, nothing left behind; soak: memory rises by <= {_FLAT:g} MiB/h or not at all",
        holds=value <= _BAR and is_clean(first) and soaked,
        detail={
            "what": f"{ENVIRONMENTS} environments, of which {SANDBOXED} with a bubblewrap sandbox a step; engines, trainer "
            "and reward simulated; asyncio, pipeline, journal, store, checkpoints and sandboxes real",
            **first,
            "soak": last,
            **detail,
        },
        quick=last is None,
    )


def spread(values: list[int]) -> dict[str, int]:
    """Least, median, most."""
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
