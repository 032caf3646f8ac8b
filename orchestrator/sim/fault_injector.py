"""Seeded faults at the ports: crash, delay, drop, duplicate, cancel.

At each call of a port the :class:`FaultInjector` draws, with probability ``sim.fault_rate``, one of ``sim.faults``; what a
kind means depends on the port:

| kind      | worker                        | trainer          | environment                        | reward             |
| crash     | dies, its requests are lost;  | dies             | raises                             | raises             |
|           | in an update, or its weights  |                  |                                    |                    |
|           | are spoilt                    |                  |                                    |                    |
| delay     | answers late                  | answers late     | answers late, maybe past its limit | answers late       |
| drop      | acts or not, never answers    | a feed is lost   | hangs                              | hangs              |
| duplicate | command or completion twice   | publishes or is  | answers garbage (NaN, too long...) | NaN or infinite    |
|           |                               | fed twice        |                                    |                    |
| cancel    |                               |                  | the trajectory's task is cancelled at a later await        |
| evict     | forgets contexts that it had  |                  |                                    |                    |
| damage    | turns are damaged on the way  |                  |                                    |                    |

The host of tools is one more place: gone, slow, silent, or called twice. One more kind, ``lose``, is of shards alone: a scored
trajectory's is gone when a batch takes it, or while the batch is collected (:class:`FaultyShards`). And one, ``kill``, is of the
shards of environment managers, where there are any (:mod:`orchestrator.sim.simulated_shards`).

Each injected fault is an event ``injected`` (what, where, virtual time) and counted. One stream of draws, in the order of
calls: the loop makes that order a function of the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from orchestrator.api import (
    CollectiveTrainer,
    CollectiveWorker,
    Completion,
    Environment,
    GenerationRequest,
    HoldingTrainer,
    KvWorker,
    ManagedWorker,
    Observation,
    Prompt,
    RetryableError,
    RewardFunction,
    RolloutWorker,
    StepResult,
    Task,
    Trainer,
    TrainSample,
    Trajectory,
    TrajectoryError,
    UpdateResult,
)
from orchestrator.components import InMemory
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker
from orchestrator.sim.resizable_worker import ResizableSimWorker
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_worker import SimWorker
from orchestrator.sim.twins import SimTrainer, ToolHost

T = TypeVar("T")
Given = ParamSpec("Given")

CALL = ("crash", "delay", "drop", "duplicate")
EPISODE = ("crash", "delay", "drop", "duplicate", "cancel")
# A hung trainer is not injected: no caller limits the time of a training step, so nothing would ever end the wait.
TRAINER = ("crash", "delay")
PUBLISH = ("crash", "delay", "duplicate")
FEED = ("crash", "delay", "drop", "duplicate")
TURNS = (*CALL, "evict", "damage")
NO_TWICE = ("crash", "delay", "drop")
TRAJECTORY_TASK = "trajectory "  # how the names of the tasks begin that `cancel` may hit


class InjectedError(Exception):
    """What third-party code raised: an environment's own exception, not one of ours."""


