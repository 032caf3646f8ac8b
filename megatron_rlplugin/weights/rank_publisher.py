"""Every rank puts its own shards of the weights on the relay: one version of all ranks, nothing gathered.

Guarantees: over all ranks every element of every Hugging Face tensor is published exactly once, in the dtype that the model
has it in, or nothing is (:class:`orchestrator.transfer.Publisher`). With ``snapshot_every`` above 0 a version travels as the
difference to the one before, and a full snapshot is published beside it when one is due; a difference is made only from
bytes that were published. An error of one rank is raised on all.

Beside the model, differences cost a copy of this rank's part on the host; without them nothing is kept. Where ``steps`` say what
changed (:mod:`megatron_rlplugin.weights.step_changes`), that copy is brought up to date with it, and what is published, its
digests and snapshots beside differences too, is made from the copy: the weights are read once, for the first version. Else they
are read for every version, and compared with the copy on the host. What is published is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    one."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

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
    ) -> None:
        self._chunks, self._converter = list(chunks), converter
        self._ranks = TorchRanks()
        self._policy = SnapshotPolicy(every=endpoint.snapshot_every)
        self._choice = EncodingChoice() if endpoint.encoding == "auto" and endpoint.snapshot_every else None
        self._publisher = Publisher(endpoint, ranks=self._ranks, codec=DeltaCodec(threads=endpoint.codec_threads))
        self._kept: dict[Place, Any] = {}  # bytes of the version published last
        self._steps = steps if endpoint.snapshot_every else None
        self._edits: WeightEdits | None = None  # what has happened to it since; None: nobody knows
        try:
            self._publisher.rollback(version)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> PublishResult:
        """The present weights as this version; the result is that of all ranks. See ``Publisher.publish_shards``."""
        plan = self._publisher.plan_next(self._policy, self._choice)
        base = plan.base if plan.base != version else FULL  # the same version again: its relay lost it
        results: list[PublishResult] = []
        self._note_steps()
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
        """Idempotent."""
        self._kept, self._edits = {}, None
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

    def _bytes(self) -> Iterator[tuple[ShardKey, Any]]:
        if self._edits is not None:
            for key in serving_keys(self._chunks, None, bucket_bytes=PART_BYTES):
                yield key, self._edits.applied(place_of(key), self._kept[place_of(key)])
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
