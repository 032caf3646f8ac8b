"""The weights that an engine serves, as this rank's part of them: (where it belongs, values), without gathering anything.

Guarantees: over all ranks every element of every Hugging Face tensor comes exactly once. Ranks that hold the same values
(data-parallel replicas; tensor-parallel ones for norms and the router; expert-data-parallel ones for experts) divide them
among themselves by bytes, each alone with the same result: nothing is communicated. Nothing of the model is gathered or
copied as a whole: what is alive beside the model at any time is at most one bucket and one piece (q, k and v are cut out of
a fused parameter; what needs no cast and no cutting is a view of the weights).

A yielded tensor is valid until the next optimizer step, and must not be written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import DTYPES
from megatron_rlplugin.weights.tensor_places import TensorPiece, tensor_pieces
from orchestrator.api import ConfigError, ShardKey

BUCKET_BYTES = 64 << 20  # as the relay's own default
ENCODING = "raw"


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A range of a piece along one dimension, in Hugging Face coordinates; at most a bucket, or one row that is larger."""

    piece: int  # its number on this rank
    dim: int  # -1: all of the tensor
    start: int
    stop: int
    bytes: int


def serving_shards(
    chunks: Sequence[Any], dtype: str | None = "bfloat16", *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[ShardKey, Tensor]]:
    """(key, contiguous tensor on the model's device) of what this rank exports, in the model's order.

    ``chunks``: this rank's model chunks. ``dtype`` None: each weight in the dtype that the model has it in, so that nothing
    is cast (a router may be float32 in a bfloat16 model); the bias of a router never is. ``bucket_bytes``: parts are at most
    this large, and ``ShardKey.bucket`` numbers the buckets of this rank that they fill, from 0. Parts of an unchanged model
    are the same in every call.
    """
    for _, cuts in groupby(_cuts(chunks, dtype, bucket_bytes), key=lambda cut: cut[1].piece):
        value: Tensor | None = None
        for piece, part, key in cuts:
            if value is None:
                value = piece.read()
            yield key, _cut(value, piece, part).to(getattr(torch, key.dtype)).contiguous()
        del value  # not alive while the next piece is read


def serving_keys(
    chunks: Sequence[Any], dtype: str | None = "bfloat16", *, bucket_bytes: int = BUCKET_BYTES
) -> list[ShardKey]:
    """The keys of :func:`serving_shards`, in its order. Nothing of the weights is read."""
    return [key for _, _, key in _cuts(chunks, dtype, bucket_bytes)]


