"""Rollout time of the load-balancing router over placement by predicted lengths (Heddle 5), on two engines, and its prediction.

Two real vLLM engines in Ray actors, the production proxy, router, environment managers, length predictor and placer. Only the
placement differs: turns keep the engines' own order, so nothing of Heddle's priority is in the gain. The value is the median
over interleaved pairs, both ways on the same trajectories.

The workload was chosen in the simulator, by its predicted gain, before any engine ran: where places or KV in an
engine were scarce it predicted 0.97 to 1.12, with answers twice as long 1.09 to 1.10, with these 1.17 to 1.19, all
with assumed costs. Tokens a turn are log-normal over prompts (sigma 1) and vary little between the plays of a prompt
(0.1), so that what a prompt took says what it will take; the predictor starts from three earlier epochs, played in
virtual time, and learns nothing more. What placement can gain on engines that are alike is interference: the longest
trajectories take steps that many short ones make longer. A sequence costs such an engine some seventieth of a step
(``trajectory-vs-batch``), so there are as many trajectories as make a step of an even share some four times as long
as of one; few turns, as each costs the driver more than the engines.

Beside each ratio stands what the simulator predicts: the same code in virtual time around two simulated engines. Their
costs, and the way of a turn to an engine and back, are fitted to rollouts of trajectories that are all alike, by the
load-balancing router alone, before each pair: policy and lengths are held back. Engines share the processor, also there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from orchestrator.api import ManagedWorker, Observation, Prompt, RunError, Sampling, StepResult, Turn
from orchestrator.cluster import ActorGen
from orchestrator.config import parse_config
from orchestrator.config.prediction_keys import PlacementSection, PredictionSection
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.forecast_setup import InProcessPredictor
from orchestrator.placement.length_tracker import LengthTracker
from orchestrator.placement.placer import TrajectoryPlacer
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.policies.prediction.length_features import TrajectoryProgress, progress_of
from orchestrator.policies.prediction.length_predictor import LengthForecast, LengthOutcome, ProgressivePredictor
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine
from orchestrator.runtime.own_engines import WORKER_CLASS
from orchestrator.runtime.real_run import start_ray
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.virtual_loop import VirtualTimeLoop
from scripts.bench import virtual_run
from scripts.bench.papers.calibrate import FittedCosts, nonnegative_factors
from scripts.bench.result import frame, now

NAME = "placement-gain"
_MODEL = "scripts.bench.probes.vllm.recompute_probe:write_tiny_qwen3"
_VOCABULARY = 64  # of that model
_ENGINES, SLOTS = 2, 256
_PAIRS, _QUICK_PAIRS = 12, 1
_PROMPTS, _MEMBERS, TURNS = 56, 8, 2
_MIDDLE, _SIGMA, _NOISE, _MOST = 60.0, 1.0, 0.1, 720  # tokens an answer
_FIRST, _LATER = 16, 8  # tokens: first observation, those after it
_LENGTH = _FIRST + TURNS * (_LATER + _MOST) + _LATER
_TOOL = 0.02  # seconds of an environment's step
_EPOCHS = 3  # that the predictor has seen
# trajectories, turns, tokens an answer
_ALIKE = [
    (2, 3, 64),
    (2, 2, 600),
    (16, 2, 300),
    (64, 2, 64),
    (64, 2, 300),
    (200, 2, 32),
    (200, 2, 96),
    (448, 1, 24),
    (448, 2, 48),
]
_GAIN_BAR = 0.10  # of the gain, that the simulator may be off by

Load = Mapping[str, tuple[int, ...]]  # of each prompt: tokens of an answer of its members


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, of a sequence in it, of a token in its context, of a prefilled token, of a turn's way to the engine and
    back, of a forecast, in which the driver does nothing else."""

    step: float
    sequence: float
    context: float
    token: float
    turn: float
    forecast: float = 0.0


class FixedTurns:
    """Environments that take a fixed time and end after so many turns."""

    name = "fixed-turns"
    vocabulary: Sequence[str] = tuple(f"w{number}" for number in range(_VOCABULARY))
    pad_id, end_id = 0, 1
    max_context_tokens = _LENGTH
    max_response_tokens = _MOST

    def __init__(self, turns: int, seconds: float) -> None:
        self.max_turns = turns
        self.seconds = seconds

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """They are given with the load."""
        return iter(())

    def environment(self) -> FixedTurnsEnvironment:
        """See the protocol."""
        return FixedTurnsEnvironment(self)


