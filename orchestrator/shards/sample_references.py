"""What crosses to the trainer's ranks of a batch: for each sample where it lies, and what a rank decides by before it reads.

Guarantees: a reference is some 150 bytes whatever its trajectory's length; parts of at most :data:`PART` bytes (a single
reference with very many versions apart); nothing is unpickled; a rank reads the samples that it computes, in place, and compares
each shard with its digest. What was packed and unpacked is equal to the sample that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import msgpack
import numpy as np

from orchestrator.api import RoutedExperts, SampleFacts, TrainSample, Trajectory
from orchestrator.shards.shard_folder import Shard, shard_of
from orchestrator.shards.trajectory_shard import Numbers

PART = 48 << 10  # bytes


@dataclass(frozen=True, slots=True)
class SampleReference:
    """Turns of a shard, one context: a :class:`orchestrator.api.SampleSource`."""

    shard: Shard
    first_turn: int
    end_turn: int
    facts: SampleFacts

    def read(self) -> tuple[Numbers, Numbers, Numbers]:
        """See the protocol."""
        return self.shard.open().context(self.first_turn, self.end_turn)

    def experts(self) -> tuple[RoutedExperts, ...]:
        """See the protocol."""
        return self.shard.open().experts(self.first_turn, self.end_turn)


@dataclass(frozen=True, slots=True, eq=False)
class UnreadColumn(Sequence[Any]):
    """``token_ids``, ``loss_mask`` or ``logprobs`` of a sample, read when somebody looks at one; its length is known."""

    source: SampleReference
    name: str

    def __len__(self) -> int:
        return self.source.facts.tokens

    @overload
    def __getitem__(self, key: int) -> Any: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...

    def __getitem__(self, key: int | slice) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UnreadColumn):
            return (self.name, self.source) == (other.name, other.source)
        return self._read() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, self.source))

    def _read(self) -> tuple[Any, ...]:
        token_ids, positions, logprobs = self.source.read()
        if self.name == "token_ids":
            return tuple(token_ids.tolist())
        values = np.zeros(len(token_ids), np.int64 if self.name == "loss_mask" else np.float64)
        values[positions] = 1 if self.name == "loss_mask" else logprobs
        return tuple(values.tolist())


def referenced_samples(trajectory: Trajectory, reward: float, weight: float) -> list[TrainSample] | None:
    """A finished trajectory's samples, one for each context; None: it has no shard."""
    shard = shard_of(trajectory)
    if shard is None:
        return None
    return [
        _sample(
            trajectory.id,
            trajectory.group_id,
            SampleReference(shard, context.first_turn, context.end_turn, context.facts),
            context.versions,
            reward,
            weight,
        )
        for context in shard.contexts
    ]


def pack(samples: Sequence[TrainSample]) -> list[bytes] | None:
    """References as msgpack, in parts; None where a sample is in memory, and has to go by value."""
    parts: list[bytes] = []
    part = bytearray()
    for sample in samples:
        source = sample.source
        if not isinstance(source, SampleReference):
            return None
        facts, shard = source.facts, source.shard
        record = (
            *(sample.trajectory_id, sample.group_id, sample.versions, sample.reward, sample.weight),
            *(shard.path, shard.size, shard.digest, source.first_turn, source.end_turn),
            *(facts.tokens, facts.generated, facts.least, facts.most, facts.finite, facts.prompted),
        )
        packed = msgpack.packb(record)
        if part and len(part) + len(packed) > PART:
            parts.append(bytes(part))
            part.clear()
        part += packed
    return [*parts, bytes(part)] if part else parts


def unpack(parts: Sequence[bytes], shard: Callable[[str, int, str], Shard] = Shard) -> tuple[TrainSample, ...]:
    """What was packed. ``shard(path, size, digest)``: how this process reaches one."""
    samples = []
    for part in parts:
        records = msgpack.Unpacker()
        records.feed(part)
        for record in records:
            name, group, spans, reward, weight, path, size, digest, first, end, *facts = record
            source = SampleReference(shard(path, size, digest), first, end, SampleFacts(*facts))
            versions = tuple((version, number) for version, number in spans)
            samples.append(_sample(name, group, source, versions, reward, weight))
    return tuple(samples)


def _sample(
    name: str, group: str, source: SampleReference, versions: tuple[tuple[int, int], ...], reward: float, weight: float
) -> TrainSample:
    token_ids, loss_mask, logprobs = (
        cast("tuple[Any, ...]", UnreadColumn(source, column)) for column in ("token_ids", "loss_mask", "logprobs")
    )
    return TrainSample(name, group, token_ids, loss_mask, logprobs, versions, reward, source.first_turn, weight, source)
