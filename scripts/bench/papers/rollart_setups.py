"""RollArt's ladder of modes and its fleets (7.1, 7.2), as overrides of ``orchestrator/sim/scenarios/rollart.toml``."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import Config
from orchestrator.sim.paper_setups import load_scenario

MODELS = ("8B", "14B", "32B")
LADDER = ("sync", "sync_plus", "one_off", "areal", "async", "affinity")
NO_PUSH = ("sim.push_gb_s=0", "sim.pull_gb_s=0")  # at the rate of the network ports
FREE = (*NO_PUSH, "sim.trainer_gpus=1000000", "sim.trainer_serial_seconds=0")  # nothing waits for the trainer
FREE_NAME = "8B, training and push for nothing"
NO_AFFINITY = "rollout.routing.affinity={}"
COLLECTIVE = ("rollout.weights=collective", "rollout.collective_timeout=3600.0")
ONE_CLASS = (
    NO_AFFINITY,
    *NO_PUSH,
    *COLLECTIVE,
)  # weights over NCCL in the cluster, no Mooncake across Ethernet (table 4)
_PARALLEL = {"8B": 1, "14B": 2, "32B": 4}  # rollout TP (RollArt 7.1)
_SWE = "turns_min=30 turns_max=50 prompt_tokens=2000 observation_tokens=350 response_tokens=300 response_max=4096 "
_SWE += "prompt_share=0.078 trajectory_share=0.015 "
_SWE += "reset_seconds=20 reset_sigma=0.5 step_seconds=1 step_sigma=1 reward_seconds=2 reward_sigma=0.5"


def without_tasks(*names: str) -> list[str]:
    """Overrides: hardly a prompt of these."""
    return [f"sim.tasks.{name}.weight=1e-9" for name in names]


def rollart_fleet(model: str, h800: int, h20: int) -> list[str]:
    """Overrides: so many GPUs of each class generate with this model ("8B", "14B", "32B")."""
    ranks = _PARALLEL[model]
    fleet = ", ".join(f"{name}={count // ranks}" for name, count in (("H800", h800), ("H20", h20)) if count)
    found = [f"sim.model=Qwen3-{model}", f"sim.tensor_parallel={ranks}", f"rollout.workers={(h800 + h20) // ranks}"]
    # 32B is trained on SWE-bench, too (RollArt 7.1): the task of rollart-swe.toml
    swe = [f"sim.tasks.swe-bench.{setting}" for setting in _SWE.split()] if model == "32B" else []
    return [*found, f"sim.fleet={{{fleet}}}", *swe]


def rollart(
    model: str, rung: str, scale: int = 1, *, steps: int = 5, seed: int = 0, extra: Sequence[str] = ()
) -> Config:
    """A rung of RollArt's ladder (7.1, 7.2): baselines on 128 H800, the last on 96 H800 and 32 H20."""
    if rung in ("sync", "sync_plus"):  # monolithic: all GPUs generate, then all train
        given = [*rollart_fleet(model, 128, 0), *ONE_CLASS, f"run.mode={rung}", "rollout.alpha=0"]
        given += ["sim.trainer_gpus=128", "rollout.environments=512"]
        if rung == "sync":  # the judge on four H800, 16 requests each (as in 3.1); no serverless offloading
            given.append("sim.reward_slots=64")
    elif rung == "affinity":
        given = [*rollart_fleet(model, 64, 32), "run.mode=async"]
    else:
        given = [*rollart_fleet(model, 96, 0), *ONE_CLASS, f"run.mode={rung}"]
    return load_scenario("rollart", [f"run.steps={steps}", f"run.seed={seed}", *given, *extra], scale)
