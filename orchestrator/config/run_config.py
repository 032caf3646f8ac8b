"""The configuration of a run: typed, closed (an unknown key is an error), importable without torch or an engine.

A config comes from a TOML file plus dotted overrides (``rollout.alpha=2``). :func:`load_config` reports every violation
at once, each with field, value and fix, as a :class:`~orchestrator.api.ConfigError`. Times are seconds, sizes are in the
unit that the field's name ends with.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from orchestrator.api import ConfigError, urls
from orchestrator.config.cluster_keys import RaySection, RelaySection, ResourcesSection, TlsSection
from orchestrator.config.environment_keys import EnvironmentSection, ToolsSection
from orchestrator.config.reward_keys import RewardSection
from orchestrator.config.rollout_keys import ContextSection, FiltersSection, RolloutSection
from orchestrator.config.run_keys import (
    CheckpointSection,
    EvaluationSection,
    ModelSection,
    RunSection,
    TaskSection,
    WarmupSection,
)
from orchestrator.config.sim_keys import SimSection
from orchestrator.config.view_keys import LoggingSection, ViewSection
from orchestrator.policies.batching import coordination_modes
from orchestrator.policies.batching.round_planner import speculated
from orchestrator.policies.training.objective_table import OBJECTIVES
from orchestrator.settings.section import Conflict, Positive, Section, ShortValue
from orchestrator.settings.trainer_settings import WHOLE_ONLY, TrainerSection


class CostSection(Section):
    """What `rl-coserve cost` counts with. The prices are ASSUMPTIONS, of no provider: put in your own."""

    currency: str = "USD"
    trainer_gpus: Positive | None = None  # None: as many as the trainer's parallel sizes need
    gpus_per_worker: Positive = 1
    trainer_gpu_hour: Annotated[float, Field(ge=0)] = 2.5
    rollout_gpu_hour: Annotated[float, Field(ge=0)] = 2.5
    environment_hour: Annotated[float, Field(ge=0)] = 0.05  # one environment, about one CPU core
    reward_call: Annotated[float, Field(ge=0)] = 2e-7
    reward_second: Annotated[float, Field(ge=0)] = 2e-5  # of a function's run time
    served_gpu_hour: Annotated[float, Field(ge=0)] = 0.0  # GPUs of rollout.served are paid for by their users


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    filters: FiltersSection = FiltersSection()
    trainer: TrainerSection = TrainerSection()
    context: ContextSection = ContextSection()
    warmup: WarmupSection = WarmupSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    tools: ToolsSection = ToolsSection()
    relay: RelaySection = RelaySection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resources: ResourcesSection = ResourcesSection()
    ray: RaySection = RaySection()
    tls: TlsSection = TlsSection()
    view: ViewSection = ViewSection()
    logging: LoggingSection = LoggingSection()
    sim: SimSection = SimSection()
    cost: CostSection = CostSection()

    def conflicts(self) -> Iterator[Conflict]:
        rollout = self.rollout
        if fix := coordination_modes.alpha_conflict(self.run.mode, rollout.alpha):
            yield "rollout.alpha", rollout.alpha, fix
        mode = coordination_modes.MODES[self.run.mode]
        if rollout.weights_overlap and not (mode.overlaps and mode.carries_over):
            fix = "is for run.mode 'async' and 'areal'"
            why = "keeps a trajectory to one version" if mode.overlaps else "trains when no trajectory is in progress"
            yield (
                "rollout.weights_overlap",
                True,
                f"{fix}: {self.run.mode!r} {why} (set it to false, or change the mode)",
            )
        if rollout.weights == "nccl" and not self.trainer.whole_on_each_rank:
            yield "rollout.weights", "nccl", WHOLE_ONLY
        if self.task.name == "agent":
            yield from self._agent_conflicts()
        if self.task.name == "dataset":
            if self.model.path and not self.task.data.tokenizer:
                yield "task.data.tokenizer", "", "name the folder with the tokenizer of model.path (often the same)"
            if self.environment.backend != "in-process":
                fix = "a data set has no environment to run: leave it at 'in-process' for task 'dataset'"
                yield "environment.backend", self.environment.backend, fix
        yield from self._network_conflicts()
        yield from self._size_conflicts()
        if rollout.colocation.enabled:
            yield from self._colocation_conflicts()
        if rollout.shards > 1:
            yield from self._shard_conflicts()
        elif rollout.shards_on == "nodes":
            fix = "there are no other shards with rollout.shards = 1: raise that, or leave this at 'head'"
            yield "rollout.shards_on", "nodes", fix
        for name in self.reward.judges:
            if name not in self.task.mixture:
                there = ", ".join(sorted(self.task.mixture)) or "none: task.mixture names them"
                yield f"reward.judges.{name}", "", f"is not a task of the mixture; there are: {there}"
        if self.trainer.routing_replay and rollout.kv_transfer.enabled:
            fix = "vLLM cannot report experts for tokens with transferred KV: leave out rollout.kv_transfer, or this"
            yield "trainer.routing_replay", True, fix
        if rollout.rounds.enabled and self.filters.balance != "none":
            fix = "chooses among finished groups, rollout.rounds takes the first ones: set only one of them"
            yield "filters.balance", self.filters.balance, fix
        compared = OBJECTIVES[self.trainer.objective].advantage in ("group", "leave-one-out")
        if rollout.dynamic_sampling and not compared:
            fix = (
                f"drops what trainer.objective = {self.trainer.objective!r} learns from: it does not compare the members of a "
                "group (set it to false, or use grpo, dapo, rloo, gspo or cispo)"
            )
            yield "rollout.dynamic_sampling", True, fix
        if self.run.signal_share and not compared:
            fix = f"would end a run that still learns: trainer.objective = {self.trainer.objective!r} does so from groups "
            yield "run.signal_share", self.run.signal_share, f"{fix}with equal rewards too (set it to 0)"
        known = self.sim.tasks and not self.sim.trace
        if rollout.prediction.enabled and rollout.prediction.predictor == "oracle" and not known:
            fix = "only knows lengths drawn from sim.tasks: use another one"
            yield "rollout.prediction.predictor", "oracle", fix

    def _network_conflicts(self) -> Iterator[Conflict]:
        """What would travel unsigned, or unencrypted."""
        if self.relay.signing_key and self.rollout.sends_weights:
            fix = f"rollout.weights = {self.rollout.weights!r} sends weights unsigned: use 'relay'"
            yield "relay.signing_key", self.relay.signing_key, fix
        called = {"reward.url": self.reward.url, "reward.judge.url": self.reward.judge.url}
        called |= {f"reward.judges.{name}.url": judge.url for name, judge in self.reward.judges.items()}
        called |= {f"tools.urls.{name}": url for name, url in self.tools.urls.items()}
        for name, url in called.items():
            if url and (fix := urls.plain_mistake(url, self.tls.allow_plain_http)):
                yield name, url, fix
        yield from self._site_conflicts()
        kv = self.rollout.kv_transfer
        if kv.enabled and not (self.tls.certificate or kv.allow_plain or urls.is_loopback(kv.host)):
            fix = (
                "others reach it, and KV would travel unencrypted: give tls.certificate and tls.key, or "
                "rollout.kv_transfer.allow_plain on a network that you trust"
            )
            yield "rollout.kv_transfer.host", kv.host, fix

    def _site_conflicts(self) -> Iterator[Conflict]:
        """Workers that there are not, and listeners in the clear."""
        rollout, relay = self.rollout, self.relay
        known = {f"vllm-{index}" for index in range(rollout.workers)} | {url.rstrip("/") for url in rollout.served}
        for name, site in relay.sites.items():
            for worker in site.workers:
                later = bool(rollout.borrowed.file) and not worker.startswith(
                    "vllm-"
                )  # its lines are read while it runs
                if worker.rstrip("/") not in known and not later:
                    fix = f"is not a worker of this run: {', '.join(sorted(known))}"
                    yield f"relay.sites.{name}.workers", worker, fix
            if not site.cache and self.ray.address and not (self.tls.certificate or relay.site_allow_plain):
                fix = (
                    "its cache would listen on a network, and weights would travel unencrypted: give tls.certificate and "
                    "tls.key, or relay.site_allow_plain on a network that you trust"
                )
                yield f"relay.sites.{name}.cache", "", fix

    def _size_conflicts(self) -> Iterator[Conflict]:
        """Numbers that must add up, or leave room."""
        rollout, workers = self.rollout, self.rollout.workers
        for name, classes in (("resources.rollout", self.resources.rollout), ("sim.fleet", self.sim.fleet)):
            if classes and sum(classes.values()) != workers:
                yield name, dict(classes), f"must name the class of each worker: add up to rollout.workers = {workers}"
        classes = dict(self.resources.rollout)
        if classes and rollout.engines:
            yield (
                "resources.rollout",
                classes,
                "rollout.engines says the class of each group (hardware): leave this out",
            )
        if not self.resources.pools:
            fix = "names classes of resources.pools: name the pools too"
            if classes:
                yield "resources.rollout", classes, fix
            if named := [group.hardware for group in rollout.engines if group.hardware]:
                yield "rollout.engines", named, fix
        if self.sim.degrees and len(self.sim.degrees) != workers:
            fix = f"must name the devices of each worker: as many numbers as rollout.workers = {workers}"
            yield "sim.degrees", list(self.sim.degrees), fix
        if rollout.environments < self.group_members:
            fix = (
                f"must be at least {self.group_members}, the members that rollout.group_size, rollout.redundant_members or "
                "rollout.rounds.eta_responses start for a group: a group starts as a whole"
            )
            yield "rollout.environments", rollout.environments, fix
        pooled = self.environment.size if self.environment.backend != "in-process" else 0
        if self.run.mode == "sync" and 0 < pooled < rollout.environments:
            fix = (
                f"is less than rollout.environments = {rollout.environments}: in run.mode = 'sync' trajectories with an "
                "environment would wait forever for those without one (make them equal)"
            )
            yield "environment.size", pooled, fix
        launched = math.ceil(self.batch_trajectories * self.redundancy)
        if rollout.buffer_limit is not None and rollout.buffer_limit < launched:
            fix = f"must be at least {launched}: that many are launched for one batch"
            yield "rollout.buffer_limit", rollout.buffer_limit, fix

    def _shard_conflicts(self) -> Iterator[Conflict]:
        """What a shard has not, as there is one of it in a run."""
        rollout, reward = self.rollout, self.reward
        needs_one = {
            f"run.mode = {self.run.mode!r} has all environments take their turns in step": self.run.mode == "sync",
            "rollout.prediction reads every turn where it is played": rollout.prediction.enabled,
            "rollout.colocation looks at every turn where it is played": rollout.colocation.enabled,
            f"task.agent.port = {self.task.agent.port} is of one endpoint": bool(self.task.agent.port),
            "calls of a judge wait for one another (reward.judge, reward.judges)": bool(reward.judges)
            or reward.judge.any,
            "reward.timeout = 'adaptive' learns from every call": reward.timeout == "adaptive",
            "calls of tools are limited for the whole run (tools)": self.tools.any,
        }
        for why, is_so in needs_one.items():
            if is_so:
                yield (
                    "rollout.shards",
                    rollout.shards,
                    f"{why}, which shards would not share: set it to 1, or do without",
                )
        if rollout.shards_on == "nodes":
            yield from self._shard_node_conflicts()
        if rollout.shards > rollout.environments:
            fix = f"leaves shards without an environment: must be at most rollout.environments = {rollout.environments}"
            yield "rollout.shards", rollout.shards, fix

    def _shard_node_conflicts(self) -> Iterator[Conflict]:
        """What a shard on another machine does not reach."""
        if not self.ray.address:
            yield (
                "rollout.shards_on",
                "nodes",
                "there is one node, this machine: give ray.address, or leave it at 'head'",
            )
        url = self.reward.url
        if url and urls.is_loopback(urlsplit(url).hostname or ""):
            yield "reward.url", url, "is this machine's own for shards on other nodes: give an address that they reach"
        if not url and self.reward.host == "ray_serve":
            fix = "answers only on the node of its proxy: leave it at 'embedded', which has a host beside each shard"
            yield "reward.host", "ray_serve", fix

    def _agent_conflicts(self) -> Iterator[Conflict]:
        if self.model.path and not self.task.agent.tokenizer:
            yield "task.agent.tokenizer", "", "name the folder with the tokenizer of model.path (often the same)"
        if self.environment.backend != "in-process":
            fix = "an agent program has its own sandbox: leave it at 'in-process' for task 'agent'"
            yield "environment.backend", self.environment.backend, fix
        if self.context.strategy != "keep" or self.context.tasks:
            fix = "an agent decides itself what the policy sees: leave it at 'keep' for task 'agent'"
            yield "context.strategy", self.context.strategy, fix

    def _colocation_conflicts(self) -> Iterator[Conflict]:
        trainer, workers, field = self.trainer, self.rollout.workers, "rollout.colocation.enabled"
        ranks = trainer.ranks
        if self.run.mode not in ("sync", "sync_plus"):
            fix = f"is for run.mode 'sync' and 'sync_plus', not {self.run.mode!r}: elsewhere the rollout never leaves its devices"
            yield field, True, f"{fix} (set it to false, or change the mode)"
        if not trainer.stream:
            yield field, True, "streams into the trainer: set trainer.stream to true"
        if self.resources.pools:
            yield field, True, "shares devices, resources.pools divides them: leave one of the two out"
        if ranks > workers:
            fix = f"{ranks} trainer ranks need as many devices, rollout.workers has {workers}: each rank shares the device of a"
            yield field, True, f"{fix} worker"

    @property
    def collective_limit(self) -> float | None:
        """Seconds for the collective to deliver a version; None: it is not used."""
        return self.rollout.collective_timeout if self.rollout.sends_weights else None

    @property
    def batch_trajectories(self) -> int:
        """Trajectories a step trains on."""
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def group_members(self) -> int:
        """Trajectories that start for a group, at most."""
        if self.rollout.rounds.enabled:
            return speculated(self.rollout.rounds.largest[1], self.rollout.group_size)
        return math.ceil(self.rollout.group_size * self.rollout.redundant_members)

    @property
    def redundancy(self) -> float:
        """Trajectories launched over trajectories needed, at most."""
        if self.rollout.rounds.enabled:
            groups = speculated(self.rollout.rounds.largest[0], self.rollout.groups_per_step)
            return groups * self.group_members / self.batch_trajectories
        return self.rollout.redundant_groups * self.group_members / self.rollout.group_size


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: all defaults) and apply dotted overrides. Raises ConfigError."""
    data = {} if path is None else read_table(path)
    for override in overrides:
        apply_override(data, override)
    return parse_config(data)


