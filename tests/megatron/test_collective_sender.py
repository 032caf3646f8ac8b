"""Weights straight from the trainer's rank to receivers, over real gloo groups; the engine is left out here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from megatron_rlplugin.weights.collective_sender import CollectiveSender, GlooGroup  # noqa: E402
from orchestrator.api import Meeting, RetryableError, ShardKey  # noqa: E402
from orchestrator.transfer import CorruptWeightsError, MemoryRelay, Publisher, RelayEndpoint  # noqa: E402
from orchestrator.transfer import announcement as wire  # noqa: E402

CPU = torch.device("cpu")
LIMIT = 20.0
ROWS, WIDTH, PARTS = 64, 1024, 24  # 24 parts of 256 KB


def model(seed: int = 0, parts: int = PARTS) -> list[tuple[ShardKey, Any]]:
    """Some rows each of one tensor, and a norm of another dtype."""
    draw = torch.Generator().manual_seed(seed)
    shape = (parts * ROWS, WIDTH)
    found = []
    for part in range(parts):
        key = ShardKey("w", 0, part * ROWS, (part + 1) * ROWS, shape, "float32", "raw", 0)
        found.append((key, torch.randn(ROWS, WIDTH, generator=draw)))
    norm = ShardKey("norm", -1, 0, 0, (7,), "bfloat16", "raw", 0)
    return [*found, (norm, torch.randn(7, generator=draw).to(torch.bfloat16))]


def sender(shards: list[tuple[ShardKey, Any]], pause: float = 0.0) -> CollectiveSender:
    def each() -> Iterator[tuple[ShardKey, Any]]:
        for item in shards:
            time.sleep(pause)
            yield item

    return CollectiveSender(lambda: [key for key, _ in shards], each, CPU)


def as_published(shards: list[tuple[ShardKey, Any]]) -> str:
    """The content that the relay says it has."""
    name = f"collective-{id(shards)}"
    publisher = Publisher(RelayEndpoint(job="t", kind="memory", master=name), MemoryRelay.shared(name))
    raw = [(key, tensor.reshape(-1).view(torch.uint8).numpy(), None) for key, tensor in shards]
    content = publisher.publish_shards(0, raw).content
    publisher.close()
    return content


class Taken:
    """One receiver in a thread of this process."""

    def __init__(self) -> None:
        from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver

        self.receiver = CollectiveReceiver(CPU, 0)
        self.shards: dict[str, bytes] = {}
        self.content = ""
        self.error: BaseException | None = None
        self.thread = threading.Thread()

    def start(self, version: int, meetings: list[Meeting], place: int, limit: float = LIMIT) -> Taken:
        self.shards, self.content, self.error = {}, "", None
        self.thread = threading.Thread(target=self._run, args=(version, meetings, place, limit))
        self.thread.start()
        return self

    def join(self) -> Taken:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self

    def _run(self, version: int, meetings: list[Meeting], place: int, limit: float) -> None:
        try:
            coming = self.receiver.join_version(version, meetings, place, limit)
            names = [f"{key.tensor}:{key.start}" for key in coming.shards]

            def use(number: int, data: Any) -> None:
                self.shards[names[number]] = data.tobytes()

            self.content = f"{coming.receive_shards(use):016x}"
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.error = error


def expected(shards: list[tuple[ShardKey, Any]]) -> dict[str, bytes]:
    raw = {f"{key.tensor}:{key.start}": tensor.reshape(-1).view(torch.uint8).numpy() for key, tensor in shards}
    return {name: data.tobytes() for name, data in raw.items()}


def test_every_receiver_gets_the_bits_and_the_content_that_the_relay_publishes_again_and_again() -> None:
    first, second = model(1), model(2)
    source = sender(first)
    meeting = source.begin_send(3, 2, LIMIT, False)
    takers = [Taken().start(3, [meeting], place) for place in (1, 2)]
    for taker in takers:
        assert taker.join().error is None
        assert (taker.shards, taker.content) == (expected(first), as_published(first))
    source._keys, source._shards = (lambda: [key for key, _ in second]), (lambda: iter(second))
    again = source.begin_send(4, 2, LIMIT, False)
    assert again == meeting, "the group of the last version serves the next one"
    for place, taker in enumerate(takers, 1):
        taker.start(4, [again], place)
    for taker in takers:
        assert taker.join().error is None
        assert (taker.shards, taker.content) == (expected(second), as_published(second))
    source.close()
    assert source.error == ""


def test_several_senders_are_one_version() -> None:
    """Ranks of a trainer: each sends its own part of the same tensors."""
    whole = model(5)
    halves = [sender(whole[::2]), sender(whole[1::2])]
    meetings = [half.begin_send(0, 1, LIMIT, False) for half in halves]
    taker = Taken().start(0, meetings, 1).join()
    assert taker.error is None
    assert (taker.shards, taker.content) == (expected(whole), as_published(whole))
    for half in halves:
        half.close()


def test_what_is_not_what_the_sender_read_is_refused_and_the_sender_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = GlooGroup._broadcast
    flipped: list[int] = []

    def flip(group: GlooGroup, data: Any, deadline: float) -> None:
        if data.numel() > 1 << 20 and not flipped:  # a pack, after its digests were made
            data[12345] ^= 1
            flipped.append(data.numel())
        stock(group, data, deadline)

    monkeypatch.setattr(GlooGroup, "_broadcast", flip)
    source = sender(model(1))
    taker = Taken().start(0, [source.begin_send(0, 1, LIMIT, False)], 1).join()
    assert flipped
    assert isinstance(taker.error, CorruptWeightsError)
    assert "digest" in str(taker.error)
    source.finish_send()
    assert source.error == ""
    source.close()


def test_another_version_than_the_wanted_one_is_refused_and_both_sides_end() -> None:
    source = sender(model(1), pause=0.05)
    taker = Taken().start(8, [source.begin_send(7, 1, LIMIT, False)], 1).join()
    assert isinstance(taker.error, CorruptWeightsError)
    assert "version 7 is sent, 8 was wanted" in str(taker.error)
    source.finish_send()
    assert source.error != "", "the receiver has left"
    source.close()


CHILD = """
import os, signal, sys
sys.path[:0] = {path!r}
import torch
from orchestrator.api import Meeting
from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver
coming = CollectiveReceiver(torch.device("cpu"), 0).join_version(1, [Meeting(*{meeting!r})], {place}, 20.0)
print("joined", flush=True)
def use(place, data):
    if place == 3:
        os.kill(os.getpid(), {fate})
