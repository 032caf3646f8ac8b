"""Streams a synthetic run beside the same run in whole batches and measures the difference.

Guarantees: both start each step from the same weights, bit for bit, and see the same trajectories; every figure is the
worst over all ranks and steps. Weights are compared where the order of the sums is the same; elsewhere the merged
gradients (``main_grad``) are, relative to their largest element: Adam (g / sqrt(g^2)) amplifies the order of a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.parallel_layout import device
from megatron_rlplugin.stream.gradient_stream import GradientStream
from megatron_rlplugin.trainer.gradient_buffers import bucket_groups, grad_buffers
from scripts.bench.probes.megatron.equality_data import (
    LENGTH,
    LOSSES,
    Case,
    Sample,
    batch_of,
    build,
    denominator_of,
    even,
    forward_step,
    iterators,
    portions,
    uneven,
)

OFFLOAD_STEP, NAN_STEP = 1, 2  # of each case


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps both ways. Every rank calls it, within the case's layout, and gets the same figures.

    ``weights``: largest difference after any step, same order (0.0 and ``bit_equal`` expected). ``uneven``: relative
    difference of gradients, uneven shares in another order. ``control``: the same with a plain mean of the replicas'
    means, least over the steps in which shares differ (None with one replica). ``nan_taken``: steps with a NaN that were
    taken. ``nan_changed``: whether such a step changed weights or optimizer state anywhere.
    """
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    whole, whole_optimizer = build(case, stock=True)
    chunks, optimizer = build(case)
    stream = GradientStream(chunks, optimizer, elastic=True)
    weights, bit_equal, difference, control, moved = 0.0, True, 0.0, math.inf, 0.0
    nan_taken, nan_changed = 0, False
    for step in range(steps):
        samples = batch_of(case, step)
        total = math.fsum(denominator_of(case, sample) for sample in samples)
        away = step == OFFLOAD_STEP
        before = weights_of(whole)
        divisor = total if LOSSES[case.loss][2] else None
        whole_batch(case, whole, whole_optimizer, even(case, samples, replica), divisor)
        reference = own_gradients(whole)
        largest = over_ranks(max(float(gradient.abs().max()) for gradient in reference if gradient.numel()))

        stream.begin_step()
        feed(case, stream, uneven(case, samples, step, replica), away=away)
        sums, fed = local_gradients(chunks), stream.denominator
        stream.merge_gradients(expected=total)
        difference = max(difference, over_ranks(distance(reference, own_gradients(chunks))) / largest)
        if case.units > 1:
            plain_mean(case, chunks, sums, fed)
            control = min(control, over_ranks(distance(reference, own_gradients(chunks))) / largest)

        if step == NAN_STEP:
            held = [*weights_of(chunks), *optimizer_tensors(optimizer)]
            stream.begin_step()
            feed(case, stream, _poisoned(case, even(case, samples, replica), replica))
            nan_taken += int(over_ranks(float(stream.finish_step().taken)))
            changed = not same(held, [*weights_of(chunks), *optimizer_tensors(optimizer)])
            nan_changed = bool(over_ranks(float(changed))) or nan_changed

        stream.begin_step()
        feed(case, stream, even(case, samples, replica), away=away)
        result = stream.finish_step(expected=total)
        _, norm, _ = whole_optimizer.step()
        for chunk in whole if case.overlap_gather else []:
            chunk.start_param_sync(force_sync=True)  # stock gathers in the next forward
        after, streamed = weights_of(whole), weights_of(chunks)
        weights = max(weights, over_ranks(distance(after, streamed)))
        equal = same(after, streamed) and result.taken and result.grad_norm == float(norm)
        bit_equal = bit_equal and not over_ranks(float(not equal))
        moved = max(moved, over_ranks(distance(before, after)))
    return {
        "case": case.name,
        "world": case.world,
        "steps": steps,
        "layout": dataclasses.asdict(case.layout),
        "loss": case.loss,
        "clip": case.clip,
        "bit_equal": bit_equal,
        "weights": weights,
        "uneven": difference,
        "control": control if case.units > 1 else None,
        "moved": moved,  # how far a step moves a weight: 0 would make the equality empty
        "nan_taken": nan_taken,
        "nan_changed": nan_changed,
    }


