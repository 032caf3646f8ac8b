"""The real part of ``tail-batching``, in a process of its own: stock vLLM on the CPU under the production pipeline.

The pipeline, proxy, buffer and rounds are those of a run; the worker is
``vllm_rlplugin.worker.inprocess_worker:EngineWorker`` in this process. Nothing is trained, so the weights stay, and an
update is a no-op; responses are as long as the trace says (``max_tokens``, no stop token). Plain rounds and tail
batching take turns on one engine. A rollout's time is from the step before to its batch, in wall seconds and in seconds
of this process's processor: engine and pipeline are one thread that never waits, so that the latter do not see the
neighbours. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from orchestrator.api import (
    Completion,
    GenerationRequest,
    PublishResult,
    RunError,
    Sampling,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    UpdateResult,
    WorkerStats,
)
from orchestrator.build import build_pipeline
from orchestrator.components import Components, Position
from orchestrator.config import Config
from orchestrator.events import EventLog, MemorySink
from orchestrator.ledger import Ledger
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.run_audit import account_epochs
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask
from scripts.bench.papers.run_figures import epochs_done
from scripts.bench.papers.tail_batching_scenario import (
    CALIBRATION,
    CALIBRATION_ROUNDS,
    MAX_LEN,
    SLOTS,
    alike,
    scenario,
    traces,
)

WORKER_CLASS = "vllm_rlplugin.worker.inprocess_worker:EngineWorker"


class ForcedLengths:
    """A ManagedWorker around the real one: responses as long as the trace says, weights that never change."""

    def __init__(self, worker: Any, run: str, trace: EpisodeTraces) -> None:
        self.name = "vllm-0"
        self._worker = worker
        self._run = run  # in front of request ids: the engine serves several runs, whose ids are the same
        self._trace = trace
        self._version = -1
        self.made = 0  # tokens, aborted ones included
        self.aborted = 0  # tokens of aborted requests

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the port."""
        await self._worker.add([self._forced(request) for request in requests])

    def _forced(self, request: GenerationRequest) -> GenerationRequest:
        length = len(self._trace.response(request.token_ids, request.turn, request.sampling.max_tokens))
        name = f"{self._run}/{request.request_id}"
        return replace(request, request_id=name, sampling=Sampling(length, temperature=1.0))

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """See the port."""
        await self._worker.abort(
            [f"{self._run}/{name}" for name in request_ids], trajectories=trajectories, groups=groups
        )

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """See the port."""
        await self._worker.prioritize(priorities)

    async def completions(self) -> list[Completion]:
        """See the port."""
        found = await self._worker.completions()
        for completion in found:
            self.made += len(completion.token_ids)
            self.aborted += len(completion.token_ids) * (completion.finish_reason == "abort")
        return [self._returned(completion) for completion in found]

    def _returned(self, completion: Completion) -> Completion:
        name = completion.request_id.removeprefix(f"{self._run}/")
        spans = ((self._version, len(completion.token_ids)),) if completion.token_ids else ()
        return replace(completion, request_id=name, versions=spans)  # the engine's own version never moves

    async def suspend(self) -> None:
        """See the port."""
        await self._worker.suspend()

    async def prepare(self, version: int) -> None:
        """Nothing is to be fetched."""

    async def update(self, version: int) -> UpdateResult:
        """The weights stay."""
        self._version = version
        return UpdateResult(version, 0, 0.0)

    async def resume(self) -> None:
        """See the port."""
        await self._worker.resume()

    async def stats(self) -> WorkerStats:
        """See the port."""
        found: WorkerStats = replace(await self._worker.stats(), version=self._version)
        return found

    async def restart(self) -> None:
        """The engine is not to die here."""
        raise RunError("the engine of tail-batching died")

    async def close(self) -> None:
        """Whoever started it closes it."""


class NoTrainer:
    """A Trainer that counts versions."""

    def __init__(self) -> None:
        self.version = 0

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the port."""

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the port."""
        self.version += 1
        return TrainMetrics(batch.step, self.version, {})

    async def publish(self) -> PublishResult:
        """See the port."""
        return PublishResult(self.version, 0, 0, 0.0)

    async def save(self, folder: str) -> None:
        """See the port."""

    async def saved(self) -> None:
        """See the port."""

    async def load(self, folder: str) -> int:
        """See the port."""
        return self.version

    async def close(self) -> None:
        """See the port."""


class NoStore:
    """A Store that forgets."""

    def append(
        self, trajectory: Trajectory, step: int, outcome: str, *, position: int | None = None, weight: float = 1.0
    ) -> None:
        """See the port."""

    def behind(self) -> str:
        """See the port."""
        return ""

    def flush(self) -> None:
        """See the port."""

    async def flushed(self) -> None:
        """See the port."""