coming.receive_shards(use)
"""


@pytest.mark.parametrize(
    ("fate", "limit"),
    [
        pytest.param(signal.SIGKILL, 60.0, id="killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 12.0, id="stopped", marks=pytest.mark.long),
    ],
)
def test_a_receiver_that_dies_or_hangs_in_the_middle_holds_nobody_up_and_the_next_group_works(
    fate: signal.Signals, limit: float
) -> None:
    shards = model(1, parts=400)  # 100 MB: much is left to send
    source = sender(shards)
    started = time.monotonic()
    meeting = source.begin_send(1, 2, limit, False)
    survivor = Taken().start(1, [meeting], 1, limit)
    arguments = (meeting.name, meeting.backend, meeting.where, meeting.receivers)
    code = CHILD.format(path=[str(Path(__file__).parents[2])], meeting=arguments, place=2, fate=int(fate))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        survivor.join()
        if fate == signal.SIGKILL:
            assert time.monotonic() - started < limit, "the others are told at once"
        source.finish_send()
        assert time.monotonic() - started < limit + 10
        assert source.error != ""
        assert isinstance(survivor.error, RetryableError)
    finally:
        child.kill()
        child.wait()
    anew = source.begin_send(2, 1, LIMIT, True)
    assert anew.name != meeting.name
    again = survivor.start(2, [anew], 1).join()
    assert again.error is None
    assert again.content == as_published(shards)
    source.close()


def test_a_sender_that_nobody_comes_to_gives_up_in_time() -> None:
    source = sender(model(1))
    started = time.monotonic()
    source.begin_send(0, 1, 1.0, False)
    source.finish_send()
    assert time.monotonic() - started < 20
    assert source.error != ""
    source.close()


def test_a_sender_that_is_closed_does_not_wait_for_its_receivers() -> None:
    source = sender(model(1), pause=0.05)
    taker = Taken().start(0, [source.begin_send(0, 1, 60.0, False)], 1, 60.0)
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 30
    taker.join()
    assert isinstance(taker.error, RetryableError)


def test_the_store_and_the_group_listen_on_the_address_of_the_meeting_only() -> None:
    before = listening()
    source = sender(model(1))
    meeting = source.begin_send(0, 1, LIMIT, False)
    taker = Taken().start(0, [meeting], 1).join()
    assert taker.error is None
    ports = listening() - before
    assert int(meeting.where.rpartition(":")[2]) in {port for _, port in ports}
    assert {address for address, _ in ports} == {"127.0.0.1"}
    source.close()
    taker.receiver.close()


def listening() -> set[tuple[str, int]]:
    """(address, port) of this process's listening TCP sockets."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].partition(":")
                number = int(address[-8:], 16)
                text = ".".join(str((number >> shift) & 255) for shift in (0, 8, 16, 24))
                found.add((text if width == 8 or int(address, 16) else "::", int(port, 16)))
    return found


