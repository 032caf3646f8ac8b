"""The head's end: episodes that are played and scored in shards look to the loop as if they were played here.

:class:`ShardManagers` stands where one environment manager, the reward and the shards of finished trajectories stand in a run
without shards. The head keeps what must be one: ledger, gate, buffer, router, and who is too stale.

Guarantees: an episode that began in a shard ends here exactly once, with what there is of it: as the shard says, or, where that
died, fell silent or said what cannot be, as failed with the cause ``shard_lost`` and the turns that the head has seen; its
requests are taken from the workers then. Whoever is cancelled meanwhile returns when the shard has given the environment back, or
is gone. Staleness is the head's to say: a turn of a trajectory that is too old is not served. A shard that dies is started again,
``restarts`` times within ``window`` seconds; then it is gone, which is an alarm, and the others get its share of environments and
calls; when none is left, the run ends.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from orchestrator.api import (
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    RunError,
    Sampling,
    Score,
    TokenSequence,
    Trajectory,
    TrajectoryError,
    Turn,
)
from orchestrator.components import ManagerParts, ShardLink, Shards, ShardStarter
from orchestrator.envs import SHARD_LOST, Episode, StaleTrajectory, TurnServer
from orchestrator.events import EventLog
from orchestrator.manager_shards import shard_messages as messages
from orchestrator.manager_shards.shard_messages import EpisodeEnd
from orchestrator.shards.trajectory_shard import Column
from orchestrator.transfer.turns import HeldContexts, decode_turns, encode_completions

_HELD_TOKENS = 1 << 31  # of a shard's contexts: the episodes under way have them in any case
_EVENTS = ("fault", "recovered", "alarm")  # of a shard's environments and of its loop
_PLAYED = EpisodeEnd("", "played")


@dataclass(eq=False)
class _Flight:
    """An episode that a shard has. ``asked``: the context that its last request had, ``turn_times``: when that was asked and
    answered."""

    episode: Episode
    shard: _Shard
    answer: asyncio.Future[EpisodeEnd]
    called_off: bool = False
    requests: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    asked: TokenSequence = field(default_factory=TokenSequence)
    turn_times: tuple[float, float] | None = None


@dataclass(eq=False)
class _Shard:
    """``link`` None: it is not up. ``removed``: it will not be."""

    index: int
    starter: ShardStarter
    link: ShardLink | None = None
    flights: dict[str, _Flight] = field(default_factory=dict)
    held: HeldContexts = field(default_factory=lambda: HeldContexts(_HELD_TOKENS))
    heard_at: float = 0.0
    counters: Mapping[str, Any] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    failed: str = ""
    removed: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"shard {self.index}"


class ShardManagers:
    """An :class:`~orchestrator.envs.EpisodePlayer`, a :class:`~orchestrator.api.RewardFunction` and
    :class:`~orchestrator.components.Shards`, in one, as an episode stays in its shard until it is scored. :meth:`run` is to run
    beside the loop. ``parts``: the shards, and how what they laid becomes turns; ``shards``: those of a run without shards;
    ``is_stale(first_version)``; ``fail(error)`` ends the run. ``silence``: seconds without a message after which a shard is taken
    for dead; ``patience``: with one that is to end an episode."""

    limited = True  # the shard limits a score's time

    def __init__(
        self,
        parts: ManagerParts,
        proxy: TurnServer,
        events: EventLog,
        shards: Shards,
        *,
        is_stale: Callable[[int], bool],
        fail: Callable[[BaseException], None],
        restarts: int,
        window: float,
        silence: float,
        patience: float,
    ) -> None:
        self._shards = [_Shard(index, starter) for index, starter in enumerate(parts.starters)]
        self._adopt, self._shared = parts.adopt, parts.shared
        self._proxy, self._events, self._kept = proxy, events, shards
        self._is_stale, self._fail = is_stale, fail
        self._restarts, self._window, self._silence, self._patience = restarts, window, silence, patience
        self._flights: dict[str, _Flight] = {}
        self._scored: dict[str, tuple[tuple[Turn, ...], float]] = {}  # until the loop has them
        self._up = asyncio.Event()  # a shard is
        self._sizes: dict[str, int] = {}  # of what changed since the shards were started, for all of them together
        self.on_turn: Callable[[Episode, float, float, float, float], None] | None = None

    # -- what the loop asks ------------------------------------------------------------------------------------------

    @property
    def source(self) -> ShardManagers:
        """Whose environments there are."""
        return self

    def resize(self, environments: int) -> None:
        """See :class:`~orchestrator.environments.environment_session.EnvironmentSource`."""
        self.share("environments", environments)

    def share(self, what: str, number: int) -> None:
        """So many of this for all shards together, from now on."""
        self._sizes[what] = number
        for shard in self._shards:
            self._tell_sizes(shard)

    def stats(self) -> dict[str, Any]:
        """The counters of all shards' environments, added up."""
        return self.counted("environments")

    def counted(self, what: str) -> dict[str, Any]:
        """Counters of this kind that shards tell of, added up as far as they are numbers; of others one shard's."""
        total: dict[str, Any] = {}
        for shard in self._shards:
            if isinstance(said := shard.counters.get(what), dict):
                total = _added(total, said)
        return total

    async def play(self, episode: Episode, sampling: Sampling) -> None:
        """See :class:`~orchestrator.envs.EpisodePlayer`."""
        episode.waiting_for = "a shard"
        shard = await self._choose()
        flight = _Flight(episode, shard, asyncio.get_running_loop().create_future())
        self._flights[episode.id] = shard.flights[episode.id] = flight
        episode.waiting_for = "environment reset"
        prompt, sampled = messages.prompt_row(episode.prompt), messages.sampling_row(sampling)
        self._send(
            shard,
            messages.pack(
                messages.BEGIN, episode.id, episode.group_id, prompt, sampled, episode.started_at, episode.heldout
            ),
        )
        _raise_for(await self._answer_of(flight))

    async def score(self, trajectory: Trajectory) -> float:
        """See :class:`~orchestrator.api.RewardFunction`: of an episode that was played here, and by the shard that has it."""
        flight = self._flights.get(trajectory.id)
        if flight is None:
            raise TrajectoryError(SHARD_LOST, "it was gone before the score was asked for")
        flight.answer = asyncio.get_running_loop().create_future()
        self._send(flight.shard, messages.pack(messages.SCORE, trajectory.id, trajectory.finished_at))
        end = await self._answer_of(flight)
        _raise_for(end)
        if end.reward is None:
            raise TrajectoryError(SHARD_LOST, "a score without a reward")
        return Score(end.reward, end.metrics)

    def finish(self, trajectory: Trajectory) -> Trajectory:
        """See :class:`~orchestrator.components.Shards`."""
        return self._kept.finish(self._with_numbers(trajectory))

    async def finish_in_slices(self, trajectory: Trajectory) -> Trajectory:
        """See :class:`~orchestrator.components.Shards`."""
        return await self._kept.finish_in_slices(self._with_numbers(trajectory))

    def _with_numbers(self, trajectory: Trajectory) -> Trajectory:
        """One that was scored has its numbers where its shard laid them."""
        if (found := self._scored.pop(trajectory.id, None)) is not None:
            return replace(trajectory, turns=found[0], scored_at=found[1])
        return trajectory

    def lost(self, trajectories: Iterable[Trajectory]) -> list[str]:
        """See :class:`~orchestrator.components.Shards`."""
        return self._kept.lost(trajectories)

    async def _choose(self) -> _Shard:
        """The one with the fewest episodes."""
        while True:
            if up := [shard for shard in self._shards if shard.link is not None]:
                return min(up, key=lambda shard: len(shard.flights))
            self._up.clear()
            await self._up.wait()

    async def _answer_of(self, flight: _Flight) -> EpisodeEnd:
        """That it is played, or how it ended. Cancelled, it is called off first."""
        try:
            return await asyncio.shield(flight.answer)
        except asyncio.CancelledError:
            if flight.episode.id in flight.shard.flights:
                await self._call_off(flight)
            self._scored.pop(flight.episode.id, None)  # it was, in this moment, and nobody will ask for it
            raise

    async def _call_off(self, flight: _Flight) -> None:
        flight.called_off = True
        if flight.answer.done():  # it is played
            flight.answer = asyncio.get_running_loop().create_future()
        self._send(flight.shard, messages.pack(messages.END, flight.episode.id))
        loop, late = asyncio.get_running_loop(), f"it did not end an episode within {self._patience:g} s"
        limit = loop.call_later(self._patience, self._lose, flight.shard, flight.shard.link, late)
        while not flight.answer.done():
            with suppress(asyncio.CancelledError):  # we are already
                await asyncio.shield(flight.answer)
        limit.cancel()

    # -- what shards say ---------------------------------------------------------------------------------------------

    def _hear(self, shard: _Shard, message: bytes) -> None:
        """A message of a shard. What cannot be is the shard's end."""
        shard.heard_at = asyncio.get_running_loop().time()
        try:
            kind, fields = messages.unpack(message)
            if kind == messages.TURNS:
                self._take_turns(shard, *fields)
            elif kind == messages.DROP:
                self._drop(shard, fields[0])
            elif kind == messages.PLAYED:
                self._played(shard, *fields)
            elif kind == messages.DONE:
                self._end(shard, EpisodeEnd.of(fields))
            elif kind == messages.TOLD:
                self._note(messages.told(fields[0]))
            elif kind == messages.ALIVE:
                shard.counters = messages.told(fields[0])
            else:
                raise ValueError(f"a {chr(kind)} message is not for the head")
        except (ValueError, CommandError) as error:
            self._lose(shard, shard.link, f"it said what cannot be: {error}")

    def _take_turns(self, shard: _Shard, number: int, data: bytes) -> None:
        requests, digests = shard.held.take(decode_turns(data))
        self._send(shard, messages.pack(messages.TAKEN, number, digests))
        for request in requests:
            flight = shard.flights.get(request.trajectory_id)
            if flight is None:  # it has ended
                shard.held.forget(request.trajectory_id)
                continue
            if request.request_id in flight.requests:
                continue
            turns = flight.episode.turns
            if turns and self._is_stale(turns[0].versions[0][0]):
                self._send(shard, messages.pack(messages.STALE, request.request_id))
                continue
            self._end_turn(flight)
            task = asyncio.create_task(self._serve(flight, request), name=f"turn {request.request_id}")
            flight.requests[request.request_id] = task
            task.add_done_callback(partial(_forget, flight, request.request_id))

    async def _serve(self, flight: _Flight, request: GenerationRequest) -> None:
        """One turn. What it saw and said is noted: it is all that is left when the shard dies."""
        episode, loop = flight.episode, asyncio.get_running_loop()
        asked = loop.time()
        episode.waiting_for, episode.context_tokens = "generation", len(request.token_ids)
        try:
            completion = await self._proxy.generate(request)
        except Exception as error:  # noqa: BLE001  nobody awaits this task: the run ends with what it raised
            self._fail(error if isinstance(error, RunError) else RunError(f"turn {request.request_id}: {error!r}"))
            return
        episode.waiting_for = "environment step"
        called_back = completion.finish_reason == "abort" and completion.versions
        if called_back and self._is_stale(completion.versions[0][0]):
            self._send(flight.shard, messages.pack(messages.STALE, request.request_id))
            return
        episode.context_tokens += len(completion.token_ids)
        episode.requests += 1
        if completion.finish_reason not in ("error", "abort") and completion.token_ids:
            context = TokenSequence.of(request.token_ids)
            known = len(flight.asked) + len(episode.turns[-1].action_ids) if episode.turns else 0
            new = context[known:] if context.begins_with(flight.asked) else ()
            told = _columns(new, completion)
            episode.turns.append(Turn(*told, completion.versions, generate_seconds=round(loop.time() - asked, 6)))
            flight.asked, flight.turn_times = context, (asked, loop.time())
        self._send(flight.shard, messages.pack(messages.ANSWER, encode_completions(0, [completion])))

    def _end_turn(self, flight: _Flight) -> None:
        """Its environment has stepped."""
        times, flight.turn_times = flight.turn_times, None
        if times is not None and self.on_turn is not None:
            self.on_turn(flight.episode, *times, times[1], asyncio.get_running_loop().time())

    def _drop(self, shard: _Shard, request_id: str) -> None:
        for flight in filter(None, [shard.flights.get(request_id.rpartition("/")[0])]):
            if (task := flight.requests.get(request_id)) is not None:
                task.cancel()

    def _played(self, shard: _Shard, name: str, env_version: str, truncated: bool) -> None:
        flight = shard.flights.get(name)
        if flight is None or flight.called_off or flight.answer.done():
            return
        self._end_turn(flight)
        flight.episode.env_version, flight.episode.truncated = env_version, truncated
        flight.answer.set_result(_PLAYED)

    def _end(self, shard: _Shard, end: EpisodeEnd) -> None:
        flight = shard.flights.pop(end.id, None)
        if flight is None:
            raise ValueError(f"episode {end.id} has ended, and was never begun")
        episode = flight.episode
        if end.laid is not None:
            try:
                turns = self._adopt(end.laid)
            except RunError as error:
                end = EpisodeEnd(end.id, "failed", SHARD_LOST, str(error))
            else:
                episode.turns = list(turns)
                if end.outcome == "scored" and not flight.called_off:
                    self._scored[end.id] = turns, end.scored_at
        episode.env_version, episode.truncated = end.env_version or episode.env_version, end.truncated
        self._close(flight, end)

    def _close(self, flight: _Flight, end: EpisodeEnd) -> None:
        self._flights.pop(flight.episode.id, None)
        for task in list(flight.requests.values()):
            task.cancel()
        flight.shard.held.forget(flight.episode.id)
        if not flight.answer.done():
            flight.answer.set_result(end)

    def _note(self, record: Mapping[str, Any]) -> None:
        """An event of a shard's environments."""
        fields = {name: value for name, value in record.items() if name not in ("kind", "t")}
        if record.get("kind") not in _EVENTS or not all(type(value) is str for value in fields.values()):
            raise ValueError(f"no event of environments: {record!r:.200}")
        self._events.emit(record["kind"], **fields)

    def _send(self, shard: _Shard, message: bytes) -> None:
        if shard.link is not None:
            shard.link.send(message)

    def _tell_sizes(self, shard: _Shard) -> None:
        left = sum(not other.removed for other in self._shards)
        for what, number in self._sizes.items():
            self._send(shard, messages.pack(messages.RESIZE, what, math.ceil(number / max(left, 1))))

    # -- their lives -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the shards, and again those that die. Until cancelled: then they stay as they are, for their owner to close."""
        await asyncio.gather(*(self._keep(shard) for shard in self._shards))

    async def _keep(self, shard: _Shard) -> None:
        loop, starts = asyncio.get_running_loop(), deque[float]()
        while True:
            while starts and starts[0] < loop.time() - self._window:
                starts.popleft()
            if len(starts) > self._restarts:
                break
            again, begun = bool(starts) or bool(shard.failed), loop.time()
            starts.append(begun)
            await self._start(shard, again)
            if again and shard.link is not None:
                detail = f"restart {len(starts) - 1}, {loop.time() - begun:.1f} s"
                self._events.emit("recovered", what=shard.name, detail=detail)
            while shard.link is not None:
                shard.gone.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(shard.heard_at + self._silence):
                        await shard.gone.wait()
                if shard.link is not None and loop.time() >= shard.heard_at + self._silence:
                    self._lose(shard, shard.link, f"it said nothing for {self._silence:g} s")
        shard.removed = True
        why = f"died {len(starts)} times: {shard.failed[:300]}"
        left = [other for other in self._shards if not other.removed]
        if not left:
            self._fail(RunError(f"no rollout shard left: {shard.name} {why}"))
            return
        self._sizes = {**self._shared, **self._sizes}
        for other in left:
            self._tell_sizes(other)
        detail = f"{shard.name} is gone for the rest of the run; {len(left)} left, which get its environments: it {why}"
        self._events.emit("alarm", what="shard", detail=detail[:300])

    async def _start(self, shard: _Shard, again: bool) -> None:
        """Bring it up, or say why it did not come. Raises ConfigError for what its first start says."""
        made: list[ShardLink] = []
        early: list[str] = []  # it may be gone before we have it

        def heard(message: bytes) -> None:
            if made and shard.link is made[0]:  # of an earlier one, on its way when that was lost, nothing counts
                self._hear(shard, message)

        def lost(why: str) -> None:
            early.append(why)
            if made:
                self._lose(shard, made[0], why)

        try:
            made.append(await shard.starter.start(heard, lost))
        except (ConfigError, RunError, OSError) as error:
            if isinstance(error, ConfigError) and not again:
                raise
            early.append(str(error))
        if early:
            shard.failed = early[0]
            self._events.emit("fault", what=shard.name, cause="shard", detail=shard.failed[:300])
            return
        shard.link, shard.held, shard.heard_at = made[0], HeldContexts(_HELD_TOKENS), asyncio.get_running_loop().time()
        self._tell_sizes(shard)
        self._up.set()

    def _lose(self, shard: _Shard, link: ShardLink | None, why: str) -> None:
        """It is gone, or as good as that: so are its episodes."""
        if link is None or shard.link is not link:
            return
        shard.link, shard.failed, shard.counters = None, why, {}
        link.kill()
        flights, shard.flights = list(shard.flights.values()), {}
        detail = f"{why}; {len(flights)} trajectories end with it"
        self._events.emit("fault", what=shard.name, cause="shard", detail=detail[-300:])
        for flight in flights:
            self._close(flight, EpisodeEnd(flight.episode.id, "failed", SHARD_LOST, f"{shard.name}: {why}"))
        shard.gone.set()


