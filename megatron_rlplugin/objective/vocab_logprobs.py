"""Log-probs and entropy of softmax(logits / temperature) when the vocabulary may be split over tensor-parallel ranks.

Guarantees: arithmetic is fp32 whatever the dtype of the logits (float64 stays float64); the result is the same on every
rank of the group; each rank's gradient is that of its own columns, without communication in the backward. For the backward
nothing of the size of the vocabulary is kept but the logits themselves, in their own dtype: the probabilities are computed
again from them and the normaliser.

Shapes: ``logits_TV`` is [T, V / ranks], rank r holding the columns r * V / ranks and on, as Megatron's
``ColumnParallelLinear`` leaves them; ``targets_T`` are indices into the whole vocabulary. ``group`` None or of one rank: V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float = 1.0, *, group: Any = None) -> Tensor:
    """Log-prob of each target, [T]."""
    logp_T, _ = _VocabSoftmax.apply(logits_TV, targets_T, temperature, group, False, False)
    return logp_T


def logprobs_and_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), [T] both. Entropy has a gradient only when asked to."""
    logp_T, entropy_T = _VocabSoftmax.apply(logits_TV, targets_T, temperature, group, True, entropy_gradient)
    return logp_T, entropy_T


class _VocabSoftmax(torch.autograd.Function):  # type: ignore[misc]  # torch is not type-checked here
    """Two all-reduces forward (the maximum; the sums and the target's logit), none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        group: Any,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        split = group is not None and dist.get_world_size(group) > 1
        columns = logits_TV.shape[-1]
        largest_T = logits_TV.amax(-1)
        if split:
            dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        x_TV = _shifted(logits_TV, largest_T, temperature)
        local_T = targets_T - (dist.get_rank(group) * columns if split else 0)
        here_T = (local_T >= 0) & (local_T < columns)
        local_T = local_T.clamp(0, columns - 1)
        chosen_T = x_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1) * here_T
        e_TV = x_TV.exp()
        sums = [e_TV.sum(-1), chosen_T]
        if entropy:
            sums.append(e_TV.mul_(x_TV).sum(-1))
        sums_3T = torch.stack(sums)
        if split:
            dist.all_reduce(sums_3T, group=group)
        log_z_T = sums_3T[0].log()
        logp_T = sums_3T[1] - log_z_T
        entropy_T = log_z_T - sums_3T[2] / sums_3T[0] if entropy else torch.zeros_like(logp_T)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        ctx.save_for_backward(logits_TV, local_T, here_T, largest_T, log_z_T, entropy_T)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_T, grad_entropy_T = gradients
        logits_TV, local_T, here_T, largest_T, log_z_T, entropy_T = ctx.saved_tensors
        logp_TV = _shifted(logits_TV, largest_T, ctx.temperature).sub_(log_z_T.unsqueeze(-1))
        p_TV = logp_TV.exp()
        # d logp_t / dx = onehot - p;  d H / dx = -p (log p + H)
        if ctx.entropy_gradient:
            outer_TV = logp_TV.add_(entropy_T.unsqueeze(-1)).mul_(grad_entropy_T.unsqueeze(-1))
            grad_TV = outer_TV.add_(grad_logp_T.unsqueeze(-1)).mul_(p_TV).neg_()
        else:
            grad_TV = p_TV.mul_(-grad_logp_T.unsqueeze(-1))
        grad_TV.scatter_add_(-1, local_T.unsqueeze(-1), (grad_logp_T * here_T).unsqueeze(-1))
        if ctx.temperature != 1.0:
            grad_TV /= ctx.temperature
        return grad_TV.to(logits_TV.dtype), None, None, None, None, None


def _shifted(logits_TV: Tensor, largest_T: Tensor, temperature: float) -> Tensor:
    """(logits - maximum) / temperature in at least fp32. In this order: large logits lose no digit to the division."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    x_TV = logits_TV - largest_T.to(dtype).unsqueeze(-1)  # promoted element by element, without a copy
    return x_TV.div_(temperature) if temperature != 1.0 else x_TV
