"""What :mod:`orchestrator.proxy.gateway` keeps of each worker and each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api import (
    BorrowedWorker,
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    ManagedWorker,
    ReleaseResult,
    ReleasingWorker,
    ResizableWorker,
    RetryableError,
    RunError,
    SessionWorker,
    UpdateResult,
)
from orchestrator.config.rollout_keys import RolloutSection
from orchestrator.events import EventLog
from orchestrator.policies.routing.turn_routing import TurnRouter

LOST = (RetryableError, CommandError, ConfigError)  # brought up anew; ConfigError: no worker of ours answers there
STORE_AWAY = "metadata_unreachable"  # the reason in a RelayError, however many processes it came through
RELAY_EMPTY = "the relay lost its memory"  # of a version that was published; the same
MOST_REFUSED = 8  # groups in a row whose requests a worker may refuse: then it is the worker
_ASK_AGAIN = 1.0  # seconds
REST = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Seconds, each for one thing. ``stall``: without progress, and for a command that needs no more than an engine's step;
    ``first_token``: without progress after a time without work; ``prepare``, ``update``: to fetch, to load a version;
    ``restart``: to come up again; ``window``: in which restarts are counted;
    ``pause``: after the first restart in a row that failed."""

    stall: float
    first_token: float = 300.0
    prepare: float = 600.0
    update: float = 600.0
    restart: float = 1800.0
    window: float = 3600.0
    pause: float = 0.0

    @classmethod
    def of(cls, settings: RolloutSection) -> WorkerLimits:
        """As the config has them."""
        return cls(
            settings.stall_timeout,
            settings.first_token_timeout,
            settings.prepare_timeout,
            settings.update_timeout,
            settings.restart_timeout,
            settings.restart_window,
            settings.restart_pause,
        )


@dataclass(slots=True)
class Pending:
    """A request that has no completion yet. ``worker`` is None while it waits for one. ``parts``: what workers that gave
    it up had said; ``moves``: how often it was moved; ``sent_as``: its id in the worker; ``sent_version``: the version that
    the worker had when it was sent first; ``stale``: it was called back, and this says whether it ends."""

    request: GenerationRequest
    answer: asyncio.Future[Completion]
    worker: WorkerState | None = None
    parts: list[Completion] = field(default_factory=list)
    moves: int = 0
    sent_as: str = ""
    sent_version: int = -1
    stale: Callable[[int], bool] | None = None

    @property
    def begun_version(self) -> int:
        """Of the weights that its first token is of; no younger than that while it is not known."""
        return self.parts[0].versions[0][0] if self.parts else self.sent_version


@dataclass(frozen=True, slots=True)
class DeviceLoan:
    """How a worker was lent or taken back. ``error`` empty: it was. ``moved``: requests that went on elsewhere;
    ``update``: what it loaded when it was taken back."""

    name: str
    error: str
    seconds: float
    moved: int = 0
    released: ReleaseResult | None = None
    update: UpdateResult | None = None


