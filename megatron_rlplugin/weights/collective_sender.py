"""Weights straight to the workers of the same cluster, by a collective, beside the relay: one trainer rank's side.

Every rank of the trainer sends its own shards to a group of its own, in which it is rank 0 and all receivers take part, as in
vLLM's stock backends; nothing is gathered among the trainer's ranks. :mod:`orchestrator.transfer.announcement` says what is
sent.

Guarantees: one background thread sends and only reads the weights; :meth:`CollectiveSender.finish_send`, called before
they change, returns when it has ended or was given up: within the time limit (plus some seconds to abort NCCL), whatever the
receivers do. A failure is kept and logged, never raised: the version is on the relay, too. A group that failed is left at
once, so that no receiver waits for it, and is not used again.

On CUDA the group and the packed broadcast are vLLM's own (imported only then: vLLM must be installed where the trainer runs);
on CPU it is gloo, bound to the one address that the meeting names. As with every collective there is no authentication on
these connections: on a shared network keep them closed to others.
"""

from __future__ import annotations

import base64
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rlplugin.weights.rank_publisher import PART_BYTES
from megatron_rlplugin.weights.weight_export import serving_keys, serving_shards
from orchestrator.api import ConfigError, Meeting, RetryableError, ShardKey
from orchestrator.transfer.announcement import (
    HOST_MESSAGE_BYTES,
    HOST_PACK_BYTES,
    PACK_BYTES,
    pack_announcement,
    pack_digests,
    pack_layout,
    pack_opening,
)
from orchestrator.transfer.manifest import shard_bytes

GROUP_PREFIX = "rl-coserve"  # as the receivers'
NCCL_BUFFERS = 2  # as the receivers'
CLOSE_SECONDS = 1.0  # for the last of a version to go out
ABORT_SECONDS = 10.0  # for NCCL to let go of a thread

_log = logging.getLogger(__name__)
Shards = Iterator[tuple[ShardKey, Tensor]]


class SendGroup(Protocol):
    """A group with this rank as its sender. Making one starts nothing that waits; ``join`` does."""

    meeting: Meeting

    def join(self, deadline: float) -> None:
        """Wait for all receivers. Again: nothing."""

    def close(self) -> None:
        """Leave it. Idempotent, raises nothing; ends what another thread waits for in it."""


class ShardGroup(SendGroup, Protocol):
    """One that speaks as :mod:`orchestrator.transfer.announcement` says."""

    def message(self, data: bytes, deadline: float) -> None:
        """A short one."""

    def shards(self, keys: Sequence[ShardKey], shards: Shards, deadline: float) -> list[int]:
        """The raw bytes of these; returns their digests (xxh3-64)."""


Group = TypeVar("Group", bound=SendGroup)


def sender_of(chunks: Sequence[Any], device: torch.device) -> CollectiveSender:
    """For this rank's model chunks: what :class:`~megatron_rlplugin.weights.rank_publisher.WeightPublisher` publishes,
    cut alike."""
    return CollectiveSender(
        lambda: serving_keys(chunks, None, bucket_bytes=PART_BYTES),
        lambda: serving_shards(chunks, None, bucket_bytes=PART_BYTES),
        device,
    )


