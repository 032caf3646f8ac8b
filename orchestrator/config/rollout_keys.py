"""Sections of a config: engines, rollout, routing, contexts, filters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from orchestrator.api import urls
from orchestrator.config.prediction_keys import PlacementSection, PredictionSection
from orchestrator.policies.batching.round_planner import speculated
from orchestrator.settings.engine_settings import EngineGroup, EngineSettings
from orchestrator.settings.section import Conflict, Fraction, Positive, PositiveSeconds, Section

_TP = "engine.tensor_parallel_size"


class RoutingSection(Section):
    """Which worker generates the next turn of a trajectory (ROSE 4.3, RollArt 5.2):
    `orchestrator/policies/routing/turn_routing.py`."""

    policy: Literal["cache-affine", "least-loaded", "round-robin"] = "cache-affine"
    imbalance: Annotated[int, Field(ge=0)] = 16  # requests that staying with the prefix may cost before load decides
    skew: Annotated[float, Field(ge=0)] = 0.0  # used instead: the largest over smallest load allowed; 0: off
    # requests a dedicated worker has at a time; the others go to served workers, or wait. 0: no limit. None: as `profile` says,
    # else 16 a device (ROSE, appendix A) where served workers are borrowed beside them and dedicated ones go first, else no limit
    cap: Annotated[int, Field(ge=0)] | None = None
    served_cap: Annotated[int, Field(ge=0)] | None = None  # the same for a served worker, without `profile`
    # file of `rl-coserve profile`: from how many requests on a dedicated worker gets no faster (ROSE, appendix A)
    profile: str = ""
    # dedicated-first: a served worker gets what dedicated ones have no room for (ROSE). least-utilized: the worker with the
    # smallest share of its cap taken, dedicated or served.
    spread: Literal["dedicated-first", "least-utilized"] = "dedicated-first"
    # worker (vllm-0, the URL of a served one) -> class of its hardware, where no pool says it
    hardware: dict[str, str] = {}
    affinity: dict[str, str] = {}  # task, or "default" -> class to run it on (RollArt, Listing 1)
    fallback: bool = True  # a task may use other classes while its own has no room

    def conflicts(self) -> Iterator[Conflict]:
        if self.profile and self.cap is not None:
            yield "profile", self.profile, f"sets the cap, and so does cap = {self.cap}: leave one of the two out"
        if self.spread == "dedicated-first":
            return
        what = "rollout.routing.spread = 'least-utilized'"
        if self.policy == "round-robin":
            fix = f"ignores load, which {what} needs: use 'cache-affine' or 'least-loaded', or leave out spread"
            yield "policy", self.policy, fix
        if self.skew:
            yield "skew", self.skew, f"compares requests, {what} shares of caps: set it to 0, and use imbalance"
        for name in ("cap", "served_cap"):
            if not getattr(self, name) and not (name == "cap" and self.profile):
                yield (
                    name,
                    getattr(self, name),
                    f"{what} compares the shares of caps that are taken: set it to at least 1 (ROSE takes 16)",
                )


class BorrowedSection(Section):
    """Which of `served` a run borrows, and when it takes others (ROSE 4): docs/coserving.md. 0 and no `file`: all, for good."""

    # servers, those whose neighbours used least KV memory in the last hour; 0: all that are named
    most: Annotated[int, Field(ge=0)] = 0
    file: str = ""  # file with more of them, one URL per line; read again at every look
    every: PositiveSeconds = 10.0  # seconds between two looks at the servers
    # how long a server stays with a run that shows no sign of life
    lease: Annotated[float, Field(ge=5, le=300)] = 60.0
    window: PositiveSeconds = 3600.0  # the period over which use is averaged
    margin: Fraction = 0.1  # share of memory by which another server must be used less to replace one
    crowded: Annotated[float, Field(gt=0, le=1)] = 0.9  # share of memory above which a server is given back; 1: never
    patience: PositiveSeconds = 30.0  # how long a server may be silent or lend nothing before it is given back
    rest: Annotated[float, Field(ge=0)] = 60.0  # wait before one that was crowded, reclaimed or gone is taken again
    # how long a server goes unneeded before it is given back; 0: never for that
    idle: Annotated[float, Field(ge=0)] = 120.0
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # weight of this run's share where several want servers

    @property
    def exchanged(self) -> bool:
        """Whether servers are given back and taken while a run is under way."""
        return bool(self.most or self.file)

    def conflicts(self) -> Iterator[Conflict]:
        if self.crowded < 1 and self.margin >= self.crowded:
            yield "margin", self.margin, f"must be less than crowded ({self.crowded:g}): no server would ever be taken"


class KvTransferSection(Section):
    """Prefix KV that is copied to the worker that a turn goes to, not recomputed (Heddle 5.3): docs/kv_transfer.md."""

    enabled: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 64  # tokens of a context; a shorter one is always computed
    limit: PositiveSeconds = 10.0  # for a move; then the prefix is computed
    staging_mb: Positive = 256  # host memory per worker for KV that has arrived and is not loaded yet
    host: str = "127.0.0.1"  # address where the run's own workers hand out KV; "node": that of each one's machine
    allow_plain: bool = False  # a host other than loopback needs no tls.certificate; KV then travels unencrypted
    carrier: Literal["tcp", "mooncake"] = "tcp"  # what carries the blocks; access is proved over TCP either way
    protocol: Literal["tcp", "rdma"] = "tcp"  # of Mooncake's transfer engine
    device: str = ""  # comma-separated RDMA devices, as in /sys/class/infiniband; empty: Mooncake chooses

    def conflicts(self) -> Iterator[Conflict]:
        if self.carrier == "tcp" and (self.protocol, self.device) != ("tcp", ""):
            fix = "protocol and device are for Mooncake's transfer engine: set carrier to 'mooncake', or leave them out"
            yield "protocol", self.protocol, fix


class DisaggregationSection(Section):
    """Prefill and decode on workers of two classes (RollArt 6.3): docs/kv_transfer.md. Needs kv_transfer."""

    enabled: bool = False
    prefill: str = ""  # class of the workers that prefill, as in routing.hardware or a pool
    decode: str = ""  # class of the workers that decode
    tasks: tuple[str, ...] = ()  # tasks served this way; empty: all
    min_tokens: Annotated[int, Field(ge=0)] = 64  # tokens of a context; a turn with a shorter one is served whole
    degrees: dict[Annotated[str, Field(pattern=r"^vllm-\d+$")], Positive] = {}  # own worker -> devices of its engine: 1


class PlannerSection(Section):
    """Tensor parallelism of the run's own engines, chosen step by step (RollPacker 4.2), and expert parallelism (its section 7):
    docs/profile.md."""

    enabled: bool = False
    # file of `rl-coserve profile`: the first TP, gains and re-profiling; without it gains are tried out
    profile: str = ""
    max_tp: Annotated[int, Field(ge=0)] = 0  # largest degree; 0: rollout.workers, the devices of this machine
    # for mixtures of experts: also try layouts with whole experts per device (EP); simulated runs only
    experts: bool = False
    # tokens expected of a response before the first step; 0: the task's longest
    expected_tokens: Annotated[int, Field(ge=0)] = 0
    # factor by which preemptions rise from one step to the next: then TP doubles
    rise: Annotated[float, Field(ge=1)] = 1.05
    calm_steps: Positive = 4  # steps without preemption: then TP is halved
    # factor between a step's time and the profile's: then an alarm asks for a new profile
    divergence: Annotated[float, Field(gt=1)] = 2.0


class ColocationSection(Section):
    """Rollout and training on the same devices, streamed within a step (RollPacker 4.4): docs/modes.md."""

    enabled: bool = False
    low: Fraction = 0.2  # share of a step's trajectories that are finished: devices may be freed from here on,
    high: Fraction = 0.5  # up to here,
    every: Annotated[float, Field(gt=0, le=1)] = 0.05  # tried again when this much more is finished
    level: Literal["weights", "dropped"] = "weights"  # what workers release: weights go to the host, or are read again


class RoundsSection(Section):
    """Short and long rounds, tail batching (RollPacker 3): docs/tail_batching.md."""

    enabled: bool = False
    eta_prompts: float = 1.25  # a short round launches this many times the prompts that it keeps
    eta_responses: float = 1.25  # the same for a prompt's responses
    # values of eta to try in the first rounds, 1.1 to 1.4 in the paper; empty: no search
    search: tuple[float, ...] = ()
    epoch_prompts: Annotated[int, Field(ge=0)] | None = None  # in the data set; 0: never repeats; None: the task knows
    tries: Positive = 16  # a prompt whose groups failed this often is given up, and counted
    isolate_environments: bool = False  # prompts delayed by their environment wait in a queue of their own
    max_active: Positive | None = None  # trajectories in flight for each worker at most (DAPO with rounds)
    # what predicts which prompts are long: their own lengths in earlier epochs, or a function of a prompt; they wait for a long
    # round unplayed. Empty: nothing
    predict: Annotated[str, Field(pattern=r"^(history|progressive|[\w.]+:\w+)?$")] = ""

    def conflicts(self) -> Iterator[Conflict]:
        fix = "must be at least 1, to start as many as a round keeps (and at most 4, since the rest is thrown away)"
        for name, value in (("eta_prompts", self.eta_prompts), ("eta_responses", self.eta_responses)):
            if not 1 <= value <= 4:
                yield name, value, fix
        if not all(1 <= value <= 4 for value in self.search):
            yield "search", list(self.search), fix

    @property
    def largest(self) -> tuple[float, float]:
        """The largest eta that may ever be used, for prompts and for responses."""
        return max((self.eta_prompts, *self.search)), max((self.eta_responses, *self.search))


class RolloutSection(Section):
    """How trajectories are produced, and how stale they may be."""

    workers: Annotated[int, Field(ge=0, le=65536)] = (
        1  # vLLM engines that the run starts; may be 0 with `served`; with `engines` their sum
    )
    served: tuple[str, ...] = ()  # URLs of running `vllm serve MODEL --plugin rl-coserve`, rollout workers beside these
    served_token_file: str = ""  # file with their bearer token, which may change; empty: the variable RL_COSERVE_TOKEN
    served_allow_plain_http: bool = False  # plain http to other machines, too: the token travels unencrypted
    # Added to the priority of the run's requests there: the lower number goes first, and users have 0.
    served_priority: Annotated[int, Field(ge=-(10**9), le=10**9)] = 1_000_000
    served_deactivate: bool = False  # at the run's end deactivate rollout engines in a pool that nobody else uses
    environments: Positive = 64  # trajectories in flight at most
    # processes among which environments, their managers and reward calls are divided: docs/processes.md; 1: the run's own
    shards: Annotated[int, Field(ge=1, le=256)] = 1
    shards_on: Literal["head", "nodes"] = "head"  # on the run's own machine, or over the nodes of ray.address
    alpha: Annotated[int, Field(ge=0, le=64)] = 1  # versions a trajectory may lag (RollArt 6.2)
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8  # GRPO needs at least two members to compare
    groups_per_step: Positive = 32
    redundant_groups: Annotated[float, Field(ge=1.0, le=4.0)] = 1.0  # groups launched over groups needed
    # the same for a group's members; the rest are aborted
    redundant_members: Annotated[float, Field(ge=1.0, le=4.0)] = 1.0
    member_refills: Annotated[int, Field(ge=0, le=16)] = 2  # replacements for failed members, per group
    # seconds; then a group is trained without its stragglers, or they are replaced
    group_timeout: PositiveSeconds | None = None
    buffer_limit: Positive | None = None  # trajectories between start and training, at most; None: what alpha allows
    staleness_decay: Annotated[float, Field(ge=0)] = 0.0  # a trajectory counts exp(-this * lag) in the loss; 0: off
    ess_alarm: Fraction = 0.0  # alarm when a step's effective sample size falls below this share; 0: off
    dynamic_sampling: bool = False  # replace complete groups whose rewards are all equal (DAPO)
    max_filtered_groups: Positive = 64  # groups replaced per step, at most; any beyond are trained as they are
    # launch for a batch what the one before took, replaced groups included (ROSE 6, of DAPO)
    dynamic_concurrency: bool = False
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    environment_step_timeout: PositiveSeconds = 10.0
    environment_reset_timeout: PositiveSeconds | None = None  # for a reset; None: as for a step
    trajectory_timeout: PositiveSeconds = 3600.0
    worker_restarts: Annotated[int, Field(ge=0)] = 2
    restart_window: PositiveSeconds = 3600.0  # in which `worker_restarts` counts: older restarts are forgotten
    restart_pause: Annotated[float, Field(ge=0)] = (
        10.0  # seconds after one that failed; twice as long after each that follows
    )
    start_timeout: PositiveSeconds = 1800.0  # for all engines, from process start to loaded weights
    # for one that died; also how long a run waits for a server when it has no other
    restart_timeout: PositiveSeconds = 1800.0
    prepare_timeout: PositiveSeconds = 600.0  # to fetch a version while generating; after that the update fetches it
    update_timeout: PositiveSeconds = 600.0  # to load a version, or to release the device's memory or take it back
    # like `stall_timeout`, for one that had no work before; the longer counts
    first_token_timeout: PositiveSeconds = 300.0
    # a worker that computes nothing, or leaves a command unanswered, is restarted
    stall_timeout: PositiveSeconds = 60.0
    # a worker with work that was silent for this long is asked for a sign of life
    heartbeat_seconds: PositiveSeconds = 5.0
    heartbeat_misses: Positive = 4  # unanswered this many times in a row, it is restarted
    # how the run's own workers get a version; served ones use the relay. "nccl": by vLLM's own weight-transfer engine, never
    # run on a GPU, to compare it with "collective" there (simulated as "collective")
    weights: Literal["relay", "collective", "nccl"] = "relay"
    # a version travels beside the next training step, which otherwise begins when the workers have it; async and areal only
    weights_overlap: bool = False
    # to deliver a version; after that, workers that lack it take it from the relay
    collective_timeout: PositiveSeconds = 60.0
    engine: EngineSettings = EngineSettings()
    engines: tuple[EngineGroup, ...] = ()  # groups with options of their own, in place of `engine`
    routing: RoutingSection = RoutingSection()
    borrowed: BorrowedSection = BorrowedSection()
    kv_transfer: KvTransferSection = KvTransferSection()
    disaggregation: DisaggregationSection = DisaggregationSection()
    planner: PlannerSection = PlannerSection()
    colocation: ColocationSection = ColocationSection()
    rounds: RoundsSection = RoundsSection()
    prediction: PredictionSection = PredictionSection()
    placement: PlacementSection = PlacementSection()

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, given: Any) -> Any:
        """Groups say how many workers there are."""
        if not isinstance(given, Mapping) or not given.get("engines") or "workers" in given:
            return given
        counts = [group.get("count", 1) for group in given["engines"] if isinstance(group, Mapping)]
        return {**given, "workers": sum(count for count in counts if isinstance(count, int))}

    @property
    def engine_groups(self) -> tuple[EngineSettings, ...]:
        """Of each kind of own engines, what they start with: :class:`EngineGroup`, or the one of ``engine``."""
        return self.engines or (self.engine,)

    def group_of(self, number: int) -> int:
        """The group of the engine ``vllm-number``, of :attr:`engine_groups`. Those beyond ``workers``, which a run adds,
        are of the groups in turn."""
        firsts = [index for index, group in enumerate(self.engines) for _ in range(group.count)]
        return firsts[number] if number < len(firsts) else (number - len(firsts)) % len(self.engine_groups)

    def engine_of(self, number: int) -> EngineSettings:
        """What the engine ``vllm-number`` starts with."""
        return self.engine_groups[self.group_of(number)]

    @property
    def widest_context(self) -> int:
        """Tokens that some own engine has room for: what a trainer may meet."""
        return max(group.max_model_len for group in self.engine_groups)

    @property
    def longest_context(self) -> int:
        """Tokens that every own engine has room for."""
        return min(group.max_model_len for group in self.engine_groups)

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._workers_conflicts()
        yield from self._engines_conflicts()
        if self.engines:
            yield from self._groups_conflicts()
        if self.dynamic_concurrency and not self.dynamic_sampling:
            fix = "follows the groups that dynamic sampling replaces: set rollout.dynamic_sampling to true too"
            yield "dynamic_concurrency", True, fix
        if self.rounds.enabled:
            yield from self._rounds_conflicts()
        if self.placement.enabled and not self.prediction.enabled:
            yield "placement", "enabled", "places by predicted lengths: set rollout.prediction.enabled to true too"
        if self.weights_overlap:
            yield from self._overlap_conflicts()
        if self.placement.degrees.enabled:
            yield from self._degrees_conflicts()
        if self.disaggregation.enabled:
            yield from self._disaggregation_conflicts()
        elif degrees := self.disaggregation.degrees:
            fix = "are for engines that only prefill or decode: set rollout.disaggregation.enabled to true, or leave them out"
            yield "disaggregation.degrees", dict(degrees), fix
        own = [self.routing.hardware.get(f"vllm-{number}", "") for number in range(self.workers)]
        if self.reshapes and len(set(own)) > 1 and (self.borrows or not self.disaggregation.enabled):
            who = "rollout.planner" if self.planner.enabled else "rollout.placement.degrees"
            fix = f"{who} divides devices of one class: name one class for all own engines, or set {who}.enabled to"
            yield "routing.hardware", dict(self.routing.hardware), f"{fix} false"

    def _workers_conflicts(self) -> Iterator[Conflict]:
        """Who generates: the run's own workers, and servers."""
        given = [url.rstrip("/") for url in self.served]
        for index, url in enumerate(self.served):
            if fix := urls.mistake(url, self.served_allow_plain_http):
                yield "served", url, fix
            if given.index(given[index]) != index:
                yield "served", given[index], "is there twice: name each server once"
        if self.borrowed.most > len(self.served) and not self.borrowed.file:
            fix = f"rollout.served names {len(self.served)} servers to choose from: name more, or borrow fewer"
            yield "borrowed.most", self.borrowed.most, fix
        if self.routing.spread == "least-utilized" and self.placement.enabled:
            fix = "decides itself where a trajectory goes: leave out rollout.routing.spread, or set it to false"
            yield "placement.enabled", True, fix
        if not (self.workers or self.served):
            yield (
                "workers",
                0,
                "nothing would generate: give at least 1, or the URL of a running server in rollout.served",
            )
        if self.sends_weights and self.served and not self.workers:
            yield "weights", self.weights, "reaches the run's own workers only, and rollout.workers is 0: use 'relay'"
        if (self.environment_reset_timeout or 0.0) > self.trajectory_timeout:
            fix = f"rollout.trajectory_timeout = {self.trajectory_timeout:g} ends the episode before that: raise it too"
            yield "environment_reset_timeout", self.environment_reset_timeout, fix

    def _engines_conflicts(self) -> Iterator[Conflict]:
        """Who has, cuts and shares the devices of the run's own engines."""
        if self.colocation.low > self.colocation.high:
            yield "colocation", self.colocation.low, "low must not be above high: no milestone would be left"
        if self.colocation.enabled and self.sends_weights:
            fix = "workers whose memory is lent to the trainer cannot receive: set weights = 'relay', or leave colocation out"
            yield "weights", self.weights, fix
        if self.planner.enabled and not self.workers:
            fix = "re-divides the run's own engines, and rollout.workers is 0: set rollout.planner.enabled to false"
            yield "planner", "enabled", fix
        if self.planner.experts and not self.planner.enabled:
            fix = "sets what the planner may choose, but it is off: set rollout.planner.enabled to true too, or this to false"
            yield "planner.experts", True, fix
        cuts = [name for name in ("planner", "colocation") if getattr(self, name).enabled]
        cuts += ["placement.degrees"] * self.placement.degrees.enabled
        cuts += ["disaggregation.degrees"] * bool(self.disaggregation.degrees)
        for name in cuts if self.engines or self.engine.ranks > 1 else ():
            field, value = ("engines", len(self.engines)) if self.engines else (_TP, self.engine.ranks)
            fix = f"sets how many devices each engine has, and so does rollout.{name}: leave one of the two out"
            yield field, value, fix
        if (wide := max(group.nodes for group in self.engine_groups)) > 1:
            field = "engines" if self.engines else "engine.nodes"
            if self.kv_transfer.enabled:
                yield field, wide, "KV moves between engines of one node each only: leave out rollout.kv_transfer"
            if self.sends_weights:
                yield field, wide, "receives weights over the relay only: take rollout.weights = 'relay'"
        if self.colocation.enabled and not self.engine.kv_cache_mb:
            yield "engine.kv_cache_mb", 0, "rollout.colocation plans with the size of the KV cache: give it in MiB"

    def _overlap_conflicts(self) -> Iterator[Conflict]:
        """What needs the workers to have a version before the trainer makes the next."""
        if self.sends_weights:
            fix = "a collective sends the live weights, which must not change until it ends: set rollout.weights = 'relay'"
            yield "weights_overlap", True, fix
        for name in ("planner", "placement.degrees"):
            if self.planner.enabled if name == "planner" else self.placement.degrees.enabled:
                fix = f"rollout.{name} re-divides engines between steps, when they would load weights: leave one of the two out"
                yield "weights_overlap", True, fix

    def _groups_conflicts(self) -> Iterator[Conflict]:
        """What else says how many engines there are, or takes them for alike."""
        count = sum(group.count for group in self.engines)
        if self.workers != count:
            yield "workers", self.workers, f"the groups of rollout.engines have {count}: leave it out"
        if self.engine.model_dump() != EngineSettings().model_dump():
            fix = "sets the options of each group, and [rollout.engine] those of one group: leave one of the two out"
            yield "engines", count, fix
        if self.placement.profile:
            fix = "is for identical engines: give rollout.placement.speeds, or leave rollout.engines out"
            yield "placement.profile", self.placement.profile, fix
        sizes = {group.block_size for group in self.engines}
        if self.kv_transfer.enabled and len(sizes) > 1:
            fix = "moves whole blocks between engines: give all groups the same block_size"
            yield "kv_transfer.enabled", True, fix

    @property
    def sends_weights(self) -> bool:
        """Whether the trainer sends its weights itself to the run's own workers."""
        return self.weights != "relay"

    @property
    def reshapes(self) -> bool:
        """Whether the run's own engines are cut again between steps: by one of the two, never both."""
        return self.planner.enabled or self.placement.degrees.enabled

    @property
    def borrows(self) -> bool:
        """Whether other workers than the run's own are named: then these may all be of one class of two."""
        return bool(self.served) or self.borrowed.exchanged

    def _degrees_conflicts(self) -> Iterator[Conflict]:
        """Who else would cut or lend the engines, and what the degrees are chosen by."""
        field, degrees = "placement.degrees", self.placement.degrees
        others = [name for name in ("planner", "disaggregation") if getattr(self, name).enabled]
        if self.borrows:
            others = [name for name in others if name != "disaggregation"]
        if others:
            fix = f"re-divides the engines, and so does rollout.{others[0]} (or it needs them fixed): leave one of them out"
            if others == ["disaggregation"]:
                fix = (
                    "re-divides all engines, but each pool has its own: name degrees in rollout.disaggregation.degrees"
                )
            yield f"{field}.enabled", True, fix
        if not self.workers:
            yield (
                f"{field}.enabled",
                True,
                "re-divides the run's own engines, and rollout.workers is 0: set it to false",
            )
        if not self.placement.enabled:
            fix = "gives long trajectories the large engines: set rollout.placement.enabled to true too"
            yield f"{field}.enabled", True, fix
        if degrees.start and sum(degrees.start) != self.workers:
            yield f"{field}.start", list(degrees.start), f"must add up to rollout.workers = {self.workers}, the devices"
        if degrees.start and degrees.expected_tokens:
            fix = f"sets the initial degrees, and so does {field}.start: leave one of them out"
            yield f"{field}.expected_tokens", degrees.expected_tokens, fix

    def _disaggregation_conflicts(self) -> Iterator[Conflict]:
        """What prefill on other workers than decode needs."""
        settings = self.disaggregation
        if not self.kv_transfer.enabled:
            fix = "decode needs the KV of the prefill: set rollout.kv_transfer.enabled = true"
            yield "disaggregation.enabled", True, fix
        if not settings.prefill or not settings.decode or settings.prefill == settings.decode:
            fix = "name two classes of workers, prefill and decode (rollout.routing.hardware sets each worker's class)"
            yield "disaggregation.prefill", settings.prefill, fix
        if self.colocation.enabled or (self.planner.enabled and not self.borrows):
            yield "disaggregation.enabled", True, "keeps its workers: leave out rollout.planner and rollout.colocation"
        strange = [name for name in settings.degrees if int(name.removeprefix("vllm-")) >= self.workers]
        if strange:
            fix = f"there is no worker {strange[0]}: rollout.workers is {self.workers}"
            yield "disaggregation.degrees", dict(settings.degrees), fix

    def _rounds_conflicts(self) -> Iterator[Conflict]:
        """What rounds do themselves, and what they cannot do."""
        for name, eta in (("redundant_groups", "eta_prompts"), ("redundant_members", "eta_responses")):
            if (value := getattr(self, name)) > 1:
                yield name, value, f"rollout.rounds speculates itself: leave it at 1 and set rollout.rounds.{eta}"
        if self.dynamic_concurrency:
            fix = "a round decides itself how much it launches: set it to false, and use rollout.rounds.max_active"
            yield "dynamic_concurrency", True, fix
        if self.rounds.predict == "progressive" and not self.prediction.enabled:
            fix = "uses the run's own forecasts: set rollout.prediction.enabled to true, or use 'history'"
            yield "rounds.predict", "progressive", fix
        members, rounds = speculated(self.rounds.largest[1], self.group_size), self.rounds
        room = (rounds.max_active or members) * (self.workers + len(self.served))
        if room < members:
            fix = f"a group of {members} starts as a whole: allow at least {members} over all workers"
            yield "rounds.max_active", rounds.max_active, fix
        if rounds.epoch_prompts and rounds.epoch_prompts < self.groups_per_step:
            fix = (
                f"a batch of {self.groups_per_step} prompts (rollout.groups_per_step) would hold one of them twice: "
                "take smaller batches, or a larger data set"
            )
            yield "rounds.epoch_prompts", rounds.epoch_prompts, fix


