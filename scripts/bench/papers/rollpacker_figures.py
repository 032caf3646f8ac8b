"""Simulated figures of RollPacker beside the printed ones: tables 1 to 4, 6.1, figures 5, 11b, 12 to 16.

The same pipeline in virtual time on ``orchestrator/sim/scenarios/rollpacker.toml`` and its variants in
:func:`orchestrator.sim.paper_setups.rollpacker`, whole cluster and whole batch (figure 16: half, 13: a quarter): the
longest response of half a batch is a shorter one, and what tail batching saves goes by it. Baselines: veRL (mode
``sync``: rewards after the rollout) and the strengthened RLHFuse (``sync_plus``: rewards beside it, streamed training
on devices that are freed). A step's time is the mean over a period of short and long rounds: weighted as they come up,
d long ones for P0 short ones that defer d prompts each. No constant was chosen by these figures but by table 1, for how
many scores are computed at a time, and by the form of table 1's training and figure 16
(:mod:`scripts.bench.papers.calibration`); ``band`` has what the two schedulers gain with half and twice the scores at a time.
What is not played says why (``not_played`` in the detail).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.paper_setups import ROLLPACKER, RUNGS, SCORES, rollpacker
from scripts.bench.papers import rollpacker_planner, rollpacker_requests
from scripts.bench.papers.runner import Cell, Cells, Figure, Found, Reading, Row, Run, each_seed, row, unprinted

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


def _rung(size: str, rung: str, scale: int, steps: int, extra: Sequence[str], seed: int) -> dict[str, Any]:
    given = (f"run.seed={seed}", *extra)
    if rung == PLANNER:
        return asdict(play(rollpacker_planner.rung(size, scale, steps, given)))
    return asdict(play(rollpacker(size, rung, scale, steps=steps, extra=given)))


def _ladder_cells(size: str, scale: int, steps: int) -> dict[str, Cell]:
    """Table 2, one setup."""
    return {f"ladder/{size}/{rung}": partial(_rung, size, rung, scale, steps, ()) for rung in (*RUNGS, PLANNER)}


def _played(found: Found, prefix: str) -> dict[str, Played]:
    """Runs whose cells have names that begin so, by the rest of them."""
    return {name.removeprefix(prefix): Played(**one) for name, one in found.items() if name.startswith(prefix)}


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


def _table_1_cells() -> dict[str, Cell]:
    """veRL, each task alone: what part of a step rollout, reward and training take."""
    return {f"table 1/{task}": partial(_stages, task) for task in TABLE_1}


def _stages(task: str, seed: int) -> dict[str, float]:
    return stages(rollpacker("14B/16k", "veRL", steps=4, extra=[f"run.seed={seed}", *only(task)]))


def _table_1(found: Found) -> tuple[dict[str, Any], list[Row]]:
    rows, detail = list[Row](), dict[str, Any]()
    for task, printed in TABLE_1.items():
        one = detail[task] = found[f"table 1/{task}"]
        for stage, share in zip(STAGES, printed, strict=True):
            what = f"veRL, 14B/16k, {task}: {stage}, share of a step"
            rows.append(row(what, share, one[stage] / one["step"], "RollPacker 2.2, table 1"))
    return detail, rows


def stages(config: Config) -> dict[str, float]:
    """Mean seconds of a step, of its rollout, of the rewards after it and of its training; first step left out."""
    run = Run(config)
    made = run.stages()
    rows = [(period, *made[step], run.steps[step]["seconds"]) for step, period in run.periods.items()]
    return dict(zip(("step", *STAGES), map(mean, zip(*rows, strict=True)), strict=True))


def alone(
    size: str, etas: tuple[float, float] | None, scale: int, steps: int, extra: Sequence[str], seed: int
) -> dict[str, Any]:
    """Rollouts alone, nothing is scored. ``etas``: of prompts and of responses, None: plain rounds."""
    given = [f"run.seed={seed}", "run.mode=sync_plus", *_NO_REWARD, *extra]
    if etas is None:
        return asdict(play(rollpacker(size, "veRL", scale, steps=steps, extra=given)))
    given += [f"rollout.rounds.eta_prompts={etas[0]}", f"rollout.rounds.eta_responses={etas[1]}"]
    return asdict(play(rollpacker(size, "+ tail batching", scale, steps=steps, extra=[*given, _ENOUGH])))


def _figure_12_cells() -> dict[str, Cell]:
    tried: dict[str, tuple[float, float] | None] = {"plain": None}
    for name, etas in SWEEP.items():
        for eta in etas:
            tried[f"{name} {eta}"] = (1.0 if name == "responses" else eta, 1.0 if name == "prompts" else eta)
    return {
        f"figure 12/{size}/{name}": partial(alone, size, etas, 1, 6, ())
        for size in SIZES
        for name, etas in tried.items()
    }


def _figure_12(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """And the largest speed-up of short rounds' rollouts (6.2, figure 11b)."""
    runs = {size: _played(found, f"figure 12/{size}/") for size in SIZES}
    source, base = "RollPacker 6.3, figure 12", "both 1.25"
    best = max(of["plain"].rollout / of[base].rollout for of in runs.values())
    rows = [row("rollout, plain rounds over tail batching (eta 1.25), at best", 3.9, best, source)]
    for name, printed in (("responses", 1.5), ("prompts", 1.6)):  # P fixed at P0; R fixed at R0
        tried = [f"{name} {eta}" for eta in SWEEP[name]]
        ours = max(of[one].rollout / of[base].rollout for of in runs.values() for one in tried)
        rows.append(row(f"rollout, {name} alone over both at 1.25, at best", printed, ours, source))
    of = runs["32B/32k"]
    ours = of["prompts 1.5"].rollout / of["prompts 1.25"].rollout
    rows.append(row("32k: rollout, prompts alone, eta 1.5 over 1.25", (1.0, 4.0), ours, source, text="above 1"))
    ours, what = of["plain"].rollout / mean(of[base].rollouts["short"]), "32k: rollout, plain rounds over short ones"
    rows.append(row(what, (1.0, 7.8), ours, "RollPacker 6.2, figure 11b", text="up to 7.8"))
    return {size: _beside_plain(of) for size, of in runs.items()}, rows


