"""Shards of environment managers on the nodes of a Ray cluster: each is kept by an actor there, which passes its messages on.

Guarantees: a shard's process is the one of :mod:`orchestrator.runtime.shard_process`, on a pipe that only it and its actor have,
and ends, with all it started, when that actor does, however it ends; messages keep their order and are passed on as bytes, those
that wait in one call at a time for each way; who may speak is who may join the cluster, which is its token's matter. A
finished trajectory comes as columns, once, and is a file of the run's own from then on. Where the reward function is in a host of
the run's own, each shard has such a host beside it, on loopback, which is started again when it dies.

Every node needs the file system of the run folder, and what the task is made of, at the same paths.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.cluster.actor import LOGS, Actor
from orchestrator.cluster.cluster import Heard
from orchestrator.cluster.role_workers import Identity, Worker
from orchestrator.components import ManagerParts
from orchestrator.config import Config
from orchestrator.resources import Placement, reserve
from orchestrator.rewards.host_launch import RewardHost
from orchestrator.runtime.shard_process import START_SECONDS, LocalShard, ShardWords, shared_by, words_of_shards
from orchestrator.shards.shard_folder import ShardFolder

_PAUSE = 1.0  # seconds before a reward host is started again
_AT_ONCE = 8  # messages


class ShardRelay(Worker):
    """Inside an actor: starts the shard's process on its node, and passes on what either says, unread."""

    concurrency = 8

    def __init__(self) -> None:
        self._shard: LocalShard | None = None
        self._host: RewardHost | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._send: Callable[[bytes], None] = lambda message: None
        self._said: list[bytes] = []
        self._why = ""  # it is gone
        self._news = asyncio.Event()

    async def begin(self, words: ShardWords, folder: str, reward: Mapping[str, Any] | None) -> None:
        """Bring it up. ``folder``: where the run was begun; ``reward``: keywords of the :class:`RewardHost` beside it, None: it
        has none. Raises ConfigError and RunError."""
        hello, there = dict(words.hello), await asyncio.to_thread(os.path.isdir, folder)
        if reward is not None:
            self._host = RewardHost(**reward, log=words.log.with_name(f"{words.log.stem}-reward-host.log"))
            await self._host.start()
            self._keeping = asyncio.create_task(self._keep(self._host), name="keep the reward host")
            hello["reward"] = {**hello["reward"], "url": self._host.url, "token": self._host.token}
        self._shard = LocalShard(hello, words.log, folder=folder if there else None)
        link = await self._shard.start(self._hear, self._lose)
        self._send = link.send

    async def tell(self, said: Sequence[bytes]) -> None:
        """Messages of the head."""
        for message in said:
            self._send(message)

    async def hear(self) -> tuple[list[bytes], str]:
        """What the shard has said since, as soon as there is something, and why it is gone, "" while it is not."""
        await self._news.wait()
        self._news.clear()
        said, self._said = self._said, []
        return said, self._why

    def _hear(self, message: bytes) -> None:
        self._said.append(message)
        self._news.set()

    def _lose(self, why: str) -> None:
        self._why = why
        self._news.set()

    async def _keep(self, host: RewardHost) -> None:
        while True:
            await host.ended()
            await asyncio.sleep(_PAUSE)
            with suppress(RunError, ConfigError, OSError):  # calls say that it does not answer
                await host.restart()


class SpreadShards:
    """The shards of a run, over the nodes. ``reward``: see :class:`~orchestrator.runtime.shard_process.LocalShards`; ``host``: of
    the function that it calls, where that is a host of the run's own, as keywords of :class:`RewardHost`; ``heard``: see
    :class:`orchestrator.cluster.Cluster`. :meth:`open` first."""

    def __init__(
        self,
        config: Config,
        reward: Mapping[str, Any] | None,
        host: Mapping[str, Any] | None,
        shards: ShardFolder,
        owner: str,
        logs: Path,
        heard: Heard = lambda shard, report: None,
    ) -> None:
        share = host and {**host, "concurrency": math.ceil(host["concurrency"] / config.rollout.shards)}
        self._shards = [
            SpreadShard(words, share, {LOGS: str(logs.resolve())}, heard)
            for words in words_of_shards(config, reward, (), owner, logs.resolve())
        ]
        divided = shared_by(config, None if host else reward)  # a host limits its own calls
        self.parts = ManagerParts(self._shards, shards.adopt, divided)

    async def open(self) -> None:
        """Reserve a processor for each, over as many nodes as there are. Raises ConfigError and RetryableError."""
        await asyncio.to_thread(reserve, [shard.placement for shard in self._shards], "SPREAD")

    def pids(self) -> dict[str, int]:
        """Of this machine: none."""
        return {}

    async def close(self) -> None:
        """End all. Idempotent."""
        for shard in self._shards:
            await shard.close()


class SpreadShard:
    """Implements :class:`orchestrator.components.ShardStarter`. ``environment``: of its actor."""

    def __init__(
        self, words: ShardWords, host: Mapping[str, Any] | None, environment: Mapping[str, str], report: Heard
    ) -> None:
        name = words.log.stem
        self._report = report
        self.placement = Placement(None, name, "", 0)
        self._words, self._host = words, host
        self._actor = Actor(ShardRelay, Identity(name, 0, 1, "", ()), self.placement, dict(environment))
        self._link: _NodeLink | None = None

    async def start(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> _NodeLink:
        """See :class:`orchestrator.components.ShardStarter`."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.to_thread(self._actor.place)
                self._actor.start()
                self._report(self._actor.name, await self._actor.answer(self._actor.ask("seen")))
                begun = self._actor.ask("call", "begin", (self._words, os.getcwd(), self._host), {})
                await self._actor.answer(begun)
        except BaseException as error:
            self._actor.kill()
            if isinstance(error, TimeoutError):
                raise RunError(f"it was not up within {START_SECONDS:g} s; see {self._words.log}") from None
            if isinstance(error, RetryableError):
                raise RunError(str(error)) from error
            raise
        self._link = _NodeLink(self._actor, heard, lost)
        return self._link

    async def close(self) -> None:
        """End it, and give its place back. Idempotent."""
        if self._link is not None:
            self._link.kill()
        self._actor.kill()
        await asyncio.to_thread(self.placement.release)


class _NodeLink:
    """Implements :class:`orchestrator.components.ShardLink`."""

    def __init__(self, actor: Actor, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._actor = actor
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._tell(), name=f"messages to {actor.name}"),
            asyncio.create_task(self._hear(heard, lost), name=f"messages of {actor.name}"),
        ]

    def send(self, message: bytes) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        self._outbox.append(message)
        self._wake.set()

    def kill(self) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._actor.kill()
        self._tasks = []

    async def _tell(self) -> None:
        with suppress(RetryableError):  # who listens to it says that it is gone
            while True:
                await self._wake.wait()
                self._wake.clear()
                said, self._outbox = self._outbox, []
                await self._call("tell", said)

    async def _hear(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        try:
            while True:
                said, why = await self._call("hear")
                for number, message in enumerate(said, 1):
                    heard(message)
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)  # others have a turn
                if why:
                    return lost(why)
        except Exception as error:  # noqa: BLE001  as of a process here: whatever it says, it is lost then
            lost(str(error) or repr(error))

    async def _call(self, method: str, *given: Any) -> Any:
        return await self._actor.answer(self._actor.ask("call", method, given, {}))
