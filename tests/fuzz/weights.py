"""Whatever arrives as weights, KV or a shared record: the same result, or the one documented error; never anything else."""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import strategies as st

from orchestrator.api import ConfigError, CoserveError, RunError, ShardKey
from orchestrator.policies.placement.device_allocation import AllocationView, DeviceBinding, DevicePool, DeviceWish
from orchestrator.resources.resource_manager import decode_view, encode_view
from orchestrator.transfer import (
    CorruptWeightsError,
    MemoryRelay,
    RelayEndpoint,
    announcement,
    fetch_times,
    kv_wire,
    proven_link,
    publisher,
    version_leases,
)
from orchestrator.transfer import bucket as wire
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import manifest as manifests
from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta import delta_format as delta_format
from orchestrator.transfer.delta.native_codec import native
from orchestrator.transfer.delta.reference_codec import NumpyCodec
from orchestrator.transfer.retention import VersionHolder
from orchestrator.transfer.shard_codec import DeltaCodec
from orchestrator.transfer.site_cache import SiteCache
from tests.fuzz import inputs
from tests.fuzz.harness import Check, Drawn, harness, merged

NAME = wire.BucketName("job", 3, 7, "full", 0, 2)
TENSORS = {f"layers.{index}.weight": np.arange(size, dtype=np.uint8) for index, size in enumerate((10, 0, 200, 64, 7))}


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def packed(tree: Any) -> bytes | None:
    """As msgpack; None: it cannot be written so."""
    try:
        made: bytes = msgpack.packb(tree)
    except (ValueError, TypeError, OverflowError):
        return None
    return made


HOSTILE = (
    b"", b"\xc1", b"\x91" * inputs.DEEP, b"\x81\xa1x" * inputs.DEEP, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\xa1x",
    b"\xc6\xff\xff\xff\xff", b"\x81\x91\x00\x00", b"\x80", b"\x90", b"\xc0", b"\xd6\xff\xff\xff\xff\xff", b"\xa1\xff",
    b"\xc7\x0c\xff" + b"\xff" * 12, msgpack.packb({"format": 2}), msgpack.packb({"format": 99, "shards": []}),
)  # fmt: skip


def messages(valid: bytes) -> st.SearchStrategy[bytes]:
    """Of a valid msgpack record: altered as a tree, damaged as bytes, hostile."""
    tree = msgpack.unpackb(valid)
    return st.one_of(
        inputs.altered(tree).map(packed).filter(lambda data: data is not None),
        inputs.damaged(valid),
        st.sampled_from(HOSTILE),
    )


# -- buckets -------------------------------------------------------------------------------------------------------------


def valid_bucket() -> bytes:
    writer = wire.BucketWriter(np.zeros(4096, np.uint8))
    for name, data in TENSORS.items():
        writer.add(name, data)
    return bytes(writer.seal(NAME))


def opened(data: bytes) -> list[tuple[str, bytes]] | None:
    def parse() -> list[tuple[str, bytes]]:
        return [(entry.tensor, view.tobytes()) for entry, view in wire.open_bucket(array(data), NAME)]

    found: list[tuple[str, bytes]] | None = inputs.survives(parse, CorruptWeightsError)
    return found


@harness("orchestrator/transfer/bucket.py", refuses="CorruptWeightsError")
def bucket(folder: Path) -> Drawn:
    """What comes out of a damaged bucket is the same bucket, or nothing."""
    whole = valid_bucket()
    same = [(name, data.tobytes()) for name, data in TENSORS.items()]
    assert opened(whole) == same
    # The checksum covers all but itself, so that nothing but the very bucket may pass.
    yield inputs.damaged(whole), lambda data: _same_or(opened(data), same, data == whole)


def _same_or(found: Any, same: Any, must: bool) -> None:
    assert found in (None, same)
    assert found is not None or not must


