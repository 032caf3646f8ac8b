"""Blocks of KV as bytes: read from and written into one rank's cache, and put together over the ranks of an engine.

A block travels as one row of bytes, the same whatever the engine's parallelism: (layers, parts, KV heads, tokens, bytes of a
token and head), layers and heads of the whole model. Guarantees: what is written is bit for bit what was read; where ranks keep
copies of a KV head (more tensor parallelism than heads) one of them is sent; a row fits only an engine with equal ``facts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankPart:
    """Which part of a row one rank holds. ``parts``: kernel blocks that a block of the scheduler consists of."""

    layers: tuple[str, ...]
    parts: int
    head: int  # its first, of the model's
    heads: int
    total_heads: int
    tokens: int  # of a kernel block
    width: int  # bytes of a token and head, keys and values

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of its part of a row."""
        return len(self.layers), self.parts, self.heads, self.tokens, self.width

    @property
    def bytes(self) -> int:
        """Of its part of a row."""
        return int(np.prod(self.shape))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankPart:
        """What :meth:`to_dict` wrote."""
        return cls(**{**values, "layers": tuple(values["layers"])})


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A row of the whole model, and the part of each rank."""

    ranks: tuple[RankPart, ...]
    layers: tuple[str, ...]  # in the order of the ranks' pipeline stages

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankPart]) -> KvLayout:
        """Raises ValueError where the ranks do not make a whole."""
        layers = tuple(dict.fromkeys(name for part in ranks for name in part.layers))
        first = ranks[0]
        for layer in layers:
            heads = {
                head for part in ranks if layer in part.layers for head in range(part.head, part.head + part.heads)
            }
            if heads != set(range(first.total_heads)):
                raise ValueError(f"{layer}: KV heads {sorted(heads)} of {first.total_heads}")
        same = {(part.parts, part.tokens, part.width, part.total_heads) for part in ranks}
        if len(same) != 1:
            raise ValueError(f"the ranks lay KV out differently: {sorted(same)}")
        return cls(tuple(ranks), layers)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of a row: layers, parts, heads, tokens, bytes."""
        part = self.ranks[0]
        return len(self.layers), part.parts, part.total_heads, part.tokens, part.width

    @property
    def block_bytes(self) -> int:
        """Of a row."""
        return int(np.prod(self.shape))

    @property
    def facts(self) -> dict[str, Any]:
        """What two engines must have in common."""
        return {"shape": list(self.shape), "layers": list(self.layers)}

    def _place(self, part: RankPart) -> tuple[slice, slice]:
        first = self.layers.index(part.layers[0])
        return slice(first, first + len(part.layers)), slice(part.head, part.head + part.heads)

    def join_parts(self, parts: Sequence[bytes]) -> Bytes:
        """Rows from what the ranks read, in their order: uint8 of (blocks, ``block_bytes``)."""
        count = len(parts[0]) // self.ranks[0].bytes
        if len(self.ranks) == 1:
            return np.frombuffer(parts[0], np.uint8).reshape(count, self.block_bytes)
        rows = np.empty((count, *self.shape), np.uint8)
        for part, data in zip(self.ranks, parts, strict=True):
            layers, heads = self._place(part)
            rows[:, layers, :, heads] = np.frombuffer(data, np.uint8).reshape(count, *part.shape)
        return rows.reshape(count, self.block_bytes)

    def cut_rows(self, rows: Bytes) -> list[bytes]:
        """What each rank gets of rows."""
        if len(self.ranks) == 1:
            return [rows.tobytes()]
        whole = rows.reshape(len(rows), *self.shape)
        return [
            np.ascontiguousarray(whole[:, layers, :, heads]).tobytes() for layers, heads in map(self._place, self.ranks)
        ]


def owned_heads(total: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(first, how many) KV heads a tensor-parallel rank has, as vLLM cuts them."""
    if total >= tp_size:
        return tp_rank * (total // tp_size), total // tp_size
    return tp_rank * total // tp_size, 1


class RankCache:
    """One rank's KV cache: ``tensors`` are vLLM's views [blocks, heads, tokens, content] by layer."""

    def __init__(self, tensors: Mapping[str, Any], block_size: int) -> None:
        import torch

        self._torch = torch
        self._views = {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}
        shapes = {tuple(view.shape) for view in self._views.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 4:
            raise ValueError(f"KV tensors of shapes {sorted(shapes)}: only layers that are all alike can be moved")
        self.blocks, self.heads, self.tokens, self.width = next(iter(shapes))
        self.parts = block_size // self.tokens
        self.layers = tuple(self._views)

    def _rows(self, blocks: Sequence[int]) -> Any:
        ids = self._torch.tensor(blocks, dtype=self._torch.long)
        if self.parts > 1:
            ids = (ids[:, None] * self.parts + self._torch.arange(self.parts)).reshape(-1)
        return ids.to(next(iter(self._views.values())).device)

    def read(self, blocks: Sequence[int]) -> bytes:
        """Their content: (blocks, layers, parts, heads, tokens, bytes)."""
        torch, ids = self._torch, self._rows(blocks)
        found = torch.stack([view.index_select(0, ids) for view in self._views.values()])
        found = found.reshape(len(self.layers), len(blocks), self.parts, *found.shape[2:]).transpose(0, 1)
        return bytes(found.contiguous().cpu().numpy().tobytes())

    def write(self, blocks: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Put rows, as read, into these blocks."""
        torch, ids = self._torch, self._rows(blocks)
        data = torch.from_numpy(np.stack(rows)).reshape(
            len(blocks), len(self.layers), self.parts, self.heads, self.tokens, self.width
        )
        data = data.to(ids.device)
        for index, view in enumerate(self._views.values()):
            view.index_copy_(0, ids, data[:, index].reshape(-1, self.heads, self.tokens, self.width))
