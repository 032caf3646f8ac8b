"""The vLLM engines that a run starts itself, by number: each with options, environment and devices of its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cluster import ActorGen
from orchestrator.config import Config
from orchestrator.resources import Placement
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine
from orchestrator.runtime.engine_cuts import EngineCuts
from orchestrator.runtime.kv_setup import kv_arguments
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.redis_metadata import PASSWORD_FILE

WORKER_CLASS = "vllm_rlplugin.worker.inprocess_worker:EngineWorker"


class OwnEngines:
    """``workers``: in order of number, not started. ``endpoint``: the relay as a worker of this
    name is told of it. ``places``: by name; those without one share. ``beside``: of their processes'
    environment, what the config does not say; ``heard``: see :class:`orchestrator.cluster.Cluster`."""

    def __init__(
        self,
        config: Config,
        model: str,
        endpoint: Callable[[str], RelayEndpoint],
        places: Mapping[str, Placement],
        cut: EngineCuts,
        beside: Mapping[str, str],
        heard: Callable[[str, str, Sequence[str]], None],
    ) -> None:
        names = [f"vllm-{number}" for number in range(config.rollout.workers)]
        cluster = ActorGen(VllmEngine, {name: places.get(name) for name in names}, beside, heard=heard)
        self.workers: list[RayWorker] = []
        kv = kv_arguments(config)  # one token for all
        for number, actor in enumerate(cluster.actors):
            actor.environment |= engine_environment(config, number)
            arguments = worker_arguments(config, model, endpoint(actor.name), number) | kv
            self.workers.append(RayWorker(cluster, actor, WORKER_CLASS, arguments, **cut.keywords_of(number)))

    def pids(self) -> dict[str, int]:
        """Of those that came up."""
        return {worker.name: worker.process for worker in self.workers if worker.process and worker.ranks}


def worker_arguments(config: Config, model: str, endpoint: RelayEndpoint, number: int) -> dict[str, Any]:
    """Keywords of an engine's process."""
    return {
        **config.rollout.engine_of(number).options(),
        "model": model,
        "dtype": config.model.dtype,
        "seed": config.run.seed + number,
        "relay": endpoint.to_dict(),
        "sleep_mode": config.rollout.colocation.enabled,
    }


def engine_environment(config: Config, number: int = 0) -> dict[str, str]:
    """What an engine's process starts with."""
    return thread_variables(config.rollout.engine_of(number).threads) | secret_files(config)


def thread_variables(threads: int) -> dict[str, str]:
    """Set before a process starts: thread pools are sized when libraries load."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def secret_files(config: Config) -> dict[str, str]:
    """Where processes find secrets: a path, never the secret, as Ray keeps what it is told."""
    file = config.relay.metadata_password_file
    return {PASSWORD_FILE: str(Path(file).resolve())} if file else {}
