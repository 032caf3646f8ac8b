"""Simulated figures of RollPacker beside the printed ones: tables 1 to 4, 6.1, figures 5, 11b, 12 to 16.

The same pipeline in virtual time on ``orchestrator/sim/scenarios/rollpacker.toml`` and its variants in
:func:`orchestrator.sim.paper_setups.rollpacker`, whole cluster and whole batch (figure 16: half, 13: a quarter): the
longest response of half a batch is a shorter one, and what tail batching saves goes by it. Baselines: veRL (mode
``sync``: rewards after the rollout) and the strengthened RLHFuse (``sync_plus``: rewards beside it, streamed training
on devices that are freed). A step's time is the mean over a period of short and long rounds: weighted as they come up,
d long ones for P0 short ones that defer d prompts each. No constant was chosen by these figures but by table 1, for how
many scores are computed at a time. What is not played says why (``not_played`` in the detail). Runs share nothing, so
two go at a time where there are two cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.paper_setups import ROLLPACKER, RUNGS, SCORES, rollpacker
from scripts.bench.papers import rollpacker_planner, rollpacker_requests
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Run, Verdict, row

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
STAGES = ("rollout", "reward", "training")
TABLE_1 = {"math": (0.72, 0.05, 0.23), "code": (0.66, 0.13, 0.21), "judged": (0.71, 0.07, 0.22)}
OVER_RLHFUSE = (1.14, 1.68, 2.24)  # 6.1
TABLE_3 = {"w/o": 124.2, "20%": 122.7, "30%": 118.2, "40%": 119.8, "adaptive": 115.2}  # seconds
_MARKS = {"w/o": (0.0, 0.0), "20%": (0.2, 0.25), "30%": (0.3, 0.35), "40%": (0.4, 0.45), "adaptive": (0.2, 0.5)}
SWEEP = {"responses": (1.25, 1.5), "prompts": (1.25, 1.5), "both": (1.25,)}
SEARCHED = (1.1, 1.25, 1.4)  # 6.3: "a narrow bound (e.g., 1.1 to 1.4)"
_TASKS = ("math", "code", "judged")
_NO_REWARD = [f"sim.tasks.{task}.reward_seconds=0" for task in _TASKS]
_MPS = "what two processes on one GPU do to each other without MPS is not in the cost model: any figure would be its assumption"
NOT_PLAYED = {
    "figure 11a": "a curve without printed numbers; figure 15b measures the same",
    "figure 14a": _MPS,
}


def only(task: str) -> list[str]:
    """Overrides: prompts of this task alone."""
    return [f"sim.tasks.{other}.weight=1e-9" for other in _TASKS if other != task]


@dataclass(frozen=True, slots=True)
class Played:
    """A run's steps but the first, by the kind of their rounds ("" without): seconds a step, and of its rollout."""

    steps: dict[str, list[float]]
    rollouts: dict[str, list[float]]
    weights: dict[str, float]  # of each kind in a period
    training: dict[str, list[float]] = field(default_factory=dict)  # seconds after the batch is there

    def mean(self, what: dict[str, list[float]]) -> float:
        """Over a period."""
        total = sum(self.weights[kind] for kind in what)
        return sum(self.weights[kind] * mean(values) for kind, values in what.items()) / total

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
                found[f"{kind}_step_seconds"] = round(mean(values), 2)
                found[f"{kind}_rollout_seconds"] = round(mean(self.rollouts[kind]), 2)
        for kind, values in self.training.items():
            found[f"{kind}_training_seconds" if kind else "training_seconds"] = round(mean(values), 2)
        return found


def play(config: Config) -> Played:
    """Simulate. Raises SimulationFailed."""
    run = Run(config)
    steps: dict[str, list[float]] = {}
    rollouts: dict[str, list[float]] = {}
    training: dict[str, list[float]] = {}
    for step, period in run.periods.items():  # the first step has no past lengths, and an evaluation before it
        kind = run.rounds.get(step, "")
        steps.setdefault(kind, []).append(period)
        rollouts.setdefault(kind, []).append(run.took[step])
        training.setdefault(kind, []).append(run.steps[step]["seconds"])
    prompts = config.rollout.groups_per_step
    deferred = math.ceil(config.rollout.rounds.eta_prompts * prompts) - prompts
    return Played(steps, rollouts, {"": 1.0, "short": float(prompts), "long": float(deferred)}, training)