# -- what the engine's worker stages ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_what_is_staged_from_the_trainer_is_what_the_relay_would_have_brought() -> None:
    from vllm_rlplugin.worker.inprocess_engine import prepare_process

    prepare_process(1)
    from vllm_rlplugin.weights.version_fetch import FetchRefusal, VersionFetcher
    from vllm_rlplugin.weights.version_staging import StagedVersion, StagingPlan

    shards = model(1)
    name = "collective-staged"
    endpoint = RelayEndpoint(job="t", kind="memory", master=name)
    publisher = Publisher(endpoint, MemoryRelay.shared(name))
    fetcher = VersionFetcher(endpoint)
    plan = StagingPlan("m", CPU, None, False, None)
    source = sender(shards)

    def received(version: int, limit: float = LIMIT) -> dict[str, Any]:
        meeting = source.begin_send(version, 1, limit, True)
        fetcher.start_receive(version, plan, [meeting], 1, limit)
        while (state := fetcher.fetch_state())["state"] == "fetching":
            time.sleep(0.01)
        source.finish_send()
        return state

    def publish(version: int) -> None:
        raw = [(key, tensor.reshape(-1).view(torch.uint8).numpy(), None) for key, tensor in shards]
        publisher.publish_shards(version, raw)

    state = received(4)
    assert (state["state"], state["version"], state["checksum"]) == ("ready", 4, as_published(shards))
    fetcher.start_receive(
        4, plan, [Meeting("gone", "gloo", "127.0.0.1:1", 1)], 1, LIMIT
    )  # told twice: nothing more is awaited
    fetcher.start_fetch(4, plan)  # as UPDATE does: it is at hand, though the relay has nothing yet
    sent = fetcher.take_staged(4, plan)
    assert isinstance(sent, StagedVersion)
    publish(5)
    relayed = fetcher.take_staged(5, plan)
    assert isinstance(relayed, StagedVersion)
    assert (sent.checksum, sent.bytes) == (relayed.checksum, relayed.bytes)
    assert sent.tensors.keys() == relayed.tensors.keys() == {"w", "norm"}
    for tensor, value in sent.tensors.items():
        assert value.dtype == relayed.tensors[tensor].dtype
        assert torch.equal(value.view(torch.uint8), relayed.tensors[tensor].view(torch.uint8))

    # One that does not come whole is refused, and the relay's is taken once it is there.
    source._shards = lambda: iter(shards[:-1])
    state = received(6)
    assert state["state"] == "failed"
    assert "the group with the trainer failed" in state["error"]
    assert source.error == "version 6: norm was announced, and is not there"
    refused = fetcher.take_staged(6, plan)
    assert isinstance(refused, FetchRefusal)
    assert refused.retryable
    publish(6)
    assert isinstance(fetcher.take_staged(6, plan), StagedVersion)
    # Weights of another model are refused before any of them is staged, and the sender is not left waiting.
    source._shards = lambda: iter(shards)
    from vllm_rlplugin.weights.checkpoint_mapping import TensorSpec

    plan = StagingPlan("m", CPU, {"w": TensorSpec((7, WIDTH), torch.float32)}, False, None)
    state = received(7, 60.0)
    assert "does not fit m: unknown: norm" in state["error"]
    assert source.error != ""
    source.close()
    fetcher.close()
    publisher.close()


# -- what is said around the weights -----------------------------------------------------------------------------------


def test_announcements_are_read_as_they_were_written_and_damaged_ones_are_refused() -> None:
    keys = tuple(key for key, _ in model(1))
    data = wire.pack_announcement(keys)
    assert wire.unpack_announcement(data) == keys
    draw = np.random.default_rng(3)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(draw.integers(len(damaged)))] ^= 1 << int(draw.integers(8))
        with pytest.raises(CorruptWeightsError):
            wire.unpack_announcement(bytes(damaged))