def _beside_plain(found: dict[str, Played]) -> dict[str, dict[str, Any]]:
    plain = found["plain"].rollout
    return {name: {**one.as_dict(), "speedup": round(plain / one.rollout, 3)} for name, one in found.items()}


_SEARCH_SIZE, _SEARCH_SCALE = "7B/8k", 4


def search(seed: int) -> dict[str, Any]:
    """The run's own search over eta (6.3)."""
    grid = ",".join(map(str, SEARCHED))
    extra = [f"run.seed={seed}", "run.mode=sync_plus", *_NO_REWARD, f"rollout.rounds.search=[{grid}]", _ENOUGH]
    run = Run(rollpacker(_SEARCH_SIZE, "+ tail batching", _SEARCH_SCALE, steps=24, extra=extra))
    rounds, prompts = run.events_of("round"), run.config.rollout.groups_per_step
    tried = {eta: round(cost * prompts, 3) for eta, cost in rounds[-1]["search"].items()}
    stays = next(event["eta_prompts"] for event in reversed(rounds) if event["round"] == "short")
    rounds_tried = next(place for place, event in enumerate(rounds) if len(event["search"]) == len(SEARCHED)) + 1
    return {"rollout_seconds_tried": tried, "rounds": rounds_tried, "stays_with": stays}


def _search_cells() -> dict[str, Cell]:
    """And what each value takes where it is kept for a whole run. Nothing is printed."""
    kept = {f"search/{eta}": partial(alone, _SEARCH_SIZE, (eta, eta), _SEARCH_SCALE, 24, ()) for eta in SEARCHED}
    return {"search": search, **kept}


def _search(found: Found) -> tuple[dict[str, Any], list[Row]]:
    kept = {str(eta): round(Played(**found[f"search/{eta}"]).rollout, 3) for eta in SEARCHED}
    return {"scale": _SEARCH_SCALE, "rollout_seconds_kept": kept, **found["search"]}, []


