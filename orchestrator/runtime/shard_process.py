"""Shards of environment managers as processes of this machine: started, spoken to over their pipes, ended.

    python -m orchestrator.runtime.shard_process                       the process; its config comes over the pipe

Guarantees: nobody but the two ends has the pipe, so that nothing else can speak; a message is four bytes with its length, then
:mod:`orchestrator.manager_shards.shard_messages`, of one tick of the loop in one write; a process sees no secret of the run but
the reward's token; it ends, with all it started, when its pipe closes (:mod:`orchestrator.process_watcher`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import orchestrator
from orchestrator.api import ConfigError, RewardFunction, RunError, Task
from orchestrator.api.jsontext import parse_object
from orchestrator.build import build_environment_pool, build_manager
from orchestrator.child_process import kill_watched, public_environment
from orchestrator.components import ManagerParts
from orchestrator.config import Config, parse_config
from orchestrator.environments.subprocesses import ONE_THREAD
from orchestrator.envs import EnvManager
from orchestrator.events import EventLog
from orchestrator.manager_shards import shard_messages as messages
from orchestrator.manager_shards.shard_host import HeadProxy, Lay, ShardHost
from orchestrator.process_watcher import fork_under_watch, take_pipes
from orchestrator.rewards.reward_client import CountedReward, HttpReward
from orchestrator.rewards.voting import MajorityVote
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.loop_watch import LoopWatch
from orchestrator.runtime.preflight import make_task
from orchestrator.shards.shard_folder import ShardFolder, TrajectoryWriter, lay_by_value

START_SECONDS = 120.0  # to come up, the first environment included
_LENGTH = struct.Struct("<I")
_GREETING = b"G"  # begins the first message of a process that is up, or says why it is not
_AT_ONCE = 8  # messages
_MODULE = "orchestrator.runtime.shard_process"


class _Frames:
    """Messages to the other end of a pipe: those of one tick of the loop in one write."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._parts: list[bytes] = []

    def send(self, message: bytes) -> None:
        """In order."""
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts += (_LENGTH.pack(len(message)), message)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        self._write(b"".join(parts))


async def _receive_all(reader: asyncio.StreamReader, heard: Callable[[bytes], None]) -> NoReturn:
    """Each message to ``heard``. Raises what :func:`_receive` does, and ``heard``."""
    while True:
        for _ in range(_AT_ONCE):
            heard(await _receive(reader))
        await asyncio.sleep(0)  # what is buffered is read without a pause: others have a turn


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises EOFError where there is none, and ValueError for one that is too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > messages.MAX_MESSAGE:
            raise ValueError(f"a message of {length} B")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error


# -- the head's side -------------------------------------------------------------------------------------------------


class LocalShards:
    """The shards of a run. ``reward``: keywords of :class:`HttpReward`, of the whole run, None: agents' ends are the rewards;
    ``owner``: begins the names of environments; ``logs``: a folder."""

    def __init__(
        self, config: Config, reward: Mapping[str, Any] | None, shards: ShardFolder, owner: str, logs: Path
    ) -> None:
        said = words_of_shards(config, reward, shards.folders, owner, logs)
        self._shards = [LocalShard(words.hello, words.log) for words in said]
        self.parts = ManagerParts(self._shards, shards.adopt, shared_by(config, reward))

    def pids(self) -> dict[str, int]:
        """Of those that are up, by name."""
        found = ((f"shard-{number}", shard.pid) for number, shard in enumerate(self._shards))
        return {name: pid for name, pid in found if pid is not None}

    async def close(self) -> None:
        """End all. Idempotent."""
        await asyncio.gather(*(shard.close() for shard in self._shards))


@dataclass(frozen=True)
class ShardWords:
    """``hello``: what a shard's process is told first; ``log``: where its errors go."""

    hello: Mapping[str, Any]
    log: Path


def words_of_shards(
    config: Config, reward: Mapping[str, Any] | None, folders: Sequence[Path], owner: str, logs: Path
) -> list[ShardWords]:
    """Of each of ``rollout.shards``. ``reward``: see :class:`LocalShards`; ``folders``: where they lay trajectories; with none
    these come by value."""
    count = config.rollout.shards
    hello = {
        "config": share_of(config).model_dump(mode="json"),
        "reward": None if reward is None else {**reward, "concurrency": math.ceil(reward["concurrency"] / count)},
        "folders": [str(folder.absolute()) for folder in folders],
        "log": str((logs / "environments.log").absolute()),
        "distribution": orchestrator.__version__,
    }
    return [
        ShardWords({**hello, "name": f"s{number}", "owner": f"{owner}-s{number}"}, logs / f"shard-{number}.log")
        for number in range(count)
    ]


