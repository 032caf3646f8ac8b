"""Simulated rollout throughput with prediction, priority, placement, migration and degrees, over Heddle's baselines (7.1 to 7.4).

``heddle.toml``: an eighth of its 64 GPUs and of its batch. Throughput is generated tokens over the seconds from a batch's start
to its last trajectory, over the steps after the first, in which the predictor learns. Baselines: cache-aware (Verl), the least
busy when that is less busy by a turn (Slime's kind), hybrid with a skew of 32 (Verl*) and of 2, as 32 is never passed here;
each with all engines of degree 1, as the paper's, and of 2, 4 and 8; first come, first served a turn. Ours has the degrees that
its manager chooses, on forecasts of another seed's prompts, and, beside it, each equal degree. The value is ours over the
baseline that is best in hindsight at any equal degree. Each part of ours is then left out, and replaced by its own baselines.

``clairvoyant``: what nobody who knew all lengths could be above: the batch's longest trajectory alone on the engine that is
fastest for it, or all its work on engines that are always full, whichever is longer (environments left out), against that
baseline's seconds.

Then the paper's 64 GPUs and its whole batch: ours, and the hybrid router with the same degrees, which says what is not the
degrees' doing. ``--quick``: two agents, few baselines.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from orchestrator.config import Config
from orchestrator.policies.parallelism.degree_reallocation import allocate_loads
from orchestrator.policies.placement.worker_load import SCORE, TrajectoryLoads, sorted_loads
from orchestrator.sim.cost_model import seconds_of
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.resizable_worker import SimRates
from orchestrator.sim.simulated_cluster import engine_costs
from orchestrator.sim.task_mix import TaskMix
from scripts.bench.papers.rollpacker_requests import Said, watched
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, Run, each_seed, row, unprinted

AGENTS = ("coding", "search", "math")
GPUS = 64
_SCALE = 8
DEGREES = (1, 2, 4, 8)
MARGIN = 0.05  # by which degrees that differ must be better than equal ones
BASELINES = {
    "cache-aware": ("rollout.routing.imbalance=1000000",),
    "least-load": ("rollout.routing.imbalance=1",),
    "hybrid": ("rollout.routing.skew=32.0",),
    "hybrid, skew 2": ("rollout.routing.skew=2.0",),
}
_QUICK = ("cache-aware", "least-load", "hybrid, our degrees", "ours")
_QUICK_AGENTS = AGENTS[:2]
_WHOLE = ("hybrid, our degrees", "ours")  # on all GPUs
_PREDICT = ("rollout.prediction.enabled=true",)
_PLACE = (
    "rollout.placement.enabled=true",
    "rollout.placement.prefill_seconds=0.0005",
    "rollout.kv_transfer.enabled=true",
)


def base(agent: str, scale: int, extra: Sequence[str] = ()) -> Config:
    """The scenario with one agent only."""
    others = [f"sim.tasks.{name}.weight=1e-9" for name in AGENTS if name != agent]
    return load_scenario("heddle", [*others, *extra], scale)


def known_loads(config: Config, number: int) -> TrajectoryLoads:
    """Forecasts of so many trajectories before they begin, of prompts that no run plays: of each the median of its prompt's, and
    how far they are from it. What a resource manager knows from the steps before."""
    workload, draw, grain = TaskMix(config), random.Random(977), config.sim.grain
    longest, size = config.rollout.engine.max_model_len, config.rollout.group_size
    tokens, prompts, gaps, off = list[float](), list[float](), list[float](), list[float]()
    heard = said = 0.0
    for prompt in range(number // size):
        name = workload.assign_task(f"known-{prompt}")
        task, opening = workload.task_named(name), workload.opening(name, random.Random(prompt))
        logs, observed = list[float](), task.observation_tokens / grain
        for member in range(size):
            turns, turn, spoken, context = (
                draw.randint(task.turns_min, task.turns_max),
                0,
                0,
                task.prompt_tokens / grain,
            )
            while turn < turns and context < longest:  # a full context ends it
                room = max(1, int(longest - context))
                one = len(workload.response(opening, f"known-{prompt}-{member}", turn, room))
                context, spoken, turn = context + one + observed, spoken + one, turn + 1
            logs.append(math.log(spoken))
            prompts.append(task.prompt_tokens / grain)
            gaps.append((turns - 1) * task.step_seconds)
            heard, said = heard + (turn - 1) * observed, said + spoken
        tokens += [math.exp(statistics.median(logs))] * size
        off += [log - statistics.median(logs) for log in logs]
    spread = max(0.0, statistics.quantiles(off, n=10)[-1]) / SCORE
    means = [median * math.exp(spread * spread / 2) for median in tokens]
    return sorted_loads(means, prompts, prompts, gaps, [spread] * len(means), 1.0 + heard / said, longest)[0]


def degrees(config: Config) -> tuple[int, ...]:
    """How the resource manager cuts the GPUs (Heddle 6), by the same costs that the placement reads."""
    number = config.rollout.groups_per_step * config.rollout.group_size
    rates = SimRates(config)
    kinds = {degree: rates.rates_at("", degree) for degree in DEGREES}
    return allocate_loads(known_loads(config, number), config.rollout.workers, kinds, margin=MARGIN).degrees


def cut(found: Sequence[int], scale: int) -> tuple[str, ...]:
    """Overrides: workers of these degrees, before the scenario is scaled down."""
    return (f"rollout.workers={len(found) * scale}", f"sim.degrees={list(found)}")


@cache
def _chosen(agent: str, scale: int) -> tuple[str, ...]:
    return cut(degrees(base(agent, scale)), scale)


def _equal(degree: int, scale: int) -> tuple[str, ...]:
    """Overrides: all engines of this degree; nothing for 1."""
    return () if degree == 1 else cut((degree,) * (GPUS // scale // degree), scale)


def _name(policy: str, degree: int) -> str:
    return policy if degree == 1 else f"{policy}, degree {degree}"


def baselines() -> tuple[str, ...]:
    """Names of all: each router at each equal degree."""
    return tuple(_name(router, degree) for router in BASELINES for degree in DEGREES)


def variants(scale: int, chosen: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """All that is simulated for one agent: overrides by name. ``chosen``: the manager's degrees, as overrides."""
    ours = (*_PREDICT, *_PLACE, *chosen)
    routed = {
        _name(router, degree): (*given, *_equal(degree, scale))
        for router, given in BASELINES.items()
        for degree in DEGREES
    }
    equal = {_name("ours", degree): (*_PREDICT, *_PLACE, *_equal(degree, scale)) for degree in DEGREES[1:]}
    return {
        **routed,
        **equal,
        "ours": ours,
        "hybrid, our degrees": ("rollout.routing.skew=2.0", *chosen),
        "ours, degrees left out": (*_PREDICT, *_PLACE),
        "ours, migration left out": (*ours, "rollout.placement.migrate=false"),
        "ours, priority left out": (*ours, "rollout.prediction.order=round-robin"),
        "ours, placement left out": (*_PREDICT, *chosen, "rollout.routing.imbalance=1"),
        "ours, KV recomputed": (*ours, "rollout.kv_transfer.enabled=false"),
        "ours, oracle": (*ours, "rollout.prediction.predictor=oracle"),
        "ours, history": (*ours, "rollout.prediction.predictor=history"),
        "order fcfs": (*ours, "rollout.prediction.order=fcfs"),
        "order shortest-first": (*ours, "rollout.prediction.order=shortest-first"),
        "priority alone, hybrid": (*_PREDICT, *BASELINES["hybrid"]),
    }