@harness("orchestrator/transfer/bucket.py", refuses="CorruptWeightsError")
def sealed_bucket(folder: Path) -> Drawn:
    """A bucket whose checksum a forger made to fit is read within its bounds, or refused."""
    whole = valid_bucket()
    prefix = struct.unpack_from("<8sQQQ", whole)
    body, directory = whole[64 : 64 + prefix[2]], whole[64 + prefix[2] :]

    def sealed(parts: tuple[bytes, bytes, int]) -> bytes:
        told = struct.pack("<QQ32x", (len(parts[0]) + parts[2]) % (1 << 64), len(parts[1])) + parts[0] + parts[1]
        return wire.MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(told)) + told

    def check(data: bytes) -> None:
        for name, tensor in opened(data) or ():
            assert isinstance(name, str)
            assert len(tensor) <= len(data)

    lengths = st.sampled_from((0, 0, 0, 1, -1, 64, 1 << 40, (1 << 63) - 1))
    drawn = st.tuples(st.just(body), messages(directory), lengths).map(sealed)
    yield drawn, check


# -- manifests, the head record, leases, announcements, shares, what ranks say ---------------------------------------------


def valid_manifest() -> manifests.StoredManifest:
    shards = tuple(
        ShardKey(f"layers.{index}", 0, 8 * part, 8 * part + 8, (16, 4), "bfloat16", "raw", 0)
        for index in range(3)
        for part in range(2)
    )
    pieces = tuple(manifests.StoredShard(64 * place, 64, place + 5, place + 5) for place in range(len(shards)))
    return manifests.StoredManifest(7, -1, shards, 6 * 64, "", "job", 3, 0, (64 + 6 * 64 + 600,), pieces)


def read_manifest(data: bytes, checksum: int) -> manifests.StoredManifest | None:
    found: manifests.StoredManifest | None = inputs.survives(
        lambda: manifests.decode_manifest(memoryview(data), checksum, "job", 3, 7, 0), CorruptWeightsError
    )
    return found


@harness("orchestrator/transfer/manifest.py", refuses="CorruptWeightsError")
def manifest(folder: Path) -> Drawn:
    """What comes out of a damaged manifest is the same manifest, or nothing."""
    whole = manifests.encode_manifest(valid_manifest())
    checksum = manifests.manifest_checksum(whole)
    same = read_manifest(whole, checksum)
    assert same is not None
    yield inputs.damaged(whole), lambda data: _same_or(read_manifest(data, checksum), same, data == whole)


@harness("orchestrator/transfer/manifest.py", refuses="CorruptWeightsError")
def sealed_manifest(folder: Path) -> Drawn:
    """A manifest whose checksum fits is written and read back the same, its pieces inside their buckets; or refused."""

    def check(payload: bytes) -> None:
        checksum = xxhash.xxh3_64_intdigest(payload)
        found = read_manifest(manifests.MAGIC + struct.pack("<Q", checksum) + payload, checksum)
        if found is not None:  # what is read back says of itself what it says
            again = manifests.encode_manifest(found)
            assert read_manifest(again, manifests.manifest_checksum(again)) == found.__class__(
                *[
                    getattr(found, name) if name != "checksum" else f"{manifests.manifest_checksum(again):016x}"
                    for name in found.__dataclass_fields__
                ]
            )
            assert all(piece.offset + piece.length <= found.buckets[key.bucket] for key, piece in _pairs(found))

    yield messages(manifests.encode_manifest(valid_manifest())[16:]), check


def _pairs(found: manifests.StoredManifest) -> list[tuple[ShardKey, manifests.StoredShard]]:
    return list(zip(found.shards, found.pieces, strict=True))


def head() -> heads.JobHead:
    done = heads.PublishedVersion(heads.PublishAttempt(3, 7, 0, 64), 900, 77, 4096, 5)
    return heads.JobHead(
        3, 7, 0, (done,), (heads.PublishAttempt(3, 8, 1, 64, 7),), (heads.PublishAttempt(2, 1, 0, 64),), ((8, 2),)
    )


