"""The GRPO objective against a reference written apart from it: float64 numpy, loops over tokens, finite differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from megatron_rlplugin.objective import (  # noqa: E402
    Coefficients,
    Tokens,
    Totals,
    clipped_surrogate,
    group_advantages,
    logprobs_and_entropy,
    policy_loss,
    truncated_weights,
)

T, V = 24, 7
LENGTHS = (5, 1, 8, 10)  # policy tokens of four trajectories, together T


def reference(
    logits: np.ndarray, case: dict[str, np.ndarray], coefficients: Coefficients, temperature: float, sequence_mean: bool
) -> float:
    """The loss, token by token."""
    total, index = 0.0, 0
    for length in LENGTHS:
        of_trajectory = 0.0
        for _ in range(length):
            z = logits[index] / temperature
            logp = z - (z.max() + math.log(np.exp(z - z.max()).sum()))
            now, old, rollout = logp[case["targets"][index]], case["old"][index], case["rollout"][index]
            ratio = math.exp(now - old)
            clipped = min(max(ratio, 1 - coefficients.clip_low), 1 + coefficients.clip_high)
            advantage = case["advantages"][index]
            weight = min(math.exp(old - rollout), coefficients.tis_cap)
            entropy = -sum(math.exp(value) * value for value in logp)
            loss = -min(ratio * advantage, clipped * advantage) * weight - coefficients.entropy_coefficient * entropy
            of_trajectory += loss / length if sequence_mean else loss
            index += 1
        total += of_trajectory
    return total


def make_case(seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(T, V))
    targets = rng.integers(0, V, T)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    old = logp[np.arange(T), targets] + rng.normal(scale=0.4, size=T)  # ratios on both sides of both clips
    rollout = old + rng.normal(scale=0.8, size=T)  # weights on both sides of the cap
    advantages = np.repeat(rng.normal(size=len(LENGTHS)), LENGTHS)
    return logits, {"targets": targets, "old": old, "rollout": rollout, "advantages": advantages}


def tokens_of(
    case: dict[str, np.ndarray], sequence_mean: bool, dtype: torch.dtype, part: slice = slice(None)
) -> Tokens:
    weights = np.repeat([1 / n if sequence_mean else 1.0 for n in LENGTHS], LENGTHS)
    return Tokens(
        targets_T=torch.from_numpy(case["targets"][part]),
        rollout_T=torch.from_numpy(case["rollout"][part]).to(dtype),
        advantages_T=torch.from_numpy(case["advantages"][part]).to(dtype),
        weights_T=torch.from_numpy(weights[part]).to(dtype),
        fresh_T=torch.ones(len(case["targets"][part]), dtype=torch.bool),
        old_T=torch.from_numpy(case["old"][part]).to(dtype),
        denominator=len(LENGTHS) if sequence_mean else T,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sequence_mean", [False, True])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.03])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_reference(
    seed: int, entropy_coefficient: float, sequence_mean: bool, temperature: float
) -> None:
    logits, case = make_case(seed)
    coefficients = Coefficients(0.2, 0.28, 1.5, entropy_coefficient)
    leaf = torch.from_numpy(logits).float().requires_grad_()
    loss, totals = policy_loss(leaf, tokens_of(case, sequence_mean, torch.float32), coefficients, temperature)
    loss.backward()

    def value(at: np.ndarray) -> float:
        return reference(at, case, coefficients, temperature, sequence_mean)

    assert float(loss.detach()) == pytest.approx(value(logits), rel=1e-5)
    assert totals.metrics()["loss"] == pytest.approx(value(logits) / (len(LENGTHS) if sequence_mean else T), rel=1e-5)
    gradient = finite_differences(value, logits)
    assert np.abs(leaf.grad.numpy() - gradient).max() <= 2e-6 * np.abs(gradient).max() + 1e-6


def finite_differences(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def test_the_cases_reach_every_branch() -> None:
    """Else the comparison above would prove less than it seems to."""
    logits, case = make_case(0)
    _, totals = policy_loss(
        torch.from_numpy(logits), tokens_of(case, False, torch.float64), Coefficients(0.2, 0.28, 1.5, 0.0)
    )
    metrics = totals.metrics()
    assert 0 < metrics["clip_fraction"] < 1
    assert 0 < metrics["tis_capped"] < 1
    assert metrics["tis_max"] == 1.5


def test_diagnostics_are_those_of_the_definitions() -> None:
    logits, case = make_case(3)
    tokens = tokens_of(case, False, torch.float64)
    fresh = torch.tensor([index % 3 == 0 for index in range(T)])
    tokens = Tokens(**{name: getattr(tokens, name) for name in Tokens.__slots__} | {"fresh_T": fresh})
    _, totals = policy_loss(torch.from_numpy(logits), tokens, Coefficients(0.2, 0.2, 2.0, 0.0))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    now, old, rollout = logp[np.arange(T), case["targets"]], case["old"], case["rollout"]
    weights, gap = np.minimum(np.exp(old - rollout), 2.0), np.abs(old - rollout)
    expected = {
        "entropy": -(np.exp(logp) * logp).sum(-1).mean(),
        "approx_kl": (np.exp(now - old) - 1 - (now - old)).mean(),
        "rollout_kl": (np.exp(old - rollout) - 1 - (old - rollout)).mean(),
        "tis_mean": weights.mean(),
        "ess": weights.sum() ** 2 / (T * (weights**2).sum()),
        "logprob_gap_mean": gap[::3].mean(),
        "logprob_gap_max": gap[::3].max(),
        "logprob_gap_tokens": len(gap[::3]),
        "logprob_gap_all": gap.mean(),
    }
    metrics = totals.metrics()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_micro_batches_add_up_to_the_whole() -> None:
    logits, case = make_case(4)
    coefficients = Coefficients(0.2, 0.28, 1.5, 0.01)
    whole_loss, whole = policy_loss(torch.from_numpy(logits), tokens_of(case, True, torch.float64), coefficients)
    parts, added = 0.0, Totals()
    for part in (slice(0, 6), slice(6, 14), slice(14, T)):
        loss, totals = policy_loss(
            torch.from_numpy(logits[part]), tokens_of(case, True, torch.float64, part), coefficients
        )
        totals.denominator = len(LENGTHS) / 3
        parts += float(loss)
        added.add(totals)
    assert parts == pytest.approx(float(whole_loss), rel=1e-6)
    assert added.metrics() == pytest.approx(whole.metrics(), rel=1e-6)


def test_without_old_log_probs_the_ratio_is_exactly_one() -> None:
    logits, case = make_case(5)
    leaf = torch.from_numpy(logits).float().requires_grad_()
    tokens = tokens_of(case, False, torch.float32)
    tokens = Tokens(**{name: getattr(tokens, name) for name in Tokens.__slots__} | {"old_T": None})
    loss, totals = policy_loss(leaf, tokens, Coefficients(0.2, 0.2, 2.0, 0.0))
    assert totals.clipped == 0
    assert totals.kl == 0
    logp, _ = logprobs_and_entropy(leaf, tokens.targets_T, 1.0, entropy_gradient=False)
    plain = -(logp * tokens.advantages_T * truncated_weights(logp, tokens.rollout_T, 2.0)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(plain, leaf)
    torch.testing.assert_close(gradient, expected)


def test_the_importance_weight_is_a_constant_to_the_gradient() -> None:
    old = torch.tensor([0.5], requires_grad=True)
    assert not truncated_weights(old, torch.zeros(1), 2.0).requires_grad


def test_the_clip_binds_only_where_it_lowers_the_objective() -> None:
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = clipped_surrogate(ratios, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.3)
    assert clipped.tolist() == [False, True, True, False]
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.3, 2.0])


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


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 3, [0.7] * 7])
def test_a_group_that_says_nothing_has_no_advantage(rewards: list[float], normalize: bool) -> None:
    assert group_advantages(rewards, ["g"] * len(rewards), normalize=normalize) == [0.0] * len(rewards)
