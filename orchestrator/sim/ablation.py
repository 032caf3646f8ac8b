"""``rl-coserve sim --ablate``: what each feature is worth, by simulating without it, with error bars over seeds.

A feature is a name and two lists of overrides, with it and without it (:data:`FEATURES`): a new one joins by a line. The base
has all of them on; each row takes one away. Rows are paired by seed with the base: the same prompts, lengths and times; the bar
is the interval of 95 % of Student's t of the mean ratio over seeds. A ratio above 1 is what the feature saves. RollPacker's
features, which need a synchronous run (:data:`SYNCHRONOUS`), are taken away from a base of their own, after the others; its
parallelism planner, which cannot share a run with devices that are freed within a step (:data:`PLANNED`), from one more.
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
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5th percentile, by degrees of freedom


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
    def interval(self) -> tuple[float, float]:
        """Of 95 % of Student's t; of more than ten seeds that of ten, which is wider. For one seed, which has none, its ratio."""
        half = 0.0
        if (count := len(self.ratios)) > 1:
            half = _STUDENT[min(count - 2, len(_STUDENT) - 1)] * statistics.stdev(self.ratios) / count**0.5
        return self.ratio - half, self.ratio + half

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "without": self.name,
            "step_seconds": [round(value, 4) for value in self.seconds],
            "over_all_on": round(self.ratio, 4),
            "interval": [round(end, 4) for end in self.interval] if len(self.ratios) > 1 else None,
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
    lines = [f"{'simulated, without':24} {'s a step':>10} {'over all on':>12} {'95 %':>16}"]
    for row in rows:
        mean, (low, high) = statistics.mean(row.seconds), row.interval
        spread = f"{low:.3f} to {high:.3f}" if len(row.ratios) > 1 else "one seed"
        lines.append(f"{row.name or '(all on)':24} {mean:10.1f} {row.ratio:12.3f} {spread:>16}")
    return "\n".join(lines)


def ablation_svg(rows: Sequence[AblationRow]) -> str:
    """A file: a point a feature, the step time without it over that with all, and its interval over seeds."""
    shown = [row for row in rows if row.name]
    spans = [row.interval for row in shown]
    about = "; ".join(
        f"{row.name}: {row.ratio:.3f} ({low:.3f} to {high:.3f})" for row, (low, high) in zip(shown, spans, strict=True)
    )
    plot = Drawing(140.0 * len(shown) + 80, 320.0, "What each feature saves", about, Margins(left=60, bottom=50))
    plot.x_scale(-0.5, len(shown) - 0.5)
    plot.axes.set_xticks(range(len(shown)), ["\n".join(textwrap.wrap(row.name, 22)) for row in shown])
    plot.y_scale(
        min(1.0, *(low for low, _ in spans)),
        max(1.0, *(high for _, high in spans)),
        "step time without it / with all (simulated)",
    )
    plot.level(1.0, "all on", "c0")
    plot.whiskers([(place, *span) for place, span in enumerate(spans)], "c1")
    for place, row in enumerate(shown):
        plot.dot(place, row.ratio, "c1", f"{row.name}: {row.ratio:.3f}")
    return plot.file_svg()
