"""A shard's end: plays and scores the episodes that the head hands it, with an environment manager of its own.

Guarantees: every BEGIN is answered by exactly one DONE, whatever happens to the episode (:class:`~orchestrator.manager_shards.\
shard_messages.EpisodeEnd`); one that is called off is ended, its environment given back, before that; contexts go to the head as
turn sessions (:mod:`orchestrator.transfer.turns`), so that a turn brings only what is new in it; of a trajectory that has ended
only the place of its numbers goes there, where ``lay`` puts them into a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import (
    Completion,
    GenerationRequest,
    Prompt,
    RetryableError,
    RewardFunction,
    RunError,
    Sampling,
    Score,
    Trajectory,
    TrajectoryError,
)
from orchestrator.envs import SHARD_LOST, EnvManager, Episode, StaleTrajectory, reward_of_episode
from orchestrator.manager_shards import shard_messages as messages
from orchestrator.manager_shards.shard_messages import EpisodeEnd
from orchestrator.shards.shard_folder import LaidTrajectory
from orchestrator.transfer.turns import ContextSession, decode_completions

ALIVE_SECONDS = 1.0  # between two signs of life

Lay = Callable[[Trajectory], LaidTrajectory]


class HeadProxy:
    """The proxy as managers see it in a shard (:class:`orchestrator.envs.TurnServer`). Turns of one tick travel together."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._session = ContextSession("the head", self._carry)
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._outbox: dict[str, GenerationRequest] = {}
        self._taken: dict[int, asyncio.Future[Sequence[object]]] = {}
        self._number = 0
        self._wake = asyncio.Event()
        self._sender = asyncio.create_task(self._send_turns(), name="turns to the head")

    async def generate(self, request: GenerationRequest) -> Completion:
        """See :class:`orchestrator.envs.TurnServer`. Raises StaleTrajectory where the head finds it too old."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        self._outbox[request.request_id] = request
        self._wake.set()
        try:
            return await answer
        finally:
            del self._waiting[request.request_id]
            if self._outbox.pop(request.request_id, None) is None and answer.cancelled():
                self._send(messages.pack(messages.DROP, request.request_id))

    def note_fault(self, what: str, detail: str) -> None:
        """See :class:`orchestrator.envs.TurnServer`."""
        fault = {"kind": "fault", "what": what, "cause": what.split(" ")[0], "detail": detail[:300]}
        self._send(messages.tell(messages.TOLD, fault))

    def forget(self, trajectory_id: str) -> None:
        """It has ended."""
        self._session.forget(trajectory_id)

    async def close(self) -> None:
        """Nothing is sent any more."""
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)

    def take(self, number: int, digests: Sequence[object]) -> None:
        """The head has these turns."""
        if (waiting := self._taken.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(digests)

    def answer(self, completions: Sequence[Completion]) -> None:
        """Those that still wait get theirs."""
        for completion in completions:
            waiting = self._waiting.get(completion.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(completion)

    def refuse(self, request_id: str, error: Exception) -> None:
        """It is not served."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    async def _carry(self, message: bytes) -> Sequence[object]:
        self._number += 1
        taken: asyncio.Future[Sequence[object]] = asyncio.get_running_loop().create_future()
        self._taken[self._number] = taken
        self._send(messages.pack(messages.TURNS, self._number, message))
        return await taken

    async def _send_turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # let the rest of this tick join the message
            requests, self._outbox = list(self._outbox.values()), {}
            try:
                await self._session.add(requests)
            except (RetryableError, ValueError) as error:
                for request in requests:
                    self.refuse(request.request_id, TrajectoryError(SHARD_LOST, str(error)))


@dataclass(eq=False)
class _Run:
    """One episode. ``task``: what is done with it now; ``called_off``: by the head."""

    episode: Episode
    task: asyncio.Task[None] | None = None
    called_off: bool = False


def _cancelled(run: _Run) -> tuple[str, str]:
    """Outcome and cause."""
    return ("cancelled", "") if run.called_off else ("failed", "cancelled")


