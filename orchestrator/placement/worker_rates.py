"""What each worker of a fleet does, for who places trajectories on it: workers by their place, those that came later included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.api import ConfigError, ResizableWorker
from orchestrator.config.sections import PlacementSection
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile
from orchestrator.policies.placement.worker_load import WorkerRates, rates_of
from orchestrator.proxy.worker_state import WorkerState

RatesOf = Callable[[int], WorkerRates]  # of a worker, by its place in the fleet


def line_rates(settings: PlacementSection, states: Sequence[WorkerState], slots: int) -> RatesOf:
    """Of the run's settings, where there is no profile: a line in the number of sequences beside each other."""
    made: dict[str, WorkerRates] = {}

    def rates(worker: int) -> WorkerRates:
        name = states[worker].worker.name
        if name not in made:
            alone = settings.token_seconds / settings.speeds.get(name, 1.0)
            steps = (alone, alone * (1.0 + settings.interference))
            made[name] = WorkerRates(steps, prefill=settings.prefill_seconds, slots=slots)
        return made[name]

    return rates


def profile_rates(profile: EngineProfile, states: Sequence[WorkerState], slots: int) -> RatesOf:
    """Of a profile, for each worker in the layout that it has now. Raises ConfigError for one that was not profiled."""
    made: dict[int, WorkerRates] = {}

    def rates(worker: int) -> WorkerRates:
        engine = states[worker].worker
        ranks = max(1, engine.ranks) if isinstance(engine, ResizableWorker) else 1
        if ranks not in made:
            made[ranks] = rates_alone(profile, engine.name, slots, ranks)
        return made[ranks]

    return rates


def rates_alone(profile: EngineProfile, name: str, slots: int, ranks: int = 1) -> WorkerRates:
    """Of one worker. Raises ConfigError."""
    try:
        return rates_of(profile, EngineLayout(ranks), slots)
    except KeyError as error:
        fix = f"{error.args[0]}: measure it with `rl-coserve profile`"
        raise ConfigError("rollout.placement.profile", f"TP {ranks} of {name}", fix) from error
