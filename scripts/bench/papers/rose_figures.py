"""Simulated figures of ROSE beside the printed ones: 7 (end to end), 8 (spot and serverless), tables 1 (autoscaling and
multiplexing in place of co-serving), 3 (the rollout scheduler), 4 (leases of prefixes) and 5 (more traffic).

``rose.toml`` and, for 32B, the overrides here; whole clusters, as bursts of serving do not shrink with a part of one. 8B: five
steps of each of three seeds; 32B: three steps, of 1,024 trajectories each. Baselines get the same devices and the same
workload. What the paper does not print of them is ASSUMED, in the sections of the simulator: how spot devices come and go (at
random between a quarter of them and all, as its trace is only drawn), how long starts and reloads take ("tens of seconds"), when
the autoscaler acts. A printed time is compared as a ratio to ROSE's own.

RLBoost+ and lambda-RL have as many devices at most as the paper says (16, and 32 at 32B: 8 engines), and fetch whole weights over
the link to the other cluster, since what ships differences is ROSE's own engine: in 31 and 96 s, the shortest that 6.3 prints for
whole weights there. Who is pinned (table 3) is shared out evenly over all workers (6.4: "a fixed rollout worker").

The rows are under ROSE's rule of routing, but for those that name the other one (``bench borrowed`` has both). The value is
RLBoost+'s rollout time, under whichever rule it is faster, over that of serving devices under "least-utilized", 8B.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from orchestrator.sim.hardware import TRAIN_SERIAL_SECONDS
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.borrowed import RULES
from scripts.bench.papers.rose_runs import played
from scripts.bench.papers.run_figures import RunFigures, measure
from scripts.bench.papers.simulated import exactly, row, simulated_frame
from scripts.bench.result import now

NAME = "rose-figures"
_TASK = "sim.tasks.frozenlake"
_BORROW = "sim.borrowed.workers=16"
SIZES: dict[str, tuple[int, int, tuple[str, ...]]] = {  # steps, seeds, overrides
    "8B": (5, 3, (_BORROW,)),
    "32B": (
        3,
        1,
        (  # 6: TP 4, 16 dedicated GPUs, 64 borrowed; ALFWorld, batch 1024
            "sim.model=Qwen3-32B",
            "sim.tensor_parallel=4",
            "rollout.workers=4",
            "rollout.environments=1024",
            "rollout.groups_per_step=64",
            "rollout.routing.cap=64",
            "rollout.routing.served_cap=64",
            "sim.pull_gb_s=3.12",  # 6.3: 65.5 GB in 21 s
            _BORROW,
            "sim.borrowed.serving=16",
            "sim.borrowed.model=Qwen2.5-32B",
            "sim.borrowed.ttft=1.0",
            "sim.borrowed.tpot=0.45",
            "sim.borrowed.speed=0.98",  # CALIBRATED: P99 TTFT of serving alone, 716.1 ms (table 1)
            f"{_TASK}.turns_min=4",  # 2.2: 86 % prompts, counted as in rose.toml: 13 turns in the mean
            f"{_TASK}.turns_max=22",
            f"{_TASK}.response_sigma=1.0",  # this and ALFWorld's environment: ASSUMED
            f"{_TASK}.step_seconds=3.0",
            f"{_TASK}.step_sigma=1.0",
            f"{_TASK}.response_tokens=750",  # CALIBRATED: 960.1 s x 1.26 x 1.48 without borrowed devices (6.1)
        ),
    ),
}
_WHOLE = {"8B": 16.4 / 31, "32B": 65.5 / 96}  # GB/s of whole weights to another cluster (6.3, shard-aware)
_MOST = {"8B": 16, "32B": 8}  # engines that RLBoost+ and lambda-RL have (6.1)
_EVEN = {"8B": (10, 11), "32B": (51, 52)}  # turns of a dedicated and a borrowed engine, which hold a batch together
SPREAD = RULES["least-utilized"]
NOTHING = ("sim.borrowed.workers=0",)
_TRAINED = (f"sim.trainer_serial_seconds={TRAIN_SERIAL_SECONDS}", "run.mode=one_off", "rollout.alpha=1")
_DAPO = ("rollout.dynamic_sampling=true", "rollout.redundant_groups=2.0")
_AREAL = ("run.mode=areal", "rollout.alpha=1")
TRAINERS = {"8B": 8, "32B": 32}
ROSE_SECONDS = {"8B": 496.3, "32B": 960.1}  # table 1
ROLL_SECONDS = {"8B": 496.3 * 1.20 * 1.41, "32B": 960.1 * 1.26 * 1.48}  # 6.1
_OURS, _SPOT = "coserve, least-utilized", "spot, least-utilized"
_ASSUMED = "how devices come and go, and how long they start, is assumed"


def simulated(size: str, steps: int, extra: Sequence[str] = ()) -> RunFigures:
    """One run of a size. Raises SimulationFailed."""
    return measure(load_scenario("rose", [f"run.steps={steps}", *SIZES[size][2], *extra]))


def _how(name: str) -> str:
    return f"sim.borrowed.how={name}"


def _elsewhere(size: str, name: str) -> tuple[str, ...]:
    """Devices of another cluster, that nobody serves on."""
    return (_how(name), f"sim.borrowed.workers={_MOST[size]}", f"sim.pull_gb_s={_WHOLE[size]:.3f}")


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun = now()
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for size in ("8B",) if quick else SIZES:
        one, more = _rollouts(size, quick)
        found[size] = one
        rows += more
        if not quick:
            found[f"{size}, end to end"], more = _end_to_end(size)
            rows += more
    seconds = {name: one["rollout_seconds"] for name, one in found["8B"].items()}
    value = min(seconds["spot"], seconds[_SPOT]) / seconds[_OURS]
    return simulated_frame(
        NAME,
        value=value,
        unit="rollout time with spot devices (RLBoost+) over that with serving devices, spread 'least-utilized', 8B",
        reference="ROSE 6.1, figure 8a (paper)",
        reference_value=1.20,
        bar=">= 1.1",
        holds=value >= 1.1,
        detail={"runs": found, "rows": rows},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _rollouts(size: str, quick: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Table 1, figure 8 and table 3."""
    own, theirs = _EVEN[size]
    variants: dict[str, tuple[str, ...]] = {
        "coserve": (),
        "alone": NOTHING,
        "spot": _elsewhere(size, "spot"),
        "serverless": _elsewhere(size, "serverless"),
        _OURS: SPREAD,
        _SPOT: (*_elsewhere(size, "spot"), *SPREAD),
        "autoscale": (_how("autoscale"),),
        "multiplex": (_how("multiplex"),),
        "pinned": (
            f"rollout.routing.cap={own}",
            f"rollout.routing.served_cap={theirs}",
            "rollout.routing.imbalance=1000000",
        ),
        "turn-wise": ("rollout.routing.policy=least-loaded",),
    }
    found: dict[str, Any] = {}
    for name, extra in variants.items():
        if quick and name not in ("coserve", "alone", "spot", _OURS, _SPOT):
            continue
        steps, seeds, given = SIZES[size]
        found[name] = played([*given, *extra], *((2, 1) if quick else (steps, seeds)))
    if quick:
        return found, _figure_8(size, found)
    return found, [*_figure_8(size, found), *_table_1(size, found), *_table_3(size, found), *_tables_4_5(size, found)]


