"""Weight transfer: publisher (trainer) -> relay (Mooncake Store, file system) -> subscriber (engine).

Full snapshots and differences to the version before; many ranks write one version, and every reader takes its part.

What a reader gets is, bit for bit, what one publisher published under that version, or an error: objects are immutable
and checksummed, every shard has a digest, and a version exists only once its pointer moved by compare-and-set.

A leaf: numpy, msgpack, xxhash and ``orchestrator.api``; Mooncake lazily; tensors are uint8 arrays, never torch.

    publisher = Publisher(endpoint)              # in the trainer
    publisher.rollback(version)                  # once at each start or resume of a run: a new epoch
    publisher.publish(version, tensors)          # (name, shape, dtype, contiguous uint8 array) in any order

    publisher = Publisher(endpoint, ranks=ranks, codec=DeltaCodec())    # one in every rank, each with its own shards
    plan = publisher.plan_next(SnapshotPolicy())
    publisher.publish_shards(version, shards, plan.base)         # (ShardKey, bytes now, bytes in the base or None)

    subscriber = Subscriber(endpoint)            # in an engine
    manifest = subscriber.manifest(subscriber.latest_version())
    for shard, data in subscriber.fetch(manifest): ...
    for region, data in subscriber.fetch_regions(manifest, regions): ...    # only what this rank hosts

    hosted = HostedWeights(subscriber, regions, codec)          # or: kept on the host, moved on by differences
    hosted.advance(version)
"""

from orchestrator.transfer.hosted_weights import HostedWeights
from orchestrator.transfer.manifest import StoredManifest
from orchestrator.transfer.memory_relay import MemoryMetadata, MemoryRelay
from orchestrator.transfer.mooncake_relay import MooncakeRelay
from orchestrator.transfer.publisher import Publisher, PublishingRanks, PublishPlan, Shard
from orchestrator.transfer.relay_endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.retention import SnapshotPolicy
from orchestrator.transfer.shard_codec import DeltaCodec, ShardCodec
from orchestrator.transfer.shard_routing import Region
from orchestrator.transfer.sqlite_metadata import SqliteMetadata
from orchestrator.transfer.subscriber import Subscriber
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError, VersionTakenError

__all__ = [
    "CorruptWeightsError",
    "DeltaCodec",
    "HostedWeights",
    "MemoryMetadata",
    "MemoryRelay",
    "MooncakeRelay",
    "PublishPlan",
    "Publisher",
    "PublishingRanks",
    "Region",
    "RelayEndpoint",
    "RelayError",
    "Shard",
    "ShardCodec",
    "SnapshotPolicy",
    "SqliteMetadata",
    "StoredManifest",
    "Subscriber",
    "VersionTakenError",
    "open_metadata",
    "open_relay",
]
