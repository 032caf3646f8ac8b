"""RollArt's ladder of modes and its fleets (7.1, 7.2), as overrides of ``orchestrator/sim/scenarios/rollart.toml``."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import Config
from orchestrator.sim.paper_setups import load_scenario

_PARALLEL = {"8B": 1, "14B": 2, "32B": 4}  # rollout TP (RollArt 7.1)
_SWE = (  # trained on 32B only (RollArt 7.1); the task of rollart-swe.toml
    "sim.tasks.swe-bench.turns_min=30",
    "sim.tasks.swe-bench.turns_max=50",
    "sim.tasks.swe-bench.prompt_tokens=2000",
    "sim.tasks.swe-bench.observation_tokens=450",
    "sim.tasks.swe-bench.response_tokens=200",
    "sim.tasks.swe-bench.response_max=4096",
    "sim.tasks.swe-bench.reset_seconds=20",
    "sim.tasks.swe-bench.reset_sigma=0.5",
    "sim.tasks.swe-bench.step_seconds=1",
    "sim.tasks.swe-bench.step_sigma=1",
    "sim.tasks.swe-bench.reward_seconds=2",
    "sim.tasks.swe-bench.reward_sigma=0.5",
)
LADDER = ("sync", "sync_plus", "one_off", "areal", "async", "affinity")


def rollart_fleet(model: str, h800: int, h20: int) -> list[str]:
    """Overrides: so many GPUs of each class generate with this model ("8B", "14B", "32B")."""
    ranks = _PARALLEL[model]
    found = [f"sim.model=Qwen3-{model}", f"sim.tensor_parallel={ranks}", f"rollout.workers={(h800 + h20) // ranks}"]
    found.append(
        f"sim.fleet={{H800={h800 // ranks}}}" if not h20 else f"sim.fleet={{H800={h800 // ranks}, H20={h20 // ranks}}}"
    )
    if not h800:
        found[-1] = f"sim.fleet={{H20={h20 // ranks}}}"
    return found + (list(_SWE) if model == "32B" else [])


_ONE_CLASS = [  # on H800 alone: no affinity, weights over NCCL inside the cluster, no Mooncake across Ethernet (table 4)
    "rollout.routing.affinity={}",
    "sim.push_gb_s=0",
    "sim.pull_gb_s=0",
    "rollout.weights=collective",
    "rollout.collective_timeout=3600.0",
]


def rollart(
    model: str, rung: str, scale: int = 1, *, steps: int = 5, seed: int = 0, extra: Sequence[str] = ()
) -> Config:
    """A rung of RollArt's ladder (7.1, 7.2): baselines on 128 H800, the last on 96 H800 and 32 H20."""
    given = [f"run.steps={steps}", f"run.seed={seed}"]
    if rung in ("sync", "sync_plus"):  # monolithic: all GPUs generate, then all train
        given += [
            *rollart_fleet(model, 128, 0),
            *_ONE_CLASS,
            f"run.mode={rung}",
            "rollout.alpha=0",
            "sim.trainer_gpus=128",
        ]
        given.append("rollout.environments=512")
        if rung == "sync":  # the judge on four H800, 16 requests each (as in 3.1); no serverless offloading
            given.append("sim.reward_slots=64")
    elif rung == "affinity":
        given += [*rollart_fleet(model, 64, 32), "run.mode=async"]
    else:
        given += [*rollart_fleet(model, 96, 0), *_ONE_CLASS, f"run.mode={rung}"]
    return load_scenario("rollart", [*given, *extra], scale)
