"""Log-probs and entropy of softmax(logits / temperature), where the vocabulary may be split over tensor-parallel ranks and
the logits need never exist as a whole.

Guarantees: arithmetic is fp32 whatever the dtype of the logits (float64 stays float64); the result is the same on every
rank of the group; each rank's gradient is that of its own columns, without communication in the backward. Rows are worked
on a chunk at a time (:data:`CHUNK_BYTES`), forward and again in the backward, where the probabilities are computed anew from
the normaliser: with :class:`OutputRows`, nothing of the size of tokens x vocabulary is ever there, and memory beyond the
hidden states and the gradient of the output weight is that of a chunk, whatever the length of the row.

Shapes: ``logits_TV`` is [T, V / ranks], rank r holding the columns r * V / ranks and on, as Megatron's
``ColumnParallelLinear`` leaves them; ``targets_T`` are indices into the whole vocabulary. ``group`` None or of one rank: V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.context_parallel import TokenPart

CHUNK_BYTES = 128 << 20  # of a chunk's logits in fp32; some five tensors of this size live at once


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """Logits before they are computed: ``hidden_TH @ weight_VH.T``, with this rank's rows of the output layer's weight.

    Under tensor parallelism each rank gives a part of the hidden states' gradient; who made them adds the parts up.
    """

    hidden_TH: Tensor
    weight_VH: Tensor
    part: TokenPart | None = None  # of the policy's tokens, that these rows are; None: all
    # Of heads that predict further ahead, each: (which of the policy's tokens it is asked for, its rows of all)
    ahead: tuple[tuple[Tensor, OutputRows], ...] = ()


def logprobs(
    logits_TV: Tensor | OutputRows, targets_T: Tensor, temperature: float = 1.0, *, group: Any = None
) -> Tensor:
    """Log-prob of each target, [T]."""
    part, own_T = _own(logits_TV, targets_T)
    logp_T: Tensor = _VocabSoftmax.apply(*_factors(logits_TV), own_T, temperature, group, False, False)[0]
    return logp_T if part is None else part.whole(logp_T)


def logprobs_and_entropy(
    logits_TV: Tensor | OutputRows,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), [T] both. Entropy has a gradient only when asked to."""
    part, own_T = _own(logits_TV, targets_T)
    logp_T, entropy_T = _VocabSoftmax.apply(*_factors(logits_TV), own_T, temperature, group, True, entropy_gradient)
    return (logp_T, entropy_T) if part is None else (part.whole(logp_T), part.whole(entropy_T))


def _own(logits_TV: Tensor | OutputRows, targets_T: Tensor) -> tuple[TokenPart | None, Tensor]:
    """(which part of the tokens these rows are, its targets)."""
    part = logits_TV.part if isinstance(logits_TV, OutputRows) else None
    return part, targets_T if part is None else targets_T.index_select(0, part.own_P)


def _factors(logits_TV: Tensor | OutputRows) -> tuple[Tensor, Tensor | None]:
    """(rows, weight): the logits are the rows, or their product with the weight."""
    return (logits_TV.hidden_TH, logits_TV.weight_VH) if isinstance(logits_TV, OutputRows) else (logits_TV, None)


