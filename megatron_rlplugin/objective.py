"""The GRPO objective as pure functions: no state, no engine, no randomness.

Guarantees: losses come as a SUM with its denominator, so that any split into micro-batches adds up to the same gradient;
nothing but the current policy's log-probs (and the entropy bonus) carries a gradient. Log-probs are those of the sampling
distribution, that is after the temperature, as the rollout reports them.

Shapes: ``_N`` trajectories, ``_T`` policy tokens of a micro-batch one after the other, ``_TV`` tokens by vocabulary.
Sources: GRPO (DeepSeekMath), decoupled clipping (DAPO), truncated importance sampling between the rollout's and the
trainer's policy of the same weights (RollArt 6.2; cap ``tis_cap``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

STD_EPSILON = 1e-6  # added to a group's standard deviation, as in GRPO's public implementations


def group_advantages(rewards: Sequence[float], group_ids: Sequence[str], *, normalize: bool) -> list[float]:
    """Reward minus the mean of its group; ``normalize``: over the group's sample standard deviation.

    A group with one member, or whose members have all the same reward, says nothing: 0.
    """
    members: dict[str, list[float]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        members.setdefault(group, []).append(reward)
    mean: dict[str, float] = {}
    scale: dict[str, float] = {}
    for group, values in members.items():
        mean[group] = math.fsum(values) / len(values)
        scale[group] = 0.0
        if max(values) > min(values):
            squares = math.fsum((value - mean[group]) ** 2 for value in values)
            scale[group] = 1.0 / (math.sqrt(squares / (len(values) - 1)) + STD_EPSILON) if normalize else 1.0
    return [(reward - mean[group]) * scale[group] for reward, group in zip(rewards, group_ids, strict=True)]


def logprobs_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in fp32. Entropy has a gradient only when asked to."""
    scaled = logits_TV.float() if temperature == 1.0 else logits_TV.float() / temperature
    logp_TV = torch.log_softmax(scaled, dim=-1)
    logp_T = logp_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    base = logp_TV if entropy_gradient else logp_TV.detach()
    return logp_T, -(base.exp() * base).sum(-1)


def truncated_weights(old_T: Tensor, rollout_T: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap), a constant to the gradient."""
    return (old_T - rollout_T).detach().exp().clamp(max=cap)


def clipped_surrogate(
    logp_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(the loss of each token, whether the clip removed its gradient)."""
    ratio_T = (logp_T - old_T.detach()).exp()
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    return -torch.minimum(plain_T, clipped_T), (clipped_T < plain_T).detach()


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the policy tokens of a micro-batch before the forward pass."""

    targets_T: Tensor
    rollout_T: Tensor  # log-probs reported by the rollout
    advantages_T: Tensor
    weights_T: Tensor  # token-mean: 1; sequence-mean: 1 / tokens of its trajectory
    fresh_T: Tensor  # bool: made by the version that is being trained
    old_T: Tensor | None  # log-probs when the step began; None: they are the current ones (first optimizer step)
    denominator: int  # what this micro-batch adds to the loss's divisor: tokens, or trajectories


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The constants of the loss; see ``orchestrator.config.TrainerSection``."""

    clip_low: float
    clip_high: float
    tis_cap: float
    entropy_coefficient: float


@dataclass(slots=True)
class Totals:
    """Sums over tokens (maxima where the name says so) that add up over micro-batches."""

    loss: float = 0.0
    denominator: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0  # estimator k3 of KL(pi_old || pi)
    rollout_kl: float = 0.0  # the same of KL(pi_rollout || pi_old)
    tis: float = 0.0
    tis_squared: float = 0.0
    tis_max: float = 0.0
    tis_capped: float = 0.0
    gap: float = 0.0
    fresh_tokens: float = 0.0
    gap_max: float = 0.0
    gap_all: float = 0.0

    def add(self, other: Totals) -> None:
        """Take in another micro-batch."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name.endswith("_max") else mine + theirs)

    def metrics(self) -> dict[str, float]:
        """The scalars that a step reports. ``ess`` is (sum w)^2 / (n sum w^2) of the weights used: 1 is all equal."""
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss / max(self.denominator, 1.0),
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "approx_kl": self.kl / tokens,
            "rollout_kl": self.rollout_kl / tokens,
            "tis_mean": self.tis / tokens,
            "tis_max": self.tis_max,
            "tis_capped": self.tis_capped / tokens,
            "ess": self.tis**2 / (tokens * self.tis_squared) if self.tis_squared else 0.0,
            "logprob_gap_mean": self.gap / max(self.fresh_tokens, 1.0),
            "logprob_gap_max": self.gap_max,
            "logprob_gap_tokens": self.fresh_tokens,
            "logprob_gap_all": self.gap_all / tokens,
            "tokens": self.tokens,
        }


def policy_loss(
    logits_TV: Tensor, tokens: Tokens, coefficients: Coefficients, temperature: float = 1.0
) -> tuple[Tensor, Totals]:
    """The SUM of the loss over a micro-batch, to be divided by the sum of the denominators, and its diagnostics."""
    bonus = coefficients.entropy_coefficient
    logp_T, entropy_T = logprobs_and_entropy(logits_TV, tokens.targets_T, temperature, entropy_gradient=bonus > 0)
    old_T = logp_T.detach() if tokens.old_T is None else tokens.old_T
    tis_T = truncated_weights(old_T, tokens.rollout_T, coefficients.tis_cap)
    surrogate_T, clipped_T = clipped_surrogate(
        logp_T, old_T, tokens.advantages_T, clip_low=coefficients.clip_low, clip_high=coefficients.clip_high
    )
    loss_T = surrogate_T * tis_T
    if bonus > 0:
        loss_T = loss_T - bonus * entropy_T
    loss = (loss_T * tokens.weights_T).sum()
    totals = _totals(logp_T.detach(), entropy_T.detach(), old_T, tis_T, clipped_T, tokens, coefficients.tis_cap)
    totals.loss, totals.denominator = float(loss.detach()), float(tokens.denominator)
    return loss, totals


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Supervised warm-up: the SUM of the negative log-likelihood over the tokens."""
    return torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def _totals(
    logp_T: Tensor, entropy_T: Tensor, old_T: Tensor, tis_T: Tensor, clipped_T: Tensor, tokens: Tokens, cap: float
) -> Totals:
    """The diagnostics of a micro-batch: fp64 sums, read from the device once."""
    count = logp_T.numel()
    if not count:
        return Totals()
    step_T, drift_T = logp_T - old_T, old_T - tokens.rollout_T
    gap_T = drift_T.abs()
    fresh_T = gap_T * tokens.fresh_T
    added = {
        "entropy": entropy_T,
        "clipped": clipped_T,
        "kl": step_T.exp() - 1 - step_T,
        "rollout_kl": drift_T.exp() - 1 - drift_T,
        "tis": tis_T,
        "tis_squared": tis_T.square(),
        "tis_capped": tis_T >= cap,
        "gap": fresh_T,
        "fresh_tokens": tokens.fresh_T,
        "gap_all": gap_T,
    }
    largest = {"tis_max": tis_T, "gap_max": fresh_T}
    scalars = [value_T.sum(dtype=torch.float64) for value_T in added.values()]
    scalars += [value_T.max().double() for value_T in largest.values()]
    values = dict(zip([*added, *largest], torch.stack(scalars).tolist(), strict=True))
    return Totals(tokens=float(count), **values)