class FixedTurnsEnvironment:
    """One episode."""

    version = "fixed-turns-1"

    def __init__(self, task: FixedTurns) -> None:
        self._task = task
        self._left = 0
        self._draw = random.Random(0)

    async def reset(self, prompt: Prompt) -> Observation:
        """See the protocol."""
        self._left = self._task.max_turns
        self._draw = random.Random(prompt.key)
        return Observation(tuple(self._draw.randrange(2, _VOCABULARY) for _ in range(_FIRST)))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """See the protocol."""
        self._left -= 1
        await asyncio.sleep(self._task.seconds)
        seen = tuple(self._draw.randrange(2, _VOCABULARY) for _ in range(_LATER))
        return StepResult(Observation(seen), 0.0, self._left == 0)

    async def close(self) -> None:
        """See the protocol."""


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when an engine does not start, or a trajectory fails."""
    import ray

    begun = now()
    trained()
    start_ray(parse_config({"ray": {"cpus": _ENGINES}}))
    try:
        with tempfile.TemporaryDirectory(prefix="rl-coserve-bench-") as folder:
            rows = asyncio.run(_measure(_QUICK_PAIRS if quick else _PAIRS, Path(folder)))
    finally:
        ray.shutdown()
    return result([row | _prediction(row) for row in rows], quick, {"started": begun, "nonce": nonce})


def _prediction(row: Mapping[str, Any]) -> dict[str, float]:
    costs = Costs(**row["costs"])
    return {way: round(predicted(row["pair"], costs, way == "predicted_placed"), 3) for way in _PREDICTED}


_PREDICTED = ("predicted_balanced", "predicted_placed")


async def _measure(pairs: int, model: Path) -> list[dict[str, Any]]:
    environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    engines = ActorGen(VllmEngine, {f"vllm-{number}": None for number in range(_ENGINES)}, environment)
    first = engines.actors[0]
    first.start()
    try:
        await engines.start("function", _MODEL, {"folder": model, "seed": 0})
    finally:
        first.kill()
    file = model / "config.json"  # rotary positions: any number of them
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": _LENGTH}))
    arguments = {
        "model": str(model),
        "max_num_seqs": SLOTS,
        "max_model_len": _LENGTH,
        "kv_cache_mb": 128,
        "threads": 1,
    }
    workers = [RayWorker(engines, actor, WORKER_CLASS, arguments) for actor in engines.actors]
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        await rollout(workers, alike(448, 8), 2, _TOOL, "warm")
        rows = []
        for pair in range(pairs):
            costs = await calibrated(workers, pair)
            row: dict[str, Any] = {"pair": pair, "costs": vars(costs), "load_average": round(os.getloadavg()[0], 1)}
            for place in (False, True) if pair % 2 else (True, False):
                found = await rollout(workers, lengths(pair), TURNS, _TOOL, f"{pair}-{place}", costs if place else None)
                row["placed" if place else "balanced"] = found
            rows.append(row)
        return rows
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


def lengths(epoch: int) -> Load:
    """Tokens of an answer of each prompt's members, in the order in which prompts are played. The predictor has seen epochs below
    0."""
    draw = random.Random(f"placement/{epoch}")
    normal = NormalDist()
    prompts = [(f"p{at}", _SIGMA * normal.inv_cdf((at + 0.5) / _PROMPTS)) for at in range(_PROMPTS)]
    draw.shuffle(prompts)
    return {
        key: tuple(
            min(_MOST, max(1, round(_MIDDLE * float(np.exp(usual + _NOISE * draw.gauss(0.0, 1.0))))))
            for _ in range(_MEMBERS)
        )
        for key, usual in prompts
    }


def alike(count: int, said: int) -> Load:
    """So many trajectories of so many tokens an answer."""
    return {f"a{at}": (said,) for at in range(count)}


async def calibrated(workers: Sequence[ManagedWorker], pair: int) -> Costs:
    """By least squares over the times of :data:`_ALIKE`, each relative to what it took; none below 0. How much is
    prefilled the engines say: of many trajectories the router moves one in ten to one in three to the other engine, which then
    computes their history."""
    terms, seconds = [], []
    for count, turns, said in _ALIKE:
        load, before = alike(count, said), await _prefilled(workers)
        found = await rollout(workers, load, turns, _TOOL, f"costs-{pair}-{count}-{turns}-{said}")
        each, steps = count / len(workers), turns * said
        read = sum(_FIRST + turn * (said + _LATER) + said / 2 for turn in range(turns)) * said * each
        new = (await _prefilled(workers) - before) / len(workers)
        terms.append((steps, steps * each, read, new, turns))
        seconds.append(found["seconds"] - _TOOL * turns)
    costs = nonnegative_factors(np.array(terms, float) / np.array(seconds)[:, None])
    step, sequence, context, token, turn = costs
    return Costs(max(1e-6, step), sequence, context, token, turn, forecast_seconds())


async def _prefilled(workers: Sequence[ManagedWorker]) -> int:
    """Tokens so far."""
    stats = [await worker.stats() for worker in workers]
    return sum(one.prefix_queries - one.prefix_hits for one in stats)


def forecast_seconds() -> float:
    """The median of a prompt's forecast."""
    predictor, found = ready_predictor(), []
    for at in range(_PROMPTS):
        opening = Turn(tuple(range(2, 2 + _FIRST)), (), (), ())
        progress = progress_of("f", Prompt(f"p{at}", FixedTurns.name, 0, ""), (opening,), 0)
        begun = time.perf_counter()
        predictor.forecast(progress)
        found.append(time.perf_counter() - begun)
    return median(found)


