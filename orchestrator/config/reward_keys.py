"""Sections of a config: rewards and judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orchestrator.policies.episodes import adaptive_timeouts
from orchestrator.policies.training.sample_weights import OverlongPenalty
from orchestrator.settings.section import Conflict, Positive, PositiveSeconds, Section

BESIDE_CASES = 20.0  # seconds of a call for what is no test case: the checker, on a busy machine


class StreamedJudgeSection(Section):
    """How the run's own judge runs (`reward.judge.path`): its layers lie in host memory, and are streamed to the device that
    it shares with a rollout engine (RollPacker 4.3): docs/tasks.md."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"  # auto: the GPU where there is one
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    memory_mb: Annotated[int, Field(ge=0)] = 0  # device memory that it may use; 0: what is free (on a CPU: any)
    layers_file: str = ""  # keep the layers in this file instead of memory (on a CPU)
    # file of `rl-coserve profile --judge`: what a token takes, and how many questions together are fastest; empty: by its sizes
    profile: str = ""
    threads: Positive = 1
    restarts: Annotated[int, Field(ge=0)] = 5  # in a row; then the run ends
    start_seconds: PositiveSeconds = 300.0  # until it has read its weights
    mps: bool = True  # NVIDIA's MPS for it and the engines, where it is on a GPU
    mps_share: Annotated[int, Field(ge=1, le=100)] = 100  # per cent of the GPU's threads that the judge may have


class JudgeSection(Section):
    """A model that scores: behind an OpenAI-compatible endpoint (``url``; its bearer token is in the environment variable
    RL_COSERVE_JUDGE_TOKEN), or started by the run from a Hugging Face folder (``path``). Both empty: none."""

    url: str = ""  # the base, http://host:port/v1
    path: str = ""
    model: str = ""  # its name at the endpoint
    criterion: str = ""  # what is graded, in words
    template: str = ""  # the whole message, with {criterion} and {episode}; empty: the built-in one
    low: int = 0
    high: int = 10
    structured: bool | None = None  # the endpoint enforces the form of the answer (response_format); None: with `url`
    max_tokens: Positive = 64
    # for a question, not counting its wait for others in the run's own judge; None: reward.timeout, with "adaptive"
    # reward.adaptive.whole
    timeout: PositiveSeconds | None = None
    streamed: StreamedJudgeSection = StreamedJudgeSection()

    @property
    def any(self) -> bool:
        """Whether a model scores."""
        return bool(self.url or self.path)

    def conflicts(self) -> Iterator[Conflict]:
        if self.url and self.path:
            yield "path", self.path, "is for a judge that the run starts; leave it out, or url"
        if self.path and self.structured:
            yield "structured", True, "the run's own judge enforces no form; leave it out"
        for name in ("model", "criterion"):
            if (self.url or (self.path and name == "criterion")) and not getattr(self, name):
                yield name, "", "a judge needs one"
        if self.low >= self.high:
            yield "high", self.high, f"must be above low ({self.low})"


class ServeSection(Section):
    """How many replicas Ray Serve keeps of the reward function (reward.host = "ray_serve")."""

    min_replicas: Annotated[int, Field(ge=0)] = 1  # 0: none when nobody calls, and a cold start of seconds
    max_replicas: Positive = 4
    per_replica: Positive = 1  # calls that one replica handles at once, a process each; more load adds replicas
    cpus: Annotated[float, Field(gt=0)] = 1.0  # CPUs that Ray counts per replica
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one; of a cluster's Serve, the port it listens on

    def conflicts(self) -> Iterator[Conflict]:
        if self.max_replicas < self.min_replicas:
            yield "max_replicas", self.max_replicas, f"must be at least min_replicas ({self.min_replicas})"