def ladder(size: str, scale: int, steps: int) -> Found:
    """Table 2, one setup."""
    rungs = {rung: rollpacker(size, rung, scale, steps=steps) for rung in RUNGS}
    rungs[PLANNER] = rollpacker_planner.rung(size, scale, steps)
    played = {rung: play(config) for rung, config in rungs.items()}
    return {rung: one.as_dict() for rung, one in played.items()}, table_2({size: played})


def table_2(ladders: dict[str, dict[str, Played]]) -> list[Row]:
    """And what 6.1 says beside it."""
    rows, fuse = list[Row](), "RLHFuse, strengthened"
    last = "+ stream trainer"
    for rung, printed in TABLE_2.items():
        for size, one in ladders.items():
            ours = one["veRL"].step / one[rung].step
            rows.append(row(f"{size}: {rung}, over veRL", printed[SIZES.index(size)], ours, "RollPacker table 2"))
    for size, one in ladders.items():
        ours = one[fuse].step / one[last].step
        rows.append(row(f"{size}: over {fuse}", OVER_RLHFUSE[SIZES.index(size)], ours, "RollPacker 6.1"))
    for base, span in (("veRL", (2.1, 3.6)), (fuse, (1.2, 3.2))):
        for size, one in ladders.items():
            ours = one[base].step / mean(one[last].steps["short"])
            rows.append(row(f"{size}: short rounds, over {base}", span, ours, "RollPacker 6.1"))
    return rows


def table_1() -> Found:
    """veRL, each task alone: what part of a step rollout, reward and training take."""
    rows, detail = list[Row](), dict[str, Any]()
    for task, printed in TABLE_1.items():
        found = stages(rollpacker("14B/16k", "veRL", steps=4, extra=only(task)))
        detail[task] = {name: round(seconds, 2) for name, seconds in found.items()}
        for stage, share in zip(STAGES, printed, strict=True):
            what, note = f"veRL, 14B/16k, {task}: {stage}, share of a step", "calibration" if stage == "reward" else ""
            rows.append(row(what, share, found[stage] / found["step"], "RollPacker 2.2, table 1", note))
    return detail, rows


def stages(config: Config) -> dict[str, float]:
    """Mean seconds of a step, of its rollout, of the rewards after it and of its training; first step left out."""
    run = Run(config)
    made = run.stages()
    rows = [(period, *made[step], run.steps[step]["seconds"]) for step, period in run.periods.items()]
    return dict(zip(("step", *STAGES), map(mean, zip(*rows, strict=True)), strict=True))


def alone(size: str, etas: tuple[float, float] | None, scale: int, steps: int, *extra: str) -> Played:
    """Rollouts alone, nothing is scored. ``etas``: of prompts and of responses, None: plain rounds."""
    given = ["run.mode=sync_plus", *_NO_REWARD, *extra]
    if etas is None:
        return play(rollpacker(size, "veRL", scale, steps=steps, extra=given))
    given += [f"rollout.rounds.eta_prompts={etas[0]}", f"rollout.rounds.eta_responses={etas[1]}"]
    return play(rollpacker(size, "+ tail batching", scale, steps=steps, extra=[*given, "rollout.environments=4096"]))


def sweep(size: str, scale: int = 1, steps: int = 6) -> dict[str, Played]:
    """Figure 12. "" is plain rounds."""
    found = {"": alone(size, None, scale, steps)}
    for name, etas in SWEEP.items():
        for eta in etas:
            of = 1.0 if name == "responses" else eta, 1.0 if name == "prompts" else eta
            found[f"{name} {eta}"] = alone(size, of, scale, steps)
    return found