class TaskContextSection(Section):
    """What long episodes are shown: docs/long_episodes.md. Sizes are tokens."""

    strategy: Literal["keep", "summarise", "restart"] = "keep"
    tokens: Annotated[int, Field(ge=0)] = 0  # tokens of a context with its response; 0: all that the task has room for
    recent_turns: Annotated[int, Field(ge=0)] = 3  # the last turns, which stay when a context starts over
    # written by the policy, or module:function
    summary: Annotated[str, Field(pattern=r"^(model|[\w.]+:\w+)$")] = "model"
    summary_tokens: Annotated[int, Field(ge=0)] = 0  # tokens, at most; 0: as for a response
    ask: tuple[int, ...] = ()  # token ids that ask the policy for a summary

    def conflicts(self) -> Iterator[Conflict]:
        if self.strategy == "summarise" and self.summary == "model" and not self.ask:
            yield "ask", [], "the policy must be asked for its summary: give the token ids of the question"


class ContextSection(TaskContextSection):
    """The same for all tasks, but for those that have a table of their own: ``[context.tasks.NAME]``."""

    tasks: dict[str, TaskContextSection] = {}

    def of(self, task: str) -> TaskContextSection:
        """The rules of a task."""
        return self.tasks.get(task, self)


class FiltersSection(Section):
    """Which scored trajectories may be trained on, what a batch is made of; see
    :mod:`orchestrator.policies.batching.trajectory_filters`."""

    completeness: bool = True  # drop episodes that an error cut short, or that hold no token of the policy
    # episodes that ran into their turn or context limit, or whose last answer was cut off
    truncated: Literal["keep", "drop"] = "keep"
    reward_min: float | None = None
    reward_max: float | None = None
    ngram: Annotated[int, Field(ge=2, le=64)] = 4  # tokens per n-gram, for the next two
    max_repetition: Fraction | None = None  # share of a trajectory's action n-grams that repeat earlier ones of it
    max_similarity: Fraction | None = None  # share that already occurs in the last `similarity_window` trajectories
    similarity_window: Positive = 256  # trajectories of the same task
    balance: Literal["none", "task", "difficulty"] = "none"
    # largest share of a batch's groups for one task or difficulty
    balance_share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def conflicts(self) -> Iterator[Conflict]:
        if self.reward_min is not None and self.reward_max is not None and self.reward_min > self.reward_max:
            fix = f"must be at most filters.reward_max = {self.reward_max:g}, or no reward would pass"
            yield "reward_min", self.reward_min, fix
        if self.truncated == "drop" and not self.completeness:
            yield "truncated", self.truncated, "needs filters.completeness = true"
