"""RollPacker's figures that need single requests, or the judge and the trainer by themselves: 5, 14b, 15b, table 4. Simulated.

Figures 5 and 15b watch every request of a run. Figure 14b is :mod:`orchestrator.policies.serving.judge_residency` over the
cost model, without a run: how long a pass takes with its transfers beside the computation, and one after the other.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import Completion, GenerationRequest
from orchestrator.config import Config
from orchestrator.policies.serving.judge_residency import JudgeMemory, JudgeResidency, plan_residency
from orchestrator.sim.cost_model import LINK_EFFICIENCY, RooflineCosts
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.paper_setups import rollpacker
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.simulated import exactly, row

MATH = ["sim.tasks.code.weight=1e-9", "sim.tasks.judged.weight=1e-9"]
JUDGED = (4096, 8192, 16384, 32768)  # tokens of a judged sequence, figure 14b
TABLE_4 = {"20%": 0.90, "30%": 0.89, "40%": 0.86, "50%": 0.87}  # speed of one fetch over streaming
_POINTS = 100  # at which concurrent tokens are counted in a rollout


@dataclass(frozen=True, slots=True)
class Said:
    """A request that ended: by whom, when, first token, time between tokens (s), prompt and response (simulated tokens)."""

    trajectory: str
    end: float
    first: float
    per_token: float
    prompt: int
    tokens: int
    whole: bool


def watched(config: Config) -> tuple[list[Said], list[dict[str, Any]], list[dict[str, Any]]]:
    """A run's requests, events and journal. Raises SimulationFailed."""
    found: list[Said] = []

    def watch(request: GenerationRequest, completion: Completion) -> None:
        timing, now = completion.timing, asyncio.get_running_loop().time()
        sizes = len(request.token_ids), len(completion.token_ids)
        whole = completion.finish_reason in ("stop", "length")
        found.append(Said(request.trajectory_id, now, timing.first_token, timing.per_token, *sizes, whole))

    result = simulate(config, watch=watch)
    events, journal = ([json.loads(line) for line in text.splitlines()] for text in (result.events, result.journal))
    return found, events, journal


def figure_5(scale: int = 1, steps: int = 6) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Qwen3-8B, maths, up to 32k, eight H800: latencies and concurrent tokens in short and in long rounds."""
    given = ["sim.model=Qwen3-8B", "rollout.workers=8", "sim.trainer_gpus=8", "trainer.data_parallel=2", *MATH]
    given += ["run.mode=sync_plus", f"rollout.engine.max_model_len={(512 + 32768) // 16}"]
    given += ["sim.tasks.math.response_max=32768", "sim.tasks.math.response_sigma=1.267"]
    given.append("sim.tasks.math.response_tokens=1004")
    config = rollpacker("7B/8k", "+ tail batching", scale, steps=steps, extra=given)
    said, events, _ = watched(config)
    took = {event["step"]: (event["start"], event["end"]) for event in events if event.get("stage") == "get_batch"}
    kinds = {event["step"]: event["round"] for event in events if event["kind"] == "round"}
    early = 0.1 * statistics.mean(end - begun for step, (begun, end) in took.items() if kinds.get(step) == "short")
    means: dict[str, dict[str, float]] = {}
    for kind in ("short", "long"):
        first, between, held, peaks = [], [], [], []
        for step, (begun, end) in took.items():
            if kinds.get(step) != kind or step == 0:
                continue
            inside = [one for one in said if begun < one.end <= end + 1.0 and one.tokens > 1]
            first += [one.first for one in inside]
            between += [one.per_token for one in inside]
            held.append(_held(inside, begun + early) * config.sim.grain)
            times = [begun + (end - begun) * place / _POINTS for place in range(_POINTS)]
            peaks.append(max(_held(inside, now) for now in times) * config.sim.grain)
        means[kind] = {
            "ttft_seconds": statistics.mean(first),
            "tpot_seconds": statistics.mean(between) / config.sim.grain,
            "early_tokens": statistics.mean(held),
            "peak_tokens": statistics.mean(peaks),
        }
    short, long, source = means["short"], means["long"], "RollPacker 3, figure 5"
    high = "substantially above 1"
    return {**means, "early_seconds": {"after": early}}, [
        row("TPOT, short over long rounds", "nearly 1", 0.9, 1.1, short["tpot_seconds"] / long["tpot_seconds"], source),
        row("TTFT, short over long rounds", "nearly 1", 0.9, 1.1, short["ttft_seconds"] / long["ttft_seconds"], source),
        row(
            "concurrent tokens early in a rollout, short over long rounds",
            high,
            1.2,
            20.0,
            short["early_tokens"] / long["early_tokens"],
            source,
        ),
    ]


def _held(said: Sequence[Said], now: float) -> float:
    """Tokens in contexts at a time: a request grows evenly from its first token to its end."""
    held = 0.0
    for one in said:
        start = one.end - one.per_token * (one.tokens - 1)
        if start <= now < one.end:
            held += one.prompt + one.tokens * (now - start) / max(one.end - start, 1e-9)
    return held


def figure_15b(steps: int = 16) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One-off, 7B/8k, 8 GPUs for each side, 32 prompts a batch: the longest response of each step's batch."""
    given = ["run.mode=one_off", "rollout.alpha=1", "rollout.workers=8", "sim.trainer_gpus=8"]
    given += ["trainer.data_parallel=4", "rollout.groups_per_step=32"]
    longest: dict[str, list[int]] = {}
    for rung in ("veRL", "+ tail batching"):
        config = rollpacker("7B/8k", rung, steps=steps, extra=given)
        said, _, journal = watched(config)
        tokens: dict[str, int] = {}
        for one in said:
            if one.whole:
                tokens[one.trajectory] = max(tokens.get(one.trajectory, 0), one.tokens)
        of: dict[int, int] = {}
        for line in journal:
            if line["state"] == "trained":
                of[line["step"]] = max(of.get(line["step"], 0), tokens.get(line["id"], 0))
        longest[rung] = [of[step] * config.sim.grain for step in sorted(of)]
    usual = statistics.median(longest["veRL"])
    shorter = statistics.mean(value < 0.75 * usual for value in longest["+ tail batching"])
    ours = usual / statistics.median(longest["+ tail batching"])
    source = "RollPacker 6.7, figure 15b"
    what = "one-off, 7B/8k: share of steps whose longest response is below 3/4 of veRL's median"
    return dict(longest), [
        row(what, "most steps", 0.5, 1.0, shorter, source),
        row(
            "one-off, 7B/8k: longest response of a step, median, veRL over RollPacker",
            "above 1",
            1.0,
            20.0,
            ours,
            source,
        ),
    ]