def shared_by(config: Config, reward: Mapping[str, Any] | None) -> dict[str, int]:
    """What :func:`words_of_shards` divides, undivided."""
    environments = config.environment.size or config.rollout.environments
    return {"environments": environments} | ({} if reward is None else {"rewards": reward["concurrency"]})


def share_of(config: Config) -> Config:
    """What one of ``rollout.shards`` has of the run: its part of the environments."""
    data, count = config.model_dump(mode="json"), config.rollout.shards
    data["rollout"] |= {"shards": 1, "shards_on": "head"}
    data["rollout"]["environments"] = max(config.group_members, math.ceil(config.rollout.environments / count))
    for key in ("size", "warm"):
        data["environment"][key] = math.ceil(data["environment"][key] / count)
    return parse_config(data)


class LocalShard:
    """Implements :class:`orchestrator.components.ShardStarter`. ``hello``: what the process is told first; ``module``: what it
    runs; ``folder``: where, None: here."""

    def __init__(
        self, hello: Mapping[str, Any], log: Path, module: str = _MODULE, *, folder: str | None = None
    ) -> None:
        self._hello, self._log, self._module, self._folder = hello, log, module, folder
        self._links: list[_PipeLink] = []
        self._starts = 0

    @property
    def pid(self) -> int | None:
        """Of the process that is up."""
        return self._links[-1].pid if self._links else None

    async def start(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> _PipeLink:
        """See :class:`orchestrator.components.ShardStarter`."""
        self._starts += 1
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**dict.fromkeys(ONE_THREAD, "1"), **public_environment()},
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C is for the head, which ends it when it is done
            )
        link = _PipeLink(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await link.greet({**self._hello, "start": self._starts})
        except TimeoutError:
            await link.close()
            raise RunError(f"it was not up within {START_SECONDS:g} s; see {self._log}") from None
        except EOFError:
            await link.close()
            raise RunError(f"its process ended before it was up; see {self._log}") from None
        except BaseException:
            await link.close()
            raise
        link.listen(heard, lambda why: lost(f"{why}; see {self._log}"))
        self._links = [one for one in self._links if not one.closed] + [link]
        return link

    async def close(self) -> None:
        """End what was started. Idempotent."""
        await asyncio.gather(*(link.close() for link in self._links))


class _PipeLink:
    """Implements :class:`orchestrator.components.ShardLink`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        self._process = process
        self._frames = _Frames(self._write)
        self._listener: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self._process.pid if self._process.returncode is None else None

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._ending is not None and self._ending.done()

    async def greet(self, hello: Mapping[str, Any]) -> None:
        """Tell it what it is, and hear that it is up. Raises ConfigError, RunError and EOFError."""
        self._frames.send(json.dumps(hello).encode())
        assert self._process.stdout is not None
        while (said := await _receive(self._process.stdout))[:1] != _GREETING:
            pass  # of its environments, before it is up
        answer = parse_object(said[1:])
        if "field" in answer:
            raise ConfigError(str(answer["field"]), str(answer["value"]), str(answer["fix"]))
        if "error" in answer:
            raise RunError(str(answer["error"]))

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """From now on."""
        self._listener = asyncio.create_task(self._hear(heard, lost), name=f"messages of process {self._process.pid}")

    def send(self, message: bytes) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        self._frames.send(message)

    def kill(self) -> None:
        """See :class:`orchestrator.components.ShardLink`."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"end of process {self._process.pid}")

    async def close(self) -> None:
        """Nothing of it is left. Idempotent."""
        self.kill()
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def _write(self, data: bytes) -> None:
        stdin = self._process.stdin
        if self._ending is None and stdin is not None and not stdin.is_closing():
            stdin.write(data)

    async def _hear(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        try:
            await _receive_all(self._process.stdout, heard)
        except EOFError:
            lost("its process ended")
        except Exception as error:  # noqa: BLE001  a process that says what nobody thought of is lost as any other
            lost(repr(error))

    async def _end(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await kill_watched(self._process)


# -- in the process --------------------------------------------------------------------------------------------------


@dataclass
class HostParts:
    """What a shard plays with. ``counters`` and ``resize``: see :class:`ShardHost`."""

    make_manager: Callable[[HeadProxy], EnvManager]
    reward: RewardFunction
    lay: Lay
    seconds: float
    counters: Callable[[], Mapping[str, Any]] = dict
    resize: Mapping[str, Callable[[int], None]] = field(default_factory=dict)


Send = Callable[[bytes], None]
MakeParts = Callable[[Mapping[str, Any], Send], AbstractAsyncContextManager[HostParts]]


class _Teller:
    """Events of this process, which the head writes down."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def write(self, line: str) -> None:
        """See :class:`orchestrator.events.LineSink`."""
        self._send(messages.pack(messages.TOLD, line))


def never_stale(first_version: int) -> bool:
    """Staleness is the head's to say."""
    return False


@asynccontextmanager
async def real_parts(hello: Mapping[str, Any], send: Send) -> AsyncIterator[HostParts]:
    """Of a real run: its task, its environments, its reward function over HTTP. Raises ConfigError and RunError."""
    config = parse_config(hello["config"])
    task, events = make_task(config), EventLog(_Teller(send), asyncio.get_running_loop().time)
    scorer, votes = _scorer(config, task, hello["reward"]), config.reward.votes
    reward = scorer if votes == 1 else MajorityVote(scorer, votes, config.reward.vote_by)
    pool = build_environment_pool(config, task, hello["owner"], events, log=Path(hello["log"]))
    folders = [Path(folder) for folder in hello["folders"]]
    lay = TrajectoryWriter(folders, f"{hello['name']}-{hello['start']}").lay if folders else lay_by_value
    watch = LoopWatch(lambda said: events.emit("alarm", what="event_loop", detail=f"{hello['name']}: {said}"))
    watch.start()
    try:
        if pool is not None:
            await pool.open()
        garbage_collector.calm()
        yield HostParts(
            lambda proxy: build_manager(config, task, proxy, never_stale, pool),
            reward,
            lay,
            config.rollout.trajectory_timeout,
            lambda: {"rewards": scorer.stats(), "environments": {} if pool is None else pool.stats()},
            {"rewards": scorer.resize} if isinstance(scorer, HttpReward) else {},
        )
    finally:
        watch.stop()
        if pool is not None:
            await pool.close()
        await scorer.close()


def _scorer(config: Config, task: Task, call: Mapping[str, Any] | None) -> CountedReward:
    """What scores; ``call`` None: the end of the agent is the reward."""
    if call is None:
        from orchestrator.agents.agent_manager import OutcomeReward

        return OutcomeReward()
    said: dict[str, Any] = {name: getattr(task, name, None) for name in ("played", "said", "scorers")}
    return HttpReward(tls=config.tls.files(), **said, **call)


async def serve(requests: int, replies: int, make_parts: MakeParts = real_parts) -> None:
    """Until the head closes the pipe."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb"))
    transport, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(replies, "wb"))
    send = _Frames(transport.write).send
    try:
        hello = parse_object(await _receive(reader))
        if hello["distribution"] != orchestrator.__version__:
            raise RunError(f"this is rl-coserve {orchestrator.__version__}, the head {hello['distribution']}")
        async with make_parts(hello, send) as parts:
            host = ShardHost(
                parts.make_manager, parts.reward, parts.lay, send, parts.seconds, parts.counters, parts.resize
            )
            send(_GREETING + b"{}")
            try:
                await _receive_all(reader, host.hear)
            finally:
                await host.close()
    except EOFError:
        return
    except ConfigError as error:
        said = {"field": error.field, "value": str(error.value), "fix": error.fix}
    except RunError as error:
        said = {"error": str(error)}
    send(_GREETING + json.dumps(said).encode())
    await asyncio.sleep(0.1)  # it is written


def main(
    make_parts: MakeParts = real_parts, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """A shard's process, until its pipe closes."""
    fork_under_watch()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(*take_pipes(), make_parts))
    sys.stderr.flush()
    os._exit(0)  # what an environment registered for the end of its process does not hold it up


if __name__ == "__main__":
    main()
