"""The papers' setups (``scenarios/*.toml``) and their variants, and which steps of a simulated run count.

Guarantee: a variant is its file with overrides that are written here and nowhere else, so that a policy is compared on the
workload and the cluster that were there before it. ``scale`` n plays an n-th of the cluster on an n-th of the batch: the load
of each device, all durations that do not depend on the number of trajectories, and that of a training step stay as they are.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config, apply_override, parse_config
from orchestrator.sim.hardware import TRAIN_SERIAL_SECONDS
from orchestrator.sim.simulated_run import SimResult

SKIPPED = 2  # first steps, which fill the pipeline


def load_scenario(name: str, overrides: Sequence[str] = (), scale: int = 1) -> Config:
    """A setup by the name of its file. Raises ConfigError."""
    file = files("orchestrator.sim") / "scenarios" / f"{name}.toml"
    if not file.is_file():
        raise ConfigError("scenario", name, "no such file in orchestrator/sim/scenarios")
    data: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    for override in overrides:
        apply_override(data, override)
    return parse_config(_scaled(data, scale))


def _scaled(data: dict[str, Any], scale: int) -> dict[str, Any]:
    if scale == 1:
        return data
    rollout, sim = data["rollout"], data["sim"]
    for table, keys in (
        (rollout, ("workers", "environments", "groups_per_step")),
        (sim, ("trainer_gpus", "reward_slots")),
    ):
        for key in keys:
            if table.get(key):
                table[key] = max(1, table[key] // scale)
    serial = sim.get("trainer_serial_seconds", TRAIN_SERIAL_SECONDS)
    sim["trainer_serial_seconds"] = scale * serial  # a token is n tokens
    if sim.get("fleet"):
        sim["fleet"] = {name: max(1, count // scale) for name, count in sim["fleet"].items()}
        rollout["workers"] = sum(sim["fleet"].values())
    rollout["environments"] = max(rollout["environments"], rollout["groups_per_step"] * rollout["group_size"])
    return data


_TASKS = ("math", "code", "judged")
SCORES = 16  # of rollpacker.toml, a GPU
ROLLPACKER = {  # RollPacker 6: model, GPUs, rollout TP, longest response, GPUs of a training replica (TP x PP x CP)
    "7B/8k": ("Qwen2.5-7B", 16, 1, 8192, 2),
    "14B/16k": ("Qwen2.5-14B", 32, 2, 16384, 8),
    "32B/32k": ("Qwen2.5-32B", 64, 2, 32768, 16),
}
_TAIL = ("rollout.rounds.enabled=true", "rollout.environments=2048")  # a short round starts 1.5625 x 1,024
_SCHEDULED = ("run.mode=sync_plus", "reward.timeout=adaptive")
_STREAMED = ("trainer.stream=true", "rollout.colocation.enabled=true", "rollout.weights=relay")
RUNGS: dict[str, tuple[str, ...]] = {  # RollPacker table 2, and 6.1; its parallelism planner is not played
    "veRL": (),
    "+ tail batching": _TAIL,
    "+ reward scheduler": (*_TAIL, *_SCHEDULED),
    "+ stream trainer": (*_TAIL, *_SCHEDULED, *_STREAMED),
    "RLHFuse, strengthened": ("run.mode=sync_plus", *_STREAMED),
}


def rollpacker_setup(size: str, scale: int = 1) -> list[str]:
    """Overrides of the scenario, which is 14B/16k. The paper prints lengths for that one only, so for the others it is ASSUMED
    that the median stays and the longest of a batch of 1,024 moves with the limit: sigma by ln 2 / 3.2 for each doubling. And
    that a GPU brings its server's share of what scores: ``SCORES`` at a time (calibrated, see the file)."""
    model, gpus, ranks, longest, replica = ROLLPACKER[size]
    sigma = 1.05 + math.log(longest / 16384) / 3.2
    mean = 450 * math.exp(sigma * sigma / 2)
    given = [f"sim.model={model}", f"sim.tensor_parallel={ranks}", f"rollout.workers={gpus // ranks}"]
    given += [f"sim.trainer_gpus={gpus}", f"sim.reward_slots={SCORES * gpus}"]
    given.append(f"rollout.engine.max_model_len={(512 + longest) // 16}")
    for task in _TASKS:
        of = f"sim.tasks.{task}"
        given += [
            f"{of}.response_sigma={sigma:.3f}",
            f"{of}.response_tokens={mean:.0f}",
            f"{of}.response_max={longest}",
        ]
    # devices are counted in rollout workers, and a replica's ranks together (see orchestrator.sim.device_sharing)
    return [*given, f"trainer.tensor_parallel={replica // ranks}", f"trainer.data_parallel={gpus // replica // scale}"]


def rollpacker(
    size: str, rung: str, scale: int = 1, *, steps: int = 11, seed: int = 0, extra: Sequence[str] = ()
) -> Config:
    """A rung of RollPacker's ablation (table 2), or its strengthened RLHFuse (6.1), on one of its three setups. ``scale``: so
    that two training replicas are left, at most 4, 2, 2."""
    given = [f"run.steps={steps}", f"run.seed={seed}", *rollpacker_setup(size, scale), *RUNGS[rung], *extra]
    return load_scenario("rollpacker", given, scale)


def counted_steps(result: SimResult) -> tuple[list[dict[str, Any]], float]:
    """The events of a run's steps after the first ``SKIPPED``, and seconds a step of them."""
    events = [json.loads(line) for line in result.events.splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    skipped = min(SKIPPED, len(steps) - 1)
    begun = steps[skipped - 1]["t"] if skipped else 0.0
    counted = steps[skipped:]
    return counted, (counted[-1]["t"] - begun) / len(counted)