def figure_14b() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A 7B judge whose memory keeps half of its layers at 32k tokens (the paper: at least half is offloaded there)."""
    model, device = MODELS["Qwen2.5-7B"], DEVICES["H800"]
    layer = 2 * (model.attention_parameters + 3 * model.hidden * model.feed_forward)
    fixed = 2 * 2 * model.hidden * model.vocabulary
    token = float(model.kv_bytes + 2 * 2 * (model.hidden + model.feed_forward))  # KV; a layer's activations
    judge = JudgeMemory(model.layers, fixed, layer, token)
    free = fixed + int(token * JUDGED[-1]) + (model.layers // 2 + 2) * layer
    copy = layer / (device.pcie_gb_s * 1e9 * LINK_EFFICIENCY)
    detail: dict[str, Any] = {}
    for tokens in JUDGED:
        kept = plan_residency(judge, tokens, free)
        compute = RooflineCosts(device, model).prefill(tokens, tokens * tokens / 2, 0) / model.layers
        apart = model.layers * compute + len(kept.streamed) * copy
        beside = pass_seconds(kept, compute, copy)
        detail[str(tokens)] = {"streamed_layers": len(kept.streamed), "apart": apart, "pipelined": beside}
    best = max(one["apart"] / one["pipelined"] for one in detail.values())
    last = detail[str(JUDGED[-1])]
    source = "RollPacker 6.5, figure 14b"
    return detail, [
        row("judge, layers streamed one after the other over pipelined, at best", "1.4", 1.0, 1.4, best, source),
        exactly("the same at 32k tokens", 1.4, last["apart"] / last["pipelined"], source),
    ]


def table_4(scale: int = 1, steps: int = 6) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Maths alone, 7B/8k: one fetch of what is complete, at most a share of the batch, against fetching as groups complete."""
    found = {}
    for name, once in (("stream", 0.0), *((name, float(name.rstrip("%")) / 100) for name in TABLE_4)):
        extra = [*MATH, f"sim.feed_once={once}"]
        events = [
            json.loads(line)
            for line in simulate(
                rollpacker("7B/8k", "+ stream trainer", scale, steps=steps, extra=extra)
            ).events.splitlines()
        ]
        kinds = {event["step"]: event["round"] for event in events if event["kind"] == "round"}
        ends = {event["step"]: event["t"] for event in events if event["kind"] == "step"}
        long = [ends[step] - ends[step - 1] for step in sorted(ends)[1:] if kinds[step] == "long"]
        found[name] = round(statistics.mean(long), 2)
    source = "RollPacker 6.6, table 4"
    return found, [
        exactly(
            f"long rounds: streaming over one fetch at {name}, s a step", printed, found["stream"] / found[name], source
        )
        for name, printed in TABLE_4.items()
    ]


def pass_seconds(residency: JudgeResidency, compute: float, copy: float, passes: int = 1) -> float:
    """Seconds of ``passes`` through all layers, one after another, where a layer takes ``compute`` seconds and its transfer
    ``copy``: transfers run one at a time, in order, each as soon as its buffer is free, the next pass's too."""
    order = [index for _ in range(passes) for index in range(residency.layers)]
    streamed = frozenset(residency.streamed)
    freed = [0.0] * residency.buffers  # when each buffer was last free
    copied = now = 0.0
    number = 0
    ready: list[float] = []
    # A transfer may start when the one before it ended and its buffer was released, which is known as layers are computed.
    for index in order:
        if index not in streamed:
            now += compute
            continue
        buffer = number % residency.buffers
        copied = max(copied, freed[buffer]) + copy
        ready.append(copied)
        now = max(now, copied) + compute
        freed[buffer] = now
        number += 1
    return now