class Stopwatch:
    """A sink for events that notes the processor time at each line: the pipeline says when a rollout began and ended."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._last = time.process_time()

    def write(self, line: str, /) -> None:
        """See LineSink."""
        now = time.process_time()
        self.events.append({**json.loads(line), "processor": now - self._last})
        self._last = now

    def rollouts(self) -> list[tuple[float, float]]:
        """(wall seconds, processor seconds) of each."""
        stages = [event for event in self.events if event.get("stage") == "get_batch"]
        return [(stage["end"] - stage["start"], stage["processor"]) for stage in stages]


async def epoch(worker: Any, config: Config, run: int, trace: EpisodeTraces) -> dict[str, Any]:
    """One epoch. ``worker`` is the real one."""
    watch, journal = Stopwatch(), MemorySink()
    events = EventLog(watch, asyncio.get_running_loop().time)
    ledger = Ledger(journal, events.time)
    forced = ForcedLengths(worker, f"run{run}", trace)
    parts = Components(
        SimTask(config, trace), [forced], NoTrainer(), SimReward(config, trace), events, ledger, NoStore(), SimDisplay()
    )
    pipeline = build_pipeline(config, parts, Position(trajectories=abs(run) * 100_000))
    reason = await pipeline.run()
    if reason != "completed":
        raise RunError(f"tail-batching: {reason}")
    seconds = watch.rollouts()
    rounds = [event for event in watch.events if event["kind"] == "round"]
    steps = [event for event in watch.events if event["kind"] == "step"]
    enabled = config.rollout.rounds.enabled
    planner = pipeline.rollout.rounds.planner if pipeline.rollout.rounds is not None else None
    size = config.rollout.rounds.epoch_prompts or 0
    found = account_epochs("".join(journal.lines).splitlines(), size, planner.outstanding if planner else ())
    trained = sum(int(event["tokens"]) for event in steps)
    return {
        "tail": enabled,
        "wall": sum(wall for wall, _ in seconds),
        "processor": sum(processor for _, processor in seconds),
        "rounds": [
            {
                "kind": rounds[index]["round"] if enabled else "plain",
                "wall": round(wall, 4),
                "processor": round(processor, 4),
                "deferred": rounds[index]["deferred"] if enabled else 0,
                "thrown_away": rounds[index]["thrown_away"] if enabled else 0,
            }
            for index, (wall, processor) in enumerate(seconds)
        ],
        "tokens_made": forced.made,
        "tokens_trained": trained,
        "tokens_aborted": forced.aborted,
        "epochs": epochs_done(found, size) if enabled else 1,
        "violations": found.violations,
        "ledger": ledger.counts.as_dict(),
    }


async def calibrated(worker: Any) -> list[dict[str, Any]]:
    """Processor seconds of plain rounds with lengths of their own, by the same pipeline: what the simulator is told."""
    found: list[dict[str, Any]] = []
    for place, (prompts, members) in enumerate([CALIBRATION[-1], *CALIBRATION]):  # the first one warms up
        given = f"rollout.groups_per_step={prompts}", f"run.steps={CALIBRATION_ROUNDS}"
        played = await epoch(worker, scenario(*given, tail=False), -1 - place, alike(members))
        if place:
            seconds = median(part["processor"] for part in played["rounds"])
            found.append({"prompts": prompts, "members": members, "seconds": seconds})
    return found


async def measure(model: str, pairs: int, limit: float) -> dict[str, Any]:
    """Pairs of epochs, plain and tail, the order changing. After the first, no pair is begun that would not fit into ``limit``
    seconds from when the engine is up."""
    module, _, name = WORKER_CLASS.partition(":")
    worker = getattr(importlib.import_module(module), name)(
        model=model, name="vllm-0", max_num_seqs=SLOTS, max_model_len=MAX_LEN, kv_cache_mb=128, threads=1
    )
    begun = time.monotonic()
    calibration = await calibrated(worker)
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for pair in range(pairs):
        start = time.monotonic()
        if rows and start - begun + longest > limit:
            break
        both = [
            await epoch(worker, scenario(tail=tail), 2 * pair + place, traces())
            for place, tail in enumerate((False, True) if pair % 2 == 0 else (True, False))
        ]
        rows += both
        longest = max(longest, time.monotonic() - start)
    await worker.close()
    return {
        "pid": os.getpid(),
        "epochs": rows,
        "calibration": calibration,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240.0)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.model, arguments.pairs, arguments.limit))))


if __name__ == "__main__":
    main()
