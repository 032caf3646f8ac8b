"""The real codec in the protocol: chains of compressed differences end in the published bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError, ShardKey
from orchestrator.transfer import CorruptWeightsError, HostedWeights, Publisher, Subscriber, shard_codec, shard_routing
from orchestrator.transfer.shard_codec import DeltaCodec
from orchestrator.transfer.shard_routing import Region
from tests.support import transfer_twins as twins

SHAPES = {"embed": (256, 64), "o": (64, 512), "norm": (64,)}


class Float(twins.Rig):  # type: ignore[misc,name-defined]
    """The rig with the real codec."""

    def __init__(self, codec: DeltaCodec) -> None:
        super().__init__(keep_versions=3)
        self.codec = codec
        self.publishers = [Publisher(self.endpoint, self.relay, self.metadata, codec=codec)]

    def resident(self, regions: Any = None, name: str = "") -> HostedWeights:
        subscriber = Subscriber(self.endpoint, self.relay.handle(), self.metadata, codec=self.codec)
        return HostedWeights(subscriber, regions, self.codec)


@pytest.mark.parametrize("compress_full", [False, True])
def test_compressed_chains_end_in_the_published_bits(compress_full: bool) -> None:
    rig = Float(DeltaCodec(compress_full=compress_full))
    weights = {name: (values >> 6 << 2) for name, values in twins.weights(0, SHAPES).items()}
    rig.publish(0, weights)
    resident, part = rig.resident(), rig.resident([Region("o", ((8, 16), (0, 256)))])
    for one in (resident, part):
        one.advance(0)
    full = resident.fetched_bytes
    assert (full < sum(values.nbytes for values in weights.values())) == compress_full
    for version in range(1, 5):
        rig.publish(version, twins.stepped(rig.model[version - 1], version), version - 1)
        for one in (resident, part):
            one.advance(version)
        assert twins.read(resident, weights) == twins.whole(rig.model[version])
        assert np.array_equal(
            part.region(Region("o", ((8, 16), (0, 256)))).view(np.uint16),
            rig.model[version]["o"][8:16, :256].reshape(-1),
        )
        assert 0 < resident.fetched_bytes < full / 10
    assert {key.encoding for key in rig.resident()._subscriber.manifest(4).shards} >= {"delta-sparse"}


def test_float32_routers_and_dense_changes_travel_too() -> None:
    rig, generator = Float(DeltaCodec()), np.random.default_rng(0)
    key = ShardKey("router", -1, 0, 0, (8, 64), "float32", "raw", 0)
    first = generator.normal(size=(8, 64)).astype(np.float32)
    values = [first, first * np.float32(1.0001), generator.normal(size=(8, 64)).astype(np.float32)]
    resident, old = rig.resident(), None
    for version, value in enumerate(values):
        new = value.reshape(-1).view(np.uint8)
        rig.publishers[0].publish_shards(version, [(key, new, old)], version - 1)
        resident.advance(version)
        assert np.array_equal(resident.region(Region("router", shard_routing.whole_box((8, 64)))), new)
        old = new


def test_a_change_of_another_shard_or_encoding_is_refused_and_the_base_stays() -> None:
    codec = DeltaCodec()
    old = np.arange(4000, dtype=np.uint16)
    new = old.copy()
    new[::100] += 1
    encoding, data = codec.encode(old.view(np.uint8), new.view(np.uint8), "bfloat16")
    base = old.copy().view(np.uint8)
    for other, where in (("delta-xor", base), (encoding, base[:-2]), (encoding, base[:-1])):
        with pytest.raises(CorruptWeightsError):
            codec.apply(other, data, where)
        assert np.array_equal(base, old.view(np.uint8))
    undo = codec.apply(encoding, data, base)
    assert np.array_equal(base, new.view(np.uint8))
    undo()
    assert np.array_equal(base, old.view(np.uint8))
    with pytest.raises(ConfigError, match="threads"):
        DeltaCodec(threads=0)


def test_a_change_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.transfer.delta import delta_codec as work
    from orchestrator.transfer.delta import delta_format as wire

    opened = []

    def counted(data: np.ndarray) -> Any:
        opened.append(data)
        return stock(data)

    stock, codec = wire.open_change, DeltaCodec()
    old = np.arange(4000, dtype=np.uint16)
    encoding, data = codec.encode(old.view(np.uint8), (old + (old % 100 == 0)).view(np.uint8), "bfloat16")
    for module in (wire, shard_codec):
        monkeypatch.setattr(module, "open_change", counted)
    assert work.wire is wire
    codec.apply(encoding, data, old.copy().view(np.uint8))
    assert len(opened) == 1
    assert sum(edit.positions.size for edit in codec.edits(encoding, data, 4000, 2)) == 40
    assert len(opened) == 2
    for elements, width in ((4001, 2), (2000, 4)):
        with pytest.raises(CorruptWeightsError, match="layout"):
            next(codec.edits(encoding, data, elements, width))
    with pytest.raises(CorruptWeightsError, match="encoding"):
        next(codec.edits("dense-raw", data, 4000, 2))
    raw = old.view(np.uint8)
    edits = list(codec.edits("raw", raw, 4000, 2, 10, 20))
    assert [edit.new_values(np.zeros(10, np.uint16)).tolist() for edit in edits] == [list(range(10, 20))]
    with pytest.raises(CorruptWeightsError, match="layout"):
        next(codec.edits("raw", raw, 4001, 2))
