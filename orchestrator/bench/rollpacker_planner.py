"""RollPacker's parallelism planner, simulated: its row of table 2, figure 13, and its rule over expert parallelism (section 7).

The planner, its orchestration and the proxy that cuts engines anew are those of a run; the profile is the cost model's; a change
costs ``sim.start_seconds`` and the weights' way, on the simulated clock. For experts the orchestrator cannot cut engines yet: the
rule is played over rollouts of the cost model alone, and nothing is printed to compare with.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.bench.simulated import row
from orchestrator.config import Config
from orchestrator.policies.planner import ParallelismPlanner, StepLoad, layouts_of
from orchestrator.policies.profile import EngineShape, Layout, Point, Profile
from orchestrator.sim.costs import Roofline
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.run import simulate
from orchestrator.sim.setups import ROLLPACKER, rollpacker
from orchestrator.sim.traces import Trace, TracedTurn, Traces

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
        episodes = tuple(Trace((TracedTurn(prompt, length // GRAIN, 0.0),), 0.0, None) for length in LENGTHS)
        numbers = tuple((place,) for place in range(len(LENGTHS)) for _ in range(groups))
        runs[name] = _rollouts(config, Traces(episodes, numbers))
    fixed, source = runs["TP 1"], "RollPacker 6.4, figure 13a"
    rows = []
    for name in ("planner", "planner, starts of 60 s"):
        ours = statistics.mean(one["seconds"] / other["seconds"] for one, other in zip(fixed, runs[name], strict=True))
        rows.append(row(f"14B on 16 GPUs, 8k to 32k: rollout, TP 1 over {name}, mean", "1.9", 1.9, 1.9, ours, source))
    found = [one["tp"] for one in runs["planner"]]
    rows.append(row("TP at 8k", "1", 1, 1, found[0], source))
    rows.append(row("TP at 32k", "4", 4, 4, found[-1], source))
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
        row("14B/32k, short rounds: share of preemptions that the planner saves", "0.138", 0.138, 0.138, fewer, source),
        row(
            "14B/32k, short rounds: rollout, TP 2 over planner",
            "1.11 to 1.28",
            1.11,
            1.28,
            seconds["TP 2"] / seconds["planner"],
            source,
        ),
    ]


def _rollouts(config: Config, traces: Traces | None = None) -> list[dict[str, Any]]:
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


# -- experts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Experts:
    """Engines of a mixture of experts in a layout. Slices of experts (EP 1) are computed in tiles of ``TILE`` columns, so that a
    narrow slice is padded; whole experts (EP > 1) are not, but the fullest device is waited for."""

    layout: Layout
    imbalance: float = 1.0

    TILE = 128  # columns of a kernel's tile

    @property
    def costs(self) -> Roofline:
        """The roofline of this layout, the part of the experts as much slower as padding or imbalance makes it."""
        model, device = MODELS["Qwen3-30B-A3B"], DEVICES["H800"]
        slower = self.imbalance
        if self.layout.ep == 1:
            width = model.feed_forward // self.layout.tp
            slower = -(-width // self.TILE) * self.TILE / width
        slowed = replace(device, expert_efficiency=device.expert_efficiency / slower)
        return Roofline(slowed, model, self.layout.tp)

    def step_seconds(self, batch: int, context: int) -> float:
        """Of a decode step."""
        fixed, growing = self.costs.decode(batch)
        return fixed + growing * batch * context


def experts(steps: int = 24) -> dict[str, Any]:
    """The planner over TP and EP, 8 H800, Qwen3-30B-A3B, routing that gets uneven and even again. Returns its choices, the mean
    step against each layout that never changes, and what the changes cost."""
    layouts = layouts_of(8, 8, heads=32, experts=True)
    lengths, prompt, batch = [800] * 512, 300, 64
    points, shapes = [], []
    for layout in layouts:
        cut = Experts(layout)
        for size in (1, 8, 64, 256, 512):
            for tokens in (256, 1024, 4096):
                points.append(Point("decode", layout, size, tokens, cut.step_seconds(size, tokens)))
                prefill = cut.costs.prefill(size * tokens, size * tokens * tokens / 2, 1)
                points.append(Point("prefill", layout, size, tokens, prefill))
        costs = cut.costs
        start = 5.0 + costs.fetch_seconds + costs.load_seconds
        shapes.append(EngineShape(layout, MODELS["Qwen3-30B-A3B"].kv_bytes, costs.kv_tokens, 0, start))
    profile = Profile(points, shapes)
    imbalances = [1.0 + 2.0 * min(step, steps - step) / (steps / 2) for step in range(steps)]

    def seconds(layout: Layout, imbalance: float) -> float:
        """Of a rollout in which the experts' part waits for the fullest device."""
        slowed = Experts(layout, imbalance).step_seconds(batch, prompt + 400)
        even = Experts(layout).step_seconds(batch, prompt + 400)
        return profile.rollout_seconds(lengths, prompt, layout, 8 // layout.tp) * slowed / even

    planner = ParallelismPlanner(8, layouts, profile)
    planner.layout = Layout(8, 8)
    chosen, total, changes = [], 0.0, 0.0
    for step, imbalance in enumerate(imbalances):
        took = seconds(planner.layout, imbalance)
        chosen.append(str(planner.layout))
        total += took
        plan = planner.after(StepLoad(1, took, lengths, prompt, imbalance=imbalance), steps - step - 1)
        if plan.changes:
            cost = profile.shape(plan.layout).start_seconds
            planner.changed(plan.layout, cost)
            changes += cost
    fixed = {
        str(layout): round(sum(seconds(layout, imbalance) for imbalance in imbalances) / steps, 3)
        for layout in (Layout(8), Layout(8, 8))
    }
    return {
        "layouts": chosen,
        "imbalance": [round(one, 2) for one in imbalances],
        "seconds_a_step": round((total + changes) / steps, 3),
        "of_it_changes": round(changes / steps, 3),
        "fixed_seconds_a_step": fixed,
        "printed": "nothing: RollPacker names the extension and does not evaluate it",
    }