def _figure_14c_cells() -> dict[str, Cell]:
    """Code alone, 7B/8k: rollout and rewards with a fixed timeout and with the adaptive one."""
    return {  # of a call; the scorer's own limit is 30 s
        f"figure 14c/{timeout}": partial(
            _rung, "7B/8k", "+ reward scheduler", 1, 11, (*only("code"), f"reward.timeout={timeout}")
        )
        for timeout in ("40", "adaptive")
    }


def _figure_14c(found: Found) -> tuple[dict[str, Any], list[Row]]:
    of = _played(found, "figure 14c/")
    what = "code, 7B/8k: rollout and reward, fixed timeout over adaptive"
    return {}, [row(what, 1.6, of["40"].rollout / of["adaptive"].rollout, "RollPacker 6.5, figure 14c")]


def _table_3_cells() -> dict[str, Cell]:
    """Maths alone, 7B/8k, long rounds: when GPUs are freed for training."""
    return {
        f"table 3/{name}": partial(
            _rung,
            "7B/8k",
            "+ stream trainer",
            1,
            6,
            (*only("math"), f"rollout.colocation.low={low}", f"rollout.colocation.high={high}"),
        )
        for name, (low, high) in _MARKS.items()
    }


def _table_3(found: Found) -> tuple[dict[str, Any], list[Row]]:
    of = {name: mean(one.steps["long"]) for name, one in _played(found, "table 3/").items()}
    (_, first), *others = TABLE_3.items()
    what, source = "long rounds, 7B/8k, maths, no GPU freed: s a step", "RollPacker 6.6, table 3"
    rows = [row(what, first, of["w/o"], source)]
    for name, seconds in others:
        rows.append(row(f"no GPU freed over freed at {name}", round(first / seconds, 2), of["w/o"] / of[name], source))
    return {name: round(seconds, 2) for name, seconds in of.items()}, rows


def _figure_15_cells() -> dict[str, Cell]:
    """One-off pipeline: 7B/8k, 8 GPUs roll out and 8 train, 32 prompts a batch."""
    given = ["run.mode=one_off", "rollout.alpha=1", "rollout.workers=8", "sim.trainer_gpus=8"]
    given += ["trainer.data_parallel=4", "rollout.groups_per_step=32"]
    tail = (*given, "reward.timeout=adaptive")
    return {
        "figure 15/veRL": partial(_rung, "7B/8k", "veRL", 1, 16, given),
        "figure 15/+ tail batching": partial(_rung, "7B/8k", "+ tail batching", 1, 16, tail),
    }


def _figure_15(found: Found) -> tuple[dict[str, Any], list[Row]]:
    of = _played(found, "figure 15/")
    what = "one-off, 7B/8k: veRL over RollPacker (tail batching, adaptive timeout)"
    return {}, [row(what, 1.71, of["veRL"].step / of["+ tail batching"].step, "RollPacker 6.7, figure 15a")]


def _figure_16_cells() -> dict[str, Cell]:
    """14B/16k, with 1, 2 and 4 times the batch and the GPUs; half of each is played."""
    return {
        f"figure 16/{32 * times} GPUs, {rung}": partial(
            _rung, "14B/16k", rung, 2, 6, [f"{key}={value * times}" for key, value in _LARGER.items()]
        )
        for times in _TIMES
        for rung in _LARGER_RUNGS
    }