def lease() -> dict[str, version_leases.VersionLease]:
    return {
        "host/1/0": version_leases.VersionLease(3, VersionHolder(7, -1), 4, 600),
        "host/2/0": version_leases.VersionLease(3, VersionHolder(6, 7), 9, 60),
    }


KEYS = tuple(ShardKey(f"t{index}", 0, 0, 8, (8, 2), "float32", "raw", 0) for index in range(3))


def view() -> AllocationView:
    wish = DeviceWish("vllm-0", "H800", 2, "run-1")
    return AllocationView(
        (DevicePool("H800", (0, 1, 2, 3), 4, (3,)),), {"vllm-0": DeviceBinding(wish, "H800", (0, 1), "")}
    )


def share() -> bytes:
    found = valid_manifest()
    return manifests.encode_share(
        manifests.RankShare(dict(enumerate(found.buckets)), list(found.shards), list(found.pieces))
    )


def announced(data: bytes) -> tuple[ShardKey, ...]:
    return announcement.unpack_announcement(struct.pack("<Q", xxhash.xxh3_64_intdigest(data)) + data)


# name -> (valid payload, parser of it, its documented errors)
RECORDS: dict[str, tuple[bytes, Callable[[bytes], Any], tuple[type[Exception], ...]]] = {
    "head record": (heads.encode_head(head()), heads.decode_head, (CorruptWeightsError,)),
    "lease record": (version_leases.encode_leases(lease()), version_leases.decode_leases, (CorruptWeightsError,)),
    "fetch times": (
        fetch_times.encode_fetches({"a": fetch_times.FetchTime(1, 7, True, 12)}),
        fetch_times.decode_fetches,
        (CorruptWeightsError,),
    ),
    "share of a rank": (share(), lambda data: manifests.merge_shares([data]), (CorruptWeightsError,)),
    "announcement": (announcement.pack_announcement(KEYS)[8:], announced, (CorruptWeightsError,)),
    "answer of a rank": (
        publisher.pack_answer([1, "x"]),
        lambda data: publisher.unpack_answer(data, "rank 1"),
        (RunError,),
    ),
    "error of a rank": (
        publisher.pack_error(RunError("no")),
        lambda data: publisher.unpack_answer(data, "rank 1"),
        (CoserveError,),
    ),
    "resources": (encode_view(view()), decode_view, (RunError,)),
}


@harness(
    "orchestrator/transfer/job_head.py",
    "orchestrator/transfer/version_leases.py",
    "orchestrator/transfer/fetch_times.py",
    "orchestrator/transfer/manifest.py",
    "orchestrator/transfer/announcement.py",
    "orchestrator/transfer/publisher.py",
    "orchestrator/resources/resource_manager.py",
    refuses="CorruptWeightsError, RunError",
)
def shared_record(folder: Path) -> Drawn:
    """A record that processes share (head, leases, shares, announcements, answers of ranks, resources) is read, or refused."""
    yield merged({name: _shared_record(name) for name in RECORDS})


def _shared_record(name: str) -> tuple[st.SearchStrategy[Any], Check]:
    valid, parse, documented = RECORDS[name]
    if name != "error of a rank":
        assert parse(valid) is not None
    return messages(valid), lambda data: inputs.survives(lambda: parse(data), *documented)


@harness("orchestrator/transfer/announcement.py", refuses="CorruptWeightsError")
def sending(folder: Path) -> Drawn:
    """A part of a sending that is taken is the one that was sent."""
    opening, spoken = announcement.pack_opening(7, b"x" * 100), announcement.pack_announcement(KEYS)
    closing = announcement.pack_digests([1, 2, 3])

    def check(data: bytes) -> None:
        if len(data) == announcement.OPENING_BYTES:
            found = inputs.survives(lambda: announcement.unpack_opening(data, 7), CorruptWeightsError)
            assert found is None or 8 < found <= manifests.MAX_MANIFEST_BYTES
        found = inputs.survives(lambda: announcement.unpack_announcement(data), CorruptWeightsError)
        assert found is None or data == spoken
        done = inputs.survives(lambda: announcement.check_digests(data, KEYS, [1, 2, 3]) or True, CorruptWeightsError)
        assert done is None or data == closing

    pieces = [inputs.damaged(whole, (opening, spoken, closing)) for whole in (opening, spoken, closing)]
    yield st.one_of(*pieces), check


