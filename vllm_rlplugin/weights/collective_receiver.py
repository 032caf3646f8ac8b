"""Weights straight from the trainer's ranks, received by a collective: the worker's side.

Guarantees:

* :meth:`Transmission.receive_shards` hands on every byte that was sent, in order, and returns only if each shard has
  the digest that its sender announced, and all together are every tensor exactly once. Anything else is an error; the
  groups are then left, so that no sender waits for this rank.
* It ends within its time limit, joining included: on CPU (gloo) every single operation has what is left of it; NCCL has no
  such limit, so there the communicator is aborted when it is over, and a group that is never complete is not waited for.
* Groups are used again for the next version while their names stay the same; a group of another name replaces them.

On CUDA these are vLLM's own: its NCCL group (``nccl_common``) and its packed broadcast (``packed_tensor``), imported
only then; the unique id comes with the meeting, so that nothing is unpickled and no port is open. On CPU the same calls
go over gloo. Nothing here touches the model.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from orchestrator.api import Meeting, RetryableError, ShardKey
from orchestrator.transfer import CorruptWeightsError
from orchestrator.transfer.announcement import (
    HOST_MESSAGE_BYTES,
    HOST_PACK_BYTES,
    OPENING_BYTES,
    PACK_BYTES,
    check_digests,
    closing_bytes,
    pack_layout,
    unpack_announcement,
    unpack_opening,
)
from orchestrator.transfer.bucket import Bytes, digest
from orchestrator.transfer.manifest import content_of, shard_bytes

GROUP_PREFIX = "rl-coserve"
NCCL_BUFFERS = 2  # of PACK_BYTES each, on the device
_OF_THE_GROUP = (RuntimeError, OSError, ValueError, ImportError)

Use = Callable[[int, Bytes], None]  # place of a shard, its bytes; they are valid during the call


class SenderLink(Protocol):
    """A group with one sender, seen by a receiver. Making one joins it."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, deadline: float) -> None: ...

    def receive_message(self, size: int, deadline: float) -> bytes:
        """A short one."""

    def receive_shards(self, sizes: Sequence[int], use: Use, deadline: float) -> None:
        """The raw bytes of shards, in order."""

    def close(self) -> None:
        """Leave the group. Idempotent, raises nothing."""


