"""The data types: frozen dataclasses of standard types, so that they cross processes and transports unchanged.

Units: times are seconds of the event loop's clock, lengths are tokens, sizes are bytes. A *weight version* is an integer, one
per published update. *Version spans* are run-length encoded, which version generated which tokens: ``((version, n_tokens),
...)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

VersionSpans = tuple[tuple[int, int], ...]


def merge_spans(spans: Iterable[tuple[int, int]]) -> VersionSpans:
    """Concatenate version spans, joining neighbours of the same version and dropping empty ones."""
    merged: list[tuple[int, int]] = []
    for version, count in spans:
        if count <= 0:
            continue
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. ``temperature = 0`` is greedy. Log-probs are those of the sampling distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One turn to generate: the whole context as token ids, never text. A context that grows from turn to turn is a
    :class:`~orchestrator.api.tokens.TokenSequence`, which is not copied; a tuple works too."""

    request_id: str
    trajectory_id: str
    turn: int
    token_ids: Sequence[int]
    sampling: Sampling
    task: str
    priority: int = 0  # as in vLLM: the lower number goes first
    predicted_tokens: int | None = None
    deadline: float | None = None  # seconds left (a duration, since clocks differ between processes)
    group_id: str = ""  # the GRPO group; an ABORT may name it
    experts_from: int = 0  # routed experts are returned from this context token on


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that an engine's routers chose (vLLM's ``routed_experts``) for the tokens of a context from token ``first`` on:
    for each token and each layer (those without experts too) ``choices`` little-endian numbers of ``width`` bytes. The last
    generated token has none, as nothing was computed for it."""

    first: int
    layers: int
    choices: int
    width: int
    data: bytes

    @property
    def end(self) -> int:
        """The first token after them."""
        return self.first + len(self.data) // self._stride

    def since(self, token: int) -> RoutedExperts:
        """Only those from this token on."""
        if token <= self.first:
            return self
        return RoutedExperts(
            token, self.layers, self.choices, self.width, self.data[(token - self.first) * self._stride :]
        )

    @property
    def _stride(self) -> int:
        return self.layers * self.choices * self.width


@dataclass(frozen=True, slots=True)
class CompletionTiming:
    """Measured in the worker, in seconds: waiting for the first engine step, running after it, from ADD to the first token
    (TTFT), and between two tokens on average (TPOT; 0 with fewer than two tokens)."""

    queued: float = 0.0
    running: float = 0.0
    first_token: float = 0.0
    per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's answer. ``len(token_ids) == len(logprobs) == sum of the version spans``."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: VersionSpans
    finish_reason: str  # "stop" | "length" | "abort" | "error"
    timing: CompletionTiming = CompletionTiming()
    error: str = ""
    experts: RoutedExperts | None = None  # if the engine returns them


@dataclass(frozen=True, slots=True)
class Prompt:
    """One start state of a task. ``key`` identifies it (a hash), ``payload`` is the task's own description of it."""

    key: str
    task: str
    seed: int
    payload: str


@dataclass(frozen=True, slots=True)
class EnvironmentTemplate:
    """What an environment is created from: one of the same template can play any of its prompts. ``image``: its container
    image, empty for the config's; ``setup``: passed once to the environment's ``prepare`` before its first episode, for example
    the name of a repository."""

    image: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens that the environment appends to the context before the policy speaks."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to one action: the next observation (empty when done) and the reward of this step."""

    observation: Observation
    reward: float
    done: bool
    truncated: bool = False
    invalid_action: bool = False


