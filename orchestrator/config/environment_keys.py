"""Sections of a config: where environments and their tools run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orchestrator.settings.section import Conflict, Positive, PositiveSeconds, Section, ToolName


class KubernetesSection(Section):
    """Pods that environments run in (environment.backend = "kubernetes")."""

    # must have Python, this package in this version, and what the task needs; a prompt may name another
    image: str = ""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = "default"
    context: str = ""  # of the kubeconfig; empty: the current one, or the pod's own account inside a cluster
    registry_mirror: str = ""  # images are pulled from here first: replaces the registry in `image` (RollArt 8)
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pre_pull: bool = False  # pull the image onto every node when the run starts
    cpu: Annotated[str, Field(pattern=r"^[0-9]+m?$|^[0-9]+\.[0-9]+$")] = "500m"  # request and limit of a pod
    memory: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi|K|M|G)?$")] = "512Mi"
    node_selector: dict[str, str] = {}
    port: Annotated[int, Field(ge=1024, le=65535)] = 8011  # where the environment listens, in its pod
    orphan_seconds: PositiveSeconds = 120.0  # a pod ends when nobody has been connected to it for this long


class EnvironmentSection(Section):
    """Where environments run. "in-process": a fresh object in the orchestrator's process for every episode, no pool. The others
    keep a pool of instances that live on between episodes. Limits of a step and of a trajectory are in [rollout]."""

    backend: Literal["in-process", "in-process-pool", "subprocess", "kubernetes"] = "in-process"
    size: Annotated[int, Field(ge=0)] = 0  # instances, at most; 0: rollout.environments
    warm: Annotated[int, Field(ge=0)] = 4  # instances kept ready beyond those in use
    parallel_starts: Positive = 4
    start_timeout: PositiveSeconds = 60.0
    start_tries: Positive = (
        8  # failures in a row, with none alive, that end the run (or the trajectories that wait for this template)
    )
    reset_tries: Annotated[int, Field(ge=1, le=16)] = 3  # environments tried until one begins an episode
    backoff_first: PositiveSeconds = 1.0  # pause after a failed start; doubles with each failure
    backoff_limit: PositiveSeconds = 60.0
    health_seconds: PositiveSeconds = 30.0  # seconds between checks of idle instances
    health_timeout: PositiveSeconds = 5.0
    idle_seconds: PositiveSeconds = 300.0  # instances beyond `warm` end after being idle for this long
    max_age_seconds: PositiveSeconds = 3600.0  # age at which an instance is replaced, between two episodes
    max_episodes: Annotated[int, Field(ge=0)] = 0  # episodes after which it is replaced; 0: no limit
    memory_mb: Annotated[int, Field(ge=0)] = 2048  # address space of one process (subprocess); 0: no limit
    cpu_seconds: Annotated[int, Field(ge=0)] = 0  # processor time of one call (subprocess, kubernetes); 0: no limit
    kubernetes: KubernetesSection = KubernetesSection()

    def conflicts(self) -> Iterator[Conflict]:
        if self.size and self.warm > self.size:
            fix = f"more than environment.size = {self.size}: keep at most that many ready, or raise the size"
            yield "warm", self.warm, fix
        if self.backoff_limit < self.backoff_first:
            fix = (
                f"below environment.backoff_first = {self.backoff_first:g}: the back-off grows from there to the limit"
            )
            yield "backoff_limit", self.backoff_limit, fix
        if self.backend == "kubernetes" and not self.kubernetes.image:
            yield "kubernetes", "(no image)", "set environment.kubernetes.image to the image that pods run"
        if 0 < self.memory_mb < 64:
            yield "memory_mb", self.memory_mb, "no Python process fits into that; give 64 or more, or 0 for no limit"


class ToolsSection(Section):
    """Tools that environments call as functions, like rewards. The embedded host runs ``functions``."""

    functions: dict[ToolName, Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = {}  # name -> module:function
    urls: dict[ToolName, str] = {}  # name -> URL of a function elsewhere; token in RL_COSERVE_TOOLS_TOKEN
    concurrency: Positive = 16  # calls of one tool in flight
    burst: Annotated[int, Field(ge=0)] = 64  # further calls that may wait; any beyond fail
    timeout: PositiveSeconds = 10.0
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    warm: Annotated[int, Field(ge=0)] = 1  # processes of each tool that are kept ready
    idle_seconds: PositiveSeconds = 30.0  # the embedded host ends further processes after this
    host_restarts: Annotated[int, Field(ge=0)] = 5  # of the embedded host, in a row; then the run ends

    def conflicts(self) -> Iterator[Conflict]:
        if self.functions and self.urls:
            fix = "the embedded host and remote functions have different tokens: use either functions or urls"
            yield "urls", sorted(self.urls), fix

    @property
    def any(self) -> bool:
        """Whether there are tools."""
        return bool(self.functions or self.urls)