class _VocabSoftmax(torch.autograd.Function):  # type: ignore[misc]  # torch is not type-checked here
    """Two all-reduces forward (the maximum; the sums and the target's logit), none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_TX: Tensor,
        weight_VX: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        group: Any,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        split = group is not None and dist.get_world_size(group) > 1
        columns = (rows_TX if weight_VX is None else weight_VX.T).shape[-1]
        local_T = targets_T - (dist.get_rank(group) * columns if split else 0)
        here_T = (local_T >= 0) & (local_T < columns)
        local_T = local_T.clamp(0, columns - 1)
        parts = []
        for chunk in _chunks(len(rows_TX), columns):
            logits_CV = _logits(rows_TX[chunk], weight_VX)
            largest_C = logits_CV.amax(-1)
            x_CV = _shifted(logits_CV, largest_C, temperature)
            chosen_C = x_CV.gather(-1, local_T[chunk].unsqueeze(-1)).squeeze(-1) * here_T[chunk]
            e_CV = x_CV.exp()
            weighted_C = (x_CV.mul_(e_CV) if entropy else e_CV[:, :0]).sum(-1)
            parts.append(torch.stack([largest_C.to(x_CV.dtype), e_CV.sum(-1), chosen_C, weighted_C]))
        local_4T = torch.cat(parts, -1)
        largest_T, sums_3T = local_4T[0], local_4T[1:]
        if split:  # sums of each rank are to its own maximum
            own_T = largest_T.clone()
            largest_T = largest_T.clone()
            dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
            below_T = (largest_T - own_T) / temperature
            sum_T, chosen_T, weighted_T = sums_3T
            scale_T = (-below_T).exp()
            sums_3T = torch.stack(
                [sum_T * scale_T, (chosen_T - below_T) * here_T, (weighted_T - below_T * sum_T) * scale_T]
            )
            dist.all_reduce(sums_3T, group=group)
        log_z_T = sums_3T[0].log()
        logp_T = sums_3T[1] - log_z_T
        entropy_T = log_z_T - sums_3T[2] / sums_3T[0] if entropy else torch.zeros_like(logp_T)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        ctx.save_for_backward(rows_TX, weight_VX, local_T, here_T, largest_T, log_z_T, entropy_T)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_T, grad_entropy_T = gradients
        rows_TX, weight_VX, local_T, here_T, largest_T, log_z_T, entropy_T = ctx.saved_tensors
        chunks = list(_chunks(len(rows_TX), (rows_TX if weight_VX is None else weight_VX.T).shape[-1]))
        by_rows_TX = torch.empty_like(rows_TX)
        by_weight_VX: Tensor | None = None
        for chunk in chunks:
            logits_CV = _logits(rows_TX[chunk], weight_VX)
            logp_CV = _shifted(logits_CV, largest_T[chunk], ctx.temperature).sub_(log_z_T[chunk].unsqueeze(-1))
            p_CV, grad_logp_C = logp_CV.exp(), grad_logp_T[chunk]
            # d logp_t / dx = onehot - p;  d H / dx = -p (log p + H)
            if ctx.entropy_gradient:
                outer_CV = logp_CV.add_(entropy_T[chunk].unsqueeze(-1)).mul_(grad_entropy_T[chunk].unsqueeze(-1))
                grad_CV = outer_CV.add_(grad_logp_C.unsqueeze(-1)).mul_(p_CV).neg_()
            else:
                grad_CV = p_CV.mul_(-grad_logp_C.unsqueeze(-1))
            grad_CV.scatter_add_(-1, local_T[chunk].unsqueeze(-1), (grad_logp_C * here_T[chunk]).unsqueeze(-1))
            if ctx.temperature != 1.0:
                grad_CV /= ctx.temperature
            grad_CV = grad_CV.to(logits_CV.dtype)
            if weight_VX is None:
                by_rows_TX[chunk] = grad_CV
                continue
            by_rows_TX[chunk] = grad_CV @ weight_VX
            if ctx.needs_input_grad[1]:
                if by_weight_VX is None:  # summed in fp32: bf16 sums of many chunks lose digits
                    dtype = weight_VX.dtype if len(chunks) == 1 else log_z_T.dtype
                    by_weight_VX = torch.zeros_like(weight_VX, dtype=dtype)
                for words in _chunks(*weight_VX.shape):
                    by_weight_VX[words] += grad_CV[:, words].T @ rows_TX[chunk]
        if by_weight_VX is not None and weight_VX is not None:
            by_weight_VX = _narrowed(by_weight_VX, weight_VX.dtype)
        return by_rows_TX, by_weight_VX, None, None, None, None, None


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    """``rows`` in chunks of nearly equal size; one that is empty, when there are none."""
    count = max(-(-rows * columns * 4 // CHUNK_BYTES), 1)
    size = max(-(-rows // count), 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _narrowed(wide_VX: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in ``dtype``, which is no wider, in its own memory: a copy would be as large as the weight."""
    if wide_VX.dtype == dtype:
        return wide_VX
    narrow_VX: Tensor = wide_VX.view(dtype).view(-1)[: wide_VX.numel()].view(wide_VX.shape)
    for words in _chunks(*wide_VX.shape):  # in order: what is written was read before
        narrow_VX[words] = wide_VX[words].to(dtype)
    return narrow_VX


def _logits(rows_CX: Tensor, weight_VX: Tensor | None) -> Tensor:
    return rows_CX if weight_VX is None else torch.nn.functional.linear(rows_CX, weight_VX)


def _shifted(logits_TV: Tensor, largest_T: Tensor, temperature: float) -> Tensor:
    """(logits - maximum) / temperature in at least fp32. In this order: large logits lose no digit to the division."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    x_TV = logits_TV - largest_T.to(dtype).unsqueeze(-1)  # promoted element by element, without a copy
    return x_TV.div_(temperature) if temperature != 1.0 else x_TV