class WeightSender(ABC, Generic[Group]):
    """One rank's, whatever it sends and how. Its methods are for one thread."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._groups = 0
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        self.error = ""  # why the last version was not sent; empty: it was, or is on its way
        self.seconds = 0.0  # that the last version took

    def begin_send(self, version: int, receivers: int, limit: float, anew: bool, host: str = "127.0.0.1") -> Meeting:
        """See :class:`orchestrator.api.CollectiveTrainer`. ``host``: this rank's address. Raises ConfigError."""
        self.finish_send()
        group = self._group
        if group is None or anew or self.error or group.meeting.receivers != receivers:
            self._leave()
            self._groups += 1
            self._group = group = self._open_group(receivers, host, self._groups, limit)
        self.error, self.seconds = "", 0.0
        self._deadline = deadline = time.monotonic() + limit
        sending = group
        self._thread = threading.Thread(
            target=lambda: self._send(sending, version, deadline), name="rl-coserve-send", daemon=True
        )
        self._thread.start()
        return group.meeting

    def finish_send(self) -> None:
        """Wait until nothing reads the weights any more. See the module."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(max(self._deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            self.error = self.error or "the receivers did not take it in time"
            self._leave()
            thread.join(ABORT_SECONDS)
        if self.error:
            _log.warning("weights were not sent to the workers, which take them from the relay: %s", self.error)

    def close(self) -> None:
        """Idempotent. What is being sent is waited for no longer than a moment."""
        self._deadline = min(self._deadline, time.monotonic() + CLOSE_SECONDS)
        self.finish_send()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    @abstractmethod
    def _open_group(self, receivers: int, host: str, number: int, limit: float) -> Group:
        """Raises ConfigError."""

    @abstractmethod
    def _transmit(self, group: Group, version: int, deadline: float) -> None:
        """All of a version, to a group that is complete. Raises anything."""

    def _send(self, group: Group, version: int, deadline: float) -> None:
        started = time.monotonic()
        try:
            group.join(deadline)
            self._transmit(group, version, deadline)
        except Exception as error:  # noqa: BLE001  of gloo, NCCL or torch: the relay has the version, and this is told
            self.error = f"version {version}: {str(error) or type(error).__name__}"
            group.close()
        self.seconds = time.monotonic() - started


class CollectiveSender(WeightSender[ShardGroup]):
    """``keys`` and ``shards``: what this rank sends, in one order; ``device``: where that is."""

    def __init__(
        self, keys: Callable[[], Sequence[ShardKey]], shards: Callable[[], Shards], device: torch.device
    ) -> None:
        super().__init__()
        self._keys = keys
        self._shards = shards
        self._device = device

    def _open_group(self, receivers: int, host: str, number: int, limit: float) -> ShardGroup:
        kind = NcclGroup if self._device.type == "cuda" else GlooGroup
        return kind(receivers, host, number, limit)

    def _transmit(self, group: ShardGroup, version: int, deadline: float) -> None:
        keys = self._keys()
        announcement = pack_announcement(keys)
        group.message(pack_opening(version, announcement), deadline)
        group.message(announcement, deadline)
        group.message(pack_digests(group.shards(keys, self._wanted(keys, group), deadline)), deadline)

    def _wanted(self, keys: Sequence[ShardKey], group: ShardGroup) -> Shards:
        """Just what was announced. Nothing is read any more once it was given up."""
        places = iter(keys)
        with torch.no_grad():
            for key, tensor in self._shards():
                if self._group is not group:
                    raise RetryableError("it was given up")
                if next(places, None) != key:
                    raise RetryableError(f"{key.tensor} was not announced here")
                yield key, tensor
        if (missing := next(places, None)) is not None:
            raise RetryableError(f"{missing.tensor} was announced, and is not there")


class GlooGroup:
    """Over the host, bound to one address."""

    def __init__(self, receivers: int, host: str, number: int, limit: float) -> None:
        listening = socket.create_server((host, 0))  # the store's own would listen on all addresses
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=limit),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self.meeting = Meeting(f"{host}:{port}/{number}", "gloo", f"{host}:{port}", receivers)
        self._host = host
        self._group: Any = None
        self._closed = False

    def join(self, deadline: float) -> None:
        """See the protocol."""
        if self._group is None and not self._closed:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=_left(deadline))
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            named = dist.PrefixStore(f"{GROUP_PREFIX}/{self.meeting.name}", self._store)
            self._group = dist.ProcessGroupGloo(named, 0, self.meeting.receivers + 1, options)

    def message(self, data: bytes, deadline: float) -> None:
        """See the protocol."""
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), deadline)

    def shards(self, keys: Sequence[ShardKey], shards: Shards, deadline: float) -> list[int]:
        """See the protocol."""
        digests: list[int] = []
        layout = pack_layout([shard_bytes(key) for key in keys], HOST_PACK_BYTES)
        buffer = torch.zeros(max((length for length, _ in layout), default=0), dtype=torch.uint8)
        for length, offsets in layout:
            for offset in offsets:
                key, tensor = next(shards)
                data = tensor.reshape(-1).view(torch.uint8)
                place = buffer[offset : offset + shard_bytes(key)]
                place.copy_(data)
                digests.append(int(xxhash.xxh3_64_intdigest(place.numpy().data)))
            self._broadcast(buffer[:length], deadline)
        return digests

    def close(self) -> None:
        """See the protocol."""
        self._closed = True
        self._group = None  # its connections end with it; an operation under way in another thread has its time limit

    def _broadcast(self, data: Tensor, deadline: float) -> None:
        group = self._group
        if group is None:
            raise RetryableError("the group was left")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for piece in data.split(HOST_MESSAGE_BYTES) if data.numel() else ():
            options.timeout = timedelta(seconds=_left(deadline))
            group.broadcast([piece], options).wait()


class NcclGroup:
    """vLLM's own group and packed broadcast. Not run by the tests of this project: they have no machine with two GPUs."""

    def __init__(self, receivers: int, host: str, number: int, limit: float) -> None:
        del limit  # NCCL has none: :meth:`CollectiveSender.finish_send` aborts it
        try:
            from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        except ImportError as error:
            fix = f"the trainer needs vLLM for it, which is not installed there ({error}); install it, or use 'relay'"
            raise ConfigError("rollout.weights", "collective", fix) from error
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        where = base64.b64encode(unique_id).decode()
        self.meeting = Meeting(f"{host}/{where[:32]}/{number}", "nccl", where, receivers)
        self._unique_id = unique_id
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None

    def join(self, deadline: float) -> None:
        """See the protocol."""
        if self._group is None:
            from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

            with torch.cuda.device(self._device):
                self._group = uid_init_process_group(self._unique_id, 0, self.meeting.receivers + 1, self._device)

    def message(self, data: bytes, deadline: float) -> None:
        """See the protocol."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._group.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device), src=0)
            torch.cuda.current_stream().synchronize()

    def shards(self, keys: Sequence[ShardKey], shards: Shards, deadline: float) -> list[int]:
        """See the protocol."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        digests: list[int] = []

        def digested(item: tuple[str, Tensor]) -> Tensor:
            digests.append(int(xxhash.xxh3_64_intdigest(item[1].cpu().numpy().data)))
            return item[1]

        with torch.cuda.device(self._device):
            packed_nccl_broadcast_producer(
                iterator=((str(place), _bytes(tensor)) for place, (_, tensor) in enumerate(shards)),
                group=self._group,
                src=0,
                post_iter_func=digested,
                buffer_size_bytes=PACK_BYTES,
                num_buffers=NCCL_BUFFERS,
            )
        return digests

    def close(self) -> None:
        """See the protocol. vLLM's own way aborts what is pending."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the communicator may be broken already; nothing is to be saved
                group.destroy()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryableError("the time limit is over")
    return left
