"""Own busy time of the loops of a run with 10,000 environment sessions in shard processes, p99 between two turns of a loop.

Real: the production pipeline on a real clock, shard processes with the production's hosts, managers and messages, proxy, buffer,
ledger, journal, events, Arrow shards, Parquet store, checkpoints with their writer. Twins: engines, trainer (real batches and
steps, no gradients), rewards, environments that only think. What a tool takes is what Heddle measured for its three tasks
(table 1: 0.41, 1.41 and 0.046 s on average; their turns and sigmas are ASSUMED), what a turn takes of the engine some 12 s, 300
tokens on average. The value is that of the worst loop, the head's or a shard's; beside it stand what loops waited for a
processor, of the longest turns what they consisted of and what a process beside them saw (:mod:`scripts.bench.micro.hold_watch`),
and the same run in one process with 2,000 sessions for a third of the time. With ``--quick`` all goes ten times as fast; nothing
is claimed.

Shards and the record writer are sessions of their own, so that niceness alone gives them nothing where the system groups
processes by session (``kernel.sched_autogroup_enabled``). They get the group's niceness that this process has, where it may give
it; which one each had stands in the result. To run it before other work, as root:

    setsid -w sh -c 'echo -10 > /proc/self/autogroup; exec rl-coserve bench environments'

``python -m scripts.bench.micro.environments --sessions 4000 --shards 2 --minutes 5`` measures another size, which claims nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import orchestrator
from orchestrator.api import ManagedWorker, RunError, TrainBatch
from orchestrator.build import build_pipeline
from orchestrator.components import Components, ManagerParts
from orchestrator.config import Config, parse_config
from orchestrator.ledger import recount
from orchestrator.manager_shards.shard_managers import ShardManagers
from orchestrator.pipeline import Pipeline
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.run_records import RunRecords
from orchestrator.runtime.shard_process import LocalShard, share_of
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask, SimTrainer
from scripts.bench.micro.busy_loop import BusySelector
from scripts.bench.micro.hold_watch import Beat, HoldWatch, children, priority_of, share_priority
from scripts.bench.micro.memory_rise import resident_mib, slope
from scripts.bench.result import frame, now

NAME = "environments"
_SESSIONS, _ALONE, _SHARDS, _SECONDS, _ALONE_SECONDS = 10_000, 2_000, 4, 1800.0, 600.0
_QUICK = (64, 2, 16.0)  # sessions, shards, seconds
_P99, _MOST, _STEPS = 10.0, 250.0, 60  # the bar: milliseconds, milliseconds, steps
_FLAT = 60.0  # MiB an hour that a slope may have
_SHARD = "scripts.bench.micro.environment_shard"


def config_of(sessions: int, shards: int, seed: int, quick: bool) -> Config:
    """A run of this size; a quick one thinks and speaks a tenth as long."""
    tasks = {}
    for name, task in load_scenario("heddle").sim.tasks.items():
        kept = {key: getattr(task, key) for key in ("turns_min", "turns_max", "step_seconds", "step_sigma")}
        sizes = {"prompt_tokens": 400, "observation_tokens": 200, "response_tokens": 300.0, "response_sigma": 0.8}
        tasks[name] = kept | sizes | {"response_max": 2048}
        if quick:
            tasks[name] |= {"step_seconds": task.step_seconds / 10, "response_tokens": 30.0, "response_max": 205}
    batch = (64, 8) if sessions >= 1024 else (2, 4)
    return parse_config(
        {
            "run": {"name": NAME, "seed": seed, "steps": 1_000_000},
            "rollout": {
                "workers": 8,
                "environments": sessions,
                "shards": shards,
                "alpha": 64,
                "groups_per_step": batch[0],
                "group_size": batch[1],
                "environment_step_timeout": 600.0,
                "stall_timeout": 120.0,
                "engine": {"max_num_seqs": max(64, sessions // 4), "max_model_len": 32768},
            },
            "evaluation": {"prompts": 1},
            "checkpoint": {"every": 4},
            "logging": {"turns_mb": 0},
            "sim": {
                "tasks": tasks,
                "decode_seconds_per_step": 0.04,
                "decode_seconds_per_sequence": 1e-5,
                "train_seconds_per_token": 1e-6,
                "publish_seconds": 0.1 if quick else 0.5,
                "update_seconds": 0.1 if quick else 0.5,
            },
        }
    )


class UnauditedBatches:
    """For the trainer's twin: an audit remembers every trajectory, which a memory figure must not show."""

    trained_ids: tuple[str, ...] = ()

    def check_batch(self, batch: TrainBatch, version: int) -> None:
        """Nothing."""

    def record_training(self, batch: TrainBatch) -> None:
        """Nothing."""


