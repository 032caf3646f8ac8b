"""EnvPool: environment instances that are started ahead, checked, renewed, replaced, and never left behind.

RollArt 8 (persistent sessions, exponential back-off) and the infra notes 4.2 (pre-warm, health check, automatic reset,
kill at a time limit). Where a task says what a prompt's environment begins from (a *template*: an image, a repository), the
sessions of each are kept apart, within one size. Guarantees:

* never more than ``size`` sessions exist, those that start or end included, and those excepted that could not be ended and
  were abandoned, which is counted; a session has one user at a time;
* what a user gets answered a health check after its last use; between two users it was recycled; one that misbehaved, hung,
  failed a check or grew too old is killed and replaced, never handed out again;
* a template whose start fails is tried again after exponentially growing pauses (seeded jitter), one at a time until it works,
  and holds up no other; after ``start_tries`` failures in a row with none of its sessions alive, or at once where the start
  says that no try will work (``environment_template``, a ConfigError), those who wait for it get a TrajectoryError that says
  why; where all prompts begin from the same, the run ends with one RunError instead, or with a ConfigError before any has
  started, if that is what the first starts say twice in a row: one alone may be of that environment;
* whoever waits, waits in order of arrival with a named reason; a user that is cancelled while it waits loses nothing; of a full
  pool the session that was idle longest makes room for another template, and so does one that is given back when somebody who
  waits for another has waited longer;
* those that are kept ready are shared out over templates as these were asked for lately;
* after ``close`` every session that was ever started has been killed.

Time is the event loop's only: the simulator runs this object on virtual time. What happens to a session happens in a task of
the pool, so that a cancelled user leaves nothing half done. A change costs what changed and the logarithm of how many templates
wait, however many these are.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestrator.api import (
    ConfigError,
    Environment,
    EnvironmentTemplate,
    Observation,
    Prompt,
    RunError,
    StepResult,
    TrajectoryError,
)
from orchestrator.api.errors import shown
from orchestrator.environments.environment_session import EnvironmentBackend, EnvironmentSession, Waiting
from orchestrator.environments.environment_wire import THIRD_PARTY, error_text
from orchestrator.events import EventLog

State = Literal["starting", "ready", "checking", "busy", "recycling", "ending"]
COMING: tuple[State, ...] = ("starting", "checking", "recycling")  # may be ready soon
ALIVE: tuple[State, ...] = ("ready", "checking", "busy", "recycling")
FRESH = 1.0  # seconds for which an answer counts as a health check
DETAIL = 300  # characters of an error that go into an event
REFUSALS = 2  # first starts in a row that say that the config is wrong: then it is
RECENT = 64  # episodes that demand is counted over
STARTS = 32  # after so many it is known how long one takes
NO_TEMPLATE = "environment_template"  # the cause where a prompt's image or repository cannot be had
TemplateOf = Callable[[Prompt], EnvironmentTemplate]
_Entry = tuple[float, int, int]  # since when somebody waits, in which order, and of this entry alone


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
class _Shelf:
    """The sessions of one template, and who waits for one."""

    template: EnvironmentTemplate
    count: Counter[State] = field(default_factory=Counter)  # of its members' states
    ready: list[_Member] = field(
        default_factory=list
    )  # the one used last is taken first: the others may grow idle and go
    waiters: deque[_Waiter] = field(default_factory=deque)
    number: int = 0  # in order of when somebody began to wait
    queued: _Entry | None = None  # among those that may start
    recent: int = 0  # of the last episodes of the pool
    failures: int = 0  # starts in a row
    refusals: int = 0  # of them those in a row that a ConfigError ended
    told: str = ""  # what those who wait were told last
    paused: bool = False  # between two tries to start
    pause: asyncio.TimerHandle | None = None

    def missing(self, warm: int) -> int:
        """Sessions to start, for those who wait and ``warm`` beyond."""
        return len(self.waiters) + warm - len(self.ready) - sum(self.count[state] for state in COMING)

    def room(self, parallel: int) -> int:
        """How many may start now."""
        return 0 if self.paused else (1 if self.failures else parallel) - self.count["starting"]

    def rank(self) -> tuple[float, int]:
        """The lower, the longer somebody waits; nobody does: infinite."""
        return (self.waiters[0].since, self.number) if self.waiters else (math.inf, 0)

    def reason(self) -> str:
        """What those who wait wait for."""
        if self.failures:
            failed = "once" if self.failures == 1 else f"{self.failures} times in a row"
            return f"an environment to start, which failed {failed}"
        if self.count["starting"]:
            return "an environment to start"
        if self.count["checking"] or self.count["recycling"]:
            return "an environment to be renewed"
        return "a free environment, all in use"

    def end_pause(self) -> None:
        """A start may be tried."""
        if self.pause is not None:
            self.pause.cancel()
        self.paused, self.pause = False, None


@dataclass(eq=False)
class _Member:
    """One place of the pool."""

    name: str
    shelf: _Shelf
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
    ``close`` at the end. ``template_of``: what a prompt's environment begins from; None: all from the same."""

    def __init__(
        self,
        backend: EnvironmentBackend,
        settings: PoolSettings,
        events: EventLog,
        template_of: TemplateOf | None = None,
    ) -> None:
        self._backend = backend
        self._template_of = template_of
        self._settings = settings
        self._events = events
        self._random = random.Random(f"{settings.seed}/environment pool")
        self._members: dict[str, _Member] = {}
        self._count: Counter[State] = Counter()  # of the members' states
        self._shelves: dict[EnvironmentTemplate, _Shelf] = {}
        self._waiting: dict[_Shelf, None] = {}  # those that somebody waits for
        self._changed: dict[_Shelf, None] = {}  # since what can move was moved
        self._startable: list[tuple[_Entry, _Shelf]] = []  # a heap; of a shelf the entry counts that is ``queued``
        self._orders = 0
        self._idle: dict[_Member, None] = {}  # those that are ready, the one used longest ago first
        self._recent: deque[_Shelf] = deque()  # of the last episodes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._totals = _Totals()
        self._start_seconds = 0.0  # of all that started
        self._told_short = False
        self._numbers = 0
        self._broken: Exception | None = None
        self._closed = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the first session and begin to warm up; where prompts have templates, that begins with the first prompt.
        Raises ConfigError or RunError when none can be started."""
        await self._backend.open()
        self._spawn("environment pool: health", self._watch())
        if self._template_of is None:
            await self.release(await self._take(EnvironmentTemplate(), lambda _: None), trusted=True)

    async def close(self) -> None:
        """Kill every session; what is being started is stopped. Idempotent."""
        self._closed = True
        for shelf in self._shelves.values():
            shelf.end_pause()
        self._refuse_all(RunError("the environment pool was closed"))
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # done callbacks run on the next tick
        await asyncio.gather(*(self._kill(member) for member in list(self._members.values())))
        self._idle.clear()
        self._shelves.clear()
        await self._backend.close()

    # -- what a user calls -------------------------------------------------------------------------------------------

    async def acquire(self, prompt: Prompt, waiting: Waiting) -> PooledEnvironment:
        """A session for one episode, in order of asking. ``waiting`` is told what it waits for. Raises TrajectoryError where
        there is none for this prompt."""
        template = EnvironmentTemplate()
        if self._template_of is not None:
            try:
                template = self._template_of(prompt)
            except THIRD_PARTY as error:
                if _was_cancelled(error):
                    raise
                raise TrajectoryError(NO_TEMPLATE, f"the task does not say it: {error_text(error)}") from error
            if not (isinstance(template, EnvironmentTemplate) and _is_text(template.image, template.setup)):
                raise TrajectoryError(NO_TEMPLATE, f"no EnvironmentTemplate of texts: {shown(template, 200)}")
        return await self._take(template, waiting)

    async def _take(self, template: EnvironmentTemplate, waiting: Waiting) -> PooledEnvironment:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise RunError("the environment pool was closed")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), waiting, loop.time())
        shelf = self._note_demand(template)
        if not shelf.waiters:
            self._orders += 1
            shelf.number = self._orders
        shelf.waiters.append(waiter)
        self._waiting[shelf] = self._changed[shelf] = None
        waiting(shelf.told)
        self._pump()
        try:
            member = await waiter.member
        except asyncio.CancelledError:
            if waiter.member.done() and not waiter.member.cancelled() and waiter.member.exception() is None:
                self._offer(waiter.member.result())  # it was given one this very moment
            elif waiter in shelf.waiters:
                shelf.waiters.remove(waiter)
                self._changed[shelf] = None
            self._pump()
            raise
        self._totals.wait_seconds += loop.time() - waiter.since
        self._totals.episodes += 1
        assert member.session is not None
        return PooledEnvironment(member, member.session)

    def _note_demand(self, template: EnvironmentTemplate) -> _Shelf:
        shelf = self._shelves.get(template)
        if shelf is None:
            shelf = self._shelves[template] = _Shelf(template)
        shelf.recent += 1
        self._recent.append(shelf)
        if len(self._recent) > RECENT:
            self._recent.popleft().recent -= 1
        return shelf

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
        elif self._owes_its_place(member.shelf):
            self._end_member(member, "template")
        else:
            self._set_state(member, "recycling")
            self._spawn(f"recycle {member.name}", self._call_member(member, "recycle"))
        self._pump()

    def resize(self, size: int) -> None:
        """See the protocol."""
        self._settings = replace(self._settings, size=size)
        while self._idle and self._surplus > 0:
            self._end_idle("size")
        self._pump()

    @property
    def _surplus(self) -> int:
        """Sessions beyond the size, those that end already left out."""
        return len(self._members) - self._count["ending"] - self._settings.size

    def stats(self) -> dict[str, Any]:
        """Now, and since the start."""
        first = min((shelf for shelf in self._waiting if shelf.waiters), key=_Shelf.rank, default=None)
        return {
            "backend": self._backend.name,
            "size": self._settings.size,
            **{state: self._count[state] for state in ("starting", *ALIVE, "ending")},
            "waiting": sum(len(shelf.waiters) for shelf in self._waiting),
            "waiting_for": first.reason() if first is not None else "",
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
        for shelf in list(self._changed):
            checking = shelf.count["checking"]
            while shelf.ready and len(shelf.waiters) > checking:
                member = shelf.ready.pop()
                del self._idle[member]
                if now - member.seen <= FRESH:
                    self._offer(member)
                else:
                    self._check(member)
                    checking += 1
        self._queue_changed()
        short = self._start_waiting(now)
        if short == 0 and self._settings.warm and len(self._members) < self._settings.size:
            for shelf, warm in self._shared_out():
                self._start_missing(shelf, warm, now)
        for _ in range(min(short - self._count["ending"], len(self._idle))):
            self._end_idle("template")
        self._queue_changed()
        for shelf in self._changed:
            if shelf.waiters:
                self._tell(shelf)
        self._changed.clear()

    def _queue_changed(self) -> None:
        """Those that may start something for who waits are queued for that, by who waits longest."""
        for shelf in self._changed:
            if not shelf.waiters:
                self._waiting.pop(shelf, None)
            self._queue(shelf)

    def _queue(self, shelf: _Shelf) -> None:
        """As far as it may start something."""
        if not shelf.waiters or shelf.missing(0) <= 0 or shelf.room(self._settings.parallel_starts) <= 0:
            shelf.queued = None
        elif shelf.queued is None or shelf.queued[:2] != shelf.rank():
            self._orders += 1
            shelf.queued = (*shelf.rank(), self._orders)
            heapq.heappush(self._startable, (shelf.queued, shelf))

    def _next_startable(self) -> _Shelf | None:
        """The first of the queue; it stays there."""
        while self._startable:
            entry, shelf = self._startable[0]
            if shelf.queued == entry:
                return shelf
            heapq.heappop(self._startable)
        return None

    def _unqueue(self) -> None:
        """The first of the queue, which is to be queued again."""
        _, shelf = heapq.heappop(self._startable)
        shelf.queued = None

    def _start_waiting(self, now: float) -> int:
        """Start for those who wait, the longest first; returns how many more would start if the pool had room, as far as anything
        could make room for them."""
        short, tried, parallel = 0, list[_Shelf](), self._settings.parallel_starts
        room_to_come = self._count["ending"] + len(self._idle)
        while self._count["starting"] < parallel and (shelf := self._next_startable()) is not None:
            if len(self._members) >= self._settings.size and short >= room_to_come:
                break
            self._unqueue()
            tried.append(shelf)
            short += self._start_missing(shelf, 0, now)
        for shelf in tried:
            self._queue(shelf)
        return short

    def _start_missing(self, shelf: _Shelf, warm: int, now: float) -> int:
        """Start what a shelf lacks and may start; returns how many more it would start if the pool had room."""
        parallel = self._settings.parallel_starts
        allowed = min(shelf.missing(warm), shelf.room(parallel), parallel - self._count["starting"])
        room = self._settings.size - len(self._members)
        for _ in range(min(allowed, room)):
            self._numbers += 1
            member = _Member(f"{self._settings.owner}-e{self._numbers:05d}", shelf, "starting", now)
            self._members[member.name] = member
            self._count["starting"] += 1
            shelf.count["starting"] += 1
            self._changed[shelf] = None
            self._spawn(f"start {member.name}", self._start(member))
        return max(0, allowed - max(0, room))

    def _shared_out(self) -> list[tuple[_Shelf, int]]:
        """How many of each shelf are kept ready, as they were asked for lately; the rest goes to those asked for most."""
        shelves = sorted(dict.fromkeys(self._recent), key=lambda shelf: -shelf.recent)
        shares = [(shelf, self._settings.warm * shelf.recent // len(self._recent)) for shelf in shelves]
        left = self._settings.warm - sum(share for _, share in shares)
        return [(shelf, share + (place < left)) for place, (shelf, share) in enumerate(shares)]

    def _owes_its_place(self, own: _Shelf) -> bool:
        """Whether somebody waits longer for another template than anybody for this one, and the pool is full."""
        if self._template_of is None or len(self._members) < self._settings.size:
            return False
        self._queue_changed()
        parallel, places, longer = self._settings.parallel_starts, self._count["ending"], list[_Shelf]()
        while places >= 0 and (shelf := self._next_startable()) is not None and shelf.rank() < own.rank():
            self._unqueue()
            longer.append(shelf)
            places -= min(shelf.missing(0), shelf.room(parallel))
        for shelf in longer:
            self._queue(shelf)
        return places < 0

    def _tell(self, shelf: _Shelf) -> None:
        reason = shelf.reason()
        if reason != shelf.told:
            shelf.told = reason
            for waiter in shelf.waiters:
                waiter.tell(reason)

    def _offer(self, member: _Member) -> None:
        """A session is free and in order: to whoever waits longest."""
        shelf = member.shelf
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            if not waiter.member.done():  # else it was cancelled and has not noticed yet
                self._set_state(member, "busy")
                waiter.member.set_result(member)
                return
        self._set_state(member, "ready")
        shelf.ready.append(member)
        self._idle[member] = None

    def _end_idle(self, cause: str) -> None:
        """End the session that nobody used for longest."""
        member = next(iter(self._idle))
        self._take_down(member)
        self._end_member(member, cause)

    def _take_down(self, member: _Member) -> None:
        """It is not ready any more."""
        del self._idle[member]
        member.shelf.ready.remove(member)

    def _check(self, member: _Member) -> None:
        self._set_state(member, "checking")
        self._spawn(f"check {member.name}", self._call_member(member, "ping"))

    def _end_member(self, member: _Member, cause: str) -> None:
        """Kill it; its place is free when it is gone."""
        self._set_state(member, "ending")
        self._totals.replaced[cause] += 1
        self._spawn(f"end {member.name}", self._kill(member))

    def _set_state(self, member: _Member, state: State) -> None:
        for count in (self._count, member.shelf.count):
            count[member.state] -= 1
            count[state] += 1
        member.state = state
        self._changed[member.shelf] = None

    def _forget(self, member: _Member) -> None:
        if self._members.pop(member.name, None) is not None:
            self._count[member.state] -= 1
            member.shelf.count[member.state] -= 1
            self._changed[member.shelf] = None

    # -- what happens to one session, each in a task -----------------------------------------------------------------

    async def _start(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout) as limit:
                member.session = await self._backend.start(member.name, member.shelf.template)
        except THIRD_PARTY as error:  # whatever it was, the next try may work
            self._forget(member)
            if _was_cancelled(error):
                raise
            detail = error_text(error)
            if isinstance(error, TimeoutError) and limit.expired():
                so_far = f"; {error.__cause__}" if str(error.__cause__ or "") else ""  # what a backend said of it
                detail = f"took over {self._settings.start_timeout:g} s{so_far}"
            self._start_failed(member, detail, error)
            return
        self._totals.started += 1
        self._note_start(loop.time() - member.born)
        member.born = member.seen = member.used = loop.time()
        shelf = member.shelf
        if shelf.failures:
            self._events.emit("recovered", what="environment start", detail=f"after {shelf.failures} failures")
            shelf.failures = shelf.refusals = 0
            shelf.end_pause()
        self._offer(member)
        self._pump()

    def _note_start(self, seconds: float) -> None:
        """Say, once, where sessions grow old before all can be there."""
        settings, started = self._settings, self._totals.started
        self._start_seconds += seconds
        each = self._start_seconds / started
        if self._told_short or started < STARTS or each * settings.size <= settings.parallel_starts * settings.max_age:
            return
        self._told_short = True
        most = int(settings.parallel_starts * settings.max_age / each)
        starts = f"{settings.parallel_starts} start at a time, in {each:.1f} s, and each is replaced after {settings.max_age:g} s"
        fix = "raise environment.parallel_starts, or environment.max_age_seconds"
        detail = f"{starts}: no more than {most} of {settings.size} will ever be there; {fix}"
        self._events.emit("alarm", what="environments", detail=detail)

    def _start_failed(self, member: _Member, what: str, error: BaseException) -> None:
        settings, shelf, alike = self._settings, member.shelf, self._template_of is None
        self._totals.start_failures += 1
        self._record_replacement("environment_start", f"{member.name}{_named(shelf.template)}: {what}")
        if shelf.paused:  # it was begun together with one that failed before it: one failure, not two
            return
        shelf.failures += 1
        shelf.refusals = shelf.refusals + 1 if isinstance(error, ConfigError) else 0
        most = min(REFUSALS, settings.start_tries)
        if isinstance(error, ConfigError) and alike and shelf.refusals >= most and not self._totals.started:
            self._break(error)
            return
        hopeless = not alike and (isinstance(error, ConfigError) or getattr(error, "cause", "") == NO_TEMPLATE)
        if (hopeless or shelf.failures >= settings.start_tries) and not any(shelf.count[state] for state in ALIVE):
            times = f"{shelf.failures} times in a row"
            if alike:
                self._break(RunError(f"no environment can be started ({self._backend.name}), failed {times}: {what}"))
                return
            cause = NO_TEMPLATE if hopeless else "environment_start"
            self._refuse(
                shelf, TrajectoryError(cause, f"none can be started{_named(shelf.template)}, failed {times}: {what}")
            )
        pause = min(settings.backoff_first * 2.0 ** min(shelf.failures - 1, 30), settings.backoff_limit)
        shelf.paused = True
        seconds = pause * self._random.uniform(0.5, 1.0)
        shelf.pause = asyncio.get_running_loop().call_later(seconds, self._try_again, shelf)
        self._pump()  # tells those who wait

    def _try_again(self, shelf: _Shelf) -> None:
        shelf.end_pause()
        self._changed[shelf] = None
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
            kept = dict(self._shared_out())
            spare = {shelf: len(shelf.ready) - kept.get(shelf, 0) for shelf in self._shelves.values()}
            for member in list(self._idle):
                if now - member.born >= settings.max_age:
                    self._take_down(member)
                    self._end_member(member, "age")
                elif spare[member.shelf] > 0 and now - member.used >= settings.idle:
                    self._take_down(member)
                    self._end_member(member, "idle")
                    spare[member.shelf] -= 1
                elif now - member.seen >= settings.ping_every:
                    self._take_down(member)
                    self._check(member)
            for shelf in list(self._shelves.values()):  # of prompts that are not asked for any more
                if not (shelf.recent or shelf.waiters or shelf.paused or any(shelf.count.values())):
                    del self._shelves[shelf.template]
            self._pump()

    # -- when something goes wrong -----------------------------------------------------------------------------------

    def _record_replacement(self, cause: str, detail: str) -> None:
        self._events.emit("fault", what=cause.replace("_", " "), cause=cause, detail=detail[:DETAIL])

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            self._broken = error
        self._refuse_all(self._broken)

    def _refuse_all(self, error: Exception) -> None:
        for shelf in self._waiting:
            self._refuse(shelf, error)

    def _refuse(self, shelf: _Shelf, error: Exception) -> None:
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            if not waiter.member.done():
                waiter.member.set_exception(error)
        self._changed[shelf] = None

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


def _is_text(*parts: object) -> bool:
    return all(isinstance(part, str) for part in parts)


def _named(template: EnvironmentTemplate) -> str:
    """Which one it is, for people; nothing where there is only one."""
    found = " ".join(part for part in (template.image, template.setup) if part)
    return f" from {found[:DETAIL]}" if found else ""
