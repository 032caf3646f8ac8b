"""Every rank puts its own shards of the weights on the relay: one version of all ranks, nothing gathered.

Guarantees: over all ranks every element of every Hugging Face tensor is published exactly once, in the dtype that the model
has it in, or nothing is (:class:`orchestrator.transfer.Publisher`). With ``snapshot_every`` above 0 a version travels as the
difference to the one before, and a full snapshot is published beside it when one is due; a difference is made only from
bytes that were published. An error of one rank is raised on all.

Beside the model, differences cost a copy of this rank's part on the host; without them nothing is kept. Where ``steps`` say what
changed (:mod:`megatron_rlplugin.weights.step_changes`), that copy is brought up to date with it, and what is published, its
digests and snapshots beside differences too, is made from the copy: the weights are read once, for the first version. Else they
are read for every version, and compared with the copy on the host. What is published is the same to the bit.

The weights may change while a version is published that :meth:`WeightPublisher.hold` fixed before: it costs one more copy of this
rank's part on the host, and none where ``steps`` say what changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlplugin.weights.step_changes import Place, StepChanges, WeightEdits, place_of
from megatron_rlplugin.weights.weight_export import as_bytes, converted_shards, serving_keys, serving_shards
from orchestrator.api import PublishResult, RunError, ShardKey
from orchestrator.transfer import DeltaCodec, Publisher, RelayEndpoint, Shard, SnapshotPolicy
from orchestrator.transfer.encoding_choice import EncodingChoice
from orchestrator.transfer.job_head import FULL

PART_BYTES = 8 << 20  # a shard is read whole: the smaller, the less an engine rank reads that it does not host


class TorchRanks:
    """Implements :class:`orchestrator.transfer.PublishingRanks` on a group of its own over the host (gloo). All ranks make
    one. ``timeout``: seconds that a rank waits for another in one collective; None: gloo's default, 30 minutes."""

    def __init__(self, timeout: float | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        limit = None if timeout is None else timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if self.size > 1 else None

    def gather(self, data: bytes) -> list[bytes]:
        if self.size == 1:
            return [data]
        length = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        with _Collective():
            dist.all_gather(lengths, length, group=self._group)
            longest = max(int(item) for item in lengths)
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = _tensor(data)
            found = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(mine, found, dst=0, group=self._group)
        if found is None:
            return []
        return [bytes(item[: int(size)].numpy()) for item, size in zip(found, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64)
        with _Collective():
            dist.broadcast(length, src=0, group=self._group)
            answer = _tensor(data) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(answer, src=0, group=self._group)
        return bytes(answer.numpy())

    def close(self) -> None:
        """Idempotent."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class WeightPublisher:
    """This rank's part of the job's publisher. Every rank makes one, and makes the same calls; rank 0 alone if there is one.

    Making it opens a new epoch at ``version``: what another run of the job published vanishes for readers. ``converter``:
    whose tensors are published, in place of ours (:func:`megatron_rlplugin.weights.weight_export.converted_shards`).
    """

    def __init__(
        self,
        endpoint: RelayEndpoint,
        chunks: Sequence[Any],
        version: int,
        converter: Any | None = None,
        steps: StepChanges | None = None,
        *,
        timeout: float | None,
    ) -> None:
        self._chunks, self._converter = list(chunks), converter
        self._ranks = TorchRanks(timeout)
        self._policy = SnapshotPolicy(every=endpoint.snapshot_every)
        self._choice = EncodingChoice() if endpoint.encoding == "auto" and endpoint.snapshot_every else None
        self._publisher = Publisher(endpoint, ranks=self._ranks, codec=DeltaCodec(threads=endpoint.codec_threads))
        self._kept: dict[Place, Any] = {}  # bytes of the version published last
        self._steps = steps if endpoint.snapshot_every else None
        self._edits: WeightEdits | None = None  # what has happened to it since; None: nobody knows
        self._held: list[tuple[ShardKey, Any]] | None = None  # what is published, and not the weights
        self._spare: dict[Place, Any] = {}  # memory of a copy that nobody needs
        self._version = version  # that is held
        self._publishing = threading.Lock()  # one thing at a time; who holds waits for what is being published
        try:
            self._publisher.rollback(version)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> PublishResult:
        """The present weights as this version; the result is that of all ranks. See ``Publisher.publish_shards``."""
        with self._publishing:
            self._held, self._spare = None, {}
            self._note_steps()
            return self._publish(version)

    def hold(self, version: int) -> None:
        """Fix the present weights as this version: when this returns they may change. Waits for what is being published. Nothing
        is said to other ranks, but all make the call."""
        with self._publishing:
            self._note_steps()
            self._version = version
            if self._edits is not None:  # with the copy of the version before, they are this one
                return
            spare, held = dict(self._spare), []
            for key, data in self._held or ():  # of a version that was never published
                if self._kept.get(place_of(key)) is not data:
                    spare[place_of(key)] = data
            self._held, self._spare = None, {}
            for key, data in self._bytes():
                copy = spare.get(place_of(key))
                if copy is None:
                    copy = data  # nobody else has what was read
                else:
                    copy[:] = data
                held.append((key, copy))
            self._held = held
            if self._steps is not None:
                self._steps.restart()

    def publish_held(self) -> PublishResult:
        """What :meth:`hold` fixed last, from any thread; again after a failure, the same bytes. As :meth:`publish`."""
        with self._publishing:
            return self._publish(self._version)

    def _publish(self, version: int) -> PublishResult:
        plan = self._publisher.plan_next(self._policy, self._choice)
        base = plan.base if plan.base != version else FULL  # the same version again: its relay lost it
        results: list[PublishResult] = []
        try:
            if base != FULL:
                results.append(self._publisher.publish_shards(version, self._shards(differences=True), base))
            if base == FULL or plan.snapshot:
                results.append(self._publisher.publish_shards(version, self._shards(differences=False)))
        finally:
            if self._policy.every and results:  # a snapshot that failed leaves a difference that readers have
                self._keep()
        total, buckets = sum(item.bytes for item in results), sum(item.buckets for item in results)
        return PublishResult(version, total, buckets, sum(item.seconds for item in results), results[-1].content)

    def close(self) -> None:
        """Waits for what is being published. Idempotent."""
        with self._publishing:
            self._kept, self._edits, self._held, self._spare = {}, None, None, {}
            self._publisher.close()
            self._ranks.close()

    def _shards(self, *, differences: bool) -> Iterator[Shard]:
        for key, data in self._bytes():
            yield key, data, self._kept[place_of(key)] if differences else None

    def _note_steps(self) -> None:
        """What the steps since the last publication changed; one that failed leaves the copy as it was, and these with it."""
        if self._steps is None or self._edits is None:
            return
        if self._steps.known:
            self._edits.extend(self._steps.take())
        else:
            self._edits = None

    def _keep(self) -> None:
        """Once it is published; read again from the model rather than kept while it is written: half the memory."""
        if self._edits is not None:
            for place, kept in self._kept.items():
                self._edits.apply(place, kept)
        elif self._held is not None:
            self._keep_held(self._held)
        else:
            for key, data in self._bytes():
                kept = self._kept.get(place_of(key))
                if kept is None:
                    self._kept[place_of(key)] = data.copy()
                else:
                    kept[:] = data
            if self._steps is not None:
                self._steps.restart()
        self._edits = WeightEdits() if self._steps is not None else None

    def _keep_held(self, held: list[tuple[ShardKey, Any]]) -> None:
        """What was held is the copy now. That of the version before is the memory for what is held next, where ``steps`` do not
        say what that is."""
        if self._steps is not None:
            self._kept, self._held = {place_of(key): data for key, data in held}, None
        elif any(self._kept.get(place_of(key)) is not data for key, data in held):  # else it was published again
            self._kept, self._spare = {place_of(key): data for key, data in held}, self._kept

    def _bytes(self) -> Iterator[tuple[ShardKey, Any]]:
        if self._edits is not None:
            for key in serving_keys(self._chunks, None, bucket_bytes=PART_BYTES):
                yield key, self._edits.applied(place_of(key), self._kept[place_of(key)])
            return
        if self._held is not None:
            yield from self._held
            return
        with torch.no_grad():
            if self._converter is None:
                shards = serving_shards(self._chunks, None, bucket_bytes=PART_BYTES)
            else:
                where = self._ranks.rank, self._ranks.size
                shards = converted_shards(self._converter, self._chunks, *where, bucket_bytes=PART_BYTES)
            for key, tensor in shards:
                yield key, as_bytes(tensor)[2]


class _Collective:
    """A dead rank shows as a RuntimeError of the library."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            raise RunError(f"the ranks of the trainer cannot speak to each other any more: {error}") from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def step_changes_of(chunks: Sequence[Any]) -> StepChanges:
    """Of what :class:`WeightPublisher` publishes of these chunks."""
    return StepChanges(lambda: serving_shards(chunks, None, bucket_bytes=PART_BYTES))