def read_table(path: str | Path) -> dict[str, Any]:
    """What a TOML file says, not looked at. Raises ConfigError."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        what = "is a folder" if isinstance(error, IsADirectoryError) else "no such file"
        installed = Path(sys.prefix, "share", "rl-coserve", file)  # the examples of a wheel
        fix = f"it is {installed}" if installed.is_file() else "give the path of a TOML file"
        raise ConfigError("config", str(file), f"{what}; {fix}") from None
    except (OSError, ValueError, RecursionError) as error:  # too deep, or a number of thousands of digits
        raise ConfigError("config", str(file), f"cannot be read as TOML: {error}") from error


def parse_config(data: dict[str, Any]) -> Config:
    """Validate a plain dictionary. Raises one ConfigError that lists every violation."""
    return Config.from_dict(data)


_DEEPEST = 8  # sections within each other


def apply_override(data: dict[str, Any], override: str) -> None:
    """Put ``section.key=value`` into the plain dictionary of a config. Raises ConfigError."""
    name, separator, raw = override.partition("=")
    name = name.strip()
    if not separator or not name:
        raise ConfigError("override", override, "write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a bare word is a string
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, ShortValue(raw), f"cannot be read as a TOML value: {error}") from error
    *sections, key = name.split(".")
    if len(sections) > _DEEPEST or not all((*sections, key)):
        raise ConfigError("override", ShortValue(override), "write it as section.key=value")
    table = data
    for section in sections:
        child = table.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(name, raw, f"{section} is not a section")
        table = child
    table[key] = value


def to_json(config: Config) -> str:
    """The resolved config, stable and readable; saved with every run."""
    return json.dumps(config.model_dump(mode="json"), indent=2, sort_keys=True)