def measure(config: Config) -> dict[str, Any]:
    """Simulate: throughput over the steps after the first, their seconds, and the least that they could take. Raises
    SimulationFailed."""
    said, run = watched(config)
    later = list(run.took)[1:]
    seconds = sum(run.took[step] for step in later)
    tokens = sum(run.steps[step]["tokens"] for step in later if step in run.steps)
    least = sum(least_seconds(config, _within(said, run, step)) for step in later)
    count = len(later)
    return {
        "tokens_per_s": tokens * config.sim.grain / seconds,
        "seconds": seconds / count,
        "least": least / count,
        "degrees": list(config.sim.degrees),
    }


def _within(said: Sequence[Said], run: Run, step: int) -> list[Said]:
    begun, end = run.rollouts[step]
    return [one for one in said if begun < one.end <= end + 1.0]


def least_seconds(config: Config, said: Sequence[Said]) -> float:
    """What these requests take at least on the config's GPUs, however they are placed and ordered: those of the longest
    trajectory one after the other, alone on the engine that is fastest for them; or all of them on engines that are as full as
    they can be, each on the degree at which it takes the fewest GPU-seconds. Prefill and environments are left out."""
    costs = {degree: engine_costs(config, degree=degree) for degree in DEGREES}
    trajectories = len({one.trajectory for one in said})
    alone, work = dict[str, dict[int, float]](), 0.0
    for one in said:
        here = alone.setdefault(one.trajectory, dict.fromkeys(DEGREES, 0.0))
        shared = []
        for degree, cost in costs.items():
            fixed, growing = cost.decode(1)
            here[degree] += seconds_of(one.tokens, fixed + growing * one.prompt, growing)
            full, growing = cost.decode(max(1, trajectories))
            mine = full / max(1, trajectories)
            shared.append(degree * seconds_of(one.tokens, mine + growing * one.prompt, growing))
        work += min(shared)
    gpus = config.rollout.workers * config.sim.tensor_parallel if not config.sim.degrees else sum(config.sim.degrees)
    return max(max(min(of.values()) for of in alone.values()), work / gpus)


