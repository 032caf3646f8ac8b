"""RollPacker's parallelism planner, simulated: its row of table 2 and figure 13 (experts: ``expert_parallelism.py`` beside it).

The planner, its orchestration and the proxy that cuts engines anew are those of a run; the profile is the cost model's; a change
costs ``sim.start_seconds`` and the weights' way, on the simulated clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.paper_setups import ROLLPACKER, rollpacker
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces, TracedTurn
from scripts.bench.papers.runner import Cell, Found, Row, Run, row

PRINTED = (2.01, 2.02, 2.52)  # table 2, over veRL
MEAN = 780  # tokens of a response (orchestrator/sim/scenarios/rollpacker.toml)
GRAIN = 16
LENGTHS = tuple(range(8192, 32768 + 1, 2048))  # of figure 13a, a step each
_ALONE = ["sim.reward_seconds=0", "run.mode=sync_plus", "rollout.weights=relay"]


def planned(gpus: int, start_seconds: float = 5.0) -> list[str]:
    """Overrides: a worker a GPU, the planner on, engines within a server of eight."""
    given = ["rollout.weights=relay", "sim.tensor_parallel=1", f"rollout.workers={gpus}"]
    given += ["rollout.planner.enabled=true", "rollout.planner.max_tp=8"]
    return [*given, f"rollout.planner.expected_tokens={MEAN // GRAIN}", f"sim.start_seconds={start_seconds}"]


def rung(size: str, scale: int, steps: int, extra: Sequence[str] = ()) -> Config:
    """Table 2, the planner on top of tail batching and reward scheduler."""
    given = [*planned(ROLLPACKER[size][1]), *extra]
    return rollpacker(size, "+ reward scheduler", scale, steps=steps, extra=given)


_PLANNERS = {"planner": planned(16), "planner, starts of 60 s": planned(16, 60.0)}


def figure_13a_cells() -> dict[str, Cell]:
    """Qwen2.5-14B on 16 GPUs, lengths from 8k to 32k. That all responses of a step have its length is ASSUMED."""
    return {f"figure 13a/{name}": partial(_growing, extra, 4) for name, extra in {"TP 1": [], **_PLANNERS}.items()}


def _growing(extra: Sequence[str], scale: int, seed: int) -> list[dict[str, Any]]:
    given = [*_ALONE, "rollout.workers=16", "sim.trainer_gpus=16", "sim.tensor_parallel=1", f"run.seed={seed}", *extra]
    given += ["trainer.data_parallel=2", f"rollout.engine.max_model_len={(512 + LENGTHS[-1]) // GRAIN}"]
    config = rollpacker("14B/16k", "veRL", scale, steps=len(LENGTHS), extra=given)
    prompt, groups = 300 // GRAIN, config.rollout.groups_per_step
    episodes = tuple(EpisodeTrace((TracedTurn(prompt, length // GRAIN, 0.0),), 0.0, None) for length in LENGTHS)
    numbers = tuple((place,) for place in range(len(LENGTHS)) for _ in range(groups))
    return _rollouts(Run(config, traces=EpisodeTraces(episodes, numbers)))


def figure_13a(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """Rollout time at TP 1 over the planner's, and which TP it takes."""
    runs, source, rows = (
        {name: found[f"figure 13a/{name}"] for name in ("TP 1", *_PLANNERS)},
        "RollPacker 6.4, figure 13a",
        [],
    )
    for name in _PLANNERS:
        ours = mean(one["seconds"] / other["seconds"] for one, other in zip(runs["TP 1"], runs[name], strict=True))
        rows.append(row(f"14B on 16 GPUs, 8k to 32k: rollout, TP 1 over {name}, mean", 1.9, ours, source))
    first, last = runs["planner"][0]["tp"], runs["planner"][-1]["tp"]
    return runs, [*rows, row("TP at 8k", 1, first, source), row("TP at 32k", 4, last, source)]


_STARTS = {"TP 2": ["rollout.workers=8"], "planner": planned(16)}


def figure_13bc_cells() -> dict[str, Cell]:
    """Lengths up to 32k, tail batching, TP 2 at first, with and without."""
    return {f"figure 13bc/{name}": partial(_long, extra, 4, 11) for name, extra in _STARTS.items()}


def _long(extra: Sequence[str], scale: int, steps: int, seed: int) -> list[dict[str, Any]]:
    given = [*_ALONE, "sim.trainer_gpus=16", "trainer.data_parallel=2", f"run.seed={seed}", *extra]
    given.append(f"rollout.engine.max_model_len={(512 + 32768) // GRAIN}")
    for task in ("math", "code", "judged"):
        shape = ("response_max=32768", "response_sigma=1.267", "response_tokens=1004", "reward_seconds=0")
        given += [f"sim.tasks.{task}.{setting}" for setting in shape]
    return _rollouts(Run(rollpacker("14B/16k", "+ tail batching", scale, steps=steps, extra=given)))


def figure_13bc(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """Preemptions and rollout time of short rounds."""
    runs = {name: found[f"figure 13bc/{name}"] for name in _STARTS}
    short = {name: [one for one in of[1:] if one["round"] == "short"] for name, of in runs.items()}
    seconds = {name: mean(one["seconds"] for one in of) for name, of in short.items()}
    counts = {name: sum(one["preemptions"] for one in of) for name, of in short.items()}
    fewer = 1.0 - counts["planner"] / counts["TP 2"] if counts["TP 2"] else 0.0
    what, over = "14B/32k, short rounds:", seconds["TP 2"] / seconds["planner"]
    source = "RollPacker 6.4, figure 13b, 13c"
    return runs, [
        row(f"{what} share of preemptions that the planner saves", 0.138, fewer, source),
        row(f"{what} rollout, TP 2 over planner", (1.11, 1.28), over, source),
    ]


def _rollouts(run: Run) -> list[dict[str, Any]]:
    """Of each step: seconds, TP, preemptions, kind of round."""
    plans = {event["step"]: event for event in run.events_of("plan")}
    fixed, tp = _preemptions(run.events), run.config.sim.tensor_parallel
    return [
        {
            "seconds": round(seconds, 2),
            "round": run.rounds.get(step, ""),
            "tp": plans[step]["tp"] if step in plans else tp,
            "preemptions": plans[step]["preemptions"] if step in plans else fixed.get(step, 0),
        }
        for step, seconds in run.took.items()
    ]


def _preemptions(events: list[dict[str, Any]]) -> dict[int, int]:
    """Of each step without a planner: workers say theirs after each update, counted from their start."""
    found: dict[int, int] = {}
    total, last = 0, 0
    for event in events:
        if event["kind"] == "worker":
            total += event["preemptions"]
        elif event["kind"] == "step":
            found[event["step"]] = total - last if total else 0
            last, total = max(total, last), 0
    return found
