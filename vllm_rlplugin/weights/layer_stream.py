"""A version that is read from the relay while it is loaded, layer by layer: for models whose loader does more than copies of
views (experts, MLA, towers of vision), which vLLM's own layerwise reload takes.

Guarantees: no more of a version is on the host than one layer, as published; a tensor is handed out when all of its layer is
there and verified; layers come in the order in which the model has them, so that vLLM has one of them in the making.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from orchestrator.transfer import Region
from vllm_rlplugin.weights.rank_votes import LoadVotes

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")  # "model.layers.7" of "model.layers.7.mlp.experts.3.up_proj.weight"
Tensors = list[tuple[str, torch.Tensor]]


class LayerStream:
    """``read``: all tensors of one layer, verified; raises CoserveError."""

    def __init__(self, layers: Sequence[Sequence[Region]], read: Callable[[Sequence[Region]], Tensors]) -> None:
        self._layers = layers
        self._read = read

    @property
    def tensors(self) -> int:
        """How many there are."""
        return sum(map(len, self._layers))

    def read_tensors(self, votes: LoadVotes | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Each with its checkpoint name; its memory is free when whoever takes it lets go of it. Votes once for each layer."""
        votes = votes or LoadVotes()
        for layer in self._layers:
            return_freed()
            try:
                found = self._read(layer)[::-1]
            except Exception as error:  # other ranks must hear of it
                votes.cast(error)
                raise
            votes.cast()
            while found:
                yield found.pop()


def return_freed() -> None:
    """Freed memory of this process goes back to the system. glibc keeps it, per thread and in pieces: layers that come one after
    the other would take the room of several."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """None: another C library."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def split_layers(regions: Sequence[Region]) -> list[list[Region]]:
    """By the numbered module that they belong to; what belongs to none (embedding, head, a norm) is one by itself."""
    layers: dict[str, list[Region]] = {}
    for region in regions:
        numbered = _NUMBERED.match(region.tensor)
        layers.setdefault(numbered.group() if numbered else region.tensor, []).append(region)
    return list(layers.values())
