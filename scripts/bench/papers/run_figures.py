"""What a simulated run of a paper's setup is measured by."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config import Config
from orchestrator.sim.paper_setups import counted_steps
from orchestrator.sim.run_audit import EpochAccount
from orchestrator.sim.simulated_run import SimResult, simulate


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Of a run's steps that count: seconds a step; tokens a step (prompts, observations, responses) and
    tokens a second of the engine's; shares of the period in which the trainer worked and the slowest reward was waited for."""

    step_seconds: float
    tokens: float
    throughput: float
    train_seconds: float
    staleness_aborts: float  # a step
    result: SimResult

    def kept(self) -> dict[str, float]:
        """What of it goes into a file."""
        return {
            "step_seconds": self.step_seconds,
            "train_seconds": self.train_seconds,
            "tokens_per_step": self.tokens,
            "tokens_per_s": self.throughput,
            "evicted_stale_per_step": self.staleness_aborts,
        }


def measure(config: Config) -> RunFigures:
    """Simulate and measure. Raises SimulationFailed."""
    result = simulate(config)
    counted, seconds = counted_steps(result)
    tokens = sum(event["metrics"]["tokens"] for event in counted) / len(counted) * config.sim.grain
    train = sum(event["seconds"] for event in counted) / len(counted)
    evicted = result.ledger["evicted_stale"] / result.summary["steps"]
    return RunFigures(seconds, tokens, tokens / seconds, train, evicted, result)


def epochs_done(found: EpochAccount, size: int) -> int:
    """Epochs of ``size`` prompts of which each prompt is trained or discarded."""
    done, count = {*found.trained, *found.discarded}, 0
    while all(number in done for number in range(count * size, (count + 1) * size)):
        count += 1
    return count
