"""Simulated runs whose engines' degrees are chosen between steps, over the best equal degrees in hindsight (Heddle 6.2).

Whole simulated runs, the production resource manager (:mod:`orchestrator.parallelism.replanner`) and proxy, the
roofline cost model of 8 H800. The managed run is told the mean of the first step's tokens and takes their tail for
granted (``expected_sigma`` 1): it begins with the degrees that are best for that, learns the lengths from each step,
and pays for each change: the engines that change are started anew, weights included. It is compared with runs of fixed
equal degrees, of which nobody knows the best beforehand. Nothing else differs: prediction, placement and migration are
on in all. Two kinds of workload:

* *Growing*: RollPacker's figure 13a as it is printed, half of it: Qwen2.5-14B, 64 prompts of 8 responses, whose length grows from
  8k to 32k by 2k a step, all of a step's alike (ASSUMED, as in ``rollpacker-figures``). The value is the managed run's seconds
  over the best fixed ones'.
* *Stationary*: Qwen3-8B, 64 trajectories a step, lognormal of mean 2,000 tokens a turn with three widths of their tail (ASSUMED).
  Nothing changes from step to step, so that who begins with the best degrees can do no better than to stay: 1.00 is the least
  that equal degrees can have there.

``detail`` has the same runs when nothing is expected, which begin with eight engines of one device, as the paper's does.
``--quick``: one stationary workload, and the first six steps of the growing one with an 8th of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from orchestrator.config import Config, load_config
from orchestrator.policies.parallelism.degree_reallocation import format_degrees
from scripts.bench.papers.runner import Cell, Cells, Figure, Found, Reading, Run, each_seed, unprinted

DEVICES = 8
_GRAIN = 16
_TAILS = (0.5, 1.0, 1.5)  # sigma of log(length)
_FIRST, _GROWTH, _LAST = 8192, 2048, 32768  # tokens, RollPacker 6.4
_DEGREES = (1, 2, 4, 8)
_UNTOLD = "nothing expected"
_NEVER = "rollout.placement.degrees.start_seconds=1e12"


def _run(model: str, groups: int, longest: int, task: str, overrides: Sequence[str]) -> Config:
    base = [
        "sim.costs=roofline",
        f"sim.model={model}",
        "sim.device=H800",
        f"rollout.workers={DEVICES}",
        f"sim.grain={_GRAIN}",
    ]
    base += [f"rollout.engine.max_model_len={longest // _GRAIN}", f"rollout.engine.max_num_seqs={groups * 8}"]
    base += ["run.mode=sync_plus", "rollout.alpha=0", f"rollout.groups_per_step={groups}", "rollout.group_size=8"]
    base += [
        f"rollout.environments={groups * 8}",
        "rollout.trajectory_timeout=100000.0",
        "rollout.stall_timeout=9999.0",
    ]
    base += ["rollout.weights=relay", "evaluation.every=0", "evaluation.prompts=4", "sim.start_seconds=20.0"]
    base += [f"rollout.{key}.enabled=true" for key in ("prediction", "placement", "placement.degrees")]
    base.append(f"sim.tasks={{t={{{task}}}}}")
    return load_config(None, [*base, *overrides])


def config(tail: float, *overrides: str) -> Config:
    """A run of ten steps of 64 trajectories."""
    task = f"response_tokens=2000.0, response_sigma={tail}, response_max=24000, turns_max=2, turns_min=1"
    return _run("Qwen3-8B", 8, 2048 * _GRAIN, task, ["run.steps=10", *overrides])


def growing(*overrides: str, groups: int = 64) -> Config:
    """RollPacker's figure 13a: 13 steps."""
    task = f"response_tokens={_FIRST}, response_growth={_GROWTH}, response_sigma=0, response_max={_LAST}"
    steps = 1 + (_LAST - _FIRST) // _GROWTH
    return _run("Qwen2.5-14B", groups, _LAST + 1024, task, [f"run.steps={steps}", *overrides])


def _played(made: Callable[..., Config], given: Sequence[str], seed: int) -> dict[str, Any]:
    """``made``: a config with overrides."""
    run = Run(made(f"run.seed={seed}", *given))
    changes = run.events_of("reshape")
    return {
        "seconds": run.seconds,
        "degrees": [format_degrees(event["degrees"]) for event in run.events_of("degrees")],
        "changes": len(changes),
        "change_seconds": sum(event["seconds"] for event in changes),
        "failed_changes": sum(bool(event["error"]) for event in changes),
    }


def _workloads(quick: bool) -> dict[str, tuple[Callable[..., Config], float]]:
    """By name: a config with overrides; tokens of a trajectory of the first step, in the mean."""
    tails = {f"sigma {tail}": (partial(config, tail), 3000.0) for tail in (_TAILS[1:2] if quick else _TAILS)}
    longer = partial(growing, "run.steps=6", groups=8) if quick else growing
    return {"growing": (longer, float(_FIRST)), **tails}


def _cells(quick: bool) -> Cells:
    cells: dict[str, Cell] = {}
    for name, (made, expected) in _workloads(quick).items():
        settings = {"managed": [f"rollout.placement.degrees.expected_tokens={expected / _GRAIN}"], _UNTOLD: []}
        for degree in _DEGREES:
            start = f"rollout.placement.degrees.start={[degree] * (DEVICES // degree)}"
            settings[f"degree {degree}"] = [start, _NEVER]
        cells |= {f"{name}/{setting}": partial(_played, made, given) for setting, given in settings.items()}
    return cells


def _row(found: Found, name: str) -> dict[str, Any]:
    fixed = {str(degree): found[f"{name}/degree {degree}"]["seconds"] for degree in _DEGREES}
    managed, untold, best = found[f"{name}/managed"], found[f"{name}/{_UNTOLD}"]["seconds"], min(fixed.values())
    return {
        "fixed": fixed,
        "over_best_equal": managed["seconds"] / best,
        "over_degree_1": managed["seconds"] / fixed["1"],
        "nothing_expected": untold,
        "nothing_expected_over_best_equal": untold / best,
        **managed,
    }


def _read(found: Found, quick: bool) -> Reading:
    table = {name: _row(found, name) for name in _workloads(quick)}
    value = float(table["growing"]["over_best_equal"])
    stationary = [{"workload": name, **one} for name, one in table.items() if name != "growing"]
    mean = sum(one["over_best_equal"] for one in stationary) / len(stationary)
    detail = {"growing": table["growing"], "stationary": stationary, "stationary_over_best_equal": mean}
    rows = [
        unprinted(f"{name}: {what} over the best equal degrees", one[key], "ours")
        for name, one in table.items()
        for what, key in (("managed", "over_best_equal"), (_UNTOLD, "nothing_expected_over_best_equal"))
    ]
    return Reading(value, value < 1.0, rows, detail)


FIGURE = Figure(
    "reallocation",
    claim=f"seconds of a run of ever longer responses, degrees chosen between steps, over the best equal ones of {DEVICES}",
    paper="the best equal degrees in hindsight, fixed",
    printed=1.0,
    bar="< 1, changes paid for",
    cells=_cells,
    read=each_seed(_read, max),
)