def _figure_8(size: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    seconds = {name: one["rollout_seconds"] for name, one in found.items()}
    place = "ROSE 6.1, figure 8"
    whole = ROLL_SECONDS[size]
    rows = [row(f"calibration: {size}, ROLL: rollout, s", f"{whole:.0f}", whole, whole, seconds["alone"], place)]
    printed = {"spot": ("RLBoost+", 1.41, 1.48, 6.8, 7.3), "serverless": ("lambda-RL", 1.31, 1.23, 6.8, 26.1)}
    for how, (name, small, large, low, high) in printed.items():
        if how in seconds:
            gain = small if size == "8B" else large
            ours = seconds["alone"] / seconds[how]
            rows.append(exactly(f"{size}: {name} over ROLL", gain, ours, place, _ASSUMED))
            share = 100 * found[how]["starting_share"]
            text = f"{low} to {high}"
            rows.append(row(f"{size}: {name}, starting, % of GPU time", text, low, high, share, place, _ASSUMED))
    share, less = 100 * found["coserve"]["starting_share"], {"8B": 1.20, "32B": 1.26}[size]
    rows.append(row(f"{size}: ROSE, activation, % of GPU time", "< 1", 0.0, 1.0, share, place))
    ours = seconds["spot"] / seconds["coserve"]
    rows.append(exactly(f"{size}: ROSE over RLBoost+", less, ours, place, _ASSUMED))
    ours = min(seconds["spot"], seconds[_SPOT]) / seconds[_OURS]
    what = f"{size}: least-utilized over RLBoost+ under its better rule"
    rows.append(exactly(what, less, ours, place, "another rule than the paper's"))
    return rows


def _table_1(size: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    base, rows, place = found["coserve"], list[dict[str, Any]](), "ROSE 6.1, table 1"
    printed = {
        "8B": (("autoscale", 651.7, 1166.1), ("multiplex", 731.7, 973.2)),
        "32B": (("autoscale", 1161.8, 2426.2), ("multiplex", 1301.2, 1625.4)),
    }
    names = {"autoscale": "ServerlessLLM + rollout", "multiplex": "Prism"}
    own, apart = {"8B": (338.1, 314.8), "32B": (837.5, 716.1)}[size]
    ours = 1000 * base["alone_ttft_p99"]
    rows.append(exactly(f"calibration: {size}, serving alone: P99 TTFT, ms", apart, ours, place))
    ours = 1000 * base["ttft_p99"]
    rows.append(exactly(f"{size}, ROSE: P99 TTFT, ms", own, ours, place, "one admitted step at most"))
    late = max(0.0, 100 * (base["ttft_late"] - base["alone_ttft_late"]))
    what = f"{size}, ROSE: prompts beyond their SLO that serving alone keeps, %"
    rows.append(row(what, "< 1", 0.0, 1.0, late, "ROSE 6.1: P99 SLOs are met"))
    for how, seconds, ttft in printed[size]:
        one, ratio = found[how], seconds / ROSE_SECONDS[size]
        ours = one["rollout_seconds"] / base["rollout_seconds"]
        rows.append(
            row(f"{size}: rollout, {names[how]} over ROSE", f"{ratio:.2f}", ratio, ratio, ours, place, _ASSUMED)
        )
        rows.append(exactly(f"{size}, {names[how]}: P99 TTFT, ms", ttft, 1000 * one["ttft_p99"], place))
    return rows


def _table_3(size: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    place, base = "ROSE 6.4, table 3", found["pinned"]["rollout_seconds"]
    printed = {"8B": (1.11, 1.16), "32B": (1.08, 1.48)}[size]
    rows = []
    for name, how, gain in (
        ("turn-wise routing", "turn-wise", printed[0]),
        ("KV affinity", "coserve", printed[1]),
        ("KV affinity, least-utilized,", _OURS, printed[1]),
    ):
        ours = base / found[how]["rollout_seconds"]
        why = "pinned trajectories are shared out evenly here; the paper does not say how it does"
        rows.append(exactly(f"{size}: + {name} over none", gain, ours, place, why))
    return rows


def _tables_4_5(size: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Sensitivity: one seed, over the same seed as it is; adds the runs to ``found``."""
    steps, _, given = SIZES[size]
    base = mean(found["coserve"]["steps"][0])
    speed = float(load_scenario("rose", given).sim.borrowed.speed)
    printed = {"8B": {"2": (569.9, 459.1)}, "32B": {"2": (989.9, 899.1)}}[size]
    rows, place = list[dict[str, Any]](), "ROSE appendix D, table 5"
    for density, (seconds, ttft) in printed.items():
        one = played([*given, f"sim.borrowed.speed={speed * float(density)}"], steps, 1)
        found[f"density {density}"] = one
        ratio, ours = seconds / ROSE_SECONDS[size], one["rollout_seconds"] / base
        rows.append(row(f"{size}: rollout, traffic x {density} over x 1", f"{ratio:.2f}", ratio, ratio, ours, place))
        ours = 1000 * one["ttft_p99"]
        rows.append(exactly(f"{size}, traffic x {density}: P99 TTFT, ms", ttft, ours, place))
    if size == "8B":
        one = found["lease 100"] = played([*given, "sim.borrowed.lease_seconds=100"], steps, 1)
        ratio, ours, place = 502.1 / 496.3, one["rollout_seconds"] / base, "ROSE appendix C, table 4"
        rows.append(row("8B: rollout, leases of 100 s over 10 s", f"{ratio:.2f}", ratio, ratio, ours, place))
    return rows


def _end_to_end(size: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figure 7: throughput with training, one step off the policy, over what has its dedicated GPUs alone."""
    printed = {"8B": (1.31, 1.42, 1.44), "32B": (1.46, 3.31, 2.69)}[size]
    trained = (*_TRAINED, f"sim.trainer_gpus={TRAINERS[size]}")
    pairs = {
        "ROLL-GRPO": (trained, trained),
        "ROLL-DAPO": ((*trained, *_DAPO), (*trained, *_DAPO)),
        "AReaL": (trained, (*trained, *_AREAL)),
    }
    found: dict[str, Any] = {}
    rows = []
    for (name, (ours, theirs)), gain in zip(pairs.items(), printed, strict=True):
        with_serving, without = simulated(size, 5, ours), simulated(size, 5, (*theirs, *NOTHING))
        ratio = with_serving.throughput / without.throughput
        found[name] = {
            "ROSE": {"step_seconds": with_serving.step_seconds, "tokens_per_s": with_serving.throughput},
            "baseline": {"step_seconds": without.step_seconds, "tokens_per_s": without.throughput},
        }
        what = f"{size}: throughput, ROSE over {name}"
        rows.append(exactly(what, gain, ratio, "ROSE 6.1, figure 7", "means over 25 to 100 real steps there"))
    return found, rows
