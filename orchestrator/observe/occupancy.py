"""How busy the engines are, by sampling: what the analysis of a run is made of (study notes, Q9).

Guarantee: counts only; it changes nothing that it looks at, and needs no clock: whoever samples does so at even intervals.
A worker is *busy* when requests were sent to it that have no answer yet. Samples without a trajectory in flight (between the
batches of a synchronous mode) say nothing about environments and are left out of the shares.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orchestrator.api import Trajectory
from orchestrator.ops.nvidia_driver import NvmlUnavailable, nvml_handles, start_nvml

SAMPLE_SECONDS = 0.5  # between two samples
Gpus = Callable[[], Awaitable[Sequence[float]]]


class Occupancy:
    """Totals since the last :meth:`take`."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._gpu = 0.0  # summed over its samples

    def sample(self, in_flight: int, loads: Sequence[int], used: Sequence[float] = ()) -> None:
        """``in_flight``: trajectories not scored yet; ``loads``: requests at each usable worker; ``used``: each GPU's
        utilisation now, 0 to 1, where there are any."""
        if not in_flight:
            return
        self._gpu += sum(used)
        self._totals.update(
            samples=1,
            in_flight=in_flight,
            usable=len(loads),  # workers
            busy=sum(load > 0 for load in loads),  # workers with work
            requests=sum(loads),
            gpu_samples=len(used),
        )

    def take(self, trained: Sequence[Trajectory]) -> dict[str, Any]:
        """The totals, and the durations of the turns of what was trained, for the event log; they begin anew."""
        turns = [turn for trajectory in trained for turn in trajectory.turns]
        names = ("samples", "in_flight", "busy", "usable", "requests", "gpu_samples")
        found = {
            "every": SAMPLE_SECONDS,
            "turns": len(turns),
            "generate_seconds": round(sum(turn.generate_seconds for turn in turns), 6),
            "episode_seconds": round(sum(item.finished_at - item.started_at for item in trained), 6),
            "environment_seconds": round(sum(turn.environment_seconds for turn in turns), 6),
            **{name: self._totals[name] for name in names},
            "gpu": round(self._gpu, 6),
        }
        self._totals.clear()
        self._gpu = 0.0
        return found


def nvml() -> Gpus | None:
    """Reads the utilisation of this machine's GPUs through NVML, from a thread: a driver in trouble takes its time to answer.
    None without pynvml, a driver or a GPU."""
    try:
        library = start_nvml()
    except NvmlUnavailable:
        return None
    try:
        devices = nvml_handles(library)
    except library.NVMLError:
        return None

    def read() -> list[float]:
        found = []
        for handle in devices:
            try:
                found.append(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
            except library.NVMLError:  # a GPU may fall off the bus, or not tell (MIG): then it is not in the mean
                continue
        return found

    async def read_beside() -> list[float]:
        return await asyncio.to_thread(read)

    return read_beside if devices else None
