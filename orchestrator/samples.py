"""From a trajectory to what the trainer is given of it: one function for the rollout's batches and for replayed ones."""

from __future__ import annotations

from orchestrator.api import RunError, TrainSample, Trajectory


def to_sample(trajectory: Trajectory, weight: float = 1.0) -> TrainSample:
    """A scored trajectory with its weight in the loss. Raises RunError for one without a reward."""
    if trajectory.reward is None:
        raise RunError(f"trajectory {trajectory.id} reached the trainer without a reward")
    return TrainSample(
        trajectory.id,
        trajectory.group_id,
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.logprobs,
        trajectory.versions,
        trajectory.reward,
        weight,
    )


def histogram(values: list[int]) -> dict[str, int]:
    """How often each value occurs, for the event log."""
    return {str(value): values.count(value) for value in sorted(set(values))}
