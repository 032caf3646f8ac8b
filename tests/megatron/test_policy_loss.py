"""The objectives against a reference written apart from them: float64 numpy, loops over tokens, finite differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies

torch = pytest.importorskip("torch")

from megatron_rlplugin.objective.policy_loss import (  # noqa: E402
    Coefficients,
    Tokens,
    Totals,
    clipped_surrogate,
    kl_estimate,
    policy_loss,
    token_weights,
    truncated_weights,
)
from megatron_rlplugin.objective.vocab_logprobs import logprobs_and_entropy  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSettings  # noqa: E402

V = 7
LENGTHS = (5, 1, 8, 10)  # policy tokens of four trajectories
T = sum(LENGTHS)
# The published form of each objective: clip below, clip above, mean, ratio.
PUBLISHED = {
    "grpo": (0.2, 0.2, "sequence-mean", "token"),
    "dapo": (0.2, 0.28, "token-mean", "token"),
    "ppo": (0.2, 0.2, "token-mean", "token"),
    "reinforce++": (0.2, 0.2, "token-mean", "token"),
    "rloo": (0.2, 0.2, "sequence-sum", "token"),
    "gspo": (3e-4, 4e-4, "sequence-mean", "sequence"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One trajectory."""

    logits: np.ndarray
    targets: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray

    def with_logits(self, logits: np.ndarray) -> Case:
        return dataclasses.replace(self, logits=logits)

    def only(self, kept: np.ndarray) -> Case:
        return Case(*(getattr(self, field.name)[kept] for field in dataclasses.fields(self)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cases(seed: int, temperature: float = 1.0) -> list[Case]:
    """Four trajectories: token ratios on both sides of both clips, sequence ratios too; TIS weights around the cap."""
    rng = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(LENGTHS):
        logits, targets = rng.normal(size=(length, V)), rng.integers(0, V, length)
        logp = log_softmax(logits / temperature)[np.arange(length), targets]
        shift = rng.normal(scale=0.4, size=length)
        if index == 3:
            shift -= shift.mean() + 1e-4  # a sequence ratio inside GSPO's clip range
        old = logp + shift
        rollout = old + rng.normal(scale=0.8, size=length)
        advantages = rng.normal(size=length)
        made.append(Case(logits, targets, old, rollout, logp + rng.normal(scale=0.5, size=length), advantages))
    return made


def same_advantage(trajectories: Sequence[Case]) -> list[Case]:
    return [dataclasses.replace(case, advantages=np.full(len(case.old), case.advantages[0])) for case in trajectories]


def reference(trajectories: Sequence[Case], coefficients: Coefficients, temperature: float, mean: str) -> float:
    """The whole loss, divided by its denominator: the formulas, token by token."""
    total, tokens = 0.0, 0
    for case in trajectories:
        now = [log_softmax(z / temperature)[a] for z, a in zip(case.logits, case.targets, strict=True)]
        sequence = math.exp(sum(n - o for n, o in zip(now, case.old, strict=True)) / len(now))
        of_trajectory = 0.0
        for index, logp in enumerate(now):
            ratio = sequence if coefficients.sequence_ratio else math.exp(logp - case.old[index])
            clipped = min(max(ratio, 1 - coefficients.clip_low), 1 + coefficients.clip_high)
            advantage = case.advantages[index]
            weight = min(math.exp(case.old[index] - case.rollout[index]), coefficients.tis_cap)
            gap = logp - case.ref[index]
            kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[coefficients.kl_estimator]
            spread = log_softmax(case.logits[index] / temperature)
            entropy = -sum(math.exp(value) * value for value in spread)
            loss = -min(ratio * advantage, clipped * advantage) * weight
            of_trajectory += loss + coefficients.kl_coefficient * kl - coefficients.entropy_coefficient * entropy
        tokens += len(now)
        total += of_trajectory / len(now) if mean == "sequence-mean" else of_trajectory
    return total / (tokens if mean == "token-mean" else len(trajectories))


def finite_differences(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def reference_gradient(
    trajectories: Sequence[Case], coefficients: Coefficients, temperature: float, mean: str
) -> np.ndarray:
    """[T, V], one after the other. A trajectory at a time: the others do not depend on its logits."""
    parts = []
    for index, case in enumerate(trajectories):

        def value(logits: np.ndarray, index: int = index, case: Case = case) -> float:
            changed = [*trajectories[:index], case.with_logits(logits), *trajectories[index + 1 :]]
            return reference(changed, coefficients, temperature, mean)

        parts.append(finite_differences(value, case.logits))
    return np.concatenate(parts)


def tokens_of(trajectories: Sequence[Case], mean: str, dtype: torch.dtype = torch.float64, masked: int = 0) -> Tokens:
    """A micro-batch as the batching makes it."""
    parts = [token_weights(len(case.old), mean) for case in trajectories]

    def joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*arrays, np.zeros(0)])).to(dtype)

    lengths = [len(case.old) for case in trajectories]
    return Tokens(
        targets_T=joined([case.targets for case in trajectories]).long(),
        rollout_T=joined([case.rollout for case in trajectories]),
        advantages_T=joined([case.advantages for case in trajectories]),
        weights_T=joined([weights for weights, _ in parts]),
        fresh_T=torch.ones(sum(lengths), dtype=torch.bool),
        old_T=joined([case.old for case in trajectories]),
        denominator=sum(added for _, added in parts),
        segments_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)),
        reference_T=joined([case.ref for case in trajectories]),
        masked=masked,
    )


