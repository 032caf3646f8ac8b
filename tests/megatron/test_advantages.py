"""Advantages against formulas written apart from them (loops, explicit sums), and which tokens count and how much."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron_rlplugin.objective.advantages import (
    TrajectoryOutcome,
    advantages_of,
    group_advantages,
    group_counts,
    leave_one_out,
    says_nothing,
)
from megatron_rlplugin.objective.policy_loss import kept_tokens, token_weights
from megatron_rlplugin.objective.user_advantage import check_advantage
from orchestrator.api import ConfigError, RunError
from orchestrator.envs import MAX_REWARD
from orchestrator.settings.trainer_settings import TrainerSettings

REWARDS = strategies.lists(strategies.floats(-1e6, 1e6), min_size=1, max_size=12)


def outcome(
    reward: float, tokens: int, seed: int = 0, *, group: str = "g", masked: tuple[int, ...] = (), extras: bool = True
) -> TrajectoryOutcome:
    rng = np.random.default_rng(seed)
    kept = np.ones(tokens, dtype=bool)
    kept[list(masked)] = False
    return (
        TrajectoryOutcome(group, reward, kept, rng.normal(size=tokens), rng.normal(size=tokens))
        if extras
        else TrajectoryOutcome(group, reward, kept)
    )


# -- groups ------------------------------------------------------------------------------------------------------------


def test_advantages_are_relative_to_the_group_in_any_order() -> None:
    rewards, groups = [1.0, 0.0, 5.0, 0.0, 1.0, 7.0], ["a", "a", "b", "a", "b", "c"]
    plain = group_advantages(rewards, groups, normalize=False)
    assert plain == pytest.approx([2 / 3, -1 / 3, 2.0, -1 / 3, -2.0, 0.0])
    normalized = group_advantages(rewards, groups, normalize=True)
    spread = np.std([1.0, 0.0, 0.0], ddof=1)
    assert normalized[:2] == pytest.approx([2 / 3 / spread, -1 / 3 / spread], rel=1e-5)
    order = list(range(6))
    random.Random(1).shuffle(order)
    shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order], normalize=True)
    assert shuffled == pytest.approx([normalized[i] for i in order])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards, groups = [1.0, 0.5, 5.0, 0.0, 1.0, 7.0], ["a", "a", "b", "a", "b", "c"]
    expected = [1 - (0.5 + 0) / 2, 0.5 - (1 + 0) / 2, 5 - 1, 0 - (1 + 0.5) / 2, 1 - 5, 0]
    assert leave_one_out(rewards, groups) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 3, [0.7] * 7])
def test_a_group_that_says_nothing_has_no_advantage(rewards: list[float]) -> None:
    """Exactly 0: the mean of seven times 0.7 is not 0.7."""
    groups, nothing = ["g"] * len(rewards), [0.0] * len(rewards)
    assert group_advantages(rewards, groups, normalize=False) == nothing
    assert group_advantages(rewards, groups, normalize=True) == nothing
    assert leave_one_out(rewards, groups) == nothing
    assert says_nothing(rewards)


@settings(max_examples=60)
@given(REWARDS, strategies.sampled_from(["grpo", "dapo", "gspo", "rloo", "reinforce++", "ppo"]), strategies.booleans())
def test_no_finite_reward_gives_a_nan(rewards: list[float], objective: str, normalize: bool) -> None:
    given = {} if objective in ("rloo", "reinforce++") else {"normalize_advantage": normalize}  # they do not read it
    trainer = TrainerSettings.from_dict({"objective": objective, **given})
    outcomes = [outcome(reward, 1 + i % 3, i, group=str(i % 4)) for i, reward in enumerate(rewards)]
    for array in advantages_of(outcomes, trainer).advantages:
        assert np.isfinite(array).all()


def test_groups_that_say_nothing_are_counted() -> None:
    counts = group_counts([1.0, 0.0, 2.0, 2.0, 3.0], ["a", "a", "b", "b", "c"])
    assert (counts.groups, counts.lone, counts.silent) == (3, 1, 2)
    assert not says_nothing([0.0, 1.0])


@pytest.mark.parametrize("objective", ["grpo", "dapo", "gspo", "rloo"])
def test_a_group_alone_gets_the_advantages_it_gets_in_the_batch(objective: str) -> None:
    """What streaming rests on."""
    trainer = TrainerSettings(objective=objective)
    outcomes = [outcome(reward, 3, group=group) for reward, group in zip([1, 0, 5, 2], "aabb", strict=True)]
    whole = advantages_of(outcomes, trainer).advantages
    parts = advantages_of(outcomes[:2], trainer).advantages + advantages_of(outcomes[2:], trainer).advantages
    np.testing.assert_array_equal(whole, parts)
    assert len(set(whole[0])) == 1  # one number a trajectory
    assert whole[0][0] != 0


# -- tokens ------------------------------------------------------------------------------------------------------------


def brute_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}: the definition, not the recursion."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_gae_is_the_discounted_sum_of_temporal_differences() -> None:
    trainer = TrainerSettings(objective="ppo", gamma=0.9, gae_lambda=0.8, normalize_advantage=False)
    outcomes = [outcome(2.0, 5, 1), outcome(-1.0, 1, 2)]
    estimate = advantages_of(outcomes, trainer)
    assert estimate.returns is not None
    for index, one in enumerate(outcomes):
        assert one.values_T is not None
        rewards = np.zeros(len(one.kept_T))
        rewards[-1] = one.reward
        expected = brute_gae(rewards, one.values_T, 0.9, 0.8)
        np.testing.assert_allclose(estimate.advantages[index], expected, rtol=1e-6)
        np.testing.assert_allclose(estimate.returns[index], expected + one.values_T, rtol=1e-5)


def test_with_lambda_one_the_critic_is_fitted_to_the_return() -> None:
    trainer = TrainerSettings(objective="ppo", gae_lambda=1.0)
    estimate = advantages_of([outcome(2.0, 5, 1), outcome(-1.0, 4, 2)], trainer)
    assert estimate.returns is not None
    np.testing.assert_allclose(np.concatenate(estimate.returns), [2.0] * 5 + [-1.0] * 4, atol=1e-6)


def test_the_kl_in_the_reward_is_taken_from_every_token() -> None:
    trainer = TrainerSettings(
        objective="ppo", gamma=0.9, gae_lambda=0.5, normalize_advantage=False,
        kl_coefficient=0.3, kl_in_reward=True, kl_estimator="k1",
    )  # fmt: skip
    one = outcome(2.0, 4, 3)
    assert one.kl_T is not None
    assert one.values_T is not None
    rewards = -0.3 * one.kl_T
    rewards[-1] += 2.0
    (found,) = advantages_of([one], trainer).advantages
    np.testing.assert_allclose(found, brute_gae(rewards, one.values_T, 0.9, 0.5), rtol=1e-5)


def test_reinforce_plus_plus_normalises_returns_over_the_tokens_of_the_batch() -> None:
    trainer = TrainerSettings(
        objective="reinforce++", gamma=0.9, kl_coefficient=0.3, kl_in_reward=True, kl_estimator="k1"
    )
    outcomes = [outcome(2.0, 5, 1), outcome(-1.0, 3, 2)]
    returns = []
    for one in outcomes:
        assert one.kl_T is not None
        rewards = -0.3 * one.kl_T
        rewards[-1] += one.reward
        returns += [sum(0.9**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    expected = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
    np.testing.assert_allclose(np.concatenate(advantages_of(outcomes, trainer).advantages), expected, rtol=1e-5)


def test_a_masked_token_passes_the_reward_on_but_does_not_count_in_the_normalisation() -> None:
    trainer = TrainerSettings(objective="reinforce++", gamma=0.5)
    whole = [outcome(1.0, 3, masked=(0,), extras=False), outcome(-1.0, 2, masked=(1,), extras=False)]
    found = advantages_of(whole, trainer).advantages
    counted = np.array([0.5, 1.0, -0.5])  # returns 1/4, 1/2, 1 and -1/2, -1, of which the first and the last are masked
    scale = np.std(counted, ddof=1)
    np.testing.assert_allclose(found[0][1:], (counted[:2] - counted.mean()) / scale, rtol=1e-6)
    np.testing.assert_allclose(found[1][:1], (counted[2:] - counted.mean()) / scale, rtol=1e-6)


def test_a_batch_of_one_token_has_no_variance_and_no_advantage() -> None:
    assert advantages_of([outcome(3.0, 1)], TrainerSettings(objective="reinforce++")).advantages[0].tolist() == [0.0]
    assert advantages_of([], TrainerSettings(objective="ppo")).advantages == []


def test_a_trajectory_without_the_values_it_needs_is_refused() -> None:
    with pytest.raises(RunError, match="needs 3 values, one a policy token, but has none"):
        advantages_of([outcome(1.0, 3, extras=False)], TrainerSettings(objective="ppo"))
    trainer = TrainerSettings(objective="reinforce++", kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
    with pytest.raises(RunError, match="needs 3 kl"):
        advantages_of([outcome(1.0, 3, extras=False)], trainer)


# -- what counts -------------------------------------------------------------------------------------------------------


def test_tokens_of_older_weights_are_masked_by_their_lag() -> None:
    spans = ((3, 2), (5, 1), (6, 2))
    assert kept_tokens(spans, 6, 1).tolist() == [False, False, True, True, True]
    assert kept_tokens(spans, 6, 0).tolist() == [False, False, False, True, True]
    assert kept_tokens(spans, 6, None).all()
    assert kept_tokens((), 6, 0).shape == (0,)


@pytest.mark.parametrize(
    ("loss", "weight", "denominator"), [("token-mean", 1.0, 4), ("sequence-mean", 0.25, 1), ("sequence-sum", 1.0, 1)]
)
def test_weights_and_denominators_of_each_mean(loss: str, weight: float, denominator: int) -> None:
    weights, added = token_weights(4, loss)
    assert (weights.tolist(), added) == ([weight] * 4, denominator)
    nothing, added = token_weights(0, loss)
    assert (len(nothing), added) == (0, 0)
    with pytest.raises(ValueError, match="median"):
        token_weights(4, "median")


def centred(rewards: list[float], tokens: list[int]) -> list[float]:
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def per_token(rewards: list[float], tokens: list[int]) -> list[float]:
    return [reward / count for reward, count in zip(rewards, tokens, strict=True)]


def too_few(rewards: list[float], tokens: list[int]) -> list[float]:
    return rewards[1:]


def divides(rewards: list[float], tokens: list[int]) -> list[float]:
    return [reward / (max(rewards) - min(rewards)) for reward in rewards]


def goes_wrong_later(rewards: list[float], tokens: list[int]) -> list[float]:
    return [float("nan") if reward > 1 else reward for reward in rewards]


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_a_function_of_the_users_gives_the_advantages_of_each_group(objective: str) -> None:
    outcomes = [outcome(value, 2, group=group) for value, group in ((1.0, "a"), (5.0, "b"), (3.0, "a"), (5.0, "b"))]
    chosen = TrainerSettings.from_dict({"objective": objective, "advantage": f"{__name__}:centred"})
    assert [value[0] for value in advantages_of(outcomes, chosen).advantages] == [-1.0, 0.0, 1.0, 0.0]


def test_contexts_of_a_trajectory_are_one_member_with_the_tokens_of_all() -> None:
    parts = [outcome(6.0, tokens=2), outcome(6.0, tokens=1), outcome(4.0, tokens=4)]
    outcomes = [replace(part, member=name) for part, name in zip(parts, ("one", "one", "two"), strict=True)]
    chosen = TrainerSettings.from_dict({"advantage": f"{__name__}:per_token"})
    found = advantages_of(outcomes, chosen).advantages
    assert [value.tolist() for value in found] == [[2.0, 2.0], [2.0], [1.0] * 4]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("too_few", "returned 2 numbers for a group of 3"),
        ("divides", "ZeroDivisionError|division by zero"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_advantages_that_break_the_contract_are_one_error_before_anything_starts(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.advantage.*({why})"):
        check_advantage(TrainerSettings.from_dict({"advantage": f"{__name__}:{name}"}))


def test_advantages_that_go_wrong_later_name_their_function() -> None:
    chosen = TrainerSettings.from_dict({"advantage": f"{__name__}:goes_wrong_later"})
    check_advantage(chosen)
    with pytest.raises(RunError, match=r"trainer\.advantage = '.*goes_wrong_later': .*not finite"):
        advantages_of([outcome(2.0, 1), outcome(0.0, 1)], chosen)


@pytest.mark.parametrize(
    ("given", "field"),
    [({"objective": "ppo"}, "trainer.advantage"), ({"normalize_advantage": False}, "trainer.normalize_advantage")],
)
def test_a_setting_that_the_users_advantages_leave_nothing_to_do_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerSettings.from_dict({**given, "advantage": f"{__name__}:centred"})
    assert refused.value.field == field


@pytest.mark.parametrize(
    "rewards", [(MAX_REWARD, -MAX_REWARD), (MAX_REWARD, 0.0, 0.0, 0.0), (MAX_REWARD,) * 1024 + (1.0,)]
)
def test_the_largest_rewards_that_a_run_takes_have_finite_advantages(rewards: tuple[float, ...]) -> None:
    groups = ["g"] * len(rewards)
    for found in (
        group_advantages(rewards, groups, normalize=False),
        group_advantages(rewards, groups, normalize=True),
        leave_one_out(rewards, groups),
    ):
        assert np.isfinite(np.square(np.asarray(found, np.float32)).sum())
