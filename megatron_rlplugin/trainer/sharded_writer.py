"""Writing a checkpoint of Megatron-Core's kind (``torch_dist``) beside training.

Guarantees: :meth:`ShardedWriter.begin` returns when this rank's shards are copied to the host, and the state may change;
each rank writes its own file in a thread, synced, and rank 0 the index when all have; :meth:`ShardedWriter.wait` returns
when the checkpoint is whole, or raises one RunError with the cause, the same on every rank. One is written at a time: the next
begins when the one before has ended. Planning is Megatron-Core's; its own asynchronous callers fork a process, which threads of
gloo, Ray and OpenMP may not survive, so they are not used. Threads of ranks speak over a group of their own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import xxhash

from orchestrator.api import CHECKPOINT_DIGESTS, RunError


class ShardedWriter:
    """Of one rank. ``limit``: seconds that its thread waits for another rank's."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None

    def begin(self, folder: Path, state: dict[str, Any], content: dict[str, Any], beside: Path) -> None:
        """Copy ``state`` and begin to write it, and the file ``beside`` it. All ranks call it, outside of any other collective.
        Raises RunError when the one before could not be written, and nobody asked."""
        from megatron.core import dist_checkpointing

        self.wait()
        strategy = _planning_strategy()
        options: dict[str, Any] = {"async_sharded_save": True, "content_metadata": content}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"
        with _no_queue_process():
            dist_checkpointing.save(state, str(folder), strategy, **options)
        writer, metadata = strategy.planned
        buckets = [_on_host(bucket) for bucket in writer.write_buckets]
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit))

        def write() -> None:
            try:
                self._write(folder, writer, metadata, buckets, beside)
            except RunError as error:
                self._failure = error
            except Exception as error:  # noqa: BLE001  another rank that died, for example; raised by wait
                self._failure = RunError(f"{folder} cannot be written: {type(error).__name__}: {error}")

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises RunError, once, when the last one could not be."""
        thread = self._thread
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _write(self, folder: Path, writer: Any, metadata: Any, buckets: list[Any], beside: Path) -> None:
        results: list[Any] = []

        def write_shards() -> None:
            for bucket in buckets:
                results.extend(_write_bucket(writer, bucket))

        def write_index() -> None:
            from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

            writer.finish(metadata, told)
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            shutil.copyfile(beside, folder / beside.name)

        wrong = _failure_of(folder, write_shards)
        told = self._gathered(results)
        self._agree(wrong)
        self._agree(_failure_of(folder, write_index) if dist.get_rank() == 0 else "")
        self._agree(_failure_of(folder, lambda: _digest(folder, dist.get_rank())))

    def _gathered(self, results: list[Any]) -> list[Any]:
        """The results of all ranks, on rank 0."""
        if self._group is None:
            return [results]
        told: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(results, told, dst=0, group=self._group)
        return told or []

    def _agree(self, wrong: str) -> None:
        """Raise RunError on every rank when something is wrong on one."""
        told: list[Any] = [wrong]
        if self._group is not None:
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, wrong, group=self._group)
        for cause in told:
            if cause:
                raise RunError(cause)


@contextmanager
def _no_queue_process() -> Iterator[None]:
    """Megatron-Core's writers begin with a process for the queue of their answers, if there is none yet."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _planning_strategy() -> Any:
    """Megatron-Core's, which tells what it planned: (the writer with this rank's items, the index)."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class PlanningStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *more: Any) -> Any:
            self.planned = writer, planned[1]
            return super()._get_save_and_finalize_callbacks(writer, planned, *more)

    return PlanningStrategy("torch_dist", 1, thread_count=1)


def _on_host(bucket: Any) -> Any:
    """A copy of what goes into one file; not on the device, which has no room for the state twice."""
    file, key, (texts, tensors) = bucket
    return file, key, (texts, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors])


def _write_bucket(writer: Any, bucket: Any) -> list[Any]:
    """Write one file, synced. Raises what writing raised."""
    told: queue.Queue[Any] = queue.Queue()
    counted: queue.Queue[Any] = queue.Queue()
    counted.put(0)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    writer.write_preloaded_data(transforms, 0, bucket, told, counted, use_fsync=True)
    _, found = told.get_nowait()
    if isinstance(found, Exception):
        raise found
    return list(found)


def _failure_of(folder: Path, act: Callable[[], None]) -> str:
    """What a full disk raises in a library's C++ names neither folder nor disk. "": it was done."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  becomes the RunError of all ranks
        free = shutil.disk_usage(folder).free >> 20 if folder.is_dir() else 0
        return f"{folder} cannot be written ({free} MB free there): {error}"
    return ""


def _digest(folder: Path, rank: int) -> None:
    """Of the files that this rank wrote: while its node's page cache has them, and not by one process for all ranks."""
    own = list(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        digests = CHECKPOINT_DIGESTS.format("*")
        own += [file for file in folder.iterdir() if file.suffix != ".distcp" and not file.match(digests)]
    found = {}
    for file in own:
        with file.open("rb") as stream:
            found[file.name] = [file.stat().st_size, hashlib.file_digest(stream, cast(Any, xxhash.xxh3_64)).hexdigest()]
    (folder / CHECKPOINT_DIGESTS.format(f"{rank:05d}")).write_text(json.dumps(found), encoding="ascii")
