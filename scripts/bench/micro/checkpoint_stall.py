"""Longest stall of the event loop while the store is written and a checkpoint of 24 million tokens is committed.

Real files, threads and writer process, made-up trajectories: 732 of 32,768 tokens (``--quick``: 64 of 4,096) lie in shards. The
store is given a third of them as trained and flushed, then a checkpoint is committed with all of them in its buffer and 256 MB of
the trainer's files to digest, as the pipeline does it; then once more, with the writer killed in the middle. What comes back from
checkpoint and store is counted. The stall is the loop's own (:mod:`scripts.bench.micro.stalls`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.api import RunError, Trajectory
from orchestrator.checkpoint import CheckpointState
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.record_writer import RecordWriter
from orchestrator.runtime.run_records import BesideTheLoop
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.store import TrajectoryStore, count_by_outcome
from scripts.bench.micro.batch_handover import a_trajectory
from scripts.bench.micro.stalls import StallWatch
from scripts.bench.result import frame, now

NAME = "checkpoint-stall"
_BAR = 20.0  # milliseconds
_TRAJECTORIES, _TOKENS = 732, 32_768
_QUICK = 64, 4_096
_TRAINER = 256 << 20  # bytes


async def _measure(folder: Path, number: int, tokens: int, trainer: int) -> dict[str, Any]:
    garbage_collector.calm()  # as in a run
    shards, writer = ShardFolder(folder / "shards"), RecordWriter(folder / "record-writer.log")
    store = TrajectoryStore(folder / "trajectories", finish=shards.finish, writer=writer)
    checkpoints = BesideTheLoop(folder / "checkpoints", 2, writer=writer)
    made = [a_trajectory(index, tokens) for index in range(8)]
    buffer = [shards.finish(replace(made[index % 8], id=f"t{index:08d}")) for index in range(number)]
    await checkpoints.committed(checkpoints.begin(0), _state(0, []))  # the writer starts
    rows: dict[str, Any] = {}
    for step, name in ((1, "whole"), (2, "killed")):
        partial = checkpoints.begin(step)
        (partial / "trainer" / "weights.bin").write_bytes(bytes(trainer))
        watch, began = StallWatch(0.001).start(), time.perf_counter()
        for trajectory in buffer[: number // 3] if step == 1 else ():
            store.append(trajectory, step, "trained", position=0)
        await store.flushed()
        stored = time.perf_counter() - began
        committing = asyncio.ensure_future(checkpoints.committed(partial, _state(step, buffer)))
        if name == "killed":
            while writer.pid is None:  # noqa: ASYNC110  another process is looked at
                await asyncio.sleep(0.001)
            if writer.pid is not None:
                os.kill(writer.pid, signal.SIGKILL)
        await committing
        stalls = watch.stop()
        rows[name] = {
            "stalls_ms": [round(1e3 * one.own, 3) for one in stalls[:5]],
            "where": [str(one) for one in stalls[:1]],
            "store_seconds": round(stored, 3),
            "seconds": round(time.perf_counter() - began, 3),
        }
    found = checkpoints.newest()
    if found is None or found[2] or [one.id for one in found[1].buffer] != [one.id for one in buffer]:
        raise RunError("the checkpoint does not hold what it was given")
    if found[1].buffer[0] != buffer[0] or count_by_outcome(folder / "trajectories") != {"trained": number // 3}:
        raise RunError("checkpoint or store hold something else than they were given")
    deaths = writer.deaths
    store.close()
    writer.close()
    shards.close()
    return {**rows, "deaths": deaths, "shard_bytes": sum(one.stat().st_size for one in found[0].glob("buffer.shards"))}


def _state(step: int, buffer: list[Trajectory]) -> CheckpointState:
    return CheckpointState(step, step, 0, 0.0, tuple(buffer))


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when what was written is not what was given."""
    begun = now()
    number, tokens = _QUICK if quick else (_TRAJECTORIES, _TOKENS)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-checkpoint-") as folder:
        found = asyncio.run(_measure(Path(folder), number, tokens, _TRAINER >> (6 if quick else 0)))
    stall = max([0.0, *(one for name in ("whole", "killed") for one in found[name]["stalls_ms"])])
    return frame(
        NAME,
        "real",
        value=stall,
        unit="ms, longest stall of the loop of its own",
        reference="tokens in the checkpoint's buffer",
        reference_value=number * tokens,
        bar=f"<= {_BAR:g} ms with {_TRAJECTORIES * _TOKENS:,} tokens, the writer killed once",
        holds=None if quick else stall <= _BAR,
        detail={"samples": number, "tokens": tokens, **found, "load_average": os.getloadavg()[0]},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