@harness("orchestrator/transfer/relay_endpoint.py", refuses="ConfigError")
def relay_endpoint(folder: Path) -> Drawn:
    """An endpoint is written and read back the same, or refused."""
    valid = RelayEndpoint(job="job", master="host:50051", metadata="redis://host:6379/0").to_dict()

    def check(data: Any) -> None:
        if isinstance(data, dict):
            found = inputs.survives(lambda: RelayEndpoint.from_dict(data), ConfigError)
            assert found is None or RelayEndpoint.from_dict(found.to_dict()) == found

    yield inputs.altered(valid), check


# -- differences ---------------------------------------------------------------------------------------------------------

BACKENDS = {"reference": NumpyCodec(), **({"native": found} if (found := native()) is not None else {})}


def old_and_new(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    old = generator.normal(0, 0.02, 3000).astype(np.float32).view(np.uint32)
    values = (old >> 16).astype(np.uint16) if dtype == "bfloat16" else old
    new = values.copy()
    new[generator.integers(0, values.size, 150)] ^= 1
    return values.view(np.uint8).copy(), new.view(np.uint8).copy()


def resealed(data: bytes) -> bytes:
    """With the checksum that fits, as a forger would write it."""
    if len(data) < 16:
        return data
    return data[:8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[16:])) + data[16:]


def encodings() -> dict[str, tuple[bytes, np.ndarray, np.ndarray]]:
    made = {}
    for dtype, base in (("bfloat16", True), ("float32", True), ("float32", False)):
        old, new = old_and_new(dtype)
        change = delta.encode_change(old if base else None, new, dtype, backend=NumpyCodec())
        made[f"{change.encoding} {dtype}"] = (change.data.tobytes(), old if base else np.zeros_like(old), new)
    return made


@harness(
    "orchestrator/transfer/delta/delta_format.py",
    "orchestrator/transfer/delta/delta_codec.py",
    "orchestrator/transfer/delta/reference_codec.py",
    "orchestrator/transfer/delta/native_codec.py",
    refuses="CorruptWeightsError, ConfigError",
)
def difference(folder: Path) -> Drawn:
    """A damaged difference is refused and the base untouched, in C and in NumPy; one that is applied is taken back bit by bit."""
    yield merged({name: _difference(name) for name in BACKENDS})


def _difference(backend: str) -> tuple[st.SearchStrategy[Any], Check]:
    changes = encodings()
    others = tuple(data for data, _, _ in changes.values())

    def check(drawn: tuple[str, bytes]) -> None:
        name, data = drawn
        whole, old, new = changes[name]
        base = old.copy()
        log = inputs.survives(
            lambda: delta.apply_change(array(data), base, backend=BACKENDS[backend]), CorruptWeightsError, ConfigError
        )
        if data == whole:
            assert base.tobytes() == new.tobytes()
        elif log is not None:  # another whole change for an array of this size: applied, and taken back bit by bit
            delta.undo_change(log)
        assert log is not None or base.tobytes() == old.tobytes()
        if log is not None and data != whole:
            assert base.tobytes() == old.tobytes()

    drawn = st.one_of(
        *(
            st.tuples(
                st.just(name), st.one_of(inputs.damaged(whole, others), inputs.damaged(whole, others).map(resealed))
            )
            for name, (whole, _, _) in changes.items()
        )
    )
    return drawn, check