async def play(config: Config, folder: Path, selector: BusySelector, seconds: float, warm: float) -> dict[str, Any]:
    """One run in this process and its shards; what it says of itself. Counted after ``warm`` seconds."""
    loop, run = asyncio.get_running_loop(), RunFolder(folder)
    weights, task = SimWeights(), SimTask(config)
    workers: list[ManagedWorker] = [
        SimWorker(f"sim-{index}", config, weights) for index in range(config.rollout.workers)
    ]
    trainer = SimTrainer(config, weights, cast(RunAudit, UnauditedBatches()))
    with RunRecords.open(run, config, loop.time, datetime.now(UTC), resume=False) as records:
        events, ledger = records.events, records.ledger
        parts = Components(
            task, workers, trainer, SimReward(config), events, ledger, records.store, SimDisplay(), records.checkpoints
        )
        parts.shards = records.shards
        shards = _shards(config, records.shards, folder, warm) if config.rollout.shards > 1 else []
        if shards:
            parts.managers = ManagerParts(shards, records.shards.adopt)
        pipeline = build_pipeline(config, parts)
        garbage_collector.calm()
        loop.call_later(warm, selector.begin)
        memory: dict[str, list[tuple[float, float]]] = {}
        watch = asyncio.create_task(_watch(memory, pipeline, loop.time()), name="memory")
        last: dict[str, Any] = {}

        def stop() -> None:  # to end all at once is measured no more
            last.update(
                _loops(pipeline, selector), in_flight=pipeline.rollout.in_flight, priorities=_priorities(shards)
            )
            watch.cancel()
            pipeline.stop("the time is up")

        loop.call_later(seconds, stop)
        before = os.times()
        try:
            await pipeline.run()
        finally:
            watch.cancel()
            await asyncio.gather(*(shard.close() for shard in shards))
            for worker in workers:
                await worker.close()
            await trainer.close()
        after, totals = os.times(), ledger.counts.as_dict()
    return last | {
        "sessions": config.rollout.environments,
        "shards": config.rollout.shards,
        "seconds": seconds,
        "steps": pipeline.position.step,
        "ledger": totals,
        "ledger_closes": recount(run.lines(run.ledger_file)) == totals,  # what is in flight then waits in the buffer
        "memory_mib": {name: [[round(at), round(mib, 1)] for at, mib in points] for name, points in memory.items()},
        "memory_slope": {name: _rise(points, seconds) for name, points in memory.items()},
        "head_processor_seconds": round(after.user + after.system - before.user - before.system, 2),
    }


def _priorities(shards: Sequence[LocalShard]) -> dict[str, dict[str, Any]]:
    """Of the head, its shards, and its other children, of which the record writer is one."""
    known = {os.getpid(): "head", **{shard.pid: f"s{number}" for number, shard in enumerate(shards)}}
    found = {}
    for pid in (os.getpid(), *children(os.getpid())):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[2:3]
            found[known.get(pid) or " ".join([str(pid), *name])] = priority_of(pid)
    return found


def _shards(config: Config, shards: ShardFolder, folder: Path, warm: float) -> list[LocalShard]:
    hello = {
        "beats": str(folder.absolute()),
        "config": share_of(config).model_dump(mode="json"),
        "folders": [str(one.absolute()) for one in shards.folders],
        "warm": warm,
        "distribution": orchestrator.__version__,
    }
    numbers = range(config.rollout.shards)
    return [LocalShard({**hello, "name": f"s{n}"}, folder / "logs" / f"shard-{n}.log", _SHARD) for n in numbers]


def _loops(pipeline: Pipeline, selector: BusySelector) -> dict[str, Any]:
    loops = {"head": selector.as_dict() | {"mib": resident_mib()}}
    managers = pipeline.rollout.environments
    if isinstance(managers, ShardManagers):
        loops |= managers.counted("loop")
    return {"loops": loops}