def _poisoned(case: Case, samples: Sequence[Sample], replica: int) -> list[Sample]:
    """The last replica's last trajectory has an advantage that is no number."""
    if replica != case.replicas - 1:
        return list(samples)
    return [*samples[:-1], dataclasses.replace(samples[-1], advantage=math.nan)]


def feed(case: Case, stream: GradientStream, samples: Sequence[Sample], *, away: bool = False) -> None:
    """Everything this rank has, in several calls; ``away``: gradients go to the host and back after the first."""
    step, at = forward_step(case), 0
    for size in portions(case, len(samples)):
        stream.feed(
            step,
            iterators(stream.model, samples[at : at + size]),
            num_microbatches=size,
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        at += size
        if away and at == size:
            stream.offload()
            stream.reload()
    if away and not samples:
        stream.offload()
        stream.reload()


def whole_batch(
    case: Case, chunks: Sequence[Any], optimizer: Any, samples: Sequence[Sample], total: float | None = None
) -> None:
    """Stock Megatron: gradients of one call over this rank's share, synchronised and divided by its finalizer.

    It counts in int32, so that N of weighted trajectories has to be divided by afterwards.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step(case, uncounted=total is not None),
        data_iterator=iterators(chunks, samples),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(samples),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    for chunk in chunks if total is not None else []:
        chunk.scale_gradients(1.0 / torch.tensor(total, dtype=torch.float32, device=device()))


def own_gradients(chunks: Sequence[Any]) -> list[Tensor]:
    """A copy of the merged gradients that this rank steps with: all, or its shard of a distributed optimizer."""
    found = []
    for group in bucket_groups(chunks):
        for bucket in group.buckets:
            data = bucket.grad_data
            if group.ddp_config.use_distributed_optimizer:
                size = group.intra_distributed_optimizer_instance_size
                data = data.chunk(size)[group.intra_distributed_optimizer_instance_rank]
            found.append(data.detach().clone())
    return found


def local_gradients(chunks: Sequence[Any]) -> list[Tensor]:
    """A copy of the gradient buffers as they are."""
    return [buffer.grad_data.detach().clone() for buffer in grad_buffers(chunks)]


def plain_mean(case: Case, chunks: Sequence[Any], sums: Sequence[Tensor], fed: float) -> None:
    """The negative control: the arithmetic mean of the replicas' means, as if they had been fed the same amounts.

    A replica is what trains as one: expert-parallel peers together.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    count = torch.tensor([fed], dtype=torch.float64, device=device())
    dist.all_reduce(count, group=parallel_state.get_expert_model_parallel_group())
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
    for buffer, own in zip(grad_buffers(chunks), sums, strict=True):
        buffer.grad_data.copy_(own / ((float(count) or 1.0) * case.units))
    for chunk in chunks:
        for group in bucket_groups([chunk]):
            group.reset()
    factors = []
    for bucket in (b for g in bucket_groups(chunks) for b in g.buckets):
        factors.append((bucket, bucket.gradient_scaling_factor))
        bucket.gradient_scaling_factor = 1.0
    if chunks[0].ddp_config.overlap_grad_reduce:
        for chunk in chunks:
            chunk.start_grad_sync()
    finalize_model_grads(list(chunks), None)
    for bucket, factor in factors:
        bucket.gradient_scaling_factor = factor


def weights_of(chunks: Sequence[Any]) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Copies of all that the optimizer holds: its master weights and its state."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                found += [parameter.detach().clone()]
                found += [torch.as_tensor(value).detach().clone() for _, value in sorted(state.items())]
    return found


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Bit-equal, NaN included."""
    return len(left) == len(right) and all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Largest absolute difference on this rank."""
    return max((float((a.float() - b.float()).abs().max()) for a, b in zip(left, right, strict=True) if a.numel()))


def over_ranks(value: float) -> float:
    """The largest over all ranks of the process group."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)
