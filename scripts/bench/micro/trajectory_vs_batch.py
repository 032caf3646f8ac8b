"""Rollout time of batch-level over trajectory-level environments (RollArt figure 5), as environments' times vary more.

Real vLLM in a Ray actor, the production proxy and environment managers; the environments are twins that sleep: a time for each
turn from a Gaussian of mean 0.5 s and a standard deviation of 0.1 to 1.0 of it, cut off at 0 (RollArt 7.3: mean 10 s). Both
ways play the same episodes (times drawn by episode and turn), on the same engine, one after the other; batch-level is
the production code of ``run.mode = "sync"``. Each repetition goes through all deviations, both ways in turn; medians.
The paper's figure 11b takes whole training steps; here the time of a rollout is taken, without training.

Beside each ratio stands what the simulator predicts of it: the same managers, proxy and episodes in virtual time, around a
simulated engine whose three costs are fitted to requests that this engine was given before any rollout (all at once, no
environment). So the policy and all deviations are held back from the calibration.

``python -m scripts.bench.micro.trajectory_vs_batch FOLDER --next`` makes one repetition that is missing in FOLDER and ends, with
exit code 3 when none is; ``--result`` prints the figure from what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from orchestrator.api import (
    GenerationRequest,
    ManagedWorker,
    Observation,
    Prompt,
    RunError,
    Sampling,
    StepResult,
    Trajectory,
)
from orchestrator.cluster import ActorGen
from orchestrator.config import parse_config
from orchestrator.environments.lockstep import Lockstep
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine
from orchestrator.runtime.own_engines import WORKER_CLASS
from orchestrator.runtime.real_run import start_ray
from orchestrator.sim.cost_model import LinearCosts
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench import virtual_run
from scripts.bench.cells import Cells
from scripts.bench.papers.calibrate import nonnegative_factors
from scripts.bench.result import frame, now

NAME = "trajectory-vs-batch"
PAPER = {0.1: 1.23, 1.0: 2.27}  # RollArt 7.3, R2: the ends; the values between are only drawn
_MODEL = "scripts.bench.probes.vllm.recompute_probe:write_tiny_qwen3"
_VOCABULARY = 64  # of that model
_REPETITIONS = 3
_FIRST, _LATER, _SAID = 16, 8, 4  # tokens: first observation, those after it, an answer
_REQUESTS = [(count, prompt, said) for count in (1, 8, 32, 128) for prompt, said in ((16, 4), (16, 32), (128, 4))]
_ROUNDS = 3  # of these, each with prompts of its own; medians
_GAIN_BAR = 0.10  # of a gain, that the simulator may be off by


@dataclass(frozen=True)
class Load:
    """What is played. Seconds; ``deviations`` are shares of the mean."""

    trajectories: int
    turns: int
    mean: float
    deviations: tuple[float, ...]


_FULL = Load(128, 16, 0.5, (0.1, 0.5, 1.0))
_QUICK = Load(48, 6, 0.2, (0.1, 1.0))


class SleepingTask:
    """Environments of which only the time differs."""

    name = "sleeping"
    vocabulary: Sequence[str] = tuple(f"w{number}" for number in range(_VOCABULARY))
    pad_id, end_id = 0, 1
    max_response_tokens = _SAID

    def __init__(self, load: Load, deviation: float, seed: int) -> None:
        self.load = load
        self.deviation = deviation
        self.seed = seed
        self.max_turns = load.turns
        self.max_context_tokens = _FIRST + load.turns * (_LATER + _SAID)

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """As many as there are trajectories."""
        return (Prompt(f"{seed}-{number}", self.name, number, "") for number in range(self.load.trajectories))

    def environment(self) -> SleepingEnvironment:
        """See the protocol."""
        return SleepingEnvironment(self)


class SleepingEnvironment:
    """One episode of a fixed number of turns."""

    version = "sleeping-1"

    def __init__(self, task: SleepingTask) -> None:
        self._task = task
        self._turn = 0
        self._draw = random.Random(0)

    async def reset(self, prompt: Prompt) -> Observation:
        """See the protocol. Takes no time: both ways begin alike."""
        self._draw = random.Random(f"{self._task.seed}/{self._task.deviation}/{prompt.seed}")
        return Observation(tuple(self._draw.randrange(2, _VOCABULARY) for _ in range(_FIRST)))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """See the protocol."""
        load = self._task.load
        self._turn += 1
        await asyncio.sleep(max(0.0, self._draw.gauss(load.mean, self._task.deviation * load.mean)))
        seen = tuple(self._draw.randrange(2, _VOCABULARY) for _ in range(_LATER))
        return StepResult(Observation(seen), 0.0, self._turn == load.turns)

    async def close(self) -> None:
        """See the protocol."""


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the engine does not start, or a trajectory fails."""
    begun = now()
    load = _QUICK if quick else _FULL
    rows = repetitions(load, range(1 if quick else _REPETITIONS))
    return result(rows, quick, {"started": begun, "nonce": nonce})


