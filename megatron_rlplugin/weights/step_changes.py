"""Which weights a step changed, found where they are: a difference is published from what changed, and of the weights themselves
nothing passes to the host.

Guarantees: put on what the weights were at :meth:`StepChanges.restart`, what :meth:`StepChanges.take` gives makes them what they
are, bit for bit, whatever the optimizer (values replace, they are never added: differences in bfloat16 do not add up to the
same bits). Each rank looks at what it publishes and no more. On the device there is a copy of that only while the optimizer
steps, when no activations are there; between steps nothing is kept but the changes, in host memory. Only bits are compared, so a
NaN that stays is no change, and 0 that becomes -0 is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import Bytes

Place = tuple[str, int]  # tensor, and where in it a shard begins
Shards = Callable[[], Iterator[tuple[ShardKey, Tensor]]]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = 3  # a shard of which more than one in so many weights changed goes as it is: positions would be longer


def place_of(key: ShardKey) -> Place:
    """Which shard of this rank it is."""
    return key.tensor, key.start


class WeightEdits:
    """What happened to the shards of a rank, in order: (positions, bits of what stands there then)."""

    def __init__(self) -> None:
        self._found: dict[Place, list[tuple[Any, Any]]] = {}

    def add(self, place: Place, positions: Tensor | None, values: Tensor) -> None:
        """``positions``: row-major, int32; ``values``: parallel to them, or (None) all of the shard. They go to the host."""
        bits = values.view(_BITS[values.element_size()]).cpu().numpy()
        self._found.setdefault(place, []).append((... if positions is None else positions.cpu().numpy(), bits))

    def extend(self, later: WeightEdits) -> None:
        """What happened after it."""
        for place, edits in later._found.items():
            self._found.setdefault(place, []).extend(edits)

    def applied(self, place: Place, base: Bytes) -> Bytes:
        """A shard's bytes with them: ``base`` itself where nothing happened, else a copy."""
        return self._put(base.copy(), place) if place in self._found else base

    def apply(self, place: Place, base: Bytes) -> None:
        """The same in place."""
        self._put(base, place)

    def _put(self, base: Bytes, place: Place) -> Bytes:
        for positions, bits in self._found.get(place, ()):
            np.asarray(base).view(bits.dtype)[positions] = bits
        return base


class StepChanges:
    """Watches the optimizer steps of one rank. ``shards``: what it publishes, always cut alike."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._edits = WeightEdits()
        self.known = False  # all that happened since restart() is

    def restart(self) -> None:
        """The present weights are what later changes are changes of."""
        self._edits, self.known = WeightEdits(), True

    def take(self) -> WeightEdits:
        """What happened since the last call, or since :meth:`restart`."""
        found, self._edits = self._edits, WeightEdits()
        return found

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Around everything that changes weights."""
        if not self.known:  # nobody will ask
            yield
            return
        self.known = False
        with torch.no_grad():
            before = [value.clone() for _, value in self.shards()]
        yield
        with torch.no_grad():
            for number, (key, now) in enumerate(self.shards()):
                positions, now = _changed(before[number], now), now.reshape(-1)
                before[number] = now[:0]  # as soon as nobody needs it
                if _WHOLE * len(positions) > len(now):
                    self._edits.add(place_of(key), None, now.clone())
                elif len(positions):
                    self._edits.add(place_of(key), positions.to(torch.int32), now[positions])
        self.known = True


def _changed(old: Tensor, new: Tensor) -> Tensor:
    bits = _BITS[new.element_size()]
    return (old.reshape(-1).view(bits) != new.reshape(-1).view(bits)).nonzero().squeeze(-1)