@harness(
    "orchestrator/transfer/delta/delta_format.py",
    "orchestrator/transfer/delta/delta_codec.py",
    "orchestrator/transfer/shard_codec.py",
    refuses="CorruptWeightsError, ConfigError",
)
def lying_difference(folder: Path) -> Drawn:
    """A difference that lies about its sizes, with a checksum that fits, takes no memory out of proportion."""
    whole, old, _ = encodings()["delta-sparse bfloat16"]
    fields = list(struct.unpack_from("<4BI3Q", whole, 16))
    numbers = st.sampled_from(
        (0, 1, 2, 3, 4, 8, 12, 16, 24, 64, 255, 1 << 12, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)
    )

    def lied(drawn: tuple[int, int, bytes]) -> bytes:
        place, value, rest = drawn
        said = list(fields)
        said[place] = value % (1 << (8 if place < 4 else 32 if place == 4 else 64))
        return resealed(delta_format.MAGIC + bytes(8) + struct.pack("<4BI3Q16s", *said, bytes(16)) + rest)

    def check(data: bytes) -> None:
        for read in (
            lambda: delta.apply_change(array(data), old.copy()),
            lambda: DeltaCodec().apply("delta-sparse", array(data), old.copy()),
            lambda: sum(edit.positions.size for edit in DeltaCodec().edits("delta-sparse", array(data), 3000, 2)),
        ):
            inputs.survives(read, CorruptWeightsError, ConfigError)

    rest = st.one_of(st.just(whole[64:]), inputs.damaged(whole[64:]))
    yield st.tuples(st.integers(0, len(fields) - 1), numbers, rest).map(lied), check


# -- KV ------------------------------------------------------------------------------------------------------------------

TOKEN = "a token of the fuzz tests"
FACTS = {"version": 3, "layout": "x"}


def _frame(values: dict[str, Any]) -> bytes:
    body = msgpack.packb(values)
    return struct.pack(">I", len(body)) + body


def _proved(role: bytes, nonce: bytes, header: bytes) -> bytes:
    return hmac.new(TOKEN.encode(), role + nonce + header, "sha256").digest()


@harness("orchestrator/transfer/kv_wire.py", "orchestrator/transfer/proven_link.py", refuses="hung up on")
def kv_asker(folder: Path) -> Drawn:
    """Whatever an asker for KV sends, with the token or without, the next one is served."""

    def answer(ask: kv_wire.KvAsk) -> kv_wire.KvBlocks:
        return kv_wire.KvBlocks(ask.first, np.ones((2, 8), np.uint8), FACTS)

    died: list[Any] = []
    before, threading.excepthook = threading.excepthook, died.append
    server = kv_wire.KvServer(answer, TOKEN, limit=2.0)
    header = msgpack.packb({"protocol": 1, "first": 0, "facts": FACTS, "tokens": bytes(64)})
    frame = _frame({"header": header, "nonce": bytes(16), "proof": bytes(32)})
    ask = kv_wire.KvAsk(np.zeros(16, np.uint32), 0, FACTS, 5.0)

    def check(drawn: tuple[bool, bytes]) -> None:
        proved, data = drawn
        with socket.create_connection(proven_link.parse_place(server.place), timeout=5.0) as sock:
            size = struct.unpack(">I", _received(sock, 4))[0]
            nonce = msgpack.unpackb(_received(sock, size))["nonce"]
            if proved:
                data = _frame({"header": data, "nonce": bytes(16), "proof": _proved(b"ask", nonce, data)})
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)
            except OSError:
                pass  # hung up on
        assert kv_wire.fetch_blocks(server.place, TOKEN, ask, 8).payload.sum() == 16

    hostile = st.one_of(
        st.tuples(st.just(False), st.one_of(inputs.damaged(frame), st.just(b"\xff\xff\xff\xff"), st.just(b"\0\0\0\0"))),
        st.tuples(st.just(True), messages(header)),
    )
    try:
        yield hostile, check
    finally:
        server.close()
        threading.excepthook = before
    assert [str(item.exc_value) for item in died] == []  # a thread that dies takes its client's slot along


