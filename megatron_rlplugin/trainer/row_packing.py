"""Several trajectories in one row of tokens, none of which sees another.

Guarantees: a row holds whole trajectories, at most ``pack_tokens`` tokens; the logits of each are those it has in a row of
its own (attention is block-diagonal and causal; RoPE is relative, so where in the row a trajectory begins does not matter);
which trajectories share a row depends on their order and lengths only.

How the model is told which tokens belong together depends on its layer spec: Megatron's own attention takes a mask
``[1, 1, S, S]`` (quadratic in the row); Transformer Engine's takes THD boundaries (``PackedSeqParams``), and computes
nothing between trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.parallel_layout import device
from orchestrator.api import RunError


def check_fits(name: str, tokens: int, pack_tokens: int | None) -> None:
    """Raise RunError when a trajectory of so many tokens cannot be packed."""
    if pack_tokens is not None and tokens > pack_tokens:
        raise RunError(f"trajectory {name}: {tokens} tokens, more than trainer.pack_tokens = {pack_tokens}; raise it")


def first_fit_decreasing(indices: Sequence[int], lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Bins of at most ``capacity`` tokens and ``most`` members: the longest first, each into the first bin with room.

    ``lengths[index]`` is in tokens. At most 11/9 of the fewest bins, plus one (Johnson, 1973).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        found = next((place for place, left in enumerate(room) if left >= length and len(bins[place]) < most), None)
        if found is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[found].append(index)
            room[found] -= length
    return bins


def row_boundaries(lengths: Sequence[int], total: int) -> list[int]:
    """Where the trajectories of a row of ``total`` tokens begin and end, 0 first; padding is a last one of its own."""
    ends = list(accumulate(lengths))
    if not ends or min(lengths) < 1 or ends[-1] > total:
        raise ValueError(f"trajectories of {list(lengths)} tokens in a row of {total}")
    return [0, *ends] if ends[-1] == total else [0, *ends, total]


def block_causal_mask(lengths: Sequence[int], total: int) -> Tensor:
    """``[1, 1, total, total]``, True where attention is forbidden: to a later token, or to another trajectory's."""
    edges = row_boundaries(lengths, total)
    owner = torch.repeat_interleave(torch.arange(len(edges) - 1), torch.tensor(edges).diff()).to(device())
    place = torch.arange(total, device=device())
    allowed = (owner[:, None] == owner[None, :]) & (place[:, None] >= place[None, :])
    return ~allowed[None, None]


def packed_seq_params(lengths: Sequence[int], total: int) -> Any:
    """Megatron's THD description of the same row, for Transformer Engine's attention."""
    from megatron.core.packed_seq_params import PackedSeqParams

    edges = row_boundaries(lengths, total)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device())
    longest = max(stop - start for start, stop in pairwise(edges))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def takes_boundaries(model: Any) -> bool:
    """Whether this model's attention takes THD boundaries. Megatron's own does not: it refuses them."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    cores = [module for name, module in model.named_modules() if name.endswith("core_attention")]
    return bool(cores) and not any(isinstance(core, DotProductAttention) for core in cores)


__all__ = [
    "block_causal_mask",
    "check_fits",
    "first_fit_decreasing",
    "packed_seq_params",
    "row_boundaries",
    "takes_boundaries",
]
