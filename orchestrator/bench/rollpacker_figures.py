"""Simulated figures of RollPacker beside the printed ones: table 2, 6.1, figures 5, 11b, 12 to 16, tables 3 and 4.

The same pipeline in virtual time on ``orchestrator/sim/scenarios/rollpacker.toml`` and its variants in
:func:`orchestrator.sim.setups.rollpacker`. Baselines: veRL (mode ``sync``: rewards after the rollout) and the strengthened
RLHFuse (``sync_plus``: rewards beside it, streamed training on devices that are freed). A step's time is the mean over a period
of short and long rounds: weighted as they come up, d long ones for P0 short ones that defer d prompts each. No constant was
chosen by these figures. What is not played says why (``not_played`` in the detail).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.bench import rollpacker_planner, rollpacker_requests
from orchestrator.bench.simulated import frame, now, row
from orchestrator.config import Config
from orchestrator.sim.run import simulate
from orchestrator.sim.setups import ROLLPACKER, RUNGS, rollpacker

NAME = "rollpacker-figures"
SIZES = tuple(ROLLPACKER)
PLANNER = "+ parallelism planner"
TABLE_2 = {
    "+ tail batching": (1.30, 1.48, 2.21),
    "+ reward scheduler": (2.01, 1.99, 2.48),
    PLANNER: rollpacker_planner.PRINTED,
    "+ stream trainer": (
        2.03,
        2.22,
        2.56,
    ),  # printed below the planner's row, on top of it; ours is without the planner
}
OVER_RLHFUSE = (1.14, 1.68, 2.24)  # 6.1
TABLE_3 = {"w/o": 124.2, "20%": 122.7, "30%": 118.2, "40%": 119.8, "adaptive": 115.2}  # seconds
SWEEP = {"responses": (1.25, 1.5), "prompts": (1.25, 1.5), "both": (1.1, 1.25, 1.4)}
_SWEEP_SCALE = 4
_NO_REWARD = [f"sim.tasks.{task}.reward_seconds=0" for task in ("math", "code", "judged")]
NOT_PLAYED = {
    "figure 11a": "a curve without printed numbers; figure 15b measures the same",
    "figure 14a": (
        "what two processes on one GPU do to each other without MPS is not in the cost model: any figure would be its assumption"
    ),
}


FURTHER = {
    "figure_5": rollpacker_requests.figure_5,
    "figure_13a": rollpacker_planner.figure_13a,
    "figure_13bc": rollpacker_planner.figure_13bc,
    "figure_14b": rollpacker_requests.figure_14b,
    "figure_15b": rollpacker_requests.figure_15b,
    "table_4": rollpacker_requests.table_4,
}


def only(task: str) -> list[str]:
    """Overrides: prompts of this task alone."""
    return [f"sim.tasks.{other}.weight=1e-9" for other in ("math", "code", "judged") if other != task]


@dataclass(frozen=True, slots=True)
class Played:
    """A run's steps but the first, by the kind of their rounds ("" without): seconds a step, and of its rollout."""

    steps: dict[str, list[float]]
    rollouts: dict[str, list[float]]
    weights: dict[str, float]  # of each kind in a period

    def mean(self, what: dict[str, list[float]]) -> float:
        """Over a period."""
        total = sum(self.weights[kind] for kind in what)
        return sum(self.weights[kind] * statistics.mean(values) for kind, values in what.items()) / total

    @property
    def step(self) -> float:
        """Seconds a step."""
        return self.mean(self.steps)

    @property
    def rollout(self) -> float:
        """Seconds until a step's batch is there, rewards included."""
        return self.mean(self.rollouts)

    def as_dict(self) -> dict[str, Any]:
        """For the detail."""
        found: dict[str, Any] = {"step_seconds": round(self.step, 2), "rollout_seconds": round(self.rollout, 2)}
        for kind, values in self.steps.items():
            if kind:
                found[f"{kind}_rounds"] = len(values)
                found[f"{kind}_step_seconds"] = round(statistics.mean(values), 2)
                found[f"{kind}_rollout_seconds"] = round(statistics.mean(self.rollouts[kind]), 2)
        return found