class ShardHost:
    """``make_manager(proxy)``: what plays; ``lay``: where the numbers of one that has ended go; ``send``: a message to the head;
    ``seconds``: for a score of a reward without limits of its own; ``counters``: what the head is told of this process;
    ``resize``: what may have another size, beside the environments."""

    def __init__(
        self,
        make_manager: Callable[[HeadProxy], EnvManager],
        reward: RewardFunction,
        lay: Lay,
        send: Callable[[bytes], None],
        seconds: float,
        counters: Callable[[], Mapping[str, Any]] = dict,
        resize: Mapping[str, Callable[[int], None]] | None = None,
    ) -> None:
        self._send = send
        self._proxy = HeadProxy(send)
        self._manager = make_manager(self._proxy)
        self._reward, self._lay, self._seconds, self._counters = reward, lay, seconds, counters
        self._resize = {"environments": self._manager.source.resize, **(resize or {})}
        self._runs: dict[str, _Run] = {}
        self._beat = asyncio.create_task(self._say_alive(), name="signs of life")

    def hear(self, message: bytes) -> None:
        """A message of the head. Raises ValueError for what is none."""
        kind, fields = messages.unpack(message)
        if kind == messages.ANSWER:
            self._proxy.answer(decode_completions(fields[0])[1])
        elif kind == messages.TAKEN:
            self._proxy.take(*fields)
        elif kind == messages.BEGIN:
            self._begin(*fields)
        elif kind == messages.SCORE:
            self._score(*fields)
        elif kind == messages.END:
            self._call_off(fields[0])
        elif kind == messages.STALE:
            self._proxy.refuse(fields[0], StaleTrajectory())
        elif kind == messages.RESIZE:
            if (resize := self._resize.get(fields[0])) is not None:
                resize(fields[1])
        else:
            raise ValueError(f"a {chr(kind)} message is not for a shard")

    async def close(self) -> None:
        """End every episode; nothing is said of them."""
        self._beat.cancel()
        self._send = lambda message: None
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._beat, *tasks, return_exceptions=True)
        await self._proxy.close()

    def _begin(
        self, name: str, group: str, prompt: Sequence[Any], sampling: Sequence[Any], at: float, heldout: bool
    ) -> None:
        if name in self._runs:
            raise ValueError(f"episode {name} was begun twice")
        run = self._runs[name] = _Run(Episode(name, group, Prompt(*prompt), at, heldout=heldout))
        self._start(run, self._play(run, messages.sampling_of(sampling)))

    def _score(self, name: str, finished: float) -> None:
        if (run := self._runs.get(name)) is not None:
            self._start(run, self._scored(run, finished))

    def _call_off(self, name: str) -> None:
        run = self._runs.get(name)
        if run is None:  # its end is on the way
            return
        run.called_off = True
        if run.task is not None and not run.task.done():
            run.task.cancel()
        else:
            self._end(run, "cancelled")

    def _start(self, run: _Run, work: Coroutine[Any, Any, None]) -> None:
        task = run.task = asyncio.create_task(self._until_ended(run, work), name=f"trajectory {run.episode.id}")

        def ended(_: asyncio.Task[None]) -> None:
            work.close()
            if task.cancelled():  # before it began
                self._end(run, *_cancelled(run))

        task.add_done_callback(ended)

    async def _until_ended(self, run: _Run, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StaleTrajectory:
            self._end(run, "stale")
        except TrajectoryError as error:
            self._end(run, "failed", error.cause, error.detail)
        except asyncio.CancelledError:
            self._end(run, *_cancelled(run))
        except RunError as error:
            self._end(run, "fatal", str(error))
        except Exception as error:  # noqa: BLE001  the border of a process: everything is said to the other side
            self._end(run, "fatal", f"trajectory {run.episode.id}: {error!r}")

    async def _play(self, run: _Run, sampling: Sampling) -> None:
        episode = run.episode
        await self._manager.play(episode, sampling)
        if run.called_off:
            return self._end(run, "cancelled")
        self._send(messages.pack(messages.PLAYED, episode.id, episode.env_version, episode.truncated))

    async def _scored(self, run: _Run, finished: float) -> None:
        episode, loop = run.episode, asyncio.get_running_loop()
        begun = loop.time()
        reward = await reward_of_episode(self._reward, episode, finished, self._seconds)
        at = round(finished + loop.time() - begun, 6)
        self._end(run, "scored", finished=finished, reward=reward, at=at)

    def _end(
        self,
        run: _Run,
        outcome: str,
        cause: str = "",
        detail: str = "",
        *,
        finished: float = 0.0,
        reward: float | None = None,
        at: float = 0.0,
    ) -> None:
        episode = run.episode
        if self._runs.pop(episode.id, None) is None:
            return
        self._proxy.forget(episode.id)
        laid = None
        if episode.turns and not episode.heldout:
            try:
                laid = self._lay(episode.trajectory(finished, reward=reward, scored_at=at))
            except RunError as error:
                outcome, cause, detail = "fatal", str(error), ""
        metrics = reward.metrics if isinstance(reward, Score) else ()
        rest = episode.env_version, episode.truncated, None if reward is None else float(reward), at, metrics, laid
        self._send(EpisodeEnd(episode.id, outcome, cause, detail, *rest).message())

    async def _say_alive(self) -> None:
        while True:
            self._send(messages.tell(messages.ALIVE, self._counters()))
            await asyncio.sleep(ALIVE_SECONDS)