def _cell(agent: str, scale: int, name: str, seed: int) -> dict[str, Any]:
    return measure(
        base(agent, scale, ("run.steps=2", f"run.seed={seed}", *variants(scale, _chosen(agent, scale))[name]))
    )


def _cells(quick: bool) -> Cells:
    agents, scales = (_QUICK_AGENTS, (_SCALE,)) if quick else (AGENTS, (_SCALE, 1))
    return {
        f"{GPUS // scale} GPUs/{agent}/{name}": partial(_cell, agent, scale, name)
        for scale in scales
        for agent in agents
        for name in (_QUICK if quick else _WHOLE if scale == 1 else variants(scale, ()))
    }


def _best(runs: Mapping[str, Any], names: Sequence[str]) -> tuple[str, float]:
    """Of those that were played, which is fastest, and its throughput."""
    found = {name: float(runs[name]["tokens_per_s"]) for name in names if name in runs}
    name = max(found, key=lambda one: found[one])
    return name, found[name]


def _compared(agent: str, gpus: int, runs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """One agent: ours over the best baselines, the bound, rows."""
    ours, where = float(runs["ours"]["tokens_per_s"]), f"{gpus} GPUs, {agent}:"
    if not set(BASELINES) & set(runs):
        over = ours / float(runs[_WHOLE[0]]["tokens_per_s"])
        found: dict[str, Any] = {f"over {_WHOLE[0]}": over, "degrees": runs["ours"]["degrees"], "runs": dict(runs)}
        return found, [unprinted(f"{where} ours over {_WHOLE[0]}", over, "7.2 to 7.4")]
    router, routed = _best(runs, tuple(BASELINES))
    equal, tuned = _best(runs, baselines())
    own, _ = _best(runs, [_name("ours", degree) for degree in DEGREES[1:]] + ["ours", "ours, degrees left out"])
    bound = float(runs[equal]["seconds"]) / float(runs["ours"]["least"])
    found = {
        "over_best_router_of_degree_1": ours / routed,
        "over_best_equal_degree": ours / tuned,
        "best_router": router,
        "best_equal_degree": equal,
        "best_of_ours": own,
        "degrees": runs["ours"]["degrees"],
        "clairvoyant_over_best_equal_degree": bound,
        "runs": dict(runs),
    }
    source = "Heddle 7.1, figure 12"
    rows = [
        row(f"{where} ours over the best router of degree 1", (1.0, 2.5), ours / routed, source, text="up to 2.5"),
        unprinted(f"{where} ours over the best router of any equal degree", ours / tuned, "ours"),
        unprinted(f"{where} clairvoyant bound over the best router of any equal degree", bound, "ours"),
    ]
    for name, one in runs.items():
        if name not in ("ours", *baselines()):
            rows.append(unprinted(f"{where} ours over {name}", ours / one["tokens_per_s"], "7.2 to 7.4"))
    return found, rows


def _read(found: Found, quick: bool) -> Reading:
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for key, one in found.items():
        gpus, agent, name = key.split("/")
        runs.setdefault(gpus, {}).setdefault(agent, {})[name] = one
    compared: dict[str, dict[str, Any]] = {}
    rows = list[Row]()
    for gpus, agents in runs.items():
        for agent, of in agents.items():
            compared.setdefault(gpus, {})[agent], more = _compared(agent, int(gpus.partition(" ")[0]), of)
            rows += more
    part = compared[f"{GPUS // _SCALE} GPUs"]
    gains = {agent: one["over_best_equal_degree"] for agent, one in part.items()}
    routed = [one["over_best_router_of_degree_1"] for one in part.values()]
    value = statistics.geometric_mean(gains.values())
    holds = statistics.geometric_mean(routed) >= _ROUTED and all(
        _enough(one["over_best_equal_degree"], one["clairvoyant_over_best_equal_degree"]) for one in part.values()
    )
    detail = {
        "gpus": GPUS // _SCALE,
        "scale": _SCALE,
        "over_best_equal_degree": gains,
        "agents": compared,
    }
    return Reading(value, holds, rows, detail)


def _enough(gain: float, bound: float) -> bool:
    """Half of what is to be had where that is worth something, and nowhere a loss."""
    return gain >= 0.99 and (bound < 1.10 or gain - 1.0 >= (bound - 1.0) / 2)


_ROUTED = 1.8
FIGURE = Figure(
    "heddle",
    claim="rollout throughput over the best router of any equal degree, geometric mean of the agents",
    paper="Heddle, figure 12: up to 2.5 over routers of degree 1 (paper; its bars are not in our copy)",
    printed=2.5,
    bar=f">= {_ROUTED} over routers of degree 1; over those of the best equal degree >= 0.99 for each agent, and half of the "
    "clairvoyant gain where that is 0.10 or more",
    cells=_cells,
    read=each_seed(_read),
)
