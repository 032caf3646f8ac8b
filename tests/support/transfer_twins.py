"""What the tests of weight transfer share: ranks as threads, a codec, trainer layouts, a rig of relay and metadata store."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from orchestrator.api import MetadataStore, Relay, ShardKey
from orchestrator.transfer import (
    CorruptWeightsError,
    HostedWeights,
    MemoryMetadata,
    Publisher,
    RelayEndpoint,
    Subscriber,
    shard_routing,
)
from orchestrator.transfer import job_head as heads
from orchestrator.transfer.job_head import update_head
from orchestrator.transfer.publisher import Shard
from tests.support.relay_twin import RelayTwin

ENDPOINT = RelayEndpoint(job="job", kind="memory", master="unused", bucket_bytes=4096)
Weights = dict[str, np.ndarray]  # uint16: bfloat16


class Meeting:
    """Where the ranks of one publisher meet. A rank that dies breaks it for all, as a collective library does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds = 0
        self._barrier = threading.Barrier(size, timeout=20)
        self._given: list[bytes] = [b""] * size

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._given[rank] = data
        self._barrier.wait()
        found = list(self._given)
        if self._barrier.wait() == 0:
            self.rounds += 1
        return found

    def leave(self) -> None:
        self._barrier.abort()


class Rank:
    """Implements :class:`orchestrator.transfer.PublishingRanks`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, data: bytes) -> list[bytes]:
        return self.meeting.exchange(self.rank, data)

    def broadcast(self, data: bytes) -> bytes:
        return self.meeting.exchange(self.rank, data)[0]


class XorCodec:
    """A codec that is easy to see through: zlib over the exclusive or with the base."""

    def encode(self, old: np.ndarray | None, new: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
        if old is None:
            return "raw", new
        return "toy-xor", np.frombuffer(zlib.compress((old ^ new).tobytes(), 1), dtype=np.uint8)

    def apply(self, encoding: str, data: np.ndarray, base: np.ndarray) -> Callable[[], None]:
        if encoding != "toy-xor":
            raise CorruptWeightsError("format", f"no such encoding {encoding}")
        difference = np.frombuffer(zlib.decompressobj().decompress(data.tobytes(), base.nbytes), dtype=np.uint8)
        if difference.nbytes != base.nbytes:
            raise CorruptWeightsError("layout", "a change of another shard")
        np.bitwise_xor(base, difference, out=base)

        def undo() -> None:
            np.bitwise_xor(base, difference, out=base)

        return undo


SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (64, 32), "q": (96, 32), "o": (32, 96), "norm": (32,), "gate": (128, 32)
}  # fmt: skip


def weights(seed: int, shapes: dict[str, tuple[int, ...]] | None = None) -> Weights:
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in (shapes or SHAPES).items()}


def stepped(before: Weights, seed: int, tensors: Sequence[str] | None = None) -> Weights:
    """A few values of some tensors changed, as an optimizer step does."""
    generator = np.random.default_rng(seed)
    after = {name: values.copy() for name, values in before.items()}
    for name in tensors if tensors is not None else after:
        flat = after[name].reshape(-1)
        flat[generator.integers(0, flat.size, max(1, flat.size // 100))] ^= 1
    return after


def cut(model: Weights, ranks: int, parts: int = 2) -> list[list[ShardKey]]:
    """What each rank publishes: every tensor in ``parts`` along one dimension, dealt in turn."""
    dealt: list[list[ShardKey]] = [[] for _ in range(ranks)]
    number = 0
    for name, values in model.items():
        dim = 1 if name == "o" else 0
        bounds = [values.shape[dim] * part // parts for part in range(parts + 1)]
        for start, stop in pairwise(bounds):
            dealt[number % ranks].append(ShardKey(name, dim, start, stop, values.shape, "bfloat16", "raw", 0))
            number += 1
    return dealt


def bytes_of(model: Weights, key: ShardKey) -> np.ndarray:
    box = tuple(slice(*bounds) for bounds in shard_routing.box_of(key))
    return np.ascontiguousarray(model[key.tensor][box]).reshape(-1).view(np.uint8)


def shards(keys: Sequence[ShardKey], new: Weights, old: Weights | None = None) -> list[Shard]:
    return [(key, bytes_of(new, key), None if old is None else bytes_of(old, key)) for key in keys]


class Rig:
    """One relay, one metadata store, one publisher of one or several ranks."""

    def __init__(self, ranks: int = 1, *, capacity: int | None = None, parts: int = 2, **endpoint: Any) -> None:
        self.endpoint = replace(ENDPOINT, **endpoint)
        self.relay, self.metadata = RelayTwin(capacity), MemoryMetadata()
        self.now = 0.0
        self.parts = parts
        self.publishers = self.open(ranks)
        self.model: dict[int, Weights] = {}

    def open(self, ranks: int, relay: Relay | None = None, metadata: MetadataStore | None = None) -> list[Publisher]:
        meeting = Meeting(ranks)
        return [
            Publisher(
                self.endpoint,
                relay or self.relay,
                metadata or self.metadata,
                ranks=Rank(meeting, rank) if ranks > 1 else None,
                codec=XorCodec(),
                timer=lambda: self.now,
            )
            for rank in range(ranks)
        ]

    def together(self, action: Callable[[Publisher, int], Any]) -> list[Any]:
        """On all ranks at once; what each answers or raises."""

        def one(rank: int) -> Any:
            try:
                return action(self.publishers[rank], rank)
            except BaseException as error:  # noqa: BLE001  the tests look at it
                if isinstance(error, SystemExit):
                    self.publishers[rank]._ranks.meeting.leave()  # type: ignore[attr-defined]
                return error

        with ThreadPoolExecutor(len(self.publishers)) as pool:
            return list(pool.map(one, range(len(self.publishers))))

    def publish(self, version: int, model: Weights, base: int = heads.FULL) -> list[Any]:
        """On all ranks; raises the first error."""
        dealt = cut(model, len(self.publishers), self.parts)
        old = self.model.get(base)
        found = self.together(lambda one, rank: one.publish_shards(version, shards(dealt[rank], model, old), base))
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        self.model[version] = model
        return found

    def subscriber(self, name: str = "") -> Subscriber:
        return Subscriber(self.endpoint, self.relay.handle(), self.metadata, codec=XorCodec(), name=name)

    def resident(self, regions: list[shard_routing.Region] | None = None, name: str = "") -> HostedWeights:
        return HostedWeights(self.subscriber(name), regions, XorCodec())

    def head(self) -> heads.JobHead:
        return update_head(self.metadata, self.endpoint.job, lambda head: head)

    def versions(self) -> list[tuple[int, str]]:
        """(version, kind) of which objects are on the relay."""
        found = {tuple(key.split("/")[3:5]) for key in self.relay.keys()}  # noqa: SIM118
        return sorted((int(version), kind) for version, kind in found)


def whole(model: Weights) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in model.items()}


def read(resident: HostedWeights, model: Weights) -> dict[str, bytes]:
    """Everything that it holds."""
    return {
        name: resident.region(shard_routing.Region(name, shard_routing.whole_box(values.shape))).tobytes()
        for name, values in model.items()
    }
