"""How long one routing decision takes with 4,096 trajectories in flight over 64 workers: 99th percentile, in milliseconds.

The production router (:mod:`orchestrator.policies.routing.turn_routing`), alone, with the thread's processor clock around each
decision: a turn asks, and is sent or queued. (The wall clock would count other processes of a busy machine, which interrupt a
decision for milliseconds; ``wall_p99_ms`` has it beside.) Cases: no caps; ROSE's cap of 16 on dedicated workers, which 3,072
turns wait behind; the same in two hardware classes with task affinity and 32 borrowed workers beside; the baselines. Between
two decisions, untimed, a turn of some worker ends and its trajectory's environment steps; what its slot then admits is a
decision as well. The value is the p99 of the slowest case. Trajectories never end here and are all alike, so ``prefix_kept``
(turns that went back to the worker of the turn before) compares the rules, and is no forecast for a workload.
"""

from __future__ import annotations

import gc
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.policies.routing.turn_routing import CACHE_AFFINE, LEAST_LOADED, ROUND_ROBIN, Seat, TurnRouter
from scripts.bench.result import frame, now

NAME = "routing"
TRAJECTORIES, WORKERS = 4096, 64
_BAR = 0.2  # ms
_PAPER = 10.0  # ms, at most: ROSE 6.4
_FULL, _QUICK = 400_000, 60_000  # decisions a case


@dataclass(frozen=True)
class Case:
    """A fleet, its rule, and the tasks that run on it."""

    name: str
    seats: Sequence[Seat]
    rule: str = CACHE_AFFINE
    tasks: Sequence[str] = ("t",)
    affinity: tuple[tuple[str, str], ...] = ()


_CAPPED = [Seat(cap=16)] * WORKERS
_MIXED = [Seat("H800", 16)] * 16 + [Seat("H20", 16)] * 16 + [Seat("H20", 16, borrowed=True)] * 32
_TASKS = ("FrozenLake", "maths", "code")
CASES = (
    Case("cache-affine, no caps", [Seat()] * WORKERS),
    Case("cache-affine, cap 16", _CAPPED),
    Case("cache-affine, two classes, half borrowed", _MIXED, CACHE_AFFINE, _TASKS, (("FrozenLake", "H800"), ("default", "H20"))),
    Case("least-loaded, cap 16", _CAPPED, LEAST_LOADED),
    Case("round-robin, cap 16", _CAPPED, ROUND_ROBIN),
)  # fmt: skip


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun = now()
    seed = zlib.crc32(nonce.encode())
    rows = [measure(case, _QUICK if quick else _FULL, seed) for case in CASES]
    value = max(row["p99_ms"] for row in rows)
    return frame(
        NAME,
        "real",
        value=value,
        unit="ms of processor time, p99 of one routing decision, slowest case",
        reference="overhead of the rollout scheduler, at most (ROSE 6.4, paper)",
        reference_value=_PAPER,
        bar=f"<= {_BAR:g} ms",
        holds=value <= _BAR,
        detail={
            "trajectories": TRAJECTORIES,
            "workers": WORKERS,
            "cases": rows,
            "samples": sum(row["decisions"] for row in rows),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


class Traffic:
    """4,096 trajectories in their steady state: each has a turn that runs or waits. Draws by ``seed``."""

    def __init__(self, case: Case, seed: int) -> None:
        self.router = TurnRouter(case.seats, case.rule, affinity=dict(case.affinity))
        self.running: list[str] = []
        self._tasks, self._draw = case.tasks, random.Random(seed)
        for worker in range(len(case.seats)):
            self.router.open_worker(worker)
        for number in range(TRAJECTORIES):
            self.router.queue_turn(f"{number}/0", str(number), case.tasks[number % len(case.tasks)])
        while (granted := self.router.grant_turn()) is not None:
            self.running.append(granted[0])

    def end_turn(self) -> tuple[str, str, str]:
        """Some turn ends: what its trajectory asks for next."""
        place = self._draw.randrange(len(self.running))
        request, self.running[place] = self.running[place], self.running[-1]
        self.running.pop()
        trajectory, _, turn = request.partition("/")
        self.router.end_turn(request)
        return f"{trajectory}/{int(turn) + 1}", trajectory, self._tasks[int(trajectory) % len(self._tasks)]

    def decide(self, request: str, trajectory: str, task: str) -> tuple[str, int] | None:
        """The decision that is timed: a turn asks; the turn and the worker that may go on."""
        self.router.queue_turn(request, trajectory, task)
        return self.router.grant_turn()


def measure(case: Case, decisions: int, seed: int) -> dict[str, Any]:
    """Times of ``decisions`` decisions in the steady state."""
    traffic = Traffic(case, seed)
    times: list[int] = []
    wall: list[int] = []
    kept = moved = 0
    last = {request.partition("/")[0]: -1 for request in traffic.running}
    clock, seen = time.thread_time_ns, time.perf_counter_ns
    collecting = gc.isenabled()
    gc.disable()  # a collection is a pause of the process, not of a decision; the orchestrator's own are in event-loop delay
    try:
        while len(times) < decisions:
            asked = traffic.end_turn()
            since, begun = seen(), clock()
            granted = traffic.decide(*asked)
            times.append(clock() - begun)
            wall.append(seen() - since)
            while granted is not None:
                name, worker = granted
                traffic.running.append(name)
                owner = name.partition("/")[0]
                if (before := last.get(owner, -1)) >= 0:
                    kept, moved = kept + (before == worker), moved + (before != worker)
                last[owner] = worker
                since, begun = seen(), clock()
                granted = traffic.router.grant_turn()
                if granted is not None:
                    times.append(clock() - begun)
                    wall.append(seen() - since)
    finally:
        if collecting:
            gc.enable()
    times.sort()
    wall.sort()
    return {
        "case": case.name,
        "decisions": len(times),
        "p50_ms": times[len(times) // 2] / 1e6,
        "p99_ms": times[len(times) * 99 // 100] / 1e6,
        "p999_ms": times[len(times) * 999 // 1000] / 1e6,
        "max_ms": times[-1] / 1e6,
        "wall_p99_ms": wall[len(wall) * 99 // 100] / 1e6,
        "running": len(traffic.running),
        "queued": traffic.router.queued,
        "prefix_kept": round(kept / max(1, kept + moved), 4),
    }