def play(config: Config) -> Played:
    """Simulate. Raises SimulationFailed."""
    events = [json.loads(line) for line in simulate(config).events.splitlines()]
    kinds = {event["step"]: event["round"] for event in events if event["kind"] == "round"}
    ends = {event["step"]: event["t"] for event in events if event["kind"] == "step"}
    took = {event["step"]: event["end"] - event["start"] for event in events if event.get("stage") == "get_batch"}
    steps: dict[str, list[float]] = {}
    rollouts: dict[str, list[float]] = {}
    for step in sorted(ends)[1:]:  # the first step has no past lengths, and an evaluation before it
        steps.setdefault(kinds.get(step, ""), []).append(ends[step] - ends[step - 1])
        rollouts.setdefault(kinds.get(step, ""), []).append(took[step])
    prompts = config.rollout.groups_per_step
    deferred = math.ceil(config.rollout.rounds.eta_prompts * prompts) - prompts
    found = Played(steps, rollouts, {"": 1.0, "short": float(prompts), "long": float(deferred)})
    print(f"{config.sim.model}, {config.run.mode}: {found.as_dict()}", file=sys.stderr, flush=True)
    return found


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun = now()
    sizes, scale, steps = (("7B/8k",), 4, 6) if quick else (SIZES, 2, 11)
    ladders = {size: {rung: play(rollpacker(size, rung, scale, steps=steps)) for rung in RUNGS} for size in sizes}
    for size in sizes:
        ladders[size][PLANNER] = play(rollpacker_planner.rung(size, scale, steps))
    rows = table_2(ladders)
    detail: dict[str, Any] = {"scale": scale, "rows": rows, "not_played": NOT_PLAYED}
    detail["ladder"] = {size: {rung: one.as_dict() for rung, one in ladder.items()} for size, ladder in ladders.items()}
    if not quick:
        detail["figure_12"], more = figure_12()
        rows += more
        for figure in (figure_14c, table_3, figure_15, figure_16):
            rows += figure()
        for name, found in FURTHER.items():
            detail[name], more = found()
            rows += more
        detail["experts"] = rollpacker_planner.experts()
    value = min(_ratio(ladder, "+ stream trainer") for ladder in ladders.values())
    return frame(
        NAME,
        value,
        "seconds a step of veRL over RollPacker (without its planner), the least of the setups",
        "RollPacker 6.1 and table 2 (paper)",
        2.03,
        ">= 2.03",
        value >= 2.03,
        detail,
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _ratio(ladder: dict[str, Played], rung: str, base: str = "veRL") -> float:
    return ladder[base].step / ladder[rung].step


def table_2(ladders: dict[str, dict[str, Played]]) -> list[dict[str, Any]]:
    """And what 6.1 says beside it."""
    rows = []
    for rung, printed in TABLE_2.items():
        for size, ladder in ladders.items():
            number = printed[SIZES.index(size)]
            source = "RollPacker table 2"
            rows.append(row(f"{size}: {rung}, over veRL", f"{number}", number, number, _ratio(ladder, rung), source))
    for size, ladder in ladders.items():
        number = OVER_RLHFUSE[SIZES.index(size)]
        ours = _ratio(ladder, "+ stream trainer", "RLHFuse, strengthened")
        rows.append(row(f"{size}: over RLHFuse, strengthened", f"{number}", number, number, ours, "RollPacker 6.1"))
    for base, low, high in (("veRL", 2.1, 3.6), ("RLHFuse, strengthened", 1.2, 3.2)):
        for size, ladder in ladders.items():
            ours = ladder[base].step / statistics.mean(ladder["+ stream trainer"].steps["short"])
            what = f"{size}: short rounds, over {base}"
            rows.append(row(what, f"{low} to {high}", low, high, ours, "RollPacker 6.1"))
    return rows


def sweep(size: str, scale: int, steps: int) -> dict[str, Played]:
    """Figure 12: rollouts alone, nothing is scored. "" is plain rounds."""
    found = {"": play(rollpacker(size, "veRL", scale, steps=steps, extra=["run.mode=sync_plus", *_NO_REWARD]))}
    for name, etas in SWEEP.items():
        for eta in etas:
            given = [
                f"rollout.rounds.eta_prompts={1.0 if name == 'responses' else eta}",
                f"rollout.rounds.eta_responses={1.0 if name == 'prompts' else eta}",
                "rollout.environments=4096",
            ]
            extra = ["run.mode=sync_plus", *_NO_REWARD, *given]
            found[f"{name} {eta}"] = play(rollpacker(size, "+ tail batching", scale, steps=steps, extra=extra))
    return found


def figure_12() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """And the largest speed-up of short rounds' rollouts (6.2, figure 11b)."""
    runs = {size: sweep(size, _SWEEP_SCALE, 12) for size in SIZES}
    source, base = "RollPacker 6.3, figure 12", "both 1.25"
    best = max(found[""].rollout / found[base].rollout for found in runs.values())
    rows = [row("rollout, plain rounds over tail batching (eta 1.25), at best", "3.9", 3.9, 3.9, best, source)]
    for name, printed in (("responses", 1.5), ("prompts", 1.6)):
        ours = max(
            found[f"{name} {eta}"].rollout / found[base].rollout for found in runs.values() for eta in SWEEP[name]
        )
        rows.append(
            row(f"rollout, {name} alone over both at 1.25, at best", f"{printed}", printed, printed, ours, source)
        )
    found = runs["32B/32k"]
    ours = found["prompts 1.5"].rollout / found["prompts 1.25"].rollout
    rows.append(row("32k: rollout, prompts alone, eta 1.5 over 1.25", "above 1", 1.0, 4.0, ours, source))
    ours = found[""].rollout / statistics.mean(found[base].rollouts["short"])
    rows.append(
        row("32k: rollout, plain rounds over short ones", "up to 7.8", 1.0, 7.8, ours, "RollPacker 6.2, figure 11b")
    )
    detail = {size: _beside_plain(found) for size, found in runs.items()}
    return {"scale": _SWEEP_SCALE, **detail}, rows


def _beside_plain(found: dict[str, Played]) -> dict[str, dict[str, Any]]:
    return {
        name or "plain": {**one.as_dict(), "speedup": round(found[""].rollout / one.rollout, 3)}
        for name, one in found.items()
    }


def figure_14c() -> list[dict[str, Any]]:
    """Code alone, 7B/8k: rollout and rewards with a fixed timeout over the adaptive one."""
    times = [
        play(rollpacker("7B/8k", "+ reward scheduler", 4, extra=[*only("code"), f"reward.timeout={timeout}"])).rollout
        for timeout in ("40", "adaptive")  # of a call; the scorer's own limit is 30 s
    ]
    what = "code, 7B/8k: rollout and reward, fixed timeout over adaptive"
    return [row(what, "1.6", 1.6, 1.6, times[0] / times[1], "RollPacker 6.5, figure 14c")]


def table_3() -> list[dict[str, Any]]:
    """Maths alone, 7B/8k, long rounds: when GPUs are freed for training."""
    marks = {"w/o": (0.0, 0.0), "20%": (0.2, 0.25), "30%": (0.3, 0.35), "40%": (0.4, 0.45), "adaptive": (0.2, 0.5)}
    found = {}
    for name, (low, high) in marks.items():
        extra = [*only("math"), f"rollout.colocation.low={low}", f"rollout.colocation.high={high}"]
        played = play(rollpacker("7B/8k", "+ stream trainer", 2, steps=11, extra=extra))
        found[name] = statistics.mean(played.steps["long"])
    source = "RollPacker 6.6, table 3"
    first = TABLE_3["w/o"]
    rows = [row("long rounds, 7B/8k, maths, no GPU freed: s a step", f"{first}", first, first, found["w/o"], source)]
    for name, seconds in TABLE_3.items():
        if name != "w/o":
            ours, printed = found["w/o"] / found[name], round(first / seconds, 2)
            rows.append(row(f"no GPU freed over freed at {name}", f"{printed}", printed, printed, ours, source))
    return rows


def figure_15() -> list[dict[str, Any]]:
    """One-off pipeline: 7B/8k, 8 GPUs roll out and 8 train, 32 prompts a batch."""
    given = [
        "run.mode=one_off",
        "rollout.alpha=1",
        "rollout.workers=8",
        "sim.trainer_gpus=8",
        "trainer.data_parallel=4",
    ]
    given += ["rollout.groups_per_step=32"]
    times = [
        play(rollpacker("7B/8k", rung, steps=16, extra=[*given, *extra])).step
        for rung, extra in (("veRL", ()), ("+ tail batching", ("reward.timeout=adaptive",)))
    ]
    what = "one-off, 7B/8k: veRL over RollPacker (tail batching, adaptive timeout)"
    return [row(what, "1.71", 1.71, 1.71, times[0] / times[1], "RollPacker 6.7, figure 15a")]


def figure_16() -> list[dict[str, Any]]:
    """Samples a second of 14B/16k, with 1, 2 and 4 times the batch and the GPUs; half of each is played."""
    rates: dict[str, list[float]] = {rung: [] for rung in ("veRL", "+ stream trainer")}
    for times in (1, 2, 4):
        given = [f"{key}={value * times}" for key, value in _LARGER.items()]
        given.append(f"trainer.data_parallel={2 * times}")  # of the half
        for rung, found in rates.items():
            found.append(64 * 8 * times / play(rollpacker("14B/16k", rung, 2, steps=6, extra=given)).step)
    rows, source = [], "RollPacker 6.8, figure 16"
    for place, times in enumerate((1, 2, 4)):
        ours = rates["+ stream trainer"][place] / rates["veRL"][place]
        rows.append(row(f"14B/16k on {32 * times} GPUs: throughput over veRL", "2.2", 2.2, 2.2, ours, source))
    for before, after in pairwise(rates["+ stream trainer"]):
        rows.append(row("14B/16k: throughput with twice the GPUs and batch", "1.5", 1.5, 1.5, after / before, source))
    return rows


_LARGER = {
    "rollout.workers": 16,
    "rollout.groups_per_step": 128,
    "rollout.environments": 2048,
    "sim.trainer_gpus": 32,
    "sim.reward_slots": 128,
}