class AdaptiveTimeoutSection(Section):
    """Limits in seconds with reward.timeout = "adaptive" (RollPacker 4.3): a test case may run for ``factor`` times the longest
    that it took in a correct answer, but within ``least`` and ``most``; for ``most`` while none has solved it."""

    factor: Annotated[float, Field(ge=1)] = adaptive_timeouts.FACTOR
    least: PositiveSeconds = adaptive_timeouts.LEAST
    most: PositiveSeconds = adaptive_timeouts.MOST
    rule: PositiveSeconds = adaptive_timeouts.RULE_LIMIT  # for a call where the task's reward has no test cases
    whole: PositiveSeconds = 120.0  # for all test cases of a trajectory together

    def conflicts(self) -> Iterator[Conflict]:
        if not self.least <= self.most <= self.whole:
            yield "most", self.most, f"must be between least ({self.least:g}) and whole ({self.whole:g})"


class OverlongSection(Section):
    """A reward that falls softly before a length limit (DAPO 3.4); the trainer's alone, see docs/megatron.md."""

    limit: Annotated[int, Field(ge=0)] = 0  # generated tokens of an episode at which the whole penalty is due; 0: off
    buffer: Annotated[int, Field(ge=0)] = 0  # tokens before it over which the penalty grows
    penalty: Annotated[float, Field(gt=0)] = 1.0  # taken off the reward there

    def conflicts(self) -> Iterator[Conflict]:
        if self.buffer and not self.limit:
            yield "buffer", self.buffer, "needs a limit: set limit too, or leave it out"
        elif self.buffer > self.limit:
            yield "buffer", self.buffer, f"must not be above limit ({self.limit}): every answer would be too long"

    @property
    def rule(self) -> OverlongPenalty:
        """As the policy has it."""
        return OverlongPenalty(self.limit, self.buffer, self.penalty)


class RewardSection(Section):
    """The reward function behind HTTP. ``url`` empty: ``function`` runs on ``host``."""

    function: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""  # module:function; empty: the task's own
    url: str = ""
    concurrency: Positive = 32
    timeout: PositiveSeconds | Literal["adaptive"] = 10.0  # of a call; adaptive: of each test case, by `adaptive`
    adaptive: AdaptiveTimeoutSection = AdaptiveTimeoutSection()
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    idle_seconds: PositiveSeconds = 30.0  # the embedded host scales to zero after this, Ray Serve to min_replicas
    host_restarts: Annotated[int, Field(ge=0)] = 5  # of the embedded host, in a row; then the run ends
    host: Literal["embedded", "ray_serve"] = "embedded"  # worker processes on this machine, or across a Ray cluster
    serve: ServeSection = ServeSection()
    votes: Annotated[int, Field(ge=1, le=15)] = 1  # how often a trajectory is scored; odd
    vote_by: Literal["majority", "median"] = "majority"  # how the votes are combined
    judge: JudgeSection = JudgeSection()
    # task of a mixture -> its judge; `function` scores the others (RollPacker 4.3: maths, code and judge in one run)
    judges: dict[str, JudgeSection] = {}
    overlong: OverlongSection = OverlongSection()

    def conflicts(self) -> Iterator[Conflict]:
        if self.votes % 2 == 0:
            yield "votes", self.votes, "must be odd, so that there is a majority"
        if self.judge.any and self.timeout == "adaptive":
            fix = "a judge has no test cases: give seconds per call, or name the tasks that it scores in reward.judges"
            yield "timeout", self.timeout, fix
        if self.judge.any and self.judges:
            fix = "score some of the tasks, and reward.judge scores all of them: leave one of the two out"
            yield "judges", sorted(self.judges), fix
        for name, judge in self.judges.items():
            if not judge.any:
                yield f"judges.{name}", "", "a judge needs a url or a path"

    @property
    def own_judges(self) -> dict[str, JudgeSection]:
        """Those that the run starts itself, by task; "" scores all."""
        return {name: judge for name, judge in {"": self.judge, **self.judges}.items() if judge.path}

    def judge_seconds(self, judge: JudgeSection) -> float:
        """How long a question to this judge may take."""
        fixed = self.adaptive.whole if self.timeout == "adaptive" else self.timeout
        return judge.timeout or fixed

    def call_seconds(self, by_case: bool) -> float:
        """How long a call may run. ``by_case``: the function limits its test cases itself, and starts and checks besides."""
        if self.timeout != "adaptive":
            return self.timeout
        return self.adaptive.whole + BESIDE_CASES if by_case else self.adaptive.rule
