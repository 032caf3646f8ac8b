"""What a config will cost: GPU-hours by pool, environments, rewards (study notes, section 9). An estimate, not a quote.

The durations are the simulator's: the same pipeline in virtual time, with the ``[sim]`` figures of the config, for a few
steps; they are as good as those figures are, so put in what was measured. The prices are ``[cost]``: assumptions, each named
in the answer with whether the config gave it. Startup, warm-up, evaluation and failures are not in it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config, parse_config
from orchestrator.observe.report.bottleneck_analysis import Analysis, analyse_bottleneck
from orchestrator.observe.report.run_log import RunLog, load_run
from orchestrator.sim.simulated_run import simulate

SIMULATED_STEPS = 6
SKIPPED = 2  # the first steps fill the pipeline


@dataclass(frozen=True)
class CostItem:
    """One line of the bill. ``amount`` in ``unit``, ``price`` for one of it; ``assumed``: the price is the default."""

    name: str
    amount: float
    unit: str
    price: float
    assumed: bool

    @property
    def total(self) -> float:
        """Amount times price."""
        return self.amount * self.price


@dataclass(frozen=True)
class CostEstimate:
    """``hours``: wall time of all steps. ``analysis``: of the simulated run."""

    steps: int
    simulated_steps: int
    seconds_per_step: float
    hours: float
    currency: str
    items: tuple[CostItem, ...]
    analysis: Analysis | None

    @property
    def total(self) -> float:
        """The sum of the bill."""
        return sum(item.total for item in self.items)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        whole, environments = self.total, sum(item.total for item in self.items if item.name == "environments")
        return {
            "kind": "simulated",
            "steps": self.steps,
            "simulated_steps": self.simulated_steps,
            "seconds_per_step": round(self.seconds_per_step, 6),
            "hours": round(self.hours, 6),
            "currency": self.currency,
            "items": [asdict(item) | {"total": round(item.total, 6)} for item in self.items],
            "total": round(whole, 6),
            "environment_share": round(environments / whole, 6) if whole else 0.0,
            "analysis": asdict(self.analysis) if self.analysis else None,
        }

    def text(self, durations: str = "[sim]") -> str:
        """For people. ``durations``: whose they are."""
        whole = f"{self.hours:.2f} h" if self.hours >= 1 else f"{60 * self.hours:.1f} min"
        lines = [
            f"{self.steps} steps of {self.seconds_per_step:.3g} s: {whole} "
            f"(simulated: {self.simulated_steps} steps with the durations of {durations})"
        ]
        for item in self.items:
            label = "  assumed price" if item.assumed else ""
            lines.append(
                f"  {item.name:14} {item.amount:14,.2f} {item.unit:18} x {item.price:<9g} = "
                f"{item.total:12,.2f} {self.currency}{label}"
            )
        lines.append(f"  {'total':14} {'':14} {'':18}   {'':9}   {self.total:12,.2f} {self.currency}")
        if self.analysis is not None:
            found = self.analysis
            lines.append(
                f"{found.verdict}: engines busy {100 * found.engine_busy:.0f} % of the time with trajectories in flight; "
                f"environments {found.environments}, try {found.environments_suggested}"
            )
            if found.generation_to_training is not None:
                lines.append(f"training to generation, busy seconds: 1 : {found.generation_to_training:.2f}")
        return "\n".join(lines)


def estimate_cost(config: Config, steps: int = SIMULATED_STEPS, skipped: int = SKIPPED) -> CostEstimate:
    """Simulate ``steps`` of ``config`` and count; of the first ``skipped`` no time is taken. Raises ConfigError, and
    SimulationFailed for a config that cannot run."""
    count = min(config.run.steps, steps)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-cost-") as folder:
        simulate(_simulated(config, count), folder)
        run = load_run(folder)
        scored = _scored(Path(folder))
    periods = [step.period for step in run.steps]
    steady = periods[skipped:] or periods
    seconds = sum(steady) / len(steady)
    hours = seconds * config.run.steps / 3600
    return CostEstimate(
        steps=config.run.steps,
        simulated_steps=count,
        seconds_per_step=seconds,
        hours=hours,
        currency=config.cost.currency,
        items=tuple(_items(config, run, hours, scored / count * config.run.steps)),
        analysis=analyse_bottleneck(run),
    )


def _items(config: Config, run: RunLog, hours: float, rewards: float) -> Sequence[CostItem]:
    cost, trainer, rollout = config.cost, config.trainer, config.rollout
    gpus = cost.trainer_gpus or trainer.ranks
    each = cost.gpus_per_worker
    samples = sum(found["samples"] for found in run.occupancy)
    elapsed = sum(step.period for step in run.steps)
    busy = sum(found["in_flight"] for found in run.occupancy) * run.sample_seconds  # environment-seconds
    environments = busy / elapsed if samples and elapsed else 0.0
    bill = [
        ("trainer", gpus * hours, "GPU-hours", "trainer_gpu_hour"),
        ("rollout", rollout.workers * each * hours, "GPU-hours", "rollout_gpu_hour"),
        *([("served", len(rollout.served) * each * hours, "GPU-hours", "served_gpu_hour")] if rollout.served else []),
        ("environments", environments * hours, "environment-hours", "environment_hour"),
        ("reward calls", rewards, "calls", "reward_call"),
        ("reward time", rewards * config.sim.reward_seconds, "function-seconds", "reward_second"),
    ]
    return [
        CostItem(name, amount, unit, getattr(cost, price), price not in cost.model_fields_set)
        for name, amount, unit, price in bill
    ]


def _simulated(config: Config, steps: int) -> Config:
    """The same run, short, without faults; servers of others are played by as many simulated workers."""
    data = config.model_dump(mode="json")
    data["run"] |= {"steps": steps, "minutes": None}
    data["rollout"]["engine"] = config.rollout.engine_groups[0].options()
    data["rollout"] |= {"engines": (), "workers": config.rollout.workers + len(config.rollout.served), "served": []}
    data["evaluation"] |= {"every": 0, "prompts": 1}
    data["sim"]["fault_rate"] = 0.0
    return parse_config(data)


def _scored(folder: Path) -> int:
    """Trajectories that a reward was asked for."""
    lines = (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["state"] == "scoring" for line in lines)