def serving_bytes(chunks: Sequence[Any], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Of what :func:`serving_shards` gives in the model's own dtypes. Nothing of the weights is read."""
    return sum(part.bytes for _, part, _ in _cuts(chunks, None, bucket_bytes))


def _cuts(
    chunks: Sequence[Any], dtype: str | None, bucket_bytes: int
) -> Iterator[tuple[TensorPiece, ShardPart, ShardKey]]:
    mine = list(tensor_pieces(chunks))
    dtypes = [piece.parameter.dtype if dtype is None or piece.keeps_dtype else _dtype(dtype) for piece in mine]
    bucket = filled = 0
    for part in own_parts(mine, [wanted.itemsize for wanted in dtypes], bucket_bytes):
        piece, named = mine[part.piece], str(dtypes[part.piece]).removeprefix("torch.")
        if filled and filled + part.bytes > bucket_bytes:
            bucket, filled = bucket + 1, 0
        filled += part.bytes
        yield piece, part, ShardKey(piece.name, part.dim, part.start, part.stop, piece.shape, named, ENCODING, bucket)


def converted_shards(
    converter: Any, chunks: Sequence[Any], rank: int, size: int, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[ShardKey, Tensor]]:
    """As :func:`serving_shards`, of a model whose Hugging Face tensors somebody else's converter makes: one with
    Megatron-Bridge's ``export_hf_weights(model, cpu=, show_progress=)``, which gathers each tensor on every rank, as
    (name, tensor). This rank, of ``size``, gives every ``size``-th of them; it takes all, since gathering is collective."""
    bucket = filled = 0
    for index, (name, value) in enumerate(converter.export_hf_weights(list(chunks), cpu=False, show_progress=False)):
        if index % size != rank:
            continue
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        rows = max(bucket_bytes // max(value[:1].nbytes, 1), 1) if value.dim() else 1
        whole = not value.dim() or rows >= shape[0]
        for start in [0] if whole else range(0, shape[0], rows):
            part = value if whole else value[start : start + rows]
            if filled and filled + part.nbytes > bucket_bytes:
                bucket, filled = bucket + 1, 0
            filled += part.nbytes
            dim, first, last = (-1, 0, 0) if whole else (0, start, start + len(part))
            yield ShardKey(name, dim, first, last, shape, dtype, ENCODING, bucket), part.detach().contiguous()


def own_parts(mine: Sequence[TensorPiece], itemsize: int | Sequence[int], bucket_bytes: int) -> list[ShardPart]:
    """What of these pieces this rank exports, in their order. A pure function. ``itemsize``: of all, or of each.

    Ranks that hold the same pieces list them in the same order, so each finds the same division: largest part first, to
    whoever has least (of equals the first).
    """
    if bucket_bytes < 1:
        raise ConfigError("bucket_bytes", bucket_bytes, "must be at least 1")
    holders: dict[tuple[bool, tuple[str, ...]], list[ShardPart]] = {}  # those that share a piece share these
    places: dict[tuple[bool, tuple[str, ...]], tuple[int, int]] = {}
    sizes = [itemsize] * len(mine) if isinstance(itemsize, int) else itemsize
    for number, (piece, size) in enumerate(zip(mine, sizes, strict=True)):
        parts = _parts(number, piece, size, bucket_bytes)
        kind = piece.expert, piece.replicated
        holders.setdefault(kind, []).extend(parts)
        places[kind] = piece.holder
    own: list[ShardPart] = []
    for kind, parts in holders.items():
        rank, size = places[kind]
        loads = [0] * size
        for part in sorted(parts, key=lambda part: -part.bytes):  # stable: the model's order decides between equals
            owner = loads.index(min(loads))
            loads[owner] += part.bytes
            if owner == rank:
                own.append(part)
    return sorted(own, key=lambda part: (part.piece, part.start))


def as_bytes(tensor: Tensor) -> tuple[tuple[int, ...], str, Any]:
    """(shape, dtype, its bytes as a contiguous uint8 array of the host), which is what the relay's publisher takes."""
    data = tensor.detach().cpu().contiguous()
    if data.data_ptr() == tensor.data_ptr():
        data = data.clone()  # numpy would hold the weight's own memory for ever, so that it could not leave the device
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return tuple(data.shape), str(data.dtype).removeprefix("torch."), raw


def _parts(number: int, piece: TensorPiece, itemsize: int, bucket_bytes: int) -> list[ShardPart]:
    dim = max(piece.dim, 0)
    row_bytes = itemsize * math.prod(size for index, size in enumerate(piece.shape) if index != dim)
    rows = max(bucket_bytes // max(row_bytes, 1), 1)
    if piece.dim < 0 and rows >= piece.stop:
        return [ShardPart(number, -1, 0, 0, row_bytes * piece.stop)]
    return [
        ShardPart(
            number, dim, start, min(start + rows, piece.stop), row_bytes * (min(start + rows, piece.stop) - start)
        )
        for start in range(piece.start, piece.stop, rows)
    ]


def _cut(value: Tensor, piece: TensorPiece, part: ShardPart) -> Tensor:
    if part.dim < 0:
        return value
    return value.narrow(part.dim, part.start - piece.start, part.stop - part.start)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError("dtype", name, f"must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
