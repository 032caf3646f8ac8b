"""How many epochs a run's journal has trained."""

from __future__ import annotations

from orchestrator.sim.run_audit import EpochAccount


def epochs_done(found: EpochAccount, size: int) -> int:
    """Epochs of ``size`` prompts of which each prompt is trained or discarded."""
    done, count = {*found.trained, *found.discarded}, 0
    while all(number in done for number in range(count * size, (count + 1) * size)):
        count += 1
    return count
