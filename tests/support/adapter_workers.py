"""Workers for the tests of adapters, made by name in whatever process the rollout side runs in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.api import Completion, GenerationRequest, RetryableError, UpdateResult, WorkerStats
from orchestrator.config import Config
from orchestrator.transfer import RelayEndpoint

MADE: list[ScriptedWorker] = []


class ScriptedWorker:
    """Says the last token of its prompt and token 1, at the version that it was moved to; the lowest priority first."""

    name = "scripted"

    def __init__(self) -> None:
        self.version = -1
        self.held: list[GenerationRequest] = []
        self.requests: list[GenerationRequest] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.dead = False

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.held += requests
        self.requests += requests

    async def abort(self, request_ids: Sequence[str] = (), **_: Any) -> None:
        self.held = [request for request in self.held if request.request_id not in request_ids]

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Nothing."""

    async def completions(self) -> list[Completion]:
        while not (self.held and self.hold.is_set()):
            if self.dead:
                raise RetryableError("dead")
            await asyncio.sleep(0.001)
        ready, self.held = sorted(self.held, key=lambda request: request.priority), []
        return [
            Completion(request.request_id, (request.token_ids[-1], 1), (-0.5, -0.25), ((self.version, 2),), "stop")
            for request in ready
        ]

    async def suspend(self) -> None:
        """Nothing."""

    async def resume(self) -> None:
        """Nothing."""

    async def prepare(self, version: int) -> None:
        """Nothing."""

    async def update(self, version: int) -> UpdateResult:
        self.version = version
        return UpdateResult(version, 0, 0.0)

    async def stats(self) -> WorkerStats:
        if self.dead:
            raise RetryableError("dead")
        return WorkerStats(0, 0, 0, 1, 0, 0.0, self.version)

    async def restart(self) -> None:
        raise RetryableError("it does not come back")

    async def close(self) -> None:
        """Nothing."""


def scripted(config: Config, endpoint: RelayEndpoint) -> list[ScriptedWorker]:
    MADE.append(ScriptedWorker())
    return MADE[-1:]


def engine(config: Config, endpoint: RelayEndpoint) -> list[Any]:
    """A real vLLM engine in this process; its model is named by the environment."""
    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    class Worker(EngineWorker):
        name = "vllm-0"

        async def restart(self) -> None:
            raise AssertionError("the engine was taken for dead")

    model = os.environ["ADAPTER_MODEL"]
    return [Worker(model=model, max_num_seqs=8, max_model_len=256, kv_cache_mb=4, relay=endpoint.to_dict())]
