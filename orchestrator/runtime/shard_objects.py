"""References of a batch as they cross to the trainer's ranks: to files of this machine, or to objects of Ray between machines.

Guarantees: a shard is put into Ray's object store once for all ranks and calls, and leaves it when nothing refers to it here any
more; a rank fetches the shards that it computes, and reads them where they lie on its node. What cannot be fetched is a RunError
that names the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from orchestrator.api import RunError, TrainSample
from orchestrator.shards.sample_references import SampleReference, unpack
from orchestrator.shards.shard_folder import Shard


@dataclass(frozen=True, slots=True)
class BatchReferences:
    """``parts``: see :func:`orchestrator.shards.sample_references.pack`. ``objects``: a reference of Ray's to those of its
    shards, by path; None: they are files of this machine."""

    parts: Sequence[bytes]
    objects: Any = None

    def samples(self) -> tuple[TrainSample, ...]:
        """On the other side. Blocks for Ray's answer. Raises RunError where it has them no more."""
        if self.objects is None:
            return unpack(self.parts)
        import ray

        try:
            objects = ray.get(self.objects)
        except ray.exceptions.RayError as error:
            raise RunError(f"the references of a batch are lost: {error}") from error
        return unpack(self.parts, lambda path, size, digest: NodeShard(path, size, digest, objects[path]))


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
    """What of a run's shards is in Ray's object store. Its methods block: not on the event loop."""

    def __init__(self) -> None:
        self._references: WeakKeyDictionary[Shard, Any] = WeakKeyDictionary()

    def refer(self, parts: Sequence[bytes], samples: Sequence[TrainSample]) -> BatchReferences:
        """Put what is not there yet. Raises RunError where a shard is lost or the object store has no room."""
        import ray

        found: dict[str, Any] = {}
        for sample in samples:
            assert isinstance(sample.source, SampleReference)
            shard = sample.source.shard
            if shard not in self._references:
                self._references[shard] = self._put(shard)
            found[shard.path] = self._references[shard]
        try:
            return BatchReferences(parts, ray.put(found))
        except ray.exceptions.RayError as error:
            raise RunError(f"the references of a batch find no room in Ray's object store: {error}") from error

    def _put(self, shard: Shard) -> Any:
        import ray

        try:
            return ray.put(np.frombuffer(shard.data(), np.uint8))
        except OSError as error:
            raise RunError(f"shard {shard.path} is lost: {error}") from error
        except ray.exceptions.RayError as error:  # it has waited for room, and spilled what it could
            raise RunError(f"shard {shard.path} finds no room in Ray's object store: {error}") from error
