"""Shards of environment managers in virtual time: the production's two ends and messages, with a simulated way between them.

A message takes :data:`DELAY` seconds and overtakes none. With the fault ``kill`` a shard dies, falls silent, or says what cannot
be, after a number of its messages that is drawn from a stream of its own: the other faults of a run stay what they are without
it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from orchestrator.api import RewardFunction, Task
from orchestrator.build import build_manager
from orchestrator.components import ManagerParts
from orchestrator.config import Config
from orchestrator.environments.environment_session import EnvironmentSource
from orchestrator.envs import EnvManager
from orchestrator.manager_shards import shard_messages as messages
from orchestrator.manager_shards.shard_host import HeadProxy, ShardHost
from orchestrator.shards.shard_folder import lay_by_value, turns_by_value
from orchestrator.sim.fault_injector import FaultInjector
from orchestrator.sim.seeded_draws import random_stream

DELAY = 0.0005  # ASSUMED: seconds of a message between two processes of a machine
_START = 2.0  # ASSUMED: seconds for a process to come up
_WAYS = ("dies", "falls silent", "says what cannot be")


class SimShards:
    """All shards of a life. ``faults`` None: nothing happens to them."""

    def __init__(
        self,
        config: Config,
        task: Task,
        reward: RewardFunction,
        source: EnvironmentSource | None,
        faults: FaultInjector | None,
        life: int,
    ) -> None:
        self._config, self._task, self._reward, self._source = config, task, reward, source
        self._faults = faults if faults is not None and "kill" in config.sim.faults else None
        self._rng = random_stream(config.run.seed, "faults", "kill", life)
        self._closing: list[asyncio.Task[None]] = []
        self._links: list[_SimLink] = []

    @property
    def parts(self) -> ManagerParts:
        """What the head is given."""
        return ManagerParts([self] * self._config.rollout.shards, turns_by_value)

    async def start(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> _SimLink:
        """See :class:`orchestrator.components.ShardStarter`."""
        await asyncio.sleep(_START)
        link = _SimLink(self, heard, lost, *self._draw_end())
        self._links.append(link)
        return link

    def make_host(self, send: Callable[[bytes], None]) -> ShardHost:
        """A shard's process."""
        config = self._config
        return ShardHost(self._manager, self._reward, lay_by_value, send, config.rollout.trajectory_timeout)

    def end(self, host: ShardHost) -> None:
        """The process ends: what it had is given back, as the kernel does."""
        self._closing.append(asyncio.create_task(host.close(), name="shard ends"))

    def note_kill(self) -> None:
        """A fault has struck."""
        if self._faults is not None:
            self._faults.record_fault("kill", "shard")

    async def close(self) -> None:
        """Nothing is left."""
        for link in self._links:
            link.kill()
        await asyncio.gather(*self._closing)

    def _manager(self, proxy: HeadProxy) -> EnvManager:
        return build_manager(self._config, self._task, proxy, lambda first: False, self._source)

    def _draw_end(self) -> tuple[int, str]:
        """After how many of its messages it ends, and how; (-1, ""): never."""
        if self._faults is None:
            return -1, ""
        return 1 + int(self._rng.expovariate(self._config.sim.fault_rate / 2)), self._rng.choice(_WAYS)


class _SimLink:
    """The way to one, and the process."""

    def __init__(
        self, shards: SimShards, heard: Callable[[bytes], None], lost: Callable[[str], None], left: int, way: str
    ) -> None:
        self._shards, self._heard, self._lost = shards, heard, lost
        self._left, self._way = left, way
        self._silent = self._dead = False
        self._ways: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self._host = shards.make_host(self._say)

    def send(self, message: bytes) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        self._ways[0].append(message)
        asyncio.get_running_loop().call_later(DELAY, self._arrive)

    def kill(self) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        if not self._dead:
            self._dead = True
            self._shards.end(self._host)

    def _arrive(self) -> None:
        message = self._ways[0].popleft()
        if not self._dead:
            self._host.hear(message)

    def _say(self, message: bytes) -> None:
        self._ways[1].append(message)
        asyncio.get_running_loop().call_later(DELAY, self._reach)

    def _reach(self) -> None:
        message = self._ways[1].popleft()
        if self._dead or self._silent:
            return
        if message[0] != messages.ALIVE:
            self._left -= 1
        if self._left != 0:
            self._heard(message)
            return
        self._shards.note_kill()
        match self._way:
            case "dies":
                self.kill()
                self._lost("its process was killed: injected")
            case "falls silent":
                self._silent = True
            case _:
                self._heard(message[:1] + b"\xc1" + message[1:])