def _columns(observation: Sequence[int], completion: Completion) -> tuple[Any, Any, Any]:
    """What is kept of a turn while it is under way: Python's own numbers take five times the memory, and nobody may ever look."""
    tokens = Column(np.array(observation, np.int32)), Column(np.array(completion.token_ids, np.int32))
    return *tokens, Column(np.array(completion.logprobs, np.float64))


def _forget(flight: _Flight, request_id: str, _: asyncio.Task[None]) -> None:
    flight.requests.pop(request_id, None)


def _added(one: Any, other: Any) -> Any:
    """Counters of two shards as those of one: numbers add up, of lists what is in either, of words those of the first."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [*one, *(name for name in other if name not in one)]
        return {name: _added(one.get(name), other.get(name)) for name in names}
    if type(one) in (int, float) and type(other) in (int, float):
        return round(one + other, 6)
    if isinstance(one, list) and isinstance(other, list):
        return sorted(dict.fromkeys([*one, *other]), key=str)
    return one or other


def _raise_for(end: EpisodeEnd) -> None:
    """What the end of an episode is to the loop."""
    match end.outcome:
        case "stale":
            raise StaleTrajectory
        case "failed" | "cancelled":
            raise TrajectoryError(end.cause or "cancelled", end.detail)
        case "fatal":
            raise RunError(end.cause)
