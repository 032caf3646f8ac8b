"""RollPacker's parallelism planner, simulated: its row of table 2 and figure 13 (experts: ``expert_parallelism.py`` beside it).

The planner, its orchestration and the proxy that cuts engines anew are those of a run; the profile is the cost model's; a change
costs ``sim.start_seconds`` and the weights' way, on the simulated clock.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.paper_setups import ROLLPACKER, rollpacker
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.simulated import exactly, within

PRINTED = (2.01, 2.02, 2.52)  # table 2, over veRL
MEAN = 780  # tokens of a response (orchestrator/sim/scenarios/rollpacker.toml)
GRAIN = 16
LENGTHS = tuple(range(8192, 32768 + 1, 2048))  # of figure 13a, a step each
_ALONE = ["sim.reward_seconds=0", "run.mode=sync_plus", "rollout.weights=relay"]


def planned(gpus: int, start_seconds: float = 5.0) -> list[str]:
    """Overrides: a worker a GPU, the planner on, engines within a server of eight."""
    return [
        "rollout.weights=relay",
        "sim.tensor_parallel=1",
        f"rollout.workers={gpus}",
        "rollout.planner.enabled=true",
        "rollout.planner.max_tp=8",
        f"rollout.planner.expected_tokens={MEAN // GRAIN}",
        f"sim.start_seconds={start_seconds}",
    ]


def rung(size: str, scale: int, steps: int) -> Config:
    """Table 2, the planner on top of tail batching and reward scheduler."""
    extra = planned(ROLLPACKER[size][1])
    return rollpacker(size, "+ reward scheduler", scale, steps=steps, extra=extra)


def figure_13a(scale: int = 4) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Qwen2.5-14B on 16 GPUs, lengths from 8k to 32k. That all responses of a step have its length is ASSUMED."""
    runs = {}
    for name, extra in (("TP 1", []), ("planner", planned(16)), ("planner, starts of 60 s", planned(16, 60.0))):
        given = [*_ALONE, "rollout.workers=16", "sim.trainer_gpus=16", "sim.tensor_parallel=1", *extra]
        given += ["trainer.data_parallel=2", f"rollout.engine.max_model_len={(512 + LENGTHS[-1]) // GRAIN}"]
        config = rollpacker("14B/16k", "veRL", scale, steps=len(LENGTHS), extra=given)
        groups = config.rollout.groups_per_step
        prompt = 300 // GRAIN
        episodes = tuple(EpisodeTrace((TracedTurn(prompt, length // GRAIN, 0.0),), 0.0, None) for length in LENGTHS)
        numbers = tuple((place,) for place in range(len(LENGTHS)) for _ in range(groups))
        runs[name] = _rollouts(config, EpisodeTraces(episodes, numbers))
    fixed, source = runs["TP 1"], "RollPacker 6.4, figure 13a"
    rows = []
    for name in ("planner", "planner, starts of 60 s"):
        ours = statistics.mean(one["seconds"] / other["seconds"] for one, other in zip(fixed, runs[name], strict=True))
        rows.append(exactly(f"14B on 16 GPUs, 8k to 32k: rollout, TP 1 over {name}, mean", 1.9, ours, source))
    found = [one["tp"] for one in runs["planner"]]
    rows.append(exactly("TP at 8k", 1, found[0], source))
    rows.append(exactly("TP at 32k", 4, found[-1], source))
    return runs, rows


def figure_13bc(scale: int = 4, steps: int = 11) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Lengths up to 32k, tail batching, TP 2 at first: preemptions and rollout time of short rounds, with and without."""
    runs = {}
    for name, extra in (("TP 2", ["rollout.workers=8"]), ("planner", planned(16))):
        given = [*_ALONE, "sim.trainer_gpus=16", "trainer.data_parallel=2", *extra]
        given.append(f"rollout.engine.max_model_len={(512 + 32768) // GRAIN}")
        for task in ("math", "code", "judged"):
            given += [f"sim.tasks.{task}.response_max=32768", f"sim.tasks.{task}.response_sigma=1.267"]
            given += [f"sim.tasks.{task}.response_tokens=1004", f"sim.tasks.{task}.reward_seconds=0"]
        runs[name] = _rollouts(rollpacker("14B/16k", "+ tail batching", scale, steps=steps, extra=given))
    short = {name: [one for one in found[1:] if one["round"] == "short"] for name, found in runs.items()}
    seconds = {name: statistics.mean(one["seconds"] for one in found) for name, found in short.items()}
    counts = {name: sum(one["preemptions"] for one in found) for name, found in short.items()}
    fewer = 1.0 - counts["planner"] / counts["TP 2"] if counts["TP 2"] else 0.0
    source = "RollPacker 6.4, figure 13b, 13c"
    return runs, [
        exactly("14B/32k, short rounds: share of preemptions that the planner saves", 0.138, fewer, source),
        within(
            "14B/32k, short rounds: rollout, TP 2 over planner",
            1.11,
            1.28,
            seconds["TP 2"] / seconds["planner"],
            source,
        ),
    ]


def _rollouts(config: Config, traces: EpisodeTraces | None = None) -> list[dict[str, Any]]:
    """Of each step: seconds, TP, preemptions, kind of round."""
    events = [json.loads(line) for line in simulate(config, traces=traces).events.splitlines()]
    took = {event["step"]: event["end"] - event["start"] for event in events if event.get("stage") == "get_batch"}
    kinds = {event["step"]: event["round"] for event in events if event["kind"] == "round"}
    plans = {event["step"]: event for event in events if event["kind"] == "plan"}
    fixed = _preemptions(events)
    return [
        {
            "seconds": round(took[step], 2),
            "round": kinds.get(step, ""),
            "tp": plans[step]["tp"] if step in plans else config.sim.tensor_parallel,
            "preemptions": plans[step]["preemptions"] if step in plans else fixed.get(step, 0),
        }
        for step in sorted(took)
    ]


def _preemptions(events: list[dict[str, Any]]) -> dict[int, int]:
    """Of each step without a planner: workers say theirs after each update, counted from their start."""
    found: dict[int, int] = {}
    total, step, last = 0, 0, 0
    for event in events:
        if event["kind"] == "worker":
            total += event["preemptions"]
        elif event["kind"] == "step":
            found[step] = total - last if total else 0
            last, total, step = max(total, last), 0, event["step"] + 1
    return found
