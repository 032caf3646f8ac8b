"""Simulated rollout throughput with prediction, priority, placement, migration and degrees, over Heddle's baselines (7.1 to 7.4).

``heddle.toml``: an eighth of its 64 GPUs and of its batch. Throughput is generated tokens over the seconds from a batch's start
to its last trajectory, over the steps after the first, in which the predictor learns. Baselines: cache-aware (Verl), the least
busy when that is less busy by a turn (Slime's kind), hybrid with a skew of 32 (Verl*) and of 2, as 32 is never passed here; all
of degree 1, first come, first served a turn; and, beyond the paper's, hybrid with the degrees that are ours (``tuned``). Each
part of ours is then left out, and replaced by its own baselines. Degrees are chosen on forecasts of another seed's prompts.
The full run then plays the paper's 64 GPUs and its whole batch, without the ablation: some 20 minutes more. ``--quick``: two
agents, the baselines that are best somewhere.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from orchestrator.config import Config
from orchestrator.policies.parallelism.degree_reallocation import allocate_loads
from orchestrator.policies.placement.worker_load import SCORE, TrajectoryLoads, sorted_loads
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.resizable_worker import SimRates
from orchestrator.sim.task_mix import TaskMix
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Run, Verdict, row, unprinted

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


def variants(agent: str, scale: int, gpus: int) -> dict[str, tuple[str, ...]]:
    """All that is simulated for one agent: overrides by name."""
    chosen = cut(degrees(base(agent, scale)), scale)
    ours = (*_PREDICT, *_PLACE, *chosen)
    return {
        **BASELINES,
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
        "all of degree 8": (*_PREDICT, *_PLACE, *cut((8,) * (gpus // 8), scale)),
    }


def measure(config: Config) -> dict[str, float]:
    """Simulate: throughput over the steps after the first, their seconds. Raises SimulationFailed."""
    run = Run(config)
    later = list(run.took)[1:]
    seconds = sum(run.took[step] for step in later)
    tokens = sum(run.steps[step]["tokens"] for step in later if step in run.steps)
    return {"tokens_per_s": tokens * config.sim.grain / seconds, "seconds": seconds / len(later)}


def played(agent: str, scale: int, few: bool) -> Found:
    """One agent on an n-th of the GPUs and the batch: degrees, each run, rows. ``few``: without the ablation."""
    found = {
        name: measure(base(agent, scale, ("run.steps=2", *extra)))
        for name, extra in variants(agent, scale, GPUS // scale).items()
        if name in _QUICK or not few
    }
    over = {name: found["ours"]["tokens_per_s"] / one["tokens_per_s"] for name, one in found.items() if name != "ours"}
    rows = [
        row(f"{agent}: ours over {name}", (1.0, 2.5), ours, "Heddle 7.1, figure 12", text="up to 2.5")
        if name in BASELINES
        else unprinted(f"{agent}: ours over {name}", ours, "7.2 to 7.4")
        for name, ours in over.items()
    ]
    return {"degrees": degrees(base(agent, scale)), "runs": found, "rows": rows}, rows


def _whole(agent: str) -> Found:
    """All the paper's GPUs."""
    found, rows = played(agent, 1, True)
    return found, [{**one, "what": f"{GPUS} GPUs, {one['what']}"} for one in rows]


def _over(found: dict[str, Any], baselines: Iterable[str] = tuple(BASELINES)) -> float:
    best = max(found[baseline]["tokens_per_s"] for baseline in baselines if baseline in found)
    return float(found["ours"]["tokens_per_s"] / best)


def _parts(quick: bool) -> Parts:
    agents = {agent: partial(played, agent, _SCALE, quick) for agent in (_QUICK_AGENTS if quick else AGENTS)}
    return agents if quick else {**agents, **{f"all, {agent}": partial(_whole, agent) for agent in AGENTS}}


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    whole = {agent: found.pop(f"all, {agent}") for agent in AGENTS if f"all, {agent}" in found}
    gains = {agent: _over(one["runs"]) for agent, one in found.items()}
    detail = {
        "gpus": GPUS // _SCALE,
        "scale": _SCALE,
        "over_best_baseline": gains,
        "over_tuned": {agent: _over(one["runs"], ("hybrid, our degrees",)) for agent, one in found.items()},
        "agents": found,
        "all_gpus": whole,
    }
    return statistics.geometric_mean(gains.values()), min(gains.values()) > 1.0, detail


FIGURE = Figure(
    "heddle",
    claim="rollout throughput over the best baseline, geometric mean of the agents",
    paper="Heddle, figure 12: up to 2.5 over the baselines (paper; its bars are not in our copy)",
    printed=2.5,
    bar="> 1 for each agent",
    parts=_parts,
    read=_read,
)
