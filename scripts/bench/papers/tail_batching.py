"""Rollout time of an epoch with short and long rounds, over plain rounds: real vLLM, response lengths of a production trace.

Tail batching (RollPacker 3, eta 1.25 on both) against plain rounds in mode ``sync_plus``, the same 160 prompts each trained
once, in turns on one engine (:mod:`scripts.bench.probes.vllm.tail_batching_probe`). The value is the median over pairs of the
processor seconds of all rollouts of an epoch. The detail holds wall seconds, tokens thrown away, every round, and what the
simulator predicts: its costs of a step, of a sequence in it and of a prompt are fitted to plain rounds of other lengths, played
before the epochs by the same pipeline on the same engine. So the policy and the epoch's lengths are held back.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import RunError
from orchestrator.sim.cost_model import LinearCosts
from orchestrator.sim.recorded_traces import PREFIX, EpisodeTraces
from orchestrator.sim.simulated_worker import InlineSimWorker, SimWeights
from scripts.bench import virtual_run
from scripts.bench.papers.calibrate import nonnegative_factors
from scripts.bench.papers.tail_batching_scenario import ETA, PROMPTS, RESPONSES, lengths, scenario, traces
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.probes.vllm.tail_batching_probe import epoch
from scripts.bench.result import frame, now

NAME = "tail-batching"
_PAIRS, _LIMIT = 6, 200.0
_GAIN_BAR = 0.10  # of a gain, that the simulator may be off by
_ETAS = (1.1, 1.25, 1.4, 1.5)
_MODEL = "scripts.bench.probes.vllm.recompute_probe:write_tiny_qwen3"
PAPER = {
    "end to end over veRL, tail batching alone (table 2): 7B/8k, 14B/16k, 32B/32k": [1.30, 1.48, 2.21],
    "rollout, average over short and long rounds (6.3), at best": 3.9,
    "rollout of short rounds, 32B/32k (6.2), at best": 7.8,
}


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the engine fails."""
    begun = now()
    probe = _probe(1 if quick else _PAIRS, 30.0 if quick else _LIMIT)
    ways = {tail: [epoch for epoch in probe["epochs"] if epoch["tail"] is tail] for tail in (False, True)}
    ratios = {clock: _ratios(ways, clock) for clock in ("processor", "wall")}
    costs = fitted(probe["calibration"])
    simulated = {name: simulated_epoch(costs, tail) for name, tail in (("plain", False), ("tail", True))}
    predicted = simulated["tail"]["seconds"] / simulated["plain"]["seconds"]
    value = statistics.median(ratios["processor"])
    violations = [line for epoch in probe["epochs"] for line in epoch["violations"]]
    complete = not violations and all(epoch["epochs"] == 1 for epoch in probe["epochs"])
    return frame(
        NAME,
        "real",
        value=value,
        unit="seconds of rollout for an epoch, over those of plain rounds",
        reference="the simulator on the same workload, its costs fitted to plain rounds of other lengths on this engine",
        reference_value=predicted,
        bar="< 1, each prompt trained once",
        holds=value < 1 and complete,
        detail={
            "prompts": len(lengths()["prompts"]),
            "lengths": {key: text for key, text in lengths().items() if key != "prompts"},
            "p0": PROMPTS,
            "r0": RESPONSES,
            "eta": ETA,
            "ratios": ratios,
            "plain": _summary(ways[False]),
            "tail": _summary(ways[True]),
            "simulated": simulated,
            **prediction(predicted, ratios["processor"], quick),
            "simulated_speedups_by_eta": {} if quick else swept(costs),
            "costs": costs,
            "calibration": probe["calibration"],
            "paper_speedups": PAPER,
            "violations": violations,
            "epochs": probe["epochs"],
            "samples": len(ratios["processor"]),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[probe["pid"]],
    )


def prediction(predicted: float, measured: Sequence[float], quick: bool) -> dict[str, Any]:
    """How far the simulator is off each pair's ratio, and whether the worst is within the bar."""
    off = [round(predicted / ratio - 1, 3) for ratio in measured]
    worst = max(map(abs, off))
    return {
        "predicted_off": off,
        "predicted_off_most": worst,
        "prediction_holds": None if quick else worst <= _GAIN_BAR,
    }


def _probe(pairs: int, limit: float) -> dict[str, Any]:
    """The real part. ``limit``: seconds after which no pair is begun."""
    with tempfile.TemporaryDirectory(prefix="rl-coserve-tail-") as folder:
        module, _, name = _MODEL.partition(":")
        getattr(importlib.import_module(module), name)(Path(folder), 0)
        arguments = [folder, "--pairs", str(pairs), "--limit", str(limit)]
        return run_probe("tail_batching", arguments, limit=4 * limit + 300)


def _ratios(ways: dict[bool, list[dict[str, Any]]], clock: str) -> list[float]:
    """Of each pair, tail over plain."""
    return [tail[clock] / plain[clock] for plain, tail in zip(ways[False], ways[True], strict=True)]


def _summary(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the epochs of one way."""
    prompts = len(lengths()["prompts"])
    kinds = dict.fromkeys(item["kind"] for epoch in epochs for item in epoch["rounds"])
    mean = {
        kind: statistics.mean(item["processor"] for epoch in epochs for item in epoch["rounds"] if item["kind"] == kind)
        for kind in kinds
    }
    wasted = statistics.median(1 - epoch["tokens_trained"] / epoch["tokens_made"] for epoch in epochs)
    return {
        "processor_seconds_a_prompt": statistics.median(epoch["processor"] for epoch in epochs) / prompts,
        "wall_seconds_a_prompt": statistics.median(epoch["wall"] for epoch in epochs) / prompts,
        "processor_seconds_a_round": mean,
        "tokens_trained": statistics.median(epoch["tokens_trained"] for epoch in epochs),
        "tokens_thrown_away": statistics.median(epoch["tokens_made"] - epoch["tokens_trained"] for epoch in epochs),
        "share_thrown_away": wasted,
    }


def swept(costs: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """As RollPacker's figure 12: speculation in prompts alone, in responses alone, and in both. Speedup of an epoch's rollouts
    over plain rounds, by eta; simulated."""
    plain = simulated_epoch(costs, False)["seconds"]
    ways = {"prompts": (1, 0), "responses": (0, 1), "both": (1, 1)}
    found: dict[str, dict[str, float]] = {}
    for name, (prompts, responses) in ways.items():
        for eta in _ETAS:
            given = [f"rollout.rounds.eta_prompts={eta if prompts else 1.0}"]
            given.append(f"rollout.rounds.eta_responses={eta if responses else 1.0}")
            seconds = simulated_epoch(costs, True, *given)["seconds"]
            found.setdefault(name, {})[str(eta)] = round(plain / seconds, 3)
    return found


def fitted(calibration: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a step, of a sequence in it and of a prompt's token, by least squares over plain rounds of known lengths, each
    relative to what it took; none below 0."""
    terms = [
        (max(row["members"]), row["prompts"] * sum(row["members"]), row["prompts"] * len(row["members"]) * PREFIX)
        for row in calibration
    ]
    seconds = np.array([row["seconds"] for row in calibration])
    factors = nonnegative_factors(np.array(terms, float) / seconds[:, None])
    return dict(zip(("step", "sequence", "token"), factors, strict=True))


def simulated_epoch(
    costs: Mapping[str, float], tail: bool, *overrides: str, trace: EpisodeTraces | None = None
) -> dict[str, Any]:
    """The same epoch in virtual time, by the code of the real one, around a simulated engine that is in the pipeline's event
    loop, as the real one is. ``trace``: other lengths."""
    config = scenario(*overrides, tail=tail)
    engine = LinearCosts(max(1e-6, costs["step"]), costs["sequence"], costs["token"], 0.0)
    lengths_said = trace or traces()

    async def play() -> dict[str, Any]:
        worker = InlineSimWorker("sim-0", config, SimWeights(), traces=lengths_said, costs=engine)
        try:
            return await epoch(worker, config, 0, lengths_said)
        finally:
            await worker.close()

    played = virtual_run.run(play())
    if played["violations"]:
        raise RunError(f"tail-batching, simulated: {played['violations'][0]}")
    return {
        "seconds": played["wall"],
        "rounds": [part["wall"] for part in played["rounds"]],
        "deferred": [part["deferred"] for part in played["rounds"]],
        "thrown_away": [part["thrown_away"] for part in played["rounds"]],
        "tokens_trained": played["tokens_trained"],
        "tokens_thrown_away": played["tokens_made"] - played["tokens_trained"],
    }
