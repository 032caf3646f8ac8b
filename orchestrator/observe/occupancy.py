"""How busy the engines are, by sampling: what the analysis of a run is made of (study notes, Q9).

Guarantee: counts only; it changes nothing that it looks at, and needs no clock: whoever samples does so at even intervals.
A worker is *busy* when requests were sent to it that have no answer yet. Samples without a trajectory in flight (between the
batches of a synchronous mode) say nothing about environments and are left out of the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import Trajectory
from orchestrator.ops.nvidia_driver import NvmlUnavailable, nvml_handles, start_nvml

SAMPLE_SECONDS = 0.5  # between two samples
Gpus = Callable[[], Sequence[float]]


@dataclass(slots=True)
class Occupancy:
    """Totals since the last :meth:`take`. ``gpus``: each GPU's utilisation now, 0 to 1, where there are any."""

    gpus: Gpus | None = None
    samples: int = 0
    in_flight: int = 0  # summed over the samples
    busy: int = 0  # workers with work
    usable: int = 0  # workers
    requests: int = 0
    gpu: float = 0.0
    gpu_samples: int = 0

    def sample(self, in_flight: int, loads: Sequence[int]) -> None:
        """``in_flight``: trajectories not scored yet; ``loads``: requests at each usable worker."""
        if not in_flight:
            return
        self.samples += 1
        self.in_flight += in_flight
        self.usable += len(loads)
        self.busy += sum(load > 0 for load in loads)
        self.requests += sum(loads)
        for used in self.gpus() if self.gpus is not None else ():
            self.gpu += used
            self.gpu_samples += 1

    def take(self, trained: Sequence[Trajectory]) -> dict[str, Any]:
        """The totals, and the durations of the turns of what was trained, for the event log; they begin anew."""
        turns = [turn for trajectory in trained for turn in trajectory.turns]
        found = {
            "every": SAMPLE_SECONDS,
            "turns": len(turns),
            "generate_seconds": round(sum(turn.generate_seconds for turn in turns), 6),
            "episode_seconds": round(sum(item.finished_at - item.started_at for item in trained), 6),
            "environment_seconds": round(sum(turn.environment_seconds for turn in turns), 6),
            "samples": self.samples,
            "in_flight": self.in_flight,
            "busy": self.busy,
            "usable": self.usable,
            "requests": self.requests,
            "gpu": round(self.gpu, 6),
            "gpu_samples": self.gpu_samples,
        }
        self.samples = self.in_flight = self.busy = self.usable = self.requests = self.gpu_samples = 0
        self.gpu = 0.0
        return found


def nvml() -> Gpus | None:
    """Reads the utilisation of this machine's GPUs through NVML; None without pynvml, a driver or a GPU."""
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

    return read if devices else None