def _figure_16(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """Samples a second."""
    of = _played(found, "figure 16/")
    rates = {
        32 * times: [64 * 8 * times / of[f"{32 * times} GPUs, {rung}"].step for rung in _LARGER_RUNGS]
        for times in _TIMES
    }
    source, what = "RollPacker 6.8, figure 16", "14B/16k: throughput with twice the GPUs and batch, to"
    rows = [
        row(f"14B/16k on {gpus} GPUs: throughput over veRL", 2.2, ours / plain, source)
        for gpus, (plain, ours) in rates.items()
    ]
    for (_, before), (gpus, after) in pairwise(rates.items()):
        rows.append(row(f"{what} {gpus}", 1.5, after[1] / before[1], source))
    return {name: one.as_dict() for name, one in of.items()}, rows


def _band_cells() -> dict[str, Cell]:
    """7B/8k, a quarter: half and twice the scores at a time."""
    gpus = ROLLPACKER["7B/8k"][1]
    return {
        f"band/{factor:g}/{rung}": partial(
            _rung, "7B/8k", rung, 4, 6, (f"sim.reward_slots={int(factor * SCORES * gpus)}",)
        )
        for factor in BAND
        for rung in _SCORED
    }


def _band(found: Found) -> tuple[dict[str, Any], list[Row]]:
    gains = {}
    for factor in BAND:
        of = _played(found, f"band/{factor:g}/")
        gains[f"{factor:g}"] = {rung: of["veRL"].step / of[rung].step for rung in _SCORED[1:]}
    return gains, [
        unprinted(f"7B/8k, a quarter, scores at a time x {factor}: {rung}, over veRL", gain, "ours")
        for factor, of in gains.items()
        for rung, gain in of.items()
    ]


BAND = (0.5, 1.0, 2.0)
_SCORED = ("veRL", "+ tail batching", "+ reward scheduler")
_TIMES = (1, 2, 4)
_LARGER_RUNGS = ("veRL", "+ stream trainer")
_ENOUGH = "rollout.environments=4096"
_LARGER = {
    "rollout.workers": 16,
    "rollout.groups_per_step": 128,
    "rollout.environments": 2048,
    "sim.trainer_gpus": 32,
    "sim.reward_slots": 32 * SCORES,
    "trainer.data_parallel": 2,  # of the half
}


_FIGURES: dict[str, tuple[Callable[[], Cells], Callable[[Found], tuple[dict[str, Any], list[Row]]]]] = {
    "table_1": (_table_1_cells, _table_1),
    "table_3": (_table_3_cells, _table_3),
    "table_4": (rollpacker_requests.table_4_cells, rollpacker_requests.table_4),
    "figure_14c": (_figure_14c_cells, _figure_14c),
    "figure_15": (_figure_15_cells, _figure_15),
    "figure_15b": (rollpacker_requests.figure_15b_cells, rollpacker_requests.figure_15b),
    "search": (_search_cells, _search),
    "band": (_band_cells, _band),
    "figure_5": (rollpacker_requests.figure_5_cells, rollpacker_requests.figure_5),
    "figure_13a": (rollpacker_planner.figure_13a_cells, rollpacker_planner.figure_13a),
    "figure_13bc": (rollpacker_planner.figure_13bc_cells, rollpacker_planner.figure_13bc),
    "figure_14b": (dict, rollpacker_requests.figure_14b),
    "figure_16": (_figure_16_cells, _figure_16),
    "figure_12": (_figure_12_cells, _figure_12),
}


def _cells(quick: bool) -> Cells:
    if quick:
        return _ladder_cells("7B/8k", 4, 6)
    cells = dict[str, Cell]()
    for size in SIZES:
        cells |= _ladder_cells(size, 1, 10)
    for its_cells, _ in _FIGURES.values():
        cells |= its_cells()
    return cells


def _read(found: Found, quick: bool) -> Reading:
    ladders = {size: _played(found, f"ladder/{size}/") for size in (("7B/8k",) if quick else SIZES)}
    rows, detail = table_2(ladders), dict[str, Any]()
    value = min(one["simulated"] for one in rows if one["what"].endswith(": + stream trainer, over veRL"))
    for name, (_, figure) in () if quick else _FIGURES.items():
        one, more = figure(found)
        rows += more
        detail |= {name: one} if one else {}
    shown = {size: {rung: one.as_dict() for rung, one in of.items()} for size, of in ladders.items()}
    about = {"scale": 4 if quick else 1, "not_played": NOT_PLAYED, "ladder": shown}
    return Reading(value, value >= 2.03, rows, {**about, **detail})


FIGURE = Figure(
    "rollpacker-figures",
    claim="seconds a step of veRL over RollPacker (without its planner), the least of the setups",
    paper="RollPacker 6.1 and table 2 (paper)",
    printed=2.03,
    bar=">= 2.03",
    cells=_cells,
    read=each_seed(_read),
)
