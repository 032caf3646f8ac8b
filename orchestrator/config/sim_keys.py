"""Section of a config: the simulated twins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from orchestrator.settings.section import Conflict, Fraction, Positive, PositiveSeconds, Section

Seconds = Annotated[float, Field(ge=0)]
Sigma = Annotated[float, Field(ge=0, le=4)]
Version = Annotated[int, Field(ge=0)]
Imbalance = Annotated[float, Field(ge=1, allow_inf_nan=False)]


def _from_the_first(value: object) -> object:
    """A number counts from version 0 on."""
    return {0: value} if isinstance(value, (int, float)) else value


class SimTaskSection(Section):
    """A task of the simulated workload: sizes in tokens of the engine, times in seconds, means with the sigma of their
    logarithm (lognormal), or with ``normal``, of the value over the mean. ``prompt_share`` and
    ``trajectory_share``: of the variance of log(length) that belong to the prompt, the same for all members of a group and each
    time that it comes back, and to the trajectory, the same for all its turns; what is left is each turn's own."""

    weight: Annotated[float, Field(gt=0)] = 1.0  # share of the prompts, relative to the other tasks
    turns_min: Positive = 1
    turns_max: Positive = 1  # evenly drawn from min to max
    prompt_tokens: Positive = 512
    observation_tokens: Positive = 256  # of the turns after the first
    reuse: Fraction = 1.0  # of a turn's context, whose KV its next turn finds; 1: it is appended to, 0: written again
    response_tokens: Annotated[float, Field(gt=0)] = 512.0  # of a turn
    response_sigma: Sigma = 0.8
    response_max: Positive = 8192
    # by which response_tokens grows with each batch of prompts, 61 times at most: as training continues
    response_growth: Annotated[float, Field(ge=0)] = 0.0
    prompt_share: Fraction = 0.0
    trajectory_share: Fraction = 0.0  # with prompt_share at most 1
    reset_seconds: Seconds = 0.0
    reset_sigma: Sigma = 0.0
    step_seconds: Seconds = 0.0
    step_sigma: Sigma = 0.0
    normal: bool = False  # environment times are normal, cut at 0, instead of lognormal
    reward_seconds: Seconds = 0.0
    reward_sigma: Sigma = 0.0
    reward_max: Seconds = 0.0  # the scorer's time limit, at which it answers; 0: none

    def conflicts(self) -> Iterator[Conflict]:
        if self.turns_min > self.turns_max:
            yield "turns_min", self.turns_min, f"must not be above turns_max = {self.turns_max}"
        if self.prompt_share + self.trajectory_share > 1.0:
            yield (
                "trajectory_share",
                self.trajectory_share,
                f"must not be above 1 - prompt_share = {1.0 - self.prompt_share:.6g}",
            )


