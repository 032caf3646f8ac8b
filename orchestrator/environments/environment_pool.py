"""EnvPool: environment instances that are started ahead, checked, renewed, replaced, and never left behind.

RollArt 8 (persistent sessions, exponential back-off) and the infra notes 4.2 (pre-warm, health check, automatic reset,
kill at a time limit). Guarantees:

* never more than ``size`` sessions exist, those that start or end included, and those excepted that could not be ended and
  were abandoned, which is counted; a session has one user at a time;
* what a user gets answered a health check after its last use; between two users it was recycled; one that misbehaved, hung,
  failed a check or grew too old is killed and replaced, never handed out again;
* starting that fails is tried again after exponentially growing pauses (seeded jitter), one at a time until it works; after
  ``start_tries`` failures in a row with no session alive the run ends with one RunError that says why;
* whoever waits, waits in order of arrival with a named reason; a user that is cancelled while it waits loses nothing;
* after ``close`` every session that was ever started has been killed.

Time is the event loop's only: the simulator runs this object on virtual time. What happens to a session happens in a task of
the pool, so that a cancelled user leaves nothing half done.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestrator.api import ConfigError, Environment, Observation, Prompt, RunError, StepResult, TrajectoryError
from orchestrator.environments.environment_session import EnvironmentBackend, EnvironmentSession, Waiting
from orchestrator.environments.environment_wire import THIRD_PARTY, error_text
from orchestrator.events import EventLog

State = Literal["starting", "ready", "checking", "busy", "recycling", "ending"]
COMING: tuple[State, ...] = ("starting", "checking", "recycling")  # may be ready soon
ALIVE: tuple[State, ...] = ("ready", "checking", "busy", "recycling")
FRESH = 1.0  # seconds for which an answer counts as a health check
DETAIL = 300  # characters of an error that go into an event


@dataclass(frozen=True)
class PoolSettings:
    """Times in seconds."""

    size: int  # sessions at most
    owner: str = "run"  # of the names of sessions
    warm: int = 0  # kept ready beyond those in use, while the size allows
    parallel_starts: int = 4
    start_timeout: float = 60.0
    start_tries: int = 8
    backoff_first: float = 1.0  # doubles with each failure
    backoff_limit: float = 60.0
    recycle_timeout: float = 10.0
    kill_timeout: float = 10.0
    ping_timeout: float = 5.0
    ping_every: float = 30.0  # of sessions that nobody uses
    idle: float = 300.0  # a ready session beyond `warm` ends when nobody used it for this long
    max_age: float = 3600.0
    max_episodes: int = 0  # 0: no limit
    seed: int = 0


@dataclass(eq=False)
class _Member:
    """One place of the pool."""

    name: str
    state: State
    born: float
    session: EnvironmentSession | None = None
    seen: float = 0.0  # when it answered last
    used: float = 0.0  # when it was last given back
    episodes: int = 0


@dataclass(eq=False)
class _Waiter:
    member: asyncio.Future[_Member]
    tell: Waiting
    since: float


@dataclass
class _Totals:
    """Since the start; ``replaced`` by cause."""

    started: int = 0
    start_failures: int = 0
    episodes: int = 0
    wait_seconds: float = 0.0
    replaced: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0


class PooledEnvironment:
    """A session on loan; implements :class:`orchestrator.api.Environment`. Of no use once it was given back."""

    def __init__(self, member: _Member, session: EnvironmentSession) -> None:
        self.version = session.version
        self.name = member.name
        self.member: _Member | None = member
        self._session = session

    async def reset(self, prompt: Prompt) -> Observation:
        return await self._mine().reset(prompt)

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        return await self._mine().step(action_ids)

    async def close(self) -> None:
        """Nothing: the pool decides, see :meth:`EnvPool.release`."""

    def _mine(self) -> EnvironmentSession:
        if self.member is None:
            raise TrajectoryError("environment_protocol", f"{self.name} was used after it was given back")
        return self._session


class EnvPool:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentSource`. ``open`` before use,
    ``close`` at the end."""

    def __init__(self, backend: EnvironmentBackend, settings: PoolSettings, events: EventLog) -> None:
        self._backend = backend
        self._settings = settings
        self._events = events
        self._random = random.Random(f"{settings.seed}/environment pool")
        self._members: dict[str, _Member] = {}
        self._count: Counter[State] = Counter()  # of the members' states
        self._ready: list[_Member] = []  # the one used last is taken first: the others may grow idle and go
        self._waiters: deque[_Waiter] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._totals = _Totals()
        self._numbers = 0
        self._failures = 0  # starts in a row
        self._told = ""  # what those who wait were told last
        self._paused = False  # between two tries to start
        self._pause: asyncio.TimerHandle | None = None
        self._broken: Exception | None = None
        self._closed = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the first session and begin to warm up. Raises ConfigError or RunError when none can be started."""
        await self._backend.open()
        self._spawn("environment pool: health", self._watch())
        await self.release(await self.acquire(lambda _: None), trusted=True)

    async def close(self) -> None:
        """Kill every session; what is being started is stopped. Idempotent."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._refuse(RunError("the environment pool was closed"))
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # done callbacks run on the next tick
        await asyncio.gather(*(self._kill(member) for member in list(self._members.values())))
        self._ready.clear()
        await self._backend.close()

    # -- what a user calls -------------------------------------------------------------------------------------------

    async def acquire(self, waiting: Waiting) -> PooledEnvironment:
        """A session for one episode, in order of asking. ``waiting`` is told what it waits for."""
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise RunError("the environment pool was closed")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), waiting, loop.time())
        self._waiters.append(waiter)
        waiting(self._told)
        self._pump()
        try:
            member = await waiter.member
        except asyncio.CancelledError:
            if waiter.member.done() and not waiter.member.cancelled() and waiter.member.exception() is None:
                self._offer(waiter.member.result())  # it was given one this very moment
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._pump()
            raise
        self._totals.wait_seconds += loop.time() - waiter.since
        self._totals.episodes += 1
        assert member.session is not None
        return PooledEnvironment(member, member.session)

    async def release(self, environment: Environment, trusted: bool) -> None:
        """See the protocol. Returns at once; recycling and killing go on in the pool."""
        assert isinstance(environment, PooledEnvironment)
        member, environment.member = environment.member, None
        if member is None or self._closed:
            return  # `close` kills it
        settings, now = self._settings, asyncio.get_running_loop().time()
        member.episodes += 1
        member.used = now
        if not trusted:
            self._end_member(member, "misbehaved")
        elif now - member.born >= settings.max_age:
            self._end_member(member, "age")
        elif self._surplus > 0:
            self._end_member(member, "size")
        elif settings.max_episodes and member.episodes >= settings.max_episodes:
            self._end_member(member, "episodes")
        else:
            self._set_state(member, "recycling")
            self._spawn(f"recycle {member.name}", self._call_member(member, "recycle"))
        self._pump()

    def resize(self, size: int) -> None:
        """See the protocol."""
        self._settings = replace(self._settings, size=size)
        while self._ready and self._surplus > 0:
            self._end_member(self._ready.pop(0), "size")
        self._pump()

    @property
    def _surplus(self) -> int:
        """Sessions beyond the size, those that end already left out."""
        return len(self._members) - self._count["ending"] - self._settings.size

    def stats(self) -> dict[str, Any]:
        """Now, and since the start."""
        return {
            "backend": self._backend.name,
            "size": self._settings.size,
            **{state: self._count[state] for state in ("starting", *ALIVE, "ending")},
            "waiting": len(self._waiters),
            "waiting_for": self._reason() if self._waiters else "",
            **vars(self._totals),
            "wait_seconds": round(self._totals.wait_seconds, 6),
            "replaced": dict(sorted(self._totals.replaced.items())),
            "versions": sorted(
                {member.session.version for member in self._members.values() if member.session is not None}
            ),
        }

    # -- the heart ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Move what can move: ready sessions to those who wait, and starts for what is missing."""
        if self._closed or self._broken is not None:
            return
        now = asyncio.get_running_loop().time()
        checking = self._count["checking"]
        while self._ready and len(self._waiters) > checking:
            member = self._ready.pop()
            if now - member.seen <= FRESH:
                self._offer(member)
            else:
                self._check(member)
                checking += 1
        coming = sum(self._count[state] for state in COMING)
        missing = len(self._waiters) + self._settings.warm - len(self._ready) - coming
        room = self._settings.size - len(self._members)
        parallel = 1 if self._failures else self._settings.parallel_starts
        allowed = 0 if self._paused else parallel - self._count["starting"]
        for _ in range(min(missing, room, allowed)):
            self._numbers += 1
            member = _Member(f"{self._settings.owner}-e{self._numbers:05d}", "starting", now)
            self._members[member.name] = member
            self._count["starting"] += 1
            self._spawn(f"start {member.name}", self._start(member))
        reason = self._reason()
        if reason != self._told:
            self._told = reason
            for waiter in self._waiters:
                waiter.tell(reason)

    def _offer(self, member: _Member) -> None:
        """A session is free and in order: to whoever waits longest."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.member.done():  # else it was cancelled and has not noticed yet
                self._set_state(member, "busy")
                waiter.member.set_result(member)
                return
        self._set_state(member, "ready")
        self._ready.append(member)

    def _check(self, member: _Member) -> None:
        self._set_state(member, "checking")
        self._spawn(f"check {member.name}", self._call_member(member, "ping"))

    def _end_member(self, member: _Member, cause: str) -> None:
        """Kill it; its place is free when it is gone."""
        self._set_state(member, "ending")
        self._totals.replaced[cause] += 1
        self._spawn(f"end {member.name}", self._kill(member))

    def _reason(self) -> str:
        if self._failures:
            failed = "once" if self._failures == 1 else f"{self._failures} times in a row"
            return f"an environment to start, which failed {failed}"
        if self._count["starting"]:
            return "an environment to start"
        if self._count["checking"] or self._count["recycling"]:
            return "an environment to be renewed"
        return "a free environment, all in use"

    def _set_state(self, member: _Member, state: State) -> None:
        self._count[member.state] -= 1
        self._count[state] += 1
        member.state = state

    def _forget(self, member: _Member) -> None:
        if self._members.pop(member.name, None) is not None:
            self._count[member.state] -= 1

    # -- what happens to one session, each in a task -----------------------------------------------------------------

    async def _start(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout) as limit:
                member.session = await self._backend.start(member.name)
        except ConfigError as error:
            self._forget(member)
            self._break(error)
            return
        except THIRD_PARTY as error:  # whatever it was, the next try may work
            self._forget(member)
            if _was_cancelled(error):
                raise
            detail = error_text(error)
            if isinstance(error, TimeoutError) and limit.expired():
                so_far = f"; {error.__cause__}" if str(error.__cause__ or "") else ""  # what a backend said of it
                detail = f"took over {self._settings.start_timeout:g} s{so_far}"
            self._start_failed(member.name, detail)
            return
        self._totals.started += 1
        member.born = member.seen = member.used = loop.time()
        if self._failures:
            self._events.emit("recovered", what="environment start", detail=f"after {self._failures} failures")
            self._failures = 0
            if self._pause is not None:
                self._pause.cancel()
            self._paused, self._pause = False, None
        self._offer(member)
        self._pump()

    def _start_failed(self, name: str, what: str) -> None:
        settings = self._settings
        self._totals.start_failures += 1
        self._record_replacement("environment_start", f"{name}: {what}")
        if self._paused:  # it was begun together with one that failed before it: one failure, not two
            return
        self._failures += 1
        if self._failures >= settings.start_tries and not any(self._count[state] for state in ALIVE):
            times = f"{self._failures} times in a row"
            self._break(RunError(f"no environment can be started ({self._backend.name}), failed {times}: {what}"))
            return
        pause = min(settings.backoff_first * 2.0 ** min(self._failures - 1, 30), settings.backoff_limit)
        self._paused = True
        self._pause = asyncio.get_running_loop().call_later(pause * self._random.uniform(0.5, 1.0), self._try_again)
        self._pump()  # tells those who wait

    def _try_again(self) -> None:
        self._paused, self._pause = False, None
        self._pump()

    async def _call_member(self, member: _Member, what: Literal["recycle", "ping"]) -> None:
        """The session is free again when it answers, and replaced when it does not."""
        session, settings = member.session, self._settings
        assert session is not None
        limit = settings.ping_timeout if what == "ping" else settings.recycle_timeout
        try:
            async with asyncio.timeout(limit) as slow:
                await (session.ping() if what == "ping" else session.recycle())
        except THIRD_PARTY as error:  # whatever is wrong with it
            if _was_cancelled(error):
                raise
            detail = f"no answer within {limit:g} s" if slow.expired() else error_text(error)
            self._record_replacement(f"environment_{what}", f"{member.name}: {detail}")
            self._end_member(member, what)
        else:
            member.seen = asyncio.get_running_loop().time()
            self._offer(member)
        self._pump()

    async def _kill(self, member: _Member) -> None:
        if member.session is not None:
            try:
                async with asyncio.timeout(self._settings.kill_timeout):
                    await member.session.kill()
            except TimeoutError:
                self._totals.abandoned += 1
                self._record_replacement("environment_close", f"{member.name}: hung; abandoned")
            except THIRD_PARTY as error:
                if _was_cancelled(error):
                    raise
                self._record_replacement("environment_close", f"{member.name}: {error_text(error)}")
        self._forget(member)
        self._pump()

    async def _watch(self) -> None:
        """Checks those that nobody uses, and ends the old and the idle."""
        settings = self._settings
        while True:
            await asyncio.sleep(settings.ping_every)
            now = asyncio.get_running_loop().time()
            spare = len(self._ready) - settings.warm
            for member in list(self._ready):  # those used longest ago first
                if now - member.born >= settings.max_age:
                    self._ready.remove(member)
                    self._end_member(member, "age")
                elif spare > 0 and now - member.used >= settings.idle:
                    self._ready.remove(member)
                    self._end_member(member, "idle")
                    spare -= 1
                elif now - member.seen >= settings.ping_every:
                    self._ready.remove(member)
                    self._check(member)
            self._pump()

    # -- when something goes wrong -----------------------------------------------------------------------------------

    def _record_replacement(self, cause: str, detail: str) -> None:
        self._events.emit("fault", what=cause.replace("_", " "), cause=cause, detail=detail[:DETAIL])

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            self._broken = error
        self._refuse(self._broken)

    def _refuse(self, error: Exception) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.member.done():
                waiter.member.set_exception(error)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._done(name))

    def _done(self, name: str) -> Callable[[asyncio.Task[None]], None]:
        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(name) is task:
                del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                self._break(RunError(f"the environment pool failed in {name}: {error!r}"))

        return done


def _was_cancelled(error: BaseException) -> bool:
    """Whether the pool cancelled this task; code of others may raise CancelledError too."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