def logits_of(trajectories: Sequence[Case], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    joined = np.concatenate([*(case.logits for case in trajectories), np.zeros((0, V))])
    return torch.from_numpy(joined).to(dtype).requires_grad_()


def replaced(tokens: Tokens, **changes: object) -> Tokens:
    return dataclasses.replace(tokens, **changes)


# -- against the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("objective", list(PUBLISHED))
def test_loss_and_gradient_are_those_of_the_published_formula(objective: str, extras: bool, temperature: float) -> None:
    """``extras``: with the KL to a reference and an entropy bonus."""
    low, high, mean, ratio = PUBLISHED[objective]
    trajectories = cases(3, temperature)
    if ratio == "sequence":  # the published form has one advantage a trajectory, and no weight per token
        trajectories = [dataclasses.replace(case, rollout=case.old) for case in same_advantage(trajectories)]
    expected = Coefficients(low, high, 1.5, 0.03 * extras, 0.1 * extras, "k3", ratio == "sequence")
    trainer = TrainerSettings(
        objective=objective, tis_cap=1.5, entropy_coefficient=0.03 * extras, kl_coefficient=0.1 * extras
    )
    assert trainer.loss_mean == mean
    assert Coefficients.from_settings(trainer) == expected
    value = reference(trajectories, expected, temperature, mean)
    gradient = reference_gradient(trajectories, expected, temperature, mean)
    for dtype, precision in ((torch.float64, 1e-6), (torch.float32, 2e-5)):
        leaf, tokens = logits_of(trajectories, dtype), tokens_of(trajectories, mean, dtype)
        loss, totals = policy_loss(leaf, tokens, Coefficients.from_settings(trainer), temperature)
        loss.backward()
        assert float(loss.detach()) / tokens.denominator == pytest.approx(value, rel=precision)
        assert totals.metrics()["loss"] == pytest.approx(value, rel=precision)
        found = leaf.grad.numpy() / tokens.denominator
        assert np.abs(found - gradient).max() <= precision * np.abs(gradient).max()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mean", ["token-mean", "sequence-mean", "sequence-sum"])
def test_each_kl_estimator_under_each_mean(mean: str, estimator: str) -> None:
    trajectories, coefficients = cases(4), Coefficients(0.2, 0.28, 2.0, 0.0, 0.7, estimator)
    leaf, tokens = logits_of(trajectories), tokens_of(trajectories, mean)
    loss, _ = policy_loss(leaf, tokens, coefficients)
    loss.backward()
    assert float(loss.detach()) / tokens.denominator == pytest.approx(reference(trajectories, coefficients, 1.0, mean))
    gradient = reference_gradient(trajectories, coefficients, 1.0, mean)
    assert np.abs(leaf.grad.numpy() / tokens.denominator - gradient).max() <= 1e-6 * np.abs(gradient).max()


def test_the_cases_reach_every_branch() -> None:
    """Else the comparisons above would prove less than they seem to."""
    token = policy_loss(logits_of(cases(3)), tokens_of(cases(3), "token-mean"), Coefficients(0.2, 0.28, 1.5, 0.0))[1]
    metrics = token.metrics()
    assert 0 < metrics["clip_fraction"] < 1
    assert 0 < metrics["tis_capped"] < 1
    assert metrics["tis_max"] == 1.5
    trajectories = same_advantage(cases(3))
    coefficients = Coefficients.from_settings(TrainerSettings(objective="gspo"))
    sequence = policy_loss(logits_of(trajectories), tokens_of(trajectories, "sequence-mean"), coefficients)[1]
    assert 0 < sequence.metrics()["clip_fraction"] < 1


def test_the_sequence_ratio_takes_a_weight_and_an_advantage_for_each_token() -> None:
    """GSPO 4.3: the gradient of token t is s_i * A_t * w_t * grad log pi_t, unless the clip binds."""
    (case,) = cases(5)[3:]
    coefficients = Coefficients(0.5, 0.5, 1.5, 0.0, sequence_ratio=True)
    leaf, tokens = logits_of([case]), tokens_of([case], "sequence-mean")
    loss, _ = policy_loss(leaf, tokens, coefficients)
    loss.backward()
    now = log_softmax(case.logits)
    taken = np.eye(V)[case.targets]
    ratio = math.exp(np.mean((now * taken).sum(-1) - case.old))
    weights = np.minimum(np.exp(case.old - case.rollout), 1.5)
    expected = -(ratio * weights * case.advantages / len(case.old))[:, None] * (taken - np.exp(now))
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-6, atol=1e-12)


