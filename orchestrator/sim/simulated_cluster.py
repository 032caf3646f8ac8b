"""The simulated cluster of a config: what each rollout worker and the trainer cost. Pure functions of the config."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.proxy.router_setup import planned_router
from orchestrator.sim import hardware
from orchestrator.sim.cost_model import (
    EngineCosts,
    GrainedCosts,
    GrainedTraining,
    LinearCosts,
    LinearTraining,
    RooflineCosts,
    RooflineTraining,
    TrainerCosts,
    check_shares,
)


def check_cluster(config: Config) -> None:
    """Raises ConfigError for what the simulator cannot play."""
    if config.rollout.served:
        fix = "the simulator has no servers: leave it out, and set rollout.workers to the number of simulated workers"
        raise ConfigError("rollout.served", list(config.rollout.served), fix)
    if config.rollout.engines:
        fix = "simulated engines are all of one kind: leave it out; sim.fleet and sim.degrees set their classes and devices"
        raise ConfigError("rollout.engines", len(config.rollout.engines), fix)
    if (backend := config.environment.backend) in ("subprocess", "kubernetes"):
        fix = "the simulator starts no processes: use 'in-process', or 'in-process-pool' for a pool in virtual time"
        raise ConfigError("environment.backend", backend, fix)
    fleet(config)
    check_experts(config)


def check_disaggregation(config: Config) -> None:
    """Raises ConfigError where the two parts of a turn cannot be played."""
    if not config.rollout.disaggregation.enabled:
        return
    if config.sim.grain > 1:
        fix = "a turn's first token is generated separately: set it to 1, or leave out disaggregation"
        raise ConfigError("sim.grain", config.sim.grain, fix)
    classes = fleet(config)
    names, borrowed = [f"sim-{index}" for index in range(len(classes))], [False] * len(classes)
    planned_router(config.rollout.routing, names, classes, borrowed, config.rollout.disaggregation)


def fleet(config: Config) -> list[str]:
    """The class of each rollout worker, in order; "" without a fleet. Raises ConfigError for what they cannot play."""
    if not config.sim.fleet:
        return [""] * config.rollout.workers
    return [name for name, count in config.sim.fleet.items() for _ in range(count)]


def borrowed_class(config: Config) -> str:
    """The class of the borrowed workers; "" where no class was named at all: they are like the run's own, on ``sim.device``."""
    sim = config.sim
    return sim.borrowed.device or (sim.device if sim.fleet else "")


def degree_of(config: Config, worker: str) -> int:
    """Devices of a worker by its name, ``sim-INDEX``: of ``sim.degrees``, or, where prefill and decode are apart, what a real
    run's config says of ``vllm-INDEX``, each standing for ``sim.tensor_parallel``. Borrowed ones have so many."""
    degrees, index = config.sim.degrees, worker.rpartition("-")[2]
    if index.isdigit() and int(index) < len(degrees):
        return degrees[int(index)]
    return config.rollout.disaggregation.degrees.get(f"vllm-{index}", 1) * config.sim.tensor_parallel


def engine_costs(
    config: Config, hardware_class: str = "", ranks: int = 1, degree: int = 0, expert_ranks: int = 0
) -> EngineCosts:
    """Of one rollout worker on devices of a class; "": of ``sim.device``; ``degree`` of them, 0: ``sim.tensor_parallel``;
    ``ranks``: over so many times these (a linear one then holds so many times the KV); ``expert_ranks`` of them share out whole
    experts, 0: ``sim.expert_parallel``. Experts are evenly loaded (:class:`ExpertRouting`). Raises
    ConfigError for an unknown name, and for a model that does not fit."""
    sim = config.sim
    if sim.costs == "linear":
        costs: EngineCosts = LinearCosts(
            sim.decode_seconds_per_step,
            sim.decode_seconds_per_sequence,
            sim.prefill_seconds_per_token,
            sim.update_seconds,
            None if sim.kv_tokens is None else sim.kv_tokens * ranks,
        )
    else:
        field = "sim.fleet" if hardware_class else "sim.device"
        device = hardware.device(hardware_class or sim.device, field)
        model = hardware.model(sim.model)
        limit = None if sim.kv_tokens is None else sim.kv_tokens * ranks
        costs = RooflineCosts(
            device,
            model,
            (degree or sim.tensor_parallel) * ranks,
            sim.pull_gb_s,
            kv_limit=limit,
            kv_gb_s=sim.kv_gb_s,
            expert_parallel=expert_ranks or sim.expert_parallel,
            expert_tile=sim.expert_tile,
        )
    return costs if sim.grain == 1 else GrainedCosts(costs, sim.grain)