def predicted(epoch: int, costs: Costs, placed: bool) -> float:
    """Seconds of the same rollout around simulated engines."""
    trained()
    return float(simulated(lengths(epoch), costs, costs if placed else None)["seconds"])


def simulated(
    load: Load, costs: Costs, placed: Costs | None = None, learns: ProgressivePredictor | None = None
) -> dict[str, Any]:
    """The same rollout in virtual time."""

    async def play() -> dict[str, Any]:
        workers = simulated_workers(costs)
        try:
            return await rollout(workers, load, TURNS, _TOOL + costs.turn, "sim", placed, learns)
        finally:
            for worker in workers:
                await worker.close()

    return virtual_run.run(play())


def simulated_workers(costs: Costs) -> list[SimWorker]:
    """Two engines."""
    config = parse_config({"rollout": {"engine": {"max_num_seqs": SLOTS, "max_model_len": _LENGTH}}})
    says = EpisodeTraces((EpisodeTrace((TracedTurn(_FIRST, _LENGTH, 0.0),), 0.0, None),), ((0,),))  # all it may
    engine = FittedCosts(costs.step, costs.sequence, costs.context, costs.token, 0.0)
    return [SimWorker(f"sim-{number}", config, SimWeights(), traces=says, costs=engine) for number in range(_ENGINES)]


@cache
def trained() -> bytes:
    """A predictor that saw earlier epochs of the prompts, played by the load-balancing router."""
    predictor = ProgressivePredictor(float(_MOST), seed=0)
    for epoch in range(-_EPOCHS, 0):
        simulated(lengths(epoch), Costs(0.002, 0.0, 0.0, 0.0, 0.0), learns=predictor)
    return predictor.dump()


def ready_predictor() -> ProgressivePredictor:
    """It, in the state in which each rollout begins."""
    predictor = ProgressivePredictor(float(_MOST), seed=0)
    predictor.load(trained())
    return predictor


