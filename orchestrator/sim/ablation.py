"""``rl-coserve sim --ablate``: what each feature is worth, by simulating without it, with error bars over seeds.

A feature is a name and two lists of overrides, with it and without it (:data:`FEATURES`): a new one joins by a line. The base
has all of them on; each row takes one away. Rows are paired by seed with the base: the same prompts, lengths and times; the bar
is the standard deviation of the ratio over seeds. A ratio above 1 is what the feature saves. RollPacker's features, which need a
synchronous run (:data:`SYNCHRONOUS`), are taken away from a base of their own, after the others; its parallelism planner, which
cannot share a run with devices that are freed within a step (:data:`PLANNED`), from one more.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.observe.report.plots import Drawing, Margins
from orchestrator.sim.paper_setups import counted_steps, load_scenario, rollpacker
from orchestrator.sim.simulated_run import simulate

SCENARIO = "rollart"
SCALE = 16  # a 16th of its cluster and batch
STEPS = 5
BALANCED = "sim.trainer_gpus=96"  # with the 32 of the scenario training binds, and nothing of the rollout shows


@dataclass(frozen=True, slots=True)
class AblationFeature:
    """``on`` and ``off``: overrides of the config with it and without it."""

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]


FEATURES = (
    AblationFeature("async, alpha 1", (), ("run.mode=sync_plus", "rollout.alpha=0")),
    AblationFeature("hardware affinity", (), ("rollout.routing.affinity={}",)),
    AblationFeature("cache-affine routing", (), ("rollout.routing.policy=least-loaded",)),
    AblationFeature("redundant groups", ("rollout.redundant_groups=2.0",), ("rollout.redundant_groups=1.0",)),
    AblationFeature("streamed training", ("trainer.stream=true",), ("trainer.stream=false",)),
    AblationFeature("serverless rewards", ("sim.reward_slots=0",), ("sim.reward_slots=4",)),
)

SYNCHRONOUS = (  # all on: the rung "+ stream trainer" of RollPacker's 7B/8k
    AblationFeature("tail batching", (), ("rollout.rounds.enabled=false",)),
    AblationFeature("speculation in prompts", (), ("rollout.rounds.eta_prompts=1.0",)),
    AblationFeature("speculation in responses", (), ("rollout.rounds.eta_responses=1.0",)),
    AblationFeature("rewards beside the rollout", (), ("run.mode=sync",)),
    AblationFeature(
        "training streamed on freed devices", (), ("rollout.colocation.enabled=false", "trainer.stream=false")
    ),
    AblationFeature("adaptive reward timeout", (), ("reward.timeout=40",)),  # of a call; the scorer's own limit is 30 s
)

PLANNED = (  # 32B/32k, rewards beside the rollout; without it RollPacker's TP 2 throughout
    AblationFeature(
        "parallelism planner",
        (),
        ("rollout.planner.enabled=false", "sim.tensor_parallel=2", "rollout.workers=32"),
    ),
)
_PLANNER = (  # a worker a GPU; 780 tokens are expected of a response, in grains of 16
    "rollout.weights=relay",
    "sim.tensor_parallel=1",
    "rollout.workers=64",
    "rollout.planner.enabled=true",
    "rollout.planner.max_tp=8",
    "rollout.planner.expected_tokens=48",
)


@dataclass(frozen=True, slots=True)
class AblationRow:
    """Without one feature ("": with all): seconds a step for each seed, and over those of the base."""

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.ratios)

    @property
    def deviation(self) -> float:
        """Of the ratio over seeds; 0 for one."""
        return statistics.stdev(self.ratios) if len(self.ratios) > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "without": self.name,
            "step_seconds": [round(value, 4) for value in self.seconds],
            "over_all_on": round(self.ratio, 4),
            "deviation": round(self.deviation, 4),
        }


def ablate(
    seeds: int,
    features: Sequence[AblationFeature] | None = None,
    make: Callable[[Sequence[str]], Config] | None = None,
    said: Callable[[str], object] = lambda text: None,
) -> list[AblationRow]:
    """All rows, the base first. ``features``: default: :data:`FEATURES`. ``make``: a config from overrides, default: the scenario
    of this module. Without both, the rows of :data:`SYNCHRONOUS` and :data:`PLANNED` follow. ``said`` hears of each run. Raises
    ConfigError, SimulationFailed."""
    if seeds < 1:
        raise ConfigError("--seeds", seeds, "at least one")
    if make is None and features is None:
        parts = ((FEATURES, _default), (SYNCHRONOUS, synchronous_setup), (PLANNED, planner_setup))
        return [row for part, base in parts for row in ablate(seeds, part, base, said)]
    make, features = make or _default, FEATURES if features is None else features
    on = [override for feature in features for override in feature.on]

    def seconds(name: str, off: Sequence[str]) -> tuple[float, ...]:
        found = []
        for seed in range(seeds):
            found.append(counted_steps(simulate(make([*on, *off, f"run.seed={seed}"])))[1])
            said(f"{name}, seed {seed}: {found[-1]:.1f} s a step")
        return tuple(found)

    base = seconds("all on", ())
    rows = [AblationRow("", base, (1.0,) * seeds)]
    for feature in features:
        times = seconds(f"without {feature.name}", feature.off)
        rows.append(AblationRow(feature.name, times, tuple(a / b for a, b in zip(times, base, strict=True))))
    return rows


def _default(overrides: Sequence[str]) -> Config:
    return load_scenario(SCENARIO, [f"run.steps={STEPS}", BALANCED, *overrides], SCALE)


def synchronous_setup(overrides: Sequence[str]) -> Config:
    """Seven steps: those that are measured are four short rounds and a long one."""
    return rollpacker("7B/8k", "+ stream trainer", 4, steps=7, extra=overrides)


def planner_setup(overrides: Sequence[str]) -> Config:
    """The same of 32B/32k, with the planner instead of the stream trainer."""
    return rollpacker("32B/32k", "+ reward scheduler", 4, steps=7, extra=[*_PLANNER, *overrides])


def format_rows(rows: Sequence[AblationRow]) -> str:
    """For people."""
    lines = [f"{'simulated, without':24} {'s a step':>10} {'over all on':>12} {'+-':>7}"]
    for row in rows:
        mean = statistics.mean(row.seconds)
        lines.append(f"{row.name or '(all on)':24} {mean:10.1f} {row.ratio:12.3f} {row.deviation:7.3f}")
    return "\n".join(lines)


def ablation_svg(rows: Sequence[AblationRow]) -> str:
    """A file: a point a feature, the step time without it over that with all, and its deviation over seeds."""
    shown = [row for row in rows if row.name]
    about = "; ".join(f"{row.name}: {row.ratio:.3f} +- {row.deviation:.3f}" for row in shown)
    plot = Drawing(140.0 * len(shown) + 80, 320.0, "What each feature saves", about, Margins(left=60, bottom=50))
    plot.x_scale(-0.5, len(shown) - 0.5)
    plot.axes.set_xticks(range(len(shown)), ["\n".join(textwrap.wrap(row.name, 22)) for row in shown])
    low, high = (pick(row.ratio + sign * row.deviation for row in shown) for pick, sign in ((min, -1), (max, 1)))
    plot.y_scale(min(1.0, low), max(1.0, high), "step time without it / with all (simulated)")
    plot.level(1.0, "all on", "c0")
    plot.whiskers(
        [(place, row.ratio - row.deviation, row.ratio + row.deviation) for place, row in enumerate(shown)], "c1"
    )
    for place, row in enumerate(shown):
        plot.dot(place, row.ratio, "c1", f"{row.name}: {row.ratio:.3f}")
    return plot.file_svg()
