"""The vLLM engines that a run starts itself, by number: each with options, environment and devices of its group.

Those that are added while it runs have a place of their own; without GPUs and pools it is a processor of the cluster's, so that
what has no room is said, and does not wait in Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ManagedWorker
from orchestrator.cluster import ActorGen
from orchestrator.cluster.actor import FirstReport
from orchestrator.cluster.cluster import Heard
from orchestrator.config import Config
from orchestrator.resources import Placement
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine, part_name
from orchestrator.runtime.engine_cuts import EngineCuts
from orchestrator.runtime.kv_setup import kv_arguments
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.redis_metadata import PASSWORD_FILE

WORKER_CLASS = "vllm_rlplugin.worker.inprocess_worker:EngineWorker"


class OwnEngines:
    """``workers``: in order of number, not started. ``endpoint``: the relay, as a worker of this name on a node with these labels
    is told of it. ``places``: by name; those without one share. ``beside``: of their processes' environment, what the config does
    not say; ``heard``: see :class:`orchestrator.cluster.Cluster`. ``place``: by number, of one that is added."""

    def __init__(
        self,
        config: Config,
        model: str,
        endpoint: Callable[[str, Mapping[str, str]], RelayEndpoint],
        places: Mapping[str, Placement],
        cut: EngineCuts,
        beside: Mapping[str, str],
        heard: Heard,
        place: Callable[[int], Placement],
    ) -> None:
        self._config, self._model, self._endpoint, self._beside, self._place = config, model, endpoint, beside, place
        self._kv = kv_arguments(config)  # one token for all
        self._cluster = ActorGen(VllmEngine, {}, heard=heard)
        self._by_number: dict[int, RayWorker] = {}
        for number in range(config.rollout.workers):
            self._add(number, places.get(f"vllm-{number}"), **cut.keywords_of(number))

    @property
    def workers(self) -> list[RayWorker]:
        """All that were ever made."""
        return list(self._by_number.values())

    def make(self, number: int) -> RayWorker:
        """See :class:`orchestrator.proxy.engine_scaling.EngineSource`."""
        return self._by_number.get(number) or self._add(number, self._place(number))

    async def let_go(self, worker: ManagedWorker) -> None:
        """See :class:`orchestrator.proxy.engine_scaling.EngineSource`."""
        assert isinstance(worker, RayWorker)
        await worker.let_go()

    async def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            await worker.close()

    def _add(self, number: int, place: Placement | None, **cut: int) -> RayWorker:
        variables = {**engine_environment(self._config, number), **self._beside}
        name = f"vllm-{number}"
        actor = self._cluster.add_worker(name, place, variables)
        parts = range(1, self._config.rollout.engine_of(number).nodes)
        beside = [self._cluster.add_worker(part_name(name, part), place, variables, part) for part in parts]
        arguments = worker_arguments(self._config, self._model, number) | self._kv

        def there(report: FirstReport) -> dict[str, Any]:
            return {"relay": self._endpoint(actor.name, report.labels).to_dict()}

        made = RayWorker(self._cluster, actor, WORKER_CLASS, arguments, there=there, beside=beside, **cut)
        self._by_number[number] = made
        return made

    def pids(self) -> dict[str, int]:
        """Of those that came up."""
        return {worker.name: worker.process for worker in self.workers if worker.process and worker.ranks}


def worker_arguments(config: Config, model: str, number: int) -> dict[str, Any]:
    """Keywords of an engine's process, but for its relay."""
    routed = {"enable_return_routed_experts": True} if config.trainer.routing_replay else {}
    return {
        **config.rollout.engine_of(number).options(),
        **routed,
        "model": model,
        "dtype": config.model.dtype,
        "seed": config.run.seed + number,
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
