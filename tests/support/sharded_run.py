"""The head of a run with two real shard processes and a made-up policy: FrozenLake, scored over HTTP, or agent programs; or with
both on nodes of a Ray that the test has connected to."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator.api import Completion, GenerationRequest, Sampling, TrajectoryError
from orchestrator.config import load_config
from orchestrator.envs import Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.manager_shards.shard_managers import ShardManagers
from orchestrator.rewards.host_launch import PATIENCE, RewardHost
from orchestrator.runtime.preflight import make_task
from orchestrator.runtime.shard_nodes import SpreadShards
from orchestrator.runtime.shard_process import LocalShards
from orchestrator.shards.shard_folder import ShardFolder, shard_of
from orchestrator.tasks import registry


class ShardedRun:
    """``shards``: the processes; ``sink``: events."""

    def __init__(self, folder: Path, agents: bool = False, over_nodes: bool = False) -> None:
        own = ("task.name=frozenlake", "environment.backend=subprocess", "environment.size=6")
        there = ("rollout.shards_on=nodes", "ray.address=auto") if over_nodes else ()
        self._config = load_config(
            "examples/agents.toml" if agents else None, ["rollout.shards=2", *there, *(() if agents else own)]
        )
        self._agents, self._over_nodes = agents, over_nodes
        self._task = make_task(self._config)
        self._folder, self._stack = folder, AsyncExitStack()
        self.sink = MemorySink()
        self.pids: list[int] = []
        self._host: dict[str, Any] | None = None

    async def __aenter__(self) -> Self:
        logs = self._folder / "logs"
        logs.mkdir()
        call = None if self._agents else await self._start_reward(logs)
        self._shards_of = ShardFolder(self._folder / "shards", self._folder)
        self._stack.callback(self._shards_of.close)
        if self._over_nodes:
            over = SpreadShards(self._config, call, self._host, self._shards_of, "test", logs)
            self._stack.push_async_callback(over.close)
            await over.open()
            parts = over.parts
        else:
            self.shards = LocalShards(self._config, call, self._shards_of, "test", logs)
            self._stack.push_async_callback(self.shards.close)
            parts = self.shards.parts
        self._managers = ShardManagers(
            parts,
            self,
            EventLog(self.sink, asyncio.get_running_loop().time),
            self._shards_of,
            is_stale=lambda first: False,
            fail=lambda error: print(error),
            restarts=2,
            window=3600.0,
            silence=60.0,
            patience=60.0,
        )
        running = asyncio.create_task(self._managers.run())
        self._stack.callback(running.cancel)
        while sum(shard.link is not None for shard in self._managers._shards) < 2:
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.pids = self.descendants() if self._over_nodes else list(self.shards.pids().values())
        await self._stack.aclose()

    def actors(self) -> dict[int, str]:
        """Of the shards over nodes: process id -> Ray's id of its node."""
        import ray._private.state

        found = ray._private.state.actors().values()
        return {one["Pid"]: one["Address"]["NodeID"] for one in found if one["State"] == "ALIVE"}

    def descendants(self) -> list[int]:
        """Processes below these actors."""
        found, left = list[int](), [*self.actors()]
        while left:
            tasks = Path(f"/proc/{left.pop()}/task").glob("*/children")
            below = [int(pid) for file in tasks for pid in file.read_text().split()]
            found += below
            left += below
        return found

    async def _start_reward(self, logs: Path) -> dict[str, Any]:
        function = registry.reward_of(self._task)
        self._host = {"function": function, "concurrency": 4, "timeout": 10.0, "idle_seconds": 60.0}
        host = RewardHost(**self._host, log=logs / "reward.log")
        await host.start()
        self._stack.push_async_callback(host.stop)
        return {"url": host.url, "token": host.token, "concurrency": 4, "patience": PATIENCE}

    async def generate(self, request: GenerationRequest) -> Completion:
        """A slow policy that always says the same."""
        await asyncio.sleep(0.2)
        said = (*(token for token in range(2, 4)), self._task.end_id)
        return Completion(request.request_id, said, (-0.5,) * len(said), ((0, len(said)),), "stop")

    def note_fault(self, what: str, detail: str) -> None:
        """Nothing here."""

    async def episode(self, name: str) -> str:
        """How it ended: "scored", or the cause."""
        prompt = next(islice(self._task.prompts("train", 0), len(name), None))
        episode = Episode(name, "g", prompt, 0.0)
        try:
            await self._managers.play(episode, Sampling(8, stop_token_ids=(self._task.end_id,)))
            reward = await self._managers.score(episode.trajectory(1.0))
        except TrajectoryError as error:
            return error.cause
        kept = self._managers.finish(episode.trajectory(1.0, reward=reward))
        shard = shard_of(kept)
        assert shard is not None
        assert shard.open().trajectory() == kept
        return "scored"

    def left_behind(self) -> list[int]:
        """Processes of shards that are there when all were closed."""
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]
