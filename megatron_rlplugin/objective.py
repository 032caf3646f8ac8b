"""The GRPO objective as pure functions of tensors: group-relative advantages, clipping, truncated importance sampling.

Losses are returned as a SUM with its denominator, so that micro-batches of any size add up to the same gradient. Suffixes:
B trajectories, T positions. ``mask`` is 1 at positions whose next token the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Objective:
    """Clip range of the policy ratio, cap of the truncated importance weight, entropy bonus, loss reduction."""

    clip_low: float
    clip_high: float
    tis_cap: float
    entropy_coefficient: float = 0.0
    reduction: str = "token-mean"


def group_advantages(rewards: Sequence[float], groups: Sequence[str], normalize: bool) -> list[float]:
    """Reward minus the group's mean, over the group's standard deviation (unbiased) if asked; 0 where nothing differs."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [rewards[index] for index in indices]
        mean = sum(values) / len(values)
        spread = (sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)) ** 0.5
        if spread < 1e-8:
            continue
        for index in indices:
            advantages[index] = (rewards[index] - mean) / (spread if normalize else 1.0)
    return advantages


def token_logprobs(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each label, entropy of each position), both [B, T]; fp32."""
    log_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    chosen_BT = log_BTV.gather(-1, labels_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT, -(log_BTV.exp() * log_BTV).sum(-1)


@dataclass(slots=True)
class LossParts:
    """Sums over one micro-batch; ``loss_sum`` carries the gradient."""

    loss_sum: torch.Tensor
    entropy_sum: float
    clipped: float
    kl_sum: float
    tis_sum: float
    tis_square_sum: float
    tis_max: float


def policy_loss(
    objective: Objective,
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    old_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
) -> LossParts:
    """min(ratio A, clip(ratio) A) weighted by min(pi_old / pi_rollout, cap), negated and summed.

    ``token-mean`` sums over tokens (denominator: tokens of the batch); ``sequence-mean`` first averages each trajectory
    (denominator: trajectories).
    """
    ratio_BT = torch.exp(logprobs_BT - old_BT)
    advantage_B1 = advantage_B.unsqueeze(1)
    unclipped_BT = ratio_BT * advantage_B1
    clipped_BT = ratio_BT.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage_B1
    with torch.no_grad():
        raw_BT = torch.exp(old_BT - rollout_BT)
        tis_BT = raw_BT.clamp(max=objective.tis_cap)
    token_BT = -torch.min(unclipped_BT, clipped_BT) * tis_BT - objective.entropy_coefficient * entropy_BT
    weight_BT = mask_BT
    if objective.reduction == "sequence-mean":
        weight_BT = mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    loss_sum = (token_BT * weight_BT).sum()
    with torch.no_grad():
        change_BT = logprobs_BT - old_BT
        kl_BT = torch.exp(-change_BT) - 1 + change_BT  # k3 of KL(old || new) seen from old's samples
        masked_tis = tis_BT[mask_BT > 0]
        return LossParts(
            loss_sum,
            float((entropy_BT * mask_BT).sum()),
            float(((clipped_BT < unclipped_BT) * mask_BT).sum()),
            float((kl_BT * mask_BT).sum()),
            float(masked_tis.sum()),
            float((masked_tis * masked_tis).sum()),
            float(masked_tis.max()) if masked_tis.numel() else 0.0,
        )