class SimBorrowedSection(Section):
    """Rollout workers on devices that are not the run's own, beside `rollout.workers` (ROSE 4 and 6): docs/coserving.md.

    ``how`` "coserve": beside serving engines of another model, under the policies of real ones; "multiplex": the same device in
    turns with serving, without admission, budget and prefix cache (Prism's place in ROSE 6); "autoscale": devices that serving
    gives up while its load is low, and takes back (ServerlessLLM's); "spot" and "serverless": devices for rollouts alone, that
    come and go. ``phases``: whether serving engines prefill and decode on devices of their own, or each does both, which is not
    played with "autoscale"."""

    how: Literal["coserve", "multiplex", "autoscale", "spot", "serverless"] = "coserve"
    workers: Annotated[int, Field(ge=0)] = 0  # rollout workers borrowed this way; 0: none
    serving: Annotated[int, Field(ge=0)] = 0  # serving engines to choose from; 0: as many as workers
    device: str = ""  # class of their devices, which the affinity of tasks goes by; empty: sim.device
    model: str = "Qwen2.5-7B"  # that is served, of orchestrator/sim/hardware.py
    # collocated: each engine prefills and decodes (ROSE 4.3)
    phases: Literal["disaggregated", "collocated"] = "disaggregated"
    # collocated: tokens of a step; ASSUMED: vLLM's 8192 of these devices take longer than ROSE's TPOT
    chunk: Positive = 2048
    prefill: Annotated[float, Field(gt=0, lt=1)] = 0.25  # disaggregated: of serving engines; the others decode
    # packed arrivals (azure_code, mooncake_conversation), or a file of arrivals (CSV, JSONL, Parquet: docs/simulator.md)
    trace: str = "azure_code"
    speed: Annotated[float, Field(gt=0)] = 1.0  # at which they are played; the trace starts over at its end
    ttft: PositiveSeconds = 0.5
    tpot: PositiveSeconds = 0.15
    admission: Literal["dual", "ttft", "tpot"] = "dual"
    headroom: Fraction = 0.2  # of the device's whole memory, for serving (ROSE 4.1)
    lease_seconds: PositiveSeconds = 10.0  # that a prefix nobody uses is kept
    window: PositiveSeconds = 3600.0  # of serving's KV use, by which devices are chosen
    activation_seconds: Seconds = 5.0  # of the rollout model, which is deployed already (ROSE 6.1)
    # of a device that has nothing of the model yet: "tens of seconds" (ROSE 2.3); ASSUMED
    start_seconds: Seconds = 40.0
    reload_seconds: Seconds = 20.0  # autoscale: until a device serves again: "tens of seconds" (ROSE 3.2); ASSUMED
    function_seconds: PositiveSeconds = 900.0  # serverless: of a lease (ROSE 6)
    spot_low: Fraction = 0.25  # spot: of the devices, that are there at least; ASSUMED
    exchanged: bool = False  # coserve: servers are taken and given back while it is under way, as rollout.borrowed says
    scaled: bool = False  # exchanged: serving engines end while their load is low, and come back when it rises
    # exchanged: between two serving engines that end unforeseen, in the mean; 0: none does
    outage_seconds: Seconds = 0.0
    spot_seconds: PositiveSeconds = 180.0  # spot: between two changes of how many are there, in the mean; ASSUMED