class ReadyPredictor(InProcessPredictor):
    """One that learns nothing more, as where that is done elsewhere. ``busy``: seconds of virtual time that a forecast takes the
    driver, as it does in real time by itself."""

    def __init__(self, busy: float) -> None:
        super().__init__(ready_predictor())
        self._busy = busy

    async def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        """See the protocol."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            loop.compute_until(loop.time() + self._busy)
        return await super().forecast(progress)

    def learn(self, outcome: LengthOutcome) -> None:
        """It does not."""


async def rollout(
    workers: Sequence[ManagedWorker],
    load: Load,
    turns: int,
    tool: float,
    name: str,
    placed: Costs | None = None,
    learns: ProgressivePredictor | None = None,
) -> dict[str, Any]:
    """Play all trajectories once, to the end of the last, by the load-balancing router; ``placed``: by placement, with what
    steps cost as a profile says it. ``learns``: a predictor that only sees them."""
    task = FixedTurns(turns, tool)
    loop, failed = asyncio.get_running_loop(), list[BaseException]()
    episodes = [
        Episode(f"{name}-{key}-{member}", f"{name}-{key}", Prompt(key, task.name, 0, ""), 0.0)
        for key, members in load.items()
        for member in range(len(members))
    ]
    answers = [said for members in load.values() for said in members]
    events = EventLog(MemorySink(), loop.time)
    placer = tracker = None
    predictor = InProcessPredictor(learns) if learns is not None else None
    proxy = LLMProxy(workers, events, limits=WorkerLimits(120.0), restarts=0, on_fatal=failed.append)
    if placed is not None:
        predictor = ReadyPredictor(placed.forecast)
        steps = placed.step + placed.sequence, placed.step + 2 * placed.sequence
        rates = WorkerRates(steps, placed.context, placed.token, slots=SLOTS)
        settings = PlacementSection(enabled=True, prefill_seconds=placed.token, renew_seconds=0.1)
        placer = TrajectoryPlacer(settings, proxy.router, events, lambda worker: rates, longest=_LENGTH)
    if predictor is not None:
        order = PredictionSection(enabled=True, order="round-robin")  # the engines' own
        tracker = LengthTracker(order, predictor, events, float(_MOST), placer=placer)
    proxy.start()
    try:
        managers = EnvManager(task, proxy, step_timeout=60.0, trajectory_timeout=600.0, is_stale=lambda first: False)
        managers.forecasts = tracker
        begun = loop.time()
        async with asyncio.TaskGroup() as group:
            for episode, said in zip(episodes, answers, strict=True):
                group.create_task(managers.play(episode, Sampling(said, 1.0, stop_token_ids=())))
        seconds = loop.time() - begun
    finally:
        if tracker is not None:
            await tracker.close()
        if placer is not None:
            await placer.close()
        await proxy.close()
    if failed:
        raise RunError(str(failed[0]))
    played = [turn for episode in episodes for turn in episode.turns]
    tokens = sum(len(turn.action_ids) for turn in played)
    if tokens != turns * sum(answers):
        raise RunError(f"{tokens} tokens were generated, not the {turns * sum(answers)} that were asked for")
    return {
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "longest": turns * max(answers),
        **(placer.stats() if placer is not None else {}),
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from finished pairs."""
    gains = [row["balanced"]["seconds"] / row["placed"]["seconds"] for row in rows]
    guesses = [row["predicted_balanced"] / row["predicted_placed"] for row in rows]
    off = [round(guess / gain - 1, 3) for guess, gain in zip(guesses, gains, strict=True)]
    ordered, worst = sorted(gains), max(map(abs, off))
    cut = 2 if len(gains) >= _PAIRS else 0  # of 12 values, the third and the tenth hold the median with 96 %
    value = median(gains)
    return frame(
        NAME,
        "real",
        value=round(value, 3),
        unit="rollout time with the load-balancing router over that with placement by predicted lengths",
        reference="the simulator's, calibrated on the same engines without placement or these lengths",
        reference_value=round(median(guesses), 3),
        bar=f"each pair's gain within {_GAIN_BAR:.0%} of what the simulator predicts",
        holds=None if quick else worst <= _GAIN_BAR,
        detail={
            "gains": [round(gain, 3) for gain in gains],
            "gain_lowest": round(ordered[0], 3),
            "gain_interval": [round(ordered[cut], 3), round(ordered[-1 - cut], 3)],
            "predicted": [round(guess, 3) for guess in guesses],
            "predicted_off": off,
            "predicted_off_most": worst,
            "predicted_off_of_medians": round(median(guesses) / value - 1, 3),
            "seconds_off_most": round(max(_off(row, way) for row in rows for way in ("balanced", "placed")), 3),
            "load": {"prompts": _PROMPTS, "members": _MEMBERS, "turns": TURNS, "sigma": _SIGMA, "noise": _NOISE},
            "engines": {"count": _ENGINES, "max_num_seqs": SLOTS},
            "tokens": {"first": _FIRST, "later": _LATER, "answer_median": _MIDDLE, "answer_most": _MOST},
            "rows": rows,
            "samples": len(rows),
            **detail,
        },
        quick=quick,
    )


def _off(row: Mapping[str, Any], way: str) -> float:
    return abs(float(row[f"predicted_{way}"]) / float(row[way]["seconds"]) - 1)
