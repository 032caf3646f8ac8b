"""RollPacker's figures that need single requests, or the judge and the trainer by themselves: 5, 14b, 15b, table 4. Simulated.

Figures 5 and 15b watch every request of a run. Figure 14b is :mod:`orchestrator.policies.serving.judge_residency` over the
cost model, without a run: how long a pass takes with its transfers beside the computation, and one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from orchestrator.api import Completion, GenerationRequest
from orchestrator.config import Config
from orchestrator.policies.serving.judge_residency import JudgeMemory, JudgeResidency, plan_residency
from orchestrator.sim.cost_model import LINK_EFFICIENCY, RooflineCosts
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.paper_setups import rollpacker
from scripts.bench.papers.runner import Cell, Found, Row, Run, row

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


def watched(config: Config) -> tuple[list[Said], Run]:
    """A run and its requests. Raises SimulationFailed."""
    found: list[Said] = []

    def watch(request: GenerationRequest, completion: Completion) -> None:
        timing, now = completion.timing, asyncio.get_running_loop().time()
        sizes = len(request.token_ids), len(completion.token_ids)
        whole = completion.finish_reason in ("stop", "length")
        found.append(Said(request.trajectory_id, now, timing.first_token, timing.per_token, *sizes, whole))

    return found, Run(config, watch=watch)


def figure_5_cells() -> dict[str, Cell]:
    """Qwen3-8B, maths, up to 32k, eight H800."""
    return {"figure 5": partial(_rounds, 1, 6)}


def _rounds(scale: int, steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Latencies and concurrent tokens in short and in long rounds."""
    given = [
        f"run.seed={seed}",
        "sim.model=Qwen3-8B",
        "rollout.workers=8",
        "sim.trainer_gpus=8",
        "trainer.data_parallel=2",
        *MATH,
    ]
    given += ["run.mode=sync_plus", f"rollout.engine.max_model_len={(512 + 32768) // 16}"]
    lengths = ("response_max=32768", "response_sigma=1.267", "response_tokens=1004")
    given += [f"sim.tasks.math.{setting}" for setting in lengths]
    config = rollpacker("7B/8k", "+ tail batching", scale, steps=steps, extra=given)
    said, run = watched(config)
    early = 0.1 * mean(seconds for step, seconds in run.took.items() if run.rounds.get(step) == "short")
    means: dict[str, dict[str, float]] = {}
    for kind in ("short", "long"):
        first, between, held, peaks = [], [], [], []
        for step, (begun, end) in run.rollouts.items():
            if run.rounds.get(step) != kind or step == 0:
                continue
            inside = [one for one in said if begun < one.end <= end + 1.0 and one.tokens > 1]
            first += [one.first for one in inside]
            between += [one.per_token for one in inside]
            held.append(_held(inside, begun + early) * config.sim.grain)
            times = [begun + (end - begun) * place / _POINTS for place in range(_POINTS)]
            peaks.append(max(_held(inside, now) for now in times) * config.sim.grain)
        means[kind] = {
            "ttft_seconds": mean(first),
            "tpot_seconds": mean(between) / config.sim.grain,
            "early_tokens": mean(held),
            "peak_tokens": mean(peaks),
        }
    return {**means, "early_seconds": {"after": early}}