@harness("orchestrator/transfer/site_cache.py", refuses="LinkRefused, or hung up on")
def site_asker(folder: Path) -> Drawn:
    """Whatever an asker for weights sends, with the token or without, the next one gets the object, whole."""
    endpoint = RelayEndpoint("job", "memory", f"{folder}", "memory")
    relay, key, held = MemoryRelay.shared(endpoint.master), "rlc/job/1/1/full/0", _sealed_bucket()
    relay.put(key, memoryview(held))
    cache = SiteCache(TOKEN)
    header = {"protocol": 1, "endpoint": endpoint.to_dict(), "what": "read", "key": key, "ranges": [[0, 8]]}

    def ask(body: bytes) -> dict[str, Any]:
        def talk(stream: proven_link.FramedStream) -> dict[str, Any]:
            theirs = stream.read_map(64)["nonce"]
            proof = _proved(b"ask", theirs, body)
            stream.write({"header": body, "nonce": bytes(16), "proof": proof})
            return proven_link.unpack_map(stream.read_map(1 << 20)["header"])

        return proven_link.connect(cache.place, 20.0, talk)

    def check(data: bytes) -> None:
        tree = inputs.survives(lambda: proven_link.unpack_map(data), proven_link.LinkRefused)
        if isinstance(tree, dict) and isinstance(
            tree.get("endpoint"), dict
        ):  # relays elsewhere; `relay-endpoint` has these
            data = packed({**tree, "endpoint": endpoint.to_dict()}) or data
        inputs.survives(lambda: ask(data), proven_link.LinkRefused)
        assert ask(msgpack.packb(header | {"ranges": None})) == {"size": len(held)}

    try:
        yield messages(msgpack.packb(header)), check
    finally:
        cache.close()


def _sealed_bucket() -> bytes:
    writer = wire.BucketWriter(np.zeros(2048, np.uint8))
    writer.add("w", np.arange(64, dtype=np.uint8))
    return bytes(writer.seal(wire.BucketName("job", 1, 1, "full", 0, 0)))


def _received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += sock.recv(count - len(data)) or pytest.fail("the server hung up before its greeting")
    return data


@harness("orchestrator/transfer/kv_wire.py", refuses="LinkRefused, TimeoutError, OSError")
def kv_source(folder: Path) -> Drawn:
    """What a source of KV sends is the very blocks, or refused."""
    payload = np.arange(16, dtype=np.uint8).reshape(2, 8)
    header = msgpack.packb({"facts": FACTS, "blocks": 2, "block_bytes": 8, "digests": kv_wire.block_digests(payload)})
    ask = kv_wire.KvAsk(np.zeros(16, np.uint32), 0, FACTS, 3.0)

    def check(drawn: tuple[bytes, bytes, bytes | None]) -> None:
        greeting, body, raw = drawn
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
            theirs.settimeout(0.1)

        def talk() -> None:
            with theirs:
                try:
                    theirs.sendall(greeting)
                    asked = msgpack.unpackb(_received(theirs, struct.unpack(">I", _received(theirs, 4))[0]))
                    proof = _proved(b"answer", asked["nonce"], body)
                    theirs.sendall(
                        raw if raw is not None else _frame({"header": body, "proof": proof}) + payload.tobytes()
                    )
                except (OSError, ValueError, msgpack.UnpackException, pytest.fail.Exception):
                    return  # the client hung up

        talker = threading.Thread(target=talk)
        talker.start()
        try:
            with ours:
                stream = proven_link.FramedStream(ours, time.monotonic() + 3.0)
                found = inputs.survives(
                    lambda: kv_wire._fetch_blocks(stream, TOKEN, ask, 8, None),
                    proven_link.LinkRefused,
                    TimeoutError,
                    OSError,
                )
            assert found is None or (found.payload == payload).all()
        finally:
            talker.join(10.0)

    hello = _frame({"nonce": bytes(16)})
    drawn = st.one_of(
        st.tuples(inputs.damaged(hello), st.just(header), st.none()),
        st.tuples(st.just(hello), messages(header), st.none()),
        st.tuples(st.just(hello), st.just(header), inputs.damaged(_frame({"header": header, "proof": bytes(32)}))),
    )
    yield drawn, check
