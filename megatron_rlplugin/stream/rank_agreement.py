"""What the ranks tell each other before a step is taken: small collectives, no gradient among them.

Guarantees: every rank returns the same answer, so that a step is taken by all or by none and an error is raised on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.parallel_layout import device

# Denominators that differ by less than this, relatively, are the same sum of floats in another order.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """What all ranks know after they spoke."""

    denominator: float  # N: the sum over all replicas
    uneven: bool  # ranks that hold parts of the same replica counted differently
    expected: tuple[float, float] | None  # least and largest of what ranks expect; None: nobody expects anything
    interrupted: int  # ranks whose stream cannot be finished
    not_finite: int  # ranks with a gradient that is not finite


def agree_on_step(denominator: float, expected: float | None, *, interrupted: bool, finite: bool) -> RankAgreement:
    """Denominators are summed over data-parallel (x context-parallel) replicas, as Megatron's finalizer does.

    Only the last pipeline stage knows them; tensor-parallel ranks must have counted the same. ``interrupted`` and not
    ``finite`` are counted over all ranks. Raises RuntimeError (torch.distributed's) when a rank cannot be reached.
    """
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    parts = parallel_state.get_model_parallel_group()  # the TP and PP ranks of this rank's replica
    counts = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    sums = _numbers([denominator if counts else 0.0, float(interrupted), float(not finite)])
    dist.all_reduce(sums, group=replicas)
    flags = sums[1:].clone()
    dist.all_reduce(flags, group=parts)
    total = float(sums[0])
    wanted = [-math.inf, -math.inf] if expected is None else [float(expected), -float(expected)]
    extremes = _numbers([total, -total if counts else -math.inf, *wanted])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicas)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parts)
    most, least, high, low = extremes.tolist()
    return RankAgreement(
        denominator=most,
        uneven=not math.isclose(most, -least, rel_tol=TOLERANCE),
        expected=None if high == -math.inf else (-low, high),
        interrupted=int(flags[0]),
        not_finite=int(flags[1]),
    )


def counts_in_step(count: int) -> tuple[int, int]:
    """(least, most) of what the ranks say that share experts: they exchange tokens in every layer, so one that computes more
    micro-batches than another waits for it. A collective among these, of which there are none without expert parallelism."""
    from megatron.core import parallel_state

    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return count, count
    extremes = _numbers([float(count), -float(count)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
    most, least = extremes.tolist()
    return int(-least), int(most)


def any_rank(flag: bool) -> bool:
    """Whether any rank of the model says so. Raises RuntimeError when a rank cannot be reached."""
    from megatron.core import parallel_state

    answer = _numbers([float(flag)])
    dist.all_reduce(answer, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(answer, group=parallel_state.get_model_parallel_group())
    return bool(answer.item())


def _numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device())
