"""A batch on its way to the trainer's ranks: longest stall of the event loop, bytes that a rank fetches over its share.

Real processes: 512 trajectories of 32,768 tokens (made up; ``--quick``: 32 of 4,096) are finished into shards one by one on
the loop, as if they ended there, and handed to 8 ranks (2) as one batch by the run's own
:class:`orchestrator.runtime.engine_actors.RayTrainer`, once as files of this machine and once as objects of Ray's store, as
between machines. A rank deals itself every 8th sample and turns it into the arrays that a trainer computes with. Megatron-Core
is not there: what it does with them takes none of the loop's time.

The stall is the loop's own: what its thread waited for a processor is not in it (:mod:`scripts.bench.micro.stalls`). Bytes are
counted twice: those of the shards that the rank opened with the message, and those of shared memory that the kernel says it has
touched. A share is the tokens (4 bytes) and log-probs (4 bytes) of all samples over the number of ranks.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from orchestrator.api import Prompt, TrainBatch, TrainMetrics, TrainSample, Trajectory, Turn
from orchestrator.config import parse_config
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.engine_actors import RayTrainer
from orchestrator.runtime.real_run import start_ray
from orchestrator.shards.sample_references import SampleReference, pack
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.shards.trajectory_shard import OpenShard, encode
from orchestrator.train_samples import to_samples
from scripts.bench.micro.stalls import StallWatch
from scripts.bench.result import frame, now

NAME = "batch-handover"
_STALL, _COPIED = 10.0, 1.2  # the bar: milliseconds; times the share
_SAMPLES, _TOKENS, _RANKS = 512, 32_768, 8
_QUICK = 32, 4_096, 2
_TURNS = 8
_BY_VALUE = 16  # samples that are pickled, for comparison


class CountingRank:
    """In a rank's process: reads its part of each batch and counts."""

    def __init__(self, rank: int = 0, world_size: int = 1, **_: Any) -> None:
        self._rank, self._world = rank, world_size
        OpenShard(encode(a_trajectory(0, 64))[0]).context(0, 1)  # what is imported for it is no part of a batch
        self._counts: dict[str, float] = {}

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """Read this rank's samples."""
        before, opened, held = _shared_bytes(), 0, list[Any]()
        began, tokens = time.perf_counter(), 0
        for sample in batch.samples[self._rank :: self._world]:
            assert isinstance(sample.source, SampleReference)
            arrays = sample.source.read()
            opened += sample.source.shard.size
            tokens += len(arrays[0])
            held.append(arrays)  # so that what is mapped stays mapped until it is counted
            _ = arrays[0].astype(np.int64), arrays[1].astype(np.int64), arrays[2].astype(np.float32)
        message = sum(map(len, pack(batch.samples) or ()))
        self._counts = {
            "bytes": opened + message,
            "touched": _shared_bytes() - before,
            "tokens": tokens,
            "seconds": time.perf_counter() - began,
        }
        return TrainMetrics(batch.step, batch.version + 1, {})

    async def counted(self) -> dict[str, float]:
        """What the last step was for this rank."""
        return self._counts


