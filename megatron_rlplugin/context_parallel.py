"""Context parallelism: each rank of a replica has two pieces of every row, one of its first half and one of its second.

Guarantees: pieces are Megatron-Core's (zigzag: of ``2 * size`` equal pieces rank ``r`` has ``r`` and ``2 * size - 1 - r``, so
that causal attention costs all ranks the same); log-probs and entropies of the policy's tokens are whole on every rank, and the
gradients that the ranks take from a loss over them add up to the gradient of that loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_places(length: int, rank: int, size: int) -> Tensor:
    """Which tokens of a row of ``length`` a rank has, in its order: int64 ``[length / size]``, on the CPU."""
    pieces = torch.arange(length).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def natural_order(length: int, size: int) -> Tensor:
    """Where each token of a row is when all ranks' pieces lie one after the other: int64 ``[length]``."""
    return torch.cat([zigzag_places(length, rank, size) for rank in range(size)]).argsort()


@dataclass(frozen=True, slots=True, eq=False)
class TokenPart:
    """Which of ``total`` policy tokens this rank predicts; ``group``: the ranks of the context."""

    own_P: Tensor
    total: int
    group: Any

    def whole(self, values_P: Tensor) -> Tensor:
        """What each rank knows of its own tokens, known of all ``[total]``; a rank's gradient is that of its own."""
        whole_T: Tensor = _Whole.apply(values_P, self.own_P, self.total, self.group)
        return whole_T


class RowPart:
    """This rank's part of the rows of a micro-batch of ``length`` tokens."""

    def __init__(self, length: int, group: Any, device: torch.device) -> None:
        self._group = group
        self._places = zigzag_places(length, group.rank(), group.size()).to(device)
        self._length = length

    @property
    def first(self) -> bool:
        """Whether this is the rank that counts what every rank of the context knows."""
        return bool(self._group.rank() == 0)

    def cut(self, rows_BS: Tensor) -> Tensor:
        """``[B, S / size]`` of ``[B, S]``."""
        return rows_BS.index_select(1, self._places)

    def select(self, output_BPX: Tensor, at_T: Tensor) -> tuple[Tensor, TokenPart]:
        """Of this rank's outputs those at ``at_T``, indices into ``[B * S]``, and whose they are."""
        here = torch.full((self._length,), -1, dtype=torch.int64, device=at_T.device)
        here[self._places] = torch.arange(len(self._places), device=at_T.device)
        place_T = here[at_T % self._length]
        own_P = (place_T >= 0).nonzero().squeeze(-1)
        at_P = at_T[own_P] // self._length * len(self._places) + place_T[own_P]
        rows_PX = output_BPX.reshape(-1, output_BPX.shape[-1]).index_select(0, at_P)
        return rows_PX, TokenPart(own_P, len(at_T), self._group)


def gather_sequence(part_PX: Tensor, group: Any) -> Tensor:
    """All ranks' pieces along dim 0, in the order of the row; the gradient of a piece is the sum of all ranks' gradients."""
    whole_SX: Tensor = _Gather.apply(part_PX, group)
    return whole_SX


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values_P: Tensor, own_P: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(own_P)
        whole_T = values_P.new_zeros(total).index_copy_(0, own_P, values_P)
        dist.all_reduce(whole_T, group=group)  # one rank has the value, the others 0: nothing is rounded
        return whole_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        (own_P,) = ctx.saved_tensors
        return gradient_T.index_select(0, own_P), None, None, None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, part_PX: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part_PX) for _ in range(group.size())]
        dist.all_gather(parts, part_PX.contiguous(), group=group)
        whole = torch.cat(parts)
        return whole.index_select(0, natural_order(len(whole), group.size()).to(whole.device))

    @staticmethod
    def backward(ctx: Any, gradient_SX: Tensor) -> tuple[Tensor, None]:
        summed = gradient_SX.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        places = zigzag_places(len(summed), ctx.group.rank(), ctx.group.size())
        return summed.index_select(0, places.to(summed.device)), None