def figure_12() -> Found:
    """And the largest speed-up of short rounds' rollouts (6.2, figure 11b)."""
    runs = {size: sweep(size) for size in SIZES}
    source, base = "RollPacker 6.3, figure 12", "both 1.25"
    best = max(found[""].rollout / found[base].rollout for found in runs.values())
    rows = [row("rollout, plain rounds over tail batching (eta 1.25), at best", 3.9, best, source)]
    for name, printed in (("responses", 1.5), ("prompts", 1.6)):  # P fixed at P0; R fixed at R0
        tried = [f"{name} {eta}" for eta in SWEEP[name]]
        ours = max(found[one].rollout / found[base].rollout for found in runs.values() for one in tried)
        rows.append(row(f"rollout, {name} alone over both at 1.25, at best", printed, ours, source))
    found = runs["32B/32k"]
    ours = found["prompts 1.5"].rollout / found["prompts 1.25"].rollout
    rows.append(row("32k: rollout, prompts alone, eta 1.5 over 1.25", (1.0, 4.0), ours, source, text="above 1"))
    ours, what = found[""].rollout / mean(found[base].rollouts["short"]), "32k: rollout, plain rounds over short ones"
    rows.append(row(what, (1.0, 7.8), ours, "RollPacker 6.2, figure 11b", text="up to 7.8"))
    return {size: _beside_plain(one) for size, one in runs.items()}, rows


def _beside_plain(found: dict[str, Played]) -> dict[str, dict[str, Any]]:
    plain = found[""].rollout
    return {name or "plain": {**one.as_dict(), "speedup": round(plain / one.rollout, 3)} for name, one in found.items()}


def search(size: str = "7B/8k", scale: int = 4) -> Found:
    """The run's own search over eta (6.3), and what each value takes where it is kept for a whole run. Nothing is printed."""
    grid = ",".join(map(str, SEARCHED))
    extra = ["run.mode=sync_plus", *_NO_REWARD, f"rollout.rounds.search=[{grid}]", "rollout.environments=4096"]
    run = Run(rollpacker(size, "+ tail batching", scale, steps=24, extra=extra))
    rounds, prompts = run.events_of("round"), run.config.rollout.groups_per_step
    kept = {str(eta): round(alone(size, (eta, eta), scale, 24).rollout, 3) for eta in SEARCHED}
    tried = {eta: round(cost * prompts, 3) for eta, cost in rounds[-1]["search"].items()}
    stays = next(event["eta_prompts"] for event in reversed(rounds) if event["round"] == "short")
    rounds_tried = next(place for place, event in enumerate(rounds) if len(event["search"]) == len(SEARCHED)) + 1
    detail = {"scale": scale, "rollout_seconds_tried": tried, "rollout_seconds_kept": kept}
    return {**detail, "rounds": rounds_tried, "stays_with": stays}, []


def figure_14c() -> Found:
    """Code alone, 7B/8k: rollout and rewards with a fixed timeout over the adaptive one."""
    fixed, adaptive = (
        play(rollpacker("7B/8k", "+ reward scheduler", extra=[*only("code"), f"reward.timeout={timeout}"])).rollout
        for timeout in ("40", "adaptive")  # of a call; the scorer's own limit is 30 s
    )
    what = "code, 7B/8k: rollout and reward, fixed timeout over adaptive"
    return {}, [row(what, 1.6, fixed / adaptive, "RollPacker 6.5, figure 14c")]


def table_3() -> Found:
    """Maths alone, 7B/8k, long rounds: when GPUs are freed for training."""
    found = {}
    for name, (low, high) in _MARKS.items():
        extra = [*only("math"), f"rollout.colocation.low={low}", f"rollout.colocation.high={high}"]
        found[name] = mean(play(rollpacker("7B/8k", "+ stream trainer", steps=6, extra=extra)).steps["long"])
    (_, first), *others = TABLE_3.items()
    what, source = "long rounds, 7B/8k, maths, no GPU freed: s a step", "RollPacker 6.6, table 3"
    rows = [row(what, first, found["w/o"], source)]
    for name, seconds in others:
        rows.append(
            row(f"no GPU freed over freed at {name}", round(first / seconds, 2), found["w/o"] / found[name], source)
        )
    return {name: round(seconds, 2) for name, seconds in found.items()}, rows