def figure_5(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """Short over long rounds."""
    means = found["figure 5"]
    compared = (
        ("TPOT", "tpot_seconds", (0.9, 1.1), "nearly 1"),
        ("TTFT", "ttft_seconds", (0.9, 1.1), "nearly 1"),
        ("concurrent tokens early in a rollout", "early_tokens", (1.2, 20.0), "substantially above 1"),
    )
    over = {key: means["short"][key] / means["long"][key] for _, key, _, _ in compared}
    return means, [
        row(f"{what}, short over long rounds", printed, over[key], "RollPacker 3, figure 5", text=text)
        for what, key, printed, text in compared
    ]


def _held(said: Sequence[Said], now: float) -> float:
    """Tokens in contexts at a time: a request grows evenly from its first token to its end."""
    held = 0.0
    for one in said:
        start = one.end - one.per_token * (one.tokens - 1)
        if start <= now < one.end:
            held += one.prompt + one.tokens * (now - start) / max(one.end - start, 1e-9)
    return held


def figure_15b_cells() -> dict[str, Cell]:
    """One-off, 7B/8k, 8 GPUs for each side, 32 prompts a batch."""
    return {f"figure 15b/{rung}": partial(_longest, rung, 16) for rung in ("veRL", "+ tail batching")}


def _longest(rung: str, steps: int, seed: int) -> list[int]:
    """Tokens of the longest response of each step's batch."""
    given = ["run.mode=one_off", "rollout.alpha=1", "rollout.workers=8", "sim.trainer_gpus=8", f"run.seed={seed}"]
    given += ["trainer.data_parallel=4", "rollout.groups_per_step=32"]
    said, run = watched(rollpacker("7B/8k", rung, steps=steps, extra=given))
    tokens: dict[str, int] = {}
    for one in said:
        if one.whole:
            tokens[one.trajectory] = max(tokens.get(one.trajectory, 0), one.tokens)
    of: dict[int, int] = {}
    for line in run.journal:
        if line["state"] == "trained":
            of[line["step"]] = max(of.get(line["step"], 0), tokens.get(line["id"], 0))
    return [of[step] * run.config.sim.grain for step in sorted(of)]


def figure_15b(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """How much shorter the longest response of a step is."""
    longest = {rung: found[f"figure 15b/{rung}"] for rung in ("veRL", "+ tail batching")}
    usual, what, source = median(longest["veRL"]), "one-off, 7B/8k:", "RollPacker 6.7, figure 15b"
    shorter = mean(value < 0.75 * usual for value in longest["+ tail batching"])
    ours, over = usual / median(longest["+ tail batching"]), "veRL over RollPacker"
    share = f"{what} share of steps whose longest response is below 3/4 of veRL's median"
    return dict(longest), [
        row(share, (0.5, 1.0), shorter, source, text="most steps"),
        row(f"{what} longest response of a step, median, {over}", (1.0, 20.0), ours, source, text="above 1"),
    ]


def figure_14b(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """A 7B judge whose memory keeps half of its layers at 32k tokens (the paper: at least half is offloaded there). No run is
    played for it."""
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
    gains, source = [one["apart"] / one["pipelined"] for one in detail.values()], "RollPacker 6.5, figure 14b"
    what = "judge, layers streamed one after the other over pipelined, at best"
    return detail, [
        row(what, (1.0, 1.4), max(gains), source, text="1.4"),
        row("the same at 32k tokens", 1.4, gains[-1], source),
    ]


def table_4_cells() -> dict[str, Cell]:
    """Maths alone, 7B/8k: one fetch of what is complete, at most a share of the batch, against fetching as groups complete."""
    shares = {"stream": 0.0, **{name: float(name.rstrip("%")) / 100 for name in TABLE_4}}
    return {f"table 4/{name}": partial(_fed_once, share, 1, 6) for name, share in shares.items()}


def _fed_once(share: float, scale: int, steps: int, seed: int) -> float:
    """Seconds of a long round."""
    extra = [f"run.seed={seed}", *MATH, f"sim.feed_once={share}"]
    run = Run(rollpacker("7B/8k", "+ stream trainer", scale, steps=steps, extra=extra))
    return mean(took for step, took in run.periods.items() if run.rounds[step] == "long")


def table_4(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """Streaming over one fetch."""
    of = {name: float(found[f"table 4/{name}"]) for name in ("stream", *TABLE_4)}
    what, source = "long rounds: streaming over one fetch at", "RollPacker 6.6, table 4"
    rows = [row(f"{what} {name}, s a step", one, of["stream"] / of[name], source) for name, one in TABLE_4.items()]
    return of, rows


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