def trainer_costs(config: Config) -> TrainerCosts:
    """Of the trainer. Raises ConfigError for an unknown name."""
    sim = config.sim
    costs: TrainerCosts
    if sim.costs == "linear":
        costs = LinearTraining(sim.train_seconds_per_token, sim.publish_seconds)
    else:
        device = hardware.device(sim.trainer_device, "sim.trainer_device")
        serial = hardware.TRAIN_SERIAL_SECONDS if sim.trainer_serial_seconds is None else sim.trainer_serial_seconds
        costs = RooflineTraining(
            device, hardware.model(sim.model), sim.trainer_gpus, sim.trainer_forwards, sim.push_gb_s, serial
        )
    return costs if sim.grain == 1 else GrainedTraining(costs, sim.grain)


def kv_bytes(config: Config) -> float:
    """Of a token, such that a worker's KV memory holds the tokens that the cost model says; 0: it does not say."""
    tokens = min((engine_costs(config, name).kv_tokens or 0 for name in set(fleet(config))), default=0)
    return (config.rollout.engine.kv_cache_mb << 20) / tokens if tokens else 0.0


class ExpertRouting:
    """How unevenly a simulated mixture of experts routes its tokens, by weight version (RollPacker 7). Engines without experts,
    and those with a slice of every expert on each device, cost the same at any imbalance; the others never less at a higher one.

    A worker's: ``imbalance`` is that of the weights that it has now; before the first ones, that of version 0."""

    def __init__(self, config: Config) -> None:
        self._from = sorted(config.sim.expert_imbalance.items())
        self.imbalance = self.imbalance_at(0)

    def imbalance_at(self, version: int) -> float:
        """Of a weight version: the tokens of the fullest device's experts over the mean; before the first that is named, 1."""
        place = bisect_right(self._from, version, key=lambda named: named[0])
        return self._from[place - 1][1] if place else 1.0

    def load_version(self, version: int) -> bool:
        """Weights of this version were loaded; whether that changes the imbalance."""
        before, self.imbalance = self.imbalance, self.imbalance_at(version)
        return self.imbalance != before

    def costs(self, even: EngineCosts) -> EngineCosts:
        """Of an engine, at the imbalance of now."""
        return costs_at_imbalance(even, self.imbalance)


def costs_at_imbalance(costs: EngineCosts, imbalance: float) -> EngineCosts:
    """What an engine costs at an imbalance of its experts' load."""
    if isinstance(costs, GrainedCosts):
        return replace(costs, inner=costs_at_imbalance(costs.inner, imbalance))
    if isinstance(costs, RooflineCosts) and costs.expert_parallel > 1:
        return replace(costs, imbalance=imbalance)
    return costs


def check_experts(config: Config) -> None:
    """Raises ConfigError for what the simulator cannot play."""
    sim, planner = config.sim, config.rollout.planner
    most = max(sim.expert_imbalance.values(), default=1.0)
    asked: list[tuple[str, object]] = [("rollout.planner.experts", True)] if planner.experts else []
    asked += [("sim.expert_parallel", sim.expert_parallel)] if sim.expert_parallel > 1 else []
    asked += [("sim.expert_tile", sim.expert_tile)] if sim.expert_tile else []
    asked += [("sim.expert_imbalance", dict(sim.expert_imbalance))] if most > 1.0 else []
    if not asked:
        return
    mixtures = [model.name for model in hardware.MODELS.values() if model.experts]
    if sim.costs == "linear" or not hardware.model(sim.model).experts:
        has = "the linear cost model has no experts" if sim.costs == "linear" else f"{sim.model} has no experts"
        raise ConfigError(*asked[0], f"{has}: set sim.costs = 'roofline' and sim.model to one of {', '.join(mixtures)}")
    devices = sum(sim.degrees) or config.rollout.workers * sim.tensor_parallel
    if most > devices:
        fix = f"the fullest of {devices} devices has at most {devices} times the mean: give at most that"
        raise ConfigError("sim.expert_imbalance", most, fix)
    if sim.expert_parallel > 1 and (sim.degrees or config.rollout.reshapes):
        who = "sim.degrees" if sim.degrees else "rollout.planner" if planner.enabled else "rollout.placement.degrees"
        raise ConfigError(
            "sim.expert_parallel", sim.expert_parallel, f"{who} sets how engines are divided: leave this out"
        )
    check_shares(hardware.model(sim.model), sim.tensor_parallel, sim.expert_parallel)
    if planner.experts and sim.tensor_parallel > 1:
        fix = "with rollout.planner.experts a worker is one device: set it to 1, and rollout.workers to the devices"
        raise ConfigError("sim.tensor_parallel", sim.tensor_parallel, fix)
