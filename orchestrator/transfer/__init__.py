"""Weight transfer: publisher (trainer) -> relay (Mooncake Store) -> subscriber (engine). Full snapshots.

What a reader gets is, bit for bit, what one publisher published under that version, or an error: objects are immutable
and checksummed, every tensor has a digest, and a version exists only once its pointer moved by compare-and-set.

A leaf: numpy, msgpack, xxhash and ``orchestrator.api``; Mooncake lazily; tensors are uint8 arrays, never torch.

    publisher = Publisher(endpoint)              # in the trainer
    publisher.rollback(version)                  # once at each start or resume of a run: a new epoch
    publisher.publish(version, tensors)          # (name, shape, dtype, contiguous uint8 array) in any order

    subscriber = Subscriber(endpoint)            # in an engine
    manifest = subscriber.manifest(subscriber.latest_version())
    for shard, data in subscriber.fetch(manifest): ...
"""

from orchestrator.transfer.endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.errors import CorruptWeightsError, RelayError, VersionTakenError
from orchestrator.transfer.manifest import StoredManifest
from orchestrator.transfer.memory import MemoryMetadata, MemoryRelay
from orchestrator.transfer.mooncake import MooncakeRelay
from orchestrator.transfer.publisher import Publisher
from orchestrator.transfer.sqlite import SqliteMetadata
from orchestrator.transfer.subscriber import Subscriber

__all__ = [
    "CorruptWeightsError",
    "MemoryMetadata",
    "MemoryRelay",
    "MooncakeRelay",
    "Publisher",
    "RelayEndpoint",
    "RelayError",
    "SqliteMetadata",
    "StoredManifest",
    "Subscriber",
    "VersionTakenError",
    "open_metadata",
    "open_relay",
]
