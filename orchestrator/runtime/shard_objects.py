"""References of a batch as they cross to the trainer's ranks: to files of this machine, or to objects of Ray between machines.

Guarantees: what is said of a batch is packed beside the event loop; what is long is put into Ray's object store once, so that a
rank's call carries at most :data:`IN_CALL` bytes of it, whatever the batch and however many ranks there are; a shard is put there
once for all ranks and calls, and leaves it when nothing refers to it here any more; a rank fetches the shards that it computes,
and reads them where they lie on its node. What cannot be fetched is a RunError that names the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from orchestrator.api import RunError, TrainSample
from orchestrator.shards.sample_references import SampleReference, pack, unpack
from orchestrator.shards.shard_folder import Shard

IN_CALL = (
    16 << 10
)  # bytes, of some hundred references: through the object store they take three times the processor time


@dataclass(frozen=True, slots=True)
class BatchReferences:
    """``message``: the parts that :func:`orchestrator.shards.sample_references.pack` made, and references to the objects of its
    shards, by path (None: they are files of this machine); where they are long, a reference of Ray's to that."""

    message: Any

    def samples(self) -> tuple[TrainSample, ...]:
        """On the other side. Blocks for Ray's answer. Raises RunError where it has them no more."""
        import ray

        try:
            parts, objects = self.message if isinstance(self.message, tuple) else ray.get(self.message)
        except ray.exceptions.RayError as error:
            raise RunError(f"the references of a batch are lost: {error}") from error
        if objects is None:
            return unpack(parts)
        return unpack(parts, lambda path, size, digest: NodeShard(path, size, digest, objects[path]))


class NodeShard(Shard):
    """A shard in the object store of this node, or of another one that it is then fetched from."""

    __slots__ = ("_object",)

    def __init__(self, path: str, size: int, digest: str, reference: Any) -> None:
        super().__init__(path, size, digest)
        self._object = reference

    def data(self) -> pa.Buffer:
        """See Shard."""
        import ray

        try:
            return pa.py_buffer(ray.get(self._object))
        except ray.exceptions.RayError as error:
            raise OSError(f"Ray cannot fetch it: {error}") from error


class NodeObjects:
    """What of a run's shards is in Ray's object store: nothing, but where the trainer is ``spread`` over machines. Its methods
    block: not on the event loop."""

    def __init__(self, spread: bool) -> None:
        self._spread = spread
        self._references: WeakKeyDictionary[Shard, Any] = WeakKeyDictionary()

    def refer(self, samples: Sequence[TrainSample]) -> BatchReferences | None:
        """Put what is not there yet; None where a sample lies in no shard. Raises RunError where a shard is lost or the object
        store has no room."""
        import ray

        parts = pack(samples)
        if parts is None:
            return None
        objects = {shard.path: self._object(shard) for shard in _shards(samples)} if self._spread else None
        if objects is None and sum(map(len, parts)) <= IN_CALL:
            return BatchReferences((parts, None))
        try:
            return BatchReferences(ray.put((parts, objects)))
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray's object store has no room for the references of a batch: {error}") from error

    def _object(self, shard: Shard) -> Any:
        if shard not in self._references:
            self._references[shard] = self._put(shard)
        return self._references[shard]

    def _put(self, shard: Shard) -> Any:
        import ray

        try:
            return ray.put(np.frombuffer(shard.data(), np.uint8))
        except OSError as error:
            raise RunError(f"shard {shard.path} is lost: {error}") from error
        except ray.exceptions.RayError as error:  # it has waited for room, and spilled what it could
            raise RunError(f"Ray's object store has no room for shard {shard.path}: {error}") from error


def _shards(samples: Sequence[TrainSample]) -> Iterator[Shard]:
    for sample in samples:
        assert isinstance(sample.source, SampleReference)
        yield sample.source.shard
