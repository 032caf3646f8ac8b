"""Advantages: from the rewards of finished trajectories to one number for each policy token. Pure, float64 inside.

Guarantees: never NaN for finite input; a group of one, and a group whose rewards are all equal, get 0 in the group
estimators (and are counted by :func:`group_counts`); the order of trajectories does not matter.

Multi-turn trajectories: a token of the environment (prompt, observation) is no action. All sequences here run over the
POLICY tokens of a trajectory only, in order (``_T``), as if the environment's tokens between two of them were part of the
transition. So the value of token t is the critic's output at the position whose logits predict token t (the state before
the action), the next value is that of the next policy token, in a later turn perhaps, discount and GAE's lambda apply once
for each policy token, and after the last policy token the value is 0: every trajectory handed to the trainer has ended.
Tokens that are masked (made by too old weights) stay in the sequence, since reward and value flow through them; they only
do not count in mean and variance of a whitening, nor in the loss.

Sources: GRPO (DeepSeekMath 4.1; without the standard deviation: Dr. GRPO 3.2), dynamic sampling (DAPO 3.2), RLOO
(Ahmadian et al. 2024, 3.2), REINFORCE++ (Hu et al. 2025, 3: returns from token rewards, normalised over the global batch),
GAE (Schulman et al. 2016, eq. 16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_rlplugin.objective.user_advantage import own_advantages
from orchestrator.api import RunError
from orchestrator.policies.training.objective_table import OBJECTIVES, whitens_advantages
from orchestrator.settings.trainer_settings import TrainerSettings

Floats = NDArray[np.floating]

STD_EPSILON = 1e-6  # added to a group's standard deviation, as in GRPO's public implementations
VARIANCE_EPSILON = 1e-8  # added to the variance of a whitening, as in PPO's public implementations


@dataclass(frozen=True, slots=True)
class TrajectoryOutcome:
    """A finished trajectory with T policy tokens.

    ``kept_T``: bool, False for tokens that the loss leaves out (:func:`megatron_rlplugin.objective.policy_loss.kept_tokens`).
    ``kl_T``: log pi_old - log pi_ref of each policy token, with ``kl_in_reward``. ``values_T``: the critic's, for ppo.
    """

    group_id: str
    reward: float
    kept_T: NDArray[np.bool_]
    kl_T: Floats | None = None
    values_T: Floats | None = None
    member: str = ""  # of the group; several contexts of one trajectory are one member


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """float32[T] for each trajectory: advantages, and for ppo the returns that the critic is fitted to."""

    advantages: list[NDArray[np.float32]]
    returns: list[NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """``lone``: groups of one. ``silent``: groups whose rewards are all equal, groups of one included."""

    groups: int
    lone: int
    silent: int


def says_nothing(rewards: Sequence[float]) -> bool:
    """DAPO's dynamic sampling leaves out a group whose rewards are all equal: every advantage in it is 0."""
    return not rewards or max(rewards) == min(rewards)


def group_counts(rewards: Sequence[float], group_ids: Sequence[str], names: Sequence[str] = ()) -> GroupCounts:
    """How many groups there are, and how many of them say nothing. ``names``: see :func:`group_advantages`."""
    members = _groups(rewards, group_ids, names).values()
    lone = sum(len(values) == 1 for values in members)
    return GroupCounts(len(members), lone, sum(says_nothing(values) for values in members))


def group_advantages(
    rewards: Sequence[float], group_ids: Sequence[str], names: Sequence[str] = (), *, normalize: bool
) -> list[float]:
    """GRPO: reward minus the mean of its group; ``normalize``: over the group's sample standard deviation.

    A group with one member, or whose members have all the same reward, says nothing: 0. ``names``: whose the rewards are;
    a member that is there several times (one time for each context of a long episode) counts once.
    """
    mean: dict[str, float] = {}
    scale: dict[str, float] = {}
    for group, values in _groups(rewards, group_ids, names).items():
        mean[group] = math.fsum(values) / len(values)
        scale[group] = 0.0
        if not says_nothing(values):
            squares = math.fsum((value - mean[group]) ** 2 for value in values)
            scale[group] = 1.0 / (math.sqrt(squares / (len(values) - 1)) + STD_EPSILON) if normalize else 1.0
    return [(reward - mean[group]) * scale[group] for reward, group in zip(rewards, group_ids, strict=True)]


def leave_one_out(rewards: Sequence[float], group_ids: Sequence[str], names: Sequence[str] = ()) -> list[float]:
    """RLOO: reward minus the mean of the OTHER members of its group; 0 for a group that says nothing. ``names``: see
    :func:`group_advantages`."""
    groups = _groups(rewards, group_ids, names)
    totals = {group: math.fsum(values) for group, values in groups.items()}
    silent = {group for group, values in groups.items() if says_nothing(values)}
    answer = []
    for reward, group in zip(rewards, group_ids, strict=True):
        others = max(len(groups[group]) - 1, 1)
        answer.append(0.0 if group in silent else reward - (totals[group] - reward) / others)
    return answer


def token_rewards(reward: float, tokens: int, kl_T: Floats | None, coefficient: float) -> Floats:
    """The trajectory's reward on its last policy token, minus ``coefficient * kl`` on each (REINFORCE++ eq. 3)."""
    rewards_T = np.zeros(tokens) if kl_T is None else -coefficient * kl_T.astype(np.float64)
    if tokens:
        rewards_T[-1] += reward
    return rewards_T