def repetitions(load: Load, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Some of them, on one engine. Each as {repetition, deviation, way, seconds, predicted, ...}, and one more of the engine's
    costs for each repetition."""
    import ray

    config = parse_config({"ray": {"cpus": 2}})
    start_ray(config)
    try:
        with tempfile.TemporaryDirectory(prefix="rl-coserve-bench-") as folder:
            rows = asyncio.run(_measure(load, numbers, Path(folder)))
    finally:
        ray.shutdown()
    costs = {row["repetition"]: row for row in rows if row["way"] == "costs"}
    return [row | _prediction(load, row, costs[row["repetition"]]) for row in rows]


def _prediction(load: Load, row: dict[str, Any], costs: dict[str, Any]) -> dict[str, float]:
    if row["way"] == "costs":
        return {}
    seconds = predicted(load, row["deviation"], row["repetition"], costs, batch=row["way"] == "batch")
    return {"predicted": round(seconds, 3)}


async def _measure(load: Load, numbers: Sequence[int], model: Path) -> list[dict[str, Any]]:
    engines = ActorGen(VllmEngine, {"vllm-0": None}, {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    (actor,) = engines.actors
    actor.start()
    try:
        await engines.start("function", _MODEL, {"folder": model, "seed": 0})
    finally:
        actor.kill()
    length = max(_FIRST + load.turns * (_LATER + _SAID) + _LATER, *(prompt + said for _, prompt, said in _REQUESTS))
    arguments = {"model": str(model), "max_num_seqs": load.trajectories, "max_model_len": length, "threads": 1}
    worker = RayWorker(engines, actor, WORKER_CLASS, arguments)
    try:
        await worker.start()
        await _rollout(Load(load.trajectories, 2, 0.01, ()), worker, 0.1, -1, batch=False)  # warm
        rows = []
        for number in numbers:
            rows.append({"repetition": number, "way": "costs", **await engine_costs(worker, number)})
            for place, deviation in enumerate(load.deviations):
                ways = (False, True) if (number + place) % 2 else (True, False)
                for batch in ways:
                    rows.append(await _rollout(load, worker, deviation, number, batch=batch))
        return rows
    finally:
        await worker.close()


async def engine_costs(worker: ManagedWorker, number: int) -> dict[str, float]:
    """Seconds of a step, of a sequence in it and of a prefilled token, by least squares over the times of :data:`_REQUESTS`, each
    relative to what it took; none below 0."""
    draw, times = random.Random(f"costs/{number}"), []
    for part in range(_ROUNDS):
        for place, (count, prompt, said) in enumerate(_REQUESTS):
            requests = [
                GenerationRequest(
                    f"costs-{number}-{part}-{place}-{at}",
                    f"costs-{number}-{part}-{place}-{at}",
                    0,
                    tuple(draw.randrange(2, _VOCABULARY) for _ in range(prompt)),
                    Sampling(said, 1.0, stop_token_ids=()),
                    "sleeping",
                )
                for at in range(count)
            ]
            async with _proxied(worker) as proxy:
                begun = asyncio.get_running_loop().time()
                await asyncio.gather(*(proxy.generate(request) for request in requests))
                times.append(asyncio.get_running_loop().time() - begun)
    taken = np.median(np.array(times).reshape(_ROUNDS, -1), axis=0)
    terms = np.array([(said, count * said, count * prompt) for count, prompt, said in _REQUESTS], float)
    return dict(zip(("step", "sequence", "token"), nonnegative_factors(terms / taken[:, None]), strict=True))


@asynccontextmanager
async def _proxied(worker: ManagedWorker) -> AsyncIterator[LLMProxy]:
    """Raises RunError where the proxy gave up."""
    failed: list[BaseException] = []
    events = EventLog(MemorySink(), asyncio.get_running_loop().time)
    proxy = LLMProxy([worker], events, limits=WorkerLimits(120.0), restarts=0, on_fatal=failed.append)
    proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
    if failed:
        raise RunError(str(failed[0]))


def predicted(load: Load, deviation: float, number: int, costs: Mapping[str, float], *, batch: bool) -> float:
    """Seconds of the same rollout around a simulated engine."""
    length = _FIRST + load.turns * (_LATER + _SAID) + _LATER
    config = parse_config({"rollout": {"engine": {"max_num_seqs": load.trajectories, "max_model_len": length}}})
    says = EpisodeTraces((EpisodeTrace((TracedTurn(_FIRST, _SAID, 0.0),), 0.0, None),), ((0,),))
    engine = LinearCosts(max(1e-6, costs["step"]), costs["sequence"], costs["token"], 0.0)

    async def play() -> float:
        worker = SimWorker("sim-0", config, SimWeights(), traces=says, costs=engine)
        try:
            return float((await _rollout(load, worker, deviation, number, batch=batch))["seconds"])
        finally:
            await worker.close()

    return virtual_run.run(play())


async def _rollout(load: Load, worker: ManagedWorker, deviation: float, number: int, *, batch: bool) -> dict[str, Any]:
    """Play all trajectories once, to the end of the last."""
    task = SleepingTask(load, deviation, number)
    steps = Lockstep()
    sampling = Sampling(_SAID, 1.0, stop_token_ids=())
    way = "batch" if batch else "trajectory"
    prompts = list(task.prompts("train", number))
    episodes = [Episode(f"{way}-{deviation}-{number}-{at}", "g", prompt, 0.0) for at, prompt in enumerate(prompts)]
    for episode in episodes:
        steps.enter(episode.id)

    async def play(episode: Episode, environments: EnvManager) -> Trajectory:
        try:
            await environments.play(episode, sampling)
        finally:
            steps.leave(episode.id)
        return episode.trajectory(0.0)

    async with _proxied(worker) as proxy:
        managers = EnvManager(
            task,
            proxy,
            step_timeout=60.0,
            trajectory_timeout=600.0,
            is_stale=lambda first: False,
            lockstep=steps if batch else None,
        )
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(episode, managers)) for episode in episodes]
        seconds = asyncio.get_running_loop().time() - begun
    turns = [turn for played in tasks for turn in played.result().turns]
    return {
        "repetition": number,
        "deviation": deviation,
        "way": way,
        "seconds": round(seconds, 3),
        "turns": len(turns),
        "tokens": sum(len(turn.action_ids) for turn in turns),
        "generate_seconds_mean": round(sum(turn.generate_seconds for turn in turns) / len(turns), 4),
        "environment_seconds_mean": round(sum(turn.environment_seconds for turn in turns) / len(turns), 4),
        "load_average": round(os.getloadavg()[0], 1),
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from finished repetitions."""
    table = []
    for deviation in sorted({row["deviation"] for row in rows if "deviation" in row}):
        ratios, seconds = _ratios(rows, deviation, "seconds")
        simulated, _ = _ratios(rows, deviation, "predicted")
        off = [guess / ratio - 1 for guess, ratio in zip(simulated, ratios, strict=True)]
        table.append(
            {
                "deviation": deviation,
                "batch_seconds": median(seconds["batch"]),
                "trajectory_seconds": median(seconds["trajectory"]),
                "ratio": round(median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "predicted": [round(ratio, 3) for ratio in simulated],
                "predicted_off": [round(error, 3) for error in off],
                "paper": PAPER.get(deviation),
            }
        )
    worst = max((abs(error) for row in table for error in row["predicted_off"]), default=None)
    ends = [(row["ratio"], row["paper"]) for row in table if row["paper"] is not None]
    return frame(
        NAME,
        "real",
        value=table[-1]["ratio"],
        unit="rollout time of batch-level over trajectory-level environments, at a deviation of the mean's size",
        reference="the same, of training steps (RollArt figure 11b, paper)",
        reference_value=PAPER[1.0],
        bar="same curve or above: 1.23 at a tenth, 2.27 at 1",
        holds=None if quick else len(ends) == len(PAPER) and all(ratio >= paper for ratio, paper in ends),
        detail={
            "load": vars(_QUICK if quick else _FULL),
            "tokens": {"first": _FIRST, "later": _LATER, "answer": _SAID},
            "table": table,
            "predicted_off_most": worst,
            "prediction_holds": None if quick or worst is None else worst <= _GAIN_BAR,
            "rows": rows,
            "samples": len(rows),
            **detail,
        },
        quick=quick,
    )


def _ratios(rows: list[dict[str, Any]], deviation: float, key: str) -> tuple[list[float], dict[str, list[float]]]:
    """Batch over trajectory of each repetition, and both."""
    both = {
        way: [row[key] for row in rows if (row.get("deviation"), row["way"]) == (deviation, way)]
        for way in ("batch", "trajectory")
    }
    return [slow / fast for slow, fast in zip(both["batch"], both["trajectory"], strict=True)], both


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.micro.trajectory_vs_batch", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", action="store_true")
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args(arguments)
    cells = Cells(options.folder, NAME)
    missing = [number for number in range(_REPETITIONS) if not cells.has(str(number))]
    if options.next and missing:
        cells.keep(str(missing[0]), repetitions(_FULL, missing[:1]))
    if options.result:
        rows = [row for repetition in cells.found() for row in repetition]
        print(json.dumps(result(rows, False, {"in_parts": True}), indent=1, sort_keys=True))
    return 3 if options.next and not missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