class FaultInjector:
    """Draws and counts. ``counts`` maps ``kind where`` to how often it was injected."""

    def __init__(self, config: Config, events: EventLog, life: int, counts: dict[str, int]) -> None:
        self._rate = config.sim.fault_rate
        self._kinds = config.sim.faults
        self._events = events
        self._limit = config.rollout.environment_step_timeout
        self.rng = random_stream(config.run.seed, "faults", life)
        self.counts = counts

    def draw_fault(self, where: str, possible: Sequence[str]) -> str:
        """The fault for this call, "" for none."""
        if self._rate <= 0 or self.rng.random() >= self._rate:
            return ""
        kinds = [kind for kind in self._kinds if kind in possible]
        if not kinds:
            return ""
        kind = self.rng.choice(kinds)
        self.record_fault(kind, where)
        return kind

    def record_fault(self, kind: str, where: str) -> None:
        """Log and count an injected fault."""
        name = f"{kind} {where}"
        self.counts[name] = self.counts.get(name, 0) + 1
        self._events.emit("injected", what=kind, where=where)

    def delay_seconds(self) -> float:
        """How long a delay is: mostly short, sometimes past the time limit of an environment's step."""
        return float(min(self.rng.expovariate(2.0 / self._limit), 4 * self._limit))

    async def delay_call(self) -> None:
        """A delay."""
        await asyncio.sleep(self.delay_seconds())

    async def lose_answer(self) -> Any:
        """A call whose answer is lost."""
        await asyncio.get_running_loop().create_future()

    async def strike(self, where: str, possible: Sequence[str], *errors: Exception) -> str:
        """Before a call whose callee keeps no life: draw a fault and let it strike. A crash raises one of ``errors``. Returns the
        kind, for a duplicate to be made of the answer."""
        kind = self.draw_fault(where, possible)
        if kind == "crash":
            raise self.rng.choice(errors) if len(errors) > 1 else errors[0]
        if kind == "drop":
            await self.lose_answer()
        if kind == "delay":
            await self.delay_call()
        if kind == "cancel":
            self.cancel_later()
        return kind

    def cancel_later(self) -> None:
        """Cancel the trajectory that makes this call, at whatever it awaits a moment later."""
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith(TRAJECTORY_TASK):
            delay = self.rng.choice((0.0, self.rng.expovariate(1.0)))
            asyncio.get_running_loop().call_later(delay, task.cancel)

    async def call_port(
        self,
        where: str,
        possible: Sequence[str],
        act: Callable[[], Awaitable[T]],
        crash: Callable[[], None],
        life: Callable[[], int],
    ) -> T:
        """One call of a port that may fail. A crash or a drop strikes before or after the callee has acted. ``life`` is
        the callee's incarnation: what was on its way to one that has died meanwhile never reaches the next."""
        return await self.inject_fault(self.draw_fault(where, possible), where, act, crash, life)

    async def inject_fault(
        self,
        kind: str,
        where: str,
        act: Callable[[], Awaitable[T]],
        crash: Callable[[], None],
        life: Callable[[], int],
    ) -> T:
        """:meth:`call_port` with the fault drawn already."""
        first = bool(kind) and self.rng.random() < 0.5
        if kind == "crash":
            if first:
                await act()
            crash()
            raise RetryableError(f"injected crash in {where}")
        if kind == "drop":
            if first:
                await act()
            await self.lose_answer()
        addressee = life()
        if kind == "delay" and first:
            await self.delay_call()
            _same(addressee, life(), where)
        answer = await act()
        if kind == "duplicate":
            answer = await act()
        if kind == "delay" and not first:
            await self.delay_call()
            _same(addressee, life(), where)
        return answer


def _same(before: int, now: int, where: str) -> None:
    if before != now:
        raise RetryableError(f"{where}: the process died while the call was on its way")