@pytest.mark.parametrize(
    "row",
    [
        ["w", 0, 0, 4, [4, 2], "float33"],
        ["w", 2, 0, 4, [4, 2], "float32"],
        ["w", 0, 0, -4, [4, 2], "float32"],
        ["", -1, 0, 0, [4], "float32"],
        ["w", 0, 0, 4, [4, True], "float32"],
        ["w", 0, 0, 4, "ab", "float32"],
        [7, 0, 0, 4, [4], "float32"],
        ["w", 0, 0, 4, [4]],
        "w",
    ],
)
def test_a_shard_that_cannot_be_is_refused(row: Any) -> None:
    import msgpack
    import xxhash

    payload = msgpack.packb([row])
    with pytest.raises(CorruptWeightsError):
        wire.unpack_announcement(xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload)


def test_openings_and_digests_are_checked() -> None:
    good = wire.pack_opening(3, b"x" * 100)
    assert wire.unpack_opening(good, 3) == 100
    for bad in (b"NOTOURS!" + good[8:], wire.pack_opening(4, b"x" * 100), wire.pack_opening(3, b"x")):
        with pytest.raises(CorruptWeightsError):
            wire.unpack_opening(bad, 3)
    keys = [key for key, _ in model(1, parts=1)]
    closing = wire.pack_digests([1, 1 << 63])
    assert len(closing) == wire.closing_bytes(2)
    wire.check_digests(closing, keys, [1, 1 << 63])
    for made, data in (([2, 1 << 63], closing), ([1, 1 << 63], closing[:-1]), ([1, 1 << 63], b"\7" + closing[1:])):
        with pytest.raises(CorruptWeightsError):
            wire.check_digests(data, keys, made)


def test_packs_hold_every_shard_once_aligned_and_are_sent_when_they_are_full() -> None:
    draw = np.random.default_rng(4)
    for _ in range(50):
        sizes = draw.integers(0, 5000, int(draw.integers(0, 40))).tolist()
        packs = wire.pack_layout(sizes, limit=8000)
        assert sum(len(offsets) for _, offsets in packs) == len(sizes)
        place = 0
        for length, offsets in packs:
            ends = 0
            for offset in offsets:
                assert offset % 64 == 0
                assert offset >= ends
                ends = offset + sizes[place]
                place += 1
            assert ends <= length < 8000 + 5000 + 64


@pytest.mark.parametrize("comes", [False, True])
def test_a_group_that_is_never_complete_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """As NCCL waits for a receiver that died: in a stand-in for vLLM's own function, which has no limit."""
    pytest.importorskip("vllm")
    import base64
    from contextlib import nullcontext
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer import nccl_common

    from vllm_rlplugin.weights.collective_receiver import NcclLink

    complete, left = threading.Event(), threading.Event()
    group = SimpleNamespace(destroy=left.set)

    def join(*given: Any) -> Any:
        assert complete.wait(LIMIT)
        return group

    monkeypatch.setattr(nccl_common, "uid_init_process_group", join)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    meeting = Meeting("m", "nccl", base64.b64encode(b"id").decode(), 2)
    if comes:
        complete.set()
        assert NcclLink(meeting, 1, CPU, time.monotonic() + LIMIT)._group is group
        return
    began = time.monotonic()
    with pytest.raises(RetryableError, match="not all 2 receivers joined"):
        NcclLink(meeting, 1, CPU, began + 0.2)
    assert time.monotonic() - began < 5
    complete.set()
    assert left.wait(LIMIT), "those who come when nobody waits any more are not kept either"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_vllms_own_nccl_group_carries_the_bits() -> None:
    """Sender on the first GPU, receiver on the second, in two threads."""
    from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver

    shards = [(key, tensor.cuda(0)) for key, tensor in model(1)]
    torch.cuda.set_device(0)
    source = CollectiveSender(lambda: [key for key, _ in shards], lambda: iter(shards), torch.device("cuda", 0))
    taker = Taken()
    taker.receiver = CollectiveReceiver(torch.device("cuda", 1), 0)
    taker.start(0, [source.begin_send(0, 1, LIMIT, False)], 1).join()
    assert taker.error is None
    assert (taker.shards, taker.content) == (expected(model(1)), as_published(model(1)))
    source.close()
