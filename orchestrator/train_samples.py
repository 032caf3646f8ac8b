"""From trajectories to what the trainer is given of them, for the rollout's batches and for replayed ones; and what is said of a
batch."""

from __future__ import annotations

from orchestrator.api import RunError, TrainSample, Trajectory
from orchestrator.policies.training.sample_weights import OverlongPenalty
from orchestrator.shards.sample_references import referenced_samples

NO_LIMIT = OverlongPenalty()


def to_samples(trajectory: Trajectory, weight: float = 1.0, overlong: OverlongPenalty = NO_LIMIT) -> list[TrainSample]:
    """A scored trajectory with its weight in the loss: one sample for each context (one, unless it began anew), all with its
    reward, less what ``overlong`` takes off it. Of the tokens of a context, those are trained that the policy made in it. Those
    of a finished trajectory are references. Raises RunError without a reward."""
    if trajectory.reward is None:
        raise RunError(f"trajectory {trajectory.id} reached the trainer without a reward")
    reward = (
        trajectory.reward + overlong.penalty_for(trajectory.generated_tokens) if overlong.limit else trajectory.reward
    )
    if (referenced := referenced_samples(trajectory, reward, weight)) is not None:
        return referenced
    return [
        TrainSample(
            trajectory.id,
            trajectory.group_id,
            part.token_ids,
            part.loss_mask,
            part.logprobs,
            part.versions,
            reward,
            first,
            weight,
            experts=tuple(turn.experts for turn in part.turns if turn.experts is not None),
        )
        for first, part in trajectory.contexts
    ]


def histogram(values: list[int]) -> dict[str, int]:
    """How often each value occurs, for the event log."""
    return {str(value): values.count(value) for value in sorted(set(values))}