async def _watch(memory: dict[str, list[tuple[float, float]]], pipeline: Pipeline, began: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(5.0)
        share_priority(children(os.getpid()))
        managers, found = pipeline.rollout.environments, {"head": resident_mib()}
        if isinstance(managers, ShardManagers):
            found |= {name: said["mib"] for name, said in managers.counted("loop").items()}
        for name, mib in found.items():
            memory.setdefault(name, []).append((loop.time() - began, mib))


def _rise(points: list[tuple[float, float]], seconds: float) -> list[float] | None:
    """MiB an hour over the last half, with its 95 % interval; None where that is too short."""
    half = [point for point in points if point[0] >= seconds / 2]
    if not half or half[-1][0] - half[0][0] < 180:
        return None
    return [round(value, 1) for value in slope(half)]


def part(sessions: int, shards: int, seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    """One run in processes of its own. Raises RunError where it fails."""
    given = [sessions, shards, seconds, seed, int(quick)]
    command = [sys.executable, "-m", "scripts.bench.micro.environments", "--part", *map(str, given)]
    load = os.getloadavg()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"load_average": [load, os.getloadavg()]}


def worst(found: dict[str, Any], name: str) -> float:
    """Of all loops of a run, in milliseconds."""
    return max(float(loop["own_ms"].get(name, 0.0)) for loop in found["loops"].values())


def is_clean(found: dict[str, Any]) -> bool:
    """It trained, all is accounted for, and memory does not rise."""
    rises = found["memory_slope"].values()
    flat = all(rise is not None and (rise[1] <= 0 or rise[0] <= _FLAT) for rise in rises)
    return bool(found["ledger_closes"]) and found["steps"] >= _STEPS and flat


def result(sharded: dict[str, Any], alone: dict[str, Any], quick: bool, nonce: str, begun: str) -> dict[str, Any]:
    """The figure of a sharded run, and of one in one process beside it."""
    whole = sharded["sessions"] >= _SESSIONS and sharded["seconds"] >= _SECONDS
    holds = whole and worst(sharded, "p99") <= _P99 and worst(sharded, "max") <= _MOST and is_clean(sharded)
    return frame(
        NAME,
        "real",
        value=worst(sharded, "p99"),
        unit="ms, p99 of a loop's own busy time between two of its turns, the worst loop",
        reference=f"one process with {alone['sessions']} sessions for {alone['seconds'] / 60:g} minutes",
        reference_value=worst(alone, "p99"),
        bar=f"<= {_P99:g} ms, most {_MOST:g} ms, with {_SESSIONS:,} sessions for {_SECONDS / 60:g} minutes; >= {_STEPS} "
        f"steps, ledger closed, memory rises by <= {_FLAT:g} MiB/h or not at all over the last half",
        holds=None if quick else holds,
        detail={"sharded": sharded, "alone": alone, "cores": os.cpu_count(), "most_ms": worst(sharded, "max")},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError where a run fails."""
    begun, seed = now(), zlib.crc32(nonce.encode())
    sessions, shards, seconds = _QUICK if quick else (_SESSIONS, _SHARDS, _SECONDS)
    sharded = part(sessions, shards, seconds, seed, quick)
    alone = part(min(_ALONE, sessions), 1, min(_ALONE_SECONDS, seconds), seed, quick)
    return result(sharded, alone, quick, nonce, begun)


def _part(sessions: int, shards: int, seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    config = config_of(sessions, shards, seed, quick)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-environments-") as folder:
        path = Path(folder)
        (path / "logs").mkdir()
        selector, watch = BusySelector(Beat(path, "head")), HoldWatch(path)
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
                found = runner.run(play(config, path, selector, seconds, min(60.0, seconds / 4)))
        finally:
            seen = watch.stop()
    return with_seen(found, seen)


def with_seen(found: dict[str, Any], seen: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """With what was seen beside them in the longest turns of each loop."""
    for name, loop in found["loops"].items():
        holds = {hold["began"]: hold for hold in seen.get(name, ())}
        loop["longest"] = [turn | {"seen": holds.get(turn["began"])} for turn in loop["longest"]]
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs=5, metavar=("SESSIONS", "SHARDS", "SECONDS", "SEED", "QUICK"))
    parser.add_argument("--sessions", type=int, default=_SESSIONS)
    parser.add_argument("--alone", type=int, default=_ALONE)
    parser.add_argument("--shards", type=int, default=_SHARDS)
    parser.add_argument("--minutes", type=float, default=_SECONDS / 60)
    given = parser.parse_args()
    if given.part is not None:
        sessions, shards, seconds, seed, quick = given.part
        print(json.dumps(_part(int(sessions), int(shards), float(seconds), int(seed), quick == "1")))
        return
    begun, seconds = now(), 60 * given.minutes
    sharded = part(given.sessions, given.shards, seconds, 0, quick=False)
    alone = part(given.alone, 1, min(_ALONE_SECONDS, seconds), 0, quick=False)
    print(json.dumps(result(sharded, alone, False, "", begun), indent=2))


if __name__ == "__main__":
    _main()
