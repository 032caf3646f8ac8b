"""Simulated rollout speed-up with 4, 8 and 16 borrowed serving GPUs (ROSE, figure 14).

Five steps of each of three seeds, in the mean. ``rose.toml``: 8 dedicated H800 generate with Qwen3-8B; 16 serving engines of
Qwen2.5-7B replay an hour of Azure's code trace, one that prefills to three that decode. What rollouts get of a serving GPU is
decided by the policies of a real one (admission by both SLOs, budgets with headroom, leases of 10 s), which GPU by its KV use,
which worker a turn goes to by the run's own router. The detail has serving's P99 beside its SLO and beside that of serving alone,
and, with one seed, a longer-tailed workload, another trace, caps that spread all trajectories evenly (the paper's 16 fill
dedicated ones first), and serving engines that prefill and decode on one device (ROSE 4.3, of which it prints no figure). The
workload was calibrated on the run without borrowed GPUs and on four (the file says how): those rows prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.bench.rose_runs import played
from orchestrator.bench.simulated import frame, now, row

NAME = "borrowed"
PRINTED = {4: 1.26, 8: 1.45, 16: 1.69}
BAR = 1.60
SEEDS = 3
_SOURCE = "ROSE appendix E, figure 14"
_TAIL = ("sim.tasks.frozenlake.response_sigma=1.0",)
_COLLOCATED = ("sim.borrowed.phases=collocated",)
_EVEN = ("rollout.routing.cap=10", "rollout.routing.served_cap=11")  # as many as 256 trajectories need on 24 GPUs
_MOONCAKE = (  # prompts of 12k tokens in the mean, up to 120k: no SLO of 0.5 s
    "sim.borrowed.trace=mooncake_conversation",
    "sim.borrowed.speed=1.0",
    "sim.borrowed.ttft=10.0",
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun = now()
    counts = (16,) if quick else tuple(PRINTED)
    seconds, serving, rows = _figure_14(counts, 2 if quick else 5, 1 if quick else SEEDS)
    value = seconds["0"] / seconds["16"]
    detail: dict[str, Any] = {"rollout_seconds": seconds, "serving": serving, "rows": rows}
    if not quick:
        others = {"longer tail": _TAIL, "Mooncake's conversation trace": _MOONCAKE, "even caps": _EVEN}
        for name, extra in {**others, "collocated": _COLLOCATED}.items():
            found, users, _ = _figure_14((16,), 5, 1, extra)
            detail[name] = {"rollout_seconds": found, "speed_up": found["0"] / found["16"], "serving": users}
    late = max(one["ttft_late"] for one in serving.values())
    return frame(
        NAME,
        value,
        "rollout time on 8 dedicated GPUs over that with 16 borrowed ones beside",
        "ROSE figure 14 (paper)",
        PRINTED[16],
        f">= {BAR} (1.69 less the simulator's own error of 5.3 %), and P99 of serving within its SLOs",
        value >= BAR and late <= 0.01,
        detail,
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _figure_14(
    counts: Sequence[int], steps: int, seeds: int, extra: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, Any], list[dict[str, Any]]]:
    """Rollout seconds by borrowed GPUs, what serving's users saw, and the rows."""
    seconds: dict[str, float] = {}
    serving: dict[str, Any] = {}
    for workers in (0, *counts):
        given = extra if workers or extra != _EVEN else ()
        one = played([f"sim.borrowed.workers={workers}", *given], steps, seeds)
        seconds[str(workers)] = one["rollout_seconds"]
        if workers:
            serving[str(workers)] = one
    alone = seconds["0"]
    rows = [row("calibration: rollout on 8 GPUs, s", "839", 838.0, 840.0, alone, "ROSE table 1 and figure 14")]
    for workers in counts:
        what = f"speed-up with {workers} borrowed GPUs"
        printed, known = PRINTED[workers], "calibration: " if workers == 4 else ""
        why = "the longest trajectories decode at the speed of one GPU's memory, however many there are"
        rows.append(row(known + what, str(printed), printed, printed, alone / seconds[str(workers)], _SOURCE, why))
    late = max(users["ttft_late"] - users["alone_ttft_late"] for users in serving.values())
    what = "prompts late for 0.5 s beside rollouts, less those late without, share"
    rows.append(row(what, "0", 0.0, 0.0005, max(0.0, late), "ROSE 6: no violation of P99"))
    for name, limit in (("ttft", 0.5), ("tpot", 0.15)):
        worst = max(users[f"{name}_p99"] for users in serving.values())
        rows.append(
            row(f"serving's P99 {name.upper()} in these, s", f"<= {limit}", 0.0, limit, worst, "ROSE 6, its SLO")
        )
    return seconds, serving, rows