@dataclass(frozen=True, slots=True)
class ContextStart:
    """A new, shortened context. ``token_ids``: its tokens before the turn's observation (from earlier turns; they are not
    trained on again). ``reason``: "summary" (the previous turn is the policy's own summary), "function", "restart" or
    "shortened". ``dropped_*``: whole turns and tokens left out (a replaced summary included)."""

    token_ids: tuple[int, ...]
    reason: str
    dropped_turns: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: observation tokens, then the policy's tokens with their log-probs and weight versions. ``context``: from
    this turn on the policy saw a new context; None: this turn continues the previous one."""

    observation_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: VersionSpans
    reward: float = 0.0
    done: bool = False
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0
    context: ContextStart | None = None
    experts: RoutedExperts | None = None  # for tokens of its context; see routing replay (docs/megatron.md)


class Score(float):
    """A reward, and the numbers that its function gave besides, by name."""

    def __new__(cls, reward: float, metrics: tuple[tuple[str, float], ...] = ()) -> Self:
        """A number like any other."""
        made = super().__new__(cls, reward)
        made.metrics = metrics
        return made

    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode of one environment by one agent."""

    id: str
    group_id: str
    task: str
    prompt: Prompt
    turns: tuple[Turn, ...]
    reward: float | None
    env_version: str
    env_seed: int
    truncated: bool
    errors: tuple[str, ...] = ()
    started_at: float = 0.0
    finished_at: float = 0.0
    scored_at: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()  # what its reward function gave beside the reward, by name

    @property
    def versions(self) -> VersionSpans:
        """Version spans over the policy's tokens of all turns."""
        return merge_spans(span for turn in self.turns for span in turn.versions)

    @property
    def first_version(self) -> int:
        """Version of the first generated token, from which the staleness bound alpha is measured."""
        for turn in self.turns:
            for version, count in turn.versions:
                if count > 0:
                    return version
        return self.versions[0][0]  # there is none

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole context as the policy saw it: observations and actions in order; several contexts concatenated."""
        tokens: list[int] = []
        for turn in self.turns:
            tokens += _before(turn)
            tokens += turn.action_ids
        return tuple(tokens)

    @property
    def actions(self) -> tuple[tuple[int, ...], ...]:
        """What the environment received, turn by turn: all that the policy wrote except its own summaries."""
        after = (*self.turns[1:], None)
        return tuple(
            turn.action_ids
            for turn, following in zip(self.turns, after, strict=True)
            if following is None or following.context is None or following.context.reason != "summary"
        )

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the token was generated by the policy, 0 where the environment wrote it."""
        flags: list[int] = []
        for turn in self.turns:
            flags += [0] * len(_before(turn))
            flags += [1] * len(turn.action_ids)
        return tuple(flags)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Rollout log-probs aligned with ``token_ids``; 0.0 where the environment wrote the token."""
        values: list[float] = []
        for turn in self.turns:
            values += [0.0] * len(_before(turn))
            values += turn.logprobs
        return tuple(values)

    @property
    def contexts(self) -> tuple[tuple[int, Trajectory], ...]:
        """(index of its first turn, a trajectory of only its turns) for each context that the policy saw."""
        starts = [index for index, turn in enumerate(self.turns) if index == 0 or turn.context is not None]
        if len(starts) == 1:
            return ((0, self),)
        ends = [*starts[1:], len(self.turns)]
        parts = zip(starts, ends, strict=True)
        return tuple((start, replace(self, turns=self.turns[start:end])) for start, end in parts)

    @property
    def generated_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(len(turn.action_ids) for turn in self.turns)


def _before(turn: Turn) -> tuple[int, ...]:
    """The tokens of a turn that the policy did not write in it."""
    return turn.observation_ids if turn.context is None else (*turn.context.token_ids, *turn.observation_ids)


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A worker's share of a device that it shares with a serving engine, and the state of serving (ROSE 4.1). The worker owns
    ``pages`` of ``page_bytes`` and may own ``budget``; serving owns ``serving_pages`` of ``pool_pages`` in all (0: unknown).
    Slacks are seconds until serving misses an SLO, negative if late: ``ttft_slack`` of waiting prompts, ``tpot_slack`` of
    decoding sequences, ``arriving`` of a prompt that arrives now; None: no such request, or unknown. Counts since serving's
    start: first tokens and later ones (``firsts``, ``nexts``), of these ``late_*`` beyond their SLO, of the late ones
    ``blamed_*`` caused by rollouts."""

    pages: int
    budget: int
    page_bytes: int
    ttft_slack: float | None = None
    tpot_slack: float | None = None
    arriving: float | None = None
    firsts: int = 0
    late_first: int = 0
    blamed_first: int = 0
    nexts: int = 0
    late_next: int = 0
    blamed_next: int = 0
    serving_pages: int = 0
    pool_pages: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A snapshot of one rollout worker. KV in blocks; ``stalled``: work pending, but no token for the stall time.

    ``preemptions``: all except those of weight updates (which recompute KV on purpose); ``outranked``: those for a waiting
    request of higher priority (Heddle 4.2). ``prefix_queries`` and ``prefix_hits``: tokens looked up and found in the prefix
    cache since the start; ``generated``: tokens since the start; ``oldest_wait``: seconds that the longest-waiting request has
    waited. ``expert_imbalance``: for a mixture of experts, tokens routed to the fullest device over the mean of the devices,
    if each held whole experts; 1.0: even, not a mixture, or not measured. ``shared``: for a worker on a serving device; None:
    it has its own. ``steps``: engine steps with work since the start; ``step_requests`` and ``step_kv``: sums over them of
    requests computed and KV blocks in use. (Between two steps, when a worker answers, both may be 0.)
    """

    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    preemptions: int
    tokens_per_s: float
    version: int
    stalled: bool = False
    outranked: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated: int = 0
    oldest_wait: float = 0.0
    suspended: bool = False
    expert_imbalance: float = 1.0
    shared: SharedDevice | None = None
    steps: int = 0
    step_requests: int = 0
    step_kv: int = 0


@dataclass(frozen=True, slots=True)
class ShardKey:
    """Where a piece of a tensor belongs, in checkpoint (Hugging Face) coordinates. ``dim = -1``: the whole tensor."""

    tensor: str
    dim: int
    start: int
    stop: int
    global_shape: tuple[int, ...]
    dtype: str
    encoding: str
    bucket: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What one published version consists of. ``base_version = -1``: a full snapshot."""

    version: int
    base_version: int
    shards: tuple[ShardKey, ...]
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The cost of a publication: payload bytes, buckets, seconds. ``content``: a checksum over names, slices and digests of its
    tensors, in hexadecimal, independent of the transport; empty if unknown."""

    version: int
    bytes: int
    buckets: int
    seconds: float
    content: str = ""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The cost of a weight update on one worker. ``preempted``: in-flight requests whose KV is recomputed on resume.
    ``past_cache``: what a rank read directly from the relay although its site has a cache, and why."""

    version: int
    bytes: int
    seconds: float
    preempted: int = 0
    past_cache: str = ""