class SimSection(Section):
    """The simulated twins of `rl-coserve sim`: cost model, environments, rewards (seconds), and faults.

    ``costs`` "linear" counts with the next figures; "roofline" with ``model`` on ``device`` or ``fleet``. ``tasks``: a workload
    drawn from published figures instead of the one ``environment_seconds_mean`` and its neighbours describe."""

    costs: Literal["linear", "roofline"] = "linear"
    model: str = "Qwen3-8B"  # of orchestrator/sim/hardware.py
    device: str = "H800"  # class of every rollout worker's devices, where there is no fleet
    fleet: dict[str, Positive] = {}  # class -> workers of it, rollout.workers in all, in this order
    tensor_parallel: Positive = 1  # devices of a worker
    degrees: tuple[Positive, ...] = ()  # devices of each worker, in order; empty: tensor_parallel of each
    # devices of a worker that whole experts are shared out over; 1: slices on each (roofline)
    expert_parallel: Positive = 1
    # columns that expert slices are padded to; 0: not padded (roofline)
    expert_tile: Annotated[int, Field(ge=0)] = 0
    expert_imbalance: Annotated[dict[Version, Imbalance], BeforeValidator(_from_the_first)] = {
        0: 1.0
    }  # tokens of the fullest device's experts over the mean: a number, or {version = number}, each from that version on
    prediction_seconds: Annotated[float, Field(ge=0)] = 0.15  # seconds until a forecast is there: Heddle, table 1
    trainer_device: str = "H800"
    trainer_gpus: Positive = 8
    trainer_forwards: Annotated[int, Field(ge=0)] = 1  # forward passes besides the training one: old policy, reference
    # roofline: of a trained token, however many GPUs train; None: orchestrator/sim/hardware.py
    trainer_serial_seconds: Annotated[float, Field(ge=0)] | None = None
    # a streamed step is fed once only, at most so much of a batch (RollPacker, table 4); 0: as it comes
    feed_once: Fraction = 0.0
    pull_gb_s: Annotated[float, Field(ge=0)] = 0.0  # a worker from the relay; 0: its devices' network
    push_gb_s: Annotated[float, Field(ge=0)] = 0.0  # the trainer to the relay; 0: its devices' network
    kv_gb_s: Annotated[float, Field(ge=0)] = 0.0  # KV from worker to worker; 0: the receiver's devices' network
    # that workers stand still at each update besides loading: a transfer that nothing overlaps
    stall_seconds: Seconds = 0.0
    kv_tokens: Positive | None = None  # that a worker has room for; None: what its devices have, linear: any number
    start_seconds: Seconds = 5.0  # of an engine's process, weights not counted; a model's figure, no measurement
    grain: Positive = 1  # engine tokens that one simulated token stands for; results count the latter
    tasks: dict[str, SimTaskSection] = {}
    borrowed: SimBorrowedSection = SimBorrowedSection()
    reward_slots: Annotated[int, Field(ge=0)] = 0  # scores computed at a time; 0: any number (serverless)
    prefill_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-6
    decode_seconds_per_step: Annotated[float, Field(gt=0)] = 0.02
    decode_seconds_per_sequence: Annotated[float, Field(ge=0)] = 1e-4
    response_tokens_mean: Annotated[float, Field(gt=0)] = 20.0
    response_tokens_max: Positive = 256
    turns_max: Positive = 8
    environment_seconds_mean: Annotated[float, Field(ge=0)] = 0.5
    environment_seconds_sigma: Annotated[float, Field(ge=0)] = 0.5
    templates: Annotated[int, Field(ge=0)] = 0  # templates that environments start from; 0: one for all
    data_set: Annotated[int, Field(ge=0)] = 0  # prompts that training goes through again and again; 0: it never repeats
    kinds: Positive = 1  # prompts of this many tasks in turn, all alike: sim, sim-2, ...
    tools: Fraction = 0.0  # chance that an environment's step calls a tool
    tool_seconds: Annotated[float, Field(ge=0)] = 0.5
    tool_concurrency: Positive = 16  # calls in flight, as tools.concurrency and tools.burst
    tool_burst: Annotated[int, Field(ge=0)] = 64
    reward_seconds: Annotated[float, Field(ge=0)] = 0.05
    train_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-4
    publish_seconds: Annotated[float, Field(ge=0)] = 0.5
    update_seconds: Annotated[float, Field(ge=0)] = 0.5
    # run folder whose trajectories are played again (lengths, environments, rewards), or a file of lengths (CSV, JSONL, Parquet:
    # docs/simulator.md); empty: drawn ones
    trace: str = ""
    trace_rows: Positive = 100_000  # at most this many trajectories of a run, rows of a file
    trace_spread: bool = (
        False  # groups of a run in an order that takes the first ones from all over it, not from its beginning
    )
    # file of seconds, of which the environment steps of a file of lengths are drawn; empty: its own
    tool_trace: str = ""
    fault_rate: Fraction = 0.0  # chance of a fault at each call of a port
    # of which kinds; by default not: "lose" (the shard of a scored trajectory goes), "evict" (a worker forgets contexts),
    # "damage" (turns arrive with another token), "kill" (a shard of environment managers dies, or falls silent)
    faults: tuple[Literal["crash", "delay", "drop", "duplicate", "cancel", "lose", "evict", "damage", "kill"], ...] = (
        "crash",
        "delay",
        "drop",
        "duplicate",
        "cancel",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.tool_trace and not self.trace:
            yield "tool_trace", self.tool_trace, "is for the steps of a file of lengths: set sim.trace as well"