def _shared_bytes() -> int:
    """Of shared memory, and of mapped files, that this process has touched."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: line.split() for line in lines}
    return sum(int(found[name][1]) << 10 for name in ("RssShmem", "RssFile"))


def a_trajectory(number: int, tokens: int) -> Trajectory:
    """Of turns that are seven parts the policy's, of one part the environment's."""
    share = tokens // _TURNS
    seen, said = share // 8, share - share // 8
    draw = np.random.default_rng(number % 8)
    turns = tuple(
        Turn(
            tuple(draw.integers(0, 150_000, seen).tolist()),
            tuple(draw.integers(0, 150_000, said).tolist()),
            tuple((-draw.random(said, np.float32)).tolist()),
            ((3, said),),
        )
        for _ in range(_TURNS)
    )
    prompt = Prompt(f"p{number}", "made-up", number, "")
    group = f"g{number // 8:07d}"
    return Trajectory(f"t{number:08d}", group, "made-up", prompt, turns, float(number % 2), "1", number, False)


async def hand_over(samples: Sequence[TrainSample], ranks: int, spread: bool) -> dict[str, Any]:
    """The batch to so many ranks; how the loop stood, and what each rank counted."""
    trainer = RayTrainer(f"{__name__}:CountingRank", {"OMP_NUM_THREADS": "1"}, ranks, spread=spread)
    try:
        await trainer.start()
        await trainer.create({})
        batch = TrainBatch(0, 0, tuple(samples))
        watch, began = StallWatch(0.001).start(), time.perf_counter()
        await trainer.train_step(batch)
        seconds = time.perf_counter() - began
        stalls = watch.stop()
        actors = trainer.ranks.actors
        counts = [await trainer.ranks.start_on(actor, "beyond", "counted") for actor in actors]
        pids = list((await trainer.pids()).values())
    finally:
        await trainer.close()
    return {
        "stalls_ms": [round(1e3 * one.own, 3) for one in stalls[:5]],
        "where": [str(one) for one in stalls[:1]],
        "seconds": seconds,
        "ranks": counts,
        "pids": pids,
    }


async def _measure(folder: Path, number: int, tokens: int, ranks: int) -> dict[str, Any]:
    garbage_collector.calm()  # as in a run
    shards = ShardFolder(folder)
    made = [a_trajectory(index, tokens) for index in range(8)]
    plain = [replace(made[index % 8], id=f"t{index:08d}", group_id=f"g{index // 8:07d}") for index in range(number)]
    began = time.perf_counter()
    by_value = TrainBatch(0, 0, tuple(one for item in plain[:_BY_VALUE] for one in to_samples(item)))
    for _ in range(2):  # the second time: as it goes to a second rank
        began = time.perf_counter()
        pickle.dumps(by_value)
    pickled = (time.perf_counter() - began) * number / len(by_value.samples) * ranks
    del by_value
    gc.collect()  # what was made to be compared with is none of the run's
    watch, samples = StallWatch(0.001).start(), list[TrainSample]()
    finished = []
    for trajectory in plain:
        finished.append(await shards.finish_in_slices(trajectory))
        await asyncio.sleep(0)
    for trajectory in finished:
        samples += to_samples(trajectory)
    await asyncio.sleep(0.01)
    stalls = watch.stop()
    held = shards.bytes
    found = {"files": await hand_over(samples, ranks, False), "objects": await hand_over(samples, ranks, True)}
    share = sum(
        4 * sample.source.facts.tokens + 4 * sample.source.facts.generated for sample in samples if sample.source
    )
    message = sum(map(len, pack(samples) or ()))
    shards.close()
    return {
        "finishing": {
            "stalls_ms": [round(1e3 * one.own, 3) for one in stalls[:5]],
            "where": [str(one) for one in stalls[:1]],
        },
        "by_value_seconds": pickled,
        "share": share / ranks,
        "message": message,
        "shards": held,
        **found,
    }


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    import ray

    begun = now()
    number, tokens, ranks = _QUICK if quick else (_SAMPLES, _TOKENS, _RANKS)
    start_ray(parse_config({"ray": {"cpus": ranks + 1, "object_store_mb": 512}}))
    try:
        with TemporaryDirectory(prefix="rl-coserve-handover-") as folder:
            found = asyncio.run(_measure(Path(folder) / "shards", number, tokens, ranks))
    finally:
        ray.shutdown()
    ways = found["files"], found["objects"]
    stall = max([0.0, *found["finishing"]["stalls_ms"], *(one for way in ways for one in way["stalls_ms"])])
    copied = max(counts["bytes"] for way in ways for counts in way["ranks"]) / found["share"]
    touched = max(counts["touched"] for counts in found["files"]["ranks"]) / found["share"]
    whole = all(sum(counts["tokens"] for counts in way["ranks"]) == number * tokens for way in ways)
    holds = stall <= _STALL and copied <= _COPIED and whole
    return frame(
        NAME,
        "real",
        value=stall,
        unit="ms, longest stall of the loop of its own",
        reference="the loop's seconds for pickling the batch whole for every rank, from 16 samples",
        reference_value=round(found["by_value_seconds"], 3),
        bar=f"<= {_STALL:g} ms; <= {_COPIED:g} x its share per rank, with {_SAMPLES} x {_TOKENS:,} tokens to {_RANKS} ranks",
        holds=None if quick else holds,
        detail={
            "trajectories": number,
            "tokens": tokens,
            "ranks": ranks,
            "samples": number,
            "all_tokens_read": whole,
            "copied_over_share": round(copied, 4),
            "touched_over_share": round(touched, 4),
            **found,
            "load_average": os.getloadavg()[0],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[pid for way in ways for pid in way["pids"]],
    )
