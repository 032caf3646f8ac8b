"""What a config needs of its environment: engines in tested versions, and packages of extras. One list for the command and
for ``rl-coserve doctor``, so that what the doctor passes is not refused when the run starts.

Guarantee: nothing is imported or started; what a package is called is looked up in metadata and on the path only.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.hooks.tested_versions import MEGATRON_CORE, MOONCAKE, PYTHON, RAY, VLLM, EngineComponent, is_installed


@dataclass(frozen=True, slots=True)
class Package:
    """A module that a value of the config asks for, and the extra of this distribution that brings it."""

    module: str
    extra: str
    field: str
    value: str


def required_components(config: Config) -> tuple[EngineComponent, ...]:
    """What must be there in a tested version: vLLM where engines run on the run's own account (not on the head of a cluster that
    has none: each engine checks its own), Mooncake where something travels over it."""
    elsewhere = bool(config.ray.address) and not is_installed("vllm")
    generates = (config.rollout.workers > 0 and not elsewhere) or bool(config.reward.own_judges)
    carries = config.relay.kind == "mooncake" or config.rollout.kv_transfer.carrier == "mooncake"
    return (PYTHON, *((VLLM,) if generates else ()), MEGATRON_CORE, *((MOONCAKE,) if carries else ()), RAY)


def required_packages(config: Config) -> tuple[Package, ...]:
    """What the base and its extra ``orchestrator`` do not bring."""
    tasks = {config.task.name, *config.task.mixture}
    url, otlp = config.relay.metadata_url, config.logging.otlp.endpoint
    asked = (
        (config.relay.kind == "fsspec", Package("fsspec", "fsspec", "relay.kind", "fsspec")),
        (bool(url), Package("redis", "redis", "relay.metadata_url", url)),
        (
            config.reward.host == "ray_serve",
            Package("grpc_reflection", "ray-serve", "reward.host", "ray_serve"),  # of Serve's own, and no other's
        ),
        (
            config.environment.backend == "kubernetes",
            Package("kubernetes", "kubernetes", "environment.backend", "kubernetes"),
        ),
        (config.logging.wandb.enabled, Package("wandb", "wandb", "logging.wandb.enabled", "true")),
        (bool(otlp), Package("opentelemetry.exporter.otlp.proto.http", "otlp", "logging.otlp.endpoint", otlp)),
        (
            bool(config.task.memory.embed),
            Package("faiss", "vectors", "task.memory.embed", config.task.memory.embed),
        ),
        ("reasoning_gym" in tasks, Package("reasoning_gym", "reasoning-gym", "task.name", "reasoning_gym")),
    )
    return tuple(package for is_asked, package in asked if is_asked)


def missing_packages(config: Config) -> tuple[Package, ...]:
    """Those that are not installed here."""
    return tuple(package for package in required_packages(config) if not is_installed(package.module))


def require_packages(config: Config) -> None:
    """Raises ConfigError that names the first one that is missing."""
    for package in missing_packages(config):
        fix = f"needs a package that is not installed: pip install 'rl-coserve[{package.extra}]'"
        raise ConfigError(package.field, package.value, fix)
