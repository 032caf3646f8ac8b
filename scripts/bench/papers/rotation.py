"""What settings of a policy are worth on lengths that they were not chosen on: speed of a step over the policy left off.

Simulated, on recorded lengths: three packed sets of real engines' trajectories (FrozenLake; nim, household and calculator;
SmolLM2-135M-Instruct on three tasks), played in groups as they were recorded, in an order that a seed draws, on four engines with
the linear costs that ``[sim]`` has by default. Each family of policies has a few settings, of which the first leaves it off. In
rotation the setting that is best on two sets (the largest mean of the logarithms) is judged on the third, beside the one that
would have been best there. Both sides of a ratio play the same order.

The value is the least of the twelve gains. ``--quick``: one family, one seed, fewer steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import cache, partial
from statistics import fmean
from typing import Any

from orchestrator.config import load_config
from orchestrator.sim.paper_setups import counted_steps
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.length_sets import built_in, episodes
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, interval, unprinted

NAME = "rotation"
BAR = 0.99
BASE = (
    "run.steps=10",
    "rollout.workers=4",
    "rollout.environments=128",
    "rollout.groups_per_step=16",
    "rollout.group_size=8",
    "rollout.engine.max_num_seqs=24",
    "rollout.engine.max_model_len=2048",
    "evaluation.prompts=1",
    "checkpoint.every=1000",
    "trainer.logprob_gap_samples=0",
)
_SYNCHRONOUS = ("run.mode=sync_plus", "rollout.alpha=0")
_HISTORY = ("rollout.prediction.enabled=true", "rollout.prediction.predictor=history")


def _eta(value: float) -> tuple[str, ...]:
    etas = (f"rollout.rounds.eta_prompts={value}", f"rollout.rounds.eta_responses={value}")
    return (*_SYNCHRONOUS, "rollout.rounds.enabled=true", "rollout.environments=320", *etas)


def _routed(policy: str, *more: str) -> tuple[str, ...]:
    return (f"rollout.routing.policy={policy}", *more)


FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {  # the first setting of each leaves it off
    "tail batching": {
        "off": (*_SYNCHRONOUS, "rollout.environments=320"),
        **{f"eta {eta:g}": _eta(eta) for eta in (1.125, 1.25, 1.5)},
    },
    "redundancy": {
        "off": (),
        **{f"groups x {share:g}": (f"rollout.redundant_groups={share}",) for share in (1.125, 1.25, 1.5)},
        "members x 1.25": ("rollout.redundant_members=1.25",),
    },
    "routing": {
        "round-robin": _routed("round-robin"),
        "least-loaded": _routed("least-loaded"),
        **{
            f"cache-affine, imbalance {one}": _routed("cache-affine", f"rollout.routing.imbalance={one}")
            for one in (2, 16, 64)
        },
        "cache-affine, skew 2": _routed("cache-affine", "rollout.routing.skew=2.0"),
    },
    "prediction by history": {
        "off": (),
        "longest first": _HISTORY,
        "shortest first": (*_HISTORY, "rollout.prediction.order=shortest-first"),
        "longest first, placed": (*_HISTORY, "rollout.placement.enabled=true"),
        "longest first, placed, not moved": (
            *_HISTORY,
            "rollout.placement.enabled=true",
            "rollout.placement.migrate=false",
        ),
    },
}
_QUICK = "redundancy"


@cache
def recorded(name: str) -> EpisodeTraces:
    """A packed set."""
    return episodes(built_in()[name])


def in_order(traces: EpisodeTraces, seed: int) -> EpisodeTraces:
    """The same groups in an order that the seed draws."""
    order = list(range(len(traces.groups)))
    random.Random(f"rotation/{seed}").shuffle(order)
    groups = tuple(traces.groups[place] for place in order)
    return EpisodeTraces(traces.episodes, groups, tuple(traces.tasks[place] for place in order))


def step_seconds(name: str, setting: tuple[str, ...], seed: int, more: tuple[str, ...] = ()) -> float:
    """Of a run on a set, after its first steps. Raises SimulationFailed."""
    config = load_config(None, [*BASE, *setting, f"run.seed={seed}", *more])
    return counted_steps(simulate(config, traces=in_order(recorded(name), seed)))[1]


def rotate(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """By the set that is judged on: the setting that is best on the others, and what it is worth. ``speeds``: set -> setting ->
    speed over the policy left off, by seed."""
    means = {name: {setting: fmean(of) for setting, of in here.items()} for name, here in speeds.items()}
    found = {}
    for judged, here in means.items():
        others = {name: there for name, there in means.items() if name != judged}
        merits = {setting: fmean(math.log(there[setting]) for there in others.values()) for setting in here}
        chosen, best = (max(of, key=lambda setting: of[setting]) for of in (merits, here))
        found[judged] = {
            "chosen": chosen,
            "gain": interval(speeds[judged][chosen]),
            "where_chosen": {name: there[chosen] for name, there in others.items()},
            "best_in_hindsight": best,
            "gain_in_hindsight": here[best],
        }
    return found


def _cell(name: str, setting: tuple[str, ...], more: tuple[str, ...], seed: int) -> float:
    return step_seconds(name, setting, seed, more)


def _families(quick: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    return {family: of for family, of in FAMILIES.items() if not quick or family == _QUICK}


def _cells(quick: bool) -> Cells:
    more = ("run.steps=4",) if quick else ()
    return {
        f"{family}/{name}/{one}": partial(_cell, name, of, more)
        for family, settings in _families(quick).items()
        for name in built_in()
        for one, of in settings.items()
    }


def _read(found: Mapping[int, Found], quick: bool) -> Reading:
    families, rows, gains = dict[str, Any](), [], []
    for family, settings in _families(quick).items():
        seconds = {
            name: {one: [of[f"{family}/{name}/{one}"] for of in found.values()] for one in settings}
            for name in built_in()
        }
        speeds = {}
        for name, took in seconds.items():
            off = next(iter(took.values()))
            speeds[name] = {one: [a / b for a, b in zip(off, of, strict=True)] for one, of in took.items()}
        judged = rotate(speeds)
        families[family] = {
            "judged": judged,
            "step_seconds": seconds,
            "settings": {one: list(of) for one, of in settings.items()},
        }
        for name, one in judged.items():
            gains.append(one["gain"]["mean"])
            what = f"{family}, chosen on the others, judged on {name}"
            spread = {key: one["gain"][key] for key in ("by_seed", "interval")}
            rows.append({**unprinted(what, one["gain"]["mean"], one["chosen"]), **spread})
    shrunk = {"shrunk": "one family, one seed, four steps"} if quick else {}
    return Reading(min(gains), min(gains) >= BAR, rows, {"base": list(BASE), "families": families, **shrunk})


FIGURE = Figure(
    NAME,
    claim="speed of a step over the policy left off, setting chosen on two sets and judged on the third, the least of all",
    paper="the policy left off",
    printed=1.0,
    bar=f">= {BAR}, every policy on every set",
    cells=_cells,
    read=_read,
    statistic="means over seeds, with the interval of 95 % of Student's t",
)