@dataclass(eq=False, slots=True)
class WorkerState:
    """One worker and what was sent to it."""

    worker: ManagedWorker
    index: int
    alive: bool = True
    removed: bool = False
    parked: bool = False  # it was given back, and is another's, or nobody's
    away: bool = False  # its machine is gone, and it waits for it
    full: bool = False  # its device has no memory for requests of ours
    lent: bool = False  # its device belongs to the trainer, or is about to
    stuck: str = ""  # it did not answer when it was to be lent: it is restarted when its device is taken back
    loading: bool = False  # it takes weights up by itself, beside the others
    moving: bool = False  # what it aborts goes on elsewhere
    version: int = -1  # of its weights; -1: none that we know of
    failed: str = ""  # why it was lost last
    restarts: list[float] = field(default_factory=list)  # when; of a borrowed worker: since it last finished a request
    lives: int = 0  # changes whenever the worker is brought up anew, also in vain
    refused: dict[str, None] = field(default_factory=dict)  # groups of requests that it refused since it took one
    halved: int = 0  # calls that it refused whole and got in parts, not told yet
    halved_told: float = float("-inf")  # when they were
    outbox: list[GenerationRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    sent: dict[str, Pending] = field(default_factory=dict)
    last_progress: float = 0.0
    answers: bool = False  # it has computed something since it had no work
    # seconds that it had said nothing when a request was last aborted: a hang outlasts who waits
    unanswered: float = 0.0
    pump: asyncio.Task[None] | None = None
    sender: asyncio.Task[None] | None = None
    reviver: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    borrowed: bool = field(init=False)  # asked once: for a protocol the question costs more than a completion
    session: SessionWorker | None = field(init=False)  # the worker, where it remembers contexts

    def __post_init__(self) -> None:
        self.have_worker(self.worker)

    def have_worker(self, worker: ManagedWorker) -> None:
        """This one has its place from now on."""
        self.worker, self.borrowed = worker, isinstance(worker, BorrowedWorker)
        self.session = worker if isinstance(worker, SessionWorker) else None

    @property
    def without_device(self) -> bool:
        """Whether another engine runs over its device: it has no process (:mod:`orchestrator.proxy.resize`)."""
        return isinstance(self.worker, ResizableWorker) and not self.worker.ranks

    @property
    def usable(self) -> bool:
        """Whether it may be given requests and commands."""
        return self.alive and not self.lent

    @property
    def takes(self) -> bool:
        """Whether it may be given requests now: its device has memory for them."""
        return self.usable and not self.full

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """That serve it."""
        return [task for task in (self.pump, self.sender, self.reviver) if task is not None]

    def note_progress(self, now: float) -> None:
        """It has computed something."""
        self.last_progress, self.unanswered, self.answers = now, 0.0, True

    def restarts_since(self, moment: float) -> int:
        """That count against the limit; those before are forgotten."""
        self.restarts = [when for when in self.restarts if when > moment]
        return len(self.restarts)

    async def update(self, version: int) -> UpdateResult:
        """Load ``version`` into its worker, which is suspended; a borrowed one is not, and stops here, for its users' sake no
        longer than it loads what it has fetched. While the metadata store is away the worker is asked again, until the caller's
        time is up: nothing is wrong with the worker. Raises what the commands raise."""
        while True:
            try:
                if self.borrowed:
                    await self.worker.prepare(version)
                    await self.worker.suspend()
                result = await self.worker.update(version)
                if self.borrowed:
                    await self.worker.resume()
            except RetryableError as error:
                if STORE_AWAY not in str(error):
                    raise
            else:
                self.version = version
                return result
            if self.borrowed:
                await self.worker.resume()
            await asyncio.sleep(_ASK_AGAIN)

    async def load(self, version: int) -> UpdateResult | None:
        """Bring its worker to ``version``, with its memory where that was lent, and let it run; returns what was loaded.
        Raises what the worker's commands raise."""
        result, self.loading = None, True
        try:
            if not self.borrowed:
                await self.worker.suspend()
            if self.lent and isinstance(self.worker, ReleasingWorker):
                await self.worker.reclaim()
            if self.version != version:
                result = await self.update(version)
            await self.worker.resume()
        finally:
            self.loading = False
        return result

    def give_up(self) -> list[Pending]:
        """Its worker is gone: stop serving it, and return what it had."""
        for task in (self.pump, self.sender):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        had = list(self.sent.values())
        self.sent.clear()
        self.emptied.set()
        self.outbox.clear()
        self.aborts.clear()
        self.refused.clear()
        return had


class HandBacks:
    """What borrowed workers handed back by themselves: one event ``handed_back`` a worker for all that came at once."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._counts: dict[str, list[int]] = {}  # worker -> requests, tokens, not told yet

    def note_request(self, worker: str, tokens: int) -> None:
        """A request came back with so many tokens."""
        if not self._counts:
            asyncio.get_running_loop().call_soon(self._tell)
        counts = self._counts.setdefault(worker, [0, 0])
        counts[0] += 1
        counts[1] += tokens

    def _tell(self) -> None:
        told, self._counts = self._counts, {}
        for name, (requests, tokens) in told.items():
            self._events.emit("handed_back", worker=name, requests=requests, tokens=tokens)


async def failure_of(call: Awaitable[object], seconds: float, silence: str) -> str:
    """Why a worker's command failed, in words; "": it did not. ``silence``: there was no answer within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await call
    except LOST as error:
        return str(error) or type(error).__name__
    except TimeoutError:
        return silence
    return ""


def spawn_task(work: Coroutine[Any, Any, None], name: str, on_fatal: Callable[[RunError], None]) -> asyncio.Task[None]:
    """A task that serves workers. One that ends by what nobody foresaw ends the run: requests would wait for it for ever."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_fatal(RunError(f"{name} failed: {error!r}"))

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


def rest_from(
    state: WorkerState,
    states: Sequence[WorkerState],
    router: TurnRouter,
    seat: Callable[[WorkerState], None],
    dispatch: Callable[[], None],
) -> None:
    """A worker gave a request back, because it has no room or no time: while another is up it gets none for ``REST`` seconds."""

    def reopen() -> None:
        seat(state)
        dispatch()

    if any(other.usable for other in states if other is not state):
        router.close_worker(state.index)
        asyncio.get_running_loop().call_later(REST, reopen)


def others_live(states: Sequence[WorkerState], state: WorkerState) -> bool:
    """Whether a worker beside this one is up, or is being restarted by us."""
    others = (other for other in states if other is not state)
    return any(other.alive or not (other.removed or other.parked or other.borrowed or other.away) for other in others)


def waiting_reason(states: Sequence[WorkerState], suspended: bool, preparing: int) -> str:
    """What generation waits for, "" when nothing is unusual. ``preparing``: the version that workers fetch, -1: none."""
    reviving = [state.worker.name for state in states if not (state.alive or state.removed or state.parked)]
    if reviving:
        return f"worker {', '.join(reviving)} to come back"
    if suspended:
        return "weight update"
    if all(state.parked or state.removed for state in states):
        return "a server to borrow"
    if all(state.lent for state in states):
        return "the trainer, which has the devices"
    return f"weights of version {preparing} to reach the workers" if preparing >= 0 else ""


def device_count(state: WorkerState) -> int:
    """Devices of an own worker's engine; 0: others have its device."""
    return state.worker.ranks if isinstance(state.worker, ResizableWorker) else 1