def discounted_returns(rewards_T: Floats, gamma: float) -> Floats:
    """R_t = r_t + gamma R_{t+1}, 0 after the last token."""
    return _backwards(rewards_T, gamma)


def generalized_advantages(rewards_T: Floats, values_T: Floats, gamma: float, gae_lambda: float) -> Floats:
    """A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; V and A are 0 after the last token."""
    values = values_T.astype(np.float64)
    return _backwards(rewards_T + gamma * np.append(values[1:], 0.0)[: len(values)] - values, gamma * gae_lambda)


def whiten_advantages(arrays: Sequence[Floats], kept: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """(values - mean) / sqrt(sample variance + 1e-8), mean and variance over the kept values of all arrays together.

    Fewer than two kept values have no variance: 0.
    """
    counted = [values_T[kept_T] for values_T, kept_T in zip(arrays, kept, strict=True)]
    everything = np.concatenate(counted) if counted else np.zeros(0)
    if everything.size < 2:
        return [np.zeros(len(values_T)) for values_T in arrays]
    mean, scale = float(everything.mean()), 1.0 / math.sqrt(float(everything.var(ddof=1)) + VARIANCE_EPSILON)
    return [(values_T - mean) * scale for values_T in arrays]


def advantages_of(outcomes: Sequence[TrajectoryOutcome], settings: TrainerSettings) -> AdvantageEstimate:
    """The advantages of ``settings.objective``.

    grpo, dapo, gspo, rloo: one number a trajectory, from its group, which must be complete; other groups do not matter. With
    ``settings.advantage`` that function's.
    ppo, reinforce++: one number a token; where ``whitens(settings)``, from the whole batch, else from the trajectory
    alone. distillation: 0. Raises RunError when a trajectory lacks the KL or the values that the objective needs.
    """
    kind = OBJECTIVES[settings.objective].advantage
    if kind in ("group", "leave-one-out"):
        rewards, groups = [outcome.reward for outcome in outcomes], [outcome.group_id for outcome in outcomes]
        names = [outcome.member for outcome in outcomes]
        if settings.advantage:
            tokens = [int(outcome.kept_T.sum()) for outcome in outcomes]
            scalars = own_advantages(settings.advantage, rewards, tokens, groups, names)
        elif kind == "leave-one-out":
            scalars = leave_one_out(rewards, groups, names)
        else:
            scalars = group_advantages(rewards, groups, names, normalize=settings.normalize_advantage)
        pairs = zip(outcomes, scalars, strict=True)
        return AdvantageEstimate([np.full(len(outcome.kept_T), scalar, dtype=np.float32) for outcome, scalar in pairs])
    if kind == "reference":  # the loss has them: they are those of the reference's log-probs
        return AdvantageEstimate([np.zeros(len(outcome.kept_T), dtype=np.float32) for outcome in outcomes])
    raw: list[Floats] = []
    returns: list[NDArray[np.float32]] = []
    for outcome in outcomes:
        rewards_T = _rewards(outcome, settings)
        if kind == "returns":
            raw.append(discounted_returns(rewards_T, settings.gamma))
            continue
        values_T = _required(outcome.values_T, outcome, "values")
        raw.append(generalized_advantages(rewards_T, values_T, settings.gamma, settings.gae_lambda))
        returns.append((raw[-1] + values_T).astype(np.float32))
    if whitens_advantages(settings.objective, normalize=settings.normalize_advantage):
        raw = whiten_advantages(raw, [outcome.kept_T for outcome in outcomes])
    return AdvantageEstimate([values_T.astype(np.float32) for values_T in raw], returns if kind == "gae" else None)


def _rewards(outcome: TrajectoryOutcome, settings: TrainerSettings) -> Floats:
    kl_T = _required(outcome.kl_T, outcome, "kl") if settings.kl_in_reward else None
    return token_rewards(outcome.reward, len(outcome.kept_T), kl_T, settings.kl_coefficient)


def _required(array: Floats | None, outcome: TrajectoryOutcome, what: str) -> Floats:
    if array is None or array.shape != outcome.kept_T.shape:
        found = "none" if array is None else str(len(array))
        need = f"{len(outcome.kept_T)} {what}, one a policy token, but has {found}"
        raise RunError(f"a trajectory of group {outcome.group_id} needs {need}")
    return array


def _backwards(steps_T: Floats, factor: float) -> Floats:
    """x_t = steps_t + factor x_{t+1}."""
    answer_T, running = np.empty(len(steps_T)), 0.0
    for index in range(len(steps_T) - 1, -1, -1):
        running = float(steps_T[index]) + factor * running
        answer_T[index] = running
    return answer_T


def _groups(rewards: Sequence[float], group_ids: Sequence[str], names: Sequence[str] = ()) -> dict[str, list[float]]:
    members: dict[str, list[float]] = {}
    seen: dict[tuple[str, str], None] = {}
    for reward, group, name in zip(rewards, group_ids, names or [""] * len(rewards), strict=True):
        if name and (group, name) in seen:
            continue
        seen[group, name] = None
        members.setdefault(group, []).append(reward)
    return members
