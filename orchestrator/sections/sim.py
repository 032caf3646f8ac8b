"""Section of a config: the simulated twins."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.sections.base import Fraction, Positive, Section


class SimSection(Section):
    """The simulated twins of `rl-coserve sim`: linear cost model, environments, rewards (seconds), and faults."""

    prefill_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-6
    decode_seconds_per_step: Annotated[float, Field(gt=0)] = 0.02
    decode_seconds_per_sequence: Annotated[float, Field(ge=0)] = 1e-4
    response_tokens_mean: Annotated[float, Field(gt=0)] = 20.0
    response_tokens_max: Positive = 256
    turns_max: Positive = 8
    environment_seconds_mean: Annotated[float, Field(ge=0)] = 0.5
    environment_seconds_sigma: Annotated[float, Field(ge=0)] = 0.5
    tasks: Positive = 1  # prompts of so many tasks in turn: sim, sim-2, ...
    tools: Fraction = 0.0  # chance that an environment's step calls a tool
    tool_seconds: Annotated[float, Field(ge=0)] = 0.5
    tool_concurrency: Positive = 16  # calls in flight, as tools.concurrency and tools.burst
    tool_burst: Annotated[int, Field(ge=0)] = 64
    reward_seconds: Annotated[float, Field(ge=0)] = 0.05
    train_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-4
    publish_seconds: Annotated[float, Field(ge=0)] = 0.5
    update_seconds: Annotated[float, Field(ge=0)] = 0.5
    trace: str = ""  # run folder whose trajectories are played again: lengths, environments, rewards; empty: drawn ones
    trace_rows: Positive = 100_000  # at most so many of them
    fault_rate: Fraction = 0.0  # chance of a fault at each call of a port
    faults: tuple[Literal["crash", "delay", "drop", "duplicate", "cancel"], ...] = (
        "crash",
        "delay",
        "drop",
        "duplicate",
        "cancel",
    )