class SampleFacts(NamedTuple):
    """What a trainer checks before it reads a sample's tokens: their number, how many the policy wrote, the smallest and largest
    id, whether all the policy's log-probs are finite, and whether the first token is not the policy's."""

    tokens: int
    generated: int
    least: int
    most: int
    finite: bool
    prompted: bool


class SampleSource(Protocol):
    """Where a sample that is not in memory is stored."""

    @property
    def facts(self) -> SampleFacts: ...

    def read(self) -> tuple[Any, Any, Any]:
        """NumPy arrays: token ids, positions of the policy's tokens among them, their log-probs. Raises RunError if it is lost
        or damaged."""

    def experts(self) -> tuple[RoutedExperts, ...]:
        """The experts that the rollout chose, as far as known. Raises RunError like :meth:`read`."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One context of a trajectory as the trainer needs it; the three sequences have equal length (tokens), ``versions`` are those
    of the policy's tokens. Most trajectories have one context; ``first_turn``: the turn at which this one begins. With a
    ``source`` the sequences are not in memory: only the ranks that compute the sample read them."""

    trajectory_id: str
    group_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: VersionSpans
    reward: float
    first_turn: int = 0
    weight: float = 1.0  # of its terms in the loss; it does not enter denominators
    source: SampleSource | None = field(default=None, compare=False)
    experts: tuple[RoutedExperts, ...] = ()  # with a source, they are read from it


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What ``get_batch`` passes to ``train_step``: complete groups, to be trained at ``version``."""

    step: int
    version: int
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class TrainMetrics:
    """What one ``train_step`` reports. ``version`` is the version AFTER the step; ``values`` are scalars by name."""

    step: int
    version: int
    values: Mapping[str, float] = field(default_factory=dict)
