"""Simulated throughput with the policies of all papers together over the best single paper's set, on the same workload and GPUs.

The workload is RollArt's (``rollart.toml``: four tasks, 8B), the GPUs are its 128 at an n-th: sets whose rollout and training
take turns have all of them for both, the others split them. Each set is tuned over three settings of what its paper leaves open
(``TUNED``). Throughput is trained tokens a second after the first steps, which fill the pipeline. ROSE's set needs a serving
engine beside the rollouts, which the simulator does not play: it is left out. Not in the set of all either: tail batching, as
rounds make each batch wait for its own groups, which costs the asynchronous mode more than they save; and degrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.bench.simulated import frame, now, row
from orchestrator.sim.setups import measure, scenario

NAME = "all-together"
BAR = 1.15
SCALE = 16
_TAKING_TURNS = (  # monolithic: all generate, then all train
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "sim.fleet={H800=96, H20=32}",
    "rollout.workers=128",
    "sim.trainer_gpus=128",
)
_SPLIT = ("run.mode=async", "rollout.redundant_groups=1.5")


def _trainer(gpus: int) -> tuple[str, ...]:
    """So many of the 96 H800 train."""
    fleet = f"sim.fleet={{H800={96 - gpus}, H20=32}}"
    return fleet, f"rollout.workers={128 - gpus}", f"sim.trainer_gpus={gpus}"


_HEDDLE = (
    "rollout.prediction.enabled=true",
    "rollout.placement.enabled=true",
    "rollout.placement.prefill_seconds=0.0005",
    "rollout.kv_transfer.enabled=true",
)
_ANYWHERE = "rollout.routing.affinity={}"
SETS: dict[str, tuple[str, ...]] = {
    "RollArt": (*_SPLIT, "sim.reward_slots=0"),
    "RollPacker": (
        *_TAKING_TURNS,
        _ANYWHERE,
        "rollout.rounds.enabled=true",
        "rollout.environments=2048",
        "reward.timeout=adaptive",
        "trainer.stream=true",
    ),
    "Heddle": (*_TAKING_TURNS, _ANYWHERE, *_HEDDLE),
    "all": (*_SPLIT, *_HEDDLE, "sim.reward_slots=0", "reward.timeout=adaptive", "trainer.stream=true"),
}
"""What each paper's policies are; the others are off."""

TUNED: dict[str, dict[str, tuple[str, ...]]] = {  # three settings a set
    "RollArt": {f"{gpus} GPUs train": _trainer(gpus) for gpus in (48, 64, 80)},
    "RollPacker": {
        f"eta {eta}": (f"rollout.rounds.eta_prompts={eta}", f"rollout.rounds.eta_responses={eta}")
        for eta in (1.25, 1.5, 2.0)
    },
    "Heddle": {f"certainty {c}": (f"rollout.placement.certainty={c}",) for c in (0.1, 0.25, 0.5)},
    "all": {f"{gpus} GPUs train": _trainer(gpus) for gpus in (48, 64, 80)},
}


def simulated(scale: int, steps: int, seed: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Each set in each setting: throughput, seconds a step, what the ledger says. Raises SimulationFailed."""
    found: dict[str, dict[str, Any]] = {}
    for name, policies in SETS.items():
        settings: Mapping[str, tuple[str, ...]] = TUNED[name]
        for setting, given in itertools.islice(settings.items(), 1, None) if quick else settings.items():
            config = scenario("rollart", (f"run.steps={steps}", f"run.seed={seed}", *policies, *given), scale)
            try:
                one = measure(config)
            except ConfigError as error:
                raise ConfigError(NAME, f"{name}, {setting}", str(error)) from error
            found.setdefault(name, {})[setting] = {
                "tokens_per_s": one.throughput,
                "step_seconds": one.step_seconds,
                "train_seconds": one.train_seconds,
                "stale_a_step": one.staleness_aborts,
            }
    return found


def best(found: Mapping[str, Any]) -> float:
    """Throughput of a set in its best setting."""
    return max(float(one["tokens_per_s"]) for one in found.values())


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun, steps = now(), 4 if quick else 5
    seeds = (0,) if quick else (0, 1)
    tables = {str(seed): simulated(SCALE, steps, seed, quick) for seed in seeds}
    throughput = {name: sum(best(table[name]) for table in tables.values()) / len(tables) for name in SETS}
    single = max((name for name in SETS if name != "all"), key=lambda name: throughput[name])
    value = throughput["all"] / throughput[single]
    rows = [
        row(f"all policies over {name}'s set", "not printed", 0.0, 1e9, throughput["all"] / throughput[name], "ours")
        for name in SETS
        if name != "all"
    ]
    return frame(
        NAME,
        value,
        f"throughput of all policies together over the best single paper's set ({single}'s)",
        "none: the papers were built one by one",
        1.0,
        f"> {BAR}",
        value > BAR,
        {
            "scale": SCALE,
            "best_single": single,
            "tokens_per_s": throughput,
            "sets_by_seed": tables,
            "rows": rows,
            "not_played": {"ROSE's set": "the simulator has no serving engine beside the rollouts"},
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