class CollectiveReceiver:
    """One rank's. Not for several threads at a time. ``offset``: this rank's number within its engine."""

    def __init__(self, device: torch.device, offset: int) -> None:
        self._device = device
        self._offset = offset
        self._links: dict[str, SenderLink] = {}  # by the name of the meeting

    def join_version(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> Transmission:
        """Join the groups, and hear what will be sent. Raises RetryableError and CorruptWeightsError."""
        deadline = time.monotonic() + limit
        try:
            self._join_groups(meetings, place + self._offset, deadline)
            links = [self._links[meeting.name] for meeting in meetings]
            announced = []
            for link in links:
                length = unpack_opening(link.receive_message(OPENING_BYTES, deadline), version)
                announced.append(unpack_announcement(link.receive_message(length, deadline)))
        except _OF_THE_GROUP as error:
            self.close()
            raise _told(error) from error
        except BaseException:
            self.close()
            raise
        return Transmission(self, links, announced, deadline)

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _join_groups(self, meetings: Sequence[Meeting], rank: int, deadline: float) -> None:
        if list(self._links) != [meeting.name for meeting in meetings]:
            self.close()
            for meeting in meetings:
                if not 0 < rank <= meeting.receivers:
                    raise RetryableError(f"rank {rank} of a group with {meeting.receivers} receivers")
                if meeting.backend != ("nccl" if self._device.type == "cuda" else "gloo"):
                    raise RetryableError(f"a {meeting.backend} group cannot serve a worker on {self._device.type}")
                kind: type[SenderLink] = NcclLink if meeting.backend == "nccl" else GlooLink
                self._links[meeting.name] = kind(meeting, rank, self._device, deadline)


class Transmission:
    """One version on its way. ``shards``: of all senders, in the order in which they come."""

    def __init__(
        self,
        receiver: CollectiveReceiver,
        links: list[SenderLink],
        announced: list[tuple[ShardKey, ...]],
        deadline: float,
    ) -> None:
        self._receiver = receiver
        self._parts = list(zip(links, announced, strict=True))
        self._deadline = deadline
        self.shards = tuple(key for keys in announced for key in keys)
        self.bytes = sum(shard_bytes(key) for key in self.shards)

    def receive_shards(self, use: Use) -> int:
        """Hand on every shard, then verify them; returns the content of the version. Raises RetryableError and
        CorruptWeightsError; whatever ``use`` raises ends it, too."""
        digests: list[int] = []

        def take(place: int, data: Bytes) -> None:
            digests.append(digest(data))
            use(place, data)

        try:
            for link, keys in self._parts:
                first = len(digests)
                sizes = [shard_bytes(key) for key in keys]
                link.receive_shards(sizes, lambda place, data, first=first: take(first + place, data), self._deadline)  # type: ignore[misc]
                check_digests(link.receive_message(closing_bytes(len(keys)), self._deadline), keys, digests[first:])
        except CorruptWeightsError as error:
            if error.reason != "digest":  # else all has come: the groups are in step
                self._receiver.close()
            raise
        except _OF_THE_GROUP as error:
            self._receiver.close()
            raise _told(error) from error
        except BaseException:
            self._receiver.close()
            raise
        return content_of(self.shards, digests)

    def refuse(self) -> None:
        """It is not wanted: leave the groups, so that the senders do not wait."""
        self._receiver.close()


class GlooLink:
    """Over the host, with torch's own gloo group, made like vLLM's stateless one but bound to one address."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, deadline: float) -> None:
        del device  # the host
        host, _, port = meeting.where.rpartition(":")
        left = timedelta(seconds=_left(deadline))
        store = dist.TCPStore(host, int(port), None, False, left, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = left
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, int(port)))]
        named = dist.PrefixStore(f"{GROUP_PREFIX}/{meeting.name}", store)
        self._group: Any = dist.ProcessGroupGloo(named, rank, meeting.receivers + 1, options)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive_message(self, size: int, deadline: float) -> bytes:
        """See the protocol."""
        data = torch.empty(size, dtype=torch.uint8)
        self._broadcast(data, deadline)
        return bytes(data.numpy())

    def receive_shards(self, sizes: Sequence[int], use: Use, deadline: float) -> None:
        """See the protocol."""
        place = 0
        for length, offsets in pack_layout(sizes, HOST_PACK_BYTES):
            if self._buffer.numel() < length:
                self._buffer = torch.empty(length, dtype=torch.uint8)
            pack = self._buffer[:length]
            self._broadcast(pack, deadline)
            data: Bytes = pack.numpy()
            for offset in offsets:
                use(place, data[offset : offset + sizes[place]])
                place += 1
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """See the protocol. Its connections end with it: whoever still waits for this rank gets an error."""
        group, self._group = self._group, None
        del group

    def _broadcast(self, data: torch.Tensor, deadline: float) -> None:
        if self._group is None:
            raise RetryableError("the group was left")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for piece in data.split(HOST_MESSAGE_BYTES) if data.numel() else ():
            options.timeout = timedelta(seconds=_left(deadline))
            self._group.broadcast([piece], options).wait()


class NcclLink:
    """vLLM's own group and packed broadcast. Not run by the tests of this project: they have no machine with two GPUs."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, deadline: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        unique_id = base64.b64decode(meeting.where, validate=True)
        self._device = device

        def join() -> Any:
            with torch.cuda.device(device):
                return uid_init_process_group(unique_id, rank, meeting.receivers + 1, device)

        joined = join_beside(join, lambda group: group.destroy())
        try:
            self._group: Any = joined.result(_left(deadline))
        except TimeoutError:
            if joined.cancel():
                raise RetryableError(late_receivers(meeting)) from None
            self._group = joined.result()

    def receive_message(self, size: int, deadline: float) -> bytes:
        """See the protocol."""
        with self._limited(deadline) as group, torch.cuda.stream(torch.cuda.Stream(self._device)):
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            group.broadcast(data, src=0)
            return bytes(data.cpu().numpy())

    def receive_shards(self, sizes: Sequence[int], use: Use, deadline: float) -> None:
        """See the protocol."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        places = iter(range(len(sizes)))

        def unpacked(tensors: list[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in tensors:
                use(next(places), tensor.cpu().numpy())

        with self._limited(deadline) as group:
            packed_nccl_broadcast_consumer(
                iterator=_described(sizes),
                group=group,
                src=0,
                post_unpack_func=unpacked,
                buffer_size_bytes=PACK_BYTES,
                num_buffers=NCCL_BUFFERS,
                device=self._device,
            )

    def close(self) -> None:
        """See the protocol. vLLM's own way aborts what is pending."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the communicator may be broken already; nothing is to be saved
                group.destroy()

    @contextmanager
    def _limited(self, deadline: float) -> Iterator[Any]:
        """The group; it is aborted at the deadline, which ends what waits in it."""
        if self._group is None:
            raise RetryableError("the group was left")
        limit = threading.Timer(_left(deadline), self.close)
        limit.daemon = True
        limit.start()
        try:
            with torch.cuda.device(self._device):
                yield self._group
        finally:
            limit.cancel()
        if self._group is None:
            raise RetryableError("the time limit is over")


def join_beside(join: Callable[[], Any], leave: Callable[[Any], None]) -> Future[Any]:
    """Join a group in a thread of its own: NCCL waits for all receivers for ever, and one that died must not hold up this rank,
    and with it its engine. Whoever waits no longer cancels: what was joined after that is left."""
    joined: Future[Any] = Future()

    def run() -> None:
        try:
            group = join()
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits
            if joined.set_running_or_notify_cancel():
                joined.set_exception(error)
            return
        if joined.set_running_or_notify_cancel():
            joined.set_result(group)
        else:
            leave(group)

    threading.Thread(target=run, name="rl-coserve-nccl-join", daemon=True).start()
    return joined


def late_receivers(meeting: Meeting) -> str:
    """Why a group was given up before it was complete."""
    return f"not all {meeting.receivers} receivers joined the trainer in time"


def _described(sizes: Sequence[int]) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
    """What vLLM's consumer is told: plain bytes, so that no dtype has to be aligned in a pack."""
    return ((str(place), ([size], torch.uint8)) for place, size in enumerate(sizes))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryableError("the time limit is over")
    return left


def _own_address(host: str, port: int) -> str:
    """The address of this machine that reaches the sender. Nothing is sent."""
    if ipaddress.ip_address(host).is_loopback:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, port))
        return str(route.getsockname()[0])


def _told(error: BaseException) -> RetryableError:
    """What gloo and NCCL raise, as what it means here."""
    return RetryableError(f"the group with the trainer failed: {str(error) or type(error).__name__}")


__all__ = ["GROUP_PREFIX", "CollectiveReceiver", "GlooLink", "NcclLink", "SenderLink", "Transmission", "join_beside"]