def test_diagnostics_are_those_of_the_definitions() -> None:
    trajectories = cases(3)
    fresh = torch.tensor([index % 3 == 0 for index in range(T)])
    tokens = replaced(tokens_of(trajectories, "token-mean", masked=5), fresh_T=fresh)
    _, totals = policy_loss(logits_of(trajectories), tokens, Coefficients(0.2, 0.2, 2.0, 0.0))
    logp = log_softmax(np.concatenate([case.logits for case in trajectories]))
    now = logp[np.arange(T), tokens.targets_T.numpy()]
    old, rollout, ref = tokens.old_T.numpy(), tokens.rollout_T.numpy(), tokens.reference_T.numpy()
    weights, gap = np.minimum(np.exp(old - rollout), 2.0), np.abs(old - rollout)
    expected = {
        "entropy": -(np.exp(logp) * logp).sum(-1).mean(),
        "approx_kl": (np.exp(now - old) - 1 - (now - old)).mean(),
        "rollout_kl": (np.exp(old - rollout) - 1 - (old - rollout)).mean(),
        "reference_kl": (np.exp(ref - now) - 1 - (ref - now)).mean(),
        "tis_mean": weights.mean(),
        "ess": weights.sum() ** 2 / (T * (weights**2).sum()),
        "logprob_gap_mean": gap[::3].mean(),
        "logprob_gap_max": gap[::3].max(),
        "logprob_gap_tokens": len(gap[::3]),
        "logprob_gap_all": gap.mean(),
        "tokens": T,
        "masked_tokens": 5,
    }
    metrics = totals.metrics()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    without = policy_loss(logits_of(trajectories), replaced(tokens, reference_T=None), Coefficients(0.2, 0.2, 2.0, 0.0))
    assert "reference_kl" not in without[1].metrics()  # not measured is not 0