def _struck(
    declared: Callable[Concatenate[Any, Given], Awaitable[T]], possible: Sequence[str] = CALL
) -> Callable[Concatenate[Any, Given], Coroutine[Any, Any, T]]:
    """A method of a port, asked of what is inside, by ``_call``: a fault may strike it."""
    name = declared.__name__

    async def method(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> T:
        answer: T = await self._call(name, lambda: getattr(self._inner, name)(*args, **kwargs), possible)
        return answer

    return method


class FaultyWorker:
    """A ManagedWorker around a :class:`SimWorker`."""

    def __init__(self, inner: SimWorker, faults: FaultInjector) -> None:
        self.name = inner.name
        self.hardware = inner.hardware
        self._inner = inner
        self._faults = faults
        self._delivered: list[Completion] = []

    @property
    def ranks(self) -> int:
        """Devices that it has."""
        return self._inner.ranks

    @ranks.setter
    def ranks(self, ranks: int) -> None:
        self._inner.ranks = ranks

    async def _call(
        self,
        name: str,
        act: Callable[[], Awaitable[T]],
        possible: Sequence[str] = CALL,
        crash: Callable[[], None] | None = None,
    ) -> T:
        inner = self._inner
        return await self._faults.call_port(
            f"worker.{name}", possible, act, crash or inner.die, lambda: inner.incarnation
        )

    abort = _struck(RolloutWorker.abort)
    prioritize = _struck(RolloutWorker.prioritize)
    suspend = _struck(RolloutWorker.suspend)
    prepare = _struck(RolloutWorker.prepare)
    receive = _struck(CollectiveWorker.receive)
    kv_place = _struck(KvWorker.kv_place)
    fetch_kv = _struck(KvWorker.fetch_kv)
    resume = _struck(RolloutWorker.resume)
    stats = _struck(RolloutWorker.stats, NO_TWICE)

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the protocol."""
        faults, inner = self._faults, self._inner
        kind = faults.draw_fault("worker.add", TURNS)
        if kind == "evict":
            held = inner.held.trajectories()
            for trajectory in held if faults.rng.random() < 0.5 else held[::2]:
                inner.held.forget(trajectory)
        if kind == "damage":
            inner.damaged = faults.rng.randrange(1 << 16)
        await faults.inject_fault(kind, "worker.add", lambda: inner.add(requests), inner.die, lambda: inner.incarnation)

    def forget(self, trajectory_id: str) -> None:
        """See :class:`orchestrator.api.SessionWorker`."""
        self._inner.forget(trajectory_id)

    def take_resent(self) -> tuple[int, int]:
        """See :class:`orchestrator.api.SessionWorker`."""
        return self._inner.take_resent()

    async def completions(self) -> list[Completion]:
        """See the protocol. A duplicate delivers an earlier completion again, beside the new ones."""
        kind = self._faults.draw_fault("worker.completions", CALL)
        if kind == "crash":
            asyncio.get_running_loop().call_later(self._faults.delay_seconds(), self._inner.die)
        addressee = self._inner.incarnation
        answer = await self._inner.completions()
        if kind == "drop":
            await self._faults.lose_answer()
        if kind == "delay":
            await self._faults.delay_call()
            _same(addressee, self._inner.incarnation, "worker.completions")
        if kind == "duplicate":
            again = self._faults.rng.choice([*self._delivered, *answer])
            answer = [again, *answer] if self._faults.rng.random() < 0.5 else [*answer, again]
        self._delivered = answer
        return answer

    async def update(self, version: int) -> UpdateResult:
        """See the protocol. A crash kills the worker, or leaves it with half-loaded weights."""

        def crash() -> None:
            if self._faults.rng.random() < 0.5:
                self._inner.die()
            else:
                self._inner.spoil_weights()

        return await self._call("update", lambda: self._inner.update(version), crash=crash)

    async def restart(self) -> None:
        self._delivered = []
        faults, inner = self._faults, self._inner
        # a restart is no call of a life
        await faults.call_port("worker.restart", NO_TWICE, inner.restart, inner.die, lambda: 0)

    async def close(self) -> None:
        await self._inner.close()


class FaultyResizableWorker(FaultyWorker):
    """A ResizableWorker around another one. Ending a process does not fail, as nothing limits its time; starting it does."""

    def __init__(self, inner: ResizableSimWorker, faults: FaultInjector) -> None:
        super().__init__(inner, faults)
        self._resizable = inner

    @property
    def expert_ranks(self) -> int:
        """Devices that whole experts are shared out over."""
        return self._resizable.expert_ranks

    @expert_ranks.setter
    def expert_ranks(self, ranks: int) -> None:
        self._resizable.expert_ranks = ranks

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        await self._resizable.resize(ranks, expert_ranks)


class FaultyBorrowedWorker(FaultyWorker):
    """A BorrowedWorker around another one: it takes weights from the relay alone."""

    receive = None  # type: ignore[assignment]

    def __init__(self, inner: BorrowedSimWorker, faults: FaultInjector) -> None:
        super().__init__(inner, faults)
        self.url = inner.url


def faulty_workers(workers: Sequence[SimWorker], faults: FaultInjector) -> list[ManagedWorker]:
    """The workers, each behind its faults."""
    return [_behind(worker, faults) for worker in workers]


def _behind(worker: SimWorker, faults: FaultInjector) -> ManagedWorker:
    if isinstance(worker, ResizableSimWorker):
        return FaultyResizableWorker(worker, faults)
    if isinstance(worker, BorrowedSimWorker):
        return FaultyBorrowedWorker(worker, faults)
    return FaultyWorker(worker, faults)


class FaultyTrainer:
    """A Trainer around a :class:`SimTrainer`."""

    def __init__(self, inner: SimTrainer, faults: FaultInjector) -> None:
        self._inner = inner
        self._faults = faults

    async def _call(self, name: str, act: Callable[[], Awaitable[T]], possible: Sequence[str]) -> T:
        return await self._faults.call_port(f"trainer.{name}", possible, act, self._inner.die, lambda: 0)

    train_step = _struck(Trainer.train_step, TRAINER)
    publish = _struck(Trainer.publish, PUBLISH)
    hold = _struck(HoldingTrainer.hold, TRAINER)
    publish_held = _struck(HoldingTrainer.publish_held, PUBLISH)
    send = _struck(CollectiveTrainer.send, TRAINER)
    save = _struck(Trainer.save, TRAINER)

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the protocol. A dropped feed is answered and lost: it was a hint."""
        kind = self._faults.draw_fault("trainer.feed", FEED)
        if kind == "drop":
            return

        async def act() -> None:
            await self._inner.feed(samples, version)

        await self._faults.inject_fault(kind, "trainer.feed", act, self._inner.die, lambda: 0)

    async def saved(self) -> None:
        await self._inner.saved()

    async def load(self, folder: str) -> int:
        return await self._inner.load(folder)

    async def close(self) -> None:
        await self._inner.close()


class FaultyTask:
    """A Task whose environments fail."""

    def __init__(self, inner: Task, faults: FaultInjector) -> None:
        self._inner = inner
        self._faults = faults
        self.name = inner.name
        self.vocabulary = inner.vocabulary
        self.pad_id = inner.pad_id
        self.end_id = inner.end_id
        self.max_turns = inner.max_turns
        self.max_response_tokens = inner.max_response_tokens
        self.max_context_tokens = inner.max_context_tokens
        if hasattr(inner, "environment_template"):
            self.environment_template = inner.environment_template

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        return self._inner.prompts(split, seed)

    def environment(self) -> Environment:
        if self._faults.draw_fault("environment.create", ("crash",)):
            raise InjectedError("injected: the environment did not start")
        return FaultyEnvironment(self._inner.environment(), self._faults, self.max_context_tokens)


class FaultyEnvironment:
    """An Environment around another one."""

    def __init__(self, inner: Environment, faults: FaultInjector, context: int) -> None:
        self.version = inner.version
        self._inner = inner
        self._faults = faults
        self._context = context

    async def prepare(self, setup: str) -> None:
        await self._strike("environment.prepare")
        await self._inner.prepare(setup)  # type: ignore[attr-defined]  # a simulated one

    async def reset(self, prompt: Prompt) -> Observation:
        kind = await self._strike("environment.reset")
        observation = await self._inner.reset(prompt)
        return self._garbage_observation(observation) if kind == "duplicate" else observation

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        kind = await self._strike("environment.step")
        result = await self._inner.step(action_ids)
        if kind != "duplicate":
            return result
        garbage: list[Any] = [
            StepResult(result.observation, float("nan"), result.done),
            StepResult(result.observation, float("-inf"), result.done),
            StepResult(self._garbage_observation(result.observation), result.reward, False),
            None,
        ]
        answer: StepResult = self._faults.rng.choice(garbage)
        return answer

    async def close(self) -> None:
        """See the protocol. An injected fault comes after the real end: only the caller can leave one open."""
        kind = self._faults.draw_fault("environment.close", NO_TWICE)
        await self._inner.close()
        if kind == "delay":
            await self._faults.delay_call()
        if kind == "crash":
            raise InjectedError("injected: close failed")
        if kind == "drop":
            await self._faults.lose_answer()

    async def _strike(self, where: str) -> str:
        said = f"injected in {where}"
        errors = InjectedError(said), TimeoutError(said), TrajectoryError("injected", where)
        return await self._faults.strike(where, EPISODE, *errors)

    def _garbage_observation(self, honest: Observation) -> Observation:
        """Text that is empty, not of the vocabulary, as long as the context, longer, or just so that little room is left."""
        rng = self._faults.rng
        sizes = (0, self._context - 1, self._context, self._context + 1, 4 * self._context)
        tokens: tuple[Any, ...] = rng.choice(
            [(2,) * rng.choice(sizes), (-1,), (1 << 20,), ("text",), (*honest.token_ids, 2.5)]
        )
        return Observation(tokens)


class FaultyTools:
    """The tools' host around another one: it is gone (crash), slow (delay), never answers (drop), or runs a call twice."""

    def __init__(self, inner: ToolHost, faults: FaultInjector) -> None:
        self._inner = inner
        self._faults = faults

    async def call(self) -> None:
        kind = await self._faults.strike("tool.call", CALL, TrajectoryError("tool_unavailable", "injected"))
        await self._inner.call()
        if kind == "duplicate":
            await self._inner.call()


class FaultyShards(InMemory):
    """Shards of which some are lost; they stay in memory. Its draws are its own: the other faults of a run stay as they are."""

    def __init__(self, config: Config, faults: FaultInjector, life: int) -> None:
        self._rate = config.sim.fault_rate
        self._faults = faults
        self._rng = random_stream(config.run.seed, "faults", "shards", life)

    def lost(self, trajectories: Iterable[Trajectory]) -> list[str]:
        """See :class:`orchestrator.components.Shards`."""
        found = [trajectory.id for trajectory in trajectories if self._rng.random() < self._rate]
        for _ in found:
            self._faults.record_fault("lose", "shard")
        return found


class FaultyReward:
    """A RewardFunction around another one."""

    def __init__(self, inner: RewardFunction, faults: FaultInjector) -> None:
        self._inner = inner
        self._faults = faults

    async def score(self, trajectory: Trajectory) -> float:
        errors = RetryableError("injected"), TrajectoryError("injected_reward", "")
        kind = await self._faults.strike("reward.score", EPISODE, *errors)
        score = await self._inner.score(trajectory)
        return self._faults.rng.choice((float("nan"), float("inf"))) if kind == "duplicate" else score