def figure_15() -> Found:
    """One-off pipeline: 7B/8k, 8 GPUs roll out and 8 train, 32 prompts a batch."""
    given = ["run.mode=one_off", "rollout.alpha=1", "rollout.workers=8", "sim.trainer_gpus=8"]
    given += ["trainer.data_parallel=4", "rollout.groups_per_step=32"]
    plain, ours = (
        play(rollpacker("7B/8k", rung, steps=16, extra=[*given, *extra])).step
        for rung, extra in (("veRL", ()), ("+ tail batching", ("reward.timeout=adaptive",)))
    )
    what = "one-off, 7B/8k: veRL over RollPacker (tail batching, adaptive timeout)"
    return {}, [row(what, 1.71, plain / ours, "RollPacker 6.7, figure 15a")]


def figure_16() -> Found:
    """Samples a second of 14B/16k, with 1, 2 and 4 times the batch and the GPUs; half of each is played."""
    rates: dict[int, Sequence[float]] = {}
    detail: dict[str, Any] = {}
    for times in (1, 2, 4):
        given = [f"{key}={value * times}" for key, value in _LARGER.items()]
        both = [play(rollpacker("14B/16k", rung, 2, steps=6, extra=given)) for rung in ("veRL", "+ stream trainer")]
        rates[32 * times] = [64 * 8 * times / one.step for one in both]
        names = (f"{32 * times} GPUs, {rung}" for rung in ("veRL", "+ stream trainer"))
        detail |= {name: one.as_dict() for name, one in zip(names, both, strict=True)}
    source, what = "RollPacker 6.8, figure 16", "14B/16k: throughput with twice the GPUs and batch, to"
    rows = [
        row(f"14B/16k on {gpus} GPUs: throughput over veRL", 2.2, ours / plain, source)
        for gpus, (plain, ours) in rates.items()
    ]
    for (_, before), (gpus, after) in pairwise(rates.items()):
        rows.append(row(f"{what} {gpus}", 1.5, after[1] / before[1], source))
    return detail, rows


_LARGER = {
    "rollout.workers": 16,
    "rollout.groups_per_step": 128,
    "rollout.environments": 2048,
    "sim.trainer_gpus": 32,
    "sim.reward_slots": 32 * SCORES,
    "trainer.data_parallel": 2,  # of the half
}


def _parts(quick: bool) -> Parts:
    if quick:
        return {"7B/8k": partial(ladder, "7B/8k", 4, 6)}
    return {
        **{size: partial(ladder, size, 1, 10) for size in SIZES},
        "figure_16": figure_16,
        "figure_12": figure_12,
        "table_3": table_3,
        "table_4": rollpacker_requests.table_4,
        "table_1": table_1,
        "figure_14c": figure_14c,
        "figure_15": figure_15,
        "search": search,
        "figure_5": rollpacker_requests.figure_5,
        "figure_13a": rollpacker_planner.figure_13a,
        "figure_13bc": rollpacker_planner.figure_13bc,
        "figure_14b": rollpacker_requests.figure_14b,
        "figure_15b": rollpacker_requests.figure_15b,
    }


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    ladders = {size: found.pop(size) for size in SIZES if size in found}
    value = min(one["simulated"] for one in rows if one["what"].endswith(": + stream trainer, over veRL"))
    about = {"scale": 4 if quick else 1, "not_played": NOT_PLAYED, "ladder": ladders}
    return value, value >= 2.03, {**about, **{name: one for name, one in found.items() if one}}


FIGURE = Figure(
    "rollpacker-figures",
    claim="seconds a step of veRL over RollPacker (without its planner), the least of the setups",
    paper="RollPacker 6.1 and table 2 (paper)",
    printed=2.03,
    bar=">= 2.03",
    parts=_parts,
    read=_read,
    statistic="mean over a period of short and long rounds, one seed: a seed gives the same run again",
    apart=2,
)