# -- sums ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    strategies.sampled_from(list(PUBLISHED)),
    strategies.integers(0, 1000),
    strategies.lists(strategies.integers(0, 2), min_size=4, max_size=4),
    strategies.permutations(range(4)),
)
def test_any_split_into_micro_batches_adds_up_to_the_same_gradient(
    objective: str, seed: int, part_of: list[int], order: Sequence[int]
) -> None:
    """Micro-batches may be empty, and hold the trajectories in any order."""
    trainer = TrainerSettings(objective=objective, kl_coefficient=0.1, entropy_coefficient=0.01)
    coefficients, mean = Coefficients.from_settings(trainer), trainer.loss_mean
    trajectories = cases(seed)
    leaves = [logits_of([case]) for case in trajectories]
    whole_loss, whole = policy_loss(torch.cat(leaves), tokens_of(trajectories, mean), coefficients)
    gradients = torch.autograd.grad(whole_loss, leaves)
    added, parts = Totals(), [torch.zeros_like(leaf) for leaf in leaves]
    for part in range(3):
        members = [index for index in order if part_of[index] == part]
        mine = [leaves[index] for index in members]
        tokens = tokens_of([trajectories[index] for index in members], mean)
        loss, totals = policy_loss(torch.cat([*mine, logits_of([])]), tokens, coefficients)
        added.add(totals)
        for index, gradient in zip(members, torch.autograd.grad(loss, mine) if mine else (), strict=True):
            parts[index] += gradient
    assert added.metrics() == pytest.approx(whole.metrics(), rel=1e-9)
    for found, expected in zip(parts, gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(strategies.sampled_from(list(PUBLISHED)), strategies.lists(strategies.booleans(), min_size=T, max_size=T))
def test_masked_tokens_are_neither_trained_on_nor_counted(objective: str, flags: list[bool]) -> None:
    """The loss is that of trajectories which consist of the counted tokens alone; those without one do not exist."""
    trainer = TrainerSettings(objective=objective)
    kept = np.split(np.array(flags), np.cumsum(LENGTHS)[:-1])
    trajectories = [case.only(mask) for case, mask in zip(same_advantage(cases(6)), kept, strict=True)]
    tokens = tokens_of(trajectories, trainer.loss_mean)
    leaf = logits_of(trajectories)
    loss, totals = policy_loss(leaf, tokens, Coefficients.from_settings(trainer))
    loss.backward()
    left = [case for case in trajectories if len(case.old)]
    assert totals.denominator == (sum(flags) if trainer.loss_mean == "token-mean" else len(left))
    if left and not Coefficients.from_settings(trainer).sequence_ratio:
        value = reference(left, Coefficients.from_settings(trainer), 1.0, trainer.loss_mean)
        assert totals.metrics()["loss"] == pytest.approx(value, rel=1e-6)  # weights are fp32
    assert leaf.grad.shape == (sum(flags), V)


# -- the rest ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", list(PUBLISHED))
def test_without_old_log_probs_the_ratio_is_exactly_one(objective: str) -> None:
    trajectories = cases(5)
    leaf = logits_of(trajectories, torch.float32)
    tokens = replaced(tokens_of(trajectories, "token-mean", torch.float32), old_T=None)
    loss, totals = policy_loss(leaf, tokens, Coefficients.from_settings(TrainerSettings(objective=objective)))
    assert totals.clipped == 0
    assert totals.kl == 0
    logp, _ = logprobs_and_entropy(leaf, tokens.targets_T)
    plain = -(logp * tokens.advantages_T * truncated_weights(logp, tokens.rollout_T, 2.0)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(plain, leaf)
    torch.testing.assert_close(gradient, expected)


def test_the_importance_weight_and_the_reference_are_constants_to_the_gradient() -> None:
    old = torch.tensor([0.5], requires_grad=True)
    assert not truncated_weights(old, torch.zeros(1), 2.0).requires_grad
    assert not kl_estimate("k3", torch.zeros(1), old).requires_grad


def test_the_clip_binds_only_where_it_lowers_the_objective() -> None:
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.3)
    assert clipped.tolist() == [False, True, True, False]
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.3, 2.0])


def test_the_estimators_have_the_mean_of_the_kl_and_k2_its_gradient() -> None:
    """Exact expectations over a small vocabulary, no sampling."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=V)).requires_grad_()
    reference_logp = torch.log_softmax(torch.from_numpy(rng.normal(size=V)), -1)
    logp = torch.log_softmax(logits, -1)
    true = (logp.exp() * (logp - reference_logp)).sum()
    (true_gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    p = logp.detach().exp()
    gradients = {}
    for name in ("k1", "k2", "k3"):
        expected = (p * kl_estimate(name, logp, reference_logp)).sum()
        (gradients[name],) = torch.autograd.grad(expected, logits, retain_graph=True)
        if name != "k2":
            assert float(expected.detach()) == pytest.approx(float(true.detach()))
    torch.testing.assert_close(gradients["k2"], true_gradient)
    torch.testing.assert_close(gradients["k1"], torch.zeros(V, dtype=torch.float64))  # why settings refuse it as a loss
    assert not torch.allclose(gradients["k3"], true_gradient)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate("k4", logp, reference_logp)


def test_a_kl_inside_the_reward_is_not_taken_a_second_time_in_the_loss() -> None:
    inside = TrainerSettings(objective="ppo", kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
    assert Coefficients.from_settings(inside).kl_coefficient == 0
    assert Coefficients.from_settings(TrainerSettings(objective="ppo", kl_coefficient=0.1)).kl_coefficient == 0.1


def test_a_micro_batch_that_weighs_nothing_is_in_no_diagnostic() -> None:
    """Ranks in lock-step compute one to keep up with the others."""
    tokens = tokens_of(cases(0), "token-mean", masked=3)
    idle = replaced(tokens, weights_T=torch.zeros(T), denominator=0)
    leaf = logits_of(cases(0))
    loss, totals = policy_loss(leaf, idle, Coefficients(0.2, 0.2, 2.0, 0.1))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert totals == Totals()
    assert not gradient.any()


def test_what_the_coefficients_need_must_be_there() -> None:
    tokens = tokens_of(cases(0), "token-mean")
    with pytest.raises(ValueError, match="segments_T"):
        policy_loss(
            logits_of(cases(0)),
            replaced(tokens, segments_T=None),
            Coefficients(0.2, 0.2, 2.0, 0.0, sequence_ratio=True),
        )
    with pytest.raises(ValueError, match="reference_T"):
        policy_loss(logits_of(cases(0)), replaced(tokens, reference_T=None), Coefficients(0.2, 0.2, 2.0, 0.0, 0.1))
