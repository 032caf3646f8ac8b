"""How unevenly a simulated mixture of experts routes its tokens, by weight version, and what engines then cost (RollPacker 7).

Guarantees: engines without experts, and those with a slice of every expert on each device, cost the same at any imbalance; the
others never less at a higher one. What the config says of experts is possible on its model and devices, or is one ConfigError.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.sim import hardware
from orchestrator.sim.cost_model import EngineCosts, GrainedCosts, RooflineCosts, check_shares


class ExpertRouting:
    """A worker's: ``imbalance`` is that of the weights that it has now; before the first ones, that of version 0."""

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
        fix = f"the fullest of {devices} devices has at most {devices} times the mean: give less"
        raise ConfigError("sim.expert_imbalance", most, fix)
    if sim.expert_parallel > 1 and (sim.degrees or config.rollout.reshapes):
        who = "sim.degrees" if sim.degrees else "rollout.planner" if planner.enabled else "rollout.placement.degrees"
        raise ConfigError("sim.expert_parallel", sim.expert_parallel, f"{who} says how engines are cut: leave this out")
    check_shares(hardware.model(sim.model), sim.tensor_parallel, sim.expert_parallel)
    if planner.experts and sim.tensor_parallel > 1:
        fix = "with rollout.planner.experts a worker is one device: set it to 1, and rollout.workers to the devices"
        raise ConfigError("sim.tensor_parallel", sim.tensor_parallel, fix)
